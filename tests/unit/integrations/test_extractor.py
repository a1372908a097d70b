"""The function that Dataset.map takes."""

from __future__ import annotations

import copy
import datetime
import decimal
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from datasets.fingerprint import Hasher

import batchradix
from batchradix.engine.model_runner import ModelRunner
from batchradix.errors import OptionError
from batchradix.integrations import answerer
from batchradix.integrations.batches import answered
from batchradix.integrations.hf_datasets import Extractor

ROOT = Path(__file__).parents[3]
ANSWER = {"n": 7, "note": "b"}
COLUMNS = [
    "status", "value", "text", "error", "finish_reason",
    "prompt_tokens", "cached_tokens", "completion_tokens",
]  # fmt: skip
LONG = "x" * 600  # more than the model's context


def rows(*texts: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": list(texts)})


def test_every_row_gets_the_columns_of_a_result_behind_its_own(options: dict[str, Any]) -> None:
    mapped = datasets.Dataset.from_dict({"prompt": ["a", "b"], "k": [1, 2]}).map(
        Extractor(**options | {"template": None}), batched=True
    )
    assert mapped.column_names == ["prompt", "k", *COLUMNS]
    assert mapped["value"][:] == [ANSWER, ANSWER]
    assert mapped["k"][:] == [1, 2]


def test_a_column_that_is_there_already_stays_and_the_answers_is_named_apart(
    options: dict[str, Any],
) -> None:
    data = datasets.Dataset.from_dict({"text": ["a"], "n": ["mine"]})
    mapped = data.map(Extractor(unnest=True, result_columns=["text"], **options), batched=True)
    assert mapped.column_names == ["text", "n", "answer_n", "note", "answer_text"]
    assert mapped[0]["n"] == "mine"
    assert mapped[0]["answer_n"] == 7
    assert mapped[0]["text"] == "a"


def test_unnested_there_are_the_fields_alone(options: dict[str, Any]) -> None:
    mapped = rows("a", None).map(
        Extractor(unnest=True, **options), batched=True, remove_columns="text"
    )
    assert mapped[:] == {"n": [7, None], "note": ["b", None]}


def test_a_failed_row_keeps_its_place_and_its_types(options: dict[str, Any]) -> None:
    data = rows(None, LONG, "a", "b", None, "c")
    mapped = data.map(Extractor(**options), batched=True, batch_size=2)
    assert mapped["status"][:] == ["error", "error", "ok", "ok", "error", "ok"]
    assert [value and value["n"] for value in mapped["value"]] == [None, None, 7, 7, None, 7]
    codes = [error and error["code"] for error in mapped["error"]]
    assert codes == ["null_field", "prompt_too_long", None, None, "null_field", None]
    assert mapped.features["value"] == {
        "n": datasets.Value("int64"),
        "note": datasets.Value("string"),
    }


def test_an_error_after_batches_without_any_has_its_column(options: dict[str, Any]) -> None:
    mapped = rows("a", "b", "c", None).map(Extractor(**options), batched=True, batch_size=1)
    assert mapped["error"][:][:3] == [None] * 3
    assert mapped["error"][3]["code"] == "null_field"


@pytest.mark.parametrize("removed", [[], ["text"]])
def test_features_are_known_before_the_map(options: dict[str, Any], removed: list[str]) -> None:
    extractor = Extractor(**options)
    data = rows(None, "a")
    features = extractor.features(data, remove_columns=removed)
    mapped = data.map(
        extractor, batched=True, batch_size=1, features=features, remove_columns=removed
    )
    assert mapped.features == features
    assert features["error"] == {
        "code": datasets.Value("string"),
        "message": datasets.Value("string"),
    }
    free = data.map(extractor, batched=True, batch_size=1, remove_columns=removed)
    assert free.features == features


@pytest.mark.parametrize("format_", ["numpy", "torch", "arrow", "pandas", "polars"])
def test_batches_of_every_format_are_answered(options: dict[str, Any], format_: str) -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "k": [1, 2, 3]})
    extractor = Extractor(**options | {"template": "{{ text }} {{ k }}"})
    mapped = data.with_format(format_).map(extractor, batched=True, batch_size=2)
    plain = mapped.with_format(None)
    assert plain["value"][:] == [ANSWER] * 3
    assert plain["text"][:] == ["a", "b", "c"]
    assert plain.features["value"]["n"] == datasets.Value("int64")
    assert mapped.format["type"] == format_


