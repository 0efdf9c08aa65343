import asyncio
import functools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlrl.errors import ConfigError, TaskError
from mlrl.rewards import Reward, RewardProcessors, bind_reward, checked_rewards

NAMED = {
    "batch_items": "ITEMS",
    "prompts": "PROMPTS",
    "turn": "TURN",
    "prompt_history": "PH",
    "response_history": "RH",
    "episode_seed": "SEED",
}
WITHOUT_SEED = {name: value for name, value in NAMED.items() if name != "episode_seed"}


class Judge:
    def __call__(self, a, b, *, batch_items):
        return (a, b, batch_items)

    def score(self, a, b, prompts=None):
        return (a, b, prompts)

    @classmethod
    def of_class(cls, a, b):
        return (a, b)

    @staticmethod
    def static(a, *, turn):
        return (a, turn)


class AsyncJudge:
    async def __call__(self, a, b):
        await asyncio.sleep(0)
        return (a, b)


def decorated(func):
    @functools.wraps(func)
    def wrapper(*completions, **named):
        return func(*completions, **named)

    return wrapper


def config_first(config, a, b, *, batch_items):
    return (config, a, b, batch_items)


def with_target(a, b, target, batch_items):
    return (a, b, target, batch_items)


async def async_pair(a, b, *, turn):
    await asyncio.sleep(0)
    return (a, b, turn)


BINDINGS = [
    # (id, function, number of agents, what it receives)
    ("two lists", lambda a, b: (a, b), 2, ("A", "B")),
    ("one list", lambda a: (a,), 1, ("A",)),
    ("four lists", lambda a, b, c, d: (a, b, c, d), 4, ("A", "B", "C", "D")),
    ("rest", lambda *completions: completions, 3, ("A", "B", "C")),
    ("rest of one agent", lambda *completions: completions, 1, ("A",)),
    ("one and rest", lambda a, *others: (a, others), 3, ("A", ("B", "C"))),
    ("one and no rest", lambda a, *others: (a, others), 1, ("A", ())),
    ("items keyword-only", lambda a, b, *, batch_items: (a, b, batch_items), 2, ("A", "B", "ITEMS")),
    ("items after rest", lambda *completions, batch_items: (completions, batch_items), 2, (("A", "B"), "ITEMS")),
    ("items positional", lambda a, b, batch_items: (a, b, batch_items), 2, ("A", "B", "ITEMS")),
    ("items first", lambda batch_items, a, b: (batch_items, a, b), 2, ("ITEMS", "A", "B")),
    ("items in the middle", lambda a, batch_items, b: (a, batch_items, b), 2, ("A", "ITEMS", "B")),
    ("items with default", lambda a, b, batch_items=None: (a, b, batch_items), 2, ("A", "B", "ITEMS")),
    ("items with default before rest", lambda a, batch_items=None, *r: (a, batch_items, r), 2, ("A", "ITEMS", ("B",))),
    ("items positional-only", lambda batch_items, a, /: (batch_items, a), 1, ("ITEMS", "A")),
    ("items last, positional-only", lambda a, batch_items, /: (a, batch_items), 1, ("A", "ITEMS")),
    ("lists positional-only", lambda a, b, /, *, turn: (a, b, turn), 2, ("A", "B", "TURN")),
    ("prompts never a list", lambda prompts, a, b: (prompts, a, b), 2, ("PROMPTS", "A", "B")),
    (
        "all reserved names",
        lambda prompts, turn, prompt_history, a, response_history, episode_seed, batch_items=(): (
            (prompts, turn, prompt_history, a, response_history, episode_seed, batch_items)
        ),
        1,
        ("PROMPTS", "TURN", "PH", "A", "RH", "SEED", "ITEMS"),
    ),
    ("seed where named", lambda a, *, episode_seed=None: (a, episode_seed), 1, ("A", "SEED")),
    ("kwargs: reserved but no seed", lambda a, b, **named: (a, b, named), 2, ("A", "B", WITHOUT_SEED)),
    (
        "kwargs beside a named one",
        lambda a, turn, **named: (a, turn, sorted(named)),
        1,
        ("A", "TURN", ["batch_items", "prompt_history", "prompts", "response_history"]),
    ),
    ("seed named beside kwargs", lambda a, episode_seed, **named: (a, episode_seed), 1, ("A", "SEED")),
    ("own default", lambda a, b, target=2.0: (a, b, target), 2, ("A", "B", 2.0)),
    ("own default that is unhashable", lambda a, weights=[1], *r: (a, weights, r), 2, ("A", [1], ("B",))),
    ("own default before a name", lambda a, target=2.0, turn=None: (a, target, turn), 1, ("A", 2.0, "TURN")),
    ("own keyword-only default", lambda a, *, target=2.0: (a, target), 1, ("A", 2.0)),
    ("partial by keyword", functools.partial(with_target, target=3), 2, ("A", "B", 3, "ITEMS")),
    ("partial by position", functools.partial(config_first, "C"), 2, ("C", "A", "B", "ITEMS")),
    ("partial, first by keyword", functools.partial(config_first, config="C"), 2, ("C", "A", "B", "ITEMS")),
    ("partial of partial", functools.partial(functools.partial(with_target), target=4), 2, ("A", "B", 4, "ITEMS")),
    ("partial of an object", functools.partial(Judge(), batch_items="MINE"), 2, ("A", "B", "ITEMS")),
    ("callable object", Judge(), 2, ("A", "B", "ITEMS")),
    ("bound method", Judge().score, 2, ("A", "B", "PROMPTS")),
    ("class method", Judge.of_class, 2, ("A", "B")),
    ("static method", Judge.static, 1, ("A", "TURN")),
    ("decorated", decorated(lambda a, b, turn: (a, b, turn)), 2, ("A", "B", "TURN")),
    ("built-in with a signature", len, 1, 1),
    ("async function", async_pair, 2, ("A", "B", "TURN")),
    ("partial of async", functools.partial(async_pair), 2, ("A", "B", "TURN")),
    ("async object", AsyncJudge(), 2, ("A", "B")),
    ("returns a coroutine", lambda a, b: async_pair(a, b, turn=1), 2, ("A", "B", 1)),
]


