"""What one run did, in numbers: the object `--json` prints and the lines a person reads."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from batchradix.report.estimate import Estimate, lasting
from batchradix.report.gold import GoldScores
from batchradix.types import Status, Usage


def planned_tokens(prompt_tokens: int, opening_tokens: int) -> str:
    """In words: the tokens of prompts and of the forced beginnings of answers behind them."""
    prompts = f"{prompt_tokens:,} tokens"
    return (
        f"{prompts} and {opening_tokens:,} that answers begin with" if opening_tokens else prompts
    )


def of_token_bytes(kv_token_bytes: int, expanded_kv_token_bytes: int) -> str:
    """What follows a number of KV tokens: what one takes, and what the keys and values of all heads
    would where a model keeps latents. Empty where nothing is known."""
    if not kv_token_bytes:
        return ""
    text = f" of {kv_token_bytes:,} bytes"
    if expanded_kv_token_bytes in (0, kv_token_bytes):
        return text
    return f"{text} (keys and values of all heads: {expanded_kv_token_bytes:,})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a run is expected to take, if its answers choose ``answer_tokens`` tokens on average;
    ``is_guess``: nothing is known of that, so that it is the most they may. ``seconds`` are of the
    engine's steps, None where nothing is known of what steps take here."""

    computed_tokens: int
    recomputed_tokens: int
    decode_steps: int
    forward_steps: int
    peak_kv_tokens: int
    seconds: float | None
    answer_tokens: float
    is_guess: bool

    def in_words(self) -> str:
        """For a person."""
        length = f"{self.answer_tokens:,.3g}"
        answers = (
            f"if every answer takes up to {length} tokens"
            if self.is_guess
            else (f"with {length} tokens chosen an answer")
        )
        time = "" if self.seconds is None else f", {lasting(self.seconds)} here"
        return (
            f"{self.computed_tokens + self.recomputed_tokens:,} prompt tokens and "
            f"{self.decode_steps:,} of answers in {self.forward_steps:,} steps, "
            f"{self.peak_kv_tokens:,} KV tokens{time}, {answers}"
        )


