"""Margins of pairs, packed and shared, against forwards over single responses; and the loss's gradient through them."""

import pytest
import torch

from mlrl.losses.preference import PreferenceLossSettings, preference_loss
from mlrl.preference.pairs import candidate_pairs, trajectories
from mlrl.preference.scoring import batch_margins, pair_batches
from tests.preference.build import SAMPLING
from tests.trainers.loops import assert_close, flat, grow, make_trainer, plain_model

TEMPERATURE = 0.7


def make(folder, **settings):
    trainer = make_trainer(folder, num_turns=2, temperature=TEMPERATURE, **settings)
    pairs = []
    for tree in grow(trainer):
        paths = trajectories(tree, discount=1.0, writer="current", sampling=SAMPLING)
        pairs += candidate_pairs(tree.item, tree.ordinal, paths, selection="reward_gap", limit=7, seed=0)
    return trainer, pairs


@torch.no_grad()
def measured_margins(policy, pairs, agent, *, max_tokens, temperature):
    """Margins of all pairs, micro-batch after micro-batch."""
    margins_P = torch.zeros(len(pairs))
    with policy.use():
        for batch in pair_batches(pairs, agent, max_tokens):
            margins_P[batch.places] = batch_margins(policy, batch, temperature)
    return margins_P


def loop_margin(model, pair, agent):
    """Σ over sides, turns and tokens of ± log π, each from a forward over one prompt and one response."""
    total = 0.0
    for sign, side in ((1, pair.winner), (-1, pair.loser)):
        for turn in side.turns:
            prompt, response = turn.prompts[agent].token_ids, turn.responses[agent].token_ids
            logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
            for place, token in enumerate(response):
                total = total + sign * torch.log_softmax(logits[len(prompt) - 1 + place] / TEMPERATURE, -1)[token]
    return total


@pytest.mark.parametrize(("conversation", "max_tokens"), [(True, 60), (False, 4096)])
def test_margins_equal_single_forwards_however_they_are_packed(tiny_llama, conversation, max_tokens):
    trainer, pairs = make(tiny_llama, conversation=conversation)
    assert len(pairs) == 14
    for agent in trainer.team.agents:
        ours = measured_margins(
            agent.policy, pairs, agent.index, max_tokens=max_tokens, temperature=TEMPERATURE
        )  # fmt: skip
        with torch.no_grad(), plain_model(agent.policy) as model:
            theirs = torch.stack([loop_margin(model, pair, agent.index) for pair in pairs])
        assert_close(ours, theirs)


def test_every_pair_is_in_one_micro_batch_and_shared_responses_are_run_once(tiny_llama):
    _, pairs = make(tiny_llama)
    batches = list(pair_batches(pairs, 0, 150))
    assert len(batches) > 1
    assert sorted(place for batch in batches for place in batch.places) == list(range(len(pairs)))
    [whole] = pair_batches(pairs, 0, 10**6)
    distinct = {
        (tuple(turn.prompts[0].token_ids), tuple(turn.responses[0].token_ids))
        for pair in pairs
        for side in (pair.winner, pair.loser)
        for turn in side.turns
    }
    assert sum(segment.scored for segment in whole.tree.segments) == len(distinct) < len(whole.uses)


def test_an_agents_gradient_is_that_of_the_joint_loss(tiny_llama):
    trainer, pairs = make(tiny_llama)
    settings, pairs, max_tokens = PreferenceLossSettings(0.5, 0.1), pairs[::3], 100
    agent, partner = trainer.team.agents
    how = {"max_tokens": max_tokens, "temperature": TEMPERATURE}
    reference_P = sum(measured_margins(a.policy, pairs, a.index, **how) for a in (agent, partner)) + 0.3
    other_P = measured_margins(partner.policy, pairs, 1, **how) - reference_P
    total = 0.0
    with agent.policy.use():
        for batch in pair_batches(pairs, 0, max_tokens):
            own_P = batch_margins(agent.policy, batch, TEMPERATURE)
            outputs = preference_loss(
                own_P, torch.full_like(own_P, 1 / len(pairs)).detach(), settings, other_P[batch.places]
            )  # fmt: skip
            outputs.loss.backward()
            total += float(outputs.loss.detach())
    ours = flat([p.grad for p in agent.parameters], agent.parameters)

    with plain_model(agent.policy) as model:
        loss = 0.0
        for pair, other in zip(pairs, other_P, strict=True):
            scaled = 0.5 * (loop_margin(model, pair, 0) + other)
            loss = loss + (0.9 * torch.log1p((-scaled).exp()) + 0.1 * torch.log1p(scaled.exp())) / len(pairs)
        theirs = flat(torch.autograd.grad(loss, agent.parameters, allow_unused=True), agent.parameters)
    assert total == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_close(ours, theirs)
    assert all(p.grad is None for p in partner.parameters)


def test_answers_that_differ_in_the_end_token_alone_have_a_margin(tiny_llama):
    trainer, pairs = make(tiny_llama)
    pair = next(pair for pair in pairs if len(pair.winner.turns[0].responses[0].token_ids) > 1)
    turn = pair.winner.turns[0]
    response = turn.responses[0]
    cut = type(response)(response.token_ids[:-1], response.logprobs[:-1], response.text, True)
    loser = type(pair.winner)(
        (type(turn)(turn.prompts, (cut, *turn.responses[1:])),), 0.0, 0.0, "current", 1, pair.winner.sampling
    )
    winner = type(pair.winner)((turn,), 1.0, 1.0, "current", 0, pair.winner.sampling)
    pair = type(pair)(0, 0, "", winner, loser)
    agent = trainer.team.agents[0]
    margins = measured_margins(agent.policy, [pair], 0, max_tokens=4096, temperature=TEMPERATURE)
    with torch.no_grad(), plain_model(agent.policy) as model:
        logits = model(input_ids=torch.tensor([turn.prompts[0].token_ids + response.token_ids])).logits[0, -2]
        expected = torch.log_softmax(logits / TEMPERATURE, -1)[response.token_ids[-1]]
    assert float(margins[0]) == pytest.approx(float(expected), rel=1e-4)
