from __future__ import annotations

from pathlib import Path

import pytest

from batchradix.errors import RowError, RowErrorCode
from batchradix.pipeline.row_errors import RowErrors, RowErrorWriter
from batchradix.scratch import Scratch

NUM_ERRORS = 3000


@pytest.fixture
def errors(tmp_path: Path) -> RowErrors:
    """An error for every third row."""
    writer = RowErrorWriter(Scratch(tmp_path, least_bytes=0))
    for number in range(NUM_ERRORS):
        code = RowErrorCode.NULL_FIELD if number % 2 else RowErrorCode.BAD_LINE
        writer.add(3 * number, RowError(code, f"row {3 * number}: ü\ud800"))
    return writer.finish()


def test_errors_are_found_by_row(errors: RowErrors) -> None:
    assert errors[9] == RowError(RowErrorCode.NULL_FIELD, "row 9: ü\ud800")
    assert errors[3 * NUM_ERRORS - 3].message.startswith(f"row {3 * NUM_ERRORS - 3}")
    for row in (1, -1, 3 * NUM_ERRORS):
        assert row not in errors
    assert list(errors) == list(range(0, 3 * NUM_ERRORS, 3))


def test_errors_are_counted_by_code_with_the_first_sentence(errors: RowErrors) -> None:
    assert errors.by_code() == {
        RowErrorCode.BAD_LINE: (NUM_ERRORS // 2, "row 0: ü\ud800"),
        RowErrorCode.NULL_FIELD: (NUM_ERRORS // 2, "row 3: ü\ud800"),
    }


def test_no_errors_are_an_empty_mapping() -> None:
    nothing = RowErrorWriter(Scratch(least_bytes=None)).finish()
    assert (len(nothing), list(nothing), nothing.by_code()) == (0, [], {})
    assert 0 not in nothing
