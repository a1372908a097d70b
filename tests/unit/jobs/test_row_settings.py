"""Per-row sampling options override the job's own, or make an error row."""

from __future__ import annotations

import math
from dataclasses import fields
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from batchradix.config import SamplingOptions
from batchradix.errors import RowError, RowErrorCode
from batchradix.jobs import SETTING_COLUMNS, RowSettingsReader, read_row_settings
from batchradix.types import Row

DEFAULTS = SamplingOptions(max_tokens=9, temperature=0.7, stop=("END",))


def row(**values: Any) -> Row:
    return Row(index=3, line=5, values=values)


def test_every_sampling_option_has_a_column_but_for_those_of_the_whole_run() -> None:
    options = {f.name for f in fields(SamplingOptions)}
    assert set(SETTING_COLUMNS) == options - {"probabilities", "choose"}


def test_a_row_may_not_draw_where_the_run_takes_the_likeliest_choice() -> None:
    found = read_row_settings(row(temperature=0.5), SamplingOptions(choose="joint"))
    assert isinstance(found, RowError)
    assert "column temperature: choose joint" in found.message


def test_a_row_that_sets_nothing_has_the_very_defaults() -> None:
    reader = RowSettingsReader(DEFAULTS)
    assert reader.read(row()) is DEFAULTS
    assert reader.read(row(prompt="x", temperature=None, stop=None)) is DEFAULTS
    assert read_row_settings(row(), DEFAULTS) is DEFAULTS


def test_rows_that_set_the_same_share_one_object() -> None:
    reader = RowSettingsReader(DEFAULTS)
    first = reader.read(row(max_tokens=4))
    assert first is reader.read(row(max_tokens=4.0, prompt="y"))
    assert first is not reader.read(row(max_tokens=5))


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("max_tokens", 16.0, 16),
        ("max_tokens", np.int32(16), 16),
        ("max_tokens", Decimal("16.0"), 16),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("seed", -1, -1),
        ("top_k", 0, 0),
        ("temperature", 0, 0.0),
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", Decimal("0.25"), 0.25),
        ("stop", "\n", ("\n",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
    ],
)
def test_a_value_overrides_its_option_alone(column: str, value: Any, expected: Any) -> None:
    options = read_row_settings(row(**{column: value}), DEFAULTS)
    assert isinstance(options, SamplingOptions)
    assert getattr(options, column) == expected
    assert type(getattr(options, column)) is type(expected)
    for name in SETTING_COLUMNS:
        if name != column:
            assert getattr(options, name) == getattr(DEFAULTS, name)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("max_tokens", math.nan),
        ("max_tokens", math.inf),
        ("max_tokens", Decimal("NaN")),
        ("max_tokens", Decimal("sNaN")),
        ("seed", [1]),
        ("seed", 2**63),
        ("top_k", 1e30),
        ("top_k", -5),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", 10**400),
        pytest.param("temperature", 10**5000, id="thousands of digits"),
        ("temperature", False),
        ("temperature", "hot"),
        ("top_p", 0),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", {}),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", None]),
        ("stop", 3),
        ("stop", {"a": 1}),
    ],
)
def test_a_bad_value_is_an_error_that_names_row_and_column(column: str, value: Any) -> None:
    error = read_row_settings(row(prompt="x", **{column: value}), DEFAULTS)
    assert isinstance(error, RowError)
    assert error.code is RowErrorCode.BAD_SETTING
    assert f"row 3 (line 5), column {column}: " in error.message


def test_the_shared_objects_do_not_grow_without_bound() -> None:
    reader = RowSettingsReader(DEFAULTS)
    for seed in range(10_000):
        options = reader.read(row(seed=seed))
        assert isinstance(options, SamplingOptions)
        assert options.seed == seed
    assert len(reader._known) <= 4096
