"""Counter-based random numbers: a row's draw is a function of its key and position alone.

Nothing here has a state, so a draw depends neither on the other rows of a batch nor on what
ran before; a resumed, reordered or sharded job draws the same. Numpy only, so that the
pipeline can make keys without loading torch.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014, with the constants of Stafford's variant 13). Number
``i`` of a row is what a SplitMix64 generator seeded with ``mix64(key)`` yields as its output
``i + 1``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchradix.types import I64, U64

CONTENT_KEY_BYTES = 16

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SEEDED = np.uint64(0x5EEDED0000000001)  # start of a key made from a row's own seed
_UNSEEDED = np.uint64(0x5EEDED0000000002)  # start of a key made from the run's seed


def mix64(x: U64) -> U64:
    """A bijection of uint64 that turns any difference into a coin flip of every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _absorb(state: U64, word: U64) -> U64:
    return mix64((state + _GOLDEN) ^ mix64(word))


def rng_keys(
    run_seed: int,
    content_keys: NDArray[Any],
    occurrence: I64,
    row_seed: I64,
    has_row_seed: NDArray[np.bool_],
) -> U64:
    """uint64[n]: the key of each row's random numbers; a pure function of its arguments.

    ``content_keys``: n keys of 16 bytes, uint8[n, 16] or any dtype of 16 bytes a row.
    ``occurrence``: int64[n], how many earlier rows of the job have the same content key.
    ``row_seed``: int64[n], read where ``has_row_seed``: bool[n].

    A row with a seed of its own has a key of (seed, content): equal rows with equal seeds draw
    alike, wherever they stand. A row without has a key of (run seed, content, occurrence):
    equal rows differ, and the same run seed gives the same keys again. Any Python int is a
    seed, negative ones included (taken modulo 2**64).
    """
    n = len(occurrence)
    words = np.ascontiguousarray(content_keys).view(np.uint8).reshape(n, CONTENT_KEY_BYTES)
    low, high = words.view("<u8").astype(np.uint64).T
    seed = np.where(has_row_seed, row_seed.view(np.uint64), np.uint64(run_seed % 2**64))
    count = np.where(has_row_seed, np.uint64(0), occurrence.view(np.uint64))
    state = np.where(has_row_seed, _SEEDED, _UNSEEDED)
    for word in (seed, low, high, count):
        state = _absorb(state, word)
    return state


def attempt_keys(rng_key: U64, attempt: int) -> U64:
    """uint64[n]: keys of rows that run again, for the ``attempt``-th time (from 1 on)."""
    return _absorb(rng_key, np.full(len(rng_key), attempt, dtype=np.uint64))


def uniforms(rng_key: U64, position: I64) -> NDArray[np.float64]:
    """float64[n] in [0, 1): the number at ``position`` (int64[n], from 0) of each row's key."""
    counter = position.astype(np.uint64) + np.uint64(1)
    bits = mix64(mix64(rng_key) + counter * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
