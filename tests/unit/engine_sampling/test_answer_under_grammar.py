"""Sampler, grammar and row together, against a model that always wants the breaking byte."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from batchradix.engine.grammar.state import GrammarState, fill_batch
from batchradix.engine.output import RowOutput
from batchradix.engine.sampling import Sampler
from batchradix.types import FinishReason, GrammarSpec, RowSettings

VOCAB_SIZE = 320  # padded; the tokenizer knows 264
EOS_IDS = frozenset({258, 263})


def adversary(prefer):
    """Logits of a model that prefers these bytes, in this order, and likes to end least."""
    x = torch.full((VOCAB_SIZE,), -200.0)
    preferred = list(dict.fromkeys(prefer.encode()))
    for rank, b in enumerate(b for b in range(256) if b not in preferred):
        x[b] = -0.5 * (rank % 16) - 0.1 * rank
    for rank, b in enumerate(preferred):
        x[b] = 400.0 - 8 * rank
    x[list(EOS_IDS)] = torch.tensor([-400.0, -420.0])
    x[264:] = 1000.0
    return x


@pytest.fixture
def answer(new_compiler, new_detokenizer, make_batch):
    def answer_(schema, prefer, settings=None, max_tokens=400, num_rows=1):
        settings = settings or RowSettings()
        source = json.dumps(schema, ensure_ascii=False)
        spec = GrammarSpec(kind="json_schema", source=source)
        compiled = new_compiler(vocab_size=VOCAB_SIZE).compile(spec)
        rows = [
            RowOutput(
                settings=settings,
                max_tokens=max_tokens,
                eos_ids=EOS_IDS,
                detokenizer=new_detokenizer(),
                grammar=GrammarState(compiled),
            )
            for _ in range(num_rows)
        ]
        sampler = Sampler(VOCAB_SIZE, 264)
        running = list(range(num_rows))
        while running:
            bitmask = torch.zeros(len(running), VOCAB_SIZE // 32, dtype=torch.int32)
            fill_batch([rows[r].grammar for r in running], bitmask, range(len(running)))
            batch = make_batch(
                [settings] * len(running),
                rng_key=np.array(running, dtype=np.uint64),
                num_generated=np.array([rows[r].completion_tokens for r in running]),
                generated_ids=[rows[r].token_ids for r in running],
                bitmask=bitmask,
                masked_rows=np.ones(len(running), dtype=np.bool_),
            )
            out = sampler.sample(adversary(prefer).repeat(len(running), 1), batch)
            assert not out.non_finite.any()
            ended = [rows[r].push(int(t)) for r, t in zip(running, out.token_ids, strict=True)]
            running = [r for r, e in zip(running, ended, strict=True) if e is None]
        return rows

    return answer_


WORDS = {
    "q": 'say "hi"',
    "tab": "a\tb",
    "zh": "北京·在线",
    "zwj": "👩🏽‍🚀",
    "win": "C:\\new\\dir",
    "nfd": "é",
    "eos": "<eos>",
    "end": "<|end|>done",
    "slash": "a/b",
    "empty": "",
    "ctl": "\u0001",
    "ls": "\u2028",
}


def test_constants_come_out_character_for_character(answer):
    """Quotes, escapes, combining marks, and text that looks like a special token."""
    schema = {
        "type": "object",
        "properties": {k: {"const": v} for k, v in WORDS.items()},
        "required": list(WORDS),
        "additionalProperties": False,
    }
    (row,) = answer(schema, "\\")
    assert row.finish_reason is FinishReason.STOP
    value = json.loads(row.text)
    assert value == WORDS
    assert list(value) == list(WORDS)
    assert row.completion_tokens < 260


def test_a_model_that_likes_blanks_cannot_write_them_between_tokens(answer):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    (row,) = answer(schema, ' \n\t,}"7', max_tokens=64)
    assert row.text == '{"a":7,"b":"   "}'
    assert row.finish_reason is FinishReason.STOP
    assert row.completion_tokens <= 24


def test_a_model_that_likes_tabs_cannot_put_one_into_a_bounded_string(answer):
    schema = {"type": "string", "maxLength": 2}
    (row,) = answer(schema, "\t\n\x01x")
    assert json.loads(row.text) == "xx"


def test_a_large_enum_is_kept_to(answer):
    values = [f"SKU-{i:05d}" for i in range(20_000)] + [f"SKU-{i:04d}" for i in range(0, 10_000, 7)]
    schema = {"type": "object", "properties": {"sku": {"enum": values}}, "required": ["sku"]}
    for row in answer(schema, "9876543210", max_tokens=64, num_rows=3):
        assert row.text == '{"sku":"SKU-9996"}'


def test_drawn_answers_are_valid_and_differ(answer):
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 999},
            "c": {"enum": ["red", "green", "blue"]},
        },
        "required": ["n", "c"],
    }
    rows = answer(schema, "rgb123456789", RowSettings(temperature=200.0), num_rows=12)
    values = [json.loads(r.text) for r in rows]
    assert all(0 <= v["n"] <= 999 and v["c"] in ("red", "green", "blue") for v in values)
    assert len({r.text for r in rows}) > 3
