"""``sort_passages`` on whole jobs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from batchradix import pipeline
from batchradix.config import (
    EngineOptions,
    OutputOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.errors import InputError, OptionError
from batchradix.report.progress import Silent

MakeTinyModel = Callable[..., Path]
TEMPLATE = "Passages: {{ passages }}\nQuestion: {{ question }}"
PASSAGES = ["the moon is far", "salt is white", "rain falls down", "glass breaks"]


@pytest.fixture(scope="module")
def model(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov", context_length=4096))


def rows_of() -> list[dict[str, Any]]:
    orders = list(itertools.permutations(PASSAGES, 3))
    return [
        {"question": f"what is {n}?", "passages": list(order)} for n, order in enumerate(orders)
    ]


def job(model: str, rows: Any, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {"template": TEMPLATE, "sort_passages": "passages"} | changes
    return RunConfig(
        input=rows,
        model=model,
        prompt=PromptOptions(**options),
        engine=EngineOptions(dtype="float32", num_threads=1),
        sampling=SamplingOptions(max_tokens=2),
    )


def text_of(config: RunConfig, row: int) -> str:
    return "".join(span.text for span in pipeline.preview(config, str(row)).view.spans)


def test_rows_show_the_same_passages_and_share_more_of_them(model: str) -> None:
    rows = rows_of()
    before = pipeline.plan(job(model, rows, sort_passages=None))
    after = pipeline.plan(job(model, rows))
    assert after.prompt_tokens == before.prompt_tokens
    assert after.distinct_tokens < before.distinct_tokens / 2
    shown = text_of(job(model, rows), 5)
    items = json.loads(shown.split("Passages: ")[1].split("\nQuestion")[0])
    assert sorted(items) == sorted(rows[5]["passages"])
    assert shown.endswith("Question: what is 5?")


def test_prompts_are_rearranged_and_columns_passed_through_are_not(
    model: str, tmp_path: Path
) -> None:
    rows = rows_of()
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "jobs.parquet")
    config = job(model, str(tmp_path / "jobs.parquet"))
    output = OutputOptions(path=tmp_path / "out.arrow", keep=("passages",))
    config = RunConfig(
        input=config.input,
        model=model,
        prompt=config.prompt,
        engine=config.engine,
        sampling=config.sampling,
        output=output,
    )
    summary = pipeline.run(config, progress=Silent()).summary
    assert summary.ok == len(rows)
    assert summary.usage.computed_tokens == pipeline.plan(config).distinct_tokens
    with pyarrow.ipc.open_file(tmp_path / "out.arrow") as file:
        assert file.read_all()["passages"].to_pylist() == [row["passages"] for row in rows]


def test_rows_without_a_list_stay_error_rows_and_items_may_be_objects(model: str) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "q", "passages": [{"text": word, "page": None} for word in order]}
        for order in itertools.permutations(PASSAGES)
    ]
    rows[3]["passages"] = None
    rows[4]["passages"] = []
    plan = pipeline.plan(job(model, rows))
    # the row without a list is an error row, the one with an empty list is not
    assert plan.rows - plan.planned_rows - plan.duplicates == 1
    assert (
        plan.distinct_tokens < pipeline.plan(job(model, rows, sort_passages=None)).distinct_tokens
    )


def test_the_places_of_a_template_take_the_items_in_their_new_order(model: str) -> None:
    rows = rows_of()
    template = "1. {{ passages.0 }}\n2. {{ passages.1 }}\n3. {{ passages.2 }}\n{{ question }}"
    before = pipeline.plan(job(model, rows, template=template, sort_passages=None))
    after = pipeline.plan(job(model, rows, template=template))
    assert after.distinct_tokens < before.distinct_tokens
    shown = text_of(job(model, rows, template=template), 7).removeprefix("<bos>").split("\n")[:3]
    assert [line[:2] for line in shown] == ["1.", "2.", "3."]
    assert {line[3:] for line in shown} == set(rows[7]["passages"])


def test_it_goes_with_columns_in_another_order(model: str) -> None:
    rows = [row | {"theme": f"theme {n % 2} " * 4} for n, row in enumerate(rows_of())]
    template = "Q:\nquestion: {{ question }}\nfound: {{ passages }}\ntheme: {{ theme }}\nA:"
    alone = pipeline.plan(job(model, rows, template=template, sort_passages=None))
    both = pipeline.plan(job(model, rows, template=template, reorder_columns=True))
    assert both.prompt_tokens == alone.prompt_tokens
    assert both.distinct_tokens < alone.distinct_tokens / 2


def test_what_it_cannot_order_is_refused_before_weights(model: str) -> None:
    with pytest.raises(OptionError, match="do not show; they show passages, question"):
        pipeline.plan(job(model, rows_of(), sort_passages="other"))
    with pytest.raises(InputError, match=r"row 0, column question.*this is str; name a column of"):
        pipeline.plan(job(model, rows_of(), sort_passages="question"))
    with pytest.raises(OptionError, match="give a template"):
        PromptOptions(sort_passages="passages")


def test_nothing_changes_where_no_order_saves_anything(model: str) -> None:
    rows = [{"question": "q", "passages": [f"{n} a", f"{n} b"]} for n in range(9)]
    assert text_of(job(model, rows), 3) == text_of(job(model, rows, sort_passages=None), 3)
