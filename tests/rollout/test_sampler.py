"""Batched sampling equals a loop of single sequences, whatever shares its batch."""

import numpy as np
import pytest
import torch

from mlrl.agents import Agent, Source, Team
from mlrl.models.base import Base, Policy
from mlrl.models.decoding import DecodeStep
from mlrl.parallel.mesh import Mesh
from mlrl.rollout import carried, sampler
from mlrl.rollout.sampler import Request, Sampler, SamplingParams, inverse_cdf, truncate
from mlrl.rollout.streams import derive_seed, uniforms
from tests.models.test_lora import separate
from tests.models.test_lora import team as two_adapters
from tests.tiny import tiny_model, tiny_tokenizer

STOPS = frozenset({2, *range(40, 70)})  # about one token in twelve ends a response


def as_team(base: Base, adapters, kind: str = "llama") -> Team:
    tokenizer = tiny_tokenizer(kind)
    agents = [Agent(i, tokenizer, Source(base.model), Policy(base, a), STOPS) for i, a in enumerate(adapters)]
    return Team(agents, [base], False, None, Mesh.alone(len(agents)))


def requests(num_agents: int = 2, generations: int = 3, seed: int = 1) -> list[Request]:
    prompts = [[1, 20, 21, 22, 23, 24], [1, 30], [1, 20, 21, 22, 23, 24, 25, 26, 27], [1, 30]]
    return [
        Request(agent, prompt, [(seed, "train", p, (), agent, k) for k in range(generations)])
        for p, prompt in enumerate(prompts)
        for agent in range(num_agents)
    ]


def looped(model, prompt, key, params: SamplingParams):
    """One sequence at a time through the model's own forward: plain cumulative sum, no cache."""
    ids, logprobs = [], []
    for u in uniforms(key, params.max_new_tokens):
        logits = model(torch.tensor([prompt + ids])).logits[0, -1].float()
        if params.temperature == 0:
            token, logprob = int(logits.argmax()), float(logits.log_softmax(-1).max())
        else:
            logits = truncate((logits / params.temperature)[None], params.top_k, params.top_p)[0]
            p = logits.double().softmax(-1)
            token = int(torch.searchsorted(p.cumsum(-1), torch.tensor([u], dtype=torch.float64), right=True))
            logprob = float(p[token].log())
        ids.append(token)
        logprobs.append(logprob)
        if token in STOPS:
            break
    return ids, logprobs


def test_decoding_is_told_how_much_is_to_come(monkeypatch):
    """By which it packs weights or not; what that takes is given back once all is drawn."""
    told, events = [], []
    give_back = sampler.give_back_memory

    class ToldStep(DecodeStep):
        def __init__(self, model, route, rows, steps):
            told.append((rows, steps))
            events.append("decoding")
            super().__init__(model, route, rows, steps)

    def gave_back():
        events.append("given back")
        give_back()

    monkeypatch.setattr(carried, "DecodeStep", ToldStep)
    monkeypatch.setattr(sampler, "give_back_memory", gave_back)
    Sampler(as_team(two_adapters("llama"), ["agent_0", "agent_1"]), max_rows=20).sample(
        requests(), SamplingParams(max_new_tokens=17)
    )
    assert told == [(20, 17), (4, 17)]  # 24 responses
    assert events == ["decoding", "decoding", "given back"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, max_new_tokens=24),
        SamplingParams(0.6, max_new_tokens=12),
        SamplingParams(1.3, top_p=0.8, top_k=40, max_new_tokens=12),
        SamplingParams(0.0, max_new_tokens=12),
    ],
    ids=["plain", "cold", "truncated", "greedy"],
)
def test_equals_the_loop(kind, params):
    base = Base(tiny_model(kind), kind)
    team = as_team(base, [None], kind)
    sampled = Sampler(team).sample(requests(num_agents=1), params)
    reference = tiny_model(kind)
    with torch.no_grad():
        for request, responses in zip(requests(num_agents=1), sampled, strict=True):
            for key, response in zip(request.keys, responses, strict=True):
                ids, logprobs = looped(reference, request.prompt, key, params)
                assert response.token_ids == ids
                np.testing.assert_allclose(response.logprobs, logprobs, rtol=1e-4, atol=1e-4)
                assert response.truncated == (ids[-1] not in STOPS)
    lengths = [len(r.token_ids) for own in sampled for r in own]
    assert params.temperature == 0 or len(set(lengths)) > 3  # rows left at different times


@pytest.mark.parametrize("max_rows", [1, 2, 5, 7, 256])
def test_the_same_whatever_the_batch(max_rows):
    base = two_adapters()
    team = as_team(base, ["agent_0", "agent_1"])
    params = SamplingParams(max_new_tokens=20)
    whole = Sampler(team).sample(requests(), params)
    assert Sampler(team, max_rows).sample(requests(), params) == pytest.approx_responses(whole)
    shuffled = list(reversed(requests()))
    assert list(reversed(Sampler(team, max_rows).sample(shuffled, params))) == pytest.approx_responses(whole)


@pytest.fixture(autouse=True)
def _approx(monkeypatch):
    monkeypatch.setattr(pytest, "approx_responses", ApproxResponses, raising=False)


