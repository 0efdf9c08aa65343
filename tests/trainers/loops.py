"""What an update must do, one sequence and one token at a time, and small real teams to do it with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mlrl.agents import Agent
from mlrl.config import MAGRPOConfig, TrainerConfig
from mlrl.models.base import Policy
from mlrl.parallel.engine import Engine, OptimizerSettings
from mlrl.rollout.tree import Node, RolloutTree
from mlrl.trainers.reinforce import MAGRPOTrainer, ReinforceTrainer
from mlrl.trainers.samples import Sample

ITEMS = [{"prompt": "the sea"}, {"prompt": "one short story about a river"}]
ENDS = frozenset(range(0, 384, 5))  # so many tokens end a response that lengths are ragged

RATE = {"lora": 3e-4, "full": 5e-6}


def reward(*completions: list[str]) -> list[float]:
    """A number in [0, 1) that depends on every character of every agent."""
    return [
        sum((7 + place) * (a + 1) * ord(c) for a, text in enumerate(joint) for place, c in enumerate(text)) % 97 / 97
        for joint in zip(*completions, strict=True)
    ]


def as_messages(item: dict) -> list[dict]:
    prompt = item["prompt"]
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def extend(prompt_history_per_agent, agent_completions):
    """Each agent's own conversation goes on: its next prompt begins with the tokens of this turn."""
    return [
        [*history[-1], {"role": "assistant", "content": said}, {"role": "user", "content": "longer"}]
        for history, said in zip(prompt_history_per_agent, agent_completions, strict=True)
    ]


def restart(prompt, agent_completions):
    """A prompt of new words, whose tokens share nothing with the turn before."""
    return [f"{prompt}: now {len(said)}" for said in agent_completions]


def make_trainer(
    folder: str,
    *,
    conversation: bool = True,
    ends: frozenset[int] = ENDS,
    config: type[TrainerConfig] = MAGRPOConfig,
    trainer: type[ReinforceTrainer] = MAGRPOTrainer,
    reward_func: Callable = reward,
    num_agents: int = 2,
    spread: float = 0.05,
    train_dataset=ITEMS,
    **settings,
) -> ReinforceTrainer:
    """A trainer of tiny models that have left their starting point, with responses of ragged lengths."""
    defaults = {"max_new_tokens": 7, "num_generations": 3, "lora_rank": 2, "max_grad_norm": None, "eval_interval": 0}
    made = trainer(
        agent_model=folder,
        num_agents=num_agents,
        reward_func=reward_func,
        formatters=as_messages if conversation else None,
        external_transition=extend if conversation else restart,
        train_dataset=train_dataset,
        args=config(**defaults | {"rollout_batch_size": len(train_dataset)} | settings),
    )
    for agent in made.team.agents:
        if ends:
            agent.stop_ids = ends
        if spread and not (agent.index and made.args.share_parameters):
            perturb(agent, seed=agent.index, spread=spread if made.args.tuning == "lora" else 0.01)
    made.engines = [
        RecordingEngine(group[0].parameters, made._optimizer_settings(RATE[made.args.tuning]))
        for group in made.team.trainable
    ]
    return made


