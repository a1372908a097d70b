"""Keys and values of prompt prefixes in a folder, from one run to the next.

What is kept are blocks of `BLOCK_TOKENS` tokens at absolute multiples of that length, each in one
safetensors file of ``k`` and ``v`` [layers, key heads, tokens, head dimension], whatever the pool
looks like. A block is named by the SHA-256 of what made it and of all tokens up to its end: a
longer or shorter prefix finds what it has in common, and another model's blocks are never found.
The header holds the SHA-256 of the content, so that what is not whole is never used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchradix._version import VERSION
from batchradix.checkpoint.cache_folder import is_own_file, replacing
from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.engine.step import KVBlock
from batchradix.settings import EngineSettings
from batchradix.types import U32

BLOCK_TOKENS = 32
_FORMAT = "batchradix KV 1"
_DTYPES = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "fp8": ("F8_E4M3", 1),
}
_NAME = re.compile(r"([0-9a-f]{64})-([1-9]\d{0,8})\.safetensors")
_TEMPORARY = "batchradix-kv-"
_ABANDONED_S = 3600.0
_MAX_HEADER_BYTES = 1 << 16
_DAMAGED = "damaged"


class _Unusable(Exception):
    """Why a block is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Of the keys of one block, and of its values; ``dtype`` as in `EngineSettings`, or ``fp8``."""

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    num_tokens: int = BLOCK_TOKENS


_NEUTRAL_SETTINGS = frozenset(
    {
        "attention",
        "batch_size",
        "cuda_graphs",
        "device",
        "forced_text",
        "kv_disk_bytes",
        "kv_host_memory_bytes",
        "kv_store",
        "kv_store_bytes",
        "kv_tokens",
        "num_kv_copies",
        "num_threads",
        "overlap",
        "prefill_tokens",
        "prefix_cache",
        "profile_kv",
        "repetition_guard",
        "speculate",
    }
)
"""Settings that decide nothing about keys and values but in which order sums are rounded."""


def open_store(checkpoint: Checkpoint, settings: EngineSettings) -> KVStore | None:
    """The store of an engine, None where it has none."""
    if settings.kv_store is None:
        return None
    config = checkpoint.config
    num_kv_heads, k_dim, v_dim = config.kv_shape
    decisive = {
        name: value for name, value in asdict(settings).items() if name not in _NEUTRAL_SETTINGS
    }
    return KVStore(
        settings.kv_store,
        identity={"model": checkpoint.content_hash, "version": VERSION, **decisive},
        shape=BlockShape(
            num_layers=config.num_layers,
            num_kv_heads=num_kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            dtype=settings.dtype if settings.kv_dtype == "auto" else settings.kv_dtype,
        ),
        max_bytes=settings.kv_store_bytes,
    )


class KVStore:
    """Blocks in ``folder``, which is made when it is not there; safe for several runs at once.

    ``identity``: all that decides keys and values beside the tokens, as a JSON object. Least
    recently used blocks leave, whosever they are, when all take more than ``max_bytes``. Nothing
    that goes wrong with the folder is raised: the store then holds or keeps less, and
    `notices` says so.
    """

    def __init__(
        self, folder: Path, *, identity: Mapping[str, Any], shape: BlockShape, max_bytes: int
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._identity = json.dumps(identity, sort_keys=True)
        name, element_bytes = _DTYPES[shape.dtype]
        self.block_tokens = shape.num_tokens
        self._tensors: dict[str, dict[str, Any]] = {}
        self._k_bytes = self._block_bytes = 0
        for side, width in (("k", shape.k_dim), ("v", shape.v_dim)):
            self._k_bytes, start = self._block_bytes, self._block_bytes
            sizes = [shape.num_layers, shape.num_kv_heads, shape.num_tokens, width]
            self._block_bytes += math.prod(sizes) * element_bytes
            self._tensors[side] = {
                "dtype": name,
                "shape": sizes,
                "data_offsets": [start, self._block_bytes],
            }
        self._opened_ns = time.time_ns()
        self._ends: dict[str, int] = {}  # of the blocks that are there, by key
        self._last_end = 0
        self._total_bytes = 0
        self._own_bytes = 0  # of blocks that this run loaded or wrote
        self._is_writable = True
        self._ignored: Counter[str] = Counter()
        self._trouble: list[str] = []
        self._open()

    @property
    def notices(self) -> list[str]:
        """What went wrong so far, in sentences."""
        ignored = [
            f"{number:,} {'block' if number == 1 else 'blocks'} of the KV store {self._folder} "
            f"{'was' if number == 1 else 'were'} ignored and computed instead: {why}"
            for why, number in sorted(self._ignored.items())
        ]
        return [*self._trouble, *ignored]

    def keys(self, tokens: U32) -> Iterator[str]:
        """The key of each whole block of a prompt, from its first token on."""
        digest = hashlib.sha256(self._identity.encode()).digest()
        size = self.block_tokens
        for end in range(size, len(tokens) + 1, size):
            block = tokens[end - size : end].astype("<u4").tobytes()
            digest = hashlib.sha256(digest + block).digest()
            yield digest.hex()

    def find(self, tokens: U32, depth: int) -> list[KVBlock]:
        """The blocks of a prompt that hold its tokens from ``depth`` on, without a gap, as many
        as there are; read and verified."""
        found: list[KVBlock] = []
        if depth >= self._last_end:
            return found
        for number, key in enumerate(self.keys(tokens)):
            start = number * self.block_tokens
            if start + self.block_tokens <= depth:
                continue
            block = self._try_read(key, start) if key in self._ends else None
            if block is None:
                break
            found.append(block)
        return found

    def lacks(self, key: str) -> bool:
        """Whether a block is to be written: it is not there, and there is room for it."""
        room = self._max_bytes - self._own_bytes
        return self._is_writable and key not in self._ends and self._block_bytes <= room

    def write(self, key: str, block: KVBlock) -> None:
        """Keeps a block; what cannot be written is not kept."""
        if not self.lacks(key):
            return
        data = hashlib.sha256(block.k)
        data.update(block.v)
        end = block.start + self.block_tokens
        head = json.dumps(self._header(key, end, data.hexdigest()))
        head += " " * (-len(head) % 8)  # tensors are aligned
        try:
            with replacing(self._path(key, end), prefix=_TEMPORARY) as file:
                file.write(len(head).to_bytes(8, "little") + head.encode())
                file.write(block.k)
                file.write(block.v)
                file.flush()  # or closing it would set its time
                self._touch(file.fileno(), end)
            self._note(key, end)
            self._total_bytes += self._block_bytes
            self._own_bytes += self._block_bytes
            if self._total_bytes > self._max_bytes:
                self._scan()
        except OSError as error:
            self._stop_writing(error)

    def _open(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            self._is_writable = False
            self._trouble.append(
                f"the KV store {self._folder} cannot be used ({error.strerror or error}), so "
                f"nothing is loaded from it and nothing kept; name a folder of your own"
            )
        if self._is_writable and self._block_bytes > self._max_bytes:
            self._trouble.append(
                f"the KV store may take {self._max_bytes:,} bytes, which is less than the "
                f"{self._block_bytes:,} of {self.block_tokens} tokens; raise --kv-store-size"
            )

    def _scan(self) -> None:
        """Looks what is there, and removes the least recently used beyond the budget."""
        entries: list[tuple[int, int, int, str]] = []
        for entry in os.scandir(self._folder):
            with suppress(OSError):  # another run was faster
                info = entry.stat(follow_symlinks=False)
                match = _NAME.fullmatch(entry.name)
                if match is not None:
                    end = int(match[2])
                    entries.append((info.st_mtime_ns, -end, info.st_size, match[1]))
                elif (
                    entry.name.startswith(_TEMPORARY) and time.time() - info.st_mtime > _ABANDONED_S
                ):
                    os.unlink(entry.path)
        self._total_bytes = sum(size for _, _, size, _ in entries)
        entries.sort(reverse=True)
        while entries and self._total_bytes > self._max_bytes and self._is_writable:
            _, end, size, key = entries.pop()
            try:
                self._path(key, -end).unlink(missing_ok=True)
            except OSError as error:
                self._stop_writing(error)
            self._total_bytes -= size
        self._ends, self._last_end = {}, 0
        for _, end, _, key in entries:
            self._note(key, -end)

    def _note(self, key: str, end: int) -> None:
        self._ends[key] = end
        self._last_end = max(self._last_end, end)

    def _try_read(self, key: str, start: int) -> KVBlock | None:
        """A block that is there, None when it cannot be used; it is then computed and, where that
        is possible, written anew."""
        try:
            return self._read(key, start)
        except FileNotFoundError:  # another run removed it
            pass
        except _Unusable as unusable:
            self._ignored[str(unusable)] += 1
        except OSError as error:
            self._ignored[f"unreadable ({error.strerror or error})"] += 1
        del self._ends[key]
        return None

    def _read(self, key: str, start: int) -> KVBlock:
        end = start + self.block_tokens
        path = self._path(key, end)
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if not is_own_file(info):
                raise _Unusable("other users could have written to it")
            if info.st_size > self._block_bytes + _MAX_HEADER_BYTES:
                raise _Unusable(_DAMAGED)
            content = bytearray(info.st_size)
            if file.readinto(content) != len(content):
                raise _Unusable(_DAMAGED)
        length = int.from_bytes(content[:8], "little")
        data = memoryview(content)[8 + length :]
        try:
            header = json.loads(content[8 : 8 + length])
            facts = dict(header["__metadata__"])
            checksum = str(facts["sha256"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _Unusable(_DAMAGED) from None
        if (facts.get("format"), facts.get("made_by")) != (_FORMAT, self._identity):
            raise _Unusable("of another model, dtype or version")
        if header != self._header(key, end, checksum) or len(data) != self._block_bytes:
            raise _Unusable(_DAMAGED)
        if checksum != hashlib.sha256(data).hexdigest():
            raise _Unusable(_DAMAGED)
        with suppress(OSError):  # a folder that may only be read
            self._touch(path, end)
        self._own_bytes += len(data)
        return KVBlock(start=start, k=data[: self._k_bytes], v=data[self._k_bytes :])

    def _header(self, key: str, end: int, checksum: str) -> dict[str, Any]:
        facts = {
            "format": _FORMAT,
            "made_by": self._identity,
            "key": key,
            "end": str(end),
            "sha256": checksum,
        }
        return {"__metadata__": facts, **self._tensors}

    def _stop_writing(self, error: OSError) -> None:
        if self._is_writable:
            self._is_writable = False
            self._trouble.append(
                f"the KV store {self._folder} cannot be written ({error.strerror or error}), so "
                f"no more is kept in it; free some space or name a folder of your own"
            )

    def _touch(self, file: Path | int, end: int) -> None:
        """Marks a block as used by this run, and just before those that it builds on: a block is
        of no use without them."""
        used_ns = self._opened_ns - end * 1000
        os.utime(file, ns=(used_ns, used_ns))

    def _path(self, key: str, end: int) -> Path:
        return self._folder / f"{key}-{end}.safetensors"