class ApproxResponses:
    """Equal tokens, texts and ends; log-probs up to rounding."""

    def __init__(self, expected):
        self.expected = expected

    def __eq__(self, other):
        for ours, theirs in zip(other, self.expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert (a.token_ids, a.text, a.truncated) == (b.token_ids, b.text, b.truncated)
                np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-5)
        return True


def test_agents_in_one_batch_use_their_own_adapters():
    base = two_adapters()
    team = as_team(base, ["agent_0", "agent_1", None])
    params = SamplingParams(max_new_tokens=8)
    sampled = Sampler(team).sample(requests(num_agents=3), params)
    models = [separate(base, "llama", "agent_0"), separate(base, "llama", "agent_1"), tiny_model()]
    with torch.no_grad():
        for request, responses in zip(requests(num_agents=3), sampled, strict=True):
            for key, response in zip(request.keys, responses, strict=True):
                assert response.token_ids == looped(models[request.agent], request.prompt, key, params)[0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampling_logprobs_are_training_logprobs(temperature):
    from mlrl.models.prefix_tree import PrefixTree

    base = two_adapters()
    team = as_team(base, ["agent_0", "agent_1"])
    sampled = Sampler(team).sample(requests(), SamplingParams(temperature, max_new_tokens=16))
    for request, responses in zip(requests(), sampled, strict=True):
        tree = PrefixTree()
        for k, response in enumerate(responses):
            tree.add(response.token_ids, tree.add(request.prompt), scored=True, key=k)
        policy = team.agents[request.agent].policy
        with torch.no_grad(), policy.use():
            scored = policy.logprobs(tree, temperature)[0].logprobs_L
        ratio = (scored - torch.tensor([p for r in responses for p in r.logprobs])).exp()
        assert (ratio - 1).abs().max() < 1e-4


def test_every_edge_of_a_batch():
    base = Base(tiny_model(), "tiny")
    team = as_team(base, [None])
    one = Sampler(team).sample([Request(0, [5], [(0, "t", 0)])], SamplingParams(max_new_tokens=1))
    assert len(one[0][0].token_ids) == 1
    assert Sampler(team).sample([], SamplingParams()) == []
    heard = []
    Sampler(team).sample(requests(1), SamplingParams(max_new_tokens=6), heard.append)
    assert heard[0] == 12 and len(heard) <= 6
    longest = Sampler(team, min_new_tokens=10).sample(requests(1), SamplingParams(max_new_tokens=10))
    assert {len(r.token_ids) for own in longest for r in own} == {10}


def test_inverse_cdf_takes_the_share_of_each_token():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(6, 3)
    tokens, logprobs = inverse_cdf(logits, torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 1e-16], dtype=torch.float64))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]))


@pytest.mark.parametrize("vocab", [1000, 1024])  # with a last block that is filled up, and without
def test_inverse_cdf_never_takes_a_token_without_mass(vocab):
    logits = torch.full((3, vocab), float("-inf"))
    logits[:, 300], logits[:, 700] = 0.0, 0.0  # all mass in two blocks, none at the end of the vocabulary
    tokens, _ = inverse_cdf(logits, torch.tensor([0.0, 0.4999999, 0.9999999999999999], dtype=torch.float64))
    assert tokens.tolist() == [300, 300, 700]


@pytest.mark.parametrize("vocab", [600, 512])
def test_inverse_cdf_frequencies(vocab):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)).expand(20000, vocab).contiguous()
    tokens, _ = inverse_cdf(logits, torch.from_numpy(uniforms(("frequencies",), 20000)))
    p = logits[0].softmax(-1)
    counts = torch.bincount(tokens, minlength=vocab) / 20000
    chi_square = float((20000 * (counts - p) ** 2 / p).sum())
    freedom = vocab - 1  # mean and half the variance of χ²
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_truncation_keeps_the_likeliest():
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    assert truncate(logits, 2, 1.0).isfinite().tolist() == [[False, True, True, False]]
    assert truncate(logits, 0, 0.4).isfinite().tolist() == [[False, True, False, False]]  # 0.4 reaches 0.4
    assert truncate(logits, 0, 0.41).isfinite().tolist() == [[False, True, True, False]]
    assert truncate(logits, 0, 0.71).isfinite().tolist() == [[False, True, True, True]]


def test_streams_are_named_not_ordered():
    assert (
        uniforms((1, "train", 0, (0, 1), 0, 2), 5).tolist() == uniforms((1, "train", 0, (0, 1), 0, 2), 9)[:5].tolist()
    )
    keys = [
        (s, stream, o, p, a, k)
        for s in (1, 2)
        for stream in ("train", "eval")
        for o in (0, 1)
        for p in ((), (0,), (0, 0))
        for a in (0, 1)
        for k in (0, 1)
    ]
    assert len({uniforms(key, 1)[0] for key in keys}) == len(keys)
    assert 0 <= derive_seed(1, 2) < 2**63 and derive_seed(1, 2) != derive_seed(2, 1)


def test_a_process_without_agents_samples_nothing():
    """As one whose agents live elsewhere."""
    draw = Sampler(Team([], [], False, None, Mesh.alone(0)))
    assert draw.sample([], SamplingParams()) == []
    with draw.steady_weights():
        assert draw.sample([], SamplingParams()) == []
