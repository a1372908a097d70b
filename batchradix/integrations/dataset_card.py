"""The part of a data set's card that says how its answers were made."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from batchradix._version import VERSION
from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import RunConfig, SamplingOptions
from batchradix.schema.answer_format import AnswerFormat
from batchradix.types import Status

TAGS = ("synthetic", "batchradix")
_BEGIN, _END = "<!-- batchradix: begin -->", "<!-- batchradix: end -->"
SECTION = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
_STATUS = re.compile(r"(answer_)*status")


def status_counts(dataset: Any) -> Counter[str] | None:
    """Rows by status of a `datasets.Dataset` that was mapped, or of all splits of a dict of them;
    None where no column has it."""
    if isinstance(dataset, Mapping):
        found = [status_counts(split) for split in dataset.values()]
        known = [counts for counts in found if counts is not None]
        return sum(known, Counter()) if len(known) == len(found) else None
    names = [name for name in dataset.column_names if _STATUS.fullmatch(name)]
    if not names:
        return None
    name = max(names, key=len)  # the data set's own is called status then
    counts: Counter[str] = Counter()
    for table in dataset.with_format("arrow", columns=[name]).iter(1 << 16):
        for pair in pc.value_counts(table[name].combine_chunks()).to_pylist():
            counts[str(pair["values"])] += pair["counts"]
    return counts if counts.keys() <= {status.value for status in Status} else None


def section(
    config: RunConfig,
    checkpoint: Checkpoint,
    format_: AnswerFormat | None,
    *,
    dtype: str,
    num_rows: int,
    counts: Counter[str] | None,
) -> str:
    """Markdown: model and revision, rows by status, sampling, prompt and schema."""
    rows = [
        ("model", f"`{_shown_name(checkpoint.name)}`"),
        ("revision", f"`{checkpoint.revision}`" if checkpoint.revision else "none"),
        ("adapter", "none" if checkpoint.adapter is None else f"`{checkpoint.adapter.path.name}`"),
        ("model content", f"SHA-256 `{checkpoint.content_hash}`"),
        ("precision", dtype),
        ("sampling", _sampling(config.sampling)),
        ("rows", f"{num_rows:,}"),
    ]
    for status in Status:
        rows.append((status.value, _share(status.value, counts, num_rows)))
    parts = [
        _BEGIN,
        "## How the answers were made",
        f"Each row was answered by a language model through batchradix {VERSION}.",
        "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)]),
        *_prompt(config),
        *_answers(format_),
        _END,
    ]
    return "\n\n".join(parts)


def with_section(text: str, section_: str) -> str:
    """The text of a card with ``section_`` in the place of an earlier one, else at the end."""
    if SECTION.search(text):
        return SECTION.sub(lambda found: section_, text, count=1)
    return f"{text.rstrip()}\n\n{section_}\n".lstrip()


def _shown_name(model: str) -> str:
    """Where a model lies on somebody's disk is nobody else's business."""
    return Path(model).resolve().name if Path(model).exists() else model


def _share(status: str, counts: Counter[str] | None, num_rows: int) -> str:
    if counts is None:
        return "not recorded (no status column)"
    return f"{counts[status]:,} ({counts[status] / max(1, num_rows):.1%})"


def _sampling(sampling: SamplingOptions) -> str:
    plain = asdict(SamplingOptions())
    named = {name: value for name, value in asdict(sampling).items() if value != plain[name]}
    named = {"temperature": sampling.temperature} | named
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in named.items())


def _prompt(config: RunConfig) -> Iterable[str]:
    prompt = config.prompt
    given = {
        "template": prompt.template,
        "system": prompt.system,
        "instruction": prompt.instruction,
    }
    for name, text in given.items():
        if text is not None:
            yield f"### {name.capitalize()}"
            yield _fenced(text, "jinja" if name == "template" else "text")
    if prompt.column is not None:
        yield f"The row's text is the column `{prompt.column}`."
    if all(text is None for text in given.values()):
        yield "Prompts are the rows' own (column `prompt` or `messages`)."


def _answers(format_: AnswerFormat | None) -> Iterable[str]:
    if format_ is None:
        return
    text = format_.text
    language = "text"
    if format_.kind in ("json_schema", "choices") or format_.kind.startswith("tool_calls"):
        text, language = json.dumps(json.loads(text), indent=2, ensure_ascii=False), "json"
    yield f"### {'Schema' if format_.kind == 'json_schema' else format_.kind.capitalize()}"
    yield _fenced(text, language)


def _fenced(text: str, language: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
