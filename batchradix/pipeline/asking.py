"""The second question over the answers to the parts of a text, once all of them are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from batchradix.errors import RowError, RowErrorCode
from batchradix.jobs.row_settings import SETTING_COLUMNS
from batchradix.pipeline.answers import Answers, StopRequested, drive
from batchradix.pipeline.expansion import Expander, Expansion
from batchradix.pipeline.parts import Parts
from batchradix.pipeline.planned import Planned, plan_rows
from batchradix.pipeline.retries import open_retries
from batchradix.pipeline.row_formats import Opening
from batchradix.pipeline.table import Table
from batchradix.prompts.overflow import longest_text
from batchradix.report.progress import Silent
from batchradix.types import I64, Engine, FinishReason, Result, Row, Status

_LOT_ROWS = 1024  # whose answers are in memory at once
_RANK = {Status.OK: 0, Status.TRUNCATED: 1, Status.ERROR: 2}


@dataclass(slots=True)
class _Asked:
    """A row of the table to be asked: the statuses, errors and texts of the parts before it."""

    slot: int
    statuses: list[Status]
    errors: list[RowError | None]
    texts: list[str | None]


class Asking:
    """Runs the rows that the model is asked over its answers to the parts before them.

    Such a row is the job's own prompt, with these answers in place of the text that was too long.
    Where a part has no good answer it is not asked, and ends as that part did. The counts are of
    the prompts of those asked.
    """

    def __init__(
        self, parts: Parts, planned: Planned, table: Table, opening: Opening | None
    ) -> None:
        self._parts, self._planned, self._table = parts, planned, table
        self._opening = opening
        self.prompt_tokens = self.opening_tokens = self.distinct_tokens = 0
        config = parts.config
        self._expander = Expander(
            parts.prompts, Expansion(questions=config.questions), lambda row, thinking: 0
        )

    @property
    def waiting(self) -> I64:
        """int64[k]: the rows still to be asked."""
        asks = self._planned.rows.asks
        if asks is None:
            return np.zeros(0, dtype=np.int64)
        waiting: I64 = asks[self._table.is_waiting[asks]]
        return waiting

    def run(
        self,
        engine: Engine,
        *,
        prefix_cache: bool,
        after_step: Callable[[], None] = lambda: None,
        stop_requested: StopRequested = lambda: None,
    ) -> int | None:
        """Asks all that wait; each is appended to the table once. Returns the signal that asked it
        to stop in between, or None."""
        waiting = self.waiting
        for start in range(0, len(waiting), _LOT_ROWS):
            asked = self._answers(waiting[start : start + _LOT_ROWS])
            ready = []
            for one in asked:
                if all(status is Status.OK for status in one.statuses):
                    ready.append(one)
                else:
                    self._table.append(self._unasked(one))
            signal = self._run(engine, ready, prefix_cache, after_step, stop_requested)
            if signal is not None:
                return signal
        return None

    def _answers(self, slots: I64) -> list[_Asked]:
        """The answers to the parts before each of ``slots`` (int64[k])."""
        starts = self._planned.rows.part_starts
        assert starts is not None
        groups = np.searchsorted(starts, slots, side="right") - 1
        found: list[_Asked] = []
        owner = np.full(len(self._planned.rows), -1, dtype=np.int32)
        for i, (slot, group) in enumerate(zip(slots.tolist(), groups.tolist(), strict=True)):
            owner[starts[group] : slot] = i
            size = slot - int(starts[group])
            found.append(_Asked(slot, [Status.OK] * size, [None] * size, [None] * size))
        for batch, rows in self._table.batches():
            here = np.flatnonzero((rows >= 0) & (owner[rows] >= 0))
            if not len(here):
                continue
            some = batch.select(["status", "error", "text"]).take(pa.array(here))
            columns = zip(*(column.to_pylist() for column in some.columns), strict=True)
            for row, (status, error, text) in zip(rows[here].tolist(), columns, strict=True):
                one = found[owner[row]]
                place = row - (one.slot - len(one.texts))
                one.statuses[place], one.texts[place] = Status(status), text
                if error is not None:
                    one.errors[place] = RowError(RowErrorCode(error["code"]), error["message"])
        return found

    def _unasked(self, one: _Asked) -> Result:
        """The result of a row whose parts are not all good: that of the first of the worst."""
        worst = max(one.statuses, key=_RANK.__getitem__)
        rows = self._planned.rows
        is_error = worst is Status.ERROR
        return Result(
            row=one.slot,
            id=rows.ids[one.slot].as_py(),
            status=worst,
            value=None,
            text=None,
            error=one.errors[one.statuses.index(worst)],
            finish_reason=FinishReason.ERROR if is_error else FinishReason.LENGTH,
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            content_key=rows.content_keys[one.slot].tobytes(),
        )

    def _run(
        self,
        engine: Engine,
        asked: list[_Asked],
        prefix_cache: bool,
        after_step: Callable[[], None],
        stop_requested: StopRequested,
    ) -> int | None:
        if not asked:
            return None
        parts = self._parts
        source = _Rows(parts.source.id_type, self._rows(asked))
        whole = self._planned.rows
        slots = np.array([one.slot for one in asked], dtype=np.int64)
        planned = plan_rows(
            parts,
            source=source,
            folder=None,
            progress=Silent(),
            opening=self._opening,
            # Their prompts may be equal by chance; then what a row draws must not depend on which
            # of them are asked together, as it would after a run that was stopped.
            named=(whole.base_keys[slots], whole.occurrence[slots]),
        )
        self.prompt_tokens += planned.summary.prompt_tokens
        self.opening_tokens += planned.summary.opening_tokens
        self.distinct_tokens += planned.summary.distinct_tokens

        def emit(result: Result) -> None:
            slot = asked[result.row].slot
            key = whole.content_keys[slot].tobytes()
            self._table.append(replace(result, row=slot, content_key=key))

        answers = Answers(planned)
        for row in planned.rows.errors:
            failed = answers.failed(row)
            assert failed.error is not None
            message = f"asked over the answers to its parts, {failed.error.message}"
            emit(replace(failed, error=replace(failed.error, message=message)))
        todo = np.sort(planned.plan.order)
        if not len(todo):
            return None
        return drive(
            engine,
            planned,
            answers,
            todo,
            emit,
            prefix_cache=prefix_cache,
            retries=open_retries(parts, planned),
            after_step=after_step,
            stop_requested=stop_requested,
        )

    def _rows(self, asked: list[_Asked]) -> list[Row]:
        """The rows of the prompts, in the order of ``asked``."""
        starts = self._planned.rows.part_starts
        assert starts is not None
        each = len(self._parts.config.questions) or 1
        wanted: dict[int, list[tuple[int, int, str]]] = {}  # by row of the input
        for index, one in enumerate(asked):
            group = int(np.searchsorted(starts, one.slot, side="right")) - 1
            wanted.setdefault(group // each, []).append((index, group % each, _told(one.texts)))
        found: dict[int, Row] = {}
        columns = frozenset(self._parts.prompts.required_columns) | {*SETTING_COLUMNS}
        for rows in self._parts.source.batches(columns):
            for row in rows:
                for index, number, text in wanted.pop(row.index, ()):
                    long = longest_text(row, self._parts.prompts.places)
                    assert long is not None, "its text was cut"
                    told = self._expander.asked(long.put(text))[number]
                    found[index] = replace(told, index=index, number=row.index)
            if not wanted:
                break
        return [found[index] for index in range(len(asked))]


def _told(texts: list[str | None]) -> str:
    """What stands in place of a text: the answers to its parts."""
    listed = "\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1))
    return (
        f"(The text was too long and was read in {len(texts)} parts. These are the answers for the "
        f"parts, in order. Answer for the whole text.)\n{listed}"
    )


class _Rows:
    """Rows that are there already, as a `RowSource`."""

    columns = None

    def __init__(self, id_type: pa.DataType, rows: list[Row]) -> None:
        self.id_type = id_type
        self._all = rows

    def batches(
        self, columns: Collection[str] | None, batch_rows: int = _LOT_ROWS
    ) -> Iterator[list[Row]]:
        for start in range(0, len(self._all), batch_rows):
            yield self._all[start : start + batch_rows]
