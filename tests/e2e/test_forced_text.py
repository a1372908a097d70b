"""Structured answers with every shortcut equal those of a plain loop, token for token."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from batchradix import pipeline
from batchradix.api import LLM
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import EngineOptions, RunConfig, SamplingOptions
from batchradix.engine import candidates
from batchradix.engine.core import RadixEngine
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.state import start
from batchradix.schema.load import load_schema
from batchradix.types import Completion, EngineJob, FinishReason, GrammarSpec

MAX_TOKENS = 40
PROMPTS = (
    "Name the kind of this document.\n\nDear sir, please find the invoice below.\n",
    "Name the kind of this document.\n\nYou are invited!\n",
    "Name",
    '{"already": "open", "',
)


def build_model(folder: Path, *, tied: bool) -> Path:
    """A random two-layer Llama with a tokenizer whose merges cross the seams of JSON."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    draw = random.Random(3)
    words = ["spam", "ham", "invoice", "total", "paid", "name", "kind", "true", "false", "null"]
    lines = []
    for _ in range(400):
        fields = [f'"{draw.choice(words)}":"{draw.choice(words)}"' for _ in range(3)]
        fields += [f'"{draw.choice(words)}":{draw.choice(["true", "false", "12", "[1,2]"])}']
        draw.shuffle(fields)
        lines.append("{" + ",".join(fields) + "}" + f" {draw.choice(words)}. ")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=640,
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=9,
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=648,  # padded
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float().eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, 0.5 if "embed" in name or "head" in name else 0.25)
    model.save_pretrained(folder)
    return folder


@dataclass(kw_only=True)
class Case:
    """A checkpoint, the plain loop over it, and what it answered already."""

    checkpoint: Checkpoint
    grammars: GrammarCompiler
    alone: Any
    prompts: list[list[int]]
    known: dict[Any, Any] = field(default_factory=dict)

    def reference(self, prompt: int, spec: GrammarSpec, max_tokens: int, **how: Any) -> Any:
        key = (prompt, spec, max_tokens, *sorted(how.items()))
        if key not in self.known:
            self.known[key] = self.alone(self.prompts[prompt], spec, max_tokens, **how)
        return self.known[key]