@torch.no_grad()
def perturb(agent: Agent, seed: int, spread: float) -> None:
    """Moves an agent's weights away from where they started."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in agent.parameters:
        parameter += spread * torch.randn(parameter.shape, generator=generator)


class RecordingEngine(Engine):
    """Keeps the gradient that each step was given, as one vector."""

    def __init__(self, parameters, settings: OptimizerSettings, moves: bool = True):
        super().__init__(parameters, settings)
        self.recorded: list[torch.Tensor] = []
        self.moves = moves

    def step(self, grad_norm: float) -> None:
        self.recorded.append(flat([m.grad for m in self.masters], self.masters))
        if self.moves:
            super().step(grad_norm)
        else:
            self.zero_grad()


def flat(gradients, parameters) -> torch.Tensor:
    """Gradients as one vector; None is zero."""
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).detach().flatten()
            for g, p in zip(gradients, parameters, strict=True)
        ]
    )


def grow(trainer: ReinforceTrainer, items=ITEMS) -> list[RolloutTree]:
    return trainer.collector.collect(list(enumerate(items)), trainer.growth())


# One sequence at a time ----------------------------------------------------------------------------------------------


@contextmanager
def plain_model(policy: Policy) -> Iterator[torch.nn.Module]:
    """The transformers model with its own attention, in float64 so that a reference has no rounding of its own."""
    with policy.use():
        policy.base.language_model.release()
        policy.base.model.double()
        try:
            yield policy.base.model
        finally:
            policy.base.model.float()  # exactly what it was
            policy.base.language_model.claim()


def token_scores(model: torch.nn.Module, sample: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log π and entropy of every token of a response, from a forward over its prompt and itself alone."""
    prompt, response = sample.node.prompts[sample.agent].token_ids, sample.response.token_ids
    logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    rows, entropies = [], []
    for place, token in enumerate(response):
        log_probabilities = torch.log_softmax(logits[len(prompt) - 1 + place] / temperature, -1)
        rows.append(log_probabilities[token])
        entropies.append(-(log_probabilities.exp() * log_probabilities).sum())
    return torch.stack(rows), torch.stack(entropies)


def scores(policy: Policy, samples: list[Sample], temperature: float) -> list[torch.Tensor]:
    with torch.no_grad(), plain_model(policy) as model:
        return [token_scores(model, sample, temperature)[0] for sample in samples]


def sequence_gradients(agent: Agent, samples: list[Sample], temperature: float) -> tuple[list[float], torch.Tensor]:
    """log π of each response, and its gradient, one row a response."""
    values, rows = [], []
    with plain_model(agent.policy) as model:
        for sample in samples:
            total = token_scores(model, sample, temperature)[0].sum()
            values.append(float(total.detach()))
            rows.append(flat(torch.autograd.grad(total, agent.parameters, allow_unused=True), agent.parameters))
    return values, torch.stack(rows)


def sequence_kl(agent: Agent, samples: list[Sample], temperature: float) -> dict[tuple[int, int], float]:
    """(id(node), k) → Σ over tokens of log π − log π_ref."""
    now, reference = (scores(policy, samples, temperature) for policy in (agent.policy, agent.reference))
    return {
        (id(s.node), s.generation): sum(float(x) - float(y) for x, y in zip(a, b, strict=True))
        for s, a, b in zip(samples, now, reference, strict=True)
    }


# One number at a time ------------------------------------------------------------------------------------------------


def joint_return(node: Node, joint: int, discount: float) -> float:
    below = node.children.get(joint)
    future = 0.0
    if below is not None:
        future = statistics.fmean(joint_return(below, g, discount) for g in range(len(below.joints)))
    return node.rewards[joint] + discount * future


def loop_advantages(trees, agent: int, args: TrainerConfig, kl: dict[tuple[int, int], float]) -> dict:
    """(id(node), k) → advantage, by the table of estimators."""
    nodes = [node for tree in trees for node in tree.nodes()]
    K = args.num_generations

    def holding(node: Node, k: int) -> list[int]:
        return [g for g, joint in enumerate(node.joints) if joint[agent] == k]

    def to_go(node: Node, k: int) -> float:
        below = [node.children.get(g) for g in holding(node, k)]
        future = [0.0 if b is None else statistics.fmean(to_go(b, j) for j in range(K)) for b in below]
        return kl[id(node), k] + args.discount * statistics.fmean(future)

    def deviations(values: list[float], mode: str) -> list[float]:
        if mode == "raw":
            return values
        if mode == "mean":
            return [v - sum(values) / K for v in values]
        return [v - (sum(values) - v) / (K - 1) for v in values]

    expected, spreads = {}, {}
    for node in nodes:
        own = [statistics.fmean(joint_return(node, g, args.discount) for g in holding(node, k)) for k in range(K)]
        if args.advantage_mode == "max":
            parts = [v - max(own) for v in own]
        elif args.advantage_mode == "greedy":
            parts = [v - node.greedy_return for v in own]
        else:
            parts = deviations(own, args.advantage_mode)
        spreads[id(node)] = statistics.pstdev(own)
        expected |= {(id(node), k): part for k, part in enumerate(parts)}
    batch = statistics.pstdev(expected.values())
    for node in nodes:
        sigma = {"none": 1.0, "node": spreads[id(node)], "batch": batch}[args.advantage_normalization]
        flat_node = sigma < 1e-4
        penalties = [0.0] * K
        if args.reference_kl_coef:
            penalties = deviations([to_go(node, k) for k in range(K)], args.advantage_mode)
        for k in range(K):
            part = 0.0 if flat_node else expected[id(node), k] / sigma
            expected[id(node), k] = part - args.reference_kl_coef * penalties[k]
    return expected


