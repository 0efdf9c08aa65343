"""Training of the joint reward model on preference pairs, with the weights of the best validation loss kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mlrl.parallel.engine import Engine
from mlrl.parallel.headed import HeadedEngine
from mlrl.preference.dropout import adapter_dropout
from mlrl.preference.joint_text import JointInput, read_pair, stand_in_batch
from mlrl.preference.pairs import PreferencePair
from mlrl.preference.reward_model import Normalization, RewardModel, fit_normalization
from mlrl.rollout.streams import derive_seed, uniforms

ReadPair = tuple[list[JointInput], list[JointInput]]  # the winner's turns, the loser's


@dataclass(frozen=True)
class FitSettings:
    """How long and in which portions; the optimizer is the engine's.

    Attributes:
        batch_size: pairs an update. micro_batch_tokens: tokens of a forward pass, which change no result.
        validation_fraction: of the items. label_smoothing: assumed share of wrong preferences.
    """

    num_epochs: int = 1
    batch_size: int = 16
    micro_batch_tokens: int = 4096
    validation_fraction: float = 0.1
    label_smoothing: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class PairScores:
    """Mean Bradley–Terry loss and accuracy over pairs (equal scores are wrong), None without pairs."""

    loss: float | None
    accuracy: float | None
    num_pairs: int


@dataclass(frozen=True)
class FitReport:
    """What came of it.

    Attributes:
        train, validation: of the kept weights. best_epoch: their epoch, from 1. epochs: validation of every epoch.
        skipped: updates that were left out for a NaN or infinite gradient.
    """

    train: PairScores
    validation: PairScores
    best_epoch: int
    epochs: list[PairScores]
    skipped: int
    normalization: Normalization


def fit(
    model: RewardModel,
    engine: Engine | HeadedEngine,
    pairs: Sequence[PreferencePair],
    settings: FitSettings,
    on_epoch: Callable[[int, PairScores], None] | None = None,
) -> FitReport:
    """Trains the model and fits its normalization; without validation items the last epoch is kept.

    All ranks that hold the model call it with the same pairs, and get the same report.

    Args:
        engine: of `model.parameters`, over the model's ranks. It starts at the weights as they are, and ends as new.
        on_epoch: hears of every epoch and its validation.
    """
    read = [read_pair(model.reader, pair) for pair in pairs]
    training, validation = split_by_item([pair.item_key for pair in pairs], settings.seed, settings.validation_fraction)
    engine.load_state("master", model.whole_state())  # which may be those of an earlier epoch, or of a checkpoint
    best, best_epoch, epochs, skipped = None, settings.num_epochs, [], 0
    for epoch in range(1, settings.num_epochs + 1):
        order = np.random.default_rng(derive_seed(settings.seed, "reward_model", epoch)).permutation(training).tolist()
        for start in range(0, len(order), settings.batch_size):
            chosen = [read[place] for place in order[start : start + settings.batch_size]]
            seed = derive_seed(settings.seed, "reward_dropout", epoch, start, model.group.rank) % 2**63
            skipped += not _update(model, engine, chosen, settings, seed)
        epochs.append(score_pairs(model, [read[place] for place in validation], settings.micro_batch_tokens))
        if on_epoch is not None:
            on_epoch(epoch, epochs[-1])
        loss = epochs[-1].loss
        if loss is not None and (best is None or loss < best[0]):
            best, best_epoch = (loss, model.state()), epoch
    engine.load_state("step", (torch.zeros([]) for _ in engine.parameters))  # gives the optimizer's moments up
    engine.updates = 0
    if best is not None and best_epoch != settings.num_epochs:
        model.load_state(best[1])
    seen = [read[place] for place in training]
    scores = model.score_texts(_texts(seen), settings.micro_batch_tokens)
    model.normalization = fit_normalization([key for place in training for key in _turns(pairs[place])], scores)
    return FitReport(
        train=_rate(model, seen, scores),
        validation=epochs[best_epoch - 1],
        best_epoch=best_epoch,
        epochs=epochs,
        skipped=skipped,
        normalization=model.normalization,
    )


def split_by_item(item_keys: Sequence[str], seed: int, fraction: float) -> tuple[list[int], list[int]]:
    """(training, validation) places: all pairs of an item on one side, the same side in every round and run.

    An item is for validation where its number in [0, 1), drawn from the seed and its key, is below `fraction`; where
    that leaves one side without any of several items, the nearest one changes sides. A single item is for training.
    """
    numbers = {key: float(uniforms((seed, "validation", key), 1)[0]) for key in item_keys}
    held = {key for key, number in numbers.items() if number < fraction}
    if fraction > 0 and len(numbers) > 1:
        if not held:
            held = {min(numbers, key=numbers.__getitem__)}
        elif len(held) == len(numbers):
            held.remove(max(numbers, key=numbers.__getitem__))
    elif len(numbers) == 1:
        held = set()
    places = range(len(item_keys))
    return [p for p in places if item_keys[p] not in held], [p for p in places if item_keys[p] in held]


def score_pairs(model: RewardModel, read: Sequence[ReadPair], max_tokens: int) -> PairScores:
    """Loss and accuracy without any training."""
    return _rate(model, read, model.score_texts(_texts(read), max_tokens) if read else [])


def _rate(model: RewardModel, read: Sequence[ReadPair], scores: Sequence[float]) -> PairScores:
    """Loss and accuracy by the scores of all texts, in the order of `_texts`."""
    if not read:
        return PairScores(None, None, 0)
    values = iter(scores)
    losses, correct = [], 0
    for winner, loser in read:
        sides = [
            math.fsum(model.discount**turn * next(values) for turn in range(len(side))) for side in (winner, loser)
        ]
        margin = sides[0] - sides[1]
        losses.append(max(-margin, 0.0) + math.log1p(math.exp(-abs(margin))))
        correct += margin > 0
    return PairScores(math.fsum(losses) / len(read), correct / len(read), len(read))


def _update(
    model: RewardModel,
    engine: Engine | HeadedEngine,
    read: Sequence[ReadPair],
    settings: FitSettings,
    dropout_seed: int,
) -> bool:
    """One optimizer update; False where its gradient was not finite and it was left out."""
    pairs = [[*winner, *loser] for winner, loser in read]
    batches = model.rank_batches(pairs, settings.micro_batch_tokens, engine.lockstep)
    with model.policy.use(), adapter_dropout(model.policy, dropout_seed):
        for number, batch in enumerate(batches, start=1):
            if batch is None:
                loss = 0.0 * model.scores(stand_in_batch(model.reader.num_agents)).sum()
            else:
                turns = [(len(read[place][0]), len(read[place][1])) for place in batch.places]
                loss = model.pair_loss(batch, turns, 1.0 / len(read), settings.label_smoothing).loss
            engine.backward(loss, last=number == len(batches))
    norm = engine.grad_norm()
    if not math.isfinite(norm):
        engine.zero_grad()
        return False
    engine.step(norm)
    return True


def _texts(read: Sequence[ReadPair]) -> list[JointInput]:
    """All texts, the winner's turns of a pair before the loser's."""
    return [given for pair in read for side in pair for given in side]


def _turns(pair: PreferencePair) -> list[tuple[str, int]]:
    """Item and turn of each of the texts of a pair."""
    return [(pair.item_key, turn) for side in (pair.winner, pair.loser) for turn in range(len(side.turns))]
