"""Several questions to a row, several parts of it: what goes with them, what they make of a job."""

from __future__ import annotations

from typing import Any

from batchradix.config import RunConfig
from batchradix.errors import OptionError
from batchradix.jobs.base import JobSource
from batchradix.schema.answer_format import AnswerFormat
from batchradix.schema.questions import QuestionFormats
from batchradix.schema.row_formats import RESPONSE_FORMAT
from batchradix.schema.tools import ToolSet


def check_expansion(config: RunConfig, source: JobSource) -> None:
    """Refuses, before anything is read, what rows of several results do not go with.

    Raises `OptionError`.
    """
    long_rows = config.long_rows
    if config.shard is not None and source.starts is not None:
        raise OptionError(
            f"`shard` cannot part {source.name}, whose rows ask for several answers each; run "
            f"it whole, or give every answer a row"
        )
    if long_rows.overflow != "error" and config.prompt.sort_passages is not None:
        raise OptionError(
            "`sort_passages` and `overflow` exclude each other: a text that was cut is no list of "
            "passages; leave out one of them"
        )
    what = "`questions`" if config.questions else "`overflow` chunk" if long_rows.chunks else None
    if what is None:
        return
    if source.is_requests:
        raise OptionError(
            f"{what} is for tables of rows, and {source.name} is an OpenAI batch file, whose "
            f"requests say themselves what they want; leave it out"
        )
    given = {
        "shard": config.shard,
        "tools": config.schema if isinstance(config.schema, ToolSet) else None,
        "schema_column": config.schema_column,
        "probabilities": config.sampling.probabilities or None,
        "choose": config.sampling.choose if config.sampling.choose != "walk" else None,
        "reorder_columns": config.prompt.reorder_columns or None,
        "sort_passages": config.prompt.sort_passages,
    }
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise OptionError(
            f"{what} and `{name}` exclude each other: a row has several prompts then; leave out "
            f"one of them"
        )
    if RESPONSE_FORMAT in (source.columns or ()):
        raise OptionError(
            f"{what} needs the same answers for every row, and rows of {source.name} have schemas "
            f"of their own in the column {RESPONSE_FORMAT}; rename the column or leave it out"
        )


def expansion_identity(config: RunConfig, own: AnswerFormat | None) -> dict[str, Any]:
    """What questions and long rows add to the identity of a job; nothing where there are none.

    How answers to parts combine is no part of it: that is made anew from the answers.
    """
    found: dict[str, Any] = {}
    if config.questions:
        answers = QuestionFormats(config.questions, own).identity
        found["questions"] = [
            [*answer, question.text, question.max_tokens]
            for answer, question in zip(answers, config.questions, strict=True)
        ]
    long_rows = config.long_rows
    if long_rows.overflow != "error":
        found["overflow"] = long_rows.overflow
    if long_rows.chunks:
        found |= {
            "chunk_tokens": long_rows.chunk_tokens,
            "chunk_overlap": long_rows.chunk_overlap,
        }
    return found
