"""Results beside the rows that they answer."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any

from batchradix.errors import InputError, OptionError
from batchradix.jobs.base import RESULT_COLUMNS, JobSource
from batchradix.jobs.detect import open_job
from batchradix.report.gold import BadGold, is_right, kind_of_answer, read_gold
from batchradix.sink.about import About, read_about
from batchradix.sink.question_columns import QUESTIONS
from batchradix.sink.results import ResultRow, Results, count_rows, open_results
from batchradix.types import Row, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which result rows are wanted: those of ``statuses`` (empty: all), of the id ``id``
    (None: all), and with ``wrong`` those whose right answer, in the column ``gold`` (None: that
    of the run), is another one. ``input``: the file of the rows, None for that of the run."""

    statuses: Collection[str] = ()
    id: str | None = None
    wrong: bool = False
    gold: str | None = None
    input: str | None = None

    def __post_init__(self) -> None:
        known = [status.value for status in Status]
        for status in self.statuses:
            if status not in known:
                raise OptionError(f"`status` must be one of {', '.join(known)}, not {status!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """``rows`` are read as they are taken. ``note``: what is to be known of the results, "" where
    they are a finished table."""

    rows: Iterator[ResultRow]
    note: str


def look(path: str | os.PathLike[str], wanted: Wanted, columns: Collection[str] | None) -> Shown:
    """The wanted rows of a result file, or of what a run has committed so far, in input order, each
    beside its input where that can be read. ``columns``: those that are asked for; None for all.

    Raises `InputError` where the results, or an input that was named, cannot be read.
    """
    results = open_results(path)
    note = ""
    if not results.is_finished:
        count = count_rows(results.work)
        what = "results" if read_about(results.work).has_several else "rows"
        note = f"the run has not finished this table; it has committed {count:,} {what}"
    return Shown(rows=_wanted_rows(results, wanted, columns), note=note)


def _wanted_rows(
    results: Results, wanted: Wanted, columns: Collection[str] | None
) -> Iterator[ResultRow]:
    about = read_about(results.work)
    if wanted.gold is not None and not wanted.wrong:
        raise OptionError("`gold` names what `wrong` compares answers with; give `wrong` as well")
    gold = wanted.gold or about.gold
    if wanted.wrong and gold is None:
        raise OptionError(
            "the run had no `gold`, so nobody knows which answers are wrong; name the column of "
            "right ones with `gold`"
        )
    by_id = about.has_several and not results.is_finished
    if wanted.wrong and by_id:
        raise OptionError(
            "the rows of this table are made of several results each, and can be held against "
            "right answers only once the run has finished it; leave out `wrong` until then"
        )
    with ExitStack() as stack:
        inputs: _Inputs | None = None
        for row in results.rows():
            if wanted.statuses and row.get("status") not in wanted.statuses:
                continue
            if wanted.id is not None and wanted.id != str(row.get("id")):
                continue
            if inputs is None and _wants_input(row, wanted, gold, columns):
                inputs = _Inputs(_open_input(about, wanted), by_id=by_id)
                stack.callback(inputs.close)
            whole = row if inputs is None else inputs.beside(row)
            if wanted.wrong and not _is_wrong(whole, gold):
                continue
            yield whole


def _wants_input(
    row: Mapping[str, Any],
    wanted: Wanted,
    gold: str | None,
    columns: Collection[str] | None,
) -> bool:
    """Whether something is wanted of the input that the results may not hold."""
    if columns is None or (wanted.wrong and gold not in row):
        return True
    value = row.get("value")
    there = {*row, *(value if isinstance(value, Mapping) else ())}
    return any(name not in there and name.split(".")[0] not in there for name in columns)


def _is_wrong(row: Mapping[str, Any], gold: str | None) -> bool:
    assert gold is not None
    if gold not in row:
        raise InputError(
            f"there is no column {gold!r} of right answers beside these results; name the input "
            f"that has it with --input, or run with --keep {gold}"
        )
    raw = row[gold]
    if raw is None or raw == "":
        return False
    answer = row.get("value", row.get("text"))
    failed = [] if row.get("status") == Status.OK else _failed_questions(row)
    if failed is None or answer is None:
        return True
    kind = kind_of_answer(answer) if "value" in row else "text"
    try:
        right = read_gold(raw, kind)
    except BadGold:
        return False
    if kind == "text":
        return bool(answer.strip() != right.strip())
    return any(name in right for name in failed) or not is_right(answer, right)


def _failed_questions(row: Mapping[str, Any]) -> list[str] | None:
    """The questions of a row that have no answer that is ok; None where it was asked none."""
    questions = row.get(QUESTIONS)
    if not isinstance(questions, Mapping) or not isinstance(row.get("value"), Mapping):
        return None
    return [
        name
        for name, found in questions.items()
        if not isinstance(found, Mapping) or found.get("status") != Status.OK
    ]


class _Inputs:
    """The input's rows, read forwards beside results in the same order; no rows where it is None,
    or cannot be read to the end. ``by_id``: several results may follow each other that are of the
    same row, and their own numbers are not those of rows."""

    def __init__(self, source: JobSource | None, *, by_id: bool = False) -> None:
        self._source = source
        self._by_id = by_id
        self._rows = self._read()
        self._at: Row | None = None

    def beside(self, row: ResultRow) -> ResultRow:
        """A result row with the columns of its input row, which follow id, row and status. What
        the results kept is not there twice; what has the name of another result column is called
        ``input_<name>``."""
        found = self._find(row)
        if found is None or self._source is None:
            return row
        taken = {}
        for name, value in found.values.items():
            if name == self._source.id_column or (name in row and name not in RESULT_COLUMNS):
                continue
            shown = name if name not in row else f"input_{name}"
            if shown not in row:
                taken[shown] = _plain(value)
        front: ResultRow = {name: row[name] for name in ("id", "row", "status") if name in row}
        if self._by_id:
            front["row"] = found.index
        return front | taken | {name: value for name, value in row.items() if name not in front}

    def _find(self, row: ResultRow) -> Row | None:
        place = None if self._by_id else row.get("row")
        if self._by_id and self._at is not None and str(self._at.id) == str(row.get("id")):
            return self._at
        if place is not None and str(place).isdecimal():
            while self._at is None or self._at.index < int(place):
                self._at = next(self._rows, None)
                if self._at is None:
                    return None
            return self._at if self._at.index == int(place) else None
        for _ in range(2):  # what failed stands in a file of its own, from the beginning again
            for at in self._rows:
                if str(at.id) == str(row.get("id")):
                    self._at = at
                    return at
            self._rows = self._read()
        return None

    def _read(self) -> Iterator[Row]:
        if self._source is not None:
            for rows in self._source.input_batches(None):
                yield from rows

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def _open_input(about: About, wanted: Wanted) -> JobSource | None:
    """The input to read beside results; None where it is gone, unless it was named."""
    name = wanted.input or about.input
    if name is None:
        return None
    try:
        limit = None if wanted.input else about.limit
        source = open_job(name, id_column=about.id_column, limit=limit)
        source.scan()
        return source
    except InputError:
        if wanted.input is not None:
            raise
        return None


def _plain(value: Any) -> Any:
    """A value of an input row as JSON knows it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
