"""A run whose step never ends leaves at the second signal, with what was committed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

Run = Callable[..., tuple[int, str, str]]

HANGING = """
import hashlib
from batchradix.cli import signals
from batchradix.cli.main import main
from batchradix.engine.model_runner import ModelRunner
from batchradix.sink import shards

shards.COMMIT_ROWS, signals.GRACE_S = 2, 0.2
launch, num_left = ModelRunner.launch, 8

def hang(runner, *step):
    global num_left
    num_left -= 1
    if num_left == 0:
        print("hanging", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # heeds no signal, for half an hour
    launch(runner, *step)

ModelRunner.launch = hang
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_step_that_hangs_in_a_call_into_c(
    tmp_path: Path, tiny_model_folder: Callable[..., Path], batchradix: Run, number: int
) -> None:
    rows = [{"id": str(i), "prompt": f"{i} c"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.arrow"
    words = [tmp_path / "rows.jsonl", "--model", tiny_model_folder("markov"), "-o", out, "--json"]
    command = ["run", *map(str, words), "--max-tokens", "3", "--batch-size", "2"]
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "hanging\n"
            process.send_signal(number)
            time.sleep(0.3)
            assert process.poll() is None
            process.send_signal(number)
            _, shown = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert shown.endswith("stopped in the middle of a step that does not end\n")
    code, output, _ = batchradix(*command)
    assert code == 0
    assert json.loads(output)["resumed_rows"] == 4
    assert pl.read_ipc(out)["text"].to_list() == ["def"] * 8
