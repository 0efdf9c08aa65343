"""Edits that an outside model suggests, from a server on this machine."""

import json

import pytest

from mlrl.errors import ConfigError
from mlrl.remote import RemoteError
from mlrl.task import load_task
from mlrl.tasks.coding_feedback import expert_prompt
from mlrl.tasks.coding_reward import judge
from mlrl.tasks.expert import NO_EDITS, Expert
from mlrl.tasks.sandbox import Sandbox
from tests.http_server import FakeServer, Reply
from tests.tasks.test_coding import AUX, ITEM, MAIN, main
from tests.texts import next_prompts

KEY = "sk-planted-77aa01"


@pytest.fixture
def serve(monkeypatch):
    """Starts a server that answers with a text, or with what a function of the request's number says."""
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("SOME_KEY", KEY)
    servers = []

    def start(answer):
        def reply(number, body):
            text = answer(number) if callable(answer) else answer
            if isinstance(text, Reply):
                return text
            return Reply({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})

        servers.append(FakeServer(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def told(server, answers, num_agents=2, **args):
    arguments = {"expert_url": server.url, "expert_model": "m", "expert_key_env": "SOME_KEY", "test_seconds": 0.5}
    task = load_task("mbpp", {"feedback": "expert_edits", **arguments, **args})
    _, following = next_prompts(task, ITEM, num_agents, answers=answers)
    return [prompt[-1]["content"] for prompt in following]


@pytest.mark.parametrize(
    ("answer", "aux", "own"),
    [
        ('{"aux": "Return 2 * x.", "main": "Add 1."}', "Return 2 * x.", "Add 1."),
        ('Sure!\n```json\n{"main": ["Call aux.", "Add 1."], "aux": ""}\n```', NO_EDITS, "Call aux.\nAdd 1."),
        ('{"aux": {"edit": 1}, "main": null}', NO_EDITS, NO_EDITS),
        ("I would rather not.", NO_EDITS, NO_EDITS),
        ('{"aux": "half', NO_EDITS, NO_EDITS),
    ],
)
def test_each_agent_gets_its_own_edits(serve, answer, aux, own):
    server = serve(answer)
    first, second = told(server, ["", main("return 1")])
    assert first.startswith(f"An expert read the whole program. Suggested for `aux`:\n{aux}\n\nWrite `aux` again")
    assert second.startswith(f"An expert read the whole program. Suggested for `main`:\n{own}\n\nWrite `main` again")
    (asked,) = server.asked
    assert asked.headers["Authorization"] == f"Bearer {KEY}"
    assert (asked.body["max_tokens"], asked.body["temperature"], asked.body["model"]) == (2048, 0.3, "m")
    assert "return 1" in asked.body["messages"][0]["content"]


def test_one_agent_gets_both(serve):
    (text,) = told(serve('{"aux": "A.", "main": "B."}'), [f"{AUX}\n{MAIN}"], 1)
    assert "for `aux`:\nA.\n\n" in text and "for `main`:\nB.\n\nWrite `aux` and `main` again" in text


def test_what_the_expert_reads():
    score = judge(Sandbox(workers=1), ITEM, [(AUX, main("return aux(x)"))])[0]
    text = expert_prompt(score, ITEM, [f"```python\n{AUX}\n```", main("return aux(x)")], 1)
    assert f"Written for aux:\n```python\n{AUX}\n```" in text and "Tests passed: 0 of 4." in text
    assert text.count("This test failed") == 1 and "`main` only returns what `aux` returns." in text
    assert "Written for aux and main:" in expert_prompt(score, ITEM, ["x = 1"], 1)


def test_a_server_that_fails_costs_edits_only(serve):
    server = serve(lambda number: Reply({}, status=500) if number < 4 else '{"aux": "A.", "main": "B."}')
    expert = Expert(url=server.url, model="m", format="openai", backoff_s=0.001)
    with pytest.warns(UserWarning, match="an agent goes without .status 500"):
        assert expert.edits("p", ("aux", "main")) == [NO_EDITS] * 2
    assert len(server.asked) == 4  # 3 retries
    assert expert.edits("p", ("aux", "main")) == ["A.", "B."]


def test_the_same_program_is_asked_about_once_and_a_budget_holds(serve, tmp_path):
    server = serve('{"aux": "A.", "main": "B."}')
    settings = {"expert_cache": str(tmp_path / "answers.jsonl"), "expert_max_requests": 1}
    first = told(server, ["", ""], **settings)
    assert told(server, ["", ""], **settings) == first and len(server.asked) == 1
    assert KEY not in (tmp_path / "answers.jsonl").read_text()
    expert = Expert(url=server.url, model="m", format="openai", max_requests=1)
    assert expert.edits("p", ("aux",)) == ["A."] == expert.edits("p", ("aux",))
    with pytest.warns(UserWarning, match="the budget of 1 requests is used up"):
        assert expert.edits("q", ("aux",)) == [NO_EDITS]


def test_a_server_that_refuses_ends_the_run_without_the_key(serve):
    server = serve(lambda number: Reply({"error": f"wrong key {KEY}"}, status=401))
    with pytest.raises(RemoteError, match="SOME_KEY") as error:
        told(server, ["", ""])
    assert KEY not in str(error.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "expert_url=None: feedback=expert_edits asks a model"),
        ({"expert_url": "nowhere", "expert_model": "m"}, "task_args.expert_url='nowhere': is no HTTP address"),
        ({"expert_url": "http://h/v1"}, "task_args.expert_model=None: format openai needs one"),
        ({"expert_url": "http://h/v1", "expert_format": "x"}, "task_args.expert_format='x'"),
        ({"expert_url": "http://h/v1?api_key=1", "expert_model": "m"}, "holds a secret"),
        ({"expert_url": "http://h", "expert_model": "m", "expert_key_env": "NO"}, "task_args.expert_key_env='NO'"),
        ({"expert_url": "http://h", "feedback": "plain"}, "expert_url='http://h': feedback=plain asks nobody"),
    ],
)
def test_settings_that_cannot_be(args, message):
    with pytest.raises(ConfigError, match=message):
        load_task("humaneval", {"feedback": "expert_edits"} | args)


def test_through_the_trainer(serve, tiny_llama, tmp_path):
    from mlrl.trainers import MAGRPOConfig, MAGRPOTrainer

    server = serve('{"aux": "A.", "main": "B."}')
    words = {"expert_url": server.url, "expert_model": "m", "expert_key_env": "SOME_KEY", "feedback": "expert_edits"}
    args = MAGRPOConfig(
        num_turns=2, num_generations=2, rollout_batch_size=1, max_steps=1, max_prompt_tokens=60, max_new_tokens=4,
        eval_num_samples=0, output_dir=str(tmp_path), run_name="r", completions_steps=1,
    )  # fmt: skip
    MAGRPOTrainer(task=load_task("mbpp", words), agent_model=tiny_llama, num_agents=2, args=args).train()
    nodes = [json.loads(line) for line in (tmp_path / "r/completions/train-000001.jsonl").read_text().splitlines()]
    assert len(nodes) == 3 and len(server.asked) == 2
    assert "Suggested for `aux`:\nA." in nodes[1]["prompts"][0][-1]["content"]
    assert not any(KEY in path.read_text(errors="replace") for path in (tmp_path / "r").rglob("*") if path.is_file())
