"""Everything about a job that can be known without weights: what would be refused, and needs."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from batchradix.config import RunConfig
from batchradix.errors import OutputMismatchError
from batchradix.pipeline.forecasts import expected_answer_tokens, forecast
from batchradix.pipeline.former import may_take_over, remedy
from batchradix.pipeline.job import EngineFactory, check_parts
from batchradix.pipeline.parts import Parts, fingerprint, names_in_words, open_parts
from batchradix.pipeline.planned import (
    Planned,
    make_job,
    plan_rows,
    settle_engine,
    shortages,
)
from batchradix.pipeline.table import finished_schema
from batchradix.report.progress import Progress, Silent
from batchradix.report.summary import Forecast, of_token_bytes, planned_tokens
from batchradix.scratch import Scratch
from batchradix.settings import EngineSettings
from batchradix.sink.folder import check_output, other_job
from batchradix.sink.formats import check_format

_SCRATCH_ROW_BYTES = 300  # beside its tokens, an id of some bytes included
_TEXT_BYTES = 5  # of an answer's token, generously


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A job that would run. ``error_rows``: by code, how many rows could not, and the sentence
    of the first. ``kv_bytes`` is the pool's size, ``kv_token_bytes`` a token's in it, and
    ``expanded_kv_token_bytes`` what keys and values of all heads would take; ``weight_bytes`` is
    the model's size in its dtype. ``disk_bytes`` is what answers could take at most beside and in
    the output, ``token_bytes`` what tokens and plan take in the temporary folder; both with what
    is free there."""

    lines: list[tuple[str, str]]
    error_rows: dict[str, tuple[int, str]]
    num_rows: int
    prompt_tokens: int
    opening_tokens: int
    distinct_tokens: int
    kv_tokens: int
    kv_bytes: int
    kv_token_bytes: int
    expanded_kv_token_bytes: int
    weight_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    token_bytes: int
    temporary_free_bytes: int
    forecast: Forecast
    warnings: list[str] = field(default_factory=list)

    @property
    def num_error_rows(self) -> int:
        return sum(count for count, _ in self.error_rows.values())

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "rows": self.num_rows,
            "error_rows": {code: count for code, (count, _) in self.error_rows.items()},
            "prompt_tokens": self.prompt_tokens,
            "opening_tokens": self.opening_tokens,
            "distinct_tokens": self.distinct_tokens,
            "kv_tokens": self.kv_tokens,
            "kv_bytes": self.kv_bytes,
            "kv_token_bytes": self.kv_token_bytes,
            "expanded_kv_token_bytes": self.expanded_kv_token_bytes,
            "weight_bytes": self.weight_bytes,
            "disk_bytes": self.disk_bytes,
            "disk_free_bytes": self.disk_free_bytes,
            "token_bytes": self.token_bytes,
            "temporary_free_bytes": self.temporary_free_bytes,
            "predicted": asdict(self.forecast),
            "warnings": self.warnings,
        }


def check(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    engines: EngineFactory | None = None,
) -> Checked:
    """Opens and plans the whole job, compiles its grammar, and writes nothing.

    Raises the `UsageError` that `run` would raise before it loads weights, and
    `OutputMismatchError` where the output holds another job's results.
    """
    progress = progress or Silent()
    output = None if config.output.path is None else check_output(config.output.path)
    parts = open_parts(config, progress=progress)
    try:
        make_engine = check_parts(parts, engines)
        if output is not None:
            _check_table(parts, output)
        with tempfile.TemporaryDirectory(prefix="batchradix-") as folder:
            planned = plan_rows(
                parts,
                folder=Path(folder),
                progress=progress,
                opening=make_engine.opening,
                scratch=Scratch(),
            )
            settings = settle_engine(parts, planned)
            job, _ = make_job(planned, planned.alone.order, prefix_cache=settings.prefix_cache)
            expected = forecast(
                job,
                planned.rows.lengths,
                settings,
                parts.checkpoint.content_hash,
                expected_answer_tokens(config),
            )
            return _report(parts, planned, settings, output, expected)
    finally:
        parts.source.close()


