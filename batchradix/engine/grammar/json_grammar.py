"""JSON Schema text to an xgrammar grammar: compact, typed, closed, exact where xgrammar is not.

Some things are changed about what xgrammar makes of a schema, each by editing the printed
form of its grammar, and only when that form is known to be read back as the same grammar:

- a character from U+0080 to U+00FF before a hexadecimal digit (`über`) is parted from it, or the
  two are taken for one other character;
- large string enums become a shared graph of rules (`word_graph`), which compiles at once;
- strings with a length bound may hold escapes, see `bounded_text`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import xgrammar

from batchradix.engine.grammar.bounded_text import with_bounded_text
from batchradix.engine.grammar.word_graph import enum_rules

LARGE_ENUM = 256  # values from which a string enum is worth a graph of its own

_HEX = "[A-Fa-f0-9]"
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
_ESCAPE = re.compile(rf"\\(?:x|u00){_HEX}{{2}}(?P<runs_on>(?={_HEX}))?|\\.")

# Where a schema stands inside a schema. Places whose meaning depends on comparing branches
# (oneOf, not, if) are left out: there xgrammar has to see the values themselves.
_ONE = ("items", "additionalProperties")
_MANY = ("prefixItems", "anyOf")
_NAMED = ("properties", "$defs", "definitions")
_BESIDE_ENUM = frozenset(
    {"enum", "type", "title", "description", "default", "examples", "deprecated", "$comment"}
)


def json_grammar(source: str) -> xgrammar.Grammar:
    """The grammar of compact JSON texts that match the schema ``source`` (JSON text).

    No whitespace between tokens; properties in the order of the schema; what the schema does
    not name (properties beside ``properties``, items beside ``prefixItems``) is not written
    unless ``additionalProperties`` or ``items`` asks for it. An object schema without
    ``properties`` takes any. Raises what xgrammar raises for a schema it rejects.
    """
    schema = json.loads(source)
    lifted: dict[str, list[str]] = {}
    if next(_large_enums(schema), None) is not None:
        text = json.dumps(_lift(schema, _namer(source, lifted)), ensure_ascii=False)
        edited = _edited(_convert(text), lifted)
        if edited is not None:
            return edited
    plain = _convert(source)
    edited = _edited(plain, {})
    return plain if edited is None else edited


def readable_text(grammar: xgrammar.Grammar) -> str:
    """The printed form of a grammar, to be put into others; ValueError where it would not be read
    back as the same grammar."""
    text = _parted(str(grammar))
    if str(xgrammar.Grammar.from_ebnf(text)) != str(grammar):
        raise ValueError("it holds what cannot be part of another grammar")
    return text


def _convert(source: str) -> xgrammar.Grammar:
    return xgrammar.Grammar.from_json_schema(
        source, any_whitespace=False, separators=(",", ":"), strict_mode=True
    )


def _edited(grammar: xgrammar.Grammar, lifted: dict[str, list[str]]) -> xgrammar.Grammar | None:
    """The grammar with our rules in it; None where the printed form cannot be trusted."""
    original = str(grammar)
    printed = _parted(original)
    text = with_bounded_text(printed)
    if text == original and not lifted:
        return grammar
    if str(xgrammar.Grammar.from_ebnf(printed)) != printed:
        return None
    rules: list[str] = []
    for number, (placeholder, values) in enumerate(lifted.items()):
        literal = f'"\\"{placeholder}\\""'
        rule = f"large_enum_{number}"
        if literal not in text or rule in printed:
            return None
        text = text.replace(literal, rule)
        try:
            rules += map(_parted, enum_rules(values, rule))
        except UnicodeEncodeError:
            return None
    return xgrammar.Grammar.from_ebnf("\n".join([text.rstrip("\n"), *rules]) + "\n")


def _parted(printed: str) -> str:
    """The printed grammar with literals cut in two where a hexadecimal digit follows an escape of
    two, which would be read as one of more."""

    def literal(found: re.Match[str]) -> str:
        if found[0].startswith("["):
            return found[0]
        return _ESCAPE.sub(lambda e: e[0] + '" "' if e["runs_on"] is not None else e[0], found[0])

    return _LITERAL.sub(literal, printed)


def _is_large_enum(schema: Any) -> bool:
    if not isinstance(schema, dict) or not isinstance(schema.get("enum"), list):
        return False
    values = schema["enum"]
    return (
        len(values) >= LARGE_ENUM
        and all(isinstance(v, str) for v in values)
        and schema.get("type", "string") == "string"
        and schema.keys() <= _BESIDE_ENUM
    )


def _children(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """(path, subschema) of the places where a schema is looked into."""
    for key in _ONE:
        if key in schema:
            yield (key,), schema[key]
    for key in _MANY:
        if isinstance(schema.get(key), list):
            yield from (((key, i), sub) for i, sub in enumerate(schema[key]))
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            yield from (((key, name), sub) for name, sub in schema[key].items())


def _large_enums(schema: Any) -> Iterator[list[str]]:
    if _is_large_enum(schema):
        yield schema["enum"]
    elif isinstance(schema, dict):
        for _, sub in _children(schema):
            yield from _large_enums(sub)


def _namer(source: str, lifted: dict[str, list[str]]) -> Callable[[list[str]], str]:
    """Notes a list of values in ``lifted`` under a new word that ``source`` does not hold."""
    tag = "lifted"
    while tag in source:
        tag += "x"

    def name(values: list[str]) -> str:
        placeholder = f"{tag}{len(lifted)}end"
        lifted[placeholder] = values
        return placeholder

    return name


def _lift(schema: Any, name: Callable[[list[str]], str]) -> Any:
    """The schema with every large string enum replaced by a constant that stands for it."""
    if _is_large_enum(schema):
        return {"const": name(schema["enum"])}
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for path, sub in _children(schema):
        if len(path) == 1:
            out[str(path[0])] = _lift(sub, name)
            continue
        key, place = str(path[0]), path[1]
        if out[key] is schema[key]:
            out[key] = schema[key].copy()
        out[key][place] = _lift(sub, name)
    return out
