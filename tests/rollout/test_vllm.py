"""Sampling on a server: what it draws is what the trainer has, and what goes wrong there is said or mended."""

import threading
import time

import pytest
import torch

from mlrl.errors import RolloutError
from mlrl.models.prefix_tree import PrefixTree
from mlrl.rollout.sampler import Request, SamplingParams
from mlrl.rollout.vllm import Servers, VLLMSampler, sequence_seed, weights_digest
from mlrl.rollout.vllm_client import Completion, Drawing, VLLMClient, read_completion
from tests.rollout.fake_vllm import FakeVLLM, slow
from tests.trainers.loops import make_trainer

PROMPT = [5, 40, 41, 42, 7, 99]
COMPLETIONS, LOAD = "/v1/completions", "/v1/load_lora_adapter"


@pytest.fixture(scope="module")
def team(tiny_llama):
    """Two agents whose adapters differ widely."""
    trainer = make_trainer(tiny_llama)
    for agent in trainer.team.agents:
        generator = torch.Generator().manual_seed(agent.index)
        for parameter in agent.parameters:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return trainer.team


def client_of(server, **changes):
    return VLLMClient(server.url, **{"backoff_s": 0.01, "max_retries": 2, "timeout_s": 20.0} | changes)


def sampler_of(team, *servers, **changes):
    """One that has all agents on these servers."""

    def connect(folder):
        clients = [client_of(server, **changes) for server in servers]
        return Servers([clients] * len(team.agents))

    return VLLMSampler(team, connect)


def request(agent, count=2, prompt=PROMPT):
    return Request(agent, prompt, [(1, "train", 0, (), agent, k) for k in range(count)])


def trainer_logprobs(agent, prompt, ids, temperature=1.0):
    tree = PrefixTree()
    tree.add_chain([(prompt, None), (ids, 0)])
    with agent.policy.use(), torch.no_grad():
        return agent.policy.logprobs(tree, temperature)[0].logprobs_L


# -------------------------------------------------------------------------------------------------------- what is drawn
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_agents_own_weights(tiny_llama, team, temperature):
    params = SamplingParams(temperature=temperature, max_new_tokens=6)
    with FakeVLLM(tiny_llama) as server:
        sampler = sampler_of(team, server)
        drawn = sampler.sample([request(0), request(1)], params)
        names = {body["model"] for body in server.of(COMPLETIONS)}
        sampler.close()
        assert server.adapters == {} and not any(sampler.folder.iterdir())  # nothing is left behind
    assert {name.split(".")[0] for name in names} == {"agent_0@1", "agent_1@1"}
    for agent, responses in zip(team.agents, drawn, strict=True):
        assert responses[0].token_ids != responses[1].token_ids  # a seed each
        for response in responses:
            own = trainer_logprobs(agent, PROMPT, response.token_ids, temperature)
            assert torch.tensor(response.logprobs) == pytest.approx(own, abs=1e-3)
            other = trainer_logprobs(team.agents[1 - agent.index], PROMPT, response.token_ids, temperature)
            assert (torch.tensor(response.logprobs) - other).abs().max() > 0.1
            assert response.text == agent.decode(response.token_ids)


def test_stop_and_length_rules_are_those_of_the_in_process_sampler(tiny_llama, team, monkeypatch):
    ends = frozenset(range(0, 384, 4))  # a token in four ends a response
    with FakeVLLM(tiny_llama) as server:
        for agent in team.agents:
            monkeypatch.setattr(agent, "stop_ids", ends)
        sampler = sampler_of(team, server)
        [responses] = sampler.sample([request(0, 12)], SamplingParams(max_new_tokens=3))
        [body] = server.of(COMPLETIONS)[:1]
    for response in responses:
        *before, last = response.token_ids
        assert not ends & set(before)
        assert response.truncated == (last not in ends) and (last in ends or len(response.token_ids) == 3)
        assert len(response.logprobs) == len(response.token_ids)
    assert {response.truncated for response in responses} == {True, False}
    assert any(len(r.token_ids) == 3 and not r.truncated for r in responses) or len(responses[0].token_ids) < 3
    # nothing is left to what a server or a model's generation_config may say
    assert body["ignore_eos"] and body["stop_token_ids"] == sorted(ends)
    assert (body["repetition_penalty"], body["min_p"], body["top_k"], body["top_p"]) == (1.0, 0.0, 0, 1.0)


