"""What a system is given and what it gives back; nothing here needs more than Python itself,
since peers run in environments of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Greedy answers to all prompts.

    ``prompt_ids`` are the same prompts as token ids, for systems that take them; a system of
    this package gets ``prompts``. With ``ignore_eos`` every answer has exactly ``new_tokens``
    tokens. ``schema``: a JSON Schema that answers keep to, written without white space.
    ``kv_tokens``: tokens that the KV pool holds, None for as many as the system likes.
    ``engine``: further fields of batchradix's `EngineOptions`. ``model`` is what batchradix is
    asked for or the path of a peer's copy. ``batch_size``: rows at a time, None for the
    system's own choice.
    """

    system: str
    model: str
    dtype: str
    threads: int
    prompts: tuple[str, ...] = ()
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    new_tokens: int = 1
    ignore_eos: bool = False
    schema: Mapping[str, Any] | None = None
    kv_tokens: int | None = None
    batch_size: int | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    want_gaps: bool = False


@dataclass(slots=True, kw_only=True)
class Measurement:
    """What a system did.

    ``run_s`` is the time to answer all rows, without ``prepare_s`` (prompts read, tokenised and
    planned, grammars compiled; peers get token ids, so they have none) and ``load_s`` (start of
    the system and weights). ``cpu_s`` is the processor time of all threads in about ``run_s``,
    which a busy machine changes less. ``answers``: token ids by prompt, ``texts`` their text
    where a schema asked for one; ``gaps``: the lead of each token over the next likeliest, where
    asked for. ``peak_rss_bytes`` is of all processes of the system, loading included.
    """

    system: str
    rows: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    distinct_tokens: int = 0
    output_tokens: int = 0
    load_s: float = 0.0
    prepare_s: float = 0.0
    run_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    peak_kv_tokens: int = 0
    peak_rss_bytes: int = 0
    gflops_per_s: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)
