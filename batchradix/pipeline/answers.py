"""Rows driven through an engine, and completions turned into results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from batchradix.engine.grammar.open_text import first_cut
from batchradix.errors import RowError
from batchradix.pipeline.planned import Planned, make_job
from batchradix.pipeline.retries import Retries
from batchradix.schema.answers import InvalidAnswer
from batchradix.scratch import Scratch, windows
from batchradix.types import (
    I64,
    Completion,
    Engine,
    EngineJob,
    FinishReason,
    Result,
    Status,
)

StopRequested = Callable[[], int | None]
"""Asked before every step: the number of the signal to stop for, or None."""


class Verdict(NamedTuple):
    """What became of an answer."""

    status: Status
    value: Any
    error: RowError | None


class Answers:
    """Turns completions and row errors into `Result`s, duplicates included.

    Truncated results have the value they were closed to, null where it is not valid, and
    ``cut``, whether or not they are kept: that the finished table decides.
    """

    def __init__(self, planned: Planned) -> None:
        self._planned = planned

    def failed(self, row: int) -> Result:
        """The result of a row that has an error and no prompt."""
        return self._result(row, Status.ERROR, None, None, self._planned.rows.errors[row])

    def finished(
        self, completion: Completion, verdict: Verdict, rows: Sequence[int]
    ) -> Iterator[Result]:
        """The results of all ``rows`` that this completion answers."""
        status, value, error = verdict
        requests = self._planned.rows.requests
        settings = requests.settings[requests.settings_id[completion.row]]
        if error is not None and settings.stop and completion.finish_reason is FinishReason.STOP:
            error = _naming_stop(error, settings.stop)
        cut = _first_cut(completion) if status is Status.TRUNCATED else None
        for row in rows:
            yield self._result(row, status, value, completion, error, cut)

    def judge(self, completion: Completion) -> Verdict:
        """Parses and checks the answer by its row's format."""
        if completion.finish_reason is FinishReason.ERROR:
            return Verdict(Status.ERROR, None, completion.error)
        rows = self._planned.rows
        answers = rows.formats[rows.format_id[completion.row]]
        if answers is None:
            return Verdict(Status.OK, None, None)
        if completion.finish_reason in (FinishReason.LENGTH, FinishReason.REPETITION):
            value = None
            if completion.cut_at is not None:
                with suppress(InvalidAnswer):
                    value = answers.parse(completion.text)
            return Verdict(Status.TRUNCATED, value, None)
        try:
            return Verdict(Status.OK, answers.parse(completion.text), None)
        except InvalidAnswer as invalid:
            return Verdict(Status.ERROR, None, invalid.row_error)

    def _result(
        self,
        row: int,
        status: Status,
        value: Any,
        completion: Completion | None,
        error: RowError | None,
        cut: str | None = None,
    ) -> Result:
        rows = self._planned.rows
        return Result(
            row=row,
            id=rows.ids[row].as_py(),
            status=status,
            value=value,
            text=None if completion is None else completion.text,
            error=error,
            finish_reason=FinishReason.ERROR if completion is None else completion.finish_reason,
            prompt_tokens=rows.prompt_length(row),
            cached_tokens=int(self._planned.cached[row]),
            completion_tokens=0 if completion is None else completion.completion_tokens,
            content_key=rows.content_keys[row].tobytes(),
            cut=cut,
            probabilities=_probabilities(completion),
            reasoning=None if completion is None else completion.reasoning,
            reasoning_tokens=0 if completion is None else completion.reasoning_tokens,
        )


def _naming_stop(error: RowError, stop: tuple[str, ...]) -> RowError:
    """The error of an invalid answer, with what most likely cut it."""
    shown = ", ".join(map(repr, stop))
    return RowError(
        error.code, f"{error.message}; its stop strings ({shown}) may have cut it, leave them out"
    )


def _first_cut(completion: Completion) -> str:
    """The JSON pointer of the first field of a truncated answer that was cut short."""
    if completion.cut_at is None:
        return ""
    begun = completion.text.encode()[: completion.cut_at].decode()
    try:
        return first_cut(begun, completion.text)
    except ValueError:  # no JSON
        return ""


def _probabilities(completion: Completion | None) -> tuple[float, ...] | None:
    if completion is None or completion.choice_logprobs is None:
        return None
    return tuple(map(math.exp, completion.choice_logprobs))


def drive(
    engine: Engine,
    planned: Planned,
    answers: Answers,
    todo: I64,
    emit: Callable[[Result], None],
    *,
    prefix_cache: bool,
    retain: bool = False,
    retries: Retries | None = None,
    before: Callable[[EngineJob], None] = lambda job: None,
    after_step: Callable[[], None] = lambda: None,
    stop_requested: StopRequested = lambda: None,
) -> int | None:
    """Runs the rows ``todo`` to the end; every one is emitted once, in completion order.

    With ``retries`` a row whose answer is invalid runs again first, and the rows that take its
    answer wait for it. ``before`` sees the job before the engine does. Returns the
    signal that asked it to stop in between, or None.
    """
    retain = retain or retries is not None
    job, runs_for = make_job(planned, todo, prefix_cache=prefix_cache, retain=retain)
    followers, led_by = _followers(todo, runs_for, planned.scratch)
    before(job)
    attempts = {engine.submit(job): 0}
    while engine.has_work:
        signal = stop_requested()
        if signal is not None:
            return signal
        again: dict[int, list[int]] = {}  # by the number of the attempt
        for completion in engine.step():
            start, stop = np.searchsorted(led_by, [completion.row, completion.row + 1])
            attempt = attempts[completion.job_id]
            verdict = answers.judge(completion)
            is_invalid = (
                verdict.status is Status.ERROR
                and completion.finish_reason is not FinishReason.ERROR
            )
            if retries is not None and attempt < retries.most and is_invalid:
                retries.num_rows += 0 if attempt else 1 + int(stop - start)
                retries.num_tokens += completion.completion_tokens
                again.setdefault(attempt + 1, []).append(completion.row)
                continue
            rows = [completion.row, *followers[start:stop].tolist()]
            for result in answers.finished(completion, verdict, rows):
                emit(result)
        for attempt, failed in again.items():
            assert retries is not None
            attempts[engine.submit(retries.job(failed, attempt))] = attempt
        after_step()
    return None


def _followers(todo: I64, runs_for: I64, scratch: Scratch) -> tuple[I64, I64]:
    """The rows of ``todo`` for which another one runs, and that one; sorted by both."""
    follows = scratch.zeros(len(todo), np.bool_)
    for part in windows(len(todo)):
        follows[part] = runs_for[todo[part]] != todo[part]
    followers = todo[scratch.where(follows)]
    if len(followers):
        followers = followers[np.argsort(runs_for[followers], kind="stable")]
    return scratch.kept(followers), scratch.kept(runs_for[followers])