def test_what_a_sequence_draws_hangs_on_its_stream_alone(tiny_llama, team):
    params = SamplingParams(max_new_tokens=5)
    with FakeVLLM(tiny_llama) as one, FakeVLLM(tiny_llama) as two:
        together = sampler_of(team, one, two).sample([request(0), request(1)], params)
        assert one.of(COMPLETIONS) and two.of(COMPLETIONS)  # both work
        assert len({len(server.adapters) for server in (one, two)}) == 1
        alone = sampler_of(team, one)
        assert [alone.sample([request(a)], params)[0] for a in (0, 1)] == together
    seeds = {sequence_seed((1, "train", 0, (), agent, k)) for agent in range(9) for k in range(9)}
    assert len(seeds) == 81 and all(0 <= seed < 2**63 for seed in seeds)


def test_greedy_tokens_counts_and_an_empty_call(tiny_llama, team):
    heard = []
    with FakeVLLM(tiny_llama) as server:
        sampler = sampler_of(team, server)
        [[a, b]] = sampler.sample([request(0)], SamplingParams(temperature=0.0, max_new_tokens=4), heard.append)
        assert sampler.sample([], SamplingParams()) == []
        assert server.of(COMPLETIONS)[0]["temperature"] == 0.0
    assert a == b and sum(heard) == len(a.token_ids) + len(b.token_ids)


# ------------------------------------------------------------------------------------------------------------- versions
def test_a_change_of_weights_is_a_new_version_and_no_change_is_none(tiny_llama, team):
    params = SamplingParams(max_new_tokens=2)
    parameter = team.agents[1].parameters[0]
    before = parameter.detach().clone()
    with FakeVLLM(tiny_llama) as server:
        sampler = sampler_of(team, server)
        sampler.sample([request(0), request(1)], params)
        sampler.sample([request(0), request(1)], params)
        assert len(server.of(LOAD)) == 2
        try:
            parameter.data[0, 0] += 1e-6
            sampler.sample([request(0), request(1)], params)
        finally:
            parameter.data.copy_(before)
        assert {name.split(".")[0] for name in server.adapters} == {"agent_0@1", "agent_1@2"}
        folders = {path.name for path in sampler.folder.iterdir()}
        assert folders == set(server.adapters)  # the one before is gone from server and disk


def test_a_response_of_other_weights_is_refused(tiny_llama, team):
    def stale(route, answer):
        return answer | {"model": "agent_0@0.older"} if route == COMPLETIONS else answer

    wanted = pytest.raises(RolloutError, match=r"'agent_0@0.older' answered in place of 'agent_0@1\.")
    with FakeVLLM(tiny_llama, alter=stale) as server, wanted:
        sampler_of(team, server).sample([request(0)], SamplingParams(max_new_tokens=2))


def test_a_server_that_was_started_anew_gets_its_adapters_again(tiny_llama, team):
    with FakeVLLM(tiny_llama) as server:
        sampler = sampler_of(team, server)
        first = sampler.sample([request(0, 4)], SamplingParams(max_new_tokens=2))
        server.adapters.clear()
        assert sampler.sample([request(0, 4)], SamplingParams(max_new_tokens=2)) == first
        assert len(server.of(LOAD)) == 2


def test_a_server_that_cannot_read_the_adapter(tiny_llama, team):
    def blind(number, route, body):
        return (404, {"error": {"message": "No adapter found"}}) if route == LOAD else None

    wanted = pytest.raises(RolloutError, match=r"must share a file system.*--enable-lora")
    with FakeVLLM(tiny_llama, fault=blind) as server, wanted:
        sampler_of(team, server).sample([request(0)], SamplingParams(max_new_tokens=2))