@pytest.mark.parametrize(
    ("func", "num_agents", "expected"), [row[1:] for row in BINDINGS], ids=[r[0] for r in BINDINGS]
)
def test_binding(func, num_agents, expected):
    assert bind_reward(func, num_agents)(["A", "B", "C", "D"][:num_agents], NAMED) == expected


REFUSED = [
    # (id, function, number of agents, what the message names)
    ("too few", lambda a: 0, 2, ["reward_func", "(a)", "num_agents=2"]),
    ("too many", lambda a, b, c: 0, 2, ["(a, b, c)", "num_agents=2"]),
    ("too many before rest", lambda a, b, c, *rest: 0, 2, ["at least 3", "num_agents=2"]),
    ("a default is no list", lambda a, b=None: 0, 2, ["(a, b=None)", "num_agents=2", "default"]),
    ("only a default", lambda a=None: 0, 1, ["num_agents=1"]),
    ("only reserved", lambda prompts, batch_items: 0, 2, ["num_agents=2", "prompts"]),
    ("only kwargs", lambda **named: 0, 2, ["num_agents=2"]),
    ("unknown keyword-only", lambda a, b, *, style: 0, 2, ["style", "default", "functools.partial"]),
    ("partial of unknown keyword-only", functools.partial(lambda a, *, x, y: 0, x=1), 1, ["'y'"]),
    ("partial bound a list", functools.partial(lambda a, b: 0, "A"), 2, ["num_agents=2"]),
    ("not callable", 3, 2, ["reward_func=3", "int"]),
    ("text", "reward", 2, ["reward_func='reward'", "str"]),
    ("class", Judge, 2, ["Judge", "class", "instance"]),
    ("built-in without signature", max, 2, ["max", "cannot be read", "def"]),
]


