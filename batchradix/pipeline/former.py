"""What stays of an output's results when its job has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from batchradix.chat_options import ChatOptions
from batchradix.config import OutputOptions, PromptOptions, SamplingOptions
from batchradix.errors import OptionError
from batchradix.pipeline.intake import FormerSettings, Intake
from batchradix.sink.folder import RunFolder, changed_entries, read_fingerprint
from batchradix.sink.shards import match_rows
from batchradix.sink.takeover import read_former, take_over
from batchradix.types import Status

_SAMPLING = frozenset(field.name for field in fields(SamplingOptions))
_PROMPTS = frozenset(field.name for kind in (PromptOptions, ChatOptions) for field in fields(kind))
# What shows in the table, or in the answers of all rows, cannot differ within it.
_RETRY_MAY_CHANGE = (_SAMPLING - {"probabilities", "choose"}) | {"retries", "version"}
_REUSE_MAY_CHANGE = (_RETRY_MAY_CHANGE - {"seed", "retries"}) | _PROMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """The job whose results an output holds, where this run may take some of them over.

    ``settings`` are those of its rows where they need not be this run's (`OutputOptions.retry`),
    None where rows count only if they are (`OutputOptions.reuse`).
    """

    settings: FormerSettings | None
    retry: tuple[Status, ...]

    def take_over(self, folder: RunFolder, fingerprint: Mapping[str, Any], rows: Intake) -> None:
        """Makes the folder this run's, with the results that stay. Raises `SinkError`."""
        committed = read_former(folder)
        keys = rows.content_keys if rows.former_keys is None else rows.former_keys
        record_of_row = match_rows(committed, len(rows), keys)
        for status in self.retry:
            failed = committed.has_status(status)
            record_of_row[(record_of_row >= 0) & failed[record_of_row]] = -1
        take_over(folder, fingerprint, committed, record_of_row, rows.content_keys)


def find_former(
    folder: RunFolder, fingerprint: Mapping[str, Any], options: OutputOptions
) -> Former | None:
    """The job to take over from; None where there is none, or the run is its very own.

    A job that differs in more than may be is left to be refused. Raises `OptionError` where
    ``retry`` with other settings has no former settings to know the rows by.
    """
    held = read_fingerprint(folder)
    if held is None or options.restart:
        return None
    changed = changed_entries(held, fingerprint)
    if not changed:
        return None
    if not may_take_over(changed, options):
        return None
    retry = tuple(Status(status) for status in options.retry)
    by_settings = bool(retry) and changed <= _RETRY_MAY_CHANGE
    return Former(settings=_settings(folder, held) if by_settings else None, retry=retry)


def may_take_over(changed: frozenset[str], options: OutputOptions) -> bool:
    """Whether a run keeps results of a job that differs in these entries of its fingerprint."""
    return (bool(options.retry) and changed <= _RETRY_MAY_CHANGE) or (
        options.reuse and changed <= _REUSE_MAY_CHANGE
    )


def remedy(changed: frozenset[str], options: OutputOptions) -> str:
    """What can be done where the results are those of a job that differs in these entries."""
    fixed = sorted(changed - _REUSE_MAY_CHANGE)
    restart = "or --restart to throw those results away"
    if not fixed:
        return (
            "give another output, --reuse to keep the rows whose prompt and settings are the "
            f"same, {restart}"
        )
    kept = f"--reuse keeps no rows where {', '.join(fixed)} changed; " if options.reuse else ""
    same = "--dtype as it was, " if fixed == ["dtype"] else ""
    return f"{kept}give {same}another output, {restart}"


def _settings(folder: RunFolder, held: Mapping[str, Any]) -> FormerSettings:
    known = {name: held[name] for name in _SAMPLING if name in held}
    try:
        known["stop"] = tuple(known.get("stop", ()))
        return FormerSettings(
            sampling=SamplingOptions(**known), retries=int(held.get("retries", 0))
        )
    except (TypeError, ValueError, OptionError):
        raise OptionError(
            f"{folder.shown} does not say which settings its rows were run with; give --restart"
        ) from None
