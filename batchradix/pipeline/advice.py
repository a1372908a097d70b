"""What would make a planned job share more, and what memory its sharing takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchradix.config import DEFAULT_BATCH_SIZE, element_bytes, resolve_dtype
from batchradix.pipeline.parts import Parts
from batchradix.pipeline.planned import Planned, demand
from batchradix.plan.cached import LintSummary, MemorySummary
from batchradix.plan.lint import Fields, Finding, lint
from batchradix.plan.memory import memory_curve
from batchradix.prompts.fields import TemplateFields
from batchradix.report.machine import has_bf16

_MOST_ROWS = 1 << 18  # looked at field by field
_SAMPLED_TEXTS = 256  # of a place, encoded to learn how many tokens its characters make
_SHOWN_KINDS = 64
_KINDS = (
    ("a date or time", re.compile(r"\s*\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?\s*", re.DOTALL)),
    ("a date or time", re.compile(r"\s*\d{1,2}[./:]\d{1,2}([./:]\d{2,4})?\s*")),
    ("a number", re.compile(r"\s*[-+]?\d[\d.,]*\s*")),
    ("an id", re.compile(r"\s*[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\s*")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """The fields of a job's rows, and some texts of each."""

    fields: Fields
    samples: Sequence[Sequence[str]]


def find_lint(parts: Parts) -> tuple[LintSummary, ...]:
    """What breaks sharing in the prompts of a job with a template, the dearest first.

    Looks at the first 262,144 rows at most. Fields are counted in tokens by their length.
    """
    template = parts.prompts.fields()
    if template is None:
        return ()
    read = _read(parts, template)
    return tuple(_summary(template, read, finding) for finding in lint(read.fields))


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


def _read(parts: Parts, template: TemplateFields) -> _Read:
    codes: list[list[int]] = []
    lengths: list[list[int]] = []
    samples: list[dict[str, None]] = [{} for _ in template.fields]
    for rows in parts.source.batches(parts.prompts.required_columns):
        for row in rows:
            texts = template.texts(row)
            if texts is None or len(codes) == _MOST_ROWS:
                continue
            codes.append([hash(text) for text in texts])
            lengths.append(list(map(len, texts)))
            for text, known in zip(texts, samples, strict=True):
                if len(known) < _SAMPLED_TEXTS:
                    known[text] = None
        if len(codes) == _MOST_ROWS:
            break
    shape = (len(codes), len(template.fields))
    hashes = np.array(codes, dtype=np.int64).reshape(shape)
    tokens = np.array(lengths, dtype=np.float64).reshape(shape)
    numbers = np.zeros(shape, dtype=np.int64)
    for field, known in enumerate(samples):
        texts = list(known)
        size = max(1, sum(map(len, texts)))
        tokens[:, field] *= sum(template.num_tokens(texts)) / size
        if len(codes):
            numbers[:, field] = np.unique(hashes[:, field], return_inverse=True)[1]
    is_place = np.array([field.name is not None for field in template.fields], dtype=np.bool_)
    fields = Fields(codes=numbers, tokens=np.rint(tokens).astype(np.int32), is_place=is_place)
    return _Read(fields=fields, samples=[list(known) for known in samples])


def _summary(template: TemplateFields, read: _Read, finding: Finding) -> LintSummary:
    fields = [template.fields[number] for number in finding.fields]
    return LintSummary(
        lines=tuple(field.line for field in fields),
        places=tuple(str(field.name) for field in fields),
        kinds=tuple(_kind(read.samples[number]) for number in finding.fields),
        values=tuple(read.fields.num_values(number) for number in finding.fields),
        rows=len(read.fields),
        lost_tokens=finding.lost_tokens,
    )


def _kind(texts: Sequence[str]) -> str:
    shown = texts[:_SHOWN_KINDS]
    for name, pattern in _KINDS:
        if all(map(pattern.fullmatch, shown)):
            return name
    return "a text"
