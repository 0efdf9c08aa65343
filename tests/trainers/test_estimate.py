"""Advantages and reference KL on real trees, and the expectation of the whole path: collect, estimate, update."""

import dataclasses
import math

import pytest
import torch

from mlrl.config import MAGRPOConfig, MARLOOConfig
from mlrl.parallel.group import Group
from mlrl.rollout.tree import Node, Response, RolloutTree, TokenizedPrompt
from mlrl.trainers import estimate
from mlrl.trainers.estimate import estimate_advantages, reference_kl, score
from mlrl.trainers.policy_update import PolicyUpdate
from mlrl.trainers.samples import make_samples
from tests.trainers import word_game
from tests.trainers.loops import (
    ITEMS,
    RecordingEngine,
    grow,
    loop_advantages,
    make_trainer,
    perturb,
    scores,
    sequence_kl,
)

# The Monte-Carlo gradient -------------------------------------------------------------------------------------------


def sampled_gradients(trainer, rounds: int, items: int, changes: dict[str, dict]) -> dict[str, list[torch.Tensor]]:
    """For each variant of the settings, and each agent: the gradients of −J of `rounds` batches, (rounds, P)."""
    found = {name: [[], []] for name in changes}
    for number in range(rounds):
        trees = word_game.collect(trainer, number * items, items)
        for name, change in changes.items():
            trainer.args = dataclasses.replace(trainer.args, **change)
            engines = [
                RecordingEngine(agent.parameters, trainer._optimizer_settings(1.0), moves=False)
                for agent in trainer.team.agents
            ]
            samples = trainer.estimate(trees)
            for _ in PolicyUpdate(trainer.team, engines, trainer.args, step=0).run(samples):
                pass
            for own, engine in zip(found[name], engines, strict=True):
                own += engine.recorded
    return {name: [torch.stack(own) for own in agents] for name, agents in found.items()}


def distance(gradients: torch.Tensor, exact: torch.Tensor, scale: float = 1.0) -> tuple[float, float]:
    """(distance of the mean to the exact gradient in standard errors, standard error relative to that gradient)."""
    estimates = -scale * gradients
    error = float((estimates.var(0) / len(estimates)).sum().sqrt())
    return float((estimates.mean(0) - exact).norm()) / error, error / float(exact.norm())


@pytest.mark.parametrize(
    "num_turns, num_generations, joint_mode, items",
    # items of 20 batches, so that every agent has 10⁴ responses: 4·125, (4+16)·25, 2·250, (2+8)·50 a batch
    [(1, 4, "aligned", 125), (2, 4, "aligned", 25), (1, 2, "cross", 250), (2, 2, "cross", 50)],
)
def test_monte_carlo_gradient_is_the_exact_one(num_turns, num_generations, joint_mode, items):
    trainer = word_game.make_team(num_turns, num_generations, joint_mode)
    exact = word_game.exact_gradients(trainer, num_turns)
    variants = {mode: {"advantage_mode": mode, "turn_weighting": "objective"} for mode in ("raw", "rloo", "mean")}
    if num_turns == 2:
        variants["flat"] = {"advantage_mode": "rloo", "turn_weighting": "node"}
    gradients = sampled_gradients(trainer, 20, items, variants)
    K = num_generations
    for agent in (0, 1):
        for mode, scale in (("raw", 1.0), ("rloo", 1.0), ("mean", K / (K - 1))):
            off, error = distance(gradients[mode][agent], exact[agent], scale)
            assert off < 3, (mode, agent, off)
            assert error < (0.3 if mode == "raw" else 0.15)  # else nothing would be shown
        # the test can fail: without K/(K−1), and with a flat mean over the nodes of all turns
        if K == 2:
            assert distance(gradients["mean"][agent], exact[agent])[0] > 3
        if num_turns == 2:
            assert distance(gradients["flat"][agent], exact[agent])[0] > 3


# Advantages by hand --------------------------------------------------------------------------------------------------


def node(rewards, path=(), parent=None, kl=None, joints=((0, 0), (1, 1))) -> Node:
    made = Node(path, [TokenizedPrompt("p", [3]), TokenizedPrompt("p", [3])], parent)
    made.responses = [[Response([5], [-1.0], "x", False) for _ in range(2)] for _ in range(2)]
    made.joints, made.rewards, made.raw_rewards = list(joints), list(rewards), list(rewards)
    made.kl = kl
    if parent is not None:
        parent.children[path[-1]] = made
    return made


def hand_tree(joints=((0, 0), (1, 1))) -> list[RolloutTree]:
    root = node([1.0, 3.0] if len(joints) == 2 else [1.0, 3.0, 5.0, 7.0], kl=[[0.1, 0.2], [0.0, 1.0]], joints=joints)
    node([2.0] * len(joints), (0,), root, kl=[[0.4, 0.8], [2.0, 4.0]], joints=joints)
    return [RolloutTree({}, 0, root)]