def test_streamed_data_sets_are_answered(options: dict[str, Any]) -> None:
    extractor = Extractor(**options)
    stream = rows("a", None, "c").to_iterable_dataset()
    mapped = stream.map(extractor, batched=True, batch_size=2, features=extractor.features(stream))
    assert [row["status"] for row in mapped] == ["ok", "error", "ok"]
    assert [row["value"] for row in mapped][2] == ANSWER


def test_columns_without_an_arrow_type_do_not_stop_the_others(options: dict[str, Any]) -> None:
    batch = {"text": ["a", "b"], "thing": [object(), 5]}
    assert Extractor(**options)(batch)["value"] == [ANSWER, ANSWER]


@pytest.mark.parametrize(
    "batch", [{"text": "a"}, {"text": "ab", "messages": [1]}, {"a": [1], "b": [1, 2]}, ["a", "b"]]
)
def test_a_single_row_is_refused_with_the_remedy(options: dict[str, Any], batch: Any) -> None:
    with pytest.raises(OptionError, match="batched=True"):
        Extractor(**options)(batch)


def test_a_map_without_batches_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="batched=True"):
        rows("a").map(Extractor(**options))


def test_prefixes_stay_in_the_cache_from_batch_to_batch(options: dict[str, Any]) -> None:
    document = "a document that all rows ask about. "
    texts = [f"{document}{i:02d}" for i in range(24)]
    extractor = Extractor(**options | {"schema": None, "max_tokens": 1})
    rows(*texts).map(extractor, batched=True, batch_size=4)
    distinct = batchradix.plan(
        [{"text": text} for text in texts], model=options["model"], template="{{ text }}"
    ).distinct_tokens
    assert extractor.usage.computed_tokens == distinct


def test_two_of_the_same_arguments_have_one_hash(options: dict[str, Any]) -> None:
    first, second = Extractor(**options), Extractor(**dict(reversed(options.items())))
    assert Hasher.hash(first) == Hasher.hash(second) == Hasher.hash(copy.deepcopy(first))
    used = Hasher.hash(first)
    first({"text": ["a"]})
    assert Hasher.hash(first) == used


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cuda"},
        {"batch_size": 2},
        {"num_threads": 2},
        {"kv_tokens": 999},
        {"prefill_tokens": 16},
        {"attention": "torch"},
        {"quantize": "keep"},
    ],
)
def test_where_it_runs_is_no_part_of_the_hash(
    options: dict[str, Any], change: dict[str, Any]
) -> None:
    assert Hasher.hash(Extractor(**options)) == Hasher.hash(Extractor(**options | change))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": {"type": "string"}},
        {"template": "{{ text }}!"},
        {"max_tokens": 41},
        {"temperature": 0.5},
        {"seed": 1},
        {"retries": 1},
        {"dtype": "bfloat16"},
        {"quantize": "int8"},
        {"kv_dtype": "fp8"},
        {"forced_text": False},
        {"row_timeout_s": 5.0},
        {"schema_column": "s"},
        {"null_text": "none"},
        {"keep_truncated": True},
        {"unnest": True},
        {"result_columns": ["status"]},
    ],
)
def test_whatever_changes_an_answer_changes_the_hash(
    options: dict[str, Any], change: dict[str, Any]
) -> None:
    changed = {"unnest": False} | options | change
    if change.get("unnest"):
        changed["keep_truncated"] = False
    assert Hasher.hash(Extractor(**options)) != Hasher.hash(Extractor(**changed))


