"""The folder that keeps keys and values: what is found again, and what is never used."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from batchradix.engine.cache.store import BLOCK_TOKENS, BlockShape, KVStore
from batchradix.engine.step import KVBlock
from batchradix.types import U32

SIDE_BYTES = 2 * 3 * BLOCK_TOKENS * 8 * 4
BLOCK_BYTES = 2 * SIDE_BYTES
IDENTITY = {"model": "0f", "version": "1"}


def open_store(folder: Path, **changes: Any) -> KVStore:
    values = {"dtype": "float32", "identity": IDENTITY, "max_bytes": 1 << 30} | changes
    return KVStore(
        folder,
        identity=values["identity"],
        shape=BlockShape(num_layers=2, num_kv_heads=3, k_dim=8, v_dim=8, dtype=values["dtype"]),
        max_bytes=values["max_bytes"],
    )


def prompt(num_blocks: int, seed: int = 0) -> U32:
    return np.random.default_rng(seed).integers(0, 2**32, num_blocks * BLOCK_TOKENS, np.uint32)


def sides(seed: int) -> tuple[memoryview, memoryview]:
    data = np.random.default_rng(seed).bytes(BLOCK_BYTES)
    return memoryview(data)[:SIDE_BYTES], memoryview(data)[SIDE_BYTES:]


def fill(store: KVStore, tokens: U32) -> list[str]:
    """Keeps every block of a prompt, each with bytes that its number decides; their keys."""
    keys = list(store.keys(tokens))
    for number, key in enumerate(keys):
        k, v = sides(number)
        store.write(key, KVBlock(start=number * BLOCK_TOKENS, k=k, v=v))
    return keys


def assert_blocks(blocks: list[KVBlock], numbers: range) -> None:
    assert [block.start for block in blocks] == [n * BLOCK_TOKENS for n in numbers]
    for number, block in zip(numbers, blocks, strict=True):
        assert (block.k, block.v) == sides(number)


def test_blocks_come_back_as_they_were_to_the_prompts_that_begin_with_them(tmp_path: Path) -> None:
    tokens = prompt(4)
    fill(open_store(tmp_path / "new" / "store"), tokens)
    store = open_store(tmp_path / "new" / "store")
    assert_blocks(store.find(tokens, 0), range(4))
    assert_blocks(store.find(tokens[:-1], 0), range(3))
    assert_blocks(store.find(np.append(tokens, tokens), 0), range(4))
    assert_blocks(store.find(tokens, BLOCK_TOKENS), range(1, 4))
    assert_blocks(store.find(tokens, 2 * BLOCK_TOKENS - 1), range(1, 4))
    assert store.find(tokens, 4 * BLOCK_TOKENS) == []
    assert store.find(tokens[BLOCK_TOKENS:], 0) == []  # the same tokens elsewhere
    other = tokens.copy()
    other[2 * BLOCK_TOKENS] += 1
    assert_blocks(store.find(other, 0), range(2))
    assert store.notices == []


def test_a_block_is_a_safetensors_file_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    (key,) = fill(open_store(folder), prompt(1))
    (path,) = folder.iterdir()
    assert path.name == f"{key}-{BLOCK_TOKENS}.safetensors"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tensors = load_file(path)
    wanted = (np.dtype(np.float32), (2, 3, BLOCK_TOKENS, 8))
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == dict.fromkeys("kv", wanted)
    assert (tensors["k"].tobytes(), tensors["v"].tobytes()) == sides(0)


@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"identity": {"model": "1f", "version": "1"}}]
)
def test_blocks_of_another_model_or_dtype_are_not_found(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    tokens = prompt(1)
    fill(open_store(tmp_path), tokens)
    changed = open_store(tmp_path, **({"identity": IDENTITY | {"dtype": "b"}} | changes))
    assert changed.find(tokens, 0) == []
    assert changed.notices == []


def cut(content: bytes) -> bytes:
    return content[:-1]


def lengthen(content: bytes) -> bytes:
    return content + b"\0"


def flip(place: int) -> Callable[[bytes], bytes]:
    def flipped(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[place] ^= 0x10
        return bytes(changed)

    return flipped


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut by a byte": cut,
    "cut in the header": lambda content: content[:100],
    "empty": lambda content: b"",
    "longer": lengthen,
    "much longer": lambda content: content + bytes(1 << 20),
    "a flipped bit of the last value": flip(-1),
    "a flipped bit of the first key": flip(-BLOCK_BYTES),
    "a flipped bit of the header's length": flip(0),
    "a flipped high bit of the header's length": flip(6),
    "a flipped bit of a name in the header": flip(11),
    "no safetensors file": lambda content: bytes(len(content)),
    "another shape": lambda content: content.replace(b"[2, 3, 32, 8]", b"[3, 2, 32, 8]", 1),
    "another dtype": lambda content: content.replace(b'"F32"', b'"I32"', 1),
    "another end": lambda content: content.replace(b'"end": "32"', b'"end": "64"', 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_block_is_ignored_with_a_notice_and_written_anew(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    tokens = prompt(3)
    keys = fill(open_store(tmp_path), tokens)
    path = tmp_path / f"{keys[0]}-{BLOCK_TOKENS}.safetensors"
    whole = path.read_bytes()
    damaged = damage(whole)
    assert damaged != whole
    path.write_bytes(damaged)
    store = open_store(tmp_path)
    assert store.find(tokens, 0) == []
    (notice,) = store.notices
    assert notice.startswith(f"1 block of the KV store {tmp_path} was ignored and computed instead")
    assert notice.endswith(": damaged")
    fill(store, tokens)
    assert path.read_bytes() == whole
    assert_blocks(open_store(tmp_path).find(tokens, 0), range(3))


def test_every_flipped_bit_of_a_header_is_noticed(tmp_path: Path) -> None:
    tokens = prompt(1)
    fill(open_store(tmp_path), tokens)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    length = len(whole) - BLOCK_BYTES
    for place in range(length):
        path.write_bytes(flip(place)(whole))
        assert open_store(tmp_path).find(tokens, 0) == []


def test_a_block_under_the_name_of_another_is_ignored(tmp_path: Path) -> None:
    tokens = prompt(2)
    first, second = fill(open_store(tmp_path), tokens)
    (tmp_path / f"{first}-{BLOCK_TOKENS}.safetensors").rename(
        tmp_path / f"{second}-{2 * BLOCK_TOKENS}.safetensors"
    )
    assert open_store(tmp_path).find(tokens, BLOCK_TOKENS) == []


@pytest.mark.parametrize("what", ["identity", "format"])
def test_a_block_that_says_it_is_of_another_model_or_version_is_ignored_with_a_notice(
    tmp_path: Path, what: str
) -> None:
    tokens = prompt(1)
    (key,) = fill(open_store(tmp_path), tokens)
    path = tmp_path / f"{key}-{BLOCK_TOKENS}.safetensors"
    changes = {"identity": (b'\\"0f\\"', b'\\"1f\\"'), "format": (b"KV 1", b"KV 2")}
    changed = path.read_bytes().replace(*changes[what])
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    store = open_store(tmp_path)
    assert store.find(tokens, 0) == []
    assert store.notices[0].endswith("of another model, dtype or version")


def test_a_block_that_others_could_have_written_to_is_ignored(tmp_path: Path) -> None:
    tokens = prompt(1)
    fill(open_store(tmp_path), tokens)
    (path,) = tmp_path.iterdir()
    path.chmod(0o666)
    store = open_store(tmp_path)
    assert store.find(tokens, 0) == []
    assert "other users could have written to it" in store.notices[0]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_what_is_no_folder_is_done_without_and_said(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    store = open_store(tmp_path / place)
    tokens = prompt(1)
    fill(store, tokens)
    assert store.find(tokens, 0) == []
    (notice,) = store.notices
    assert "cannot be used" in notice
    assert "name a folder of your own" in notice
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.getuid() == 0, reason="root may read and write anything")
def test_a_folder_that_may_only_be_read_serves_and_keeps_nothing(tmp_path: Path) -> None:
    tokens = prompt(2)
    fill(open_store(tmp_path), tokens[:BLOCK_TOKENS])
    tmp_path.chmod(0o500)
    try:
        store = open_store(tmp_path)
        assert_blocks(store.find(tokens, 0), range(1))
        fill(store, tokens)
        assert "cannot be written" in store.notices[0]
    finally:
        tmp_path.chmod(0o700)


def test_a_full_disk_is_said_once_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES // 2, before[1]))
    try:
        keys = fill(store, prompt(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    (notice,) = store.notices
    assert "cannot be written" in notice
    assert not any(map(store.lacks, keys))  # it is not tried again and again


def test_the_least_recently_used_leave_and_prefixes_before_what_builds_on_them_stay(
    tmp_path: Path,
) -> None:
    room = 5 * (BLOCK_BYTES + 1000)
    old, young, new = prompt(2, 1), prompt(2, 2), prompt(2, 3)
    for tokens in (old, young):
        fill(open_store(tmp_path, max_bytes=room), tokens)
    assert len(open_store(tmp_path, max_bytes=room).find(old, 0)) == 2  # used again
    fill(open_store(tmp_path, max_bytes=room), new)
    store = open_store(tmp_path, max_bytes=room)
    assert len(store.find(new, 0)) == 2
    assert len(store.find(old, 0)) == 2
    assert len(store.find(young, 0)) == 1


def test_a_run_keeps_no_more_than_there_is_room_for_and_the_beginning_of_it(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path, max_bytes=3 * BLOCK_BYTES + 6000)
    tokens = prompt(8)
    fill(store, tokens)
    assert_blocks(open_store(tmp_path).find(tokens, 0), range(3))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * BLOCK_BYTES + 6000
    tiny = open_store(tmp_path / "tiny", max_bytes=BLOCK_BYTES - 1)
    fill(tiny, tokens)
    assert "raise --kv-store-size" in tiny.notices[0]


def test_a_smaller_budget_makes_room_and_nothing_that_is_not_ours_is_touched(
    tmp_path: Path,
) -> None:
    tokens = prompt(6)
    fill(open_store(tmp_path), tokens)
    (tmp_path / "model.safetensors").write_bytes(bytes(10 * BLOCK_BYTES))
    abandoned, fresh = tmp_path / "batchradix-kv-old", tmp_path / "batchradix-kv-new"
    for path in (abandoned, fresh):
        path.write_bytes(b"half")
    os.utime(abandoned, (time.time() - 7200,) * 2)
    store = open_store(tmp_path, max_bytes=2 * BLOCK_BYTES + 6000)
    assert_blocks(store.find(tokens, 0), range(2))
    assert (tmp_path / "model.safetensors").exists()
    assert fresh.exists()
    assert not abandoned.exists()


WRITER = """
import sys
sys.path[:0] = [{tests!r}]
import test_store
from pathlib import Path
store = test_store.open_store(Path({folder!r}), max_bytes={max_bytes})
print("open", flush=True)
for turn in range({turns}):
    store = test_store.open_store(Path({folder!r}), max_bytes={max_bytes})
    for seed in range(4):
        tokens = test_store.prompt(4, seed)
        blocks = store.find(tokens, 0)
        test_store.assert_blocks(blocks, range(len(blocks)))
        test_store.fill(store, tokens)