def _check_table(parts: Parts, output: Path) -> None:
    options = parts.config.output
    check_format(
        output,
        finished_schema(
            parts.source,
            parts.values,
            options,
            probabilities=parts.config.sampling.probabilities,
            metadata={},
            folds=parts.folds(None),
            has_cut_tokens=parts.config.long_rows.truncates,
        ),
        options.format,
    )
    changed, changes = other_job(output, fingerprint(parts), names_in_words(parts))
    if changed and not options.restart and not may_take_over(changed, options):
        raise OutputMismatchError(
            f"{options.path} holds the results of another job ({changes}); "
            f"{remedy(changed, options)}"
        )


def _report(
    parts: Parts,
    planned: Planned,
    settings: EngineSettings,
    output: Path | None,
    expected: Forecast,
) -> Checked:
    rows, summary, model = planned.rows, planned.summary, parts.checkpoint.config
    by_code = sorted(rows.errors.by_code().items(), key=lambda one: -one[1][0])
    max_tokens = rows.requests.max_tokens
    most_answer_tokens = int(max_tokens.sum(dtype=np.int64))
    most_answer_tokens -= int(max_tokens[rows.errors.rows].sum(dtype=np.int64))
    folder = Path.cwd() if output is None else output.parent
    checked = Checked(
        lines=[],
        error_rows={str(code): found for code, found in by_code},
        num_rows=parts.source.num_rows or 0,
        prompt_tokens=summary.prompt_tokens,
        opening_tokens=summary.opening_tokens,
        distinct_tokens=summary.distinct_tokens,
        kv_tokens=settings.kv_tokens,
        kv_bytes=settings.pool_bytes(model.num_kv_elements_per_token),
        kv_token_bytes=model.num_kv_elements_per_token * settings.kv_element_bytes,
        expanded_kv_token_bytes=model.num_expanded_kv_elements_per_token
        * settings.kv_element_bytes,
        weight_bytes=model.num_parameters * settings.element_bytes,
        # Text and value, in the shards and in the finished file.
        disk_bytes=4 * _TEXT_BYTES * most_answer_tokens + 256 * len(rows),
        disk_free_bytes=shutil.disk_usage(folder).free,
        token_bytes=4 * rows.tokens.num_tokens + _SCRATCH_ROW_BYTES * len(rows),
        temporary_free_bytes=shutil.disk_usage(tempfile.gettempdir()).free,
        forecast=expected,
        warnings=[*parts.warnings, *shortages(parts, settings)],
    )
    checked.lines.extend(_lines(parts, checked, settings))
    checked.lines.append(("expected", expected.in_words()))
    if output is not None and checked.disk_bytes > checked.disk_free_bytes:
        checked.warnings.append(
            f"answers could take {_size(checked.disk_bytes)} and {folder} has "
            f"{_size(checked.disk_free_bytes)} left"
        )
    return checked


def _lines(parts: Parts, checked: Checked, settings: EngineSettings) -> list[tuple[str, str]]:
    config = parts.checkpoint.config
    lines = [
        ("input", f"{parts.source.name}: {checked.num_rows:,} rows"),
        ("columns", ", ".join(sorted(parts.prompts.required_columns)) or "none"),
        (
            "prompts",
            f"{planned_tokens(checked.prompt_tokens, checked.opening_tokens)}, "
            f"{checked.distinct_tokens:,} distinct",
        ),
        (
            "model",
            f"{parts.checkpoint.name}: {config.num_parameters:,} parameters, a context of "
            f"{config.context_length:,} tokens, {settings.precision} on {settings.device}",
        ),
        (
            "memory",
            f"{_size(checked.weight_bytes)} of weights, {_size(checked.kv_bytes)} for "
            f"{checked.kv_tokens:,} KV tokens"
            + of_token_bytes(checked.kv_token_bytes, checked.expanded_kv_token_bytes),
        ),
        (
            "disk",
            f"{_size(checked.disk_bytes)} at most for answers, {_size(checked.token_bytes)} of "
            f"tokens in {tempfile.gettempdir()} while it runs",
        ),
    ]
    if parts.values is not None:
        lines.insert(3, ("answers", str(parts.values.arrow_type)))
    for code, (count, sentence) in checked.error_rows.items():
        lines.append((code, f"{count:,} rows; the first: {sentence}"))
    return lines


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes < 2**33 else f"{num_bytes / 2**30:,.1f} GiB"
