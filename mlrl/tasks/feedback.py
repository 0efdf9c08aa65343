"""Next prompts of a task with several turns: what an agent sees again, and the words that choose a kind of feedback."""

from collections.abc import Sequence
from typing import Any

from mlrl import ConfigError

Messages = list[dict[str, Any]]


def checked_mode(mode: str, modes: Sequence[str]) -> str:
    """The word itself.

    Raises:
        ConfigError: it is none of `modes`.
    """
    if mode not in modes:
        raise ConfigError(f"task_args.feedback={mode!r}: no kind of feedback here. Right is one of {', '.join(modes)}.")
    return mode


def next_prompt(
    history: Sequence[Messages], answer: str, text: str, include_prompt: bool = True, include_answer: bool = True
) -> Messages:
    """The chat that an agent sees next.

    Args:
        history: the agent's prompts so far; the last one is the chat that led to `answer`.
        text: what it is told about the answer.
        include_prompt, include_answer: with both the chat goes on; else there is one message with what is included.
    """
    if include_prompt and include_answer:
        return [*history[-1], {"role": "assistant", "content": answer}, {"role": "user", "content": text}]
    parts = [history[0][0]["content"]] if include_prompt else []
    parts += [f"Your previous answer:\n{answer}"] if include_answer else []
    return [{"role": "user", "content": "\n\n".join([*parts, text])}]
