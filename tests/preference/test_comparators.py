"""The five comparators on tiny models and on a server in a thread."""

import re
from collections import Counter

import pytest
import torch

from mlrl.centralized import centralized_prompt, split_roles
from mlrl.errors import TaskError
from mlrl.preference.comparators import PolicyComparator, WrittenComparator, play
from mlrl.preference.pairs import compared_pairs
from mlrl.preference.setup import load_writers
from mlrl.preference.snapshots import FrozenTwin, PolicyHistory, team_weights
from mlrl.preference.writers import CentralizedWriter, ModelWriter, RemoteWriter, as_response
from mlrl.remote import RemoteModel, RemoteSettings
from mlrl.rollout.collect import Collector
from mlrl.rollout.sampler import Sampler, SamplingParams
from mlrl.sources import resolve_source
from tests.http_server import FakeServer, Reply
from tests.trainers.loops import ITEMS, make_trainer, perturb

NUMBERED = list(enumerate(ITEMS))


def texts(candidates):
    """[item][candidate] all responses of a trajectory, None where it was lost."""
    return [
        [own and [[r.text for r in turn.responses] for turn in own.turns] for own in item]
        for item in candidates.by_item
    ]


def drawing(team, trainer):
    """Draws from another team in the place of the trainer's."""
    return Collector(team, Sampler(team), trainer.environment)


def draw(comparator, trainer, round, num_candidates=3):
    return comparator.candidates(NUMBERED, trainer.growth(), num_candidates=num_candidates, round=round)


def current(trainer, round, num_candidates=3):
    return play(
        trainer.collector, NUMBERED, trainer.growth(), num_candidates=num_candidates, round=round, stream="candidate",
        writer="current", policy="",
    )  # fmt: skip


def test_candidates_are_whole_episodes_of_their_own(tiny_llama):
    trainer = make_trainer(tiny_llama, num_turns=2, discount=0.5)
    played = current(trainer, 1)
    for [_, item], own in zip(NUMBERED, played.by_item, strict=True):
        assert [trajectory.candidate for trajectory in own] == [0, 1, 2]
        for trajectory in own:
            assert len(trajectory.turns) == 2
            first, second = (turn.responses for turn in trajectory.turns)
            # the second turn's prompt goes on from what was said, token for token
            for agent in range(2):
                before = trajectory.turns[0].prompts[agent].token_ids + first[agent].token_ids
                assert trajectory.turns[1].prompts[agent].token_ids[: len(before)] == before
            assert trajectory.reward == pytest.approx(
                trainer.task.reward_func(*[[r.text] for r in first])[0]
                + 0.5 * trainer.task.reward_func(*[[r.text] for r in second])[0]
            )
            assert trajectory.sampling.max_new_tokens == trainer.args.max_new_tokens
        assert item["prompt"]
    assert played.cost.joint_evaluations == 2 * 3 * 2


