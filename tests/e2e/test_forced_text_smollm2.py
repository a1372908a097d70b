"""Structured answers of the real model, every shortcut on, equal those of a plain loop over
transformers.

The plain loop takes a forward pass with the whole output layer for every token, forced ones too.
CI compares every schema with a few real prompts, the slow test with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.schema.load import load_schema
from batchradix.types import GrammarSpec

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]

MODEL = "smollm2-135m"
ORACLE = Path(__file__).parents[1] / "oracle" / "smollm2.json.gz"
NUM_PROMPTS = 20
MAX_TOKENS = 32
ROWS_TOGETHER = 20  # of the plain loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """The real model, real prompts, and the plain loop over many rows at once."""

    checkpoint: Checkpoint
    grammars: GrammarCompiler
    prompts: list[list[int]]
    together: Any


@pytest.fixture(scope="module")
def real(i3: ModuleType, lockstep: ModuleType) -> Real:
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(MODEL)
    tokenizer = checkpoint.tokenizer
    rows, _ = i3.load_rows(ORACLE)
    prompts = sorted({row.prompt for row in rows if 16 <= len(row.prompt) <= 160})
    prompts = prompts[:: max(1, len(prompts) // NUM_PROMPTS)][:NUM_PROMPTS]
    assert len(prompts) == NUM_PROMPTS
    path = checkpoint.path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    return Real(
        checkpoint=checkpoint,
        grammars=GrammarCompiler(tokenizer, checkpoint.config.vocab_size, tokenizer.eos_ids),
        prompts=[list(prompt) for prompt in prompts],
        together=lockstep.Lockstep(model),
    )


@pytest.mark.parametrize(
    "prompts_a_schema",
    [3, pytest.param(NUM_PROMPTS, marks=pytest.mark.slow)],
    ids=["a few prompts", "all prompts"],
)
def test_greedy_answers_equal_the_plain_loop(
    prompts_a_schema: int, real: Real, constrained: ModuleType, harness: ModuleType
) -> None:
    schemas = list(constrained.SCHEMAS)
    assert len(schemas) >= 30
    specs = [GrammarSpec(kind="json_schema", source=constrained.source(s)) for s in schemas]
    for schema in constrained.SCHEMAS:  # those of few answers once more, as lists of these
        spec = load_schema(schema).grammar
        if spec.kind == "choices":
            schemas.append(schema)
            specs.append(spec)
    rows = [
        (real.prompts[(number * prompts_a_schema + place) % NUM_PROMPTS], number)
        for number in range(len(schemas))
        for place in range(prompts_a_schema)
    ]
    job = harness.make_grammar_job(
        [prompt for prompt, _ in rows],
        [specs[number] for _, number in rows],
        [MAX_TOKENS] * len(rows),
        grammars=real.grammars,
    )
    settings = harness.engine_settings(num_threads=2, speculate=4)
    engine = harness.make_engine(real.checkpoint, settings, grammars=real.grammars)
    engine.submit(job)
    done = harness.drain(engine)
    engine.close()
    completions = [done[0, row] for row in range(len(rows))]
    references = plain_loop(real, constrained, [(p, specs[number]) for p, number in rows])
    num_ties = constrained.compare(completions, references)
    num_tokens = sum(r.num_tokens for r in references)
    print(f"{len(rows)} rows, {num_tokens} tokens, {num_ties} ties; {engine.usage}")
    assert num_ties <= max(1, num_tokens // 1000)
    assert engine.usage.computed_tokens == job.tree.distinct_tokens
    ended = [(c, number) for c, (_, number) in zip(completions, rows, strict=True)
             if c.finish_reason == "stop"]  # fmt: skip
    assert len(ended) > len(rows) / 3
    checker = Draft202012Validator.FORMAT_CHECKER
    for completion, number in ended:
        validator = Draft202012Validator(schemas[number], format_checker=checker)
        validator.validate(json.loads(completion.text))


def plain_loop(
    real: Real, constrained: ModuleType, rows: list[tuple[list[int], GrammarSpec]]
) -> list[Any]:
    """The answer of every row."""
    tokenizer = real.checkpoint.tokenizer

    def answer(prompt: list[int], spec: GrammarSpec, model: Any) -> Any:
        alone = constrained.Constrained(
            model, real.grammars, tokenizer.eos_ids, tokenizer.vocab_size
        )
        return alone(prompt, spec, MAX_TOKENS)

    asking: list[tuple[list[int], Callable[[Any], Any]]] = [
        (prompt, partial(answer, prompt, spec)) for prompt, spec in rows
    ]
    found: list[Any] = []
    for start in range(0, len(asking), ROWS_TOGETHER):
        found += real.together(asking[start : start + ROWS_TOGETHER])
    return found
