"""What `pipeline.plan` advises about a whole job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from batchradix import pipeline
from batchradix.config import PromptOptions, RunConfig
from batchradix.pipeline.field_table import read_fields
from batchradix.report.progress import Silent

MakeTinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("random", context_length=4096))


def test_a_date_before_the_instruction_is_named_with_its_line_and_what_it_costs(model: str) -> None:
    rows = [{"day": f"2026-01-{n % 9 + 10}", "text": f"text {n}"} for n in range(36)]
    rows.append({"day": None, "text": "a row without a prompt"})
    front, instruction = "Report\nof {{ day }}\n", "Say what this is. " * 20
    template = front + instruction + "\n{{ text }}\nAnswer:"
    job = RunConfig(input=rows, model=model, prompt=PromptOptions(template=template))
    [finding] = pipeline.plan(job).lint
    assert (finding.lines, finding.places, finding.kinds) == ((2,), ("day",), ("a date or time",))
    assert (finding.values, finding.rows) == ((9,), 36)
    moved = RunConfig(
        input=rows,
        model=model,
        prompt=PromptOptions(
            template="Report\nof " + instruction + "\n{{ day }}\n{{ text }}\nAnswer:"
        ),
    )
    saved = pipeline.plan(job).distinct_tokens - pipeline.plan(moved).distinct_tokens
    assert finding.lost_tokens == pytest.approx(saved, rel=0.1)
    assert pipeline.plan(moved).lint == ()


def test_jobs_without_places_have_no_lint(model: str) -> None:
    assert pipeline.plan(RunConfig(input=[{"prompt": "a"}], model=model)).lint == ()
    no_rows = RunConfig(input=[], model=model, prompt=PromptOptions(template="{{ a }} b {{ c }}"))
    assert pipeline.plan(no_rows).lint == ()


def test_memory_is_what_neighbours_share_and_what_a_batch_can_take(model: str) -> None:
    rows = [{"prompt": "shared beginning " + end} for end in ("a", "b", "b")]
    plan = pipeline.plan(RunConfig(input=rows, model=model))
    assert plan.memory is not None
    assert plan.memory.needed_tokens == plan.prompt_tokens * 2 // 3 - plan.distinct_tokens
    tokens, share = plan.memory.curve[-1]
    assert (tokens, share) == (plan.memory.needed_tokens, tokens / (plan.prompt_tokens * 2 / 3))
    assert plan.memory.demand_tokens == plan.distinct_tokens + 2 * 1024


def test_fields_are_read_of_so_many_rows_that_have_any(model: str) -> None:
    values = ["a", None, "bb", "a", "ccc", "bb"]
    rows = [{"left": value, "right": "same"} for value in values]
    template = "{{ left }} and {{ right }}"
    job = RunConfig(input=rows, model=model, prompt=PromptOptions(template=template))
    parts = pipeline.open_parts(job, progress=Silent())
    fields = parts.prompts.fields()
    assert fields is not None
    table = read_fields(parts.source, parts.prompts.required_columns, fields, 4)
    assert table.rows.tolist() == [0, 2, 3, 4]
    assert table.codes.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [2, 0, 0]]
    assert table.samples == [["a", "bb", "ccc"], [" and "], ["same"]]
    assert len(read_fields(parts.source, parts.prompts.required_columns, fields).rows) == 5
