"""Unfinished answers are closed shortly, validly, and wherever they were cut."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from batchradix.engine.grammar.closing import Closer, first_cut, minimal_answer
from batchradix.engine.grammar.state import GrammarState
from batchradix.schema.load import load_schema
from batchradix.types import GrammarSpec

BYTES = tuple(bytes([value]) for value in range(256)) + (b"",) * 8


def compact(value) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def after(compiled, text: bytes) -> GrammarState:
    state = GrammarState(compiled)
    for place, byte in enumerate(text):
        assert state.accept(byte), f"{text[:place]!r} cannot be followed by {text[place:]!r}"
    return state


def closed(compiler, spec: GrammarSpec, text: bytes) -> bytes:
    state = after(compiler.compile(spec), text)
    rest = Closer(spec, BYTES).close(state, text)
    assert rest is not None, text
    assert after(compiler.compile(spec), text + rest).can_stop, (text, rest)
    state.reset()  # the state given is the caller's: it was not moved
    return rest


def spec_of(schema) -> GrammarSpec:
    return load_schema(schema).json_grammar


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def typed_values(draw, depth: int = 2):
    """A schema of enforced keywords alone, and a value of it."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "format"]
    kinds += ["object", "array", "any", "tuple", "open"] * 2 if depth else []
    kind = draw(st.sampled_from(kinds))
    if kind == "string":
        value = draw(TEXTS)
        least = draw(st.integers(0, len(value)))
        schema = {"type": "string", "minLength": least}
        return draw(st.sampled_from([schema, {**schema, "maxLength": len(value) + 1}])), value
    if kind == "integer":
        value = draw(st.integers(-5000, 5000))
        low, high = value - draw(st.integers(0, 300)), value + draw(st.integers(0, 300))
        bounds = {"minimum": low, "maximum": high}
        keys = draw(st.sets(st.sampled_from(list(bounds))))
        return {"type": "integer", **{key: bounds[key] for key in keys}}, value
    if kind == "number":
        value = draw(st.integers(-999, 999)) / draw(st.sampled_from([1, 10, 8]))
        bounds = {"minimum": value - 0.5, "maximum": value + 2}
        keys = draw(st.sets(st.sampled_from(list(bounds))))
        return {"type": "number", **{key: bounds[key] for key in keys}}, value
    if kind == "boolean":
        return {"type": "boolean"}, draw(st.booleans())
    if kind == "null":
        return {"type": "null"}, None
    if kind == "enum":
        values = draw(
            st.lists(
                TEXTS | st.integers(-99, 99) | st.just({"a": ["é", 1]}), min_size=1, max_size=4
            )
        )
        return {"enum": values}, draw(st.sampled_from(values))
    if kind == "pattern":
        pattern = draw(st.sampled_from(["^[A-Z]{2}-[0-9]{3,5}$", "^(ab|cd)+é$", "x", r'^"\\?$']))
        return {"type": "string", "pattern": pattern}, draw(
            st.from_regex(pattern).filter(lambda text: "\n" not in text and text.isprintable())
        )
    if kind == "format":
        name, value = draw(
            st.sampled_from(
                [
                    ("date", "2024-02-29"),
                    ("date-time", "2024-02-29T10:11:12.5+02:00"),
                    ("time", "10:11:12Z"),
                    ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
                    ("ipv4", "192.168.10.255"),
                    ("duration", "P1DT2H3M"),
                    ("uri", "https://example.org/a?b=c#d"),
                ]
            )
        )
        return {"type": "string", "format": name}, value
    if kind == "any":
        parts = draw(st.lists(typed_values(depth - 1), min_size=2, max_size=3))
        return {"anyOf": [schema for schema, _ in parts]}, draw(st.sampled_from(parts))[1]
    if kind in ("array", "tuple"):
        parts = draw(st.lists(typed_values(depth - 1), min_size=1, max_size=3))
        if kind == "tuple":
            values = [value for _, value in parts]
            prefix = [schema for schema, _ in parts]
            return {"type": "array", "prefixItems": prefix, "items": False, "minItems": 1}, values
        schema, value = parts[0]
        values = [value] * draw(st.integers(0, 3))
        return {
            "type": "array",
            "items": schema,
            "minItems": draw(st.integers(0, len(values))),
        }, values
    names = draw(st.lists(TEXTS, unique=True, min_size=1, max_size=4))
    parts = {name: draw(typed_values(depth - 1)) for name in names}
    if kind == "open":
        schema = next(iter(parts.values()))[0]
        value = {name: next(iter(parts.values()))[1] for name in names}
        return {
            "type": "object",
            "additionalProperties": schema,
            "minProperties": draw(st.integers(0, len(names))),
        }, value
    required = [name for name in names if draw(st.booleans())]
    written = {n: v for n, (_, v) in parts.items() if n in required or draw(st.booleans())}
    properties = {name: schema for name, (schema, _) in parts.items()}
    return {"type": "object", "properties": properties, "required": required}, written


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(typed_values(), st.data())
def test_a_valid_answer_cut_anywhere_closes_to_a_valid_one(byte_compiler, typed, data):
    schema, value = typed
    loaded = load_schema(schema)
    text = compact(value).encode()
    cut = data.draw(st.integers(0, len(text)))
    note(f"{schema} {text[:cut]!r}")
    assume(GrammarState(byte_compiler.compile(loaded.json_grammar)).accept_text(text))
    rest = closed(byte_compiler, loaded.json_grammar, text[:cut])
    if not loaded.validated_keywords:
        loaded.parse((text[:cut] + rest).decode())


