"""Rounds on disk: what goes in comes out, a person and `datasets` can read them, wrong ones are named."""

import json

import pytest

from mlrl.errors import ConfigError
from mlrl.preference.pairs import PreferencePair
from mlrl.preference.rounds import check_pairs, earlier_rounds, find_rounds, read_pairs, write_round
from mlrl.rollout.tree import TokenizedPrompt
from tests.preference.build import pair, trajectory


def with_text_prompt(original: PreferencePair) -> PreferencePair:
    """The same with a prompt that is no chat, and that reuses and lost tokens."""
    prompt = TokenizedPrompt("Write:\n", [1, 9], reused=1, truncated=4)
    side = trajectory(2.5, 0, num_turns=2, text="\u00e4 \U0001f600 \u2028 end")
    turns = tuple(type(turn)((prompt, prompt), turn.responses) for turn in side.turns)
    side = type(side)(turns, side.reward, side.raw_reward, "history", 4, side.sampling)
    return PreferencePair(original.round, original.item, original.item_key, side, original.loser)


def test_a_round_comes_back_as_it_was_written(tmp_path):
    pairs = [pair(2.0, -1.0, item=4, round=1), with_text_prompt(pair(item=5, round=1))]
    written = write_round(tmp_path / "preferences", 1, iter(pairs))
    assert (written.path.name, written.number, written.num_pairs) == ("iteration_0001.jsonl", 1, 2)
    assert find_rounds(tmp_path / "preferences") == [written]
    assert read_pairs(written) == pairs
    assert read_pairs(written, [1, 0, 1]) == [pairs[1], pairs[0], pairs[1]]
    assert list(tmp_path.rglob("*.tmp")) == []


def test_a_line_reads_as_text(tmp_path):
    record = json.loads(write_round(tmp_path, 1, [pair(2.0, -1.0, item=4)]).path.read_text())
    assert (record["round"], record["item"], record["gap"]) == (1, 4, 3.0)
    winner = record["winner"]
    assert (winner["writer"], winner["reward"], winner["raw_reward"]) == ("current", 2.0, 20.0)
    assert winner["turns"][0][1]["prompt"] == [{"role": "user", "content": "say"}]
    assert winner["turns"][0][1]["response"] == "answer"
    assert winner["turns"][0][1]["token_ids"] == [5, 6, 2]
    assert winner["sampling"]["temperature"] == 0.7
    assert winner["sampling"]["policy"] == "agents of round 1"


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path):
    [back] = read_pairs(write_round(tmp_path, 1, [pair(text="a \ud83d b")]))
    assert back.winner.turns[0].responses[0].text == "a ? b"


def test_datasets_loads_rounds_of_both_kinds_of_prompts_and_empty_ones(tmp_path):
    datasets = pytest.importorskip("datasets")
    write_round(tmp_path, 1, [pair(item=0, num_turns=2), with_text_prompt(pair(item=1))])
    write_round(tmp_path, 2, [])
    write_round(tmp_path, 3, [pair(item=2, tokens=[7])])
    files = [str(round.path) for round in find_rounds(tmp_path)]
    rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert list(rows["item"]) == [0, 1, 2]
    assert rows[2]["winner"]["turns"][0][0]["token_ids"] == [7]


def test_rounds_are_found_in_order_and_counted_without_empty_lines(tmp_path):
    for number in (10, 2, 1):
        write_round(tmp_path, number, [pair(item=number)] * (number % 3))
    (tmp_path / "iteration_0002.jsonl").open("a").write("\n")
    (tmp_path / "iteration_x.jsonl").write_text("{}")
    assert [(round.number, round.num_pairs) for round in find_rounds(tmp_path)] == [(1, 1), (2, 2), (10, 1)]
    assert find_rounds(tmp_path / "absent") == []


def test_rounds_of_an_earlier_run(tmp_path):
    write_round(tmp_path / "run" / "preferences", 1, [pair()])
    assert earlier_rounds(tmp_path / "run") == earlier_rounds(tmp_path / "run" / "preferences")
    write_round(tmp_path / "nothing" / "preferences", 1, [])
    for folder in ("absent", "nothing"):
        with pytest.raises(ConfigError, match=f"preference_replay_from=.*{folder}.*holds no pairs"):
            earlier_rounds(tmp_path / folder)


@pytest.mark.parametrize("line", ["{", "{}", "[]", '{"round": 1}'])
def test_a_line_that_is_no_pair_is_named(tmp_path, line):
    written = write_round(tmp_path, 1, [pair()])
    written.path.open("a").write(line + "\n")
    with pytest.raises(ConfigError, match="iteration_0001.jsonl'?: line 2 is no preference pair"):
        read_pairs(written)
    assert read_pairs(written, [0]) == [pair()]


def test_pairs_of_another_team_are_refused():
    def decode(token_ids):
        return {(5, 6, 2): "answer", (7, 2): "other"}[tuple(token_ids)]

    check_pairs([pair()], [decode, decode], "runs/a")
    with pytest.raises(ConfigError, match="preference_replay_from='runs/a'.*of 2 agents, this team has 1"):
        check_pairs([pair()], [decode], "runs/a")
    with pytest.raises(ConfigError, match="tokens of agent 1 do not read as its text, 'answer'"):
        check_pairs([pair()], [decode, lambda ids: "something else"], "runs/a")


def test_an_unfinished_write_leaves_the_round_as_it_was(tmp_path):
    written = write_round(tmp_path, 1, [pair()])

    def breaks_off():
        yield pair(item=8)
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_round(tmp_path, 1, breaks_off())
    assert read_pairs(written) == [pair()]
    assert find_rounds(tmp_path) == [written]
