"""What would make a planned job share more, and what memory its sharing takes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from batchradix.config import DEFAULT_BATCH_SIZE
from batchradix.pipeline.field_table import FieldTable, read_fields
from batchradix.pipeline.parts import Parts
from batchradix.pipeline.planned import Planned, demand
from batchradix.plan.cached import LintSummary, MemorySummary
from batchradix.plan.lint import Fields, Finding, lint
from batchradix.plan.memory import memory_curve
from batchradix.prompts.fields import TemplateFields
from batchradix.report.machine import has_bf16
from batchradix.settings import element_bytes, resolve_dtype

_MOST_ROWS = 1 << 18  # looked at field by field
_SHOWN_KINDS = 64
_KINDS = (
    ("a date or time", re.compile(r"\s*\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?\s*", re.DOTALL)),
    ("a date or time", re.compile(r"\s*\d{1,2}[./:]\d{1,2}([./:]\d{2,4})?\s*")),
    ("a number", re.compile(r"\s*[-+]?\d[\d.,]*\s*")),
    ("an id", re.compile(r"\s*[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\s*")),
)


def find_lint(parts: Parts) -> tuple[LintSummary, ...]:
    """What breaks sharing in the prompts of a job whose template stays as it is, dearest first.

    Looks at the first 262,144 rows at most. Fields are counted in tokens by their length.
    """
    template = parts.prompts.fields()
    if template is None or parts.config.prompt.reorder_columns:
        return ()
    table = read_fields(parts.source, parts.prompts.required_columns, template, _MOST_ROWS)
    is_place = np.array([field.name is not None for field in template.fields], dtype=np.bool_)
    fields = Fields(codes=table.codes, tokens=table.tokens, is_place=is_place)
    return tuple(_summary(template, table, fields, finding) for finding in lint(fields))


def memory_summary(parts: Parts, planned: Planned) -> MemorySummary:
    """The memory that a job's sharing takes; keys and values as the CPU would hold them."""
    model = parts.checkpoint.config
    curve = memory_curve(planned.alone, planned.rows.lengths)
    batch_size = parts.config.engine.batch_size or DEFAULT_BATCH_SIZE
    dtype = resolve_dtype(parts.config.engine.dtype, device="cpu", has_bf16=has_bf16())
    return MemorySummary(
        needed_tokens=curve.needed_tokens,
        demand_tokens=demand(planned, planned.tree, batch_size),
        batch_size=batch_size,
        token_bytes=model.num_kv_elements_per_token * element_bytes(dtype),
        curve=tuple(curve.points()),
    )


def _summary(
    template: TemplateFields, table: FieldTable, fields: Fields, finding: Finding
) -> LintSummary:
    found = [template.fields[number] for number in finding.fields]
    return LintSummary(
        lines=tuple(field.line for field in found),
        places=tuple(str(field.name) for field in found),
        kinds=tuple(_kind(table.samples[number]) for number in finding.fields),
        values=tuple(fields.num_values(number) for number in finding.fields),
        rows=len(fields),
        lost_tokens=finding.lost_tokens,
    )


def _kind(texts: Sequence[str]) -> str:
    shown = texts[:_SHOWN_KINDS]
    for name, pattern in _KINDS:
        if all(map(pattern.fullmatch, shown)):
            return name
    return "a text"