def loop_weights(trees, samples: list[Sample], args: TrainerConfig) -> list[float]:
    """w of the objective, 0 for a response that is masked."""
    joints, K = len(trees[0].root.joints), args.num_generations
    nodes = sum(1 for tree in trees for _ in tree.nodes())
    weights = []
    for sample in samples:
        t = sample.node.turn
        weight = {
            "objective": args.discount**t / (len(trees) * joints**t * K),
            "undiscounted": 1 / (len(trees) * joints**t * K),
            "node": 1 / (nodes * K),
        }[args.turn_weighting]
        weights.append(0.0 if args.mask_truncated and sample.response.truncated else weight)
    return weights


def loop_factors(samples: list[Sample], weights: list[float], args: TrainerConfig) -> list[float]:
    """What `loss_aggregation` multiplies each sequence with."""
    lengths = [len(sample.response.token_ids) for sample in samples]
    mean_length = sum(w * n for w, n in zip(weights, lengths, strict=True)) / sum(weights)
    return [
        {
            "sequence_sum": 1.0,
            "token_mean": 1 / mean_length,
            "constant": 1 / args.max_new_tokens,
            "sequence_mean": 1 / n,
        }[args.loss_aggregation]
        for n in lengths
    ]


def loop_surrogate(logprobs: torch.Tensor, old: torch.Tensor, advantage: float, args: TrainerConfig) -> torch.Tensor:
    """PPO's clipped objective of one sequence."""
    low, high = 1 - args.clip_range, 1 + (args.clip_range_high or args.clip_range)

    def bounded(ratio: torch.Tensor) -> torch.Tensor:
        value = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if args.dual_clip is not None and advantage < 0:
            value = torch.maximum(value, torch.tensor(args.dual_clip * advantage))
        return value

    if args.importance_level == "sequence":
        ratio = torch.exp(sum(new - before for new, before in zip(logprobs, old, strict=True)) / len(old))
        return bounded(ratio) * len(old)
    return sum(bounded(torch.exp(new - before)) for new, before in zip(logprobs, old, strict=True))


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, relative: float = 1e-5, size: float | None = None
) -> None:
    """Vectors that differ by at most `relative` of their size, or of the size of what cancelled in summing them."""
    size = float(expected.norm()) if size is None else size
    assert size > 0 and math.isfinite(size)
    assert float((actual - expected).norm()) <= relative * size, float((actual - expected).norm()) / size


def assert_weighted_sum(actual: torch.Tensor, shares, rows: torch.Tensor, relative: float = 1e-5) -> torch.Tensor:
    """The vector is Σ share · row up to `relative` of Σ |share| · ‖row‖; returns the sum."""
    shares = torch.tensor(shares, dtype=rows.dtype)
    expected = shares @ rows
    assert_close(actual, expected, relative, float(shares.abs() @ rows.norm(dim=1)))
    assert float((actual - expected).norm()) <= 1e-3 * float(expected.norm())
    return expected
