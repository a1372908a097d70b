"""The engine with ``attention=triton`` answers as transformers does row by row (I3)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.engine.attention.triton_backend import TritonAttention

SHARED = "Answer from the text: seven red stones lie by the river. "
TEXTS = [
    SHARED,
    SHARED + "Q: where?",
    SHARED + "Q: what?",
    SHARED + "Q: where do they lie?",
    SHARED + "And more",
    "tea",
    "x",
]


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", {}, id="llama, batched"),
        pytest.param("qwen3", {"prefill_tokens": 24, "batch_size": 3}, id="qwen3, in chunks"),
        pytest.param("qwen2", {"kv_tokens": 120, "batch_size": 4}, id="qwen2, evicting"),
        pytest.param("qwen3", {"kv_dtype": "fp8", "prefill_tokens": 24}, id="qwen3, over fp8"),
    ],
)
def test_greedy_answers_are_those_of_each_row_alone(
    harness: ModuleType,
    i3: ModuleType,
    tiny_model_folder: Any,
    family: str,
    changes: dict[str, Any],
) -> None:
    folder = tiny_model_folder("random", family=family, prepend_bos=False)
    checkpoint = open_checkpoint(str(folder))
    rounding = in_8_bits if changes.get("kv_dtype") == "fp8" else None
    alone = i3.Alone.load(folder, checkpoint.tokenizer.eos_ids, rounding=rounding)
    oracle = [alone(list(text.encode()), 2 + number) for number, text in enumerate(TEXTS)]
    settings = harness.engine_settings(attention="triton", **changes)
    engine = harness.make_engine(checkpoint, settings, poison=True)
    assert isinstance(engine._runner._attention, TritonAttention)
    engine.submit(
        harness.make_job([row.prompt for row in oracle], [row.max_tokens for row in oracle])
    )
    answers = {row: i3.Answer.of(done) for (_, row), done in harness.drain(engine).items()}
    i3.compare(oracle, answers, checkpoint.tokenizer.eos_ids, alone).check()
    engine.close()


def test_the_command_line_answers_in_bfloat16(tiny_model_folder: Any, tmp_path: Path) -> None:
    """With a model that answers the same whatever rounding does."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x"}\n{"prompt": "7"}\n')
    command = ["run", str(rows), "--model", str(tiny_model_folder("markov")), "--max-tokens", "3"]
    options = ["--attention", "triton", "--dtype", "bfloat16", "-o", str(tmp_path / "out.jsonl")]
    done = subprocess.run(
        [sys.executable, "-m", "batchradix", *command, *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert [answer["text"] for answer in answers] == ["yza", "890"]
