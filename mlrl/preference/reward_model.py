"""The joint reward model R̃: a scalar head on a joint text, on an adapter or a network of its own.

The head reads the hidden state of the last token, the mean of those from the first response tag on, or of each agent
the sum over what it wrote, with weights of its own for every agent. The last token has to have gathered all that
counts; a mean holds what every token says of itself; sums also hold how much each agent wrote, and who wrote what.

A trajectory's score is Σ_t γ^t R̃(h_t, a_t), as its reward is Σ_t γ^t r_t, so that with several turns R̃ can stand for
the reward of a turn. One turn is the plain case.

Frozen, it rewards with (R̃ − mean)/s, both over the pairs it was trained on: mean is that of all scores, s the root of
the mean variance *within* an item (and turn). The variance over all scores would measure how items differ, which the
loss leaves free.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mlrl.agent_loading import lora_config
from mlrl.agents import Agent, Team
from mlrl.errors import ConfigError
from mlrl.losses.preference import PreferenceLossOutputs, bradley_terry_loss
from mlrl.models.base import Policy
from mlrl.parallel.group import Group
from mlrl.parallel.zero import own_part, part_of_whole, set_own_part, whole_of_parts
from mlrl.preference.dropout import quiet_adapter
from mlrl.preference.joint_text import JointBatch, JointInput, JointReader, joint_batches, stand_in_batch
from mlrl.preference.spreading import rank_batches
from mlrl.prompts import Prompt
from mlrl.quiet import quiet_models
from mlrl.rollout.streams import derive_seed
from mlrl.rollout.tree import Node
from mlrl.sources import Source, load_tokenizers, resolve_source
from mlrl.storage import whole_files

ADAPTER = "reward_model"
_SUMMED_TOKENS = 32  # a sum's unit: so that a head learns at the rate at which it learns from means
_SMALLEST_SCALE = 1e-6  # below it the model tells nothing apart, and noise must not become a reward


@dataclass(frozen=True)
class Normalization:
    """score → (score − mean)/scale."""

    mean: float = 0.0
    scale: float = 1.0

    def __call__(self, score: float) -> float:
        return (score - self.mean) / self.scale


class RewardModel:
    """R̃ over one policy network and a head.

    The head starts at 0, so that no pair is preferred before there is a reason: hidden states have a large common part,
    and a random head makes margins of it that a few dozen pairs do not undo.

    Args:
        policy: the network through an adapter of its own, or a network of its own. All of its parameters are trained.
        source: where the network came from, for saving.
        reader: makes its texts.
        discount: γ of a trajectory's score.
        pooling: what the head reads, `last`, `mean` or `agents`.
        group: the ranks that hold it. They score and train together, each its share; default: this process alone.
    """

    def __init__(
        self,
        policy: Policy,
        source: Source,
        reader: JointReader,
        discount: float = 1.0,
        pooling: str = "last",
        group: Group | None = None,
    ):
        self.policy, self.source, self.reader = policy, source, reader
        self.discount, self.pooling = discount, pooling
        self.group = group or Group.alone()
        model = policy.base.language_model
        width = model.config.hidden_size * (reader.num_agents if pooling == "agents" else 1)
        self.head = nn.Linear(width, 1, device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.normalization = Normalization()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What training changes."""
        return [*self.backbone, *self.head.parameters()]

    @property
    def backbone(self) -> list[nn.Parameter]:
        """Without the head."""
        if self.policy.adapter is None:  # without the output layer, which is not run
            return list(self.policy.base.language_model.backbone.parameters())
        return self.policy.parameters()

    def scores(self, batch: JointBatch) -> Tensor:
        """R̃ of every text of a batch, (texts,), float32, with gradient. Call inside `policy.use()`."""
        return self.head(pooled_hidden(self.policy, batch, self.pooling).float())[:, 0]

    def pair_loss(
        self, batch: JointBatch, turns: Sequence[tuple[int, int]], weight: float, label_smoothing: float = 0.0
    ) -> PreferenceLossOutputs:
        """Bradley–Terry loss of a batch whose wholes are pairs. Call inside `policy.use()`.

        Args:
            turns: (the winner's, the loser's) number of texts of each pair of the batch, in this order in it.
            weight: of each pair. label_smoothing: assumed share of wrong preferences.
        """
        scores = self.scores(batch)
        sides = []
        start = 0
        for count in (count for pair in turns for count in pair):
            discounts = torch.tensor([self.discount**turn for turn in range(count)], device=scores.device)
            sides.append((discounts * scores[start : start + count]).sum())
            start += count
        winners_P, losers_P = torch.stack(sides[0::2]), torch.stack(sides[1::2])
        weights_P = torch.full_like(winners_P, weight).detach()
        return bradley_terry_loss(winners_P, losers_P, weights_P, label_smoothing)

    @torch.no_grad()
    def score_texts(self, inputs: Sequence[JointInput], max_tokens: int) -> list[float]:
        """R̃ of each text, in order, before normalization; all ranks of the group call it with the same texts."""
        mine: dict[int, float] = {}
        with self.policy.use():
            for batch in self.rank_batches([[given] for given in inputs], max_tokens):
                if batch is None:
                    self.scores(stand_in_batch(self.reader.num_agents))
                else:
                    mine |= dict(zip(batch.places, self.scores(batch).tolist(), strict=True))
        return self.group.collect(mine, len(inputs))

    def rank_batches(
        self, wholes: Sequence[Sequence[JointInput]], max_tokens: int, lockstep: bool = False
    ) -> list[JointBatch | None]:
        """This rank's batches of things of one or several texts each; None: run a stand-in, since others run one.

        Args:
            lockstep: whether ranks must run equally many; with sharded weights they always do.
        """
        costs = [float(sum(map(len, inputs))) for inputs in wholes]
        lockstep = lockstep or self.policy.base.shard is not None
        return rank_batches(
            costs, lambda places: joint_batches([wholes[place] for place in places], max_tokens), self.group, lockstep
        )

    def state(self) -> list[Tensor]:
        """A copy in main memory of what this rank has of all trained weights: its parts where they are sharded."""
        return [own_part(p).detach().to("cpu", copy=True) for p in self.parameters]

    def load_state(self, state: Sequence[Tensor]) -> None:
        """Back to weights from `state`."""
        for parameter, value in zip(self.parameters, state, strict=True):
            set_own_part(parameter, value)

    def whole_state(self) -> Iterator[Tensor]:
        """All trained weights, whole, one after another; all ranks of the group go through it together."""
        for parameter in self.parameters:
            yield whole_of_parts(parameter, own_part(parameter).detach(), self.group)

    def kept(self) -> dict[str, Tensor]:
        """What a checkpoint has to hold, by name; all ranks of the group call it."""
        weights = {f"{number:04d}": value.to("cpu", copy=True) for number, value in enumerate(self.whole_state())}
        return weights | {"normalization": torch.tensor(astuple(self.normalization), dtype=torch.float64)}

    def put_back(self, kept: dict[str, Tensor]) -> None:
        """Goes on with what `kept` gave.

        Raises:
            ConfigError: those are weights of another reward model.
        """
        wholes = [value for name, value in sorted(kept.items()) if name != "normalization"]
        shapes = [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in self.parameters]
        if [tuple(whole.shape) for whole in wholes] != shapes:
            raise ConfigError(
                "resume_from_checkpoint: the reward model there has other weights than the one here. Resume with the "
                "same reward_model_name, reward_pooling and adapter shape"
            )
        self.normalization = Normalization(*kept["normalization"].tolist())
        self.load_state([part_of_whole(p, v, self.group) for p, v in zip(self.parameters, wholes, strict=True)])

    def save(self, folder: str | Path) -> None:
        """Writes the adapter or network with its tokenizer, the head, and the normalization, on the group's first rank.

        All ranks of the group call it.
        """
        with nullcontext() if self.policy.adapter is not None else self.policy.base.whole():
            if self.group.is_first:
                with whole_files(folder) as place:
                    self._save(place)

    def _save(self, folder: Path) -> None:
        saved = Agent(
            index=0, policy=self.policy, tokenizer=self.reader.tokenizer, source=self.source, stop_ids=frozenset(),
            parameters=[],
        )  # fmt: skip
        with quiet_models():
            saved.save(folder)
        save_file(
            {n: p.detach().cpu().contiguous() for n, p in self.head.named_parameters()}, folder / "head.safetensors"
        )
        facts = {
            **asdict(self.normalization),
            "discount": self.discount,
            "pooling": self.pooling,
            "num_agents": self.reader.num_agents,
            "max_length": self.reader.max_length,
        }
        (folder / "reward_model.json").write_text(json.dumps(facts, indent=2) + "\n")


