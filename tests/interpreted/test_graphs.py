"""Steps replayed as graphs answer as steps launched one by one, on memory that is used again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from late_accelerator import LateAccelerator

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.triton_backend import TritonAttention
from batchradix.engine.decode_graphs import token_sizes
from batchradix.engine.step import Step, empty_i64, i64_table
from batchradix_kernels.tree_attention import tree_attention_reference

HARNESS = Path(__file__).parents[1] / "e2e" / "conftest.py"
SHARED = "Answer from the text: seven red stones lie by the river. "
PROMPTS = [
    list((SHARED + text).encode()) for text in ("", "Q: where?", "Q: what?", "Q: how many?", "tea")
]
MAX_TOKENS = [9, 3, 7, 6, 1]


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("e2e_harness", HARNESS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkpoint(tiny_model_folder: Any) -> Checkpoint:
    return open_checkpoint(str(tiny_model_folder("random", family="llama", prepend_bos=False)))


def answers(
    harness: ModuleType, checkpoint: Checkpoint, accelerator: LateAccelerator, **changes: Any
) -> tuple[Any, list[str]]:
    settings = harness.engine_settings(attention="triton", batch_size=4, **changes)
    engine = harness.make_engine(checkpoint, settings, poison=True, accelerator=accelerator)
    engine.submit(harness.make_job(PROMPTS, MAX_TOKENS))
    done = harness.drain(engine)
    notices = engine.notices
    engine.close()
    return done, notices


@pytest.mark.parametrize("changes", [{"overlap": True}, {"kv_tokens": 90}])
def test_graphs_answer_as_single_launches_do(
    harness: ModuleType, checkpoint: Checkpoint, changes: dict[str, Any]
) -> None:
    wanted, _ = answers(harness, checkpoint, LateAccelerator(), **changes)
    accelerator = LateAccelerator()
    done, notices = answers(harness, checkpoint, accelerator, cuda_graphs="auto", **changes)
    assert done == wanted
    assert notices == []
    assert 0 < accelerator.events.count("capture") < accelerator.events.count("replay")


def test_where_memory_for_graphs_runs_out_it_goes_on_without(
    harness: ModuleType, checkpoint: Checkpoint
) -> None:
    wanted, _ = answers(harness, checkpoint, LateAccelerator())
    accelerator = LateAccelerator(most_graphs=1)
    done, notices = answers(harness, checkpoint, accelerator, cuda_graphs="auto")
    assert done == wanted
    [notice] = notices
    assert "memory ran out for CUDA graphs" in notice


def make_step(draw: np.random.Generator, num_slots: int, num_tokens: int) -> Step:
    """Tokens that each see one shared extent and a slot of their own."""
    shared = int(draw.integers(1, num_slots - num_tokens))
    slots = num_slots - num_tokens + np.arange(num_tokens)
    context = [(0, shared, 0, num_tokens), *((int(s), 1, t, t + 1) for t, s in enumerate(slots))]
    return Step(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.full(num_tokens, shared, dtype=np.int64),
        slots=slots.astype(np.int64),
        context=i64_table(context, 4),
        causal=empty_i64(0, 4),
        moves=empty_i64(0, 3),
        logit_sources=empty_i64(0),
        hold_queries=empty_i64(0),
        hold_ids=empty_i64(0),
        free_holds=empty_i64(0),
    )


def test_a_plan_that_is_filled_again_and_again_is_that_of_its_last_step() -> None:
    """In layers with a window and without; the queries it has beyond the step write nothing and
    get zeros."""
    shape = AttentionShape(
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=20, scale=0.3,
        dtype=torch.float32, device=torch.device("cpu"), layer_windows=(None, 7), sinks=True,
    )  # fmt: skip
    backend = TritonAttention(shape)
    draw = np.random.default_rng(3)
    torch.manual_seed(3)
    steps = [make_step(draw, 600, n) for n in (5, 3, 8, 1)]
    layouts = [backend.lay_out(step) for step in steps]
    sizes = {backend.sizes(layout, 8) for layout in layouts}
    assert len(sizes) == 1, "steps alike have sizes in common"
    plan = backend.empty_plan(sizes.pop())
    for each in plan.of.values():
        each.packed.fill_(2**30)  # whoever reads what was not filled in reads far outside
    for step, layout in zip(steps, layouts, strict=True):
        pool = torch.randn(2, 2, 2, 600, 20)
        other = pool.clone()
        q, k, v = torch.randn(8, 4, 20), torch.randn(8, 2, 20), torch.randn(8, 2, 20)
        sinks, n, once = torch.randn(4), step.num_tokens, backend.plan(step)
        backend.fill(plan, layout)
        for layer, window in enumerate(shape.layer_windows):
            wanted = backend.run(layer, q[:n], k[:n], v[:n], other, once, sinks)
            plan.of[window].partial.fill_(float("nan"))
            out = backend.run(layer, q, k, v, pool, plan, sinks)
            torch.testing.assert_close(out[:n], wanted)
            assert torch.equal(pool, other)
            assert (out[n:] == 0).all()
            plain = tree_attention_reference(
                q[:n], *pool[layer], step.context, [], scale=0.3, window=window, sinks=sinks
            )
            torch.testing.assert_close(out[:n].view(plain.shape), plain, rtol=1e-4, atol=1e-5)


def test_sizes_waste_little_and_hold_every_step() -> None:
    for most in (1, 3, 64, 512):
        sizes = token_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        for number in range(1, most + 1):
            size = next(s for s in sizes if s >= number)
            assert size - number <= max(3, number // 8)
