"""Joint texts: their order, their cutting within a budget, their packing."""

import pytest

from mlrl.errors import ConfigError
from mlrl.preference.joint_text import JointReader, fair_shares, joint_batches
from tests.tiny import tiny_tokenizer

CHAT = [{"role": "user", "content": "the sea"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def text(reader, given):
    return reader.tokenizer.decode([*given.prompts, *given.responses])


def test_prompts_come_first_and_the_last_token_is_always_the_same(tokenizer):
    reader = JointReader(tokenizer, 2)
    given = reader.read([CHAT, "a river"], ["deep", ""])
    assert text(reader, given) == (
        "\n[agent 1, prompt]\nthe sea\n[agent 2, prompt]\na river"
        "\n[agent 1, response]\ndeep\n[agent 2, response]\n\n[score]"
    )
    other = reader.read([CHAT, "a river"], ["blue", "and long"])
    assert other.prompts == given.prompts
    assert other.responses[-1] == given.responses[-1]
    assert (reader.inputs, reader.inputs_cut, given.cut) == (2, 0, 0)


def test_special_tokens_in_a_text_are_text(tokenizer):
    given = JointReader(tokenizer, 1).read(["a<|im_end|>"], ["b<|im_end|>"])
    assert tokenizer.eos_token_id not in [*given.prompts, *given.responses]


def test_a_start_token_stands_once_at_the_start():
    tokenizer = tiny_tokenizer("llama_bos")
    given = JointReader(tokenizer, 2).read(["the", "sea"], ["a", "b"])
    ids = [*given.prompts, *given.responses]
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("needs", "total", "expected"),
    [
        ([5, 5], 20, [5, 5]),
        ([5, 5], 10, [5, 5]),
        ([9, 9], 10, [5, 5]),
        ([2, 20], 10, [2, 8]),  # what the first does not need the second has
        ([20, 2], 10, [8, 2]),
        ([1, 4, 30], 15, [1, 4, 10]),
        ([10, 10, 10], 10, [3, 3, 4]),
        ([0, 7], 3, [0, 3]),
    ],
)
def test_shares_of_a_budget(needs, total, expected):
    shares = fair_shares(needs, total)
    assert sorted(shares) == sorted(expected) if len(set(needs)) == 1 else shares == expected
    assert sum(shares) == min(total, sum(needs))


def test_no_response_disappears_when_a_text_is_cut(tokenizer):
    whole = JointReader(tokenizer, 2)
    prompts, responses = ["p" * 59 + "z", "q" * 60], ["x" * 5, "y" * 49 + "k"]
    length = sum(map(len, (whole.read(prompts, responses).prompts, whole.read(prompts, responses).responses)))
    reader = JointReader(tokenizer, 2, max_length=length - 100)
    given = reader.read(prompts, responses)
    assert len(given.prompts) + len(given.responses) == length - 100
    assert (given.cut, reader.inputs_cut) == (100, 1)
    # 60 + 5 and 60 + 50 of 175 are 75 now: 37 or 38 each; a response comes first, the prompt has the rest, from its end
    shown = text(reader, given)
    assert "x" * 5 in shown
    assert 31 <= shown.count("p") - 6 <= 32 and "z" in shown  # six are in the tags; the prompt keeps its end
    assert 37 <= shown.count("y") <= 38 and "k" not in shown
    assert shown.count("q") == 0
    assert reader.read(["a", "b"], ["c", "d"]).cut == 0
    assert (reader.inputs, reader.inputs_cut) == (2, 1)


def test_a_budget_without_room_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"reward_max_length=20: the tags of 2 agents take \d+ tokens. Give"):
        JointReader(tokenizer, 2, max_length=20)


def test_packing_keeps_wholes_together_and_shares_prefixes(tokenizer):
    reader = JointReader(tokenizer, 1)
    inputs = [reader.read(["the sea"], [answer]) for answer in ("a", "b", "a", "c")]
    wholes = [inputs[:2], inputs[2:]]
    [batch] = joint_batches(wholes, 10**6)
    assert batch.places == [0, 1]
    assert batch.ends[0] == batch.ends[2]  # the same text is run once
    assert len(batch.tree.segments) == 1 + 3
    tight = list(joint_batches(wholes, 1))
    assert [batch.places for batch in tight] == [[0], [1]]
    assert [len(batch.ends) for batch in tight] == [2, 2]
