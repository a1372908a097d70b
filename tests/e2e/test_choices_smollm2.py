"""Classification by the real model: no decode step, and the probabilities of plain passes."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from batchradix import pipeline
from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.config import EngineOptions, PromptOptions, RunConfig, SamplingOptions
from batchradix.engine.grammar.choices import CompiledChoices
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.schema.load import load_schema
from batchradix.types import GrammarSpec

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
KINDS = ["invoice", "order", "complaint", "question", "thanks", "advert", "résumé", "other"]
LETTERS = [
    "Please find attached our bill of 200 EUR for the work done in May.",
    "You have won a holiday! Click here to claim it.",
    "My parcel arrived broken and nobody answers the phone.",
]
TEMPLATE = "Mail: {{ text }}\nWhat kind of mail is it? Answer as a JSON string.\nAnswer: "


def config(schema: object, **sampling: object) -> RunConfig:
    return RunConfig(
        input=[{"text": letter} for letter in LETTERS],
        model=MODEL,
        schema=schema,
        prompt=PromptOptions(template=TEMPLATE),
        sampling=SamplingOptions(max_tokens=32, **sampling),  # type: ignore[arg-type]
        engine=EngineOptions(dtype="float32"),
    )


def test_an_enum_of_eight_makes_no_decode_step_and_has_the_probabilities_of_plain_passes(
    constrained: ModuleType,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(MODEL)
    tokenizer = checkpoint.tokenizer
    grammars = GrammarCompiler(tokenizer, checkpoint.config.vocab_size, tokenizer.eos_ids)
    schema = {"enum": KINDS}
    spec = load_schema(schema).grammar
    compiled = grammars.compile(spec)
    assert isinstance(compiled, CompiledChoices)
    assert len(compiled.branches) == 1
    summary = pipeline.run(config(schema)).summary
    assert summary.ok == len(LETTERS)
    assert summary.usage.decode_steps == 0
    path = checkpoint.path
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    alone = constrained.Constrained(model, grammars, tokenizer.eos_ids, tokenizer.vocab_size)
    several = {"enum": ["in", "invoice", "invitation", "unpaid invoice", "unpaid order", "order"]}
    for asked in (schema, several):
        outcome = pipeline.run(config(asked, probabilities=True))
        assert outcome.table is not None
        assert (outcome.summary.usage.decode_steps == 0) == (asked is schema)
        grammar: GrammarSpec = load_schema(asked).grammar
        for letter, row in zip(LETTERS, outcome.table.to_pylist(), strict=True):
            text = TEMPLATE.replace("{{ text }}", letter)
            [prompt] = tokenizer.encode_plain([text], [True])
            found = [entry["probability"] for entry in row["probabilities"]]
            assert np.allclose(found, alone.probabilities(prompt, grammar), atol=1e-4)
            assert np.isclose(sum(found), 1)
            walked = alone(prompt, grammar, 32)
            assert row["completion_tokens"] == walked.num_tokens
            assert row["text"] == b"".join(tokenizer.token_bytes[i] for i in walked.ids).decode()