class LearnedReward:
    """The frozen reward model as a task's reward function: `reward_func=LearnedReward(model)`.

    Args:
        max_tokens: of a forward pass.
    """

    def __init__(self, model: RewardModel, max_tokens: int = 4096):
        self.model, self.max_tokens = model, max_tokens

    def __call__(self, *completions: Sequence[str], prompts: Sequence[Prompt]) -> list[float]:
        """Normalized R̃ of the J joint responses of a node, [agent][joint]."""
        inputs = [self.model.reader.read(prompts, joint) for joint in zip(*completions, strict=True)]
        return [self.model.normalization(score) for score in self.model.score_texts(inputs, self.max_tokens)]


def learned_rewards(
    model: RewardModel | None, nodes: Sequence[Node], group: Group, world: Group, max_tokens: int
) -> list[list[float]]:
    """Normalized R̃ of every joint response of some nodes, on every rank of the world.

    Args:
        model: on the ranks of the group; None elsewhere.
    """
    values: dict[int, list[float]] = {}
    if model is not None:
        inputs = [
            model.reader.read([prompt.content for prompt in node.prompts], node.completions(joint))
            for node in nodes
            for joint in range(len(node.joints))
        ]
        scores = model.score_texts(inputs, max_tokens)
        values = {0: [model.normalization(score) for score in scores]} if group.is_first else {}
    [flat] = world.collect(values, 1)
    remaining = iter(flat)
    return [[next(remaining) for _ in node.joints] for node in nodes]


