"""What passes between the rooms: ragged token tables, plans, requests, completions, results.

Nothing here computes more than a sum. Everything a million rows long is a numpy array, never
a Python object a row. Half-open intervals throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from batchradix.errors import RowError

U32 = NDArray[np.uint32]
I8 = NDArray[np.int8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


class Cell(str):
    """A cell of CSV: the text of a value of any type, empty for null and for an empty text."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Token ids of many rows, ragged: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    ``values``: uint32[num_tokens]; ``offsets``: int64[num_rows + 1], ``offsets[0] == 0``.
    Both may be memory-mapped. A row that has no prompt (an error row) has length zero.
    """

    values: U32
    offsets: I64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> U32:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> I64:
        """int64[num_rows]: tokens of each row."""
        return np.diff(self.offsets)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | U32]) -> TokenTable:
        """A table in memory from sequences of token ids (each fits uint32)."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(r) for r in rows], out=offsets[1:])
        values = np.empty(int(offsets[-1]), dtype=np.uint32)
        for i, r in enumerate(rows):
            values[offsets[i] : offsets[i + 1]] = r
        return cls(values, offsets)


@dataclass(frozen=True, slots=True)
class Plan:
    """The order in which rows run, and what each shares with the row before it.

    ``order``: int64[n], row numbers of a `TokenTable` sorted lexicographically by tokens
    (equal rows by row number), which is the depth-first walk of their radix tree. Rows not
    to be run (errors, duplicates of a leader) are absent, so ``n`` may be less than the table.
    ``lcp``: int32[n], tokens that ``order[k]`` shares with ``order[k - 1]``; ``lcp[0] == 0``.
    """

    order: I64
    lcp: I32

    def __len__(self) -> int:
        return len(self.order)


