"""A model server on this machine, in a thread, that answers as a test says and remembers what it was asked."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """One answer: a JSON value, or bytes as they are; `delay_s` before it, `drip_s` between its bytes."""

    body: object = None
    status: int = 200
    headers: dict = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0


@dataclass
class Asked:
    """A request as it came in."""

    headers: dict
    body: dict
    at: float


class FakeServer:
    """Answers every POST with `answer(number of the request, its body)`."""

    def __init__(self, answer: Callable[[int, dict], Reply]):
        self.answer, self.asked, self.under_way, self.most_under_way = answer, [], 0, 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                outer._serve(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/ask"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _serve(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            number = len(self.asked)
            self.asked.append(Asked(dict(handler.headers), body, time.monotonic()))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        reply = self.answer(number, body)
        time.sleep(reply.delay_s)
        with self._lock:
            self.under_way -= 1
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        try:
            handler.send_response(reply.status)
            for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            for place in range(len(content)) if reply.drip_s else []:
                handler.wfile.write(content[place : place + 1])
                time.sleep(reply.drip_s)
            if not reply.drip_s:
                handler.wfile.write(content)
        except OSError:
            pass  # the client gave up

    def close(self):
        self._server.shutdown()
        self._server.server_close()