@quiet_models()
def make_reward_model(
    team: Team, *, name: str | None, max_length: int | None, discount: float, pooling: str, seed: int
) -> RewardModel:
    """A reward model for a team, on a rank that holds one (`Mesh.reward_model`).

    Args:
        name: a model of its own; None takes agent 0's: with LoRA an adapter on its base, which is not loaded again,
            with full tuning a copy of its present weights. On ranks without agent 0 its model is loaded there.

    Raises:
        ConfigError: the model or its tokenizer cannot be loaded, or `max_length` is too small.
    """
    agent, arguments = team.agents[0], team.loading.arguments
    source = agent.source if name is None else resolve_source(name, "reward_model_name")
    tokenizer = agent.tokenizer if name is None else load_tokenizers([source])[0]
    reader = JointReader(tokenizer, len(team.agents), max_length)
    group, shared = team.mesh.reward_model, name is None and agent.is_here
    if not shared:
        base = team.loading.base(source)
    else:
        base = agent.base if arguments.tuning == "lora" else agent.base.copy()
    policy, others = Policy(base, None), []
    if arguments.tuning == "lora":
        # PEFT changes what has gradients: agents keep theirs, a network of its own has none
        others = [p for p in base.model.parameters() if p.requires_grad and shared]
        team.loading.frozen(base, group)
        base.add_adapter(ADAPTER, lora_config(arguments), derive_seed(seed, "reward_model"))
        policy = Policy(base, ADAPTER)
        quiet_adapter(policy)
    model = RewardModel(policy, source, reader, discount, pooling, group)
    model.head.to(team.loading.device)  # where a network that is to be sharded is not yet
    trained = {id(p) for p in [*others, *model.backbone]}
    for parameter in base.model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return model


def pooled_hidden(policy: Policy, batch: JointBatch, pooling: str) -> Tensor:
    """What the head reads of every text, (texts, D). Call inside `policy.use()`.

    `last`: the final hidden state of the last token; `mean`: the mean from the first response tag to the last token;
    `agents`: the sum over each agent's tag and response, in units of 32 tokens, side by side, (texts, N·D).
    """
    packed = batch.tree.pack(policy.base.language_model.device)
    hidden_TD, _ = policy.base.score(packed, None)
    if pooling == "last":
        return hidden_TD[torch.tensor([packed.paths[end][-1] for end in batch.ends], device=hidden_TD.device)]
    responses = [packed.paths[end][-len(batch.tree.segments[end].token_ids) :] for end in batch.ends]
    states = [hidden_TD[torch.tensor(places, device=hidden_TD.device)].float() for places in responses]
    if pooling == "mean":
        return torch.stack([state_LD.mean(0) for state_LD in states])
    texts = []
    for state_LD, sections in zip(states, batch.sections, strict=True):
        *own, _ = state_LD.split([*sections, len(state_LD) - sum(sections)])
        texts.append(torch.cat([section_LD.sum(0) for section_LD in own]) / _SUMMED_TOKENS)
    return torch.stack(texts)


def fit_normalization(groups: Sequence[Hashable], scores: Sequence[float]) -> Normalization:
    """Mean of all scores, and the root of the mean variance within a group (an item's scores of one turn).

    A scale below 1e-6, of a model that tells nothing apart, becomes 1.
    """
    by_group: dict[Hashable, list[float]] = defaultdict(list)
    for group, score in zip(groups, scores, strict=True):
        by_group[group].append(score)
    variances = [_variance(values) for values in by_group.values()]
    scale = math.sqrt(math.fsum(variances) / len(variances)) if variances else 0.0
    mean = math.fsum(scores) / len(scores) if len(scores) else 0.0
    return Normalization(mean, scale if scale > _SMALLEST_SCALE else 1.0)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
