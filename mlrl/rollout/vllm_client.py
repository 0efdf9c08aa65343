"""One vLLM server over HTTP: adapters in and out, token ids in, token ids with log-probabilities out.

What passes is tried again with growing pauses: broken connections, time-outs, 429, 5xx, answers that are no answers.
What does not pass is a `RolloutError` that names the server.
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from mlrl.errors import RolloutError

_RETRIED = {408, 409, 425, 429}  # and 500 or above
_MAX_WAIT_S = 60.0
_MOST_SAID = 200  # characters of an answer in a message
GO_ON = "Checkpoints are as they were: start the server again, and go on with --resume_from_checkpoint"


class RefusedError(RolloutError):
    """The server does not do what was asked of it, and would not a second time."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


class UnknownModelError(RefusedError):
    """The server has no adapter of this name (any more)."""


class _TryAgain(Exception):
    """One attempt failed, and another may not."""


@dataclass(frozen=True)
class Completion:
    """What a server drew for one prompt: token ids and the log-probability of each."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Drawing:
    """One sequence to draw.

    Attributes:
        model: name of the adapter, or of the base; prompt: token ids; seed: of this sequence alone.
        stop_ids: each ends it, and is its last token; temperature 0 is greedy; top_k 0 and top_p 1.0 are off.
    """

    model: str
    prompt: Sequence[int]
    seed: int
    stop_ids: frozenset[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def body(self) -> dict[str, Any]:
        """The request. Everything that a server might have defaults of its own for is said."""
        return {
            "model": self.model,
            "prompt": list(self.prompt),
            "seed": self.seed,
            "stop_token_ids": sorted(self.stop_ids),
            "ignore_eos": True,  # what ends a response are the stop ids alone
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,  # of the drawn token alone
            "return_token_ids": True,
            "skip_special_tokens": False,
        }


class VLLMClient:
    """Speaks to the server at `url`. Thread-safe.

    Args:
        url: http://host:port.
        timeout_s: until one answer is given up. max_retries: further attempts; backoff_s: mean pause before the first
            of them, doubled each time.
        max_concurrency: requests under way at once.
        ended: what became of the server's process where this run started it, None while it runs.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        max_retries: int = 5,
        max_concurrency: int = 128,
        backoff_s: float = 1.0,
        ended: Callable[[], str | None] = lambda: None,
    ):
        self.url, self.timeout_s, self.max_retries = url.rstrip("/"), timeout_s, max_retries
        self.max_concurrency, self.backoff_s, self.ended = max_concurrency, backoff_s, ended
        self._client = httpx.Client(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0), pool=None),
            limits=httpx.Limits(max_connections=max_concurrency),
            trust_env=False,  # a proxy is not for servers next door
        )
        self._jitter = random.Random()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    # What a server has ------------------------------------------------------------------------------------------------

    def models(self, attempts: int | None = None) -> list[dict[str, Any]]:
        """Cards of the base and of every adapter: `id`, `root` (where it came from), `max_model_len`."""
        answer = self.call("GET", "/v1/models", attempts=attempts)
        cards = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise RolloutError(f"vllm_url={self.url!r}: does not list its models as a vLLM server does")
        return cards

    def takes_adapters(self) -> bool:
        """Whether adapters can be loaded while it runs: where they cannot, there is no such route."""
        try:
            return self._client.post("/v1/load_lora_adapter", json={}).status_code != 404
        except httpx.HTTPError as error:
            raise RolloutError(f"vllm_url={self.url!r}: no answer ({str(error) or type(error).__name__})") from None

    def has_adapter(self, name: str, folder: str) -> bool:
        """Whether it has the adapter of this name, from this folder."""
        return any(card["id"] == name and card.get("root") == folder for card in self.models())

    def load_adapter(self, name: str, folder: str) -> None:
        """Loads the adapter in `folder`, and makes sure that the server has it from there.

        Raises:
            RolloutError: the server cannot read the folder, or has no room or no permission for adapters.
        """
        try:
            self.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except RolloutError as error:
            if isinstance(error, RefusedError) and self.has_adapter(name, folder):
                return  # by an attempt whose answer was lost
            raise RolloutError(
                f"{error}. The adapter is in {folder}: server and trainer must share a file system under one path, and "
                "the server needs --enable-lora, --max-lora-rank of at least the adapter's rank, and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            ) from None
        if not self.has_adapter(name, folder):
            raise RolloutError(
                f"vllm_url={self.url!r}: says that it loaded {name} from {folder}, and does not list it as that. Start "
                "the server anew"
            )

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; one that is not there is none to forget."""
        try:
            self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, attempts=1)
        except RolloutError:
            return

    def base_name(self) -> str:
        """What the base is called here."""
        return next((card["id"] for card in self.models() if not card.get("parent")), "base")

    def weight_version(self) -> str | None:
        """The version that the base's weights were said to be; None where it does not tell (vLLM's dev mode is off)."""
        try:
            return self.call("GET", "/weight_info").get("weight_version")
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def is_on_cpu(self) -> bool:
        """Whether it computes on a CPU, as far as it tells (in vLLM's dev mode)."""
        try:
            return "device_config=cpu" in str(self.call("GET", "/server_info").get("vllm_config"))
        except RefusedError:
            return False

    def load_weights(self, version: str, folder: str) -> None:
        """Puts the weights of the model in `folder` in place of the base's, under the name of a version.

        Raises:
            RolloutError: the server cannot read the folder, or does not take weights while it runs.
        """
        try:
            self.call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            self.call("POST", "/reset_prefix_cache", {})  # keys and values of the weights before
            self.call("POST", "/update_weight_version", {"new_version": version})
        except RolloutError as error:
            raise RolloutError(
                f"{error}. The weights are in {folder}: server and trainer must share a file system under one path, "
                "and the server needs VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from None
        self.check_version(version)

    def check_version(self, version: str) -> None:
        """Raises RolloutError where the base's weights are of another version."""
        found = self.weight_version()
        if found != version:
            raise RolloutError(
                f"vllm_url={self.url!r}: has the weights {found!r} in place of {version!r}, as a server that was "
                f"started anew or that another run uses. {GO_ON}"
            )

    # Drawing ----------------------------------------------------------------------------------------------------------

    def complete(self, drawing: Drawing, stop: threading.Event | None = None) -> Completion:
        """Draws one sequence.

        Raises:
            UnknownModelError: there is no such adapter.
            RolloutError: the server is gone, refuses, or answers what cannot be used.
        """
        return self.call(
            "POST", "/v1/completions", drawing.body(), read=lambda answer: read_completion(answer, drawing), stop=stop
        )

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        read: Callable[[Any], Any] = lambda answer: answer,
        attempts: int | None = None,
        stop: threading.Event | None = None,
    ) -> Any:
        """One request with its retries; what `read` makes of the answer, which raises ValueError for a broken one."""
        attempts = self.max_retries + 1 if attempts is None else attempts
        stop = stop or threading.Event()
        for attempt in range(attempts):
            try:
                return self._attempt(method, path, body, read)
            except _TryAgain as problem:
                fate = self.ended()
                if fate is not None:
                    raise RolloutError(f"{fate}. {GO_ON}") from None
                if attempt + 1 == attempts:
                    tries = "" if attempts == 1 else f" after {attempts} tries"
                    raise RolloutError(f"vllm_url={self.url!r}: {problem}{tries}. {GO_ON}") from None
                pause = self.backoff_s * 2**attempt * self._jitter.uniform(0.5, 1.5)
                if stop.wait(min(pause, _MAX_WAIT_S)):
                    raise RolloutError(f"vllm_url={self.url!r}: given up, since another request failed") from None
        raise AssertionError("unreachable")

    def _refusal(self, path: str, body: dict[str, Any], response: httpx.Response) -> Exception:
        """What a status other than 2xx means: another try, an unknown adapter, or the end."""
        said, status = _said(response.text), response.status_code
        if status in _RETRIED or status >= 500:
            return _TryAgain(f"status {status} ({said})")
        if status == 404 and "model" in body:
            return UnknownModelError(f"vllm_url={self.url!r}: does not know {body['model']!r} ({said})", status)
        return RefusedError(f"vllm_url={self.url!r}: {path} was refused with status {status} ({said})", status)

    def _attempt(self, method: str, path: str, body: dict[str, Any] | None, read: Callable[[Any], Any]) -> Any:
        started = time.monotonic()
        try:
            response = self._client.request(method, path, json=body)
        except httpx.TimeoutException:
            raise _TryAgain(f"no answer within {time.monotonic() - started:.3g} s") from None
        except httpx.TransportError as error:
            raise _TryAgain(f"no connection ({str(error) or type(error).__name__})") from None
        if not response.is_success:
            raise self._refusal(path, body or {}, response)
        try:
            is_json = response.headers.get("content-type", "").startswith("application/json")
            return read(json.loads(response.content) if is_json else response.text)
        except (ValueError, KeyError, TypeError, IndexError) as problem:
            raise _TryAgain(f"an answer that cannot be used ({problem})") from None


def _said(text: str) -> str:
    """What a refusal says, in one short line; of a web page, which no vLLM server sends, its title."""
    if re.match(r"\s*<(!doctype|html|\?xml)", text, re.IGNORECASE):
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
        text = f"a web page{f': {title[1]}' if title else ''}"
    text = " ".join(text[: 2 * _MOST_SAID].split()) or "no text"
    return text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID - 1]}…"


