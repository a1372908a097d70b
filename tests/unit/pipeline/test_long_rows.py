"""Rows that do not fit: an error, less of their text, or its parts with one answer of theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchradix import pipeline
from batchradix.config import (
    EngineOptions,
    OutputOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.errors import OptionError
from batchradix.row_options import LongRows, parse_combine
from batchradix.schema.answer_format import answer_format
from batchradix.schema.questions import read_questions

MakeTinyModel = Callable[..., Path]
CONTEXT = 128
# A token is a byte, and the tiny model continues the alphabet from the last one.
LONG = "".join(chr(ord("a") + i % 26) for i in range(300)) + "m"
ROWS = [{"id": "short", "text": "a"}, {"id": "long", "text": LONG}, {"id": "b", "text": "b"}]
MESSAGES = [
    [{"role": "system", "content": "S"}, {"role": "user", "content": LONG}],
    [{"role": "user", "content": "c"}],
]


@pytest.fixture(scope="module")
def roomy(tiny_model_folder: MakeTinyModel) -> str:
    """With room for the answers to the parts and what is said of them."""
    return str(tiny_model_folder("markov", context_length=320))


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov", context_length=CONTEXT))


def config(model: str, rows: Any = None, **changes: Any) -> RunConfig:
    long_rows = {
        name: changes.pop(name)
        for name in ("overflow", "chunk_tokens", "chunk_overlap")
        if name in changes
    }
    combine = parse_combine(changes.pop("combine", None))
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=4),
        "prompt": PromptOptions(template="Text: {{ text }}"),
        "long_rows": LongRows(**long_rows, combine=combine),
    }
    return RunConfig(input=ROWS if rows is None else rows, model=model, **options | changes)


def table(job: RunConfig) -> pa.Table:
    found = pipeline.run(job).table
    assert found is not None
    return found


def stop_after(steps: int) -> Callable[[], int | None]:
    left = iter(range(steps))
    return lambda: 15 if next(left, None) is None else None


def rows_of(job: RunConfig) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table(job).to_pylist()
    return rows


def test_a_row_that_is_too_long_is_an_error_row_unless_told_otherwise(markov: str) -> None:
    rows = rows_of(config(markov))
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]
    assert rows[1]["error"]["code"] == "prompt_too_long"
    assert "cut_tokens" not in rows[1]


@pytest.mark.parametrize("overflow", ["truncate-left", "truncate-middle"])
def test_a_truncated_row_fills_the_context_and_says_what_it_lost(
    markov: str, overflow: str
) -> None:
    job = config(markov, overflow=overflow)
    outcome = pipeline.run(job)
    assert outcome.table is not None
    rows = outcome.table.to_pylist()
    assert [row["text"] for row in rows] == ["bcde", "nopq", "cdef"]
    assert [row["cut_tokens"] > 0 for row in rows] == [False, True, False]
    assert rows[1]["prompt_tokens"] == CONTEXT - 4
    view = pipeline.preview(job, "long").view.text
    assert view.startswith("<bos>Text: ")
    kept = view.removeprefix("<bos>Text: ")
    if overflow == "truncate-left":
        assert LONG.endswith(kept)
        assert rows[1]["cut_tokens"] == len(LONG) - len(kept)
    else:
        head, tail = kept.split("\n[...]\n")
        assert LONG.startswith(head)
        assert LONG.endswith(tail)
        assert rows[1]["cut_tokens"] == len(LONG) - len(head) - len(tail)
    assert (outcome.summary.cut_rows, outcome.summary.to_json()["cut_rows"]) == (1, 1)


def test_messages_lose_of_what_the_user_says_and_prompts_of_themselves(markov: str) -> None:
    rows = [{"messages": messages} for messages in MESSAGES]
    job = config(markov, rows, prompt=PromptOptions(), overflow="truncate-left")
    text = pipeline.preview(job, "0").view.text
    assert text.startswith("<bos><|system|>S<|end|><|user|>")
    assert text.endswith("lmnm<|end|><|assistant|>")
    assert [row["cut_tokens"] > 0 for row in rows_of(job)] == [True, False]
    job = config(markov, [{"prompt": LONG}], prompt=PromptOptions(), overflow="truncate-left")
    assert rows_of(job)[0]["text"] == "nopq"


def test_a_row_whose_template_alone_is_too_long_stays_an_error(markov: str) -> None:
    prompt = PromptOptions(template=f"{'x' * 200}{{{{ text }}}}")
    for overflow in ("truncate-left", "chunk"):
        rows = rows_of(config(markov, prompt=prompt, overflow=overflow))
        assert {row["error"]["code"] for row in rows} == {"prompt_too_long"}


def test_all_parts_of_a_text_are_answered_and_one_row_comes_out(markov: str) -> None:
    job = config(markov, overflow="chunk", chunk_overlap=8)
    outcome = pipeline.run(job)
    assert outcome.table is not None
    rows = outcome.table.to_pylist()
    assert [row["parts"] is None for row in rows] == [True, False, True]
    views = [v.view.text.removeprefix("<bos>Text: ") for v in pipeline.previews(job, "long")]
    assert views[0] + "".join(view[8:] for view in views[1:]) == LONG
    assert all(a[-8:] == b[:8] for a, b in pairwise(views))
    expected = [
        "".join(chr(97 + (ord(view[-1]) - 96 + i) % 26) for i in range(4)) for view in views
    ]
    assert [part["text"] for part in rows[1]["parts"]] == expected
    assert rows[1]["text"] == "\n\n".join(dict.fromkeys(expected))
    assert rows[1]["completion_tokens"] == 4 * len(views)
    assert (outcome.summary.rows, outcome.summary.parted_rows) == (3, 1)
    assert outcome.summary.usage.computed_tokens == outcome.summary.distinct_tokens


def test_short_parts_can_be_asked_for(markov: str) -> None:
    job = config(markov, overflow="chunk", chunk_tokens=50)
    assert [len(v.view.ids) for v in pipeline.previews(job, "long")] == [57] * 6 + [8]
    assert len(rows_of(job)[1]["parts"]) == 7


def test_values_of_parts_combine_by_field(markov: str) -> None:
    schema = answer_format(fields="kind: aa|bb, sure: bool")
    job = config(markov, schema=schema, overflow="chunk", sampling=SamplingOptions(max_tokens=30))
    row = rows_of(job)[1]
    kinds = [part["value"]["kind"] for part in row["parts"]]
    assert row["value"]["kind"] == max(sorted(set(kinds)), key=kinds.count)
    assert row["text"].startswith('{"kind":')
    job = replace(job, long_rows=replace(job.long_rows, combine=(("kind", "first"),)))
    assert rows_of(job)[1]["value"]["kind"] == kinds[0]


def test_the_model_is_asked_over_the_answers_to_the_parts(roomy: str) -> None:
    job = config(roomy, overflow="chunk", chunk_tokens=120, combine="ask")
    outcome = pipeline.run(job)
    assert outcome.table is not None
    row = outcome.table.to_pylist()[1]
    last = row["parts"][-1]["text"]
    # Its prompt ends in the last part's answer, which the model goes on from.
    assert row["text"] == "".join(chr(97 + (ord(last[-1]) - 96 + i) % 26) for i in range(4))
    assert row["completion_tokens"] == 4 * (len(row["parts"]) + 1)
    assert outcome.summary.ok == 3
    assert outcome.summary.usage.computed_tokens == outcome.summary.distinct_tokens


def test_what_is_asked_draws_by_its_row_alone(tiny_model_folder: MakeTinyModel) -> None:
    changes: dict[str, Any] = {
        "overflow": "chunk",
        "chunk_tokens": 10,
        "combine": "ask",
        "schema": answer_format(choices=["a", "b", "c", "d"]),
        "sampling": SamplingOptions(max_tokens=4, temperature=5.0),
    }
    model = str(tiny_model_folder("random", context_length=320))
    rows = [{"id": f"{i}", "text": f"{i:010}{i + 50:010}"} for i in range(24)]
    together = rows_of(config(model, rows, **changes))
    said = [tuple(part["text"] for part in row["parts"]) for row in together]
    repeated = [i for i, texts in enumerate(said) if texts in said[:i]][:4]
    assert repeated, "the prompts over equal answers are equal"
    for i in repeated:
        (alone,) = rows_of(config(model, [rows[i]], **changes))
        assert alone["parts"] == together[i]["parts"]
        assert alone["value"] == together[i]["value"]


@pytest.mark.parametrize("combine", ["union", "ask"])
def test_a_run_goes_on_wherever_it_was_stopped(roomy: str, tmp_path: Path, combine: str) -> None:
    path = tmp_path / "out.arrow"
    job = config(roomy, overflow="chunk", chunk_tokens=120, combine=combine)
    whole = table(job)
    job = replace(job, output=OutputOptions(path=path, keep=()))
    for steps in (0, 2, 4, 6, 9):
        pipeline.run(job, stop_requested=stop_after(steps))
    assert pipeline.run(job).summary.ok == 3
    with pa.memory_map(str(path)) as source:
        found = pa.ipc.open_file(source).read_all()
    assert found.to_pylist() == whole.select(found.column_names).to_pylist()
    before = path.read_bytes()
    again = pipeline.run(job)
    assert again.summary.usage.forward_steps == 0
    assert path.read_bytes() == before
    # How answers combine is made anew from what is committed, but for what the model is asked.
    other = replace(job, long_rows=replace(job.long_rows, combine=(("", "first"),)))
    assert pipeline.run(other).summary.usage.forward_steps == 0


def test_questions_see_the_same_parts_and_share_them(markov: str, roomy: str) -> None:
    questions = read_questions(
        {"a": "After b", "c": {"question": "A longer one, of d", "max_tokens": 9}}
    )
    for model, combine in ((markov, None), (roomy, "a=ask")):
        changes = {"overflow": "chunk", "chunk_tokens": 80, "combine": combine}
        job = config(model, questions=questions, **changes)
        outcome = pipeline.run(job)
        assert outcome.table is not None
        row = outcome.table.to_pylist()[1]
        assert row["value"] == {"a": "cdef", "c": "efghijklm"}
        lengths = {len(one["parts"]) for one in row["questions"].values()}
        assert len(lengths) == 1
        texts = [shown.view.text for shown in pipeline.previews(job, "long")]
        parts = [text.split("\n\n")[0] for text in texts]
        assert parts[: len(parts) // 2] == parts[len(parts) // 2 :]
        assert outcome.summary.usage.computed_tokens == outcome.summary.distinct_tokens
    job = config(markov, questions=questions, overflow="truncate-left")
    parts = [shown.view.text.split("\n\n")[0] for shown in pipeline.previews(job, "long")]
    assert parts[0] == parts[1]
    row = rows_of(job)[1]
    assert row["cut_tokens"] == len(LONG) - len(parts[0].removeprefix("<bos>Text: "))


def test_requests_are_truncated_and_answered_as_ever(markov: str, tmp_path: Path) -> None:
    requests = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": markov, "messages": messages, "n": 2},
        }
        for number, messages in enumerate(MESSAGES)
    ]
    job = config(markov, requests, prompt=PromptOptions(), overflow="truncate-left")
    rows = rows_of(job)
    assert [len(row["samples"]) for row in rows] == [2, 2]
    assert [row["cut_tokens"] > 0 for row in rows] == [True, False]
    path = tmp_path / "out.jsonl"
    output = OutputOptions(path=path, format="openai")
    assert pipeline.run(replace(job, output=output)).summary.cut_rows == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(line["response"]["body"]["choices"]) for line in lines] == [2, 2]
    with pytest.raises(OptionError, match="OpenAI batch file"):
        pipeline.run(config(markov, requests, prompt=PromptOptions(), overflow="chunk"))


def test_failed_rows_go_to_their_file_whole(markov: str, tmp_path: Path) -> None:
    source, failed = tmp_path / "in.jsonl", tmp_path / "failed.jsonl"
    texts = [LONG, "b"]
    source.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    output = OutputOptions(path=tmp_path / "out.arrow", failed_rows=failed)
    schema = answer_format(fields="all: [str]")
    sampling = SamplingOptions(max_tokens=30)
    job = config(markov, str(source), schema=schema, overflow="chunk", sampling=sampling)
    pipeline.run(replace(job, output=output))
    assert [json.loads(line)["text"] for line in failed.read_text().splitlines()] == texts


def test_results_stay_where_another_overflow_is_asked_for(markov: str, tmp_path: Path) -> None:
    output = OutputOptions(path=tmp_path / "out.arrow")
    pipeline.run(config(markov, output=output))
    again = OutputOptions(path=tmp_path / "out.arrow", reuse=True)
    for overflow in ("truncate-left", "chunk"):
        summary = pipeline.run(config(markov, overflow=overflow, output=again)).summary
        assert (summary.rows, summary.ok) == (3, 3)
        assert summary.resumed_rows == 2


def test_answers_that_are_too_long_to_ask_over_are_an_error_that_says_so(markov: str) -> None:
    row = rows_of(config(markov, overflow="chunk", combine="ask"))[1]
    assert (row["status"], row["error"]["code"]) == ("error", "prompt_too_long")
    assert row["error"]["message"].startswith("asked over the answers to its parts, row 1: ")
    assert {part["status"] for part in row["parts"]} == {"ok"}


def test_a_row_with_a_bad_part_is_not_asked_and_keeps_the_others(markov: str) -> None:
    schema = answer_format(fields="all: [str]")  # the model does not end such a list
    for combine in ("union", "ask"):
        job = config(
            markov,
            schema=schema,
            overflow="chunk",
            combine=combine,
            sampling=SamplingOptions(max_tokens=30),
        )
        row = rows_of(job)[1]
        assert row["status"] == "truncated"
        assert row["value"] is None
        assert {part["status"] for part in row["parts"]} == {"truncated"}


def test_a_shard_of_truncated_rows_joins_and_one_of_parts_is_refused(
    markov: str, tmp_path: Path
) -> None:
    from batchradix.config import Shard

    whole = tmp_path / "out.arrow"
    job = config(markov, overflow="truncate-left")
    single = table(job).to_pylist()
    for number in (1, 2):
        shard = Shard(number, 2)
        output = OutputOptions(path=shard.part_of(whole))
        pipeline.run(replace(job, shard=shard, output=output))
    pipeline.merge(whole, [])
    with pa.memory_map(str(whole)) as source:
        assert pa.ipc.open_file(source).read_all().to_pylist() == single
    job = config(markov, overflow="chunk")
    with pytest.raises(OptionError, match="exclude each other"):
        pipeline.run(replace(job, shard=Shard(1, 2), output=OutputOptions(path=whole)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"overflow": "cut"}, "overflow"),
        ({"chunk_tokens": 9}, "overflow"),
        ({"overflow": "chunk", "chunk_tokens": 9, "chunk_overlap": 9}, "less overlap"),
        ({"overflow": "chunk", "combine": "best"}, "combine"),
        ({"overflow": "chunk", "combine": "first,vote"}, "two rules"),
        ({"overflow": "chunk", "combine": "nope=first"}, "'nope'"),
    ],
)
def test_options_that_cannot_be_are_refused_in_a_sentence(
    markov: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        pipeline.run(config(markov, **changes))
