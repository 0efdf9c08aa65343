"""Prompts become the tokens they should: no second start token, no cut at an end token, no token encoded anew."""

import pytest

from mlrl.errors import ConfigError, TaskError
from mlrl.rollout.prompts import tokenize_prompt
from mlrl.rollout.tree import Response
from tests.tiny import TURN_END, tiny_tokenizer

USER = [{"role": "user", "content": "Tell me about the sea"}]


def answer(tokenizer, ids: list[int], truncated: bool = False) -> Response:
    """A response of these tokens, with the end token after them unless it was truncated."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    ids = ids if truncated else [*ids, tokenizer.eos_token_id]
    return Response(ids, [0.0] * len(ids), text, truncated)


def follow_up(text: str, before=USER) -> list[dict]:
    return [*before, {"role": "assistant", "content": text}, {"role": "user", "content": "More, please"}]


# The first prompt ----------------------------------------------------------------------------------------------------


def test_a_str_is_tokenized_as_it_is():
    tokenizer = tiny_tokenizer()
    prompt = tokenize_prompt(tokenizer, "Tell me")
    assert tokenizer.decode(prompt.token_ids) == "Tell me"
    assert (prompt.content, prompt.reused, prompt.truncated) == ("Tell me", 0, 0)


def test_messages_go_through_the_chat_template():
    tokenizer = tiny_tokenizer()
    messages = [{"role": "system", "content": "Be short"}, *USER]
    prompt = tokenize_prompt(tokenizer, messages)
    expected = "<|im_start|>system\nBe short<|im_end|>\n<|im_start|>user\nTell me about the sea<|im_end|>\n"
    assert tokenizer.decode(prompt.token_ids) == expected + "<|im_start|>assistant\n"
    assert prompt.token_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert prompt.content == messages


@pytest.mark.parametrize("content", ["Tell me", "<|endoftext|>Tell me", USER], ids=["str", "str with bos", "messages"])
def test_one_start_token(content):
    tokenizer = tiny_tokenizer("llama_bos")
    ids = tokenize_prompt(tokenizer, content).token_ids
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_end_tokens_inside_a_prompt_stay():
    tokenizer = tiny_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    ids = tokenize_prompt(tokenizer, USER).token_ids
    assert ids.count(tokenizer.eos_token_id) == 1  # of the user's turn, in the middle
    assert ids[-1] != tokenizer.eos_token_id
    raw = tokenize_prompt(tokenizer, f"a{TURN_END}b{TURN_END}").token_ids
    assert [i == tokenizer.eos_token_id for i in raw] == [False, True, False, True]


def test_what_cannot_be_a_prompt():
    with pytest.raises(TaskError, match="item 3, turn 1, agent 0: the prompt is empty"):
        tokenize_prompt(tiny_tokenizer(), "", where="item 3, turn 1, agent 0")
    with pytest.raises(ConfigError, match="agent 1: chat messages, but the tokenizer .* has no chat template"):
        tokenize_prompt(tiny_tokenizer("gpt2"), USER, where="agent 1")
    # a start token alone is something to continue
    assert len(tokenize_prompt(tiny_tokenizer("llama_bos"), "").token_ids) == 1


def test_a_template_that_refuses_the_messages():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TaskError, match="item 0, turn 0, agent 0: .*roles must alternate"):
        tokenize_prompt(tokenizer, USER, where="item 0, turn 0, agent 0")


# Length --------------------------------------------------------------------------------------------------------------


def test_cuts_on_the_left_and_keeps_the_generation_suffix():
    tokenizer = tiny_tokenizer()
    whole = tokenize_prompt(tokenizer, USER).token_ids
    cut = tokenize_prompt(tokenizer, USER, max_prompt_tokens=9)
    assert cut.token_ids == whole[-9:] and cut.truncated == len(whole) - 9
    assert tokenizer.decode(cut.token_ids).endswith("<|im_start|>assistant\n")
    exact = tokenize_prompt(tokenizer, USER, max_prompt_tokens=len(whole))
    assert exact.token_ids == whole and exact.truncated == 0


def test_too_long_is_an_error_with_the_lengths():
    tokenizer = tiny_tokenizer()
    length = len(tokenize_prompt(tokenizer, USER).token_ids)
    assert len(tokenize_prompt(tokenizer, USER, limit=length).token_ids) == length
    message = rf"item 12, turn 1, agent 0: {length} tokens, more than the {length - 1} .*max_prompt_tokens"
    with pytest.raises(TaskError, match=message):
        tokenize_prompt(tokenizer, USER, limit=length - 1, where="item 12, turn 1, agent 0")
    assert len(tokenize_prompt(tokenizer, USER, limit=9, max_prompt_tokens=9).token_ids) == 9


def test_never_cut_at_the_limit_of_the_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 4
    assert len(tokenize_prompt(tokenizer, "Tell me about the sea and the ships").token_ids) > 4
    assert len(tokenize_prompt(tokenizer, USER).token_ids) > 4


# Continuations -------------------------------------------------------------------------------------------------------


TEXTS = ["The sea is deep", " two leading spaces" * 2, "trailing  ", "", "\n", "a story\n\nin lines\n", "déjà vu ✓"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "llama_bos"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("truncated", [False, True])
def test_a_continuation_is_the_whole_text_where_it_round_trips(kind, text, truncated):
    tokenizer = tiny_tokenizer(kind)
    first = tokenize_prompt(tokenizer, USER)
    response = answer(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"], truncated)
    if truncated and not response.token_ids:
        return  # a response is never without any token
    assert response.text == text
    messages = follow_up(text)
    second = tokenize_prompt(tokenizer, messages, previous=(first, response))
    assert second.token_ids == tokenize_prompt(tokenizer, messages).token_ids
    head = first.token_ids + response.token_ids
    assert second.reused == len(head) and second.token_ids[: len(head)] == head
    # and once more, on top of that
    third = tokenize_prompt(tokenizer, follow_up(text, messages), previous=(second, response))
    assert third.token_ids == tokenize_prompt(tokenizer, follow_up(text, messages)).token_ids
    assert third.reused == len(second.token_ids) + len(response.token_ids)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("text", ["the sea", " the sea ", "sea"])
def test_a_continuation_keeps_tokens_that_encoding_would_change(text, truncated):
    tokenizer = tiny_tokenizer()
    letters = [tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in text]  # a token a letter
    assert letters != tokenizer(text, add_special_tokens=False)["input_ids"]
    first = tokenize_prompt(tokenizer, USER)
    response = answer(tokenizer, letters, truncated)
    assert response.text == text
    second = tokenize_prompt(tokenizer, follow_up(text), previous=(first, response))
    again = tokenize_prompt(tokenizer, follow_up(text))
    assert second.token_ids != again.token_ids
    assert tokenizer.decode(second.token_ids) == tokenizer.decode(again.token_ids)
    assert second.token_ids[: second.reused] == first.token_ids + response.token_ids
    assert second.token_ids.count(tokenizer.eos_token_id) == 3  # user, assistant, user: none twice, none missing


def test_special_tokens_that_an_agent_wrote_stay():
    tokenizer = tiny_tokenizer()
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    first = tokenize_prompt(tokenizer, USER)
    response = answer(tokenizer, [start, *tokenizer("sea", add_special_tokens=False)["input_ids"]])
    assert response.text == "sea"
    second = tokenize_prompt(tokenizer, follow_up("sea"), previous=(first, response))
    assert second.token_ids[: second.reused] == first.token_ids + response.token_ids


def test_a_template_that_trims_cannot_change_what_was_said():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'] | trim")
    first = tokenize_prompt(tokenizer, USER)
    response = answer(tokenizer, tokenizer("  the sea ", add_special_tokens=False)["input_ids"])
    second = tokenize_prompt(tokenizer, follow_up("  the sea "), previous=(first, response))
    assert second.token_ids[: second.reused] == first.token_ids + response.token_ids
    rest = tokenizer.decode(second.token_ids[second.reused :])
    assert rest == "\n<|im_start|>user\nMore, please<|im_end|>\n<|im_start|>assistant\n"


def changed(messages, index, **entries):
    return [{**m, **entries} if i == index else m for i, m in enumerate(messages)]


@pytest.mark.parametrize(
    "messages",
    [
        changed(follow_up("the sea"), 0, content="Tell me about the land"),
        changed(follow_up("the sea"), 1, content="the sea, edited"),
        changed(follow_up("the sea"), 1, role="user"),
        follow_up("the sea")[1:],
        follow_up("the sea")[:2],
        [{"role": "user", "content": "something else"}],
        "the sea",
    ],
    ids=["other prompt", "edited answer", "other role", "without prompt", "nothing after", "fresh", "str"],
)
def test_messages_that_do_not_continue_are_encoded_whole(messages):
    tokenizer = tiny_tokenizer()
    first = tokenize_prompt(tokenizer, USER)
    letters = [tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in "the sea"]
    second = tokenize_prompt(tokenizer, messages, previous=(first, answer(tokenizer, letters)))
    assert second.reused == 0 and second.token_ids == tokenize_prompt(tokenizer, messages).token_ids


def test_a_template_that_rewrites_earlier_turns_is_encoded_whole():
    tokenizer = tiny_tokenizer()
    # drops the first message once there are more, as templates drop earlier reasoning
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages", "in messages[-2:]")
    first = tokenize_prompt(tokenizer, USER)
    response = answer(tokenizer, tokenizer("the sea", add_special_tokens=False)["input_ids"])
    second = tokenize_prompt(tokenizer, follow_up("the sea"), previous=(first, response))
    assert second.reused == 0
    assert second.token_ids == tokenize_prompt(tokenizer, follow_up("the sea")).token_ids


def test_a_cut_prompt_shares_nothing():
    tokenizer = tiny_tokenizer()
    response = answer(tokenizer, tokenizer("the sea", add_special_tokens=False)["input_ids"])
    cut = tokenize_prompt(tokenizer, USER, max_prompt_tokens=9)
    second = tokenize_prompt(tokenizer, follow_up("the sea"), previous=(cut, response))
    assert second.reused == 0 and second.token_ids == tokenize_prompt(tokenizer, follow_up("the sea")).token_ids
    first = tokenize_prompt(tokenizer, USER)
    second = tokenize_prompt(tokenizer, follow_up("the sea"), previous=(first, response), max_prompt_tokens=12)
    assert (second.reused, len(second.token_ids)) == (0, 12)


@pytest.mark.parametrize("content", ["bad \ud800", [{"role": "user", "content": "bad \udfff!"}]])
def test_half_a_character_is_named(content):
    tokenizer = tiny_tokenizer()
    with pytest.raises(TaskError, match=r"item 3: the prompt holds '\\ud.*half of a character"):
        tokenize_prompt(tokenizer, content, max_prompt_tokens=None, limit=None, where="item 3")
