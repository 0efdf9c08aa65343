"""What is sent to a model over HTTP and what comes back, for four kinds of servers: pure functions of JSON values.

| format             | endpoint                | answers a request | text of an answer             |
|--------------------|-------------------------|-------------------|-------------------------------|
| `generic`          | a server of one's own   | n                 | `completions[c]`              |
| `openai`           | `…/v1/chat/completions` | n                 | `choices[c].message.content`  |
| `anthropic`        | `…/v1/messages`         | 1                 | the text blocks of `content`  |
| `openai_responses` | `…/v1/responses`        | 1                 | `output_text` of `output`     |

An answer without text (null content, a refusal, only reasoning) is None and keeps its place among the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mlrl.errors import ConfigError

FORMATS = ("generic", "openai", "anthropic", "openai_responses")
ONE_ANSWER_A_REQUEST = ("anthropic", "openai_responses")
NEEDS_MODEL = ("openai", "anthropic", "openai_responses")

_SECRET_NAME = re.compile(
    r"authori[sz]ation|(api|access|subscription|private|secret)[-_]?key|secret|passw|credential|cookie|bearer|"
    r"(^|[-_])(auth|token)$|^key$",
    re.IGNORECASE,
)


class MalformedAnswerError(ValueError):
    """A server's answer is not of the form that its format promises."""


@dataclass(frozen=True)
class Ask:
    """What a request asks for, whatever the format.

    Attributes:
        prompt: a text, or chat messages of the form {"role", "content"}.
        num_answers: n.
        context: further fields of the request, sent by the `generic` format only.
    """

    prompt: str | list[dict]
    num_answers: int
    model: str | None = None
    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    context: Mapping[str, Any] = field(default_factory=dict)


def request_body(format: str, ask: Ask, extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON body of a request.

    Args:
        extra_body: fields to add or replace; a None takes a field out (`max_tokens=null max_completion_tokens=512`).
    """
    forms = {"generic": _generic, "openai": _openai, "anthropic": _anthropic, "openai_responses": _responses}
    body = forms[format](ask)
    if ask.model is not None:
        body["model"] = ask.model
    body |= extra_body
    return {name: value for name, value in body.items() if value is not None}


def parse_answers(format: str, payload: Any, response_field: str = "completions") -> list[str | None]:
    """The texts in a server's answer, None for each without text.

    Args:
        payload: the decoded JSON.
        response_field: name of the list of texts in the `generic` format.

    Raises:
        MalformedAnswerError: the answer is of another form; the message says of which it should be.
    """
    if not isinstance(payload, dict):
        raise MalformedAnswerError(f"a {type(payload).__name__} where a JSON object belongs")
    if format == "generic":
        texts = payload.get(response_field)
        if not isinstance(texts, list) or not all(isinstance(text, str | None) for text in texts):
            raise MalformedAnswerError(f"no list of texts under {response_field!r}")
        return texts
    if format == "openai":
        choices = payload.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise MalformedAnswerError("no list under 'choices'")
        ordered = sorted(enumerate(choices), key=lambda pair: _index(pair[1], pair[0]))
        return [_message_text(choice) for _, choice in ordered]
    if format == "anthropic":
        return [_joined(payload.get("content"), "text", "content")]
    output = payload.get("output")
    if not isinstance(output, list):
        raise MalformedAnswerError("no list under 'output'")
    messages = [entry for entry in output if isinstance(entry, dict) and entry.get("type") == "message"]
    texts = [_joined(entry.get("content"), "output_text", "output[].content") for entry in messages]
    found = [text for text in texts if text is not None]
    return ["".join(found) if found else None]


def default_headers(format: str) -> dict[str, str]:
    """Headers, none of them secret, that a format wants."""
    return {"anthropic-version": "2023-06-01"} if format == "anthropic" else {}


def default_key_header(format: str) -> tuple[str, str]:
    """Header that carries the key, and what stands before the key in it."""
    return ("x-api-key", "") if format == "anthropic" else ("Authorization", "Bearer")


def check_url(name: str, url: str) -> None:
    """Raises ConfigError for what is no HTTP address, or holds a secret (which then is not repeated)."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.password or any(_SECRET_NAME.search(key) for key, _ in parse_qsl(parts.query, keep_blank_values=True)):
        raise ConfigError(f"{name}: holds a secret, which would be written to disk. Name an environment variable.")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{name}={url!r}: is no HTTP address. Give one such as https://host/v1/chat/completions.")


def check_no_secrets(name: str, values: Mapping[str, Any]) -> None:
    """Raises ConfigError where a header or body field has the name of a secret; its value is not repeated."""
    for key, value in values.items():
        if _SECRET_NAME.search(key):
            raise ConfigError(f"{name}: {key!r} holds a secret, which would be written to disk. Use a variable.")
        if isinstance(value, Mapping):
            check_no_secrets(name, value)


def _generic(ask: Ask) -> dict[str, Any]:
    return {
        **ask.context,
        "prompt": ask.prompt,
        "num_return_sequences": ask.num_answers,
        "max_new_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "top_k": ask.top_k,
    }


def _openai(ask: Ask) -> dict[str, Any]:
    return {
        "messages": _messages(ask.prompt),
        "n": ask.num_answers,
        "max_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
    }


def _anthropic(ask: Ask) -> dict[str, Any]:
    messages = _messages(ask.prompt)
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    return {
        "system": system or None,
        "messages": [message for message in messages if message["role"] != "system"],
        "max_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p if ask.top_p < 1 else None,  # some models refuse it beside a temperature
        "top_k": ask.top_k or None,
    }


def _responses(ask: Ask) -> dict[str, Any]:
    return {
        "input": _messages(ask.prompt),
        "max_output_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
    }


def _messages(prompt: str | list[dict]) -> list[dict]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _index(choice: dict, place: int) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else place


def _message_text(choice: dict) -> str | None:
    message = choice.get("message")
    if not isinstance(message, dict):
        raise MalformedAnswerError("a choice without 'message'")
    content = message.get("content")
    return _joined(content, "text", "message.content") if isinstance(content, list) else _text(content)


def _joined(blocks: Any, kind: str, where: str) -> str | None:
    """Text of the blocks of one kind, None where there is none."""
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise MalformedAnswerError(f"no list of blocks under {where!r}")
    texts = [_text(block.get("text")) for block in blocks if block.get("type") == kind]
    found = [text for text in texts if text is not None]
    return "".join(found) if found else None


def _text(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise MalformedAnswerError(f"a {type(value).__name__} where a text belongs")
    return value
