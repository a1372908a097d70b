from __future__ import annotations

import json
import logging
import os
import time

import numpy as np
import pytest
import torch

from batchradix.engine.grammar import build as build_module
from batchradix.engine.grammar import compiler as compiler_module
from batchradix.engine.grammar.notices import NativeNotices
from batchradix.engine.grammar.state import GrammarState, fill_batch
from batchradix.errors import SchemaError
from batchradix.types import GrammarSpec

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
}


def accepts(compiled, text):
    """Whether the whole text, byte by byte, is a complete answer."""
    state = GrammarState(compiled)
    return all(state.accept(b) for b in text.encode()) and state.can_stop


def allowed(state):
    bits = np.zeros((1, len(state.compiled.stop_words)), dtype=np.int32)
    state.fill(bits)
    bools = np.unpackbits(bits.view(np.uint8), bitorder="little")[: state.compiled.vocab_size]
    return set(np.flatnonzero(bools).tolist())


def json_spec(schema):
    return GrammarSpec(kind="json_schema", source=json.dumps(schema, ensure_ascii=False))


def test_json_is_compact_and_in_the_order_of_the_schema(compile_schema):
    compiled = compile_schema(OBJECT)
    assert accepts(compiled, '{"a":1,"b":"x y"}')
    assert not accepts(compiled, '{"a": 1,"b":"x"}')
    assert not accepts(compiled, '{"b":"x","a":1}')
    assert not accepts(compiled, '{"a":1}')


def test_nothing_the_schema_does_not_name_is_written_unless_it_asks_for_it(compile_schema):
    assert not accepts(compile_schema(OBJECT), '{"a":1,"b":"","c":2}')
    assert accepts(compile_schema({**OBJECT, "additionalProperties": True}), '{"a":1,"b":"","c":2}')
    assert accepts(compile_schema({"type": "object"}), '{"c":[2]}')
    pair = {"type": "array", "prefixItems": [{"type": "integer"}]}
    assert not accepts(compile_schema(pair), "[1,2]")
    assert accepts(compile_schema({**pair, "items": True}), '[1,"x"]')


def test_end_tokens_are_allowed_only_where_the_answer_may_end(compile_schema):
    state = GrammarState(compile_schema({"type": "integer"}))
    assert not allowed(state) & {258, 263}
    assert not state.accept(258)
    assert state.accept(ord("4"))
    assert allowed(state) == {*range(48, 58), 258, 263}
    assert (state.can_stop, state.is_complete) == (True, False)
    assert state.accept(263)
    assert state.is_terminated
    assert state.is_complete
    assert allowed(state) == set()
    assert not state.accept(ord("4"))


def test_only_the_end_can_follow_a_complete_object(compile_schema):
    state = GrammarState(compile_schema(OBJECT))
    assert state.accept_text('{"a":1,"b":""')
    assert not state.is_complete
    assert state.accept(ord("}"))
    assert state.is_complete
    assert allowed(state) == {258, 263}


def test_without_any_end_token_a_complete_grammar_is_still_known(new_compiler):
    compiled = new_compiler(frozenset()).compile(json_spec({"const": 1}))
    state = GrammarState(compiled)
    state.accept(ord("1"))
    assert state.is_complete
    assert allowed(state) == set()


def test_special_tokens_and_ids_out_of_range_are_refused_in_silence(compile_schema, capfd):
    state = GrammarState(compile_schema(OBJECT))
    assert not any(state.accept(i) for i in (264, 10_000, -1))
    assert capfd.readouterr().err == ""


def test_a_bounded_string_holds_no_raw_control_character(compile_schema):
    for bounds in ({"maxLength": 3}, {"minLength": 1}, {"minLength": 1, "maxLength": 3}):
        state = GrammarState(compile_schema({"type": "string", **bounds}))
        state.accept(ord('"'))
        assert not allowed(state) & set(range(32))
        assert {ord(" "), ord("a"), 0xE5} <= allowed(state)


def test_forced_text_is_what_must_come_next_and_moves_nothing(compile_schema):
    state = GrammarState(compile_schema(OBJECT))
    assert state.forced_text() == '{"a":'
    assert state.forced_text() == '{"a":'
    state.accept_text('{"a":1')
    assert state.forced_text() == ""
    state.accept(ord(","))
    assert state.forced_text() == '"b":"'