def estimated(trees, **settings) -> tuple[list[list[float]], list]:
    args = MAGRPOConfig(**{"num_generations": 2, "num_turns": 2, "discount": 0.5} | settings)
    samples = [
        make_samples(trees, agent, discount=0.5, turn_weighting="objective", mask_truncated=False) for agent in (0, 1)
    ]
    for own in samples:
        for sample in own:
            sample.kl = sample.node.kl[sample.agent][sample.generation]
    zero = estimate_advantages(trees, samples, args)
    values = [[sample.advantage for sample in own] for own in samples]
    nodes = [n for tree in trees for n in tree.nodes()]
    assert values == [[a for n in nodes for a in n.advantages[agent]] for agent in (0, 1)]
    return values, zero


def test_advantages_by_hand():
    """Returns of the root: 1 + 0.5·2 = 2 and 3 (its branch ended); of the child: 2 and 2, no signal."""
    values, zero = estimated(hand_tree(), advantage_normalization="none")
    assert values == [[-0.5, 0.5, 0.0, 0.0]] * 2 and zero == [[False, True]] * 2
    values, _ = estimated(hand_tree(), advantage_normalization="node")
    assert values == [[-1.0, 1.0, 0.0, 0.0]] * 2
    values, _ = estimated(hand_tree(), advantage_mode="rloo", advantage_normalization="none")
    assert values == [[-1.0, 1.0, 0.0, 0.0]] * 2
    values, _ = estimated(hand_tree(), advantage_mode="raw", advantage_normalization="none")
    assert values == [[2.0, 3.0, 2.0, 2.0]] * 2
    values, _ = estimated(hand_tree(), advantage_mode="max", advantage_normalization="none")
    assert values == [[-1.0, 0.0, 0.0, 0.0]] * 2
    # std of (−0.5, 0.5, 0, 0) over the batch: √(0.5/4)
    values, _ = estimated(hand_tree(), advantage_normalization="batch")
    assert values[0] == pytest.approx([-(2**0.5), 2**0.5, 0.0, 0.0])


def test_credit_across_joints_by_hand():
    """Cross: joints 00 01 10 11 return 1 + 0.5·2 = 2, 3, 5, 7; agent 0 has (2+3)/2 and (5+7)/2, agent 1 3.5 and 5."""
    values, _ = estimated(hand_tree(((0, 0), (0, 1), (1, 0), (1, 1))), advantage_mode="raw",
                          advantage_normalization="none", joint_mode="cross")  # fmt: skip
    assert values == [[2.5, 6.0, 2.0, 2.0], [3.5, 5.0, 2.0, 2.0]]


def test_reference_kl_by_hand():
    """KL-to-go of the root, agent 0: 0.1 + 0.5·mean(0.4, 0.8) = 0.4 and 0.2; agent 1: 0 + 0.5·3 = 1.5 and 1."""
    settings = {"advantage_normalization": "node", "reference_kl_coef": 0.1}
    values, _ = estimated(hand_tree(), **settings)
    # E/σ = ∓1; minus 0.1·(KL − mean KL), which σ does not divide; a partner's KL does not enter
    assert values[0] == pytest.approx([-1 - 0.1 * 0.1, 1 + 0.1 * 0.1, 0.1 * 0.2, -0.1 * 0.2])
    assert values[1] == pytest.approx([-1 - 0.1 * 0.25, 1 + 0.1 * 0.25, 0.1 * 1.0, -0.1 * 1.0])
    values, _ = estimated(hand_tree(), advantage_mode="raw", **settings | {"advantage_normalization": "none"})
    assert values[0] == pytest.approx([2 - 0.04, 3 - 0.02, 2 - 0.04, 2 - 0.08])


def test_kl_to_go_is_credited_across_joints():
    """Agent 0's first response is in the joints 00, which goes on, and 01, which ended: 0.1 + 0.5·(0.6 + 0)/2."""
    values, _ = estimated(hand_tree(((0, 0), (0, 1), (1, 0), (1, 1))), advantage_mode="raw", reference_kl_coef=1.0,
                          advantage_normalization="none", joint_mode="cross")  # fmt: skip
    assert values[0][:2] == pytest.approx([2.5 - 0.25, 6.0 - 0.2])
    assert values[1][:2] == pytest.approx([3.5 - (0 + 0.5 * 3 / 2), 5.0 - 1.0])


# Reference KL of real policies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kl_equals_the_loop_and_starts_at_zero(tiny_llama, tuning, temperature):
    trainer = make_trainer(
        tiny_llama, tuning=tuning, num_turns=2, reference_kl_coef=0.2, temperature=temperature, spread=0.0
    )
    trees = grow(trainer)
    samples = trainer.estimate(trees)
    assert all(abs(s.kl) < 1e-5 for own in samples for s in own)  # the policy is its reference
    first = samples
    reference = [scores(a.reference, own, temperature) for a, own in zip(trainer.team.agents, first, strict=True)]
    for _ in range(3):
        trainer.update(samples)
        trees = grow(trainer)  # the policy that sampled is the one that the KL is of
        samples = trainer.estimate(trees)
    for agent, own in zip(trainer.team.agents, samples, strict=True):
        expected = sequence_kl(agent, own, temperature)
        for s in own:
            assert s.kl == pytest.approx(expected[id(s.node), s.generation], rel=1e-3, abs=1e-4)
        assert max(abs(s.kl) for s in own) > 0.01
        # training left the reference where it was
        now = scores(agent.reference, first[agent.index], temperature)
        assert all(torch.equal(a, b) for a, b in zip(now, reference[agent.index], strict=True))
        loop = loop_advantages(trees, agent.index, trainer.args, expected)
        assert [s.advantage for s in own] == pytest.approx([loop[id(s.node), s.generation] for s in own], abs=1e-3)
    metrics = trainer.averager.flush()
    name = "turn_1/agent_0/reference_kl"
    assert metrics[f"{name}_penalty_mean"] == pytest.approx(0.2 * metrics[f"{name}_mean"])


