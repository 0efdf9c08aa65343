import math

import numpy as np
import pytest

from mlrl.errors import ConfigError, TaskError
from mlrl.eval_hooks import EvalHooks, RolloutSample

ITEMS = [{"prompt": "p0", "tags": [1]}, {"prompt": "p1", "tags": [2]}]
TURNS = [[["a", "b"], ["c"]], [["d", "e"], ["f"]]]  # 2 agents, 2 items, the second ended after one turn


def test_the_logger_sees_agent_item_turn_and_untouched_items():
    seen = []

    def logger(agent_completions_turns, batch_items, prompts):
        seen.append((agent_completions_turns, prompts))
        batch_items[0]["tags"].clear()
        return [{"n": len(turns)} for turns in agent_completions_turns[0]]

    rows = EvalHooks(logger, None, None).rows(agent_completions_turns=TURNS, items=ITEMS)
    assert seen == [(TURNS, ["p0", "p1"])]
    assert rows == [{"n": 2}, {"n": 1}]
    assert ITEMS[0]["tags"] == [1]


def test_no_hooks_give_nothing():
    hooks = EvalHooks(None, None, None)
    assert hooks.rows(agent_completions_turns=TURNS, items=ITEMS) == []
    assert hooks.aggregate([], 2) == {}
    assert hooks.callback_metrics([]) == {}


@pytest.mark.parametrize("returned", [None, {}, [{}], [{}, {}, {}], [{}, 3], "ab"])
def test_a_logger_gives_one_dict_an_item(returned):
    hooks = EvalHooks(lambda **named: returned, None, None)
    with pytest.raises(TaskError, match="eval_logger"):
        hooks.rows(agent_completions_turns=TURNS, items=ITEMS)


def test_without_an_aggregator_numeric_keys_are_averaged():
    rows = [{"score": 1, "ok": True, "text": "x"}, {"score": np.float32(4), "ok": False, "text": "y"}]
    assert EvalHooks(None, None, None).aggregate(rows, 1) == {"score": 2.5, "ok": 0.5}  # (1+4)/2, (1+0)/2


def test_a_mean_never_skips_an_item():
    with pytest.raises(TaskError, match="'score' for 1 of 2"):
        EvalHooks(None, None, None).aggregate([{"score": 1}, {}], 1)


@pytest.mark.parametrize("aggregator", [lambda rows, num_turns: {"n": len(rows) + num_turns}, lambda rows: {"n": 5}])
def test_the_aggregator_may_take_num_turns(aggregator):
    assert EvalHooks(None, aggregator, None).aggregate([{}, {}], 3) == {"n": 5.0}


def test_a_metric_may_be_undefined_but_not_a_text():
    assert math.isnan(EvalHooks(None, lambda rows: {"x": math.nan}, None).aggregate([{}], 1)["x"])
    for value in ("3", None, [1]):
        with pytest.raises(TaskError, match="'x'"):
            EvalHooks(None, lambda rows, value=value: {"x": value}, None).aggregate([{}], 1)
    with pytest.raises(TaskError, match="eval_aggregator"):
        EvalHooks(None, lambda rows: 3, None).aggregate([{}], 1)


def test_the_callback_gets_samples_and_may_return_nothing():
    samples = [RolloutSample(agent_idx=0, turn_idx=1, prompt="p", completion="c", reward=0.5, metadata={"item": 3})]
    assert EvalHooks(None, None, lambda rollouts: {"r": rollouts[0].reward}).callback_metrics(samples) == {"r": 0.5}
    assert EvalHooks(None, None, lambda rollouts: None).callback_metrics(samples) == {}
    with pytest.raises(TaskError, match="metrics_callback"):
        EvalHooks(None, None, lambda rollouts: [1]).callback_metrics(samples)


@pytest.mark.parametrize(
    ("logger", "aggregator", "callback", "word"),
    [
        (lambda completions: [], None, None, "eval_logger"),
        (None, lambda: {}, None, "eval_aggregator"),
        (None, None, lambda rollouts, extra: {}, "metrics_callback"),
    ],
)
def test_hooks_refused_before_the_run(logger, aggregator, callback, word):
    with pytest.raises(ConfigError, match=word):
        EvalHooks(logger, aggregator, callback)


def test_the_callback_cannot_change_the_item():
    item = {"prompt": "p", "tags": [1]}
    sample = RolloutSample(agent_idx=0, turn_idx=0, prompt="p", completion="c", reward=0.5, metadata={"item": item})
    EvalHooks(None, None, lambda rollouts: rollouts[0].metadata["item"]["tags"].clear()).callback_metrics([sample])
    assert item == {"prompt": "p", "tags": [1]}
