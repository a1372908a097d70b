from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MakeTinyModel = Callable[..., Path]

DIGIT = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "note": {"enum": ["a", "b"]},
    },
    "required": ["n", "note"],
}


@pytest.fixture(autouse=True, scope="session")
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `datasets` keeps what is mapped in memory; no progress bars."""
    import datasets

    folder = tmp_path_factory.mktemp("datasets-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        patch.setitem(os.environ, "HF_DATASETS_CACHE", str(folder))
        datasets.disable_progress_bars()
        yield folder
        datasets.enable_progress_bars()


@pytest.fixture
def sevens(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("const", prefer='7}b"'))


@pytest.fixture
def options(sevens: str) -> dict[str, Any]:
    """Of a job whose rows are answered by ``{"n": 7, "note": "b"}``."""
    return {
        "model": sevens,
        "schema": DIGIT,
        "template": "{{ text }}",
        "max_tokens": 40,
        "dtype": "float32",
        "num_threads": 1,
        "kv_tokens": 4000,
    }


@pytest.fixture
def on_disk(tmp_path: Path) -> Callable[[Any], Any]:
    """Saves a data set and opens it again, so that `datasets` caches what is made of it."""
    import datasets

    def save(dataset: Any) -> Any:
        dataset.save_to_disk(tmp_path / "dataset")
        return datasets.load_from_disk(tmp_path / "dataset")

    return save