@pytest.mark.parametrize(("func", "num_agents", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_before_the_run(func, num_agents, words):
    with pytest.raises(ConfigError) as error:
        bind_reward(func, num_agents)
    for word in words:
        assert word in str(error.value)


def test_binding_never_calls_the_function():
    def fails(a, b):
        raise AssertionError("called")

    bind_reward(fails, 2)


def call(func, completions=(["x", "yy"], ["zz", "w"]), processor=None, per_agent=False, **changes):
    place = {
        "item": {"prompt": "tell", "tags": ["t"]},
        "prompts": ["p0", "p1"],
        "turn": 1,
        "prompt_history": [["q0"], ["q1"]],
        "response_history": [["r0"], ["r1"]],
        "episode_seed": 5,
        "item_index": 17,
    }
    reward = Reward(func, processor, len(completions), per_agent)
    return reward(completions=completions, **{**place, **changes})


def test_one_call_a_node_with_everything_in_agent_order():
    seen = []

    def reward(a, b, **named):
        seen.append((a, b, named))
        return [len(x) * 10 + len(y) for x, y in zip(a, b, strict=True)]

    result = call(reward)
    assert result.raw.tolist() == [12.0, 21.0]  # 10·1 + 2, 10·2 + 1
    assert result.processed.tolist() == [12.0, 21.0]
    assert result.raw.dtype == result.processed.dtype == np.float64
    assert seen == [
        (
            ["x", "yy"],
            ["zz", "w"],
            {
                "batch_items": [{"prompt": "tell", "tags": ["t"]}],
                "prompts": ["p0", "p1"],
                "turn": 1,
                "prompt_history": [["q0"], ["q1"]],
                "response_history": [["r0"], ["r1"]],
            },
        )
    ]


def test_what_the_reward_changes_stays_its_own():
    item = {"prompt": "tell", "tags": ["t"], "nested": {"n": [1]}}
    completions = [["x"], ["y"]]
    history = [["q0"], ["q1"]]
    prompts = [[{"role": "user", "content": "c"}], "p"]

    def vandal(a, b, batch_items, prompts, prompt_history, response_history):
        batch_items[0]["tags"].append("new")
        batch_items[0]["nested"]["n"].clear()
        batch_items[0]["prompt"] = "other"
        prompts[0][0]["content"] = "other"
        a[0] = "other"
        prompt_history[0].append("other")
        response_history.clear()
        return [1.0]

    call(vandal, completions, item=item, prompts=prompts, prompt_history=history, response_history=history)
    assert item == {"prompt": "tell", "tags": ["t"], "nested": {"n": [1]}}
    assert completions == [["x"], ["y"]]
    assert history == [["q0"], ["q1"]]
    assert prompts == [[{"role": "user", "content": "c"}], "p"]


@pytest.mark.parametrize("kind", [TypeError, KeyError, ZeroDivisionError, StopIteration])
def test_a_users_own_error_reaches_the_user_after_one_call(kind):
    calls = []

    def reward(a, b, batch_items=None):
        calls.append(1)
        raise kind("mine")

    with pytest.raises(kind, match="mine") as error:
        call(reward)
    assert len(calls) == 1
    assert error.traceback[-1].name == "reward"
    assert any("item 17" in note and "turn 1" in note for note in getattr(error.value, "__notes__", ["item 17 turn 1"]))


def test_an_async_users_error_reaches_the_user():
    async def reward(a, b):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as error:
        call(reward)
    assert error.traceback[-1].name == "reward"


def test_async_rewards_run_beside_a_running_loop_and_keep_one_loop():
    loops = []

    async def reward(a, b):
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return [0.5] * len(a)

    async def notebook():
        return call(reward).raw.tolist(), asyncio.get_running_loop()

    values, notebook_loop = asyncio.run(notebook())
    assert values == [0.5, 0.5]
    assert call(reward).raw.tolist() == [0.5, 0.5]
    assert loops[0] is loops[1]  # a client opened in the first call is usable in the second
    assert loops[0] is not notebook_loop


GOOD = [
    ("list", [0.5, 2]),
    ("tuple", (0.5, 2.0)),
    ("tensor", torch.tensor([0.5, 2.0])),
    ("tensor with a gradient", torch.tensor([0.5, 2.0], requires_grad=True)),
    ("bfloat16 tensor", torch.tensor([0.5, 2.0], dtype=torch.bfloat16)),
    ("array", np.array([0.5, 2.0], dtype=np.float32)),
    ("list of 0-d tensors", [torch.tensor(0.5), torch.tensor(2)]),
    ("list of numpy numbers", [np.float16(0.5), np.int64(2)]),
    ("list of 0-d arrays", [np.array(0.5), np.array(2)]),
    ("exact numbers", [Fraction(1, 2), Decimal(2)]),
]


@pytest.mark.parametrize("returned", [row[1] for row in GOOD], ids=[row[0] for row in GOOD])
def test_kinds_of_numbers(returned):
    assert call(lambda a, b: returned).raw.tolist() == [0.5, 2.0]


@pytest.mark.parametrize("returned", [[True, False], np.array([True, False]), [np.True_, np.False_]])
def test_bools_count_as_one_and_zero(returned):
    assert call(lambda a, b: returned).raw.tolist() == [1.0, 0.0]


BAD = [
    # (id, returned, what the message names beside item and turn)
    ("None", None, ["None", "2 finite numbers"]),
    ("a number", 0.5, ["0.5", "a single float"]),
    ("a 0-d tensor", torch.tensor(0.5), ["a single Tensor"]),
    ("text", "12", ["'12'", "a single str"]),
    ("dict", {0: 1.0, 1: 2.0}, ["a single dict"]),
    ("set", {1.0, 2.0}, ["a single set"]),
    ("generator", (x for x in [1.0, 2.0]), ["a single generator"]),
    ("too few", [1.0], ["[1.0]", "1 reward for 2"]),
    ("too many", [1.0, 2.0, 3.0], ["3 rewards for 2"]),
    ("empty", [], ["0 rewards for 2"]),
    ("None inside", [1.0, None], ["[1]=None"]),
    ("NaN", [math.nan, 1.0], ["[0]=nan", "finite"]),
    ("NaN in a tensor", torch.tensor([1.0, math.nan]), ["[1]=nan"]),
    ("infinity", [1.0, -math.inf], ["[1]=-inf", "finite"]),
    ("too large for a float", [1.0, 10**400], ["[1]=", "finite"]),
    ("text inside", [1.0, "2.0"], ["[1]='2.0'", "str"]),
    ("complex", [1.0, 2j], ["[1]=2j", "complex"]),
    ("nested", [[1.0], [2.0]], ["[0]=[1.0]", "nested"]),
    ("nested tensor", torch.ones(2, 1), ["[0]=[1.0]", "nested"]),
    ("nested once", [1.0, (2.0,)], ["[1]=(2.0,)", "nested"]),
    ("one-element tensors", [torch.ones(1), torch.ones(1)], ["[0]=[1.0]", "nested"]),
    ("rows where not allowed", [[1.0, 2.0], [3.0, 4.0]], ["[0]=[1.0, 2.0]", "nested"]),
    ("a dict inside", [1.0, {"score": 2}], ["[1]=", "dict"]),
]


@pytest.mark.parametrize(("returned", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_rewards_name_item_turn_and_value(returned, words):
    with pytest.raises(TaskError) as error:
        call(lambda a, b: returned)
    for word in ["reward_func", "item 17", "'tell'", "turn 1", *words]:
        assert word in str(error.value)


def test_per_agent_rewards():
    result = call(lambda a, b: torch.tensor([[1.0, 2.0], [3.0, 4.0]]), per_agent=True)
    assert result.raw.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert call(lambda a, b: [1, 2], per_agent=True).raw.shape == (2,)
    processed = call(lambda a, b: [[1, 2], [3, 4]], per_agent=True, processor=lambda r: 10 * r).processed
    assert processed.tolist() == [[10.0, 20.0], [30.0, 40.0]]


@pytest.mark.parametrize(
    ("returned", "word"),
    [
        ([[1.0, 2.0], 3.0], "[1]=3.0"),
        ([[1.0, 2.0], [3.0]], "[1]=[3.0]"),
        ([[1.0, 2.0], [3.0, None]], "[1][1]=None"),
        ([[1.0, 2.0], [math.nan, 1.0]], "[1][0]=nan"),
        ([[1.0, 2.0]], "1 reward for 2"),
        ([[[1.0], 2.0], [3.0, 4.0]], "[0][0]=[1.0]"),
    ],
)
def test_bad_per_agent_rewards(returned, word):
    with pytest.raises(TaskError) as error:
        call(lambda a, b: returned, per_agent=True)
    assert word in str(error.value)


def test_processors_chain_in_order():
    assert RewardProcessors.scale(factor=2.0)(3.0) == 6.0
    assert RewardProcessors.shift(value=-4)(3.0) == -1.0
    assert RewardProcessors.scale(factor=2).shift(value=1)(3.0) == 7.0  # 2·3 + 1
    assert RewardProcessors.shift(value=1).scale(factor=2)(3.0) == 8.0  # 2·(3 + 1)
    assert RewardProcessors.scale(factor=2).scale(factor=3).shift(value=1).shift(value=1)(1.0) == 8.0  # 2·3 + 1 + 1


def test_a_chain_leaves_its_first_link_alone():
    first = RewardProcessors.scale(factor=2)
    first.shift(value=1)
    assert first(3.0) == 6.0


@pytest.mark.parametrize("value", ["2", None, math.nan, math.inf, [2]])
@pytest.mark.parametrize("make", [RewardProcessors.scale, RewardProcessors.shift])
def test_processor_settings_are_finite_numbers(make, value):
    with pytest.raises(ConfigError, match=r"factor=|value="):
        make(value)


def test_the_processor_leaves_the_raw_reward():
    result = call(lambda a, b: [1, 2], processor=RewardProcessors.scale(factor=0.5).shift(value=-4))
    assert result.raw.tolist() == [1.0, 2.0]
    assert result.processed.tolist() == [-3.5, -3.0]  # 0.5·1 − 4, 0.5·2 − 4


@pytest.mark.parametrize("processed", [None, math.nan, "3", [1.0]])
def test_a_bad_processor_is_named(processed):
    with pytest.raises(TaskError) as error:
        call(lambda a, b: [1, 2], processor=lambda reward: processed)
    for word in ["reward_processor", "1.0", "item 17", "turn 1"]:
        assert word in str(error.value)


@pytest.mark.parametrize("processor", [3, lambda: 0, lambda a, b: 0, lambda a, *, b: 0])
def test_a_processor_takes_one_reward(processor):
    with pytest.raises(ConfigError, match="reward_processor"):
        Reward(lambda a: [0], processor, 1)


NUMBERS = st.one_of(st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False))
ANYTHING = st.recursive(
    st.one_of(NUMBERS, st.none(), st.text(max_size=5), st.floats(), st.binary(max_size=3), st.complex_numbers()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_numbers_arrive_unchanged(rewards):
    checked = checked_rewards(rewards, num_joints=len(rewards), num_agents=2, per_agent=False, where="here")
    assert checked.tolist() == [float(reward) for reward in rewards]


@settings(max_examples=300, deadline=None)
@given(ANYTHING, st.booleans())
def test_anything_is_finite_numbers_or_one_error(returned, per_agent):
    try:
        checked = checked_rewards(returned, num_joints=2, num_agents=2, per_agent=per_agent, where="item 3, turn 0")
    except TaskError as error:
        assert "item 3, turn 0" in str(error)
    else:
        assert np.isfinite(checked).all()
        assert checked.shape == (2,) or (per_agent and checked.shape == (2, 2))
