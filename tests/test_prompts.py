import functools

import pytest

from mlrl.errors import ConfigError, TaskError
from mlrl.prompts import Formatters, Transition, checked_prompt

ITEM = {"prompt": "tell", "tags": ["t"]}
CHAT = [{"role": "user", "content": "tell"}]


class Formatter:
    def __call__(self, item, external_prompts=None):
        return f"{item['prompt']}|{external_prompts}"


FORMATTERS = [
    # (id, formatters, number of agents, prompts at turn 0, prompts with the external prompt "e<agent>")
    ("none", None, 2, ["tell", "tell"], ["tell", "tell"]),
    ("shared", lambda item: "s " + item["prompt"], 2, ["s tell"] * 2, ["s tell"] * 2),
    ("one an agent", [lambda item: "a", lambda item: "b"], 2, ["a", "b"], ["a", "b"]),
    ("list of one for one agent", [lambda item: "a"], 1, ["a"], ["a"]),
    ("chat", lambda item: [{"role": "user", "content": item["prompt"]}], 1, [CHAT], [CHAT]),
    ("object", Formatter(), 2, ["tell|None"] * 2, ["tell|e0", "tell|e1"]),
    ("needs external", lambda item, external_prompts: str(external_prompts), 1, ["None"], ["e0"]),
    ("external keyword-only", lambda item, *, external_prompts=1: str(external_prompts), 1, ["None"], ["e0"]),
    ("kwargs", lambda item, **named: str(named["external_prompts"]), 1, ["None"], ["e0"]),
    ("own default", lambda item, style="dry": style, 1, ["dry"], ["dry"]),
    (
        "agent by name",
        lambda item, agent_idx, num_agents: f"{agent_idx}/{num_agents}",
        2,
        ["0/2", "1/2"],
        ["0/2", "1/2"],
    ),
    ("partial", functools.partial(lambda item, style: style, style="wry"), 2, ["wry"] * 2, ["wry"] * 2),
]


@pytest.mark.parametrize(
    ("formatters", "num_agents", "first", "later"), [row[1:] for row in FORMATTERS], ids=[row[0] for row in FORMATTERS]
)
def test_formatters(formatters, num_agents, first, later):
    bound = Formatters(formatters, num_agents)
    agents = range(num_agents)
    assert [bound(i, ITEM, external_prompts=None, turn=0, item_index=0) for i in agents] == first
    assert [bound(i, ITEM, external_prompts=f"e{i}", turn=1, item_index=0) for i in agents] == later


@pytest.mark.parametrize(
    ("formatters", "words"),
    [
        ([lambda item: ""], ["formatters", "1 formatter ", "num_agents=2"]),
        ([lambda item: ""] * 3, ["3 formatters", "num_agents=2"]),
        ([], ["0 formatters"]),
        ([lambda item: "", "text"], ["formatters[1]='text'"]),
        ([lambda item: "", None], ["formatters[1]=None"]),
        (lambda: "", ["formatters", "the item"]),
        (lambda item, other: "", ["(item, other)"]),
        (lambda item, *, other: "", ["'other'", "external_prompts"]),
        (Formatter, ["class"]),
    ],
)
def test_formatters_refused_before_the_run(formatters, words):
    with pytest.raises(ConfigError) as error:
        Formatters(formatters, 2)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "returned",
    [
        None,
        3,
        b"x",
        {"role": "user", "content": "x"},
        [],
        ["x"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
    ],
)
def test_a_formatter_that_returns_no_prompt(returned):
    bound = Formatters([lambda item: "fine", lambda item: returned], 2)
    with pytest.raises(TaskError) as error:
        bound(1, ITEM, external_prompts=None, turn=2, item_index=9)
    for word in ["formatters[1]", "agent 1", "item 9", "turn 2", "Right is a str or a list"]:
        assert word in str(error.value)


def test_a_formatter_cannot_change_the_item():
    item = {"prompt": "tell", "tags": ["t"]}

    def vandal(item):
        item["tags"].append("new")
        item["prompt"] = "other"
        return "p"

    Formatters(vandal, 1)(0, item, external_prompts=None, turn=0, item_index=None)
    assert item == {"prompt": "tell", "tags": ["t"]}


def test_a_formatters_own_error_reaches_the_user():
    with pytest.raises(KeyError, match="question"):
        Formatters(lambda item: item["question"], 1)(0, ITEM, external_prompts=None, turn=0, item_index=4)