def test_a_server_that_lists_another_folder_is_not_believed(tiny_llama, team):
    def elsewhere(route, answer):
        if route == "/v1/models":
            answer["data"] = [card | {"root": "/elsewhere"} for card in answer["data"]]
        return answer

    wanted = pytest.raises(RolloutError, match="does not list it as that")
    with FakeVLLM(tiny_llama, alter=elsewhere) as server, wanted:
        sampler_of(team, server).sample([request(0)], SamplingParams(max_new_tokens=2))


def test_no_name_comes_twice(tiny_llama, team):
    """Else weights that a server took while the answer was lost would pass for later ones."""
    params = SamplingParams(max_new_tokens=1)

    def half_way(number, route, body):
        return (500, "lost") if route == COMPLETIONS and number == 0 else None

    with FakeVLLM(tiny_llama, fault=half_way) as server:
        sampler = sampler_of(team, server, max_retries=0)
        with pytest.raises(RolloutError):
            sampler.sample([request(0, 1)], params)
        sampler.close()
        sampler.sample([request(0, 1)], params)
        sampler.close()
        names = [body["lora_name"].split(".")[0] for body in server.of(LOAD)]
    assert names == ["agent_0@1", "agent_0@2"]


def test_the_digest_tells_every_change():
    weights = [torch.randn(8, 8), torch.randn(3).to(torch.bfloat16)]
    for exact in (True, False):
        before = weights_digest(weights, exact)
        assert weights_digest([w.clone() for w in weights], exact) == before
        for place in range(2):
            changed = [w.clone() for w in weights]
            changed[place].view(-1)[2] *= 1.01
            assert weights_digest(changed, exact) != before


# --------------------------------------------------------------------------------------------------------------- faults
@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(tiny_llama, team, status):
    def busy(number, route, body):
        return (status, {"error": "busy"}) if route == COMPLETIONS and number < 2 else None

    with FakeVLLM(tiny_llama, fault=busy) as server:
        [drawn] = sampler_of(team, server).sample([request(0, 2)], SamplingParams(max_new_tokens=2))
        assert len(server.of(COMPLETIONS)) == 4 and len(drawn) == 2


def test_what_does_not_pass_ends_all_at_once(tiny_llama, team):
    def down(number, route, body):
        return (500, {"error": "out of memory"}) if route == COMPLETIONS else None

    def refused(number, route, body):
        return (400, {"error": "too long"}) if route == COMPLETIONS else None

    for fault, parts, most in ((down, "status 500.*out of memory.*after 3 tries", 3 * 4), (refused, "too long", 4)):
        with FakeVLLM(tiny_llama, fault=fault) as server:
            with pytest.raises(RolloutError, match=parts):
                sampler_of(team, server).sample([request(0, 4)], SamplingParams(max_new_tokens=2))
            assert len(server.of(COMPLETIONS)) <= most


def test_what_a_refusal_says_is_cut_to_a_short_line(tiny_llama):
    page = f"<!DOCTYPE html>\n<html><head>\n<title>404 Not\n Found</title><style>{'p {} ' * 999}</style></head></html>"
    for answer, said in (
        (page, "(a web page: 404 Not Found)"),
        (f"  <html>{'<p>' * 999}", "(a web page)"),
        ({"error": "no room " * 99}, f'({{"error": "{("no room " * 99)[:188]}…)'),  # {"error": " are 11 characters, … 1
        ("", "(no text)"),
    ):
        with FakeVLLM(tiny_llama, fault=lambda number, route, body, answer=answer: (404, answer)) as server:
            with pytest.raises(RolloutError) as raised:
                VLLMClient(server.url).models()
            assert str(raised.value) == f"vllm_url={server.url!r}: /v1/models was refused with status 404 {said}"


def test_a_server_that_dies(tiny_llama, team):
    server = FakeVLLM(tiny_llama)
    sampler = sampler_of(team, server)
    sampler.sample([request(0)], SamplingParams(max_new_tokens=2))
    server.close()
    with pytest.raises(RolloutError, match=r"no connection.*after 3 tries.*--resume_from_checkpoint"):
        sampler.sample([request(0)], SamplingParams(max_new_tokens=2))
    sampler.close()


