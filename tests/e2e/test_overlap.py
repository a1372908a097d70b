"""A device that runs while the host goes on: the same answers, and one wait a step."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from late_accelerator import LateAccelerator

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.engine.core import RadixEngine
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.types import Completion, GrammarSpec

SHARED = "One beginning of them all, which is read once. "
PROMPTS = [list(f"{SHARED}{'ab'[i % 2] * 20}{chr(97 + i) * (i % 9)}".encode()) for i in range(24)]
MAX_TOKENS = [1 + i % 13 for i in range(24)]
SCHEMA = (
    '{"type": "object", "properties": {"kind": {"enum": ["tea", "tin", "stone"]}, '
    '"note": {"type": "string", "maxLength": 6}, "count": {"type": "integer", "maximum": 99, '
    '"minimum": 0}}, "required": ["kind", "note", "count"], "additionalProperties": false}'
)


@pytest.fixture
def checkpoint(tiny_model_folder: Any) -> Checkpoint:
    return open_checkpoint(str(tiny_model_folder("random", family="qwen3", prepend_bos=False)))


def watched(engine: RadixEngine, accelerator: LateAccelerator) -> list[str]:
    """The launches of steps, and the waits, in order, to be filled while the engine runs."""
    runner = engine._runner
    assert runner is not None
    launch = runner.launch

    def recording(step: Any, chosen: Any = None) -> None:
        accelerator.events.append("launch")
        launch(step, chosen)
        accelerator.events.append("launched")

    runner.launch = recording  # type: ignore[method-assign]
    return accelerator.events


@pytest.mark.parametrize("changes", [{}, {"kv_tokens": 200}, {"prefill_tokens": 7}])
def test_answers_are_those_of_a_host_that_waits(
    harness: ModuleType, checkpoint: Checkpoint, changes: dict[str, Any]
) -> None:
    base = {"attention": "torch", "batch_size": 8} | changes
    plain = harness.make_engine(checkpoint, harness.engine_settings(**base), poison=True)
    plain.submit(harness.make_job(PROMPTS, MAX_TOKENS))
    wanted = harness.drain(plain)
    accelerator = LateAccelerator()
    settings = harness.engine_settings(overlap=True, **base)
    engine = harness.make_engine(checkpoint, settings, poison=True, accelerator=accelerator)
    events = watched(engine, accelerator)
    engine.submit(harness.make_job(PROMPTS, MAX_TOKENS))
    done = {}
    num_waits = 0
    while engine.has_work:
        done |= {(c.job_id, c.row): c for c in engine.step()}
        assert events.count("wait") <= num_waits + 1, "a step waits once"
        num_waits = events.count("wait")
    engine.check()
    assert done == wanted
    assert engine.usage.completion_tokens == plain.usage.completion_tokens
    order = [event for event in events if event in ("launch", "launched", "wait")]
    assert "launch wait" not in " ".join(order), "something is waited for during a launch"
    begun = [place for place, event in enumerate(events) if event == "download"]
    ended = [place for place, event in enumerate(events) if event == "wait"]
    ahead = ["launched" in events[a:b] for a, b in zip(begun, ended, strict=True)]
    assert sum(ahead) > len(ahead) // 2, "most steps are launched before the last one is read"
    engine.close()
    plain.close()


def structured(
    harness: ModuleType, checkpoint: Checkpoint, accelerator: LateAccelerator | None, **changes: Any
) -> dict[tuple[int, int], Completion]:
    grammars = GrammarCompiler(
        checkpoint.tokenizer, checkpoint.config.vocab_size, checkpoint.tokenizer.eos_ids
    )
    choices = GrammarSpec(kind="choices", source='["tea", "tin", "stone"]')
    specs = [GrammarSpec(kind="json_schema", source=SCHEMA), choices]
    settings = harness.engine_settings(attention="torch", batch_size=8)
    engine = harness.make_engine(
        checkpoint,
        settings
        if accelerator is None
        else harness.engine_settings(attention="torch", batch_size=8, overlap=True),
        poison=True,
        grammars=grammars,
        accelerator=accelerator,
    )
    job = harness.make_grammar_job(
        PROMPTS,
        [specs[i % 3 == 2] for i in range(24)],
        [12 + i for i in range(24)],
        grammars=grammars,
        **changes,
    )
    engine.submit(job)
    done: dict[tuple[int, int], Completion] = harness.drain(engine)
    assert engine.usage.forced_tokens > 0 or not changes.get("forced_text", True)
    engine.close()
    return done


@pytest.mark.parametrize("changes", [{}, {"forced_text": False}, {"temperature": 0.7}])
def test_structured_answers_are_those_of_a_host_that_waits(
    harness: ModuleType, checkpoint: Checkpoint, changes: dict[str, Any]
) -> None:
    wanted = structured(harness, checkpoint, None, **changes)
    assert structured(harness, checkpoint, LateAccelerator(), **changes) == wanted
