"""A vLLM server without vLLM: the same routes over a tiny model, in a thread, with faults where a test wants them.

It reads adapters with PEFT and samples with transformers, so that what it draws is really drawn from what it was given.
"""

from __future__ import annotations

import copy
import functools
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

Fault = Callable[[int, str, dict], tuple[int, Any] | None]


@functools.cache
def _read(folder: str) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


class FakeVLLM:
    """Serves the model in a folder.

    Args:
        fault: of the n-th request to a route with this body: (status, answer) in place of what would be right, or None.
        alter: changes the right answer of a route.
        port: to take the place of one that is gone.
    """

    def __init__(
        self,
        folder: str,
        fault: Fault = lambda number, route, body: None,
        alter: Callable[[str, Any], Any] = lambda route, answer: answer,
        port: int = 0,
        raw_logprobs: bool = False,
        lora: bool = True,
        dev_mode: bool = False,
        device: str = "cuda",
        max_model_len: int = 256,
    ):
        self.model, self.tokenizer = _read(folder)
        self.fault, self.alter, self.raw_logprobs, self.lora = fault, alter, raw_logprobs, lora
        self.max_model_len, self.dev_mode, self.device, self.version = max_model_len, dev_mode, device, "default"
        self.adapters: dict[str, tuple[str, Any]] = {}
        self.asked: list[tuple[str, dict]] = []
        self.under_way = self.most_under_way = 0
        self._lock, self._compute = threading.Lock(), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer._serve(self, {})

            def do_POST(self):
                outer._serve(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> FakeVLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, route: str) -> list[dict]:
        """Bodies of the requests to a route."""
        return [body for asked, body in self.asked if asked == route]

    def _serve(self, handler: BaseHTTPRequestHandler, body: dict) -> None:
        route = handler.path
        with self._lock:
            number = len(self.of(route))
            self.asked.append((route, body))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            status, answer = self.fault(number, route, body) or self._answer(route, body)
        finally:
            with self._lock:
                self.under_way -= 1
        if status == 200:
            answer = self.alter(route, answer)
        is_text = isinstance(answer, str)
        content = answer.encode() if is_text else json.dumps(answer).encode()
        try:
            handler.send_response(status)
            handler.send_header("Content-Type", "text/plain" if is_text else "application/json")
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
        except OSError:
            pass  # the client gave up

    def _answer(self, route: str, body: dict) -> tuple[int, Any]:
        if route == "/v1/models":
            base = {"id": "base", "root": "base", "parent": None, "max_model_len": self.max_model_len}
            cards = [{"id": name, "root": path, "parent": "base"} for name, (path, _) in self.adapters.items()]
            return 200, {"object": "list", "data": [base, *cards]}
        if route == "/tokenize":
            return 200, {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}
        if route == "/v1/completions":
            return self._complete(body)
        if self.lora and route == "/v1/load_lora_adapter":
            return self._load(body.get("lora_name"), body.get("lora_path"))
        if self.lora and route == "/v1/unload_lora_adapter":
            found = self.adapters.pop(body["lora_name"], None)
            return (200, "Success") if found else (404, {"error": {"message": "not found"}})
        if self.dev_mode and route == "/weight_info":
            return 200, {"weight_version": self.version}
        if self.dev_mode and route == "/server_info":
            return 200, {"vllm_config": f"model='base', device_config={self.device}, seed=0"}
        if self.dev_mode and route == "/update_weight_version":
            self.version = body["new_version"]
            return 200, {"success": True}
        if self.dev_mode and route == "/reset_prefix_cache":
            return 200, ""
        if self.dev_mode and route == "/collective_rpc":
            self.model = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"]).eval()
            return 200, {"results": [None]}
        return 404, {"detail": "Not Found"}

    def _load(self, name: str, path: str) -> tuple[int, Any]:
        if not name or not path:
            return 400, {"error": {"message": "Both 'lora_name' and 'lora_path' must be provided."}}
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if not (Path(path) / "adapter_config.json").is_file():
            return 404, {"error": {"message": f"No adapter found for {path}"}}
        with self._compute:
            self.adapters[name] = (path, PeftModel.from_pretrained(copy.deepcopy(self.model), path).eval())
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _complete(self, body: dict) -> tuple[int, Any]:
        if body["model"] == "base":
            model = self.model
        elif body["model"] in self.adapters:
            model = self.adapters[body["model"]][1]
        else:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        prompt = body["prompt"] if isinstance(body["prompt"], list) else self.tokenizer(body["prompt"])["input_ids"]
        with self._compute, torch.no_grad():
            ids, logprobs, top = self._draw(model, prompt, body)
        choice = {
            **{"index": 0, "token_ids": ids, "prompt_token_ids": prompt, "text": ""},
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": top},
            "finish_reason": "stop" if ids[-1] in body.get("stop_token_ids", []) else "length",
        }
        return 200, {"model": body["model"], "choices": [choice]}

    def _draw(self, model: Any, prompt: list[int], body: dict) -> tuple[list[int], list[float], list[dict]]:
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        ids, logprobs, top = [], [], []
        for _ in range(body["max_tokens"]):
            logits = model(torch.tensor([prompt + ids])).logits[0, -1]
            scaled = logits if body["temperature"] == 0 else logits / body["temperature"]
            shown = (logits if self.raw_logprobs else scaled).log_softmax(-1)
            if body["temperature"] == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(shown[token]))
            best = shown.topk(max(1, body.get("logprobs") or 1))
            top.append({str(t): float(p) for t, p in zip(best.indices.tolist(), best.values, strict=True)})
            if token in body.get("stop_token_ids", []):
                break
        return ids, logprobs, top


def slow(seconds: float, answer: Any = None) -> Any:
    """A fault that waits first."""
    time.sleep(seconds)
    return answer
