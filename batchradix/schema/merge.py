"""Several schemas that must hold together, written as one.

A *node* is a plain dictionary of the keywords a grammar can express, with ``type`` always a
list, and with the key ``@`` for its place in the user's schema (``@also`` for the places of
what was merged into it). It holds neither ``allOf`` nor ``oneOf``; a choice is either the sole
``anyOf`` of a node or a list of nodes. What cannot be expressed exactly is noted, and left to
the validation of every value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jsonschema_rs

from batchradix.errors import SchemaError
from batchradix.schema.keywords import KEYWORDS_OF_TYPE, OBJECT_KEYWORDS

Node: TypeAlias = dict[str, Any]
PLACES = ("@", "@also")
Note: TypeAlias = Callable[[str, str], None]

_HIGHEST = ("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum")
_LOWEST = ("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum")
_MAX_ALTERNATIVES = 256


class Contradiction(SchemaError):
    """Nothing can match; caught where another alternative remains."""

    def __init__(self, pointer: str, why: str) -> None:
        super().__init__(f"schema: nothing can match the schema at {pointer}: {why}")


def alternatives_of(node: Node) -> list[Node]:
    """The alternatives that a finished node stands for."""
    return list(node["anyOf"]) if "anyOf" in node else [node]


def places_of(node: Node) -> list[str]:
    """The pointers of all the schemas that a node was made of."""
    return [node["@"], *node.get("@also", ())]


def same_nodes(a: Any, b: Any) -> bool:
    """Equality of nodes wherever they come from."""
    return bool(_bare(a) == _bare(b))


def _bare(part: Any) -> Any:
    if isinstance(part, dict):
        bare: dict[str, Any] = {}
        for key, value in part.items():
            if key in ("properties", "patternProperties"):
                bare[key] = {name: _bare(child) for name, child in value.items()}
            elif key not in PLACES:
                bare[key] = _bare(value)
        return bare
    if isinstance(part, list):
        return [_bare(value) for value in part]
    return (type(part).__name__, part) if isinstance(part, bool) else part


def json_key(value: Any) -> str:
    """A text that is equal for two values exactly when JSON Schema calls them equal."""
    return json.dumps(_whole(value), sort_keys=True, ensure_ascii=False)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(part) for part in value]
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    return value


class Merger:
    """Builds the conjunction of nodes. ``expand`` gives the alternatives of a ``$ref`` node."""

    def __init__(
        self,
        note: Note,
        expand: Callable[[Node, frozenset[str]], list[Node] | None],
        finish: Callable[[list[Node], str], Node],
    ) -> None:
        self._note = note
        self._expand = expand
        self._finish = finish

    def product(
        self, left: list[Node], right: list[Node], pointer: str, keyword: str, chain: frozenset[str]
    ) -> list[Node]:
        """Every pair of alternatives merged; contradictory pairs drop out.

        ``keyword`` is what gets noted when there are too many pairs to write down.
        """
        if left == [{}]:
            return right
        if right == [{}]:
            return left
        if len(left) * len(right) > _MAX_ALTERNATIVES:
            self._note(pointer, keyword)
            return left
        merged: list[Node] = []
        failure: Contradiction | None = None
        for a in left:
            for b in right:
                try:
                    merged += self.merge(a, b, pointer, chain)
                except Contradiction as error:
                    failure = error
        if not merged and failure is not None:
            if len(left) * len(right) == 1:
                raise failure
            raise Contradiction(pointer, f"every branch of {keyword} excludes what is beside it")
        return merged

    def merge(self, a: Node, b: Node, pointer: str, chain: frozenset[str]) -> list[Node]:
        """Alternatives that hold exactly where both nodes do. Raises `Contradiction`."""
        if not a or not b:
            return [a or b]
        if same_nodes(a, b):
            return [a]
        for one, other in ((a, b), (b, a)):
            if "$ref" in one:
                inside = self._expand(one, chain)
                if inside is None:  # already being written out: the recursion stays a reference
                    for key in other:
                        if key not in PLACES:
                            self._note(pointer, key)
                    return [one]
                return self.product(inside, [other], pointer, "$ref", chain | {one["$ref"]})
            if "enum" in one:
                return [self._filtered(one, other, pointer)]
        places = dict.fromkeys(place for part in (a, b) for place in places_of(part))
        merged: Node = {"@": a["@"], "@also": [place for place in places if place != a["@"]]}
        types = _common_types(a.get("type"), b.get("type"), pointer)
        if types is not None:
            merged["type"] = types
        for key in _HIGHEST + _LOWEST:
            if key in a or key in b:
                pick = max if key in _HIGHEST else min
                merged[key] = pick(part[key] for part in (a, b) if key in part)
        self._merge_plain(a, b, merged, pointer)
        self._merge_items(a, b, merged, pointer, chain)
        self._merge_objects(a, b, merged, pointer, chain)
        return [merged]

    def _filtered(self, node: Node, other: Node, pointer: str) -> Node:
        if "enum" in other:
            allowed = {json_key(value) for value in other["enum"]}
            values = [value for value in node["enum"] if json_key(value) in allowed]
        elif '"$ref"' in json.dumps(other):
            for key in other:
                if key not in PLACES:
                    self._note(pointer, key)
            return node
        else:
            validator = jsonschema_rs.Draft202012Validator(plain(other), validate_formats=True)
            values = [value for value in node["enum"] if validator.is_valid(value)]
        if not values:
            raise Contradiction(pointer, "no value of enum satisfies the keywords beside it")
        return {"@": node["@"], "enum": values}

    def _merge_plain(self, a: Node, b: Node, merged: Node, pointer: str) -> None:
        for key in ("pattern", "format"):
            values = [part[key] for part in (a, b) if key in part]
            if values:
                merged[key] = values[0]
            if len(values) == 2 and values[0] != values[1]:
                self._note(pointer, key)
        steps = [part["multipleOf"] for part in (a, b) if "multipleOf" in part]
        if steps:
            merged["multipleOf"] = steps[0]
        if len(steps) == 2 and steps[0] != steps[1]:
            if all(isinstance(step, int) for step in steps):
                merged["multipleOf"] = math.lcm(*steps)
            else:
                self._note(pointer, "multipleOf")

    def _child(self, a: Node, b: Node, pointer: str, chain: frozenset[str]) -> Node:
        left, right = alternatives_of(a), alternatives_of(b)
        return self._finish(self.product(left, right, pointer, "allOf", chain), pointer)

    def _merge_items(
        self, a: Node, b: Node, merged: Node, pointer: str, chain: frozenset[str]
    ) -> None:
        length = max(len(part.get("prefixItems", ())) for part in (a, b))
        prefix = []
        for index in range(length + 1):  # the last round is for the items after the prefix
            both = [_item(part, index) for part in (a, b)]
            if False in both:
                item: Node | bool = False
            else:
                try:
                    item = self._child(both[0], both[1], pointer, chain)  # type: ignore[arg-type]
                except Contradiction:
                    item = False
            if index == length:
                if item is False or item != {} or "items" in a or "items" in b:
                    merged["items"] = item
            elif item is False:  # no item can stand here, so the array ends before
                merged["maxItems"] = min(index, merged.get("maxItems", index))
                merged["items"] = False
                break
            else:
                prefix.append(item)
        if prefix:
            merged["prefixItems"] = prefix

    def _merge_objects(
        self, a: Node, b: Node, merged: Node, pointer: str, chain: frozenset[str]
    ) -> None:
        required = [*a.get("required", ()), *b.get("required", ())]
        if required:
            merged["required"] = list(dict.fromkeys(required))
        if "patternProperties" in a or "patternProperties" in b:
            keys = [key for key in OBJECT_KEYWORDS if not key.startswith(("min", "max", "req"))]
            kept = a if any(key in a for key in keys) else b
            left_out = b if kept is a else a
            merged.update({key: kept[key] for key in keys if key in kept})
            for key in keys:
                if key in left_out:
                    self._note(pointer, key)
            return
        names = [part["propertyNames"] for part in (a, b) if "propertyNames" in part]
        if names:
            merged["propertyNames"] = names[0]
            if len(names) == 2:
                merged["propertyNames"] = self._child(names[0], names[1], pointer, chain)
        properties: dict[str, Node] = {}
        for name in dict.fromkeys([*a.get("properties", ()), *b.get("properties", ())]):
            both = [_property(part, name) for part in (a, b)]
            try:
                if False in both:
                    raise Contradiction(pointer, f"additionalProperties forbids {name!r}")
                properties[name] = self._child(both[0], both[1], pointer, chain)  # type: ignore[arg-type]
            except Contradiction:
                if name in required:
                    raise
                if False not in both:  # forbidden here, yet not by additionalProperties
                    self._note(pointer, "properties")
        if "properties" in a or "properties" in b:
            merged["properties"] = properties
        extra = [part.get("additionalProperties") for part in (a, b)]
        if False in extra:
            merged["additionalProperties"] = False
        elif any(part is not None for part in extra):
            merged["additionalProperties"] = self._child(
                extra[0] or {}, extra[1] or {}, pointer, chain
            )


def _item(node: Node, index: int) -> Node | bool:
    prefix = node.get("prefixItems", [])
    item: Node | bool = prefix[index] if index < len(prefix) else node.get("items", {})
    return item


def _property(node: Node, name: str) -> Node | bool:
    properties = node.get("properties", {})
    found: Node | bool = (
        properties[name] if name in properties else node.get("additionalProperties", {})
    )
    return found


def _common_types(a: list[str] | None, b: list[str] | None, pointer: str) -> list[str] | None:
    if a is None or b is None:
        return a or b
    common = [kind for kind in a if kind in b or (kind == "integer" and "number" in b)] + [
        kind for kind in b if kind == "integer" and "number" in a and "integer" not in a
    ]
    if not common:
        raise Contradiction(pointer, f"type {' or '.join(a)} excludes type {' or '.join(b)}")
    return common


def plain(part: Any) -> Any:
    """A node as JSON Schema: without places, ``type`` a string where it is one."""
    if isinstance(part, list):
        return [plain(value) for value in part]
    if not isinstance(part, dict):
        return part
    schema = {}
    for key, value in part.items():
        if key in ("properties", "patternProperties"):
            schema[key] = {name: plain(child) for name, child in value.items()}
        elif key == "type":
            schema[key] = value[0] if len(value) == 1 else value
        elif key == "enum":
            schema[key] = value
        elif key not in PLACES:
            schema[key] = plain(value)
    return schema


def implied_types(node: Node) -> list[str]:
    """The types that the keywords of a node speak of."""
    return [kind for kind, keys in KEYWORDS_OF_TYPE.items() if any(key in node for key in keys)]