def test_messages_are_copied_with_all_their_keys():
    messages = [{"role": "user", "content": "x", "name": "n"}]
    prompt = checked_prompt(messages, field="f", where="here")
    messages[0]["content"] = "other"
    assert prompt == [{"role": "user", "content": "x", "name": "n"}]


def play(func, num_agents=2, **changes):
    turn = {
        "item": ITEM,
        "turn": 1,
        "completions": ["c0", "c1"][:num_agents],
        "reward": 0.25,
        "prompt_history": [["p00", "p01"], ["p10", "p11"]][:num_agents],
        "response_history": [["r00", "c0"], ["r10", "c1"]][:num_agents],
        "episode_seed": 5,
        "item_index": 17,
    }
    return Transition(func, num_agents)(**{**turn, **changes})


STANDARD = {
    "prompt": "tell",
    "agent_completions": ["c0", "c1"],
    "num_agents": 2,
    "prompt_history_per_agent": [["p00", "p01"], ["p10", "p11"]],
    "response_history_per_agent": [["r00", "c0"], ["r10", "c1"]],
}


def test_the_standard_names_and_the_extra_ones():
    seen = []

    def standard(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
        seen.append(dict(locals(), seen=None))
        return ["a", "b"]

    def anything(**named):
        seen.append(named)
        return ("a", "b")

    def extra(item, turn, reward, agent_completions, *, episode_seed, style="dry"):
        seen.append((item, turn, reward, agent_completions, episode_seed, style))
        return ["a", "b"]

    def anything_and_turn(turn, **named):
        seen.append((turn, sorted(named)))
        return ["a", "b"]

    for func in (standard, anything, extra, anything_and_turn):
        assert play(func) == ["a", "b"]
    assert {name: seen[0][name] for name in STANDARD} == STANDARD
    assert seen[1] == STANDARD
    assert seen[2] == (ITEM, 1, 0.25, ["c0", "c1"], 5, "dry")
    assert seen[3] == (1, sorted(STANDARD))


def test_prompt_is_none_where_the_item_has_no_such_field():
    assert play(lambda prompt: [str(prompt)] * 2, item={"question": "q"}) == ["None", "None"]


def test_histories_are_copies():
    prompts, responses, item = [[CHAT], ["p"]], [["r"], ["s"]], {"prompt": "tell", "tags": ["t"]}

    def vandal(prompt_history_per_agent, response_history_per_agent, agent_completions, item):
        prompt_history_per_agent[0][0][0]["content"] = "other"
        prompt_history_per_agent[1].append("other")
        response_history_per_agent.pop()
        agent_completions.clear()
        item["tags"].clear()
        return ["a", "b"]

    play(vandal, prompt_history=prompts, response_history=responses, item=item)
    assert prompts == [[[{"role": "user", "content": "tell"}]], ["p"]]
    assert responses == [["r"], ["s"]]
    assert item == {"prompt": "tell", "tags": ["t"]}


@pytest.mark.parametrize("returned", ["a", ["a"], ("a",)])
def test_one_agent_may_return_one_prompt(returned):
    assert play(lambda: returned, num_agents=1) == ["a"]


@pytest.mark.parametrize("returned", [CHAT, [CHAT]])
def test_one_agent_may_return_one_chat(returned):
    assert play(lambda: returned, num_agents=1) == [CHAT]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, ["None", "num_agents=2"]),
        ("ab", ["'ab'", "str"]),
        (["a"], ["1 prompt "]),
        (["a", "b", "c"], ["3 prompts"]),
        (["a", None], ["[1]=None", "agent 1"]),
        (CHAT * 2, ["[0]=", "dict"]),
        ({"agent_0": "a", "agent_1": "b"}, ["dict"]),
    ],
)
def test_a_transition_that_returns_no_prompts(returned, words):
    with pytest.raises(TaskError) as error:
        play(lambda: returned)
    for word in ["external_transition", "item 17", "turn 1", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "func", [lambda original: [], lambda prompt, completions: [], lambda *, style: [], "text", functools.partial(max)]
)
def test_a_transition_refused_before_the_run(func):
    with pytest.raises(ConfigError, match="external_transition") as error:
        Transition(func, 2)
    assert callable(func) is False or "agent_completions" in str(error.value) or "cannot be read" in str(error.value)


def test_async_transitions_and_formatters():
    async def transition(agent_completions):
        return [text + "!" for text in agent_completions]

    async def formatter(item):
        return "async " + item["prompt"]

    assert play(transition) == ["c0!", "c1!"]
    assert Formatters(formatter, 1)(0, ITEM, external_prompts=None, turn=0, item_index=None) == "async tell"