def test_another_model_of_the_same_name_has_another_hash(
    tiny_model_folder: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    hashes = []
    for prefer in ("7", "8", "8"):
        target = tmp_path / "now" / "model"
        target.parent.mkdir(exist_ok=True)
        if target.is_symlink():
            target.unlink()
        target.symlink_to(tiny_model_folder("const", prefer=prefer), target_is_directory=True)
        hashes.append(Hasher.hash(Extractor(**options | {"model": str(target)})))
    assert hashes[0] != hashes[1] == hashes[2]


def test_it_pickles_to_its_configuration_and_not_its_weights(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    extractor = Extractor(**options)
    wanted = extractor({"text": ["a"]})
    data = pickle.dumps(extractor)
    assert len(data) < 20_000

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(ModelRunner, "__init__", refuse)
    other = pickle.loads(data)  # noqa: S301
    assert other.fingerprint == extractor.fingerprint
    monkeypatch.undo()
    assert other({"text": ["a"]}) == wanted


SCRIPT = """
import datasets, json, sys
from batchradix import Extractor
from batchradix.engine.core import RadixEngine
starts = []
begin = RadixEngine.__init__
def counted(self, *args, **kwargs):
    starts.append(1)
    begin(self, *args, **kwargs)
RadixEngine.__init__ = counted
datasets.disable_progress_bars()
options = json.loads(sys.argv[2])
data = datasets.load_from_disk(sys.argv[1])
mapped = data.map(Extractor(**options), batched=True, batch_size=2)
print(json.dumps([len(starts), mapped._fingerprint, mapped["status"][:]]))
"""


def test_the_map_of_a_second_process_comes_from_the_cache_with_no_engine_started(
    options: dict[str, Any], on_disk: Callable[[Any], Any], tmp_path: Path
) -> None:

    on_disk(rows("a", None, "c"))
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    said = []
    for seed, changes in (("1", {}), ("2", {"batch_size": 5}), ("3", {"max_tokens": 39})):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                SCRIPT,
                str(tmp_path / "dataset"),
                json.dumps(options | changes),
            ],
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "hashed properly" not in done.stderr
        said.append(json.loads(done.stdout.splitlines()[-1]))
    assert [starts for starts, _, _ in said] == [1, 0, 1]
    assert said[0][1] == said[1][1] != said[2][1]
    assert said[0][2] == said[1][2] == ["ok", "error", "ok"]


def test_processes_that_are_forked_after_the_engine_has_run_answer_too(
    options: dict[str, Any],
) -> None:
    extractor = Extractor(**options)
    pl.DataFrame({"a": [2, 1]}).sort("a")  # its threads do not live on in a fork
    data = rows("a", None, "c", "d", LONG)
    wanted = data.map(extractor, batched=True, load_from_cache_file=False)
    mapped = data.map(extractor, batched=True, num_proc=2, load_from_cache_file=False)
    assert mapped["status"][:] == ["ok", "error", "ok", "ok", "error"]
    assert mapped["value"][:] == wanted["value"][:]


class Gpus:
    """What torch says of GPUs."""

    def __init__(self, count: int, *, forked: bool = False) -> None:
        self._count, self._forked = count, forked

    def _is_in_bad_fork(self) -> bool:
        return self._forked

    def is_available(self) -> bool:
        return self._count > 0

    def device_count(self) -> int:
        return self._count


@pytest.mark.parametrize(
    ("gpus", "device", "rank", "found"),
    [
        (Gpus(2, forked=True), "auto", 0, "set_start_method"),
        (Gpus(2), "auto", None, "with_rank=True"),
        (Gpus(2), "cuda", 1, "cuda:1"),
        (Gpus(2), "auto", 2, "has no GPU of its own"),
        (Gpus(1), "cuda:0", None, "cuda:0"),
        (Gpus(0), "auto", None, "cpu"),
        (Gpus(2, forked=True), "cpu", None, "cpu"),
    ],
)
def test_each_process_has_a_gpu_of_its_own_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: Gpus, device: str, rank: int | None, found: str
) -> None:
    import torch

    monkeypatch.setattr(torch, "cuda", gpus)
    monkeypatch.setattr(answerer, "_is_worker", lambda: True)
    options = batchradix.EngineOptions(device=device)
    if found.startswith(("cuda", "cpu")):
        assert answerer._own_share(options, rank).device == found
    else:
        with pytest.raises(OptionError, match=found):
            answerer._own_share(options, rank)