@dataclass(frozen=True, slots=True)
class PlanTree:
    """The radix tree of a `Plan`, derived from its two arrays; nodes in depth-first preorder.

    Node ``m`` holds the tokens ``[start[m], end[m])`` of every row below it (``end > start``).
    There is no empty root: a node without a parent has ``parent[m] == -1`` and ``start == 0``.
    A place where some row ends always ends a node.

    ``parent``: int64[m]. ``start``, ``end``: int32[m] token depths. ``first``, ``last``:
    int64[m], the plan positions ``[first, last)`` of the rows below; those that *end* at the
    node come first, there are ``num_ending[m]`` (int64[m]) of them. ``leaf_of``: int64[n],
    the node at which the row at plan position ``k`` ends.
    """

    parent: I64
    start: I32
    end: I32
    first: I64
    last: I64
    num_ending: I64
    leaf_of: I64

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def distinct_tokens(self) -> int:
        """Sum of edge lengths: what has to be computed when nothing is lost."""
        return int(self.end.sum(dtype=np.int64) - self.start.sum(dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """What an answer must match, the whole of it.

    ``kind``: ``json_schema`` (``source`` is JSON text), ``regex`` (a pattern), ``ebnf`` (rules
    with ``root`` as the start), ``choices`` (a JSON list of distinct, non-empty texts),
    ``tool_calls`` (a JSON object: ``style``, a key of `schema.tool_styles.STYLES`; ``functions``,
    each with its ``name`` and, as JSON text, the schema of its ``arguments``; ``must_call``,
    whether free text is no answer; ``has_many``, whether there may be several calls).
    """

    kind: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a row thinks before it answers; its prompt ends where the thinking begins.

    It ends with the token ``end_id`` (None: there is none) or where ``end`` is complete as text, at
    the latest after ``max_tokens`` tokens, when ``closing_ids`` end it. ``gap_ids`` go between it
    and an answer under a grammar. ``start`` is no part of the thinking where that begins with it
    once more. ``answer_tokens``: the most of the answer alone, which needs ``least_tokens``.
    """

    start: str
    end: str
    end_id: int | None
    closing_ids: tuple[int, ...]
    gap_ids: tuple[int, ...]
    max_tokens: int
    answer_tokens: int = 1
    least_tokens: int = 1

    @property
    def total_tokens(self) -> int:
        """The most of thinking, what closes it, and the answer."""
        return self.max_tokens + len(self.closing_ids) + self.answer_tokens

    def budget(self, total_tokens: int) -> int:
        """Tokens that the thinking may have where the context leaves ``total_tokens`` for all.

        The answer may have its own; where both do not fit each gets half, the answer what it needs.
        """
        room = total_tokens - len(self.closing_ids)
        half = min(room // 2, room - self.least_tokens)
        return max(1, min(self.max_tokens, max(room - self.answer_tokens, half)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """How one answer is sampled; hashable, shared by all rows with equal settings.

    ``temperature == 0`` is greedy. ``top_k == 0``, ``top_p == 1``, ``min_p == 0``,
    ``repetition_penalty == 1``, ``presence_penalty == frequency_penalty == 0`` are neutral.
    ``repetition_penalty`` counts prompt and generated tokens (CTRL, as in transformers);
    presence and frequency count generated tokens only (OpenAI). ``probabilities`` asks for
    those of each choice of a ``choices`` grammar; ``choose`` is ``walk`` (token by token) or
    ``joint`` (the choice of the largest probability). ``thinking`` goes before the answer, and
    grammar and stop strings are for the answer alone.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    grammar: GrammarSpec | None = None
    probabilities: bool = False
    choose: str = "walk"
    thinking: Thinking | None = None

    @property
    def is_scored(self) -> bool:
        """Whether every choice of the grammar has to be looked at."""
        return self.probabilities or self.choose == "joint"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTable:
    """What the engine needs of each row beside its tokens; arrays by `TokenTable` row.

    ``settings_id``: int32[num_rows] into ``settings``. ``max_tokens``: int32[num_rows], at
    least 1, already cut to the context, of thinking and answer together. ``rng_key``:
    uint64[num_rows]; a row's random numbers are a function of its key and the position in the
    answer alone. ``num_forced``: int32[num_rows], the trailing tokens of a row's prompt that are
    its answer's opening (what its grammar leaves no choice about), at most ``max_tokens``, which
    counts them; None when no row has any.
    """

    settings: tuple[RowSettings, ...]
    settings_id: I32
    max_tokens: I32
    rng_key: U64
    num_forced: I32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """A planned batch of requests: what `Engine.submit` takes.

    ``retain`` keeps prefixes in the cache after their last planned use, for a caller that
    will submit more (LRU from then on); without it a node is released with its last row.
    """

    tokens: TokenTable
    plan: Plan
    tree: PlanTree
    requests: RequestTable
    retain: bool = False


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence, a stop string, or a grammar that is complete
    LENGTH = "length"  # max_tokens or the context is used up
    REPETITION = "repetition"  # text under a schema went round in circles and was cut
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine yields for one row, in completion order; exactly one a submitted row.

    ``row`` is the `TokenTable` row of the job ``job_id`` that `Engine.submit` returned.
    ``token_ids`` are the generated ids without the end-of-sequence token; ``text`` ends
    before a stop string. ``completion_tokens`` counts every token of the answer, forced ones
    and the end-of-sequence token included. ``cut_at``: of an answer that was cut (by length or
    repetition) and closed, how many bytes of ``text`` in UTF-8 the model wrote before the
    closing; else None. ``choice_logprobs``: natural logarithms, one for each choice of the
    row's grammar in its order, where the row asked for them. ``reasoning``: the text of the
    thinking before the answer, None for a row without; ``reasoning_tokens`` are those of it and of
    what closed it, which ``completion_tokens`` holds and ``token_ids`` does not.
    """

    job_id: int
    row: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    completion_tokens: int
    error: RowError | None = None
    cut_at: int | None = None
    choice_logprobs: tuple[float, ...] | None = None
    reasoning: str | None = None
    reasoning_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Usage:
    """Counters of an engine since it started; all in tokens unless named otherwise."""

    # prompt (and forced opening) tokens that went through the model for the first time
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # prompt or answer tokens that went through it again
    loaded_tokens: int = 0  # of prompts, which came from the store instead of being computed
    # prompt or answer tokens that came from store, file or memory instead of going through again
    reloaded_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens of admitted rows found in the cache
    completion_tokens: int = 0
    forced_tokens: int = 0  # answer tokens the grammar left no choice about, not sampled
    # prompt tokens that more than one of several workers was given to compute; 0 for one
    duplicated_tokens: int = 0
    # (row, forward pass) pairs in which an answer token led to a sampled one; a token sampled
    # where the prompt (with a forced opening) ends needs none
    decode_steps: int = 0
    forward_steps: int = 0  # a step that memory was too short for counts once, like any
    drafted_tokens: int = 0  # tokens that went through the model on a guess
    accepted_tokens: int = 0  # those of them that turned out to be the answer's
    preemptions: int = 0
    evicted_tokens: int = 0  # that left the cache to make room, needed again or not
    peak_kv_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        """The counters of two engines that ran one after the other."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        sums["peak_kv_tokens"] = max(self.peak_kv_tokens, other.peak_kv_tokens)
        return Usage(**sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one `Engine.step` did, for an observer.

    Times are in seconds: ``started_s`` of the monotonic clock (`time.perf_counter`), then how
    long each part took. ``schedule``: guesses, admission, layout of the step, start of new
    answers; ``forward``: the model without its output layer; ``mask``: grammar masks;
    ``sample``: output layer and choice of tokens (on a GPU also the wait for the forward pass);
    ``collect``: tokens into answers, text, grammars, ends. ``model_tokens`` went through the
    model. ``running_rows``, ``waiting_rows`` (admitted never or to come back) and ``kv_tokens``
    (slots taken) are those during the forward pass; ``finished_rows`` left with the step.
    ``usage``: a copy of the engine's counters after it.
    """

    started_s: float
    schedule_s: float
    forward_s: float
    mask_s: float
    sample_s: float
    collect_s: float
    model_tokens: int
    running_rows: int
    waiting_rows: int
    finished_rows: int
    kv_tokens: int
    usage: Usage


StepObserver = Callable[[StepStats], None]
"""Called at the end of every step, on its thread: whatever it does makes the step longer."""


class Engine(Protocol):
    """Runs planned requests; `pipeline` takes any implementation."""

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer of one row may have together."""
        ...

    def submit(self, job: EngineJob) -> int:
        """Queues a planned batch and returns its job id. Raises nothing for single rows."""
        ...

    def step(self) -> list[Completion]:
        """One forward pass (or none, when nothing waits); the rows it finished."""
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def notices(self) -> Sequence[str]:
        """What a person should know of what went otherwise than asked, so far."""
        ...

    def close(self) -> None:
        """Releases weights and pool; idempotent."""
        ...


@runtime_checkable
class Observable(Protocol):
    """An engine whose single steps can be looked at; not every `Engine` has any to show."""

    def observe(self, observer: StepObserver | None) -> None:
        """Hands `StepStats` of every further step to ``observer``; None ends that."""
        ...


class DetokenizerState(Protocol):
    """Incremental decoding of one answer; never emits half a character."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token (may be empty)."""
        ...

    def finish(self) -> str:
        """What is left; bytes that never became a character are U+FFFD."""
        ...


class Detokenizer(Protocol):
    def start(self) -> DetokenizerState: ...


class Status(StrEnum):
    OK = "ok"
    TRUNCATED = "truncated"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One finished row as the sinks take it.

    ``text`` of a truncated answer is the closed one. ``value`` is None unless ``status`` is ok,
    or is truncated and such values are kept; ``cut`` is then the JSON pointer of the first field
    that was cut short. ``probabilities``: of each choice, where the run asked for them.
    ``reasoning`` and ``reasoning_tokens`` as in `Completion`.
    """

    row: int
    id: Any
    status: Status
    value: Any
    text: str | None
    error: RowError | None
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    content_key: bytes  # 16 bytes
    cut: str | None = None
    probabilities: tuple[float, ...] | None = None
    reasoning: str | None = None
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One input row as a job source yields it.

    ``index`` is the row's number in the whole input (from 0), ``line`` the physical line of
    a text file (from 1). ``values`` holds only the columns asked for that the row has: a key
    that is absent is missing, a None is null. ``error`` is set when the row cannot be read.
    ``number``: that of the input row, where one of them may be several rows.
    """

    index: int
    line: int | None = None
    id: Any = None
    values: dict[str, Any] = field(default_factory=dict)
    error: RowError | None = None
    number: int | None = None

    @property
    def place(self) -> str:
        """How messages name the row: its number from 0, and its line where it has one."""
        number = self.index if self.number is None else self.number
        return f"row {number}" + (f" (line {self.line})" if self.line is not None else "")


RowBatches = Iterator[list[Row]]
