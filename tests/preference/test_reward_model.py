"""The joint reward model: scores against transformers' own forward, its loss against a loop, and that it learns."""

import dataclasses
import json
import math

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mlrl.errors import ConfigError
from mlrl.parallel.engine import Engine, OptimizerSettings
from mlrl.preference.joint_text import joint_batches, read_pair
from mlrl.preference.pairs import PreferencePair, Trajectory, Turn, item_key
from mlrl.preference.reward_model import LearnedReward, Normalization, fit_normalization, make_reward_model
from mlrl.preference.reward_training import FitSettings, fit, score_pairs, split_by_item
from mlrl.rewards import bind_reward
from mlrl.rollout.tree import Response, TokenizedPrompt
from tests.preference.build import SAMPLING
from tests.trainers.loops import assert_close, flat, grow, make_trainer, perturb, plain_model


def trajectory(texts, reward=0.0):
    """A trajectory of these responses, [turn][agent]."""
    turns = tuple(
        Turn(
            tuple(TokenizedPrompt(f"prompt {t}", [1]) for _ in own),
            tuple(Response([3, 2], [], text, False) for text in own),
        )
        for t, own in enumerate(texts)
    )
    return Trajectory(turns, reward, reward, "current", 0, SAMPLING)


def pair(winner, loser, item=0):
    return PreferencePair(1, item, item_key({"item": item}), trajectory(winner, 1.0), trajectory(loser, 0.0))


PAIRS = [
    pair([["ab", "c"]], [["d", "ef"]], 0),
    pair([["a", "b"], ["c", "d"]], [["e", "f"], ["g", "h"]], 1),
    pair([["a", "b"], ["c", "d"]], [["e", "f"]], 2),  # which ended after its first turn
]


def make(folder, *, tuning="lora", name=None, discount=1.0, pooling="last", fresh=False, **settings):
    trainer = make_trainer(folder, tuning=tuning, **settings)
    model = make_reward_model(trainer.team, name=name, max_length=None, discount=discount, pooling=pooling, seed=3)
    if not fresh:
        move_head(model)
    return trainer, model


def move_head(model):
    """Away from the start, where no text is better than another."""
    assert not any(parameter.any() for parameter in model.head.parameters())
    weight = model.head.weight
    torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=torch.Generator().manual_seed(2))


