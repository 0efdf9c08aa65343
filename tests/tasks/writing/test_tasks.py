import json

import pytest

from mlrl.errors import ConfigError
from mlrl.task import Environment, load_task
from mlrl.tasks.writing.reward import ARXIV, TLDR, score
from tests.texts import logged, rewards

TASKS = {"tldr": ("prompt", TLDR), "arxiv": ("abstract_text", ARXIV)}
LONG = " ".join(f"word{i}" for i in range(140))


@pytest.mark.parametrize("name", TASKS)
def test_rows_of_our_own(name):
    field, _ = TASKS[name]
    task = load_task(name)
    texts = [row[field] for row in (*task.train_dataset, *task.eval_dataset)]
    assert len(set(texts)) == len(texts) == 10
    assert len(task.eval_dataset) == 2
    assert all(60 <= len(text.split()) <= 300 for text in texts)
    if name == "arxiv":
        assert all(len(text.split()) >= 100 for text in texts)


@pytest.mark.parametrize("name", TASKS)
def test_each_agent_has_its_role_and_the_text(name):
    field, _ = TASKS[name]
    task = load_task(name)
    item = {field: "A {source} text with %s braces {}."}
    first, second = Environment(task, 2).initial_prompts(item)
    (alone,) = Environment(task, 1).initial_prompts(item)
    texts = [prompt[0]["content"] for prompt in (first, second, alone)]
    assert len(set(texts)) == 3
    assert all(text.endswith(item[field]) for text in texts)
    assert "partner" in texts[0]
    assert "partner" in texts[1]
    assert "[SPLIT]" in texts[2]


@pytest.mark.parametrize("name", TASKS)
def test_one_score_a_joint_response(name):
    field, rule = TASKS[name]
    task = load_task(name)
    pairs = [("a " * 10, "b " * 20), (LONG, f"{LONG} however {'boat ' * 80}"), ("", "")]
    found = rewards(task, {field: "x"}, *map(list, zip(*pairs, strict=True)))
    assert found == [score(*pair, rule).total for pair in pairs]
    assert found[1] > 0.5 or name == "tldr"


def test_one_agent_writes_both():
    pair = ("a " * 10, "b " * 20)
    assert rewards(load_task("tldr"), {"prompt": "x"}, [" [SPLIT] ".join(pair)]) == [
        score(pair[0].strip(), pair[1].strip(), TLDR).total
    ]


@pytest.mark.parametrize("name", TASKS)
def test_the_logger_has_the_reward(name):
    field, _ = TASKS[name]
    task, item = load_task(name), {field: "x"}
    for first, second in [
        ("", ""),
        ("a " * 10, "b " * 20),
        (LONG, f"{LONG} however {'boat ' * 60}"),
        ("é", "x" * 9000),
    ]:
        row = logged(task, item, first, second)
        assert row["gated_total"] == rewards(task, item, [first], [second])[0]
        assert row["gated_total"] == pytest.approx(sum(row[f"level_{i}"] for i in (1, 2, 3, 4)))
        assert row["characters_1"] == len(second)


def test_three_agents_are_refused():
    with pytest.raises(ConfigError, match="num_agents=3: tldr has 2 roles"):
        Environment(load_task("tldr"), 3).initial_prompts({"prompt": "x"})


def test_there_is_one_turn():
    with pytest.raises(ConfigError, match="num_turns=2"):
        Environment(load_task("arxiv"), 2, 2)


def test_a_file_of_the_same_rows(tmp_path):
    path = tmp_path / "abstracts.jsonl"
    path.write_text("\n".join(json.dumps({"abstract_text": f"text {i}", "title": "t"}) for i in range(20)))
    task = load_task("arxiv", {"data_path": str(path), "train_size": "5"})
    assert [row["abstract_text"] for row in task.train_dataset] == [f"text {i}" for i in range(5)]
    assert len(task.eval_dataset) == 2
    path.write_text(json.dumps([{"title": "t"}, {"title": "u"}]))
    with pytest.raises(ConfigError, match="no field 'abstract_text'"):
        load_task("arxiv", {"data_path": str(path)})