@pytest.fixture(scope="module", params=["tied", "untied"])
def case(request: pytest.FixtureRequest, constrained: ModuleType, tmp_path_factory: Any) -> Case:
    import torch
    from transformers import AutoModelForCausalLM

    folder = build_model(tmp_path_factory.mktemp("bpe"), tied=request.param == "tied")
    checkpoint = open_checkpoint(str(folder))
    tokenizer = checkpoint.tokenizer
    grammars = GrammarCompiler(tokenizer, checkpoint.config.vocab_size, tokenizer.eos_ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Case(
        checkpoint=checkpoint,
        grammars=grammars,
        alone=constrained.Constrained(model, grammars, tokenizer.eos_ids, tokenizer.vocab_size),
        prompts=tokenizer.encode_plain(PROMPTS, [True] * len(PROMPTS)),
    )


def specs_of(constrained: ModuleType) -> list[GrammarSpec]:
    """Every schema through its grammar, and through the list of its texts where they are few."""
    specs = [
        GrammarSpec(kind="json_schema", source=constrained.source(s)) for s in constrained.SCHEMAS
    ]
    finite = [load_schema(s).grammar for s in constrained.SCHEMAS if isinstance(s, dict)]
    return specs + [spec for spec in finite if spec.kind == "choices"]


def run(
    harness: ModuleType, case: Case, job: EngineJob, *, poison: bool = False, **changes: Any
) -> tuple[list[Completion], RadixEngine]:
    engine = harness.make_engine(
        case.checkpoint, harness.engine_settings(**changes), poison=poison, grammars=case.grammars
    )
    engine.submit(job)
    done = harness.drain(engine)
    engine.close()
    return [done[0, row] for row in range(len(job.tokens))], engine


WAYS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "poisoned": {"poison": True, "batch_size": 8},
    "one by one": {"batch_size": 1},
    "chunks of five tokens": {"prefill_tokens": 5, "batch_size": 6},
    "a pool that evicts": {"kv_tokens": 170, "batch_size": 24, "prefill_tokens": 24},
    "no cache": {"prefix_cache": False},
    "everything sampled": {"forced_text": False},
    "guessed ahead": {"speculate": 4, "poison": True},
    "guessed ahead where it pays": {"speculate": "auto", "batch_size": 6},
    "guessed ahead one by one": {"speculate": 8, "batch_size": 1},
    "guessed ahead in small chunks": {"speculate": 3, "prefill_tokens": 5, "batch_size": 6},
    "guessed ahead in a pool that evicts": {
        "speculate": 4,
        "kv_tokens": 170,
        "batch_size": 24,
        "prefill_tokens": 24,
    },
    "guessed ahead, everything sampled": {"speculate": 4, "forced_text": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_equal_the_plain_loop(
    way: str, case: Case, harness: ModuleType, constrained: ModuleType
) -> None:
    changes = dict(WAYS[way])
    forced_text = changes.get("forced_text", True)
    specs = specs_of(constrained)
    assert len(specs) >= 30
    rows = [(p, spec) for spec in specs for p in range(len(PROMPTS))]
    job = harness.make_grammar_job(
        [case.prompts[p] for p, _ in rows],
        [spec for _, spec in rows],
        [MAX_TOKENS] * len(rows),
        grammars=case.grammars,
        forced_text=forced_text,
        prefix_cache=changes.get("prefix_cache", True),
    )
    completions, engine = run(harness, case, job, **changes)
    references = [case.reference(p, s, MAX_TOKENS, forced_text=forced_text) for p, s in rows]
    num_ties = constrained.compare(completions, references)
    assert num_ties <= 1
    usage = engine.usage
    assert usage.computed_tokens == job.tree.distinct_tokens
    if way.endswith("a pool that evicts"):
        assert usage.preemptions > 0
    else:
        assert usage.recomputed_tokens == 0
    assert usage.completion_tokens == sum(c.completion_tokens for c in completions)
    if not num_ties:
        assert usage.forced_tokens == sum(r.num_forced for r in references)
        num_steps = sum(r.num_decode_steps for r in references)
        if "speculate" not in changes:
            assert usage.decode_steps == num_steps
            assert usage.drafted_tokens == 0
        elif changes["speculate"] != "auto":
            assert 0 < usage.accepted_tokens < usage.drafted_tokens
            assert usage.decode_steps < num_steps
    if forced_text:
        assert usage.forced_tokens > usage.completion_tokens / 5
    ended = [c.finish_reason is FinishReason.STOP for c in completions]
    assert 0.2 < np.mean(ended) < 1


def test_drawn_answers_equal_the_plain_loop(
    case: Case, harness: ModuleType, constrained: ModuleType
) -> None:
    rows = [(p, spec) for spec in specs_of(constrained) for p in range(2)]
    for changes in ({}, {"batch_size": 3, "prefill_tokens": 7}, {"speculate": 4}):
        job = harness.make_grammar_job(
            [case.prompts[p] for p, _ in rows],
            [spec for _, spec in rows],
            [MAX_TOKENS] * len(rows),
            grammars=case.grammars,
            temperature=1.0,
        )
        completions, _ = run(harness, case, job, **changes)
        references = [
            case.reference(p, s, MAX_TOKENS, temperature=1.0, rng_key=row)
            for row, (p, s) in enumerate(rows)
        ]
        for completion, reference in zip(completions, references, strict=True):
            assert completion.token_ids == reference.ids


def schemas() -> st.SearchStrategy[Any]:
    words = st.text('abc"é \\{:,', min_size=0, max_size=6)
    leaves = st.one_of(
        st.builds(lambda v: {"enum": v}, st.lists(words, min_size=1, max_size=5, unique=True)),
        st.just({"type": "boolean"}),
        st.builds(lambda v: {"const": v}, words | st.integers(-5, 500) | st.none()),
        st.builds(
            lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
            st.integers(-30, 300),
            st.integers(-30, 300),
        ),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
        st.builds(
            lambda n, more: {"type": "string", "minLength": n, "maxLength": n + more},
            st.integers(1, 4),
            st.integers(0, 3),
        ),
        st.sampled_from(
            [
                {"type": "integer"},
                {"type": "number"},
                {"type": "null"},
                {"type": ["integer", "null"]},
                {"type": ["string", "boolean"], "maxLength": 3},
                {"type": "string", "pattern": "^[ab]{1,3}-?$"},
                {"type": "string", "format": "date"},
            ]
        ),
    )

    def inner(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.builds(
                lambda p, wanted: {
                    "type": "object",
                    "properties": p,
                    "required": [name for name, is_ in zip(p, wanted, strict=False) if is_],
                    "additionalProperties": False,
                },
                st.dictionaries(words, children, min_size=1, max_size=3),
                st.lists(st.booleans(), min_size=3, max_size=3),
            ),
            st.builds(
                lambda item, low, more: {
                    "type": "array",
                    "items": item,
                    "minItems": low,
                    "maxItems": low + more,
                },
                children,
                st.integers(0, 1),
                st.integers(0, 2),
            ),
            st.builds(
                lambda items: {"type": "array", "prefixItems": items, "items": False},
                st.lists(children, min_size=1, max_size=2),
            ),
            st.builds(lambda child: {"anyOf": [child, {"type": "null"}]}, children),
            st.builds(lambda s: {"anyOf": s}, st.lists(children, min_size=1, max_size=3)),
        )

    return st.recursive(leaves, inner, max_leaves=5)


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=st.lists(schemas(), min_size=1, max_size=4), data=st.data())
def test_random_schemas_are_answered_as_by_the_plain_loop(
    drawn: list[Any], data: st.DataObject, case: Case, harness: ModuleType, constrained: ModuleType
) -> None:
    specs = [GrammarSpec(kind="json_schema", source=constrained.source(s)) for s in drawn]
    specs += [g for g in (load_schema(s).grammar for s in drawn) if g.kind == "choices"]
    rows = [(p, spec) for spec in specs for p in range(2)]
    limits = [data.draw(st.integers(1, 24)) for _ in rows]
    job = harness.make_grammar_job(
        [case.prompts[p] for p, _ in rows],
        [spec for _, spec in rows],
        limits,
        grammars=case.grammars,
    )
    completions, engine = run(
        harness, case, job, batch_size=3, prefill_tokens=data.draw(st.integers(1, 40))
    )
    references = [
        case.reference(p, spec, limit) for (p, spec), limit in zip(rows, limits, strict=True)
    ]
    assert constrained.compare(completions, references) <= 1
    for completion, (_, spec), limit in zip(completions, rows, limits, strict=True):
        assert completion.completion_tokens <= limit
        if completion.finish_reason is FinishReason.STOP or completion.cut_at is not None:
            state = start(case.grammars.compile(spec))
            assert state.accept_text(completion.text)
            assert state.can_stop
    assert engine.usage.computed_tokens == job.tree.distinct_tokens
    for completion, (_, spec) in zip(completions, rows, strict=True):
        if completion.finish_reason is FinishReason.STOP and spec.kind == "json_schema":
            schema = json.loads(spec.source)
            Draft202012Validator(schema).validate(json.loads(completion.text))


def test_few_allowed_tokens_are_all_that_is_computed(
    case: Case, harness: ModuleType, constrained: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers out of a few never need the whole output layer, and are the same with it."""
    spec = GrammarSpec(kind="json_schema", source=constrained.source(constrained.KINDS))
    answers = []
    for limit in (candidates.MAX_CANDIDATES, 0):
        monkeypatch.setattr(candidates, "MAX_CANDIDATES", limit)
        job = harness.make_grammar_job(case.prompts, [spec] * 4, [20] * 4, grammars=case.grammars)
        engine = harness.make_engine(
            case.checkpoint, harness.engine_settings(), grammars=case.grammars
        )
        runner = engine._runner
        whole = []
        collect = runner.collect
        runner.collect = lambda rows=None, collect=collect, whole=whole: (
            whole.append(rows),
            collect(rows),
        )[1]
        engine.submit(job)
        answers.append({row: c.token_ids for (_, row), c in harness.drain(engine).items()})
        assert bool(whole) == (limit == 0)
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("changes", [{}, {"kv_tokens": 150, "batch_size": 6, "prefill_tokens": 9}])
def test_probabilities_are_those_of_the_plain_products(
    changes: dict[str, Any], case: Case, harness: ModuleType, constrained: ModuleType
) -> None:
    for schema in (constrained.KINDS, {"enum": [1, 10, 100, "1", None]}, constrained.FLAG):
        spec = load_schema(schema).grammar
        assert spec.kind == "choices"
        job = harness.make_grammar_job(
            case.prompts, [spec] * 4, [MAX_TOKENS] * 4, grammars=case.grammars
        )
        settings = (replace(job.requests.settings[0], probabilities=True),)
        job = replace(job, requests=replace(job.requests, settings=settings))
        completions, _ = run(harness, case, job, **changes)
        references = [case.reference(row, spec, MAX_TOKENS) for row in range(4)]
        assert constrained.compare(completions, references) == 0
        for prompt, completion in zip(case.prompts, completions, strict=True):
            expected = case.alone.probabilities(prompt, spec)
            assert np.isclose(sum(expected), 1)
            assert np.allclose(np.exp(completion.choice_logprobs), expected, atol=1e-4)


# Through the pipeline


def config(case: Case, schema: Any, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "input": [{"prompt": prompt} for prompt in PROMPTS],
        "model": str(case.checkpoint.path),
        "schema": schema,
        "sampling": SamplingOptions(max_tokens=30),
        "engine": EngineOptions(dtype="float32", num_threads=1),
    }
    return RunConfig(**(values | changes))


def test_the_opening_is_planned_with_the_prompts_and_counted_as_answer(
    case: Case, constrained: ModuleType
) -> None:
    schema = constrained.object_of(document_kind=constrained.KINDS, certain=constrained.FLAG)
    planned = pipeline.plan(config(case, schema))
    outcome = pipeline.run(config(case, schema))
    summary = outcome.summary.to_json()
    lengths = [len(ids) for ids in case.prompts]
    assert planned.prompt_tokens == summary["prompt_tokens"] == sum(lengths)
    assert planned.opening_tokens == summary["opening_tokens"] > 4
    assert planned.distinct_tokens == summary["distinct_tokens"] == summary["computed_tokens"]
    assert summary["recomputed_tokens"] == 0
    assert summary["forced_tokens"] > summary["opening_tokens"]
    assert outcome.table is not None
    rows = outcome.table.to_pylist()
    assert [row["prompt_tokens"] for row in rows] == lengths
    assert all(row["cached_tokens"] <= row["prompt_tokens"] for row in rows)
    assert sum(row["completion_tokens"] for row in rows) == summary["completion_tokens"]
    assert all(row["text"].startswith('{"document_kind":"') for row in rows)
    sampled = pipeline.run(
        config(case, schema, engine=EngineOptions(num_threads=1, forced_text=False))
    ).summary.to_json()
    assert sampled["forced_tokens"] == sampled["opening_tokens"] == 0
    assert sampled["decode_steps"] == sampled["completion_tokens"] - len(PROMPTS)
    assert summary["decode_steps"] < sampled["decode_steps"] / 2


def test_a_budget_below_the_shortest_answer_is_the_row_s_error(
    case: Case, constrained: ModuleType
) -> None:
    schema = constrained.object_of(a_property_with_a_long_name=constrained.FLAG)
    rows = [{"prompt": "x", "max_tokens": n} for n in (1, 2, 3, 60)]
    for prefill_tokens in (1, 64):
        engine = EngineOptions(dtype="float32", num_threads=1, prefill_tokens=prefill_tokens)
        outcome = pipeline.run(config(case, schema, input=rows, engine=engine))
        assert outcome.table is not None
        found = outcome.table.to_pylist()
        assert [row["status"] for row in found] == ["error"] * 3 + ["ok"]
        assert [row["error"]["code"] for row in found[:3]] == ["bad_setting"] * 3
        assert outcome.summary.usage.computed_tokens == outcome.summary.distinct_tokens


def test_an_answer_without_any_choice_is_whole_and_needs_no_decode_step(
    case: Case, constrained: ModuleType
) -> None:
    schema = constrained.object_of(id={"const": "x-1"}, items={"const": [1, 2]})
    outcome = pipeline.run(config(case, schema))
    assert outcome.table is not None
    for row in outcome.table.to_pylist():
        assert row["status"] == "ok"
        assert row["text"] == '{"id":"x-1","items":[1,2]}'
    assert outcome.summary.usage.decode_steps == 0
    assert outcome.summary.usage.forced_tokens == outcome.summary.completion_tokens


def test_a_stop_string_inside_forced_text_ends_the_answer_there(
    case: Case, constrained: ModuleType
) -> None:
    schema = constrained.object_of(first=constrained.FLAG, second=constrained.FLAG)
    for stop, text in (("irst", '{"f'), ("econd", None)):
        sampling = SamplingOptions(max_tokens=30, stop=(stop,))
        outcome = pipeline.run(config(case, schema, sampling=sampling))
        assert outcome.table is not None
        for row in outcome.table.to_pylist():
            assert row["finish_reason"] == "stop"
            assert row["status"] == "error"
            assert row["text"] in ([text] if text else ['{"first":true,"s', '{"first":false,"s'])


def test_an_llm_answers_as_a_run_does_and_keeps_openings(
    case: Case, constrained: ModuleType
) -> None:
    schema = constrained.object_of(kind=constrained.KINDS, n=constrained.SMALL)
    table = pipeline.run(config(case, schema)).table
    assert table is not None
    options = EngineOptions(dtype="float32", num_threads=1, kv_tokens=2000)
    with LLM(str(case.checkpoint.path), engine=options) as llm:
        for _ in range(2):
            results = llm.generate(
                list(PROMPTS), schema=schema, sampling=SamplingOptions(max_tokens=30)
            )
            assert [r.text for r in results] == table["text"].to_pylist()
            assert [r.prompt_tokens for r in results] == table["prompt_tokens"].to_pylist()
            assert [r.completion_tokens for r in results] == table["completion_tokens"].to_pylist()
        plain = llm.generate(list(PROMPTS), sampling=SamplingOptions(max_tokens=3))
        assert all(r.completion_tokens <= 3 for r in plain)
