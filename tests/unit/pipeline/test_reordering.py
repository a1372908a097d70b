"""``reorder_columns`` on whole jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchradix import pipeline
from batchradix.config import EngineOptions, PromptOptions, RunConfig, SamplingOptions
from batchradix.errors import OptionError, TemplateError
from batchradix.report.progress import Silent

MakeTinyModel = Callable[..., Path]
TEMPLATE = "Film:\nreview: {{ review }}\nname: {{ name }}\nplot: {{ plot }}\nGood?"


@pytest.fixture(scope="module")
def model(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov", context_length=4096))


def films(num_rows: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"review": f"view {n}", "name": f"film {n % 3}", "plot": "what happens " * (n % 3 + 2)}
        for n in range(num_rows)
    ]
    rows[4]["name"] = None
    rows[7]["plot"] = "rare"
    return rows


def job(model: str, rows: Any, template: str = TEMPLATE, **changes: Any) -> RunConfig:
    return RunConfig(
        input=rows,
        model=model,
        prompt=PromptOptions(template=template, reorder_columns=True, **changes),
        engine=EngineOptions(dtype="float32", num_threads=1),
        sampling=SamplingOptions(max_tokens=2),
    )


def test_rows_list_the_same_fields_and_share_more_of_them(model: str) -> None:
    rows = films(30)
    written = RunConfig(input=rows, model=model, prompt=PromptOptions(template=TEMPLATE))
    before, after = pipeline.plan(written), pipeline.plan(job(model, rows))
    assert after.prompt_tokens == before.prompt_tokens
    assert after.distinct_tokens < before.distinct_tokens / 2
    for row in (0, 5, 29):
        texts = [
            "".join(span.text for span in pipeline.preview(one, str(row)).view.spans)
            for one in (written, job(model, rows))
        ]
        assert sorted(texts[0].splitlines()) == sorted(texts[1].splitlines())
        assert "Film:\n" in texts[1]
        assert texts[1].endswith("\nGood?")
        assert texts[1] != texts[0]


def test_prompts_are_made_by_one_form_as_they_are_made_one_by_one(model: str) -> None:
    parts = pipeline.open_parts(job(model, films(12)), progress=Silent())
    for rows in parts.source.batches(None):
        batch = parts.prompts.encode(rows)
        for number, row in enumerate(rows):
            view = parts.prompts.explain(row)
            ids = [token for span in view.spans for token in span.ids]
            assert batch.tokens[number].tolist() == ids
            assert (number in batch.errors) == (view.error is not None) == (number == 4)


def test_an_engine_computes_what_the_plan_says(model: str) -> None:
    summary = pipeline.run(job(model, films(20))).summary
    assert (summary.ok, summary.errors) == (19, 1)
    assert summary.usage.computed_tokens == summary.distinct_tokens


def test_where_no_order_shares_more_the_template_stays(model: str) -> None:
    rows = [{"review": f"a{n}", "name": f"b{n}", "plot": f"c{n}"} for n in range(9)]
    said: list[str] = []

    class Progress(Silent):
        def message(self, text: str) -> None:
            said.append(text)

    parts = pipeline.open_parts(job(model, rows), progress=Progress())
    assert said == ["no order of the 3 fields shares more than the template's own"]
    [batch] = parts.source.batches(None)
    text = "".join(span.text for span in parts.prompts.explain(batch[2]).spans)
    assert text == "<bos>Film:\nreview: a2\nname: b2\nplot: c2\nGood?"
    pipeline.plan(job(model, []))


def test_a_template_that_lists_nothing_is_refused(model: str) -> None:
    with pytest.raises(TemplateError, match="needs a template that lists fields"):
        pipeline.plan(job(model, films(9), "{{ name }}: {{ plot }}"))
    with pytest.raises(OptionError, match="give a template"):
        PromptOptions(reorder_columns=True)
