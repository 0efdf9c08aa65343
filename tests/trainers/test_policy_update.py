"""The gradient that reaches every step equals the one of a loop over sequences and tokens, through transformers' own
forward; and it does not depend on how samples were packed."""

import dataclasses
import itertools
import math
import random
import statistics
import warnings

import pytest
import torch

from mlrl.config import MAREINFORCEConfig, MARLOOConfig
from mlrl.errors import NonFiniteError
from mlrl.trainers.policy_update import PolicyUpdate
from mlrl.trainers.reinforce import MAREINFORCETrainer, MARLOOTrainer
from mlrl.trainers.samples import make_samples, micro_batches
from tests.trainers.loops import (
    ITEMS,
    RATE,
    RecordingEngine,
    assert_close,
    assert_weighted_sum,
    flat,
    grow,
    loop_advantages,
    loop_factors,
    loop_surrogate,
    loop_weights,
    make_trainer,
    perturb,
    plain_model,
    scores,
    sequence_gradients,
    sequence_kl,
    token_scores,
)

MODES = ("raw", "mean", "rloo", "max", "greedy")
AGGREGATIONS = ("sequence_sum", "token_mean", "constant", "sequence_mean")


def with_args(trainer, **changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.args = dataclasses.replace(trainer.args, **changes)
    return trainer.args


def engines(trainer, moves: bool = False) -> list[RecordingEngine]:
    """Fresh engines, which by default only record."""
    trainer.engines = [
        RecordingEngine(group[0].parameters, trainer._optimizer_settings(RATE[trainer.args.tuning]), moves)
        for group in trainer.team.trainable
    ]
    return trainer.engines


def run(trainer, samples) -> tuple[list, list[torch.Tensor]]:
    """Outcomes, and the gradient of every group of agents at the first update."""
    made = engines(trainer)
    outcomes = list(PolicyUpdate(trainer.team, made, trainer.args, step=0).run(samples))
    return outcomes, [engine.recorded[0] for engine in made]


def all_samples(trainer, trees):
    how = {name: getattr(trainer.args, name) for name in ("discount", "turn_weighting", "mask_truncated")}
    return [make_samples(trees, agent, **how) for agent in range(trainer.num_agents)]


CASES = {
    "one turn": {"num_turns": 1},
    "one turn, cross": {"num_turns": 1, "joint_mode": "cross"},
    "conversation": {"num_turns": 2, "discount": 0.8},
    "conversation, cross": {"num_turns": 2, "joint_mode": "cross", "num_generations": 2, "discount": 0.8},
    "new prompts": {"num_turns": 2, "conversation": False, "discount": 0.8},
    "three agents, new prompts": {"num_turns": 2, "conversation": False, "num_agents": 3, "num_generations": 2},
}


FULL_GRID = ("one turn", "conversation, cross")  # the others take every third combination


def combinations(full_grid: bool) -> list[tuple[str, str, float]]:
    grid = list(itertools.product(MODES, AGGREGATIONS, (0.0, 0.1)))
    return grid if full_grid else grid[::3]  # 3 is prime to 4 and 2, so that each word is met with and without KL


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_and_loss_equal_the_loop(tiny_llama, case, tuning):
    T = 0.8
    trainer = make_trainer(tiny_llama, tuning=tuning, temperature=T, spread=0.0, reference_kl_coef=0.1, **CASES[case])
    for agent in trainer.team.agents:  # after the reference was taken
        perturb(agent, seed=agent.index, spread=0.05 if tuning == "lora" else 0.01)
    with_args(trainer, advantage_mode="greedy", advantage_normalization="none")
    trees = grow(trainer)
    nodes = [node for tree in trees for node in tree.nodes()]
    assert ("conversation" in case) == any(node.prompts[0].reused for node in nodes)
    lengths = [len(r.token_ids) for node in nodes for own in node.responses for r in own]
    assert len(set(lengths)) > 3
    plain = all_samples(trainer, trees)
    scored = [sequence_gradients(a, own, T) for a, own in zip(trainer.team.agents, plain, strict=True)]
    kl = [sequence_kl(a, own, T) for a, own in zip(trainer.team.agents, plain, strict=True)]
    for mode, aggregation, coefficient in combinations(full_grid=tuning == "lora" and case in FULL_GRID):
        if (mode, aggregation) == ("raw", "sequence_mean"):
            continue
        normalization = {"mean": "node", "rloo": "batch"}.get(mode, "none")
        args = with_args(
            trainer,
            advantage_mode=mode,
            advantage_normalization=normalization,
            loss_aggregation=aggregation,
            reference_kl_coef=coefficient,
            micro_batch_tokens=300,
        )
        samples = trainer.estimate(trees)
        (outcome,), gradients = run(trainer, samples)
        for agent, own in enumerate(samples):
            values, gradient_rows = scored[agent]
            expected_advantages = loop_advantages(trees, agent, args, kl[agent])
            weights = loop_weights(trees, own, args)
            factors = loop_factors(own, weights, args)
            shares, by_turn = [], {}
            for number, sample in enumerate(own):
                advantage = expected_advantages[id(sample.node), sample.generation]
                assert sample.advantage == pytest.approx(advantage, rel=1e-5, abs=2e-6)
                share = -weights[number] * advantage * factors[number]
                shares.append(share)
                by_turn[sample.node.turn] = by_turn.get(sample.node.turn, 0.0) + share * values[number]
            expected = assert_weighted_sum(gradients[agent], shares, gradient_rows)
            for turn, loss in by_turn.items():
                total, count = outcome.metrics[f"turn_{turn + 1}/agent_{agent}/loss"]
                assert (total, count) == (pytest.approx(loss, rel=1e-5, abs=1e-5), 1)
            norm = outcome.metrics[f"agent_{agent}/grad_norm"]
            assert norm == (pytest.approx(float(expected.norm()), rel=1e-5), 1)


@pytest.mark.parametrize(("tuning", "sampling_is_exact"), [("lora", True), ("lora", False), ("full", True)])
@pytest.mark.parametrize(
    "settings",
    [
        {"clip_range": 0.02},
        {"clip_range": 0.01, "clip_range_high": 0.015, "temperature": 1.4, "loss_aggregation": "token_mean"},
        {"clip_range": 0.02, "dual_clip": 1.02, "loss_aggregation": "constant"},
        {"clip_range": 1e-2, "importance_level": "sequence"},
        {"clip_range": 1e-2, "importance_level": "sequence", "loss_aggregation": "sequence_mean", "dual_clip": 1.01},
        {"clip_range": 0.02, "entropy_coef": 0.3, "mask_truncated": True, "loss_aggregation": "token_mean"},
    ],
    ids=lambda s: ", ".join(f"{k}={v}" for k, v in s.items()),
)
def test_clipped_updates_at_moving_weights_equal_the_loop(tiny_llama, settings, tuning, sampling_is_exact):
    """Three passes over one rollout; the second and third are off-policy."""
    trainer = make_trainer(tiny_llama, tuning=tuning, num_turns=2, num_updates_per_rollout=3, **settings)
    args = trainer.args
    trees = grow(trainer, ITEMS[:1])
    samples = trainer.estimate(trees)
    agents = trainer.team.agents
    old = [scores(agent.policy, samples[agent.index], args.temperature) for agent in agents]
    made = engines(trainer, moves=True)
    updates = PolicyUpdate(trainer.team, made, args, 0, sampling_is_exact).run(samples)
    clipped_tokens = 0.0
    for number in range(3):
        expected = []
        for agent, own in zip(agents, samples, strict=True):
            weights = loop_weights(trees, own, args)
            factors = loop_factors(own, weights, args)
            gradient = torch.zeros(sum(p.numel() for p in agent.parameters))
            with plain_model(agent.policy) as model:
                for s, before, w, c in zip(own, old[agent.index], weights, factors, strict=True):
                    now, entropy = token_scores(model, s, args.temperature)
                    objective = loop_surrogate(now, before, s.advantage, args)
                    loss = -w * c * (objective + args.entropy_coef * entropy.sum())
                    gradient += flat(torch.autograd.grad(loss, agent.parameters), agent.parameters)
            expected.append(gradient)
        outcome = next(updates)
        assert outcome.finite
        for agent in agents:
            if number > 0 and not expected[agent.index].any():  # whole sequences, all of which may be clipped
                assert not made[agent.index].recorded[number].any()
            else:
                assert_close(made[agent.index].recorded[number], expected[agent.index], 2e-5)
            for turn in (1, 2):
                total, count = outcome.metrics[f"turn_{turn}/agent_{agent.index}/clip_fraction"]
                kl = outcome.metrics[f"turn_{turn}/agent_{agent.index}/approx_kl"]
                assert (total == 0 and kl[0] < 1e-5) if number == 0 else kl[0] > 1e-5
                assert count == sum(s.length for s in samples[agent.index] if s.node.turn == turn - 1)
                clipped_tokens += total
            assert (outcome.metrics[f"agent_{agent.index}/ratio_max"][0] > 1.001) == (number > 0)
    assert clipped_tokens > 0  # else nothing of the kind was tested
    assert next(updates, None) is None


def test_entropy_and_masked_truncation_without_clipping(tiny_llama):
    settings = {"entropy_coef": 0.2, "mask_truncated": True, "loss_aggregation": "token_mean", "temperature": 1.3}
    trainer = make_trainer(tiny_llama, **settings)
    trees = grow(trainer)
    samples = trainer.estimate(trees)
    assert any(s.response.truncated for s in samples[0]) and any(s.weight for s in samples[0])
    # a masked response still counts in its siblings' baseline: MAGRPO's advantages of a node sum to 0 with it
    for node in (tree.root for tree in trees):
        assert sum(s.advantage for s in samples[0] if s.node is node) == pytest.approx(0, abs=1e-5)
    (outcome,), gradients = run(trainer, samples)
    for agent, own in zip(trainer.team.agents, samples, strict=True):
        weights = loop_weights(trees, own, trainer.args)
        assert [s.weight for s in own] == pytest.approx(weights)
        factors = loop_factors(own, weights, trainer.args)
        total, entropies = 0.0, 0.0
        with plain_model(agent.policy) as model:
            for s, w, c in zip(own, weights, factors, strict=True):
                now, entropy = token_scores(model, s, 1.3)
                total = total - w * c * (s.advantage * now.sum() + 0.2 * entropy.sum())
                entropies += float(entropy.detach().sum())
            gradient = flat(torch.autograd.grad(total, agent.parameters), agent.parameters)
        assert_close(gradients[agent.index], gradient)
        tokens = sum(s.length for s in own)
        name = f"turn_1/agent_{agent.index}/entropy"
        assert outcome.metrics[name] == (pytest.approx(entropies, rel=1e-5), tokens)


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("conversation", [True, False])
def test_shared_parameters_add_up_the_agents_losses(tiny_llama, tuning, conversation):
    trainer = make_trainer(tiny_llama, tuning=tuning, conversation=conversation, num_turns=2, share_parameters=True)
    trees = grow(trainer)
    samples = trainer.estimate(trees)
    outcomes, gradients = run(trainer, samples)
    assert len(gradients) == 1
    expected = torch.zeros_like(gradients[0])
    for agent, own in zip(trainer.team.agents, samples, strict=True):
        _, rows = sequence_gradients(agent, own, 1.0)
        for s, w, row in zip(own, loop_weights(trees, own, trainer.args), rows, strict=True):
            expected -= w * s.advantage * row
    assert_close(gradients[0], expected)
    norms = [outcomes[0].metrics[f"agent_{agent}/grad_norm"][0] for agent in (0, 1)]
    assert norms[0] == norms[1] == pytest.approx(float(expected.norm()), rel=1e-5)


@pytest.mark.parametrize("turn_weighting", ["objective", "undiscounted", "node"])
def test_turn_weighting(tiny_llama, turn_weighting):
    settings = {"discount": 0.5, "turn_weighting": turn_weighting, "early_termination_threshold": 0.5}
    trainer = make_trainer(tiny_llama, num_turns=2, early_termination_scope="joint", **settings)
    trees = grow(trainer)
    nodes = sum(1 for tree in trees for _ in tree.nodes())
    assert 2 < nodes < 8  # some branches ended early; their share of the turn is zero, not the others'
    samples = trainer.estimate(trees)
    assert [s.weight for s in samples[1]] == pytest.approx(loop_weights(trees, samples[1], trainer.args))
    _, gradients = run(trainer, samples)
    _, rows = sequence_gradients(trainer.team.agents[0], samples[0], 1.0)
    shares = [-w * s.advantage for w, s in zip(loop_weights(trees, samples[0], trainer.args), samples[0], strict=True)]
    assert_weighted_sum(gradients[0], shares, rows)


# Invariance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.02])
@pytest.mark.parametrize("conversation, joint_mode", [(True, "aligned"), (True, "cross"), (False, "aligned")])
def test_micro_batches_and_order_change_nothing(tiny_llama, conversation, joint_mode, clip):
    settings = {"clip_range": clip, "num_updates_per_rollout": 1, "entropy_coef": 0.1}
    trainer = make_trainer(
        tiny_llama, conversation=conversation, num_turns=2, joint_mode=joint_mode, num_generations=2, **settings
    )
    trees = grow(trainer)
    samples = trainer.estimate(trees)
    reference, expected = run(trainer, samples)
    for micro_batch_tokens, seed in [(1, 1), (40, None), (100, 1), (10**9, 1)]:
        with_args(trainer, micro_batch_tokens=micro_batch_tokens)
        mixed = [list(own) for own in samples]
        if seed is not None:
            for own in mixed:
                random.Random(seed).shuffle(own)
        outcomes, gradients = run(trainer, mixed)
        for ours, theirs in zip(gradients, expected, strict=True):
            assert_close(ours, theirs, 3e-5)
        for name, (total, count) in reference[0].metrics.items():
            if not name.startswith(("time/", "throughput/")):
                assert outcomes[0].metrics[name] == (pytest.approx(total, rel=1e-4, abs=1e-6), count), name


def test_every_response_is_trained_once_whatever_the_budget(tiny_llama, monkeypatch):
    trainer = make_trainer(tiny_llama, num_turns=2, joint_mode="cross", num_generations=2)
    trees = grow(trainer)
    samples = trainer.estimate(trees)
    trained = []

    def recorded(own, max_tokens):
        for micro in micro_batches(own, max_tokens):
            trained.append(micro)
            yield micro

    monkeypatch.setattr("mlrl.trainers.samples.micro_batches", recorded)
    for micro_batch_tokens in (1, 30, 75, 10**9):
        trained.clear()
        with_args(trainer, micro_batch_tokens=micro_batch_tokens)
        outcomes, _ = run(trainer, samples)
        seen = [(s.agent, id(s.response)) for micro in trained for s in micro.samples]
        there = [(a, id(r)) for t in trees for n in t.nodes() for a, own in enumerate(n.responses) for r in own]
        assert sorted(seen) == sorted(there) and len(set(seen)) == len(seen) == 2 * 2 * (2 + 4 * 2)
        for micro in trained:
            assert micro.tree.num_tokens <= micro_batch_tokens or len(micro.samples) == 1
        tokens, seconds = outcomes[0].metrics["throughput/trained_tokens_per_s"]
        assert tokens == sum(len(r.token_ids) for t in trees for n in t.nodes() for own in n.responses for r in own)
        assert seconds == outcomes[0].metrics["time/update_s"][0] > 0


def test_the_last_token_and_a_token_alone_have_a_gradient(tiny_llama):
    """The end token is an action, alone and as the last of many, though it pads and stands in the prompt too."""
    end = 2  # <|im_end|>, also the pad token, also in every chat prompt
    trainer = make_trainer(tiny_llama, num_generations=2)
    trees = grow(trainer)
    own = all_samples(trainer, trees)[0][:2]
    assert end in own[0].node.prompts[0].token_ids
    own[0].response.token_ids = [end]
    own[1].response.token_ids = [50, 60, end]
    agent = trainer.team.agents[0]
    gradients = []
    for sample, advantage in ((own[0], 1.0), (own[1], 1.0)):
        sample.advantage, sample.weight = advantage, 1.0
        engine = RecordingEngine(agent.parameters, trainer._optimizer_settings(1e-3), moves=False)
        update = PolicyUpdate(trainer.team, [engine], trainer.args, step=0)
        with agent.policy.use():
            for micro in micro_batches([sample], 1000):
                outcome = type("Outcome", (), {"metrics": {}, "add": lambda *a: None})()
                engine.backward(update._loss(agent, micro, 1.0, update._settings([sample]), outcome))
        engine.step(0.0)
        gradients.append(engine.recorded[0])
        _, row = sequence_gradients(agent, [sample], 1.0)
        assert_close(gradients[-1], -row[0])
    own[1].response.token_ids = [50, 60, 61]
    value, _ = sequence_gradients(agent, [own[1]], 1.0)
    own[1].response.token_ids = [50, 60, end]
    assert value != sequence_gradients(agent, [own[1]], 1.0)[0]


# Identities ----------------------------------------------------------------------------------------------------------


def test_clipping_at_the_old_weights_is_reinforce(tiny_llama):
    trainer = make_trainer(tiny_llama, num_turns=2)
    trees = grow(trainer)
    samples = trainer.estimate(trees)
    _, expected = run(trainer, samples)
    for level, passes in (("sequence", 1), ("sequence", 2), ("token", 1), ("token", 2)):
        clip = {"token": 0.2, "sequence": 3e-4}[level]
        with_args(trainer, clip_range=clip, importance_level=level, num_updates_per_rollout=passes)
        outcomes, gradients = run(trainer, samples)
        assert len(outcomes) == passes
        for ours, theirs in zip(gradients, expected, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_ratio_of_a_fresh_sample_is_one(tiny_llama, temperature, tuning):
    """Sampler and training forward score the same distribution, in one turn and the next."""
    trainer = make_trainer(tiny_llama, tuning=tuning, num_turns=2, temperature=temperature)
    trees = grow(trainer)
    for agent, own in zip(trainer.team.agents, all_samples(trainer, trees), strict=True):
        assert len(own) == 2 * 3 * (1 + 3)
        for micro in micro_batches(own, 200):
            with torch.no_grad(), agent.policy.use():
                scored, lengths = agent.policy.logprobs(micro.tree, temperature)
            for sample, now in zip(micro.samples, scored.logprobs_L.split(lengths), strict=True):
                ratios = (now - torch.tensor(sample.response.logprobs)).exp()
                assert len(ratios) == sample.length and bool(((ratios - 1).abs() < 1e-4).all())


# Minibatches and stopping --------------------------------------------------------------------------------------------


def test_minibatches_cover_each_pass_and_are_scaled(tiny_llama):
    """8 nodes in minibatches of 3: 3 + 3 + 2; a minibatch of n of the M samples is multiplied by M/n."""
    settings = {
        "clip_range": 0.2,
        "train_batch_size": 3,
        "num_updates_per_rollout": 2,
        "loss_aggregation": "token_mean",
    }
    trainer = make_trainer(tiny_llama, num_turns=2, **settings)
    trees = grow(trainer)
    samples = trainer.estimate(trees)
    nodes = [node for tree in trees for node in tree.nodes()]
    made = engines(trainer)
    update = PolicyUpdate(trainer.team, made, trainer.args, step=4)
    plans = list(update._minibatches(samples))
    assert [len(plan[0]) // 3 for plan in plans] == [3, 3, 2, 3, 3, 2]
    for plan in plans:  # the same nodes for all agents, whole nodes only
        assert {id(s.node) for s in plan[0]} == {id(s.node) for s in plan[1]}
        assert all(len(own) == 3 * len({id(s.node) for s in own}) for own in plan)
    chosen = [[id(s.node) for s in plan[0]] for plan in plans]
    assert set().union(*chosen[:3]) == set().union(*chosen[3:]) == {id(node) for node in nodes}
    assert chosen[:3] != chosen[3:]  # each pass has an order of its own
    again = [
        [id(s.node) for s in p[0]] for p in PolicyUpdate(trainer.team, made, trainer.args, 4)._minibatches(samples)
    ]
    other = [
        [id(s.node) for s in p[0]] for p in PolicyUpdate(trainer.team, made, trainer.args, 5)._minibatches(samples)
    ]
    assert again == chosen != other

    outcomes = list(update.run(samples))
    assert len(outcomes) == 6
    for agent in trainer.team.agents:
        own = samples[agent.index]
        _, rows = sequence_gradients(agent, own, 1.0)
        weights = loop_weights(trees, own, trainer.args)
        factors = loop_factors(own, weights, trainer.args)  # the mean length of the whole batch, not of the minibatch
        for number, plan in enumerate(plans):
            members = {id(s) for s in plan[agent.index]}
            shares = []
            for s, w, c in zip(own, weights, factors, strict=True):
                shares.append(-len(own) / len(members) * w * c * s.advantage if id(s) in members else 0.0)
            assert_weighted_sum(made[agent.index].recorded[number], shares, rows)
        # the three minibatches of a pass, by their sizes, add up to the whole batch
        pieces = made[agent.index].recorded[:3]
        whole = sum(piece * len(plan[0]) / len(own) for piece, plan in zip(pieces, plans[:3], strict=True))
        shares = [-w * c * s.advantage for s, w, c in zip(own, weights, factors, strict=True)]
        assert_weighted_sum(whole, shares, rows)


def test_target_kl_stops_the_passes(tiny_llama):
    settings = {"clip_range": 0.2, "num_updates_per_rollout": 6}
    trainer = make_trainer(tiny_llama, **settings)
    samples = trainer.estimate(grow(trainer))

    def kls(**changes) -> list[float]:
        for agent in trainer.team.agents:
            for number, parameter in enumerate(agent.parameters):
                parameter.data.copy_(start[agent.index][number])
        with_args(trainer, **changes)
        update = PolicyUpdate(trainer.team, engines(trainer, moves=True), trainer.args, step=0)
        return [
            max(t / n for name, (t, n) in outcome.metrics.items() if name.endswith("approx_kl"))
            for outcome in update.run(samples)
        ]

    start = [[p.detach().clone() for p in agent.parameters] for agent in trainer.team.agents]
    free = kls(target_kl=None)
    assert len(free) == 6 and free[0] < 1e-6 and all(a < b for a, b in itertools.pairwise(free))
    between = (free[2] + free[3]) / 2
    stopped = kls(target_kl=between)
    assert len(stopped) == 4 and stopped == pytest.approx(free[:4])


# Steps ---------------------------------------------------------------------------------------------------------------


def weights_of(trainer) -> list[torch.Tensor]:
    return [torch.cat([p.detach().flatten() for p in agent.parameters]) for agent in trainer.team.agents]


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_step_changes_its_own_agent_alone(tiny_llama, tuning):
    trainer = make_trainer(tiny_llama, tuning=tuning, num_agents=3)
    samples = trainer.estimate(grow(trainer))
    for mover in range(3):
        before = weights_of(trainer)
        frozen = [
            p.detach().clone() for base in trainer.team.bases for p in base.model.parameters() if not p.requires_grad
        ]
        for sample_agent, own in enumerate(samples):  # the others have no signal
            for s in own:
                s.advantage = float(s.generation) if sample_agent == mover else 0.0
        trainer.update(samples)
        after = weights_of(trainer)
        assert [not torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [i == mover for i in range(3)]
        still = [p for base in trainer.team.bases for p in base.model.parameters() if not p.requires_grad]
        assert all(torch.equal(a, b) for a, b in zip(frozen, still, strict=True))
        trainer.engines = engines(trainer, moves=True)  # no momentum of the one before


@pytest.mark.parametrize("share_parameters", [False, True])
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_every_agent_moves(tiny_llama, tuning, share_parameters):
    """From a real start, adapters at zero, and with the settings that a run has."""
    trainer = make_trainer(
        tiny_llama, tuning=tuning, share_parameters=share_parameters, num_agents=3, spread=0.0, max_grad_norm=1.0
    )
    start, last = weights_of(trainer), weights_of(trainer)
    for step in range(3):
        trainer.update(trainer.estimate(grow(trainer, [{"prompt": f"story {step}"}, {"prompt": "the sea"}])))
        now = weights_of(trainer)
        assert all(float((a - b).norm()) > 0 for a, b in zip(now, last, strict=True))
        last = now
    moved = [float((a - b).abs().mean()) for a, b in zip(now, start, strict=True)]
    assert min(moved) > RATE[tuning] and (len(set(moved)) == 1) == share_parameters


def test_all_or_none_step_when_one_gradient_is_nan(tiny_llama):
    trainer = make_trainer(tiny_llama, max_nonfinite_steps=3)
    samples = trainer.estimate(grow(trainer))
    good = [[s.advantage for s in own] for own in samples]
    start = weights_of(trainer)

    def poison(bad: bool):
        samples[1][0].advantage = math.nan if bad else good[1][0]

    poison(True)
    trainer.update(samples)
    trainer.update(samples)
    assert all(torch.equal(a, b) for a, b in zip(start, weights_of(trainer), strict=True))
    assert all(engine.updates == 0 and not engine.recorded for engine in trainer.engines)
    poison(False)
    trainer.update(samples)  # nothing of the NaN was left behind, and the count starts again
    after = weights_of(trainer)
    assert all(bool(w.isfinite().all()) and not torch.equal(a, w) for a, w in zip(start, after, strict=True))
    poison(True)
    trainer.update(samples)
    trainer.update(samples)
    logged = []
    trainer._log_training = lambda: logged.append(True)
    trainer._save_run = lambda: {"agents": "here"}
    trainer.nonfinite.stop_if_too_many()  # two in a row
    trainer.update(samples)
    with pytest.raises(NonFiniteError, match="max_nonfinite_steps=3: .* in here"):
        trainer.nonfinite.stop_if_too_many()
    assert logged == [True]  # what happened is not lost
    assert all(torch.equal(a, b) for a, b in zip(after, weights_of(trainer), strict=True))
    assert trainer.averager.flush()["nonfinite_fraction"] == pytest.approx(5 / 6)


def test_an_infinite_gradient_counts_too(tiny_llama):
    trainer = make_trainer(tiny_llama, tuning="full")
    samples = trainer.estimate(grow(trainer))
    samples[0][0].advantage = 1e39  # inf in float32
    start = weights_of(trainer)
    (outcome,), gradients = list(PolicyUpdate(trainer.team, trainer.engines, trainer.args, 0).run(samples)), None
    assert gradients is None and not outcome.finite
    assert all(torch.equal(a, b) for a, b in zip(start, weights_of(trainer), strict=True))


def test_clipping_and_rates_are_reported(tiny_llama):
    """The norm is the one before clipping, and clipped_fraction says whether it was cut; one learning rate an agent."""
    trainer = make_trainer(tiny_llama, agent_learning_rate=[1e-3, 1e-2])
    samples = trainer.estimate(grow(trainer))
    free, _ = run(trainer, samples)
    norms = [free[0].metrics[f"agent_{agent}/grad_norm"][0] for agent in (0, 1)]
    limit = statistics.fmean(norms)
    args = with_args(trainer, max_grad_norm=limit)
    start = weights_of(trainer)
    real = [
        RecordingEngine(agent.parameters, trainer._optimizer_settings(rate))
        for agent, rate in zip(trainer.team.agents, args.agent_learning_rate, strict=True)
    ]
    (outcome,) = PolicyUpdate(trainer.team, real, args, 0).run(samples)
    for agent, rate in enumerate(args.agent_learning_rate):
        assert outcome.metrics[f"agent_{agent}/grad_norm"] == (pytest.approx(norms[agent], rel=1e-6), 1)
        assert outcome.metrics[f"agent_{agent}/grad_clipped_fraction"] == (float(norms[agent] > limit), 1)
        assert outcome.metrics[f"agent_{agent}/learning_rate"] == (rate, 1)
        # AdamW's first update moves every weight by its learning rate (where the gradient is far above eps)
        change = (weights_of(trainer)[agent] - start[agent]).abs()
        assert float(change.max()) == pytest.approx(rate, rel=1e-2)


def test_schedules_count_updates_not_steps(tiny_llama):
    """Two passes of two minibatches over 3 steps are 12 updates; the linear schedule ends with the run, not before."""
    settings = {"clip_range": 0.2, "train_batch_size": 2, "num_updates_per_rollout": 2, "lr_scheduler": "linear"}
    items = [{"prompt": f"story {i}"} for i in range(12)]
    trainer = make_trainer(tiny_llama, train_dataset=items, rollout_batch_size=4, max_steps=3, **settings)
    assert trainer._optimizer_settings(1.0).total_updates == 3 * 2 * 2
    rates = []
    for step in range(3):
        trainer.step_number = step
        samples = trainer.estimate(grow(trainer, items[4 * step : 4 * step + 4]))
        for outcome in PolicyUpdate(trainer.team, trainer.engines, trainer.args, step).run(samples):
            rates.append(outcome.metrics["agent_0/learning_rate"][0])
    assert rates == pytest.approx([RATE["lora"] * (12 - n) / 12 for n in range(12)])


@pytest.mark.parametrize("config, trainer", [(MARLOOConfig, MARLOOTrainer), (MAREINFORCEConfig, MAREINFORCETrainer)])
def test_one_agent_is_ordinary_reinforcement_learning(tiny_gpt2, config, trainer):
    made = make_trainer(tiny_gpt2, config=config, trainer=trainer, num_agents=1, conversation=False, num_turns=2,
                        tuning="full")  # fmt: skip
    trees = grow(made)
    samples = made.estimate(trees)
    _, gradients = run(made, samples)
    _, rows = sequence_gradients(made.team.agents[0], samples[0], 1.0)
    expected_advantages = loop_advantages(trees, 0, made.args, {})
    weights = loop_weights(trees, samples[0], made.args)
    shares = [-w * expected_advantages[id(s.node), s.generation] for w, s in zip(weights, samples[0], strict=True)]
    assert_weighted_sum(gradients[0], shares, rows)


def test_the_betas_reach_the_optimizer(tiny_llama):
    trainer = make_trainer(tiny_llama, adam_beta1=0.5, adam_beta2=0.95)
    assert all(engine.optimizer.param_groups[0]["betas"] == (0.5, 0.95) for engine in trainer.engines)
