"""Local references of a schema; remote ones are refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from batchradix.errors import SchemaError
from batchradix.schema.keywords import subschemas


class Resolver:
    """Finds what a ``$ref`` of one schema document points to."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._base = str(root.get("$id", "")).rstrip("#")
        self._anchors: dict[str, str] = {}
        self._collect(root, "#")

    def _collect(self, schema: Any, pointer: str) -> None:
        if not isinstance(schema, dict):
            return
        if pointer != "#" and isinstance(schema.get("$id"), str):
            if not schema["$id"].startswith("#"):
                raise SchemaError(
                    f"schema: $id at {pointer} begins a document inside the document, which is "
                    f"not supported; remove it and refer to the part by its path"
                )
            self._anchors[schema["$id"][1:]] = pointer  # how draft 7 spells $anchor
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._anchors[schema[keyword]] = pointer
        for _, at, part in subschemas(schema, pointer):
            self._collect(part, at)

    def pointer_of(self, ref: str, pointer: str) -> str:
        """The pointer (``#`` or ``#/...``, not percent-encoded) that ``ref`` names.

        ``pointer`` is where the reference stands. Raises `SchemaError` for a remote reference
        and for one that leads nowhere.
        """
        base, _, fragment = ref.partition("#")
        if base not in ("", self._base):
            raise SchemaError(
                f"schema: $ref at {pointer} points to {ref!r}, outside the schema; nothing is "
                f"fetched, so copy that part under $defs and refer to it as '#/$defs/...'"
            )
        fragment = unquote(fragment)
        if fragment in self._anchors:
            return self._anchors[fragment]
        target = "#" + fragment
        if fragment and not fragment.startswith("/"):
            raise SchemaError(f"schema: $ref at {pointer} names {ref!r}, which is no $anchor here")
        self.schema_at(target, f"schema: $ref at {pointer} points to {ref!r}")
        return target

    def schema_at(self, pointer: str, sentence: str = "schema: the pointer") -> Any:
        """The schema at a pointer; `SchemaError` beginning with ``sentence`` when none is."""
        part: Any = self._root
        for raw in pointer.split("/")[1:]:
            step = raw.replace("~1", "/").replace("~0", "~")
            if isinstance(part, dict) and step in part:
                part = part[step]
            elif isinstance(part, list) and step.isdecimal() and int(step) < len(part):
                part = part[int(step)]
            else:
                raise SchemaError(f"{sentence}, where nothing is")
        if not isinstance(part, dict | bool):
            raise SchemaError(f"{sentence}, which is no schema")
        return part