def test_a_spawned_server_that_dies_is_not_waited_for(tiny_llama, team):
    server = FakeVLLM(tiny_llama)
    server.close()
    client = client_of(server, max_retries=9, backoff_s=60.0, ended=lambda: "the server ended with code -9")
    with pytest.raises(RolloutError, match="ended with code -9"):
        client.models()


def test_a_slow_answer_is_given_up_and_asked_for_again(tiny_llama, team):
    def late(number, route, body):
        return slow(0.6) if number == 0 and route in (COMPLETIONS, LOAD) else None

    with FakeVLLM(tiny_llama, fault=late) as server:  # the late load is then found to be done
        sampler = sampler_of(team, server, timeout_s=0.3, max_retries=20)
        [drawn] = sampler.sample([request(0, 1)], SamplingParams(max_new_tokens=1))
        assert len(server.of(COMPLETIONS)) >= 2 and len(server.of(LOAD)) >= 2 and len(drawn) == 1


def test_concurrency_is_bounded(tiny_llama, team):
    def pause(number, route, body):
        return slow(0.02) if route == COMPLETIONS else None

    with FakeVLLM(tiny_llama, fault=pause) as server:
        sampler_of(team, server, max_concurrency=3).sample([request(0, 9)], SamplingParams(max_new_tokens=1))
        assert server.most_under_way == 3


DRAWING = Drawing("agent_0@1.x", [1, 2], 5, frozenset({9}), 3)


def answer(ids=(4, 9), logprobs=(-1.0, -2.0), **changes):
    choice = {
        **{"token_ids": list(ids), "prompt_token_ids": [1, 2], "finish_reason": "stop"},
        "logprobs": {"token_logprobs": list(logprobs)},
    }
    return {"model": "agent_0@1.x", "choices": [choice | changes]}


def test_a_right_answer_is_read():
    assert read_completion(answer(), DRAWING) == Completion([4, 9], [-1.0, -2.0])
    assert read_completion(answer((4, 5, 6), (-1, -1, -1)), DRAWING).token_ids == [4, 5, 6]
    assert read_completion(answer((4, 5, 9), (-1, -1, -1)), DRAWING).token_ids == [4, 5, 9]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (answer((4, 5), (-1.0, -1.0)), "2 tokens without an end token, where 3"),  # short, as at a full context
        (answer((), ()), "0 tokens"),
        (answer((4, 5, 6, 7), (-1.0,) * 4), "4 tokens"),
        (answer((9, 4, 9), (-1.0,) * 3), "3 tokens"),  # went on after an end token
        (answer(logprobs=(-1.0,)), "1 log-probabilities for 2 tokens"),
        (answer(logprobs=(-1.0, None)), "no finite numbers"),
        (answer(logprobs=(-1.0, float("nan"))), "no finite numbers"),
        (answer(ids=("4", 9)), "no numbers"),
        (answer(prompt_token_ids=[0, 1, 2]), "read 3 tokens, not the 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_answer_is_not(wrong, says):
    with pytest.raises(ValueError, match=says):
        read_completion(wrong, DRAWING)


def test_broken_answers_are_tried_again_and_then_named(tiny_llama):
    def broken(number, route, body):
        return [(200, "no json"), (200, {"choices": []}), None][min(number, 2)] if route == COMPLETIONS else None

    drawing = Drawing("base", [5, 40], 5, frozenset(), 2)
    with FakeVLLM(tiny_llama, fault=broken) as server:
        assert len(client_of(server).complete(drawing).token_ids) == 2
    wanted = pytest.raises(RolloutError, match="cannot be used.*choices.*after 3 tries")
    with FakeVLLM(tiny_llama, fault=lambda number, route, body: (200, {"model": "base"})) as server, wanted:
        client_of(server).complete(drawing)


def test_nothing_waits_on_a_back_off_when_another_request_failed(tiny_llama):
    server = FakeVLLM(tiny_llama)
    server.close()
    stop, started = threading.Event(), time.monotonic()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(RolloutError, match="given up"):
        client_of(server, backoff_s=60.0).complete(DRAWING, stop)
    assert time.monotonic() - started < 5