def test_a_worker_takes_one_thread_and_a_core_s_part_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = batchradix.EngineOptions(device="cpu")
    assert answerer._own_share(options, None) is options
    monkeypatch.setattr(answerer, "_is_worker", lambda: True)
    monkeypatch.setattr(answerer, "free_memory_bytes", lambda: 1000)
    monkeypatch.setattr(answerer, "num_threads", lambda: 4)
    mine = answerer._own_share(options, None)
    assert (mine.num_threads, mine.kv_memory_bytes) == (1, 100)
    told = batchradix.EngineOptions(device="cpu", num_threads=3, kv_tokens=50)
    mine = answerer._own_share(told, None)
    assert (mine.num_threads, mine.kv_memory_bytes, mine.kv_tokens) == (3, None, 50)


def test_many_rows_in_a_worker_are_answered_in_parts(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answerer, "_is_worker", lambda: True)
    monkeypatch.setattr(answerer, "FEW_ROWS", 2)
    answers = Extractor(**options | {"device": "cpu"})({"text": ["a", None, "c", LONG, "e"]})
    assert answers["status"] == ["ok", "error", "ok", "error", "ok"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"unnest": True, "schema": None}, "unnest needs a schema"),
        ({"unnest": True, "schema": {"type": "integer"}}, "whose top is an object"),
        ({"result_columns": ["state"]}, "has no 'state'; there are: status, text"),
        ({"schema": {"minimum": 3, "maximum": 2, "type": "integer"}}, "schema"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(
    options: dict[str, Any], given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(batchradix.BatchradixError, match=sentence):
        Extractor(**options | given)


def test_probabilities_and_cut_values_have_their_columns(options: dict[str, Any]) -> None:
    extractor = Extractor(
        **options | {"schema": {"enum": ["7", "8"]}, "probabilities": True, "keep_truncated": True}
    )
    mapped = rows("a").map(extractor, batched=True, features=extractor.features(rows("a")))
    assert mapped[0]["value"] == "7"
    assert mapped[0]["cut"] is None
    assert [pair["choice"] for pair in mapped[0]["probabilities"]] == ["7", "8"]


def test_without_the_package_one_sentence_says_what_is_missing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "datasets" else real(name)
    )
    extractor = Extractor(**options)
    assert np.all([value == ANSWER for value in extractor({"text": ["a", "b"]})["value"]])
    with pytest.raises(OptionError, match="pip install datasets"):
        extractor.features(rows("a"))
    with pytest.raises(OptionError, match="pip install datasets"):
        batchradix.map_dataset(rows("a"), extractor)


def test_a_table_comes_back_with_the_answers_behind(options: dict[str, Any]) -> None:
    table = pa.table({"text": ["a", None]})
    found = Extractor(**options)(table)
    assert found.column_names == ["text", *("answer_text" if c == "text" else c for c in COLUMNS)]
    assert found["value"].to_pylist() == [ANSWER, None]


@pytest.mark.parametrize("batch_size", [5, 8])
def test_a_map_over_sorted_rows_computes_hardly_more_than_one_plan(
    options: dict[str, Any], batch_size: int
) -> None:
    texts = [f"document {d} {'lorem ipsum ' * 8}. {q}" for d in range(12) for q in range(4)]
    # The pool holds little more than the documents of one batch.
    few = options | {"schema": None, "max_tokens": 1, "kv_tokens": 500}
    mapped, whole = Extractor(**few), Extractor(**few)
    rows(*texts).map(mapped, batched=True, batch_size=batch_size, load_from_cache_file=False)
    batchradix.map_dataset(rows(*texts), whole, load_from_cache_file=False)
    assert whole.usage.recomputed_tokens == mapped.usage.recomputed_tokens == 0
    assert whole.usage.computed_tokens <= mapped.usage.computed_tokens
    assert mapped.usage.computed_tokens <= 1.05 * whole.usage.computed_tokens


def test_what_a_person_should_know_is_logged_once(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    extractor = Extractor(**options)
    rows("a", "b", "c").map(extractor, batched=True, batch_size=1)
    [said] = [record.message for record in caplog.records if record.name == "batchradix"]
    assert "the template names no field of the schema" in said
    batchradix.map_dataset(rows("a"), extractor, load_from_cache_file=False)
    assert caplog.records[-1].message == said


MOMENT = datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (pa.timestamp("us", tz="UTC"), MOMENT),
        (pa.date32(), MOMENT.date()),
        (pa.time64("us"), MOMENT.time()),
        (pa.decimal128(38, 0), decimal.Decimal(10**30)),
        (
            pa.list_(pa.struct([("a", pa.int64()), ("b", pa.list_(pa.float64()))])),
            [{"a": 1, "b": [0.5]}],
        ),
        (pa.bool_(), True),
        (pa.null(), None),
    ],
)
def test_a_column_of_every_type_may_begin_with_nulls(type_: Any, value: Any) -> None:
    def answer(batch: Any) -> Any:
        cells = [value if text == "yes" else None for text in batch["text"]]
        return answered(batch, pa.table({"v": pa.chunked_array([pa.array(cells, type_)])}))

    mapped = rows("no", "no", "yes").map(
        answer,
        batched=True,
        batch_size=1,
        load_from_cache_file=False,
        new_fingerprint="of-this-test",
    )
    assert mapped.data.schema.field("v").type == type_
    assert mapped["v"][:] == [None, None, value]


