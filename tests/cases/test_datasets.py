"""Functions that are mapped over Hugging Face data sets, each step in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Prints what one process sees of a map: hash, engines started, answers, size of the pickle.
PROGRAM = """
import json, pickle, sys
import datasets
from datasets.fingerprint import Hasher
import batchradix
from batchradix.engine.core import RadixEngine

starts = []
begin = RadixEngine.__init__
def counted(self, *args, **kwargs):
    starts.append(1)
    begin(self, *args, **kwargs)
RadixEngine.__init__ = counted
datasets.disable_progress_bars()
settings = json.loads(sys.argv[1])
options = {"model": "m", "schema": "tag.json", "template": "{{text}}", "max_tokens": 16} | settings
def make():
    return batchradix.Extractor(**options)
seen = {"hash": Hasher.hash(make()), "again": Hasher.hash(make())}
seen["pickle"] = len(pickle.dumps(make()))
data = datasets.load_from_disk("data")
seen["opened"] = len(starts)
out = data.map(make(), batched=True, batch_size=4)
seen |= {"fingerprint": out._fingerprint, "columns": out.column_names}
seen["tags"] = [value["tag"] for value in out["value"]]
seen["starts"] = len(starts)
if "--spawn" in sys.argv:
    import multiprocess
    multiprocess.set_start_method("spawn")
if "--processes" in sys.argv:
    twice = data.map(make(), batched=True, num_proc=2, load_from_cache_file=False)
    seen["processes"] = [value["tag"] for value in twice["value"]]
print(json.dumps(seen))
"""


def _process(settings: dict[str, Any], environ: dict[str, str], *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(settings), *words],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "hashed properly" not in done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_a_mapped_function_hashes_to_what_it_answers_and_never_carries_its_model(
    folder: Path, const: Callable[..., Path], processes: Any, tmp_path: Path
) -> None:
    """Case ds-01."""
    import datasets

    os.symlink(const("a"), "m")
    data = datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(10)]})
    data.save_to_disk("data")
    environ = processes.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    first = _process({}, environ, "--processes")
    second = _process({"batch_size": 3, "device": "cpu"}, environ)
    changed = _process({"template": "x {{text}}"}, environ, "--processes", "--spawn")
    assert first["hash"] == first["again"] == second["hash"] != changed["hash"]
    assert first["pickle"] < 1_000_000
    assert first["columns"][0] == "text"
    assert first["tags"] == second["tags"] == ["k"] * 10
    assert first["processes"] == changed["processes"] == ["k"] * 10  # forked, and spawned
    assert (first["opened"], first["starts"], second["starts"], changed["starts"]) == (0, 1, 0, 1)
    assert first["fingerprint"] == second["fingerprint"] != changed["fingerprint"]
