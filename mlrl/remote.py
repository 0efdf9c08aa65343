"""Models over HTTP: many prompts at once, with retries, a request budget and answers that are asked for only once.

    model = RemoteModel(RemoteSettings(url="https://host/v1/chat/completions", format="openai", model="name",
                                       key_env="HOST_API_KEY", max_new_tokens=256, max_requests=2000))
    texts = model.complete([RemoteRequest(prompt, num_answers=4) for prompt in prompts])  # [prompt][4], None: no text

A request that fails for good costs its own answers, never the others': they are None and are counted in `stats`. Only
what no retry and no other prompt can mend (a wrong key, a wrong address) raises. The key comes from an environment
variable, goes into a request header, and is nowhere else: error texts and answers are searched for it.
"""

from __future__ import annotations

import email.utils
import functools
import hashlib
import json
import os
import random
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import httpx

from mlrl.errors import ConfigError
from mlrl.remote_cache import AnswerCache
from mlrl.remote_formats import (
    ONE_ANSWER_A_REQUEST,
    Ask,
    MalformedAnswerError,
    default_headers,
    default_key_header,
    parse_answers,
    request_body,
)
from mlrl.remote_settings import RemoteRequest, RemoteSettings, RemoteStats

__all__ = ["RemoteError", "RemoteModel", "RemoteRequest", "RemoteSettings", "RemoteStats"]

_RETRIED = {408, 409, 425, 429}  # and 500 or above
_FATAL = {401, 402, 403, 404, 405, 407}  # another prompt would fare no better


class RemoteError(RuntimeError):
    """A server refuses every request: a wrong key, address or model, or no money left."""


class _RequestFailed(Exception):
    """One request failed for good; `reason` is a word for the statistics."""

    def __init__(self, reason: str, text: str):
        super().__init__(text)
        self.reason = reason


class _TryAgain(_RequestFailed):
    """One attempt failed and another may not; `wait_s` is what the server asked for."""

    def __init__(self, reason: str, text: str, wait_s: float = 0.0):
        super().__init__(reason, text)
        self.wait_s = wait_s


