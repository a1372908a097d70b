"""A schema document that is known to be sound: drafts, references, contradictions.

What is refused here is refused before any model loads, in one sentence that names the keyword
and its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import jsonschema_rs

from batchradix.errors import SchemaError
from batchradix.schema.keywords import LIMITING, NEEDS, is_known, subschemas
from batchradix.schema.resolve import Resolver

_DRAFTS = {
    "http://json-schema.org/draft-04/schema": jsonschema_rs.Draft4Validator,
    "http://json-schema.org/draft-06/schema": jsonschema_rs.Draft6Validator,
    "http://json-schema.org/draft-07/schema": jsonschema_rs.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema_rs.Draft202012Validator,
}
_NEWEST = "https://json-schema.org/draft/2020-12/schema"
# Under these a value need not match, so what is written there may well be unsatisfiable.
_NEGATIVE = ("not", "if", "contains", "dependentSchemas", "dependencies", "$defs", "definitions")
_MAY_BE_FALSE = (
    "additionalProperties",
    "additionalItems",
    "items",
    "unevaluatedItems",
    "unevaluatedProperties",
    "then",
    "else",
)
_BOUNDS = (
    ("minimum", "maximum"),
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)


@dataclass(frozen=True, slots=True)
class SchemaDocument:
    """A checked schema with its validator.

    ``without_meaning``: ``(pointer, keyword)`` of what the draft gives no meaning where it
    stands, so that the validator passes over it.
    """

    root: dict[str, Any]
    resolver: Resolver
    validator: Any
    draft: str
    without_meaning: tuple[tuple[str, str], ...]

    def meaningful(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema of the document without the keywords that have no meaning there."""
        idle = _without_meaning(schema, self.draft)
        return {key: part for key, part in schema.items() if key not in idle} if idle else schema

    def validator_for(self, part: dict[str, Any], pointer: str) -> Any:
        """A validator for some keywords of the schema at ``pointer``, or for all of it.

        References inside need the whole document, so with them all keywords are checked.
        """
        if '"$ref"' not in json.dumps(part):
            return _validator({"$schema": self.draft, **part})
        uri = "urn:batchradix:schema"
        registry = jsonschema_rs.Registry([(uri, self.root)])
        whole = {"$schema": self.draft, "$ref": uri + quote(pointer, safe="#/~")}
        return _validator(whole, registry=registry)


