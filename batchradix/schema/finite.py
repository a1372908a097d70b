"""Finds what no value can match because it would have to hold itself without end.

A schema that requires itself (``{"required": ["next"], "properties": {"next": {"$ref": "#"}}}``)
has no finite value. Decoding would never come out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from batchradix.schema.answers import pointer_step
from batchradix.schema.merge import Contradiction, Node

_WHY = "its values would have to hold themselves without end; make what it refers to optional"


def require_finite(root: Node, defs: Mapping[str, Node]) -> None:
    """Takes alternatives without a finite value out of ``anyOf`` (in place); nothing is lost.

    Raises `Contradiction` where another part than an alternative has none, an optional one
    too: a model that began it would never end.
    """
    finite: set[str] = set()
    while True:
        more = {name for name in defs.keys() - finite if _is_finite(defs[name], finite)}
        if not more:
            break
        finite |= more
    if len(finite) == len(defs):
        return  # nothing refers to itself for ever, so nothing at all is endless
    if not _is_finite(root, finite):
        raise Contradiction("#", _WHY)
    waiting = [(root, "#")]
    seen: set[str] = set()
    while waiting:
        node, _ = waiting.pop()
        if "anyOf" in node:
            node["anyOf"] = [one for one in node["anyOf"] if _is_finite(one, finite)]
        if "$ref" in node and node["$ref"] not in seen:
            seen.add(node["$ref"])
            target = defs[node["$ref"]]
            waiting.append((target, target.get("@", "#")))
        for part, pointer in _parts(node):
            if not _is_finite(part, finite):
                raise Contradiction(part.get("@", pointer), _WHY)
            waiting.append((part, pointer))


def _parts(node: Node) -> Iterator[tuple[Node, str]]:
    """The schemas inside a node and where they are, those of references left out."""
    pointer = node.get("@", "#")
    for keyword in ("anyOf", "prefixItems"):
        at = pointer_step(pointer, keyword)
        for index, part in enumerate(node.get(keyword, ())):
            yield part, pointer_step(at, index)
    for keyword in ("properties", "patternProperties"):
        at = pointer_step(pointer, keyword)
        for name, part in node.get(keyword, {}).items():
            yield part, pointer_step(at, name)
    for keyword in ("items", "additionalProperties"):
        if isinstance(node.get(keyword), dict):
            yield node[keyword], pointer_step(pointer, keyword)


def _is_finite(node: Node, finite: set[str]) -> bool:
    """Whether a node has a finite value if the definitions ``finite`` do.

    What other keywords forbid (ranges, patterns) does not count here.
    """
    if "$ref" in node:
        return node["$ref"] in finite
    if "anyOf" in node:
        return any(_is_finite(one, finite) for one in node["anyOf"])
    types = node.get("type")
    if types is None or not set(types) <= {"object", "array"}:
        return True  # a scalar, or anything
    return ("object" in types and _has_object(node, finite)) or (
        "array" in types and _has_array(node, finite)
    )


def _has_object(node: Node, finite: set[str]) -> bool:
    properties = node.get("properties", {})
    return all(
        _is_finite(properties[name], finite)
        for name in node.get("required", ())
        if name in properties
    )


def _has_array(node: Node, finite: set[str]) -> bool:
    least = node.get("minItems", 0)
    prefix = node.get("prefixItems", [])
    items = node.get("items")
    return all(_is_finite(part, finite) for part in prefix[:least]) and (
        least <= len(prefix) or not isinstance(items, dict) or _is_finite(items, finite)
    )