def read_completion(answer: Any, drawing: Drawing) -> Completion:
    """The drawn sequence of an answer, held against what was asked.

    Raises:
        ValueError: other weights answered, or tokens and log-probabilities are not what the request allows.
    """
    if answer["model"] != drawing.model:
        raise ValueError(f"{answer['model']!r} answered in place of {drawing.model!r}")
    [choice] = answer["choices"]
    seen, ids, logprobs = choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if seen != list(drawing.prompt):
        raise ValueError(f"it read {len(seen)} tokens, not the {len(drawing.prompt)} of the prompt")
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(logprobs)} log-probabilities for {len(ids)} tokens")
    if not all(isinstance(logprob, int | float) and math.isfinite(logprob) for logprob in logprobs):
        raise ValueError("log-probabilities that are no finite numbers")
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError("token ids that are no numbers")
    early = [place for place, token in enumerate(ids[:-1]) if token in drawing.stop_ids]
    stopped = bool(ids) and ids[-1] in drawing.stop_ids
    if early or not (stopped or len(ids) == drawing.max_new_tokens) or len(ids) > drawing.max_new_tokens:
        raise ValueError(
            f"{len(ids)} tokens {'with' if stopped else 'without'} an end token, where {drawing.max_new_tokens} were "
            f"asked for (finish_reason {choice.get('finish_reason')!r}); a server's --max-model-len must hold prompt "
            "and response"
        )
    return Completion(ids, [float(logprob) for logprob in logprobs])
