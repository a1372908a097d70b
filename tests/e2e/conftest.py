"""Running planned rows through the real engine, with the invariants every run must keep."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.engine.accelerator import Accelerator
from batchradix.engine.core import RadixEngine
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.model_runner import ModelRunner
from batchradix.engine.step import Step
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.settings import EngineSettings
from batchradix.types import (
    Completion,
    EngineJob,
    FinishReason,
    GrammarSpec,
    RequestTable,
    RowSettings,
    TokenTable,
)

ATTENTION = "auto"  # of `engine_settings`; a test module may set another


class PoisoningRunner(ModelRunner):
    """Fills the free slots of the pool with NaN before every step that moves nothing: what is
    moved or spilled stands in slots that are free already."""

    engine: RadixEngine | None = None

    def launch(self, step: Step, chosen: torch.Tensor | None = None) -> None:
        if self.engine is not None and not len(step.moves) and not step.spills:
            runs = self.engine.scheduler.pool.free_runs
            self.poison_free((start, start + length) for start, length in runs)
        super().launch(step, chosen)


def engine_settings(**changes: Any) -> EngineSettings:
    """Float32 on the CPU, with room for anything unless ``changes`` say otherwise."""
    values: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "attention": ATTENTION,
        "batch_size": 32,
        "prefill_tokens": 256,
        "kv_tokens": 20_000,
        "prefix_cache": True,
        "num_threads": 1,
    }
    return EngineSettings(**(values | changes))


def make_engine(
    checkpoint: Checkpoint,
    settings: EngineSettings,
    *,
    poison: bool = False,
    grammars: GrammarCompiler | None = None,
    accelerator: Accelerator | None = None,
) -> RadixEngine:
    """The engine as the pipeline makes it; ``poison`` keeps free slots full of NaN."""
    runner = None
    if poison:
        runner = PoisoningRunner(checkpoint, settings, accelerator=accelerator)
    detokenizer = IncrementalDetokenizer(checkpoint.tokenizer.token_bytes)
    engine = RadixEngine(
        checkpoint,
        settings,
        detokenizer,
        grammars=grammars,
        runner=runner,
        accelerator=accelerator,
    )
    if runner is not None:
        runner.engine = engine
        runner._store, runner._space = engine._store, engine._space
        runner._retreat = engine._retreat
    return engine


def make_job(
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    *,
    prefix_cache: bool = True,
    retain: bool = False,
) -> EngineJob:
    """A planned greedy job; duplicates stay rows of their own."""
    tokens = TokenTable.from_rows(prompts)
    plan = make_plan(tokens)
    return EngineJob(
        tokens=tokens,
        plan=plan,
        tree=(build_tree if prefix_cache else flat_tree)(plan, tokens.lengths),
        requests=RequestTable(
            settings=(RowSettings(),),
            settings_id=np.zeros(len(prompts), dtype=np.int32),
            max_tokens=np.array(max_tokens, dtype=np.int32),
            rng_key=np.zeros(len(prompts), dtype=np.uint64),
        ),
        retain=retain,
    )


def make_grammar_job(
    prompts: Sequence[Sequence[int]],
    specs: Sequence[GrammarSpec],
    max_tokens: Sequence[int],
    *,
    grammars: GrammarCompiler,
    forced_text: bool = True,
    prefix_cache: bool = True,
    temperature: float = 0.0,
) -> EngineJob:
    """A planned job of rows under grammars, each with its answer's opening behind its prompt."""
    distinct = list(dict.fromkeys(specs))
    openings = [list(grammars.opening(s)) if forced_text else [] for s in distinct]
    settings_id = [distinct.index(spec) for spec in specs]
    opened = [openings[i][:room] for i, room in zip(settings_id, max_tokens, strict=True)]
    tokens = TokenTable.from_rows([[*p, *o] for p, o in zip(prompts, opened, strict=True)])
    plan = make_plan(tokens)
    return EngineJob(
        tokens=tokens,
        plan=plan,
        tree=(build_tree if prefix_cache else flat_tree)(plan, tokens.lengths),
        requests=RequestTable(
            settings=tuple(RowSettings(grammar=s, temperature=temperature) for s in distinct),
            settings_id=np.array(settings_id, dtype=np.int32),
            max_tokens=np.array(max_tokens, dtype=np.int32),
            rng_key=np.arange(len(prompts), dtype=np.uint64),
            num_forced=np.array([len(o) for o in opened], dtype=np.int32),
        ),
    )


def drain(engine: RadixEngine) -> dict[tuple[int, int], Completion]:
    """Steps until nothing waits; completions by (job id, row), exactly one each (I1), and the
    pool in order (I6)."""
    done: dict[tuple[int, int], Completion] = {}
    while engine.has_work:
        for completion in engine.step():
            key = (completion.job_id, completion.row)
            assert key not in done, "a row was answered twice"
            done[key] = completion
    engine.check()
    assert not engine.scheduler.running
    return done


def check_completion(completion: Completion, max_tokens: int) -> None:
    """The counts and reasons of a free-text answer fit its tokens."""
    assert completion.error is None
    ended = completion.finish_reason is FinishReason.STOP
    assert completion.completion_tokens == len(completion.token_ids) + ended
    if not ended:
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.completion_tokens == max_tokens


@pytest.fixture(scope="session")
def harness() -> ModuleType:
    """This module: engines, jobs and runs."""
    return sys.modules[__name__]