@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(typed_values(), st.data())
def test_the_minimal_answer_cut_anywhere_closes_to_no_more_than_itself(byte_compiler, typed, data):
    schema, _ = typed
    spec = spec_of(schema)
    text = minimal_answer(spec)
    assert text is not None
    assert after(byte_compiler.compile(spec), text.encode()).can_stop
    cut = data.draw(st.integers(0, len(text.encode())))
    note(f"{schema} {text!r} {cut}")
    assert len(closed(byte_compiler, spec, text.encode()[:cut])) <= len(text.encode()) - cut


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3},
        "age": {"type": "integer", "minimum": 18, "maximum": 120},
        "kind": {"enum": ["customer", "supplier"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"type": "string"},
    },
    "required": ["name", "age", "kind", "tags"],
}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
            },
            "required": ["value", "left"],
        }
    },
    "$ref": "#/$defs/tree",
}


def shape(tag, **more):
    properties = {"kind": {"const": tag}, **{key: {"type": kind} for key, kind in more.items()}}
    return {"type": "object", "properties": properties, "required": list(properties)}


UNION = {"anyOf": [shape("circle", radius="number"), shape("text", words="string", size="integer")]}


@pytest.mark.parametrize(
    ("schema", "text", "rest"),
    [
        (PERSON, "", '{"name":"aaa","age":18,"kind":"customer","tags":[]}'),
        (PERSON, '{"na', 'me":"aaa","age":18,"kind":"customer","tags":[]}'),
        (PERSON, '{"name":"Jo', 'a","age":18,"kind":"customer","tags":[]}'),
        (PERSON, '{"name":"Joan","age":1', '8,"kind":"customer","tags":[]}'),
        (PERSON, '{"name":"Joan","age":19,"kind":"s', 'upplier","tags":[]}'),
        (PERSON, '{"name":"Joan","age":19,"kind":"customer","tags":["a","b', '"]}'),
        (PERSON, '{"name":"Joan","age":19,"kind":"customer","tags":["a",', '""]}'),
        (PERSON, '{"name":"Joan","age":19,"kind":"customer","tags":[],', '"note":""}'),
        (PERSON, '{"name":"Joan","age":19,"kind":"customer","tags":[],"note":"x\\', 'n"}'),
        (PERSON, '{"name":"Joan","age":19,"kind":"customer","tags":[],"note":"x\\u00', '20"}'),
        (TREE, '{"value":1,"left":{"value":-', '1,"left":null}}'),
        (UNION, '{"kind":"te', 'xt","words":"","size":0}'),
        (UNION, '{"kind":"text","words":"a"', ',"size":0}'),
        ({"type": "boolean"}, "tr", "ue"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.", "1"),
        ({"type": "integer", "multipleOf": 7}, "1", "4"),
        (True, '{"a":[1,{"b":"c', '"}]}'),
        ({"type": "string"}, "", '""'),
        (
            {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2},
            '{"a":null,"',
            'a":null}',
        ),
    ],
)
def test_the_rest_is_the_shortest(byte_compiler, schema, text, rest):
    if rest == 'a":null}':  # "" is a name too, and shorter
        rest = '":null}'
    assert closed(byte_compiler, spec_of(schema), text.encode()).decode() == rest


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_character_cut_between_its_bytes_is_completed(byte_compiler, cut):
    text = '"€😀'.encode()
    rest = closed(byte_compiler, spec_of({"type": "string"}), text[: len(text) - cut])
    json.loads(text[: len(text) - cut] + rest)


@pytest.mark.parametrize("cut", range(1, 13))
def test_a_surrogate_pair_cut_in_the_middle_stays_a_pair(byte_compiler, cut):
    text = b'"\\ud83d\\ude00'
    output = load_schema({"type": "string"})
    begun = text[: 1 + cut]
    output.parse((begun + closed(byte_compiler, output.json_grammar, begun)).decode())


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("regex", "[a-z]+-[0-9]{3}(x|yy)", "ab-1"),
        ("regex", "[a-z]+-[0-9]{3}(x|yy)", ""),
        ("ebnf", 'root ::= "a" ("b" root | "c") "d"', "ab"),
        ("ebnf", 'root ::= "<" [^>]+ ">"', ""),
        ("ebnf", r'root ::= ("- " [^\n]+ "\n")+', "- some words"),
    ],
)
def test_other_grammars_are_closed_too(byte_compiler, kind, source, text):
    spec = GrammarSpec(kind=kind, source=source)
    closed(byte_compiler, spec, text.encode())
    shortest = minimal_answer(spec)
    if kind == "regex":
        assert after(byte_compiler.compile(spec), shortest.encode()).can_stop