def open_document(root: dict[str, Any] | bool) -> SchemaDocument:
    """Checks a schema. Raises `SchemaError` when it is malformed or nothing can match it."""
    if root is False:
        raise SchemaError("schema: the schema is false, which no answer can match")
    schema: dict[str, Any] = {} if isinstance(root, bool) else root
    draft = _draft(schema)
    try:
        json.dumps(schema, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise SchemaError("schema: a string in it holds half of a surrogate pair") from None
    except ValueError as error:
        raise SchemaError(f"schema: it is not JSON ({error})") from None
    _check_meta(schema, draft)
    resolver = Resolver(schema)
    for pointer, part in _every_schema(schema, "#"):
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            resolver.pointer_of(part["$ref"], pointer)
    _check_parts(schema, "#")
    _check_loops(schema, resolver)
    try:
        validator = _validator({"$schema": draft, **schema})
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
        raise _malformed(error) from None
    idle = tuple(
        (pointer, keyword)
        for pointer, part in _every_schema(schema, "#")
        if isinstance(part, dict)
        for keyword in _without_meaning(part, draft)
    )
    return SchemaDocument(schema, resolver, validator, draft, idle)


def _ref_hides(draft: str) -> bool:
    """Up to draft 7 what stands beside a ``$ref`` counts for nothing."""
    return draft.startswith("http://")


def _without_meaning(schema: dict[str, Any], draft: str) -> list[str]:
    hidden = "$ref" in schema and _ref_hides(draft)
    return [
        key
        for key in schema
        if not is_known(key, draft)
        or (key in NEEDS and NEEDS[key] not in schema)
        or (hidden and key != "$ref" and (key in LIMITING or key in ("enum", "const")))
    ]


def _validator(schema: dict[str, Any], **more: Any) -> Any:
    cls: Any = _DRAFTS[schema["$schema"].rstrip("#")]
    return cls(schema, validate_formats=True, offline=True, **more)


def _draft(schema: dict[str, Any]) -> str:
    draft = schema.get("$schema", _NEWEST)
    if not isinstance(draft, str) or draft.rstrip("#") not in _DRAFTS:
        raise SchemaError(
            f"schema: $schema at # names {draft!r}, which is no known draft; use "
            f"{_NEWEST!r} or leave it out"
        )
    return draft


def _check_meta(schema: dict[str, Any], draft: str) -> None:
    try:
        jsonschema_rs.meta.validate({**schema, "$schema": draft})
    except jsonschema_rs.ValidationError as error:
        path = list(error.instance_path)
        if path and path[-1] == "enum" and error.instance == []:
            raise SchemaError(_nothing(_pointer(path[:-1]), "enum is empty")) from None
        raise _malformed(error) from None
    except ValueError as error:
        raise _malformed(error) from None


def _malformed(error: Exception) -> SchemaError:
    path = list(getattr(error, "instance_path", []))
    message = getattr(error, "message", str(error)).splitlines()[0]
    if message.startswith("Recursion limit"):
        return SchemaError("schema: it nests too deeply to be read")
    if len(message) > 200:
        message = f"{message[:197]}..."
    keyword = next((str(step) for step in reversed(path) if isinstance(step, str)), "")
    named = f"{keyword} " if keyword else ""
    return SchemaError(f"schema: {named}at {_pointer(path)} is malformed: {message}")


def _pointer(path: list[Any]) -> str:
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in path)
    return "/".join(["#", *steps])


def _every_schema(schema: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    yield pointer, schema
    if isinstance(schema, dict):
        for _, at, part in subschemas(schema, pointer):
            yield from _every_schema(part, at)


def _check_parts(schema: Any, pointer: str) -> None:
    """Contradictions inside single schemas, wherever a value has to match them."""
    if not isinstance(schema, dict):
        return
    if schema.get("enum") == []:
        raise SchemaError(_nothing(pointer, "enum is empty"))
    for low, high in _BOUNDS:
        least, most = _number(schema.get(low), -math.inf), _number(schema.get(high), math.inf)
        if least > most:
            raise SchemaError(_nothing(pointer, f"{low} {least} is above {high} {most}"))
    for keyword, at, part in subschemas(schema, pointer):
        if keyword in _NEGATIVE:
            continue
        if part is False and keyword not in _MAY_BE_FALSE:
            raise SchemaError(_nothing(at, f"the schema under {keyword} is false"))
        _check_parts(part, at)


def _check_loops(schema: dict[str, Any], resolver: Resolver) -> None:
    """Refuses a schema that is defined by itself without descending into a value."""
    done: set[str] = set()

    def visit(pointer: str, part: Any, path: tuple[str, ...]) -> None:
        if pointer in path:
            raise SchemaError(f"schema: $ref at {path[-1]} leads back to itself without end")
        if pointer in done or not isinstance(part, dict):
            return
        path = (*path, pointer)
        if isinstance(part.get("$ref"), str):
            target = resolver.pointer_of(part["$ref"], pointer)
            visit(target, resolver.schema_at(target), path)
        for keyword, at, inner in subschemas(part, pointer):
            if keyword in ("allOf", "anyOf", "oneOf", "not", "if", "then", "else"):
                visit(at, inner, path)
        done.add(pointer)

    for pointer, part in _every_schema(schema, "#"):
        visit(pointer, part, ())


def _nothing(pointer: str, why: str) -> str:
    return f"schema: nothing can match the schema at {pointer}: {why}"


def _number(value: Any, otherwise: float) -> float:
    return value if isinstance(value, int | float) else otherwise