def move(model, spread=0.1):
    """Away from the start, where a fresh adapter does nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator)


def loop_score(network, model, prompts, responses):
    """One text, through the network's own forward."""
    given = model.reader.read(prompts, responses)
    ids = torch.tensor([[*given.prompts, *given.responses]])
    hidden = network(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    if model.pooling == "last":
        hidden = hidden[-1]
    elif model.pooling == "mean":
        hidden = hidden[len(given.prompts) :].mean(0)
    else:  # a tag and a response an agent, and the closing tag
        place, sums = len(given.prompts), []
        for agent, text in enumerate(responses, start=1):
            length = sum(
                len(model.reader.tokenizer(part, add_special_tokens=False)["input_ids"])
                for part in (f"\n[agent {agent}, response]\n", text)
            )
            sums.append(hidden[place : place + length].sum(0) / 32)
            place += length
        hidden = torch.cat(sums)
    return (model.head.weight[0].double() * hidden).sum() + model.head.bias[0].double()


def loop_margin(network, model, pair):
    total = 0.0
    for sign, side in ((1, pair.winner), (-1, pair.loser)):
        for turn, own in enumerate(side.turns):
            texts = [r.text for r in own.responses]
            total = total + sign * model.discount**turn * loop_score(
                network, model, [p.content for p in own.prompts], texts
            )
    return total


@pytest.mark.parametrize("pooling", ["last", "mean", "agents"])
@pytest.mark.parametrize(("tuning", "max_tokens"), [("lora", 1), ("lora", 4096), ("full", 4096)])
def test_loss_and_gradient_equal_the_loop(tiny_llama, tuning, max_tokens, pooling):
    _, model = make(tiny_llama, tuning=tuning, discount=0.5, pooling=pooling)
    if tuning == "lora":
        move(model)
    read = [read_pair(model.reader, pair) for pair in PAIRS]
    total = 0.0
    with model.policy.use():
        for batch in joint_batches([[*winner, *loser] for winner, loser in read], max_tokens):
            turns = [(len(read[place][0]), len(read[place][1])) for place in batch.places]
            loss = model.pair_loss(batch, turns, 1 / 3).loss
            loss.backward()
            total += float(loss.detach())
    ours = flat([p.grad for p in model.parameters], model.parameters)
    with plain_model(model.policy) as network:
        losses = [torch.log1p((-loop_margin(network, model, pair)).exp()) for pair in PAIRS]
        expected = sum(losses) / 3
        theirs = flat(torch.autograd.grad(expected, model.parameters, allow_unused=True), model.parameters)
    assert total == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_close(ours, theirs, 1e-4)
    measured = score_pairs(model, read, max_tokens)
    assert measured.loss == pytest.approx(total, rel=1e-5)
    assert measured.accuracy == sum(float(loss.detach()) < math.log(2) for loss in losses) / 3


def test_an_adapter_on_the_agents_base_leaves_the_agents_alone(tiny_llama):
    trainer = make_trainer(tiny_llama)
    before = [[r.token_ids for own in node.responses for r in own] for t in grow(trainer) for node in t.nodes()]
    flags = [p.requires_grad for agent in trainer.team.agents for p in agent.parameters]
    model = make_reward_model(trainer.team, name=None, max_length=None, discount=1.0, pooling="last", seed=3)
    move(model)
    assert model.policy.base is trainer.team.agents[0].base
    assert [p.requires_grad for agent in trainer.team.agents for p in agent.parameters] == flags == [True] * len(flags)
    assert all(p.requires_grad for p in model.parameters)
    frozen = [p for n, p in model.policy.base.model.named_parameters() if "lora_" not in n]
    assert not any(p.requires_grad for p in frozen)
    assert before == [[r.token_ids for own in n.responses for r in own] for t in grow(trainer) for n in t.nodes()]


def test_a_model_of_its_own_and_a_copy(tiny_llama, tiny_llama_other):
    trainer, model = make(tiny_llama, name=tiny_llama_other)
    assert model.policy.base is not trainer.team.agents[0].base
    assert len(model.policy.parameters()) == len(trainer.team.agents[0].parameters)
    assert sum(p.requires_grad for p in model.policy.base.model.parameters()) == len(model.policy.parameters())
    trainer, copied = make(tiny_llama, tuning="full")
    reward = LearnedReward(copied)
    before = reward(["a"], ["b"], prompts=["p", "q"])
    perturb(trainer.team.agents[0], seed=0, spread=0.3)
    assert reward(["a"], ["b"], prompts=["p", "q"]) == before


def test_a_frozen_model_is_a_reward_function(tiny_llama):
    _, model = make(tiny_llama)
    move(model)
    model.normalization = Normalization(mean=0.5, scale=2.0)
    bound = bind_reward(LearnedReward(model, max_tokens=40), 2)
    answers = [["one", "two", "three"], ["x", "y", ""]]
    prompts = [[{"role": "user", "content": "the sea"}], "a river"]
    rewards = bound(answers, {"prompts": prompts, "batch_items": [{}], "turn": 0})
    with torch.no_grad(), plain_model(model.policy) as network:
        raw = [float(loop_score(network, model, prompts, joint)) for joint in zip(*answers, strict=True)]
    assert rewards == pytest.approx([(value - 0.5) / 2 for value in raw], rel=1e-4)


def test_hand_computed_normalization():
    # items a: 1, 3 (mean 2, variance 1) and b: 10, 10, 16 (mean 12, variance (4 + 4 + 16)/3 = 8): s² = (1 + 8)/2 = 4.5
    # the mean of all five is 8, whatever the items' means are
    fitted = fit_normalization(["a", "a", "b", "b", "b"], [1.0, 3.0, 10.0, 10.0, 16.0])
    assert (fitted.mean, fitted.scale) == (pytest.approx(8.0), pytest.approx(4.5**0.5))
    assert fit_normalization(["a", "b"], [1.0, 5.0]) == Normalization(3.0, 1.0)  # nothing is told apart
    assert fit_normalization([], []) == Normalization(0.0, 1.0)


def test_an_item_is_on_one_side_in_every_round():
    keys = [item_key({"item": i // 3}) for i in range(300)]
    training, validation = split_by_item(keys, seed=1, fraction=0.2)
    assert sorted(training + validation) == list(range(300))
    held = {keys[p] for p in validation}
    assert held.isdisjoint(keys[p] for p in training)
    assert 10 <= len(held) <= 30  # 20 of 100 items, σ = 4
    later, _ = split_by_item([*keys[150:], item_key({"item": "new"})], seed=1, fraction=0.2)
    assert held.isdisjoint([*keys[150:], item_key({"item": "new"})][p] for p in later)
    assert split_by_item(keys, seed=2, fraction=0.2)[1] != validation


@pytest.mark.parametrize(("items", "fraction", "expected"), [(1, 0.5, 0), (2, 1e-9, 1), (2, 1.0, 1), (5, 0.0, 0)])
def test_neither_side_is_left_empty(items, fraction, expected):
    keys = [item_key({"item": i}) for i in range(items)]
    training, validation = split_by_item(keys, seed=0, fraction=fraction)
    assert (len(training), len(validation)) == (items - expected, expected)


def learnable(count=24):
    """The joint response with a "z" of the second agent wins."""
    return [pair([["ab"[i % 2], f"z{i}"]], [["ba"[i % 2], f"a{i}"]], i) for i in range(count)]


def engine(model, rate):
    return Engine(model.parameters, OptimizerSettings(rate))


def test_it_learns_and_validates_on_items_it_has_not_seen(tiny_llama):
    _, model = make(tiny_llama, fresh=True, spread=0)
    heard = []
    report = fit(
        model, engine(model, 3e-3), learnable(), FitSettings(2, 6, validation_fraction=0.25),
        lambda epoch, scores: heard.append((epoch, scores)),
    )  # fmt: skip
    assert report.validation.num_pairs + report.train.num_pairs == 24
    assert report.train.accuracy > 0.9 and report.validation.accuracy > 0.9
    assert report.epochs[0].loss > report.validation.loss == min(scores.loss for scores in report.epochs)
    assert heard == list(enumerate(report.epochs, start=1))
    assert report.skipped == 0
    assert model.normalization == report.normalization
    # normalized, the two sides of a pair are about two standard deviations apart
    rewards = LearnedReward(model)(["a", "a"], ["z1", "a1"], prompts=["prompt 0", "prompt 0"])
    assert 1.0 < rewards[0] - rewards[1] < 4.0


def test_the_weights_of_the_best_epoch_are_kept(tiny_llama):
    _, model = make(tiny_llama, fresh=True, spread=0)
    states = []
    report = fit(
        model, engine(model, 0.05), learnable(8), FitSettings(3, 3, validation_fraction=0.4),
        lambda epoch, scores: states.append(model.state()),
    )  # fmt: skip
    losses = [scores.loss for scores in report.epochs]
    assert report.best_epoch == losses.index(min(losses)) + 1 < 3  # so steep a rate overshoots
    for ours, theirs in zip(model.state(), states[report.best_epoch - 1], strict=True):
        assert torch.equal(ours, theirs)
    assert report.validation.loss == pytest.approx(min(losses), rel=1e-5)


def test_micro_batches_change_nothing(tiny_llama):
    states = []
    for tokens in (60, 4096):
        _, model = make(tiny_llama, fresh=True, spread=0)
        fit(model, engine(model, 1e-3), learnable(4), FitSettings(1, 2, tokens, 0.0))
        states.append(torch.cat([p.flatten() for p in model.state()]))
    assert_close(states[0], states[1], 1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_llama):
    _, model = make(tiny_llama, fresh=True, spread=0)
    with torch.no_grad():
        model.head.bias.fill_(math.nan)
    before = model.state()
    report = fit(model, engine(model, 1e-3), learnable(6), FitSettings(1, 3, validation_fraction=0.0))
    assert report.skipped == 2
    assert all(torch.equal(a, b) for a, b in zip(model.state()[:-1], before[:-1], strict=True))


def test_dropout_of_the_adapter_is_on_in_the_loss_only(tiny_llama):
    trainer = make_trainer(tiny_llama)
    arguments = dataclasses.replace(trainer.team.loading.arguments, lora_dropout=0.5)
    trainer.team.loading = dataclasses.replace(trainer.team.loading, arguments=arguments)
    model = make_reward_model(trainer.team, name=None, max_length=None, discount=1.0, pooling="last", seed=3)
    move_head(model)
    move(model, 0.3)
    reward = LearnedReward(model)
    quiet = [reward(["a"], ["b"], prompts=["p", "q"]) for _ in range(2)]
    assert quiet[0] == quiet[1]
    torch.manual_seed(0)
    fit(model, engine(model, 0.0), learnable(6), FitSettings(1, 6, validation_fraction=0.0))
    assert reward(["a"], ["b"], prompts=["p", "q"]) != quiet[0]  # the normalization was fitted
    model.normalization = Normalization()
    assert reward(["a"], ["b"], prompts=["p", "q"]) == quiet[0]


def test_a_saved_model_loads_with_peft_and_scores_the_same(tiny_llama, tmp_path):
    _, model = make(tiny_llama)
    move(model)
    model.normalization = Normalization(0.25, 1.5)
    model.save(tmp_path / "reward_model")
    network = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama), tmp_path / "reward_model")
    head = load_file(tmp_path / "reward_model" / "head.safetensors")
    given = model.reader.read(["p", "q"], ["a", "b"])
    ids = torch.tensor([[*given.prompts, *given.responses]])
    with torch.no_grad():
        hidden = network(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
        score = float((hidden @ head["weight"][0]) + head["bias"][0])
    assert score == pytest.approx(model.score_texts([given], 4096)[0], rel=1e-4)
    facts = json.loads((tmp_path / "reward_model" / "reward_model.json").read_text())
    assert (facts["mean"], facts["scale"], facts["num_agents"]) == (0.25, 1.5, 2)


def test_weights_of_another_reward_model_are_refused(tiny_llama):
    _, model = make(tiny_llama, pooling="agents")
    _, other = make(tiny_llama, pooling="mean")
    before = model.state()
    with pytest.raises(ConfigError, match="Resume with the same reward_model_name, reward_pooling"):
        model.put_back(other.kept())
    assert all(torch.equal(a, b) for a, b in zip(model.state(), before, strict=True))
    _, same = make(tiny_llama, pooling="agents")
    move(same)
    model.put_back(same.kept())
    assert all(torch.equal(a, b) for a, b in zip(model.state(), same.state(), strict=True))