@pytest.mark.parametrize(
    ("settings", "scored"), [({}, 2), ({"top_k": 4}, 4), ({"top_p": 0.9}, 4), ({"dtype": "bfloat16"}, 4)]
)
def test_kl_takes_the_policy_from_sampling_where_that_is_exact(tiny_llama, monkeypatch, settings, scored):
    trainer = make_trainer(tiny_llama, num_turns=2, reference_kl_coef=0.2, **settings)
    forwards = []
    monkeypatch.setattr(estimate, "score", lambda work, *rest: forwards.append(len(work)) or score(work, *rest))
    samples = trainer.estimate(grow(trainer))
    assert forwards == [scored]  # both agents' references, and both policies where sampling cut or rounded
    kept = [[s.kl for s in own] for own in samples]
    assert max(abs(kl) for own in kept for kl in own) > 0.01
    reference_kl(trainer.team, samples, trainer.args)
    for own, before in zip(samples, kept, strict=True):
        assert [s.kl for s in own] == pytest.approx(before, abs=1e-4)


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_team_at_its_reference_stays_there_without_task_signal(tiny_llama, tuning):
    """Roundings of a KL that is 0 would do: AdamW makes a whole step of the smallest gradient."""
    trainer = make_trainer(
        tiny_llama, tuning=tuning, reference_kl_coef=0.2, spread=0.0, reward_func=lambda a, b: [0.5] * len(a)
    )
    before = [[p.detach().clone() for p in agent.parameters] for agent in trainer.team.agents]
    samples = trainer.estimate(grow(trainer))
    assert {s.kl for own in samples for s in own} == {0.0}
    trainer.update(samples)
    for agent, own in zip(trainer.team.agents, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(agent.parameters, own, strict=True))


def test_what_a_reference_costs(tiny_llama):
    """Nothing where β is 0; with LoRA the base itself; with full tuning one copy for agents that started alike."""
    assert all(agent.reference is None for agent in make_trainer(tiny_llama).team.agents)
    lora = make_trainer(tiny_llama, reference_kl_coef=0.1).team
    assert all(agent.reference.adapter is None and agent.reference.base is agent.base for agent in lora.agents)
    assert len(lora.bases) == 1
    full = make_trainer(tiny_llama, reference_kl_coef=0.1, tuning="full").team
    assert full.agents[0].reference is full.agents[1].reference
    assert all(agent.reference.base is not other.base for agent in full.agents for other in full.agents)
    assert not any(p.requires_grad for p in full.agents[0].reference.parameters())


def test_a_penalty_alone_pulls_the_policy_back(tiny_llama):
    """Without task signal, the KL to the reference falls from update to update."""
    trainer = make_trainer(
        tiny_llama, config=MARLOOConfig, reference_kl_coef=1.0, reward_func=lambda a, b: [0.5] * len(a), spread=0.0,
        num_generations=24, max_new_tokens=3, ends=frozenset(), max_grad_norm=1.0,
    )  # fmt: skip
    for agent in trainer.team.agents:
        perturb(agent, seed=agent.index, spread=0.06)
    for engine in trainer.engines:
        engine.settings = trainer._optimizer_settings(1e-2)
    divergences = []
    for step in range(30):
        trees = trainer.collector.collect([(10 * step + n, item) for n, item in enumerate(ITEMS)], trainer.growth())
        samples = trainer.estimate(trees)
        divergences.append(sum(s.kl for own in samples for s in own) / sum(len(own) for own in samples))
        trainer.update(samples)
    assert sum(divergences[-3:]) < 0.6 * sum(divergences[:3]), divergences


def test_scores_do_not_depend_on_micro_batches(tiny_llama):
    trainer = make_trainer(tiny_llama, num_turns=2)
    trees = grow(trainer)
    samples = make_samples(trees, 0, discount=1.0, turn_weighting="objective", mask_truncated=False)
    policy = trainer.team.agents[0].policy
    expected = scores(policy, samples, 1.0)
    for micro_batch_tokens in (1, 60, 10**6):
        args = dataclasses.replace(trainer.args, micro_batch_tokens=micro_batch_tokens)
        [found] = score([(policy, Group.alone(), samples)], Group.alone(), args)
        assert not any(f.requires_grad for f in found)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.allclose(ours.double(), theirs, atol=1e-4)
    assert math.isclose(sum(len(f) for f in found), sum(s.length for s in samples))