def test_a_fork_goes_its_own_way(compile_schema):
    state = GrammarState(compile_schema(OBJECT))
    state.accept(ord("{"))
    fork = state.fork()
    assert fork.accept(ord('"'))
    assert allowed(state) == {ord('"')}
    assert allowed(fork) == {ord("a")}


def test_rollback_and_reset_take_steps_back(compile_schema):
    state = GrammarState(compile_schema(OBJECT))
    before = allowed(state)
    for b in b'{"a':
        state.accept(b)
    state.rollback(2)
    assert allowed(state) == {ord('"')}
    with pytest.raises(ValueError, match="fewer than 5"):
        state.rollback(5)
    state.reset()
    assert allowed(state) == before


@pytest.mark.parametrize("asked_before", [False, True])
def test_filling_a_batch_equals_filling_one_by_one(compile_schema, asked_before):
    texts = ["", '{"a":', '{"a":12', '{"a":1,"b":"x', '{"a":1,"b":"x"}']
    states = [GrammarState(compile_schema(OBJECT)) for _ in texts]
    for state, text in zip(states, texts, strict=True):
        state.accept_text(text)
    states[-1].accept(258)
    rows = [6, 0, 3, 2, 5]
    width = len(states[0].compiled.stop_words)
    batch = torch.full((7, width), 7, dtype=torch.int32)
    if asked_before:
        for state in states[::2]:
            state.allowed()
    fill_batch(states, batch, rows)
    single = torch.full((7, width), 7, dtype=torch.int32)
    for state, row in zip(states, rows, strict=True):
        state.fill(single, row)
    assert torch.equal(batch, single)
    assert (batch[[1, 4]] == 7).all()
    assert (batch[5] == 0).all()