def test_streams_differ_between_rounds_and_from_the_comparators(tiny_llama):
    trainer = make_trainer(tiny_llama)
    comparator = PolicyComparator("current", trainer.collector)
    comparator.begin_round(1)
    one = {"num_candidates": 1}
    first = str(texts(current(trainer, 1, **one)))
    assert str(texts(current(trainer, 1, **one))) == first
    drawn = [first, *(str(texts(x)) for x in (current(trainer, 2, **one), draw(comparator, trainer, 1, **one)))]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_a_copy_stays_as_the_round_began(tiny_llama, tuning):
    trainer = make_trainer(tiny_llama, tuning=tuning)
    live, copy = PolicyComparator("current", trainer.collector), PolicyComparator("current_copy", trainer.collector)
    flags = [p.requires_grad for agent in trainer.team.agents for p in agent.parameters]
    for comparator in (live, copy):
        comparator.begin_round(1)
    assert [p.requires_grad for agent in trainer.team.agents for p in agent.parameters] == flags == [True] * len(flags)
    before = texts(draw(live, trainer, 1))
    assert texts(draw(copy, trainer, 1)) == before
    for agent in trainer.team.agents:
        perturb(agent, seed=5, spread=0.3 if tuning == "lora" else 0.05)
    assert texts(draw(copy, trainer, 1)) == before
    assert texts(draw(live, trainer, 1)) != before
    copy.begin_round(2)
    for ours, theirs in zip(team_weights(copy.twin.team), team_weights(trainer.team), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_history_is_the_policy_of_k_rounds_before_and_never_the_current_one(tiny_llama):
    trainer = make_trainer(tiny_llama)
    history, further = PolicyComparator("history", trainer.collector), PolicyHistory(2)
    starts = {}
    for round in (1, 2, 3, 4):
        starts[round] = team_weights(trainer.team)
        history.begin_round(round)
        further.record(round, starts[round])
        assert further.before(round)[0] == max(1, round - 2)
        earlier = max(1, round - 1)
        for ours, theirs in zip(team_weights(history.twin.team), starts[earlier], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        if round == 2:  # the current policy from the same stream writes something else
            [[first, *_], *_] = draw(history, trainer, round).by_item
            assert first.sampling.policy == "agents at round 1"
            live = PolicyComparator("current", trainer.collector)
            live.begin_round(round)
            assert texts(draw(live, trainer, round)) != texts(draw(history, trainer, round))
        for agent in trainer.team.agents:
            perturb(agent, seed=round, spread=0.3)


def test_a_token_that_the_agent_lacks_is_not_kept(tiny_llama, tiny_qwen2):
    """Both have one tokenizer, but the writer's network has 64 rows more, which it draws as well."""
    trainer = make_trainer(tiny_llama, ends=frozenset())
    other = load_writers(trainer.team, [resolve_source(tiny_qwen2)] * 2)
    writer = ModelWriter(drawing(other, trainer), SamplingParams(max_new_tokens=9), trainer.team.agents)
    assert writer.same_tokens == [True, True]
    played = draw(WrittenComparator("model", tiny_qwen2, trainer.collector, writer), trainer, 1)
    responses = [r for own in played.by_item for one in own for turn in one.turns for r in turn.responses]
    assert max(token for r in responses for token in r.token_ids) < 384
    assert {bool(r.logprobs) for r in responses} == {True, False}  # some were kept as they were drawn


def test_history_keeps_what_can_be_asked_for_and_continues_from_a_checkpoint():
    history = PolicyHistory(2)
    for round in range(1, 6):
        history.record(round, [[torch.tensor(float(round))]])
    assert sorted(history.state_dict()) == [3, 4, 5]
    resumed = PolicyHistory(2)
    resumed.load_state_dict(history.state_dict())
    assert resumed.before(5) == (3, [[torch.tensor(3.0)]])
    with pytest.raises(ValueError, match="comparator_history_k=0"):
        PolicyHistory(0)


def test_shared_parameters_have_one_twin(tiny_llama):
    trainer = make_trainer(tiny_llama, share_parameters=True)
    twin = FrozenTwin(trainer.team)
    assert len(team_weights(trainer.team)) == len(team_weights(twin.team)) == 1
    assert twin.team.agents[0].policy is twin.team.agents[1].policy is not trainer.team.agents[0].policy


class ScriptedWriter:
    """Writes `<agent><turn><c>`, or what `special` says."""

    def __init__(self, special=None):
        self.special, self.lost, self.asked = special or {}, Counter(), []

    def write(self, requests):
        self.asked.append(requests)
        return [
            [
                [self.special.get((agent, len(request.draw[3]), c), f"a{agent}t{len(request.draw[3])}c{c}")
                 for c in range(request.count)]
                for agent in range(len(request.prompts))
            ]
            for request in requests
        ]  # fmt: skip


def test_a_lost_answer_loses_its_candidate_and_shifts_no_other(tiny_llama):
    trainer = make_trainer(tiny_llama, num_turns=2, max_new_tokens=20)
    writer = ScriptedWriter({(1, 0, 1): None, (0, 1, 0): "second"})
    played = draw(WrittenComparator("api", "m", trainer.collector, writer), trainer, 1)
    for own in texts(played):
        assert own == [
            [["a0t0c0", "a1t0c0"], ["second", "a1t1c0"]], None, [["a0t0c2", "a1t0c2"], ["second", "a1t1c0"]]
        ]  # fmt: skip
    assert played.num_lost == 2
    # a branch that is lost is not asked for any further
    assert [len(requests) for requests in writer.asked] == [2, 4]


def test_texts_become_the_agents_own_tokens_with_its_end(tiny_llama):
    trainer = make_trainer(tiny_llama, ends=frozenset())
    agent = trainer.team.agents[0]
    response = as_response("The sea<|im_end|> is deep.", agent, 40)
    assert response.text == "The sea<|im_end|> is deep."  # not taken for an end token
    assert response.token_ids.count(agent.tokenizer.eos_token_id) == 1
    assert response.token_ids[-1] == agent.tokenizer.eos_token_id
    assert not response.truncated
    assert as_response("", agent, 40).token_ids == [agent.tokenizer.eos_token_id]
    cut = as_response("The sea is deep.", agent, 2)
    assert (len(cut.token_ids), cut.truncated) == (2, True)
    assert cut.text == agent.decode(cut.token_ids) and "The sea is deep.".startswith(cut.text)
    assert as_response(None, agent, 40).token_ids == []


@pytest.mark.parametrize("same_tokens", [True, False])
def test_another_model_writes_with_its_own_tokens(tiny_llama, tiny_llama_other, tiny_gpt2, same_tokens):
    folder = tiny_llama_other if same_tokens else tiny_gpt2
    trainer = make_trainer(tiny_llama, conversation=same_tokens, ends=frozenset())
    other = load_writers(trainer.team, [resolve_source(folder)] * 2)
    assert len(other.bases) == 1 and not any(p.requires_grad for p in other.bases[0].model.parameters())
    writer = ModelWriter(drawing(other, trainer), SamplingParams(max_new_tokens=7), trainer.team.agents)
    assert writer.same_tokens == [same_tokens, same_tokens]
    played = draw(WrittenComparator("model", folder, trainer.collector, writer), trainer, 1)
    assert played.num_lost == 0
    [first, *_] = played.by_item[0]
    assert (first.writer, first.sampling.policy) == ("model", folder)
    response = first.turns[0].responses[0]
    assert bool(response.logprobs) == same_tokens  # its own tokens are kept where they are the agent's
    assert trainer.team.agents[0].decode(response.token_ids) == response.text


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    opened = []

    def start(answer, **settings):
        server = FakeServer(answer)
        model = RemoteModel(RemoteSettings(server.url, backoff_s=0.001, max_retries=1, **settings))
        opened.extend([model, server])
        return server, model

    yield start
    for resource in opened:
        resource.close()


def test_an_api_writes_every_role_from_its_own_prompt(tiny_llama, server):
    def answer(number, body):
        if body["batch_item"] == ITEMS[1] and body["agent_idx"] == 1:
            return Reply({}, 500)
        count = body["num_return_sequences"]
        return Reply({"completions": [None if c == 1 else f"{body['prompt'][0]['content']} {c}" for c in range(count)]})

    requests, model = server(answer)
    trainer = make_trainer(tiny_llama, max_new_tokens=40)
    comparator = WrittenComparator("api", "m", trainer.collector, RemoteWriter(model))
    played = draw(comparator, trainer, 1)
    assert texts(played) == [[[["the sea 0"] * 2], None, [["the sea 2"] * 2]], [None, None, None]]
    assert played.lost == {"server error": 3, "no text": 3}
    assert len(requests.asked) == 4 + 1  # a request an item and agent, and one retry
    # the other side's candidates keep their numbers
    ours = current(trainer, 1).by_item[0]
    pairs = compared_pairs(
        ITEMS[0], 0, ours, played.by_item[0], selection="all", limit=None, seed=0, round=1
    )  # fmt: skip
    assert [pair.winner.candidate for pair in pairs] == [0, 2]
    assert {pair.winner.writer for pair in pairs} | {pair.loser.writer for pair in pairs} == {"current", "api"}
    # the same round again asks for nothing that is known, another round for everything
    draw(comparator, trainer, 1)
    assert len(requests.asked) == 5 + 2
    draw(comparator, trainer, 2)
    assert len(requests.asked) == 7 + 5


def test_an_api_that_gives_nothing_is_an_error(tiny_llama, server):
    _, model = server(lambda number, body: Reply({}, 500))
    trainer = make_trainer(tiny_llama)
    with pytest.raises(TaskError, match="none of 12 texts could be had.*status 500"):
        draw(WrittenComparator("api", "m", trainer.collector, RemoteWriter(model)), trainer, 1)


def test_one_model_writes_all_roles_in_sections(tiny_llama, server):
    def answer(number, body):
        prompt = body["messages"][0]["content"]
        [told] = set(re.findall(r"<task_\d>\n(.*?)\n</task_\d>", prompt))
        good = f"Sure!\n<agent_2>two of {told}</agent_2>\n<agent_1>\none of {told}\n</agent_1>"
        choices = [good, "<agent_1>only one</agent_1>", good]
        return Reply({"choices": [{"message": {"content": text}} for text in choices]})

    requests, model = server(answer, format="openai", model="m")
    trainer = make_trainer(tiny_llama, max_new_tokens=60)
    writer = CentralizedWriter(RemoteWriter(model))
    played = draw(WrittenComparator("api", "m", trainer.collector, writer), trainer, 1)
    assert texts(played)[0] == [[["one of the sea", "two of the sea"]], None, [["one of the sea", "two of the sea"]]]
    assert played.lost == {"unparseable": 2}
    assert len(requests.asked) == 2
    # counts are those of a call
    assert draw(WrittenComparator("api", "m", trainer.collector, writer), trainer, 2).lost == {"unparseable": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<agent_1>a</agent_1><agent_2>b</agent_2>", ["a", "b"]),
        ("x <agent_2>\n b \n</agent_2> y <agent_1></agent_1>", ["", "b"]),
        ("<agent_1>a</agent_1>", None),
        ("<agent_1>a</agent_1><agent_2>cut", None),
        ("<agent_1>a</agent_1><agent_1>c</agent_1><agent_2>b</agent_2>", None),
        ("<agent_1>a</agent_1><agent_2>b</agent_2><agent_3>c</agent_3>", None),
        ("", None),
    ],
)
def test_sections(text, expected):
    assert split_roles(text, 2) == expected


def test_the_centralized_prompt_holds_every_role_and_its_own_form_parses():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say."}]
    [message] = centralized_prompt(["Sing.", chat])
    assert "Sing." in message["content"]
    assert "system: Be brief.\n\nuser: Say." in message["content"]
    assert split_roles(message["content"], 2) == ["the answer of agent 1", "the answer of agent 2"]


def test_a_prompt_that_another_model_cannot_hold_is_named(tiny_llama, tiny_gpt2):
    trainer = make_trainer(tiny_llama, conversation=False, train_dataset=[{"prompt": "the sea " * 20}])
    other = load_writers(trainer.team, [resolve_source(tiny_gpt2)] * 2)
    writer = ModelWriter(drawing(other, trainer), SamplingParams(max_new_tokens=230), trainer.team.agents)
    comparator = WrittenComparator("model", "m", trainer.collector, writer)
    with pytest.raises(TaskError, match=r"comparator, item 0, turn 0, agent 0: \d+ tokens, more than the 26"):
        items = [(0, {"prompt": "the sea " * 20})]
        comparator.candidates(items, trainer.growth(), num_candidates=1, round=1)