assert store.notices == [], store.notices
"""


def start_writer(folder: Path, *, turns: int, max_bytes: int) -> subprocess.Popen[str]:
    source = WRITER.format(
        tests=str(Path(__file__).parent), folder=str(folder), turns=turns, max_bytes=max_bytes
    )
    return subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_several_runs_at_once_never_see_half_a_block(tmp_path: Path) -> None:
    max_bytes = 6 * BLOCK_BYTES + 12_000  # so that they also remove what others look at
    writers = [start_writer(tmp_path, turns=25, max_bytes=max_bytes) for _ in range(3)]
    for writer in writers:
        _, error = writer.communicate(timeout=120)
        assert writer.returncode == 0, error
    store = open_store(tmp_path, max_bytes=max_bytes)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= max_bytes
    for seed in range(4):
        blocks = store.find(prompt(4, seed), 0)
        assert_blocks(blocks, range(len(blocks)))
    assert store.notices == []


def test_a_killed_run_leaves_whole_blocks_only(tmp_path: Path) -> None:
    for wait_s in (0.0, 0.01, 0.03, 0.05):
        writer = start_writer(tmp_path, turns=10_000, max_bytes=6 * BLOCK_BYTES + 12_000)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        time.sleep(wait_s)
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
        store = open_store(tmp_path)
        for seed in range(4):
            blocks = store.find(prompt(4, seed), 0)
            assert_blocks(blocks, range(len(blocks)))
        assert store.notices == []