def test_a_mask_row_can_be_filled_by_itself(compile_schema):
    state = GrammarState(compile_schema(OBJECT))
    row = torch.zeros(len(state.compiled.stop_words), dtype=torch.int32)
    state.fill(row)
    assert int(row[ord("{") // 32]) >> (ord("{") % 32) & 1


def test_a_spec_is_compiled_once(new_compiler, monkeypatch):
    made = []
    real = build_module.json_grammar
    monkeypatch.setattr(build_module, "json_grammar", lambda s: made.append(s) or real(s))
    compiler = new_compiler()
    specs = [json_spec(OBJECT), json_spec(OBJECT), json_spec({"type": "null"})]
    one, two, three = map(compiler.compile, specs)
    assert one is two
    assert one is not three
    assert len(made) == 2


@pytest.mark.parametrize(
    ("schema", "cause"),
    [
        ('{"enum":[]}', "enum array must not be empty"),
        ('{"type":"integer","minimum":3,"maximum":1}', "minimum greater than maximum"),
        ('{"$ref":"#/nope"}', "nope"),
        ("false", "cannot accept any value"),
        ('{"type":', "Expecting value"),
    ],
)
def test_a_schema_without_a_grammar_is_a_schema_error_that_names_the_cause(
    byte_compiler, schema, cause
):
    with pytest.raises(SchemaError, match=cause) as caught:
        byte_compiler.compile(GrammarSpec(kind="json_schema", source=schema))
    assert ".cc" not in str(caught.value)


def test_an_unknown_kind_is_a_schema_error(byte_compiler):
    with pytest.raises(SchemaError, match="lark"):
        byte_compiler.compile(GrammarSpec(kind="lark", source="start: x"))


def test_regex_and_ebnf_are_kinds_too(byte_compiler):
    assert accepts(byte_compiler.compile(GrammarSpec(kind="regex", source="[ab]{2}c")), "abc")
    ebnf = GrammarSpec(kind="ebnf", source='root ::= "x" | "y" root')
    assert accepts(byte_compiler.compile(ebnf), "yyx")


def test_what_xgrammar_warns_of_becomes_a_notice_and_is_not_printed(byte_compiler, capfd):
    spec = json_spec({"type": "string", "pattern": "a+", "maxLength": 5})
    compiled = byte_compiler.compile(spec)
    assert len(compiled.notices) == 1
    assert "pattern combined with minLength/maxLength is not supported" in compiled.notices[0]
    assert capfd.readouterr().err == ""
    assert byte_compiler.compile(json_spec(OBJECT)).notices == ()


def test_what_others_write_to_standard_error_meanwhile_is_passed_on(capfd):
    with NativeNotices() as notices:
        os.write(2, b"from another thread\n[15:22:25] /x/y.cc:12: Warning: Beware.\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "from another thread\n"
    assert notices.messages == ["Beware"]


def test_a_compile_that_takes_too_long_is_given_up(new_compiler, monkeypatch):
    monkeypatch.setattr(build_module, "json_grammar", lambda _: time.sleep(0.4))
    with pytest.raises(SchemaError, match="not compiled after"):
        new_compiler(timeout_s=0.05).compile(json_spec(OBJECT))


def test_the_grammars_used_last_are_kept(new_compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 2)
    compiler = new_compiler()
    specs = [json_spec({"const": n}) for n in range(3)]
    first, second = compiler.compile(specs[0]), compiler.compile(specs[1])
    assert compiler.compile(specs[0]) is first
    compiler.compile(specs[2])
    assert compiler.compile(specs[0]) is first
    assert compiler.compile(specs[1]) is not second
    monkeypatch.setattr(compiler_module, "MAX_KEPT_BYTES", 1)
    last = compiler.compile(json_spec({"const": 9}))
    assert list(compiler._compiled.values()) == [last]
    assert accepts(second, "1")


def test_a_slow_compile_says_so(new_compiler, monkeypatch, caplog):
    real = build_module.json_grammar
    monkeypatch.setattr(compiler_module, "SLOW_AFTER_S", 0.01)
    monkeypatch.setattr(build_module, "json_grammar", lambda s: time.sleep(0.2) or real(s))
    with caplog.at_level(logging.WARNING):
        assert accepts(new_compiler().compile(json_spec({"const": 1})), "1")
    assert "still compiling" in caplog.text


def test_a_tokenizer_larger_than_the_model_keeps_its_first_tokens():
    class Tokens:
        token_bytes = (b"a", b"b", b"c", b"d")

    compiler = compiler_module.GrammarCompiler(Tokens(), 3, [9])
    state = GrammarState(compiler.compile(GrammarSpec(kind="regex", source="[abd]")))
    assert allowed(state) == {0, 1}


@pytest.mark.parametrize("vocab_size", [257, 264, 287, 288, 289])
def test_completeness_is_seen_whatever_the_width_of_the_mask(new_compiler, vocab_size):
    compiler = new_compiler(frozenset({256}), vocab_size)
    state = GrammarState(compiler.compile(GrammarSpec(kind="regex", source="a{1,2}")))
    state.accept(ord("a"))
    assert (state.can_stop, state.is_complete) == (True, False)
    state.accept(ord("a"))
    assert state.is_complete


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('"a\\"b"', True),
        ('"\\n\\u00e9x"', True),
        ('"\\n\\u00e9xx"', False),
        ('"😀😀😀"', True),
        ('"\\ud83d\\ude00"', False),
        ('"\n"', False),
        ('"\\q"', False),
    ],
)
def test_a_string_with_a_length_bound_counts_an_escape_as_one_character(compile_schema, text, fits):
    state = GrammarState(compile_schema({"type": "string", "maxLength": 3}))
    assert (state.accept_text(text) and state.can_stop) is fits


@pytest.mark.parametrize("count", [1, 300])
def test_a_letter_before_a_hexadecimal_digit_stays_itself(compile_schema, count):
    words = ["über", "Fläche", "éa", "\x80f", "日a", "\\xe9a", 'é"a', "😀1", "naïf"]
    values = [f"{word}{number}" for word in words for number in range(count)]
    schema = {
        "type": "object",
        "properties": {"Fläche": {"type": "string", "maxLength": 2}, "k": {"enum": values}},
        "required": ["Fläche", "k"],
        "additionalProperties": False,
    }
    compiled = compile_schema(schema)
    for value in values:
        state = GrammarState(compiled)
        text = json.dumps({"Fläche": "ab", "k": value}, ensure_ascii=False, separators=(",", ":"))
        assert state.accept_text(text)
        assert state.is_complete