def test_schemas_of_single_rows_make_a_column_of_json_text(options: dict[str, Any]) -> None:
    formats = [
        '{"type": "text"}',
        '{"type": "json_schema", "json_schema": {"schema": {"enum": [7]}}}',
    ]
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "response_format": formats})
    extractor = Extractor(**options | {"schema": None, "max_tokens": 4})
    mapped = data.map(extractor, batched=True, features=extractor.features(data))
    assert mapped["value"][:] == [None, "7"]


def test_equal_prompts_draw_differently_within_a_batch(
    options: dict[str, Any], tiny_model_folder: Any
) -> None:
    drawn = options | {
        "model": str(tiny_model_folder("random")),
        "schema": None,
        "temperature": 2.0,
    }
    extractor = Extractor(**drawn | {"max_tokens": 8, "seed": 3})
    mapped = rows("a", "a", "a", "a").map(extractor, batched=True, batch_size=2)
    first, second, third, fourth = mapped["answer_text"]
    assert first != second
    assert (first, second) == (third, fourth)
    whole = batchradix.map_dataset(rows("a", "a", "a", "a"), extractor)
    assert len(set(whole["answer_text"])) == 4


@pytest.mark.parametrize("ids", [["d", "d"], [[1], [2]], [b"\xff", b"\xfe"]])
def test_a_column_called_id_is_a_column_like_any_other(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture, ids: list[Any]
) -> None:
    data = datasets.Dataset.from_dict({"text": ["a", "b"], "id": ids})
    mapped = data.map(Extractor(**options), batched=True)
    assert mapped["status"][:] == ["ok", "ok"]
    assert batchradix.map_dataset(data, **options)["id"][:] == ids
    assert "have an id that" not in caplog.text
