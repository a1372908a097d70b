"""`map_dataset`: a whole Hugging Face data set answered as one job, and kept in its cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchradix.errors import InputError, OptionError, SinkError
from batchradix.integrations.hf_datasets import Extractor, need_datasets, plain
from batchradix.report.progress import choose_progress
from batchradix.sink.folder import WORK_SUFFIX


def map_dataset(
    dataset: Any,
    extractor: Extractor | None = None,
    *,
    remove_columns: str | Iterable[str] = (),
    load_from_cache_file: bool | None = None,
    cache_file_name: str | os.PathLike[str] | None = None,
    show_progress: bool = False,
    unnest: bool = False,
    result_columns: Iterable[str] | None = None,
    **options: Any,
) -> Any:
    """``dataset.map(extractor, batched=True)``, planned over all of its rows at once.

    Gives a `datasets.Dataset` in the original order, the columns of the answers behind its own.
    Give either an ``extractor`` or the arguments of one. Rows are read from the data set's Arrow
    table, where it lies; selections and shuffles are honoured. Answers are committed while it
    runs, so that the same call goes on after a crash, and the finished ones stay in the data
    set's cache folder (that of `datasets` for one in memory) under a fingerprint of data set and
    extractor: the next call loads no model. ``load_from_cache_file=False`` begins again;
    ``cache_file_name`` names another file for the answers. Without caching
    (``datasets.disable_caching()``) nothing is committed.

    Raises `InputError` for what is no single data set that can be read again, and what `run`
    raises.
    """
    datasets = need_datasets()
    _check(dataset, datasets)
    if extractor is None:
        beside = None if result_columns is None else list(result_columns)
        extractor = Extractor(unnest=unnest, result_columns=beside, **options)
    elif options or unnest or result_columns is not None:
        raise OptionError("give `map_dataset` an extractor or the options of one, not both")
    if isinstance(remove_columns, str):
        remove_columns = [remove_columns]
    removed = [*remove_columns]
    missing = [name for name in removed if name not in dataset.column_names]
    if missing:
        raise InputError(
            f"the data set has no column {missing[0]!r} to remove; its columns are: "
            f"{', '.join(dataset.column_names)}"
        )
    caches = datasets.is_caching_enabled()
    if load_from_cache_file is None:
        load_from_cache_file = caches
    hasher = datasets.fingerprint.Hasher
    fingerprint = hasher.hash(["batchradix", dataset._fingerprint, extractor.fingerprint])
    progress = choose_progress(quiet=not show_progress)
    if cache_file_name is None and not caches:
        view = dataset.with_format(None)
        table = extractor.run(view, dataset.column_names, progress=progress)
        answers = datasets.Dataset(plain(table))
    else:
        path = Path(cache_file_name or _cache_path(dataset, fingerprint, datasets))
        if not (load_from_cache_file and path.exists()):
            _write(dataset, extractor, path, progress, restart=not load_from_cache_file)
        answers = datasets.Dataset.from_file(str(path))
    result = _beside(dataset.remove_columns(removed), answers, datasets)
    result._fingerprint = hasher.hash([fingerprint, sorted(removed)])
    return result


def _check(dataset: Any, datasets: Any) -> None:
    if isinstance(dataset, dict):
        splits = ", ".join(map(str, dataset))
        raise InputError(f"the data set has several splits; choose one of them: {splits}")
    if isinstance(dataset, datasets.IterableDataset):
        raise InputError(
            "a streamed data set can be read once only, so it cannot be planned; load it without "
            "streaming, or map an Extractor over it"
        )
    if not isinstance(dataset, datasets.Dataset):
        kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        raise InputError(f"a {kind} is no datasets.Dataset; give batchradix.run other inputs")


def _cache_path(dataset: Any, fingerprint: str, datasets: Any) -> Path:
    """As `datasets` names what it caches, which lets ``cleanup_cache_files`` find it."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "batchradix"
    if dataset.cache_files:
        folder = Path(dataset.cache_files[0]["filename"]).parent
    return folder / f"cache-{fingerprint}.arrow"


def _write(dataset: Any, extractor: Extractor, path: Path, progress: Any, *, restart: bool) -> None:
    """Answers the data set into ``path``, an Arrow stream as `datasets` reads it.

    Raises `SinkError` where that cannot be written, and what the run raises.
    """
    output = path.with_name(f"{path.stem}.unfinished.arrow")
    made = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    view, columns = dataset.with_format(None), dataset.column_names
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        extractor.run(view, columns, path=output, restart=restart, progress=progress)
        with made.open("wb") as file:
            _copy(output, file, extractor, columns)
        os.replace(made, path)
    except OSError as error:
        raise SinkError(
            f"the answers cannot be kept in {path}: {error.strerror or error}; mend that, or name "
            f"another file with `cache_file_name`"
        ) from error
    finally:
        with suppress(OSError):
            made.unlink()
    with suppress(OSError):
        output.unlink()
    shutil.rmtree(output.with_name(output.name + WORK_SUFFIX), ignore_errors=True)


def _copy(output: Path, file: Any, extractor: Extractor, columns: list[str]) -> None:
    with pa.memory_map(str(output)) as mapped:
        reader = pa.ipc.open_file(mapped)

        def tables() -> Iterator[pa.Table]:
            yield reader.schema.empty_table()
            for i in range(reader.num_record_batches):
                yield pa.Table.from_batches([reader.get_batch(i)])

        writer = None
        for table in tables():
            answers = plain(extractor.arranged(table, columns))
            writer = writer or pa.ipc.new_stream(file, answers.schema)
            writer.write_table(answers)
        assert writer is not None
        writer.close()
    file.flush()
    os.fsync(file.fileno())


def _beside(dataset: Any, answers: Any, datasets: Any) -> Any:
    """``dataset`` with the columns of ``answers`` behind its own, and its format."""
    if not dataset.column_names:
        return answers
    if not len(dataset):
        features = datasets.Features({**dataset.features, **answers.features})
        return datasets.Dataset.from_dict({name: [] for name in features}, features=features)
    format_ = dataset.format
    result = datasets.concatenate_datasets(
        [dataset.with_format(None), answers], split=dataset.split, axis=1
    )
    if format_["type"] is None and set(format_["columns"]) == set(dataset.column_names):
        return result
    columns = None
    if set(format_["columns"]) != set(dataset.column_names):
        columns = [*format_["columns"], *answers.column_names]
    return result.with_format(
        format_["type"],
        columns=columns,
        output_all_columns=format_["output_all_columns"],
        **format_["format_kwargs"],
    )
