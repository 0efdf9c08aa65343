"""From what a formatter returned to the tokens an agent sees."""

from __future__ import annotations

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from mlrl.errors import ConfigError, TaskError
from mlrl.rollout.tree import Response, TokenizedPrompt

_MARK = "\u2063mlrl-response\u2063"  # stands for a response while a chat template is rendered
_QUIET = {"verbose": False}  # lengths are checked here against the model's own limit


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase,
    content: str | list[dict],
    *,
    previous: tuple[TokenizedPrompt, Response] | None = None,
    max_prompt_tokens: int | None = None,
    limit: int | None = None,
    where: str = "prompt",
) -> TokenizedPrompt:
    """Tokenizes a str as it is, or chat messages through the chat template with the generation suffix.

    Where messages continue what the agent saw and said a turn before (`previous`), those tokens are reused id for id
    and only the rest is tokenized: a text that is decoded and encoded again can come out as other tokens.

    Args:
        max_prompt_tokens: longer prompts lose tokens on the left, so that the generation suffix stays.
        limit: longest prompt that leaves room for the response.
        where: what to name in errors.

    Raises:
        ConfigError: messages for a tokenizer without chat template.
        TaskError: an empty prompt, one longer than `limit`, or messages that the chat template refuses.
    """
    reused = 0
    ids = None
    if previous is not None and isinstance(content, list) and previous[0].truncated == 0:
        rest = _continuation(tokenizer, content, *previous, where)
        if rest is not None:
            head = previous[0].token_ids + previous[1].token_ids
            reused, ids = len(head), head + rest
    if ids is None:
        ids = _encode(tokenizer, content, where)
    if not ids:
        raise TaskError(f"{where}: the prompt is empty. A formatter must return at least one token")
    cut = 0
    if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
        cut = len(ids) - max_prompt_tokens
        reused, ids = 0, ids[cut:]
    if limit is not None and len(ids) > limit:
        raise TaskError(
            f"{where}: {len(ids)} tokens, more than the {limit} that the model holds beside max_new_tokens. "
            "Shorten it, lower max_new_tokens, or set max_prompt_tokens to cut prompts on the left"
        )
    return TokenizedPrompt(content, ids, reused, cut)


def _encode(tokenizer: PreTrainedTokenizerBase, content: str | list[dict], where: str) -> list[int]:
    special = False
    if isinstance(content, str):
        text, bos = content, tokenizer.bos_token
        special = not (bos and content.startswith(bos))
    else:
        text = _render(tokenizer, content, where)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskError(
            f"{where}: the prompt holds {text[error.start]!r}, half of a character, which has no tokens. Remove it: "
            'text.encode("utf-8", "replace").decode()'
        ) from None
    return tokenizer(text, add_special_tokens=special, **_QUIET)["input_ids"]


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], where: str) -> str:
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{where}: chat messages, but the tokenizer {tokenizer.name_or_path!r} has no chat template. "
            "Return a str from the formatter, or use an instruction-tuned model"
        )
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise TaskError(
            f"{where}: the chat template of {tokenizer.name_or_path!r} refuses messages of the roles "
            f"{', '.join(repr(m.get('role')) for m in messages)} ({error}). Return other messages from the formatter"
        ) from error


def _continuation(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], prompt: TokenizedPrompt, response: Response, where: str
) -> list[int] | None:
    """Tokens that follow the earlier prompt and response; None where the messages do not begin with them."""
    before = prompt.content
    if not isinstance(before, list) or len(messages) <= len(before) + 1 or messages[: len(before)] != before:
        return None
    said = messages[len(before)]
    if said.get("role") != "assistant" or said.get("content") != response.text:
        return None
    marked = [*before, {**said, "content": _MARK}, *messages[len(before) + 1 :]]
    head, mark, rest = _render(tokenizer, marked, where).partition(_MARK)
    if not mark or head != _render(tokenizer, before, where):
        return None  # the template renders an earlier turn in another way than it prompted for it
    tokens = tokenizer(rest, add_special_tokens=False, **_QUIET)["input_ids"]
    if not response.truncated and tokens and response.token_ids and tokens[0] == response.token_ids[-1]:
        tokens = tokens[1:]  # the response already holds the end token that the template writes
    return tokens
