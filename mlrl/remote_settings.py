"""Settings of a model over HTTP, a request to it, and what is counted: plain data, without any HTTP client."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlrl.errors import ConfigError
from mlrl.remote_formats import FORMATS, NEEDS_MODEL, check_no_secrets, check_url


@dataclass(frozen=True)
class RemoteSettings:
    """A server, how it is spoken to, and what is asked for.

    Attributes:
        url: full address of the endpoint. format: see `mlrl.remote_formats`.
        model: its name there; `generic` servers may need none.
        key_env: environment variable that holds the key; None sends no key. key_header, key_prefix: where it goes,
            by default as the format wants it. headers: further headers, no secrets.
        response_field: name of the list of texts in answers of the `generic` format.
        extra_body: fields of the body to add or replace; a None takes one out.
        max_answers_per_request: most answers asked for at once, where the format allows several; None: all.
        timeout_s: seconds until an attempt is given up, the whole answer included.
        max_retries: further attempts after 429, 5xx, time-outs and broken answers. backoff_s: mean wait before the
            first of them, doubled each time up to `max_wait_s`; a Retry-After of the server counts where it is longer.
        max_concurrency: requests under way at once. max_requests: attempts in all, None without limit.
        cache: JSONL file of answers, which are not asked for again in a later run; None keeps them in memory only.
    """

    url: str
    format: str = "generic"
    model: str | None = None
    key_env: str | None = None
    key_header: str | None = None
    key_prefix: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    response_field: str = "completions"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    max_answers_per_request: int | None = None
    timeout_s: float = 120.0
    max_retries: int = 5
    backoff_s: float = 1.0
    max_wait_s: float = 60.0
    max_concurrency: int = 8
    max_requests: int | None = None
    cache: str | os.PathLike | None = None
    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"format={self.format!r}: unknown word. Use one of {', '.join(FORMATS)}.")
        if self.model is None and self.format in NEEDS_MODEL:
            raise ConfigError(f"model=None: format {self.format} needs one. Give the model's name on that server.")
        check_url("url", self.url)
        check_no_secrets("headers", self.headers)
        check_no_secrets("extra_body", self.extra_body)
        for name in ("max_concurrency", "max_answers_per_request", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r}: is out of range. Give 1 or more.")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s!r}: is out of range. Give seconds, above 0.")


@dataclass(frozen=True)
class RemoteRequest:
    """One prompt and how many answers are wanted.

    Attributes:
        prompt: a text or chat messages.
        draw: names this draw, such as (seed, round, item). The same prompt under the same draw has the same answers;
            under another one it is asked again.
        context: further fields for a `generic` server.
    """

    prompt: str | list[dict]
    num_answers: int = 1
    draw: tuple = ()
    context: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class RemoteStats:
    """Counts since the client was made, attempts from those that were spent before.

    Attributes:
        attempts: requests sent, failed ones included; this is what `max_requests` bounds. retries: those after the
            first of a request. cached: answers that were known. answered: answers with text. empty: answers without.
        failures: answers that could not be had, by reason. first_failure: text of the first one.
    """

    attempts: int = 0
    retries: int = 0
    cached: int = 0
    answered: int = 0
    empty: int = 0
    failures: Counter = field(default_factory=Counter)
    first_failure: str | None = None
