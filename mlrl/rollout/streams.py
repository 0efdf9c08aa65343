"""A random stream for every sequence, so that what it draws depends on no rank, batch or row.

A counter-based generator (Philox) keyed by a digest of what the sequence *is*: run seed, stream, item, path, agent and
generation. Evaluating more often, adding ranks or splitting batches moves no stream.
"""

from __future__ import annotations

import hashlib

import numpy as np

StreamKey = tuple  # (seed, stream, ordinal, path, agent, k)


def _digest(key: StreamKey) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), "little")


def uniforms(key: StreamKey, count: int) -> np.ndarray:
    """`count` float64 numbers in [0, 1) of the stream named by `key`; a longer draw begins with a shorter one."""
    return np.random.Generator(np.random.Philox(key=_digest(key))).random(count)


def derive_seed(*key) -> int:
    """A 63-bit seed for a user's own generator, from a key such as (seed, step, item)."""
    return _digest(key) >> 65