@dataclass(slots=True, kw_only=True)
class Summary:
    """Counts over the whole table, the engine's counters over this run.

    ``rows ok truncated errors prompt_tokens opening_tokens distinct_tokens completion_tokens``
    are of the finished table, or of the rows that were done when a signal stopped the run, with
    ``rows_left`` to go; ``opening_tokens`` are the forced beginnings of answers that were
    planned with the prompts, which ``distinct_tokens`` holds too; ``resumed_rows`` rows were
    committed by an earlier run; ``duplicate_rows`` took another row's answer;
    ``cut_rows`` lost some of their text so that they fit, ``parted_rows`` were read in parts;
    ``retried_rows`` ran again because their answer was invalid, which threw ``discarded_tokens``
    answer tokens away (the engine's counters have them, ``completion_tokens`` has not). These,
    ``usage`` and ``seconds`` are of this run. ``kv_token_bytes``: what a token takes in the KV
    cache, ``expanded_kv_token_bytes``: what keys and values of all heads would take; 0 where no
    engine ran.
    """

    rows: int = 0
    rows_left: int = 0
    ok: int = 0
    truncated: int = 0
    errors: int = 0
    resumed_rows: int = 0
    duplicate_rows: int = 0
    cut_rows: int = 0
    parted_rows: int = 0
    retried_rows: int = 0
    discarded_tokens: int = 0
    prompt_tokens: int = 0
    opening_tokens: int = 0
    distinct_tokens: int = 0
    completion_tokens: int = 0
    usage: Usage = field(default_factory=Usage)
    kv_token_bytes: int = 0
    expanded_kv_token_bytes: int = 0
    peak_rss_bytes: int = 0
    load_s: float = 0.0
    plan_s: float = 0.0
    run_s: float = 0.0
    model: str = ""
    dtype: str = ""
    output: Path | None = None
    warnings: list[str] = field(default_factory=list)
    error_codes: dict[str, int] = field(default_factory=dict)
    stopped_by: int | None = None  # signal number
    failed_rows: int | None = None  # written to a file of their own
    forecast: Forecast | None = None  # of this run, made before it
    ran_rows: int = 0  # that the engine answered
    gold: GoldScores | None = None  # answers held against right ones
    estimate: Estimate | None = None  # of the whole job, where this is a sample of it

    def count(self, status: Status, error_code: str | None = None) -> None:
        """Adds one row."""
        self.rows += 1
        if status is Status.OK:
            self.ok += 1
        elif status is Status.TRUNCATED:
            self.truncated += 1
        else:
            self.errors += 1
            if error_code is not None:
                self.error_codes[error_code] = self.error_codes.get(error_code, 0) + 1

    def exit_code(self, allow_failures: float = 0.0) -> int:
        """0, 1, 3 or 128 + signal, as the command line returns it."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.rows and not self.ok:
            return 3
        failed = self.errors + self.truncated
        return 0 if failed <= allow_failures * self.rows else 1

    @property
    def shared_share(self) -> float:
        """Share of prompt and opening tokens that another row's prefix already held."""
        planned = self.prompt_tokens + self.opening_tokens
        return 1 - self.distinct_tokens / planned if planned else 0.0

    @property
    def answer_tokens(self) -> float | None:
        """Tokens that an answer of this run chose one after the other, on average."""
        if not self.ran_rows or self.stopped_by is not None:
            return None
        return 1 + self.usage.decode_steps / self.ran_rows

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        usage = self.usage
        return {
            "rows": self.rows,
            "rows_left": self.rows_left,
            "ok": self.ok,
            "truncated": self.truncated,
            "errors": self.errors,
            "resumed_rows": self.resumed_rows,
            "duplicate_rows": self.duplicate_rows,
            "cut_rows": self.cut_rows,
            "parted_rows": self.parted_rows,
            "retried_rows": self.retried_rows,
            "discarded_tokens": self.discarded_tokens,
            "prompt_tokens": self.prompt_tokens,
            "opening_tokens": self.opening_tokens,
            "distinct_tokens": self.distinct_tokens,
            "computed_tokens": usage.computed_tokens,
            "recomputed_tokens": usage.recomputed_tokens,
            "duplicated_tokens": usage.duplicated_tokens,
            "loaded_tokens": usage.loaded_tokens,
            "reloaded_tokens": usage.reloaded_tokens,
            "completion_tokens": self.completion_tokens,
            "forced_tokens": usage.forced_tokens,
            "decode_steps": usage.decode_steps,
            "drafted_tokens": usage.drafted_tokens,
            "accepted_tokens": usage.accepted_tokens,
            "forward_steps": usage.forward_steps,
            "preemptions": usage.preemptions,
            "peak_kv_tokens": usage.peak_kv_tokens,
            "kv_token_bytes": self.kv_token_bytes,
            "expanded_kv_token_bytes": self.expanded_kv_token_bytes,
            "peak_rss_bytes": self.peak_rss_bytes,
            "seconds": {
                "load": round(self.load_s, 3),
                "plan": round(self.plan_s, 3),
                "run": round(self.run_s, 3),
            },
            "answer_tokens": self.answer_tokens,
            "predicted": None if self.forecast is None else asdict(self.forecast),
            "failed_rows": self.failed_rows,
            "gold": None if self.gold is None else self.gold.to_json(),
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "error_codes": dict(sorted(self.error_codes.items())),
            "model": self.model,
            "dtype": self.dtype,
            "output": None if self.output is None else str(self.output),
            "warnings": list(self.warnings),
        }

    def table(self) -> list[tuple[str, str]]:
        """Name and value pairs for a person."""
        usage = self.usage
        rows = f"{self.rows:,} rows: {self.ok:,} ok"
        if self.truncated:
            rows += f", {self.truncated:,} truncated"
        if self.errors:
            codes = ", ".join(f"{code} {n:,}" for code, n in sorted(self.error_codes.items()))
            rows += f", {self.errors:,} errors" + (f" ({codes})" if codes else "")
        if self.resumed_rows:
            rows += f"; {self.resumed_rows:,} of them from an earlier run"
        if self.duplicate_rows:
            rows += f"; {self.duplicate_rows:,} duplicates answered once"
        if self.cut_rows:
            rows += f"; {self.cut_rows:,} with part of their text left out"
        if self.parted_rows:
            rows += f"; {self.parted_rows:,} read in parts"
        if self.retried_rows:
            rows += f"; {self.retried_rows:,} tried again"
        answers = f"{self.completion_tokens:,} answer tokens"
        steps, resumed = f"{usage.forward_steps:,} steps", self.resumed_rows > 0
        lines = [
            ("result", rows),
            (
                "prompts",
                f"{planned_tokens(self.prompt_tokens, self.opening_tokens)}, "
                f"{self.distinct_tokens:,} distinct ({self.shared_share:.1%} shared)",
            ),
            (
                "computed",
                f"{usage.computed_tokens:,} prompt tokens, {usage.recomputed_tokens:,} again, "
                + (f"{usage.loaded_tokens:,} from the store, " if usage.loaded_tokens else "")
                + (f"{usage.reloaded_tokens:,} brought back, " if usage.reloaded_tokens else "")
                + (
                    f"{usage.duplicated_tokens:,} by more than one worker, "
                    if usage.duplicated_tokens
                    else ""
                )
                + (f"in {steps}; {answers} in the table" if resumed else f"{answers} in {steps}"),
            ),
        ]
        # Tokens are counted over the table: with an earlier run's among them they tell no speed.
        if self.run_s > 0 and usage.decode_steps and not resumed:
            lines.append(
                (
                    "speed",
                    f"{self.prompt_tokens / self.run_s:,.0f} prompt and "
                    f"{self.completion_tokens / self.run_s:,.0f} answer tokens/s",
                )
            )
        lines += [
            ("model", f"{self.model} in {self.dtype}" if self.dtype else self.model),
            (
                "memory",
                f"{self.peak_rss_bytes / 2**20:,.0f} MiB at most, "
                f"{usage.peak_kv_tokens:,} KV tokens"
                + of_token_bytes(self.kv_token_bytes, self.expanded_kv_token_bytes),
            ),
            (
                "time",
                f"{self.load_s:.1f} s load, {self.plan_s:.1f} s plan, {self.run_s:.1f} s run",
            ),
        ]
        if self.gold is not None:
            lines += self.gold.lines()
        if self.estimate is not None:
            lines += self.estimate.lines()
        if self.stopped_by is not None:
            name = signal.Signals(self.stopped_by).name
            text = f"by {name} with {self.rows_left:,} rows left; the same command goes on"
            lines.append(("stopped", text))
        elif self.output is not None:
            lines.append(("output", str(self.output)))
        return lines

    def last_line(self) -> str:
        """One line that a script can read: ``key=value`` pairs."""
        seconds = self.load_s + self.plan_s + self.run_s
        left = "" if self.stopped_by is None else f" left={self.rows_left}"
        return (
            f"summary rows={self.rows} ok={self.ok} failed={self.errors} "
            f"truncated={self.truncated}{left} seconds={seconds:.2f}"
        )
