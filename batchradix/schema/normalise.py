"""A schema in the form that grammars and Arrow types are derived from.

The result accepts what the user's schema accepts as far as a grammar can say it; what it cannot
say is listed, and checked on every value. Two readings are narrower than the letter of JSON
Schema, because the letter helps nobody: keywords that all speak of one type (``properties``,
``maxLength``, ...) mean that type, and an object with ``properties`` has no others unless
``additionalProperties`` says so.
"""

from __future__ import annotations

import math
from typing import Any

from batchradix.errors import SchemaError
from batchradix.schema.answers import pointer_step
from batchradix.schema.document import SchemaDocument
from batchradix.schema.finite import require_finite
from batchradix.schema.keywords import (
    KEYWORDS_OF_TYPE,
    LIMITING,
    NUMBER_KEYWORDS,
    STRING_KEYWORDS,
    VALIDATED_ONLY,
)
from batchradix.schema.merge import (
    Contradiction,
    Merger,
    Node,
    alternatives_of,
    implied_types,
    json_key,
    places_of,
    same_nodes,
)

_PLAIN_KEYWORDS = (
    *STRING_KEYWORDS,
    *NUMBER_KEYWORDS,
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
)
_MAX_NODES = 200_000
_MAX_COMPARED = 200


class Normalised:
    """The normal form: ``root`` and ``defs`` by name; ``$ref`` nodes name a definition.

    ``notes`` lists ``(pointer, keyword)`` of what only validation catches.
    """

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._names: dict[str, str] = {}
        self._pointers: dict[str, str] = {}
        self._num_nodes = 0
        self._notes: dict[tuple[str, str], None] = {}
        self._merger = Merger(self.note, self._expand, self._finish)
        self.defs: dict[str, Node] = {}
        self.root = self._node(document.root, "#", frozenset())
        require_finite(self.root, self.defs)

    @property
    def root_name(self) -> str | None:
        """The name of the definition that is the whole schema, when something refers to it."""
        return self._names.get("#")

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._notes)

    def note(self, pointer: str, keyword: str) -> None:
        self._notes[pointer, keyword] = None

    def places(self, node: Node, keyword: str) -> list[str]:
        """Where in the user's schema a keyword of a node is written."""
        schema_at = self._document.resolver.schema_at
        places = [place for place in places_of(node) if keyword in (schema_at(place) or ())]
        return places or [node["@"]]

    def resolved(self, node: Node) -> Node:
        """The node itself, or the definition it refers to."""
        while "$ref" in node:
            node = self.defs[node["$ref"]]
        return node

    def _node(self, schema: Any, pointer: str, chain: frozenset[str]) -> Node:
        return self._finish(self._raw(schema, pointer, chain), pointer)

    def _raw(self, schema: Any, pointer: str, chain: frozenset[str]) -> list[Node]:
        """The alternatives of a schema, each without ``anyOf``; required names not filled in."""
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise SchemaError(
                f"schema: written out it has more than {_MAX_NODES} parts (at {pointer}); "
                f"simplify the $ref and allOf in it"
            )
        if schema is False:
            raise Contradiction(pointer, "it is false")
        if schema is True:
            return [{}]
        schema = self._document.meaningful(schema)
        self._note_validated(schema, pointer)
        if "enum" in schema or "const" in schema:
            return [self._values(schema, pointer)]
        found = [self._own(schema, pointer, chain)]
        if "$ref" in schema:
            target = self._document.resolver.pointer_of(schema["$ref"], pointer)
            reference = {"@": pointer, "$ref": self._define(target)}
            found = self._merger.product(found, [reference], pointer, "$ref", chain)
        for index, branch in enumerate(schema.get("allOf", ())):
            at = pointer_step(pointer_step(pointer, "allOf"), index)
            inside = self._raw(branch, at, chain)
            found = self._merger.product(found, inside, pointer, "allOf", chain)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                branches = self._branches(schema, keyword, pointer, chain)
                found = self._merger.product(found, branches, pointer, keyword, chain)
        return found

    def _note_validated(self, schema: Node, pointer: str) -> None:
        for keyword in VALIDATED_ONLY:
            if keyword in schema and not (keyword == "uniqueItems" and schema[keyword] is False):
                self.note(pointer, keyword)

    def _branches(
        self, schema: Node, keyword: str, pointer: str, chain: frozenset[str]
    ) -> list[Node]:
        at = pointer_step(pointer, keyword)
        branches = [
            self._raw(branch, pointer_step(at, index), chain)
            for index, branch in enumerate(schema[keyword])
        ]
        if keyword == "oneOf" and not self._are_disjoint(branches):
            self.note(pointer, "oneOf")
        return [node for branch in branches for node in branch]

    def _values(self, schema: Node, pointer: str) -> Node:
        """``enum`` and ``const`` with the values that break a keyword beside them left out."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        first: dict[str, Any] = {}
        for value in values:
            first.setdefault(json_key(value), value)
        values = list(first.values())
        if "const" in schema and "enum" in schema:
            allowed = {json_key(value) for value in schema["enum"]}
            values = [value for value in values if json_key(value) in allowed]
        beside = {key: schema[key] for key in LIMITING if key in schema}
        if beside:
            validator = self._document.validator_for(beside, pointer)
            values = [value for value in values if validator.is_valid(value)]
            for keyword in VALIDATED_ONLY:
                self._notes.pop((pointer, keyword), None)
        if not values:
            raise Contradiction(pointer, "no value of enum or const fits the keywords beside it")
        return {"@": pointer, "enum": values}

    def _own(self, schema: Node, pointer: str, chain: frozenset[str]) -> Node:
        """The keywords of one schema without those that combine schemas."""
        node: Node = {}
        if "type" in schema:
            types = schema["type"]
            node["type"] = [types] if isinstance(types, str) else list(types)
        node.update({key: schema[key] for key in _PLAIN_KEYWORDS if key in schema})
        _tidy_numbers(node)
        for key in ("properties", "patternProperties"):
            if key in schema:
                at = pointer_step(pointer, key)
                node[key] = {
                    name: self._node(part, pointer_step(at, name), chain)
                    for name, part in schema[key].items()
                }
        for key in ("additionalProperties", "propertyNames"):
            if key in schema:
                node[key] = self._part(schema, key, pointer, chain)
        self._own_items(schema, node, pointer, chain)
        closes = "unevaluatedProperties" in schema and "additionalProperties" not in schema
        combines = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"} & set(schema)
        if closes and not combines:
            key = "unevaluatedProperties"
            node["additionalProperties"] = self._part(schema, key, pointer, chain)
            self._notes.pop((pointer, key), None)
        if node:
            node["@"] = pointer
        return node

    def _own_items(self, schema: Node, node: Node, pointer: str, chain: frozenset[str]) -> None:
        prefix, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):  # how drafts before 2020-12 spell it
            prefix, rest = "items", "additionalItems"
        if prefix in schema:
            at = pointer_step(pointer, prefix)
            node["prefixItems"] = [
                self._node(part, pointer_step(at, index), chain)
                for index, part in enumerate(schema[prefix])
            ]
        if rest in schema:
            node["items"] = self._part(schema, rest, pointer, chain)

    def _part(self, schema: Node, key: str, pointer: str, chain: frozenset[str]) -> Node | bool:
        at = pointer_step(pointer, key)
        return False if schema[key] is False else self._node(schema[key], at, chain)

    def _define(self, pointer: str) -> str:
        """The name of the definition for the schema at ``pointer``."""
        if pointer not in self._names:
            name = f"d{len(self._names)}"
            self._names[pointer] = name
            self._pointers[name] = pointer
            schema = self._document.resolver.schema_at(pointer)
            self.defs[name] = self._node(schema, pointer, frozenset())
        return self._names[pointer]

    def _expand(self, node: Node, chain: frozenset[str]) -> list[Node] | None:
        name = node["$ref"]
        if name in chain:
            return None
        pointer = self._pointers[name]
        schema = self._document.resolver.schema_at(pointer)
        return self._raw(schema, pointer, chain | {name})

    def _finish(self, alternatives: list[Node], pointer: str) -> Node:
        """One node of the alternatives; types made explicit and required names filled in."""
        finished: list[Node] = []
        failure: Contradiction | None = None
        for node in alternatives:
            try:
                node = _completed(node, pointer)
            except Contradiction as error:
                failure = error
                continue
            if not node:
                return {}
            if len(alternatives) > 1000 or not any(same_nodes(node, one) for one in finished):
                finished.append(node)
        if not finished and failure is not None:
            raise failure
        return finished[0] if len(finished) == 1 else {"@": pointer, "anyOf": finished}

    def _are_disjoint(self, branches: list[list[Node]]) -> bool:
        nodes = [node for branch in branches for node in branch]
        if all("enum" in node for node in nodes):
            keys = [json_key(value) for node in nodes for value in node["enum"]]
            return len(set(keys)) == len(keys)
        if len(nodes) > _MAX_COMPARED:
            return False
        for index, branch in enumerate(branches):
            for other in branches[index + 1 :]:
                for a in branch:
                    for b in other:
                        if not self._exclude_each_other(a, b):
                            return False
        return True

    def _exclude_each_other(self, a: Node, b: Node) -> bool:
        """Whether it is plain that no value matches both: types, values, or a tag property."""
        if "$ref" in a or "$ref" in b:
            nodes = [alternatives_of(self.defs.get(n.get("$ref", ""), n)) for n in (a, b)]
            if any("$ref" in node for side in nodes for node in side):
                return False
            return all(self._exclude_each_other(x, y) for x in nodes[0] for y in nodes[1])
        if "enum" in a and "enum" in b:
            return not {json_key(v) for v in a["enum"]} & {json_key(v) for v in b["enum"]}
        kinds = [_kinds(node) for node in (a, b)]
        if kinds[0] is not None and kinds[1] is not None and not kinds[0] & kinds[1]:
            return True
        if kinds != [{"object"}, {"object"}]:
            return False
        shared = set(a.get("required", ())) & set(b.get("required", ()))
        for name in shared & set(a.get("properties", ())) & set(b.get("properties", ())):
            tags = [node["properties"][name] for node in (a, b)]
            if "enum" in tags[0] and "enum" in tags[1] and self._exclude_each_other(*tags):
                return True
        return False


def _kinds(node: Node) -> set[str] | None:
    """JSON types that a node admits, integers counted as numbers; None when unknown."""
    if "enum" in node:
        return {_kind(value) for value in node["enum"]}
    types = node.get("type")
    return None if types is None else {"number" if t == "integer" else t for t in types}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _tidy_numbers(node: Node) -> None:
    """Draft 4 spells exclusive bounds with true and false; ``5.0`` counts as ``5``."""
    for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = node.get(exclusive)
        if isinstance(flag, bool):
            del node[exclusive]
            if flag and plain in node:
                node[exclusive] = node.pop(plain)
    for key, value in node.items():
        if isinstance(value, float) and value.is_integer():
            node[key] = int(value)


def _completed(node: Node, pointer: str) -> Node:
    if not node or "enum" in node or "$ref" in node:
        return node
    implied = implied_types(node)
    if "type" not in node and len(implied) == 1:
        node = {**node, "type": implied}
    types = node.get("type", [])
    if "number" in types and "integer" in types:
        types = [kind for kind in types if kind != "integer"]
        node = {**node, "type": types}
    if "object" in types and "required" in node:
        node = _with_required(node, pointer)
    if len(types) == 1:
        _check_ranges(node, types[0], pointer)
        others = {
            key for kind, keys in KEYWORDS_OF_TYPE.items() if kind != types[0] for key in keys
        }
        if types[0] == "integer":
            others -= set(NUMBER_KEYWORDS)
        node = {key: value for key, value in node.items() if key not in others}
    return node


def _with_required(node: Node, pointer: str) -> Node:
    properties = dict(node.get("properties", {}))
    for name in node["required"]:
        if name in properties:
            continue
        extra = node.get("additionalProperties", {})
        if extra is False and "patternProperties" not in node:
            raise Contradiction(
                pointer, f"{name!r} is required, but additionalProperties forbids it"
            )
        properties[name] = extra or {}
    return {**node, "properties": properties}


def _check_ranges(node: Node, kind: str, pointer: str) -> None:
    names = {"string": "Length", "array": "Items", "object": "Properties"}
    if kind in names:
        low, high = f"min{names[kind]}", f"max{names[kind]}"
        least, most = node.get(low, 0), node.get(high, math.inf)
        if kind == "object":
            least = max(least, len(node.get("required", ())))
            if node.get("additionalProperties") is False and "patternProperties" not in node:
                most = min(most, len(node.get("properties", ())))
        if kind == "array" and node.get("items") is False:
            most = min(most, len(node.get("prefixItems", ())))
        if least > most:
            raise Contradiction(pointer, f"{low} {least} is above {high} {most}")
    elif kind in ("integer", "number"):
        least, most = number_range(node, kind == "integer")
        strict = "exclusiveMinimum" in node or "exclusiveMaximum" in node
        if least > most or (kind == "number" and least == most and strict and _touches(node)):
            raise Contradiction(pointer, "no number lies between its minimum and maximum")
        step = node.get("multipleOf")
        if kind != "integer" or not isinstance(step, int) or math.isinf(most - least):
            return
        if int(most) // step * step < least:
            raise Contradiction(
                pointer, f"no multipleOf {step} lies between its minimum and maximum"
            )


def _touches(node: Node) -> bool:
    """Whether an exclusive bound is the effective one on either side."""
    low = node.get("exclusiveMinimum", -math.inf) >= node.get("minimum", -math.inf)
    high = node.get("exclusiveMaximum", math.inf) <= node.get("maximum", math.inf)
    return ("exclusiveMinimum" in node and low) or ("exclusiveMaximum" in node and high)


def number_range(node: Node, is_integer: bool) -> tuple[float, float]:
    """Least and greatest number that the bounds admit; exact integers for integers."""
    least = max(node.get("minimum", -math.inf), node.get("exclusiveMinimum", -math.inf))
    most = min(node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf))
    if not is_integer:
        return least, most
    lows, highs = [-math.inf], [math.inf]
    if "minimum" in node:
        lows.append(math.ceil(node["minimum"]))
    if "exclusiveMinimum" in node:
        lows.append(math.floor(node["exclusiveMinimum"]) + 1)
    if "maximum" in node:
        highs.append(math.floor(node["maximum"]))
    if "exclusiveMaximum" in node:
        highs.append(math.ceil(node["exclusiveMaximum"]) - 1)
    return max(lows), min(highs)
