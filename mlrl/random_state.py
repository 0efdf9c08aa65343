"""The states of the global random generators, as plain text: a run that goes on draws what it would have drawn.

Sampling and training draw from streams of their own, keyed by seed, step and item; this is for the code of a task that
draws from the global generators all the same.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """States of `random`, numpy and torch (CPU), of what JSON can hold."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, _encoded(np.asarray(keys, dtype="<u4").tobytes()), position, has_gauss, cached],
        "torch": _encoded(torch.get_rng_state().numpy().tobytes()),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Takes over what `random_state` gave."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype="<u4"), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
