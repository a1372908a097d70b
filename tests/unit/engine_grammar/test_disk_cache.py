"""Compiled grammars on disk: what is trusted, what goes, what a key depends on."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from batchradix.engine.grammar.child import Serialised
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.disk_cache import GrammarDiskCache, GrammarKeys
from batchradix.types import GrammarSpec

ENTRY = Serialised(native=b'{"a":1}', always_ends=False, notices=("one", "two"))
KEY = "k" * 64


def entry_file(folder: Path) -> Path:
    (path,) = (folder / "grammars").iterdir()
    return path


def test_an_entry_comes_back_as_it_was_stored(tmp_path):
    cache = GrammarDiskCache(tmp_path)
    assert cache.load(KEY) is None
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY
    assert cache.load("j" * 64) is None
    assert entry_file(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "garbage", "renamed", "open"])
def test_an_entry_that_is_not_whole_or_not_ours_is_ignored_and_rewritten(tmp_path, damage):
    cache = GrammarDiskCache(tmp_path)
    cache.store(KEY, ENTRY)
    path = entry_file(tmp_path)
    content = path.read_bytes()
    changed = {
        "cut": content[:-3],
        "flipped": content.replace(b"false", b"true "),
        "empty": b"",
        "garbage": os.urandom(300),
        "renamed": content.replace(b"kk", b"jj"),
        "open": content,
    }
    path.write_bytes(changed[damage])
    if damage == "open":
        path.chmod(0o666)
    assert cache.load(KEY) is None
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY


def test_an_entry_of_another_key_is_not_taken_for_this_one(tmp_path):
    cache = GrammarDiskCache(tmp_path)
    cache.store("j" * 64, ENTRY)
    path = entry_file(tmp_path)
    path.rename(path.with_name(path.name.replace("j", "k")))
    assert cache.load(KEY) is None


def test_the_entries_used_longest_ago_go_when_there_are_too_many_bytes(tmp_path):
    GrammarDiskCache(tmp_path).store("a", ENTRY)
    size = entry_file(tmp_path).stat().st_size
    cache = GrammarDiskCache(tmp_path, max_bytes=2 * size + size // 2)
    cache.store("b", ENTRY)
    for age, name in enumerate("ab"):
        os.utime(tmp_path / "grammars" / f"{name}.grammar", (1000 - age, 1000 - age))
    assert cache.load("b") == ENTRY  # used now
    cache.store("c", ENTRY)
    assert [name for name in "abc" if cache.load(name)] == ["b", "c"]


def test_an_entry_larger_than_its_share_is_not_kept(tmp_path):
    GrammarDiskCache(tmp_path, max_bytes=50).store(KEY, ENTRY)
    assert not (tmp_path / "grammars").exists()


def test_a_folder_that_cannot_be_written_means_no_cache(tmp_path):
    (tmp_path / "file").write_text("")
    cache = GrammarDiskCache(tmp_path / "file")
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) is None


def test_a_key_depends_on_spec_vocabulary_width_and_ends():
    def key(tokens=(b"a", b"b"), size=2, ends=(1,), kind="regex", source="a"):
        return GrammarKeys(tokens, size, ends).key(GrammarSpec(kind=kind, source=source))

    assert key() == key()
    others = [key(source="b"), key(kind="ebnf"), key(ends=(0,)), key(size=3)]
    others += [key(tokens=(b"a", b"c")), key(tokens=(b"ab", b""))]
    assert len({key(), *others}) == 7


class Tokens:
    token_bytes = (*tuple(bytes([i]) for i in range(256)), b"")


def test_what_xgrammar_cannot_read_is_compiled_again(tmp_path):
    spec = GrammarSpec(kind="json_schema", source='{"const":"x"}')
    cache = GrammarDiskCache(tmp_path)
    key = GrammarKeys(Tokens.token_bytes, 257, [256]).key(spec)
    for native in (b"{}", b"\xff", b'{"grammar":', json.dumps([1] * 9).encode()):
        cache.store(key, Serialised(native=native, always_ends=True, notices=()))
        compiled = GrammarCompiler(Tokens(), 257, [256], cache=cache).compile(spec)
        assert compiled.native.memory_size_bytes > 0


def test_one_value_of_a_large_enum_changes_the_key():
    keys = GrammarKeys(Tokens.token_bytes, 257, [256])
    values = [f"SKU-{n}" for n in range(2000)]
    found = set()
    for changed in ("SKU-1999", "SKU-x"):
        source = json.dumps({"enum": [*values[:-1], changed]})
        found.add(keys.key(GrammarSpec(kind="json_schema", source=source)))
    assert len(found) == 2
    assert all(len(key) == hashlib.sha256().digest_size * 2 for key in found)
