"""Structured answers of the real model equal those of a plain loop over transformers.

The plain loop takes a forward pass of one row for every token, so this is a part of what could
be compared: every schema with a few real prompts.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.schema.load import load_schema
from batchradix.types import GrammarSpec

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

MODEL = "smollm2-135m"
ORACLE = Path(__file__).parents[1] / "oracle" / "smollm2.json.gz"
NUM_PROMPTS = 20
PROMPTS_A_SCHEMA = 3
MAX_TOKENS = 32


def test_greedy_answers_equal_the_plain_loop(
    i3: ModuleType, constrained: ModuleType, harness: ModuleType
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(MODEL)
    tokenizer = checkpoint.tokenizer
    grammars = GrammarCompiler(tokenizer, checkpoint.config.vocab_size, tokenizer.eos_ids)
    oracle, _ = i3.load_rows(ORACLE)
    prompts = sorted({row.prompt for row in oracle if 16 <= len(row.prompt) <= 160})
    prompts = prompts[:: max(1, len(prompts) // NUM_PROMPTS)][:NUM_PROMPTS]
    assert len(prompts) == NUM_PROMPTS
    specs = [
        GrammarSpec(kind="json_schema", source=constrained.source(schema))
        for schema in constrained.SCHEMAS
    ]
    assert len(specs) >= 30
    finite = [load_schema(schema).grammar for schema in constrained.SCHEMAS]
    specs += [spec for spec in finite if spec.kind == "choices"]
    rows = [
        (prompts[(number * PROMPTS_A_SCHEMA + place) % NUM_PROMPTS], spec)
        for number, spec in enumerate(specs)
        for place in range(PROMPTS_A_SCHEMA)
    ]
    job = harness.make_grammar_job(
        [prompt for prompt, _ in rows],
        [spec for _, spec in rows],
        [MAX_TOKENS] * len(rows),
        grammars=grammars,
    )
    engine = harness.make_engine(
        checkpoint, harness.engine_settings(num_threads=2), grammars=grammars
    )
    engine.submit(job)
    done = harness.drain(engine)
    path = checkpoint.path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    alone = constrained.Constrained(model, grammars, tokenizer.eos_ids, tokenizer.vocab_size)
    references = [alone(prompt, spec, MAX_TOKENS) for prompt, spec in rows]
    num_ties = constrained.compare([done[0, row] for row in range(len(rows))], references)
    num_tokens = sum(r.num_tokens for r in references)
    print(f"{len(rows)} rows, {num_tokens} tokens, {num_ties} ties; {engine.usage}")
    assert num_ties <= max(1, num_tokens // 1000)
    assert engine.usage.computed_tokens == job.tree.distinct_tokens
    engine.close()
