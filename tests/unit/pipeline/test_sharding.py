"""Parts of a job run by several workers, and joined, against one run of the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instant_engine import InstantEngine

from batchradix import pipeline
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions, Shard
from batchradix.errors import InputError, OptionError, OutputMismatchError, SinkError
from batchradix.report.summary import Summary

MakeTinyModel = Callable[..., Path]
ENGINE = EngineOptions(dtype="float32", num_threads=1)
KIND = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "bc", "bd"]}, "n": {"enum": [1, 7]}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


class Yes(InstantEngine):
    def text(self, row: int) -> str:
        return "yes"


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


def job(model: str, rows: Any, output: Path, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": ENGINE,
        "sampling": SamplingOptions(max_tokens=4),
        "output": OutputOptions(path=output, keep="all"),
    }
    return RunConfig(input=rows, model=model, **options | changes)


def part_of(config: RunConfig, number: int, count: int) -> RunConfig:
    shard, path = Shard(number, count), config.output.path
    assert path is not None
    return replace(config, shard=shard, output=replace(config.output, path=shard.part_of(path)))


def run_parts(config: RunConfig, count: int) -> list[Summary]:
    return [pipeline.run(part_of(config, number, count)).summary for number in range(1, count + 1)]


def documents(num_rows: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"id": f"r{n}", "prompt": f"document {n % 3} {'x' * (n % 3)} asks {n % 11}", "size": n}
        for n in range(num_rows)
    ]
    rows[num_rows // 2]["prompt"] = None
    return rows


@pytest.mark.parametrize("extension", [".arrow", ".parquet", ".jsonl", ".csv"])
def test_parts_join_to_the_bytes_that_one_run_writes(
    markov: str, tmp_path: Path, extension: str
) -> None:
    rows = documents(40)
    whole, joined = tmp_path / f"whole{extension}", tmp_path / f"joined{extension}"
    pipeline.run(job(markov, rows, whole))
    summaries = run_parts(job(markov, rows, joined), 3)
    merged = pipeline.merge(joined)
    assert joined.read_bytes() == whole.read_bytes()
    assert (merged.num_rows, merged.num_parts) == (40, 3)
    assert merged.to_json()["errors"] == 1
    assert [s.rows for s in summaries if s.rows] == [s.rows for s in summaries]
    assert sum(s.rows for s in summaries) == 40
    for summary in summaries:
        assert summary.usage.computed_tokens == summary.distinct_tokens
    assert not joined.with_name(joined.name + ".batchradix").exists()


@pytest.mark.parametrize("unnest", [False, True])
def test_typed_answers_and_categories_join_to_the_same_bytes(
    tiny_model_folder: MakeTinyModel, tmp_path: Path, unnest: bool
) -> None:
    model = str(tiny_model_folder("const", prefer='7}"b1d'))
    sizes = pa.DictionaryArray.from_arrays(
        pa.array([2, 0, 1] * 8, pa.int8()), ["small", "large", "huge", "never"], ordered=True
    )
    rows = pa.table({"prompt": [f"p{n // 6} {n % 6}" for n in range(24)], "size": sizes})
    whole, joined = tmp_path / "whole.arrow", tmp_path / "joined.arrow"
    config = RunConfig(
        input=rows,
        model=model,
        schema=KIND,
        engine=ENGINE,
        sampling=SamplingOptions(max_tokens=40),
        output=OutputOptions(path=whole, keep="all", unnest=unnest),
    )
    pipeline.run(config)
    run_parts(replace(config, output=replace(config.output, path=joined)), 2)
    pipeline.merge(joined)
    assert joined.read_bytes() == whole.read_bytes()
    with pa.memory_map(str(joined)) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table["size"].to_pylist() == rows["size"].to_pylist()
    assert table["status"].to_pylist() == ["ok"] * 24


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=9),
    st.integers(1, 4),
)
def test_whatever_the_rows_their_parts_hold_each_once(
    markov: str, tmp_path_factory: pytest.TempPathFactory, seeds: list[Any], count: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    rows = pa.table(
        {
            "prompt": pa.array(
                [None if bad else "ab" * start + "c" * end for start, end, bad in seeds],
                pa.string(),
            )
        }
    )
    whole, joined = folder / "whole.arrow", folder / "joined.arrow"
    pipeline.run(job(markov, rows, whole), engines=Yes())
    engines = [Yes() for _ in range(count)]
    summaries = [
        pipeline.run(part_of(job(markov, rows, joined), number, count), engines=engine).summary
        for number, engine in enumerate(engines, 1)
    ]
    pipeline.merge(joined)
    assert joined.read_bytes() == whole.read_bytes()
    assert sum(summary.rows for summary in summaries) == len(rows)
    submitted = [row for engine in engines for row in engine.submitted]
    assert len(set(submitted)) == len(submitted) == len({s[:2] for s in seeds if not s[2]})


def test_equal_rows_run_once_in_one_part_and_a_sampled_job_draws_what_one_run_draws(
    tiny_model_folder: MakeTinyModel, tmp_path: Path
) -> None:
    model = str(tiny_model_folder("random"))
    rows = [{"prompt": f"p{n % 5}", "temperature": n % 2} for n in range(30)]
    whole, joined = tmp_path / "whole.parquet", tmp_path / "joined.parquet"
    one = pipeline.run(job(model, rows, whole)).summary
    parts = run_parts(job(model, rows, joined), 4)
    pipeline.merge(joined)
    assert sum(part.duplicate_rows for part in parts) == one.duplicate_rows > 0
    assert joined.read_bytes() == whole.read_bytes()


def test_a_part_stands_alone_and_is_resumed_like_any_run(markov: str, tmp_path: Path) -> None:
    config = part_of(job(markov, documents(20), tmp_path / "out.csv"), 2, 3)
    stops = iter([None, 15])
    stopped = pipeline.run(config, stop_requested=lambda: next(stops, None)).summary
    assert stopped.stopped_by == 15
    assert not (tmp_path / "out.csv.2-of-3.arrow").exists()
    done = pipeline.run(config).summary
    with pa.memory_map(str(tmp_path / "out.csv.2-of-3.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert done.resumed_rows == stopped.rows
    assert len(table) == done.rows == stopped.rows + stopped.rows_left < 20
    numbers = table["row"].to_pylist()
    assert numbers == sorted(numbers)
    assert table["id"].to_pylist() == [f"r{n}" for n in numbers]
    assert table["size"].to_pylist() == numbers
    assert pipeline.run(config).summary.resumed_rows == done.rows


def test_parts_that_are_missing_or_of_other_jobs_are_named(markov: str, tmp_path: Path) -> None:
    output = tmp_path / "out.arrow"
    config = job(markov, documents(20), output)
    with pytest.raises(InputError, match=r"no part of .*out\.arrow.*--shard 1/4"):
        pipeline.merge(output)
    pipeline.run(part_of(config, 1, 3))
    pipeline.run(part_of(config, 3, 3))
    with pytest.raises(InputError, match=r"of 3 parts 1 are missing \(2\).*--shard 2/3"):
        pipeline.merge(output)
    other = replace(config, sampling=SamplingOptions(max_tokens=3))
    pipeline.run(part_of(other, 2, 3))
    with pytest.raises(InputError, match=r"2-of-3.* is not of the same job .*other max_tokens"):
        pipeline.merge(output)
    assert not output.exists()


def test_an_edited_input_between_parts_is_noticed(markov: str, tmp_path: Path) -> None:
    output, rows = tmp_path / "out.arrow", documents(20)
    pipeline.run(part_of(job(markov, rows, output), 1, 2))
    edited = [*rows[:-1], {**rows[-1], "size": -1}]
    pipeline.run(part_of(job(markov, edited, output), 2, 2))
    with pytest.raises(InputError, match="other rows, ids or columns"):
        pipeline.merge(output)


def test_parts_of_two_splits_have_to_be_named(markov: str, tmp_path: Path) -> None:
    output, rows = tmp_path / "out.arrow", documents(12)
    config = job(markov, rows, output)
    run_parts(config, 2)
    run_parts(config, 1)
    with pytest.raises(InputError, match=r"several splits .*1 of 1, 2 of 2"):
        pipeline.merge(output)
    both = [Shard(number, 2).part_of(output) for number in (2, 1)]
    with pytest.raises(InputError, match="part 1 of 2 is given twice"):
        pipeline.merge(output, [*both, both[1]])
    assert pipeline.merge(output, both).num_rows == 12
    assert pipeline.merge(output, both).num_rows == 12  # again, over itself


def test_what_is_no_part_and_an_output_with_results_of_its_own_are_refused(
    markov: str, tmp_path: Path
) -> None:
    output = tmp_path / "out.arrow"
    config = job(markov, documents(12), output)
    pipeline.run(config)
    before = output.read_bytes()
    with pytest.raises(InputError, match=r"out\.arrow is no finished part"):
        pipeline.merge(tmp_path / "new.arrow", [output])
    run_parts(config, 2)
    with pytest.raises(OutputMismatchError, match="results of a run of its own"):
        pipeline.merge(output)
    assert output.read_bytes() == before


def test_parts_that_do_not_make_up_the_rows_are_refused(markov: str, tmp_path: Path) -> None:
    output = tmp_path / "out.arrow"
    run_parts(job(markov, documents(12), output), 2)
    part = Shard(2, 2).part_of(output)
    with pa.OSFile(str(part), "rb") as file:
        table = pa.ipc.open_file(file).read_all()
    with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table.slice(1))
    with pytest.raises(SinkError, match="1 missing, 0 doubled"):
        pipeline.merge(output)
    assert not output.exists()


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/2", "1/2/3", "-1/2"])
def test_a_shard_is_a_part_of_so_many(text: str) -> None:
    with pytest.raises(OptionError, match="shard"):
        Shard.parse(text)


def test_a_shard_needs_an_output(markov: str) -> None:
    with pytest.raises(OptionError, match="give an output file"):
        RunConfig(input=[], model=markov, shard=Shard(1, 2))


def test_the_part_says_what_it_is_and_the_whole_does_not(markov: str, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    run_parts(job(markov, documents(12), output), 2)
    pipeline.merge(output)
    with pa.OSFile(str(Shard(1, 2).part_of(output)), "rb") as file:
        metadata = pa.ipc.open_file(file).schema.metadata
    assert json.loads(metadata.pop(b"batchradix.shard")) == {"number": 1, "count": 2, "rows": 12}
    assert pq.read_schema(output).metadata == metadata


def test_what_cannot_be_joined_as_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="shard and format openai exclude each other"):
        Shard(1, 2).part_of(tmp_path / "out.jsonl", "openai")


def test_rows_with_several_answers_each_are_not_parted(markov: str, tmp_path: Path) -> None:
    body = {"model": "m", "prompt": "a", "n": 2, "temperature": 1}
    request = {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "batch.jsonl").write_text(json.dumps(request) + "\n")
    config = job(markov, str(tmp_path / "batch.jsonl"), tmp_path / "out.arrow")
    with pytest.raises(OptionError, match="several answers each"):
        pipeline.run(part_of(config, 1, 2))
