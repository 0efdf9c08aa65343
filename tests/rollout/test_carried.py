"""Calls with steady weights take up what was laid out and read before, and sample what they would have sampled."""

import gc
import weakref

import pytest
import torch

from mlrl.models import decoding
from mlrl.models.language_model import LanguageModel
from mlrl.rollout import carried, sampler
from mlrl.rollout.sampler import Request, Sampler, SamplingParams
from tests.models.test_lora import team as two_adapters
from tests.models.test_packing import needs_mkl
from tests.rollout.test_sampler import ApproxResponses, as_team

PARAMS = SamplingParams(max_new_tokens=16)


def turn_of(number: int, prompts: dict[int, list[list[int]]], generations: int = 3) -> list[Request]:
    return [
        Request(agent, prompt, [(number, "train", p, (), agent, k) for k in range(generations)])
        for agent, own in prompts.items()
        for p, prompt in enumerate(own)
    ]


def dialogue(turns: int = 4) -> list[list[Request]]:
    """Each turn goes on from the one before, with more prompts; agent 1 sits one turn out."""
    first = [list(range(100, 120)), [*range(100, 110), 7, 8, 9]]
    prompts = {0: first, 1: first}
    calls = []
    for turn in range(turns):
        calls.append(turn_of(turn, {0: prompts[0]} if turn == 2 else prompts))
        prompts = {a: [[*ids, 130 + turn, 140 + p] for ids in own for p in range(2)] for a, own in prompts.items()}
    return calls


@pytest.fixture
def tokens_run(monkeypatch) -> list[int]:
    """How many tokens each forward over a packed tree runs."""
    counts, hidden_states = [], LanguageModel.hidden_states

    def counted(self, input_ids, position_ids, plan):
        if input_ids.shape[0] == 1 and hasattr(plan, "captured"):
            counts.append(input_ids.shape[1])
        return hidden_states(self, input_ids, position_ids, plan)

    monkeypatch.setattr(LanguageModel, "hidden_states", counted)
    return counts


@pytest.mark.parametrize("max_rows", [5, 256])
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_mkl)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_samples_are_those_of_calls_apart(kind, packed, max_rows, monkeypatch, tokens_run):
    monkeypatch.setattr(decoding, "packing_pays", lambda *_: packed)
    draw = Sampler(as_team(two_adapters(kind), ["agent_0", "agent_1"], kind), max_rows)
    tokens_run.clear()
    apart = [draw.sample(call, PARAMS) for call in dialogue()]
    alone = sum(tokens_run)
    tokens_run.clear()
    with draw.steady_weights():
        together = [draw.sample(call, PARAMS) for call in dialogue()]
    assert together == [ApproxResponses(call) for call in apart]
    assert sum(tokens_run) < 0.75 * alone


def test_a_prompt_met_again_is_run_for_its_last_token(tokens_run):
    """As greedy baselines meet those of the tree."""
    draw = Sampler(as_team(two_adapters(), ["agent_0", "agent_1"]))
    call = dialogue()[0]
    tokens_run.clear()  # what was tried as the model was set up
    with draw.steady_weights():
        draw.sample(call, PARAMS)
        draw.sample(call, SamplingParams(0.0, max_new_tokens=4))
    assert tokens_run == [2 * 23, 4]  # a common beginning of ten; two prompts of two agents


@needs_mkl
def test_weights_are_laid_out_once(monkeypatch):
    monkeypatch.setattr(decoding, "packing_pays", lambda weight, size, rows, steps: rows >= 6)
    made = []

    class Told(decoding.DecodeStep):
        def __init__(self, model, route, rows, steps):
            super().__init__(model, route, rows, steps)
            made.append((tuple(route.adapters), self.packed))

    monkeypatch.setattr(carried, "DecodeStep", Told)
    both, one = ("agent_0", "agent_1"), ("agent_0",)
    draw = Sampler(as_team(two_adapters(), list(both)))
    with draw.steady_weights():
        for number, (agents, generations) in enumerate([((0, 1), 1), ((0, 1), 3), ((0, 1), 1), ((0,), 6), ((0,), 1)]):
            draw.sample(turn_of(number, {a: [[1, 20, 21]] for a in agents}, generations), PARAMS)
    assert made == [(both, False), (both, True), (one, True)]
    made.clear()
    for _ in range(2):
        draw.sample(turn_of(0, {0: [[1, 20, 21]]}, 6), PARAMS)
    assert len(made) == 2  # outside, weights may have changed


def test_changed_weights_are_seen_outside():
    base = two_adapters()
    draw = Sampler(as_team(base, ["agent_0", "agent_1"]))
    call = dialogue()[0]
    with draw.steady_weights():
        before = draw.sample(call, PARAMS)
    with torch.no_grad():
        for parameter in base.adapter_parameters("agent_0"):
            parameter.mul_(1.5)
    with draw.steady_weights():
        after = draw.sample(call, PARAMS)
    assert [r[0].logprobs[0] for r in after[:2]] != [r[0].logprobs[0] for r in before[:2]]
    assert after == ApproxResponses(draw.sample(call, PARAMS))


def test_nothing_is_left_behind(monkeypatch):
    kept, given_back = [], []
    monkeypatch.setattr(sampler, "give_back_memory", lambda: given_back.append(True))
    prepared = carried.Carried.__init__

    def noted(self, *args, **kwargs):
        prepared(self, *args, **kwargs)
        kept.append(weakref.ref(self))

    monkeypatch.setattr(carried.Carried, "__init__", noted)
    draw = Sampler(as_team(two_adapters(), ["agent_0", "agent_1"]))
    with pytest.raises(KeyError), draw.steady_weights():
        draw.sample(dialogue()[0], PARAMS)
        assert not given_back
        raise KeyError
    with draw.steady_weights(), pytest.raises(RuntimeError, match="already"), draw.steady_weights():
        pass
    gc.collect()
    assert given_back and kept and all(ref() is None for ref in kept)


def test_no_more_is_kept_of_prompts_than_a_batch_holds():
    draw = Sampler(as_team(two_adapters(), ["agent_0", "agent_1"]), max_rows=3)
    call = turn_of(0, {0: [list(range(100 + 20 * p, 118 + 20 * p)) for p in range(8)]})  # eight batches
    with draw.steady_weights():
        draw.sample(call, PARAMS)
        [mine] = draw._carried.values()
        held = sum(states.nbytes for block in mine.prompts.blocks for layer in block for states in layer)
        store = 2 * 2 * 2 * 4 * 16 * (18 + 3 * 16)  # two layers, keys and values, key heads, bytes, head size, places
        assert store / 2 < held <= store
