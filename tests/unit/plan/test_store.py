from __future__ import annotations

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.errors import RunError
from batchradix.plan.order import make_plan
from batchradix.plan.store import (
    TokenTableWriter,
    read_plan,
    read_table,
    write_plan,
    write_table,
)
from batchradix.types import TokenTable

TABLES = st.lists(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=4), max_size=4), max_size=4)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tmp_path_factory.mktemp("shelf")


@settings(deadline=None, max_examples=40)
@given(TABLES, st.booleans())
def test_appended_tables_come_back_as_one(shelf, tables, on_disk):
    with TokenTableWriter(shelf / "t" if on_disk else None) as writer:
        for rows in tables:
            writer.append(TokenTable.from_rows(rows))
        whole = writer.finish()
    expected = TokenTable.from_rows([row for rows in tables for row in rows])
    assert whole.values.tolist() == expected.values.tolist()
    assert whole.offsets.tolist() == expected.offsets.tolist()
    assert (whole.values.dtype, whole.offsets.dtype) == (np.uint32, np.int64)


def test_a_table_on_disk_is_mapped_and_read_only(tmp_path):
    write_table(tmp_path, TokenTable.from_rows([[1, 2], [], [3]]))
    table = read_table(tmp_path)
    assert isinstance(table.values.base, np.memmap)
    assert not table.values.flags.writeable
    assert table[2].tolist() == [3]


def test_a_plan_comes_back(tmp_path):
    plan = make_plan(TokenTable.from_rows([[1, 2], [1], [0]]))
    write_plan(tmp_path, plan)
    again = read_plan(tmp_path)
    assert again.order.tolist() == plan.order.tolist()
    assert again.lcp.tolist() == plan.lcp.tolist()
    assert again.lcp.dtype == np.int32


def test_an_open_map_survives_the_table_being_written_anew(tmp_path):
    write_table(tmp_path, TokenTable.from_rows([[1, 2, 3]]))
    old = read_table(tmp_path)
    write_table(tmp_path, TokenTable.from_rows([[9]]))
    assert old.values.tolist() == [1, 2, 3]
    assert read_table(tmp_path).values.tolist() == [9]


def truncate(path):
    os.truncate(path, path.stat().st_size - 4)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def drop(path):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip, drop])
@pytest.mark.parametrize("name", ["values.u32", "offsets.i64", "table.json"])
def test_damage_to_a_table_is_one_clear_sentence(tmp_path, damage, name):
    write_table(tmp_path, TokenTable.from_rows([[1, 2], [3]]))
    damage(tmp_path / name)
    with pytest.raises(RunError, match=f"{name} is damaged: .*; delete .* and plan again"):
        read_table(tmp_path)


@pytest.mark.parametrize("damage", [truncate, flip, drop])
@pytest.mark.parametrize("name", ["order.i64", "lcp.i32", "plan.json"])
def test_damage_to_a_plan_is_one_clear_sentence(tmp_path, damage, name):
    write_plan(tmp_path, make_plan(TokenTable.from_rows([[1, 2], [3]])))
    damage(tmp_path / name)
    with pytest.raises(RunError, match=f"{name} is damaged"):
        read_plan(tmp_path)


def test_boundaries_that_do_not_fit_the_tokens_are_damage(tmp_path):
    table = TokenTable(np.zeros(3, dtype=np.uint32), np.array([0, 4, 3], dtype=np.int64))
    with pytest.raises(RunError, match="row boundaries"):
        write_table(tmp_path, table)


def test_a_table_of_another_version_is_refused(tmp_path):
    write_table(tmp_path, TokenTable.from_rows([[1]]))
    index = tmp_path / "table.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "version": 99}))
    with pytest.raises(RunError, match="version 99"):
        read_table(tmp_path)


def test_a_writer_given_up_leaves_no_table(tmp_path):
    with TokenTableWriter(tmp_path) as writer:
        writer.append(TokenTable.from_rows([[1]]))
    with pytest.raises(RunError, match="never finished"):
        read_table(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_clear_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write .*file"):
        TokenTableWriter(tmp_path / "file" / "folder")
