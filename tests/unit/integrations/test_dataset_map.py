"""A whole data set answered as one job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

import batchradix
from batchradix.engine.model_runner import ModelRunner
from batchradix.errors import InputError, OptionError, SinkError
from batchradix.integrations.hf_datasets import Extractor
from batchradix.sink import shards

LONG = "x" * 600


def questions(num_documents: int = 3, per_document: int = 4) -> datasets.Dataset:
    """Rows that are not sorted by their document."""
    rows = [(d, q) for q in range(per_document) for d in range(num_documents)]
    return datasets.Dataset.from_dict(
        {
            "text": [f"document {d} with words that are its own. {q}" for d, q in rows],
            "label": [d for d, _ in rows],
        },
        features=datasets.Features(
            {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["x", "y", "z"])}
        ),
    )


@pytest.fixture
def free(options: dict[str, Any], tiny_model_folder: Any) -> dict[str, Any]:
    """Options of a job whose answers depend on the prompt."""
    model = str(tiny_model_folder("random"))
    return options | {"model": model, "schema": None, "max_tokens": 4}


def test_answers_are_those_of_a_map_and_rows_keep_their_order(free: dict[str, Any]) -> None:
    data = questions()
    extractor = Extractor(**free)
    mapped = data.map(extractor, batched=True, batch_size=3)
    whole = batchradix.map_dataset(data, extractor)
    assert whole.column_names == mapped.column_names
    assert whole.features == mapped.features
    for name in ("text", "label", "answer_text", "status", "completion_tokens"):
        assert whole[name][:] == mapped[name][:]
    assert len(set(whole["answer_text"])) > 3
    assert batchradix.map_dataset(data, **free)["answer_text"][:] == whole["answer_text"][:]


def test_it_computes_every_distinct_token_once(free: dict[str, Any]) -> None:
    data = questions()
    extractor = Extractor(**free)
    batchradix.map_dataset(data, extractor, load_from_cache_file=False)
    plan = batchradix.plan(data, model=free["model"], template=free["template"])
    assert extractor.usage.computed_tokens == plan.distinct_tokens


def test_selections_and_shuffles_are_honoured(
    free: dict[str, Any], on_disk: Callable[[Any], Any]
) -> None:
    data = on_disk(questions())
    by_text = {row["text"]: row["answer_text"] for row in batchradix.map_dataset(data, **free)}
    some = data.shuffle(seed=5).select([7, 2, 2, 9])
    mapped = batchradix.map_dataset(some, **free)
    assert mapped["text"][:] == some["text"][:]
    assert mapped["answer_text"][:] == [by_text[text] for text in some["text"]]


def test_failed_rows_keep_their_place(options: dict[str, Any]) -> None:
    data = datasets.Dataset.from_dict({"text": [None, "a", LONG, "b"]})
    mapped = batchradix.map_dataset(data, **options)
    assert mapped["status"][:] == ["error", "ok", "error", "ok"]
    assert [value and value["n"] for value in mapped["value"]] == [None, 7, None, 7]
    assert mapped.features["value"]["note"] == datasets.Value("string")


@pytest.mark.parametrize("removed", ["text", ["text", "label"]])
def test_columns_can_be_left_out(options: dict[str, Any], removed: Any) -> None:
    mapped = batchradix.map_dataset(questions(), unnest=True, remove_columns=removed, **options)
    left = [] if len(removed) == 2 else ["label"]
    assert mapped.column_names == [*left, "n", "note"]
    assert len(mapped) == 12


def test_the_format_stays(options: dict[str, Any]) -> None:
    data = questions().with_format("numpy", columns=["label"])
    mapped = batchradix.map_dataset(data, unnest=True, **options)
    assert mapped.format["type"] == "numpy"
    assert set(mapped[0]) == {"label", "n", "note"}
    assert questions().map(Extractor(**options), batched=True).features["label"].names == [
        "x", "y", "z",
    ]  # fmt: skip
    assert mapped.features["label"].names == ["x", "y", "z"]


def test_no_rows_have_the_columns_too(options: dict[str, Any]) -> None:
    mapped = batchradix.map_dataset(questions().select([]), unnest=True, **options)
    assert mapped.column_names == ["text", "label", "n", "note"]
    assert mapped.features["n"] == datasets.Value("int64")


class Interrupted(Exception):
    pass


def test_the_same_call_goes_on_after_a_crash(
    free: dict[str, Any],
    on_disk: Callable[[Any], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = on_disk(questions())
    free = free | {"batch_size": 2}
    real, steps = ModelRunner.launch, 0

    def dying(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 12:
            raise Interrupted
        return real(self, *args, **kwargs)

    monkeypatch.setattr(shards, "COMMIT_ROWS", 1)
    monkeypatch.setattr(ModelRunner, "launch", dying)
    first = Extractor(**free)
    with pytest.raises(Interrupted):
        batchradix.map_dataset(data, first)
    monkeypatch.setattr(ModelRunner, "launch", real)
    assert list((tmp_path / "dataset").glob("*.unfinished.arrow.batchradix"))
    second = Extractor(**free)
    mapped = batchradix.map_dataset(data, second)
    undisturbed = Extractor(**free)
    wanted = batchradix.map_dataset(data, undisturbed, cache_file_name=tmp_path / "other.arrow")
    assert mapped["answer_text"][:] == wanted["answer_text"][:]
    assert 0 < second.usage.decode_steps < undisturbed.usage.decode_steps
    left = [path.name for path in (tmp_path / "dataset").iterdir()]
    assert not [name for name in left if "unfinished" in name or name.endswith(".tmp")]


def test_what_was_mapped_comes_from_the_cache_under_its_fingerprint(
    options: dict[str, Any], on_disk: Callable[[Any], Any], tmp_path: Path
) -> None:
    options = options | {"forced_text": False}
    data = on_disk(questions())
    first, second, third = (Extractor(**options) for _ in range(3))
    mapped = batchradix.map_dataset(data, first)
    assert first.usage.forward_steps > 0
    again = batchradix.map_dataset(data, second)
    assert second.usage.forward_steps == 0
    assert again._fingerprint == mapped._fingerprint
    assert again[:] == mapped[:]
    removed = batchradix.map_dataset(data, second, remove_columns="text")
    assert second.usage.forward_steps == 0
    assert removed._fingerprint != mapped._fingerprint
    batchradix.map_dataset(data, third, load_from_cache_file=False)
    assert third.usage.forward_steps == first.usage.forward_steps
    other = Extractor(**options | {"max_tokens": 39})
    assert batchradix.map_dataset(data, other)._fingerprint != mapped._fingerprint
    assert other.usage.forward_steps > 0
    assert data.cleanup_cache_files() > 0


def test_a_data_set_in_memory_is_cached_where_datasets_caches(
    options: dict[str, Any], datasets_cache: Path
) -> None:
    options = options | {"forced_text": False, "max_tokens": 38}
    batchradix.map_dataset(questions(), **options)
    assert list((datasets_cache / "batchradix").glob("cache-*.arrow"))
    second = Extractor(**options)
    batchradix.map_dataset(questions(), second)
    assert second.usage.forward_steps == 0


def test_without_caching_nothing_is_written(
    options: dict[str, Any], on_disk: Callable[[Any], Any], tmp_path: Path
) -> None:
    data = on_disk(questions())
    before = sorted((tmp_path / "dataset").iterdir())
    datasets.disable_caching()
    try:
        mapped = batchradix.map_dataset(data, **options)
    finally:
        datasets.enable_caching()
    assert mapped[0]["value"] == {"n": 7, "note": "b"}
    assert sorted((tmp_path / "dataset").iterdir()) == before


def test_rows_are_read_where_they_lie(
    options: dict[str, Any], on_disk: Callable[[Any], Any]
) -> None:
    data = on_disk(questions())
    mapped = batchradix.map_dataset(data, **options)
    files = {file["filename"] for file in data.cache_files}
    assert files < {file["filename"] for file in mapped.cache_files}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda d: datasets.DatasetDict(train=d, test=d), "several splits.*train, test"),
        (lambda d: d.to_iterable_dataset(), "streamed"),
        (lambda d: [{"text": "a"}], "no datasets.Dataset"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    options: dict[str, Any], given: Callable[[Any], Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        batchradix.map_dataset(given(questions()), **options)


def test_options_beside_an_extractor_and_unknown_columns_are_refused(
    options: dict[str, Any],
) -> None:
    extractor = Extractor(**options)
    with pytest.raises(OptionError, match="not both"):
        batchradix.map_dataset(questions(), extractor, max_tokens=3)
    with pytest.raises(InputError, match="no column 'txt' to remove; its columns are: text, label"):
        batchradix.map_dataset(questions(), extractor, remove_columns="txt")


def test_a_folder_that_cannot_be_had_is_named(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "answers.arrow"
    with pytest.raises(SinkError, match=r"cannot be kept in .*answers.arrow.*cache_file_name"):
        batchradix.map_dataset(questions(), cache_file_name=place, **options)
