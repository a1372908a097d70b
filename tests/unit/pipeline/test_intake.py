"""Rows that ask for the same are read as one, with what each would get when looked at alone."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchradix import pipeline
from batchradix.config import RunConfig, SamplingOptions
from batchradix.pipeline.planned import Planned
from batchradix.report.progress import Silent

MakeTinyModel = Callable[..., Path]
PROMPTS = ["short", "", None, "x" * 100, "y" * 510, "z" * 600, "short", "w" * 501]


@pytest.fixture(scope="module")
def model(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("const", prefer="a"))


def planned(model: str, columns: dict[str, Any], **options: Any) -> Planned:
    config = RunConfig(input=pa.table({"prompt": PROMPTS, **columns}), model=model, **options)
    return pipeline.plan_rows(
        pipeline.open_parts(config, progress=Silent()), folder=None, progress=Silent()
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": SamplingOptions(temperature=0.5, max_tokens=12)},
        {"schema": {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}}},
        {"schema": {"enum": ["yes", "no"]}, "sampling": SamplingOptions(max_tokens=1)},
    ],
)
def test_rows_without_settings_are_read_as_rows_that_set_nothing(
    model: str, options: dict[str, Any]
) -> None:
    alike = planned(model, {}, **options).rows
    nothing = pa.nulls(len(PROMPTS), pa.int64())
    alone = planned(model, {"top_k": nothing}, **options).rows
    assert dict(alike.errors) == dict(alone.errors)
    assert len(alike.errors) >= 2
    assert alike.requests.settings == alone.requests.settings
    for name in ("lengths", "format_id", "base_keys", "content_keys", "seeds", "has_seed"):
        np.testing.assert_array_equal(getattr(alike, name), getattr(alone, name))
    for name in ("settings_id", "max_tokens"):
        np.testing.assert_array_equal(getattr(alike.requests, name), getattr(alone.requests, name))


def test_rows_that_differ_have_each_its_own(model: str) -> None:
    columns = {
        "temperature": [0.0, 1.0, None, 1.0, 0.0, None, 2.0, 9.0],
        "seed": [None, 1, None, 2, None, 5, None, 3],
        "max_tokens": [7, 8, 9, None, 30, 5, 6, 0],
    }
    rows = planned(model, columns).rows
    requests = rows.requests
    ran = sorted(set(range(len(PROMPTS))) - set(rows.errors))
    assert ran == [0, 1, 3, 4, 6]
    settings = [requests.settings[requests.settings_id[row]].temperature for row in ran]
    assert settings == [0.0, 1.0, 1.0, 0.0, 2.0]
    assert [int(requests.max_tokens[row]) for row in ran] == [7, 8, 512 - 101, 1, 6]
    assert [int(rows.seeds[row]) for row in ran if rows.has_seed[row]] == [1, 2]


def test_a_content_key_is_a_hash_of_tokens_and_settings(model: str) -> None:
    """What runs committed has to be found by later versions."""
    rows = planned(model, {}).rows
    settings = (512 - 6, 0.0, None, 1.0, 0.0, 0.0, ())
    expected = blake2b(np.array([257, *b"short"], "<u4").tobytes(), digest_size=16)
    expected.update(repr(settings).encode())
    assert rows.content_keys[0].tobytes() == expected.digest()
    assert rows.content_keys[6].tobytes() == expected.digest()