def test_what_cannot_be_closed_within_bounds_is_none(byte_compiler):
    spec = GrammarSpec(kind="ebnf", source='root ::= [a-z]{9} [0-9]{9} [A-Z]{90} "!"')
    state = after(byte_compiler.compile(spec), b"a")
    assert Closer(spec, BYTES).close(state, b"a") is None


def test_an_answer_that_is_whole_needs_nothing(byte_compiler):
    assert closed(byte_compiler, spec_of(PERSON["properties"]["kind"]), b'"supplier"') == b""


@pytest.mark.parametrize(
    ("before", "whole", "pointer"),
    [
        ("", '{"a":1}', ""),
        ("{", '{"a":1}', "/a"),
        ('{"a', '{"a":1}', "/a"),
        ('{"a":', '{"a":1}', "/a"),
        ('{"a":1', '{"a":1}', "/a"),
        ('{"a":"x', '{"a":"x","b":0}', "/a"),
        ('{"a":"x"', '{"a":"x","b":0}', "/b"),
        ('{"a":"x"', '{"a":"x"}', ""),
        ('{"a":[1,2', '{"a":[1,2],"b":0}', "/a/1"),
        ('{"a":["x"', '{"a":["x"],"b":0}', "/a"),
        ('{"a":["x",', '{"a":["x",""],"b":0}', "/a/1"),
        ('{"a":[{"b":true', '{"a":[{"b":true}]}', "/a"),
        ('{"a":[{"b":tr', '{"a":[{"b":true}]}', "/a/0/b"),
        ('{"a/b":{"~":"', '{"a/b":{"~":""}}', "/a~1b/~0"),
        ('{"é":"é', '{"é":"é"}', "/é"),
        ("12", "12", ""),
        ('"a', '"a"', ""),
    ],
)
def test_the_first_cut_names_what_was_not_finished(before, whole, pointer):
    assert first_cut(before, whole) == pointer


def test_closing_is_quick(byte_compiler):
    spec = spec_of(PERSON)
    text = b'{"name":"' + b"Joan " * 400 + b'","age":19,"kind":"cust'
    state = after(byte_compiler.compile(spec), text)
    closer = Closer(spec, BYTES)
    closer.close(state, text)
    started = time.perf_counter()
    for _ in range(20):
        closer.close(state, text)
    assert (time.perf_counter() - started) / 20 < 0.02


def test_an_answer_nested_too_deeply_is_given_up_or_closed(byte_compiler):
    spec = spec_of(True)
    for depth in (50, 5000):
        text = b"[" * depth
        rest = Closer(spec, BYTES).close(after(byte_compiler.compile(spec), text), text)
        assert rest in (None, b"]" * depth)
        assert rest is not None or depth > 50


@pytest.mark.parametrize("value", [0.0, -2.0, 1e15, 1e16, 0.1, 5e-324, "\x7f", "a/b\u2028\n\x01"])
def test_a_constant_is_closed_as_the_grammar_spells_it(byte_compiler, value):
    spec = spec_of({"const": {"k": value}})
    for text in (b"", b'{"k":'):
        whole = text + closed(byte_compiler, spec, text)
        assert json.loads(whole) == {"k": value}


@pytest.mark.parametrize("number", [b"1E99999999999999999999", b"1" * 60, b"0." + b"3" * 60])
def test_a_number_beyond_reckoning_is_closed_too(byte_compiler, number):
    spec = spec_of({"type": "array", "items": {"type": "number"}})
    assert closed(byte_compiler, spec, b"[" + number) == b"]"
