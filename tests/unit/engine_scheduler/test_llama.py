"""The whole engine on a random Llama: greedy float32 answers are those of transformers."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.engine.core import RadixEngine
from batchradix.engine.model_runner import ModelRunner
from batchradix.engine.step import Step
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.settings import EngineSettings

MAX_TOKENS = 20
NUM_ROWS = 30


class PoisoningRunner(ModelRunner):
    """Fills free slots with NaN before every step that moves nothing."""

    engine: RadixEngine | None = None

    def launch(self, step: Step, chosen: torch.Tensor | None = None) -> None:
        if self.engine is not None and len(step.moves) == 0:
            runs = self.engine.scheduler.pool.free_runs
            self.poison_free((start, start + length) for start, length in runs)
        super().launch(step, chosen)


def prompts() -> list[list[int]]:
    """Rows that share, contain and equal each other."""
    draw = random.Random(5)
    stems = [[draw.randrange(256) for _ in range(40)] for _ in range(3)]
    rows = []
    for i in range(NUM_ROWS):
        stem = stems[i % 3]
        rows.append([256, *stem[: draw.randrange(1, 40)], *draw.choices(range(256), k=i % 4)])
    rows[7] = list(rows[4])
    rows[9] = rows[8][:3]
    return rows


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> list[tuple[list[int], list[float]]]:
    """Each row generated alone: its token ids and the gap of the best two logits at each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    answers = []
    for row in prompts():
        ids = torch.tensor([row])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.stack([step[0].topk(2).values for step in out.logits])
        gaps = (best[:, 0] - best[:, 1]).tolist()
        answers.append((out.sequences[0, len(row) :].tolist(), gaps))
    return answers


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="all at once"),
        pytest.param({"prefix_cache": False}, id="prefix cache off"),
        pytest.param({"batch_size": 1}, id="one at a time"),
        pytest.param({"kv_tokens": 70}, id="preempting in a small pool"),
        pytest.param({"prefill_tokens": 5, "kv_tokens": 160, "batch_size": 7}, id="chunked"),
    ],
)
def test_greedy_answers_equal_transformers_alone(
    sim: ModuleType,
    checkpoint: Checkpoint,
    alone: list[tuple[list[int], list[float]]],
    changes: dict[str, Any],
) -> None:
    values: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "attention": "torch",
        "batch_size": 16,
        "prefill_tokens": 64,
        "kv_tokens": 2000,
        "prefix_cache": True,
        "num_threads": 1,
    }
    settings = EngineSettings(**(values | changes))
    runner = PoisoningRunner(checkpoint, settings)
    detokenizer = IncrementalDetokenizer(checkpoint.tokenizer.token_bytes)
    engine = RadixEngine(checkpoint, settings, detokenizer, runner=runner)
    runner.engine = engine
    rows = prompts()
    # Cold, cold again, and warm.
    for retain in (False, True, False) if settings.batch_size > 1 else (False,):
        engine.submit(sim.make_job(rows, [MAX_TOKENS] * NUM_ROWS, retain=retain))
        completions = []
        while engine.has_work:
            completions += engine.step()
            engine.check()
        assert sorted(c.row for c in completions) == list(range(NUM_ROWS))
        for c in completions:
            expected, gaps = alone[c.row]
            got = [*c.token_ids]
            if expected[-1] in sim.EOS_IDS:
                expected = expected[:-1]
            differing = [i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b]
            if differing:
                assert gaps[differing[0]] < 1e-3
            else:
                assert got == expected
    if settings.kv_tokens == 70:
        assert engine.usage.preemptions > 0
    engine.close()
