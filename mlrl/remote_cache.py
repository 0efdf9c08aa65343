"""Answers of a model over HTTP that are known already, in memory and in a file."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from mlrl.run_folder import append_jsonl


class AnswerCache:
    """Answers by identity: in memory, and in a file that is only appended to."""

    def __init__(self, path: str | os.PathLike | None):
        self.path = None if path is None else Path(path)
        self._known: dict[str, str | None] = {}
        self._lock = threading.Lock()
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").split("\n"):
                try:
                    entry = json.loads(line)
                    self._known[entry["request"]] = entry["text"]
                except (ValueError, KeyError, TypeError):
                    continue  # an empty line, or the last one of a run that was killed

    def get(self, identity: str) -> tuple[bool, str | None]:
        """(whether it is known, the answer)."""
        with self._lock:
            return identity in self._known, self._known.get(identity)

    def put(self, identity: str, text: str | None) -> None:
        with self._lock:
            self._known[identity] = text
            if self.path is not None:
                append_jsonl(self.path, [{"request": identity, "text": text}])
