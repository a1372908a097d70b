"""The real model reads real notices: guesses save steps and change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchradix import pipeline
from batchradix.config import EngineOptions, PromptOptions, RunConfig, SamplingOptions

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

RECIPE = Path(__file__).parents[2] / "recipes" / "debian_copyrights"
SCHEMA = {
    "type": "object",
    "properties": {"holder": {"type": "string"}, "licence": {"type": "string"}},
    "required": ["holder", "licence"],
    "additionalProperties": False,
}


def test_extracted_fields_are_the_same_with_and_without_guesses() -> None:
    tables, usages = [], []
    for speculate in ("off", 4):
        outcome = pipeline.run(
            RunConfig(
                input=str(RECIPE / "jobs.parquet"),
                limit=8,
                model="smollm2-135m",
                schema=SCHEMA,
                prompt=PromptOptions(template=(RECIPE / "prompt.jinja").read_text()),
                sampling=SamplingOptions(max_tokens=48),
                engine=EngineOptions(dtype="float32", speculate=speculate),  # type: ignore[arg-type]
            )
        )
        tables.append(_answers(outcome.table))
        usages.append(outcome.summary.usage)
    assert tables[0] == tables[1]
    before, after = usages
    assert after.accepted_tokens > 0
    assert after.decode_steps < before.decode_steps
    assert after.completion_tokens == before.completion_tokens
    assert after.computed_tokens == before.computed_tokens


def _answers(table: Any) -> list[Any]:
    columns = ["text", "status", "finish_reason", "completion_tokens"]
    rows: list[Any] = table.select(columns).to_pylist()
    return rows