class RemoteModel:
    """A model over HTTP. Thread-safe; close it, or use it in a `with`.

    Args:
        spent: requests of the budget that are gone already.

    Raises:
        ConfigError: the variable that should hold the key is not set.
    """

    def __init__(self, settings: RemoteSettings, spent: int = 0):
        self.settings = settings
        self.stats = RemoteStats(attempts=spent)
        self._key = _read_key(settings.key_env)
        headers = {"Content-Type": "application/json", **default_headers(settings.format), **settings.headers}
        if self._key is not None:
            header, prefix = default_key_header(settings.format)
            prefix = prefix if settings.key_prefix is None else settings.key_prefix
            headers[settings.key_header or header] = f"{prefix} {self._key}".strip()
        limits = httpx.Limits(max_connections=settings.max_concurrency)
        self._client = httpx.Client(headers=headers, timeout=settings.timeout_s, limits=limits, verify=_certificates())
        self._answers = AnswerCache(settings.cache)
        self._lock = threading.Lock()
        self._jitter = random.Random()

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def complete(
        self, requests: Sequence[RemoteRequest], on_answers: Callable[[int], None] | None = None
    ) -> list[list[str | None]]:
        """Answers of every request, in order: as many as asked for, None where there is no text.

        Args:
            on_answers: hears of every n answers that are there, from any thread.

        Raises:
            RemoteError: the server refuses, whatever is asked.
        """
        results: list[list[str | None]] = [[None] * request.num_answers for request in requests]
        stop = threading.Event()
        with ThreadPoolExecutor(max_workers=self.settings.max_concurrency) as pool:
            futures = [
                pool.submit(self._work, request, indices, result, stop, on_answers)
                for request, result in zip(requests, results, strict=True)
                for indices in self._portions(request)
            ]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # also where the user interrupts: nothing waits on a back-off
                if any(not future.done() or future.exception() for future in futures):
                    stop.set()
                    pool.shutdown(wait=False, cancel_futures=True)
            for future in futures:
                if future.done() and not future.cancelled():
                    future.result()
        return results

    def _portions(self, request: RemoteRequest) -> list[list[int]]:
        """Which answers are asked for together."""
        size = 1 if self.settings.format in ONE_ANSWER_A_REQUEST else self.settings.max_answers_per_request
        indices = list(range(request.num_answers))
        size = size or max(1, len(indices))
        return [indices[start : start + size] for start in range(0, len(indices), size)]

    def _work(
        self,
        request: RemoteRequest,
        indices: list[int],
        result: list[str | None],
        stop: threading.Event,
        on_answers: Callable[[int], None] | None,
    ) -> None:
        """Fills `result` at these indices, from what is known and then by asking until all are there."""
        keys = {index: self._identity(request, index) for index in indices}
        missing = []
        for index in indices:
            known, text = self._answers.get(keys[index])
            if known:
                result[index] = text
                self._count(text, cached=True)
            else:
                missing.append(index)
        if on_answers is not None and len(missing) < len(indices):
            on_answers(len(indices) - len(missing))
        while missing and not stop.is_set():
            try:
                texts = self._ask(request, len(missing), stop)[: len(missing)]
                if not texts:
                    raise _RequestFailed("no answer", "the server answered without any text")
            except _RequestFailed as failure:
                with self._lock:
                    self.stats.failures[failure.reason] += len(missing)
                    self.stats.first_failure = self.stats.first_failure or str(failure)
                return
            for index, text in zip(missing, texts, strict=False):  # fewer than asked for: the rest is asked again
                result[index] = text
                self._answers.put(keys[index], text)
                self._count(text)
            missing = missing[len(texts) :]
            if on_answers is not None:
                on_answers(len(texts))

    def _count(self, text: str | None, cached: bool = False) -> None:
        with self._lock:
            self.stats.cached += cached
            self.stats.answered += text is not None
            self.stats.empty += text is None

    def _ask(self, request: RemoteRequest, num_answers: int, stop: threading.Event) -> list[str | None]:
        """One request with its retries. Raises _RequestFailed where they were in vain, RemoteError where all are."""
        fields = request_body(self.settings.format, self._ask_for(request, num_answers), self.settings.extra_body)
        body = json.dumps(fields).encode()
        for attempt in range(self.settings.max_retries + 1):
            with self._lock:
                if self.settings.max_requests is not None and self.stats.attempts >= self.settings.max_requests:
                    raise _RequestFailed("budget", f"the budget of {self.settings.max_requests} requests is used up")
                self.stats.attempts += 1
                self.stats.retries += attempt > 0
            try:
                return [None if text is None else self._clean(text) for text in self._attempt(body)]
            except _TryAgain as problem:
                if attempt == self.settings.max_retries:
                    raise
                pause = self.settings.backoff_s * 2**attempt * self._jitter.uniform(0.5, 1.5)
                if stop.wait(min(max(pause, problem.wait_s), self.settings.max_wait_s)):
                    raise
        raise AssertionError("unreachable")

    def _attempt(self, body: bytes) -> list[str | None]:
        settings = self.settings
        deadline = time.monotonic() + settings.timeout_s
        try:
            with self._client.stream("POST", settings.url, content=body) as response:
                content = bytearray()
                for chunk in response.iter_bytes():
                    content += chunk
                    if time.monotonic() > deadline:  # httpx bounds the wait for the next bytes, not for all of them
                        raise httpx.ReadTimeout("the answer is too slow")
        except httpx.TimeoutException:
            raise _TryAgain("timeout", f"no answer within {settings.timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise _TryAgain("connection", self._clean(f"{type(error).__name__}: {error}")) from None
        if not response.is_success:
            raise self._refusal(response.status_code, response.headers, bytes(content))
        try:
            return parse_answers(settings.format, json.loads(content), settings.response_field)
        except (MalformedAnswerError, ValueError) as error:
            text = self._clean(f"an answer that is not of the format {settings.format}: {error}")
            raise _TryAgain("malformed", text) from None

    def _refusal(self, status: int, headers: httpx.Headers, content: bytes) -> Exception:
        """What a status other than 2xx means: another try, one lost request, or the end."""
        said = " ".join(self._clean(content.decode("utf-8", "replace")).split())[:300]  # a key cut in two is not found
        text = f"status {status} from {self.settings.url}: {said or 'no text'}"
        if status in _FATAL or 300 <= status < 400 or (status == 429 and "insufficient_quota" in said):
            key = self.settings.key_env and f" Its key is read from {self.settings.key_env}."
            return RemoteError(f"{text}.{key or ''} Correct the address, the model or the key.")
        if status in _RETRIED or status >= 500:
            return _TryAgain("rate limit" if status == 429 else "server error", text, _retry_after(headers))
        return _RequestFailed("refused", text)

    def _ask_for(self, request: RemoteRequest, num_answers: int) -> Ask:
        s = self.settings
        sampling = (s.max_new_tokens, s.temperature, s.top_p, s.top_k)
        return Ask(request.prompt, num_answers, s.model, *sampling, context=request.context)

    def _identity(self, request: RemoteRequest, index: int) -> str:
        """Names one answer by everything that decides it; no header, so no key."""
        settings = self.settings
        body = request_body(settings.format, self._ask_for(request, 1), settings.extra_body)
        parts = [settings.url, settings.format, body, list(request.draw), index]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()

    def _clean(self, text: str) -> str:
        if self._key is None:
            return text
        return text.replace(self._key, "[key]").replace(self._key.replace("/", "\\/"), "[key]")  # as in some JSON


@functools.cache
def _certificates() -> ssl.SSLContext:
    """The trusted certificates, read once for all clients."""
    return httpx.create_ssl_context()


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"key_env={variable!r}: no such environment variable is set. Export the key under that name.")
    if not key.isascii() or not key.isprintable():  # a header cannot hold it, and the error would quote it
        raise ConfigError(f"key_env={variable!r}: its value is not plain ASCII text. Export the key under that name.")
    return key


def _retry_after(headers: httpx.Headers) -> float:
    """Seconds that the server asks to wait: a number or a date; 0 where it does not say."""
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0
