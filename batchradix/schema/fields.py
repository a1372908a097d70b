"""The short way to a JSON Schema: ``vendor: str, total: float?, kind: invoice|receipt``.

    fields   = field {"," field}
    field    = name ":" type
    type     = item {"[]"} ["?"]
    item     = word | "[" type "]" | "{" fields "}" | choices
    word     = str | int | float | bool | date | datetime | time | uuid
    choices  = text "|" text {"|" text}, or one text in quotes
    name, text = letters, digits, _ and -, or anything in quotes

``?`` makes a value that may be null; every field is required. Quotes are ``'`` or ``"``, with
JSON's escapes inside. A schema made from fields has no other properties.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from batchradix.errors import SchemaError

_WORDS: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "date": {"type": "string", "format": "date"},
    "datetime": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
}
_BARE = re.compile(r"[\w-]+")
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_SPACE = re.compile(r"\s*")
_MAX_DEPTH = 50


def fields_schema(text: str) -> dict[str, Any]:
    """The JSON Schema of a list of fields. Raises `SchemaError` that names the place."""
    if not isinstance(text, str):
        raise SchemaError(f"fields: expected text, not {type(text).__name__}")
    return _Reader(text).fields(end="")


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0

    def fields(self, end: str) -> dict[str, Any]:
        """Fields up to ``end``, "" for the end of the text."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse("this nests too deeply")
        properties: dict[str, Any] = {}
        while True:
            self._skip_space()
            start = self._place
            name = self._text_or_word("a field's name")
            if name in properties:
                self._refuse(f"the field {name!r} is there twice", start)
            self._expect(":", f"':' and a type after the name {name!r}")
            properties[name] = self._type()
            if not self._takes(","):
                break
            if self._at(end):  # a comma after the last field
                break
        if not self._at(end):
            wanted = f"',' or {end!r}" if end else "',' or the end"
            self._refuse(f"expected {wanted}, not {self._shown()}")
        self._place += len(end)
        self._depth -= 1
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    def _type(self) -> dict[str, Any]:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse("this nests too deeply")
        found = self._item()
        while self._takes("["):
            self._expect("]", "']'")
            found = {"type": "array", "items": found}
        if self._takes("?"):
            found = {"anyOf": [found, {"type": "null"}]}
        self._depth -= 1
        return found

    def _item(self) -> dict[str, Any]:
        if self._takes("["):
            inner = self._type()
            self._expect("]", "']'")
            return {"type": "array", "items": inner}
        if self._takes("{"):
            return self.fields(end="}")
        self._skip_space()
        start = self._place
        is_quoted = self._text[start : start + 1] in ("'", '"')
        first = self._text_or_word("a type")
        choices = [first]
        while self._takes("|"):
            self._skip_space()
            place = self._place
            choice = self._text_or_word("another choice after '|'")
            if choice in choices:
                self._refuse(f"the choice {choice!r} is there twice", place)
            choices.append(choice)
        if len(choices) > 1 or is_quoted:
            return {"type": "string", "enum": choices}
        if first not in _WORDS:
            words = ", ".join(_WORDS)
            self._refuse(
                f"{first!r} is no type; the types are {words}, a|b|c, [type] and {{fields}}", start
            )
        return dict(_WORDS[first])

    def _text_or_word(self, expected: str) -> str:
        self._skip_space()
        found = _BARE.match(self._text, self._place)
        if found:
            self._place = found.end()
            return found[0]
        if self._text[self._place : self._place + 1] not in ("'", '"'):
            self._refuse(f"expected {expected}, not {self._shown()}")
        return self._quoted()

    def _quoted(self) -> str:
        start = self._place
        found = _QUOTED.match(self._text, start)
        if not found:
            self._refuse("this quote has no end", start)
        inner = found[0][1:-1]
        if found[0][0] == "'":
            inner = re.sub(r"""\\'|(?<!\\)\"""", lambda m: "'" if m[0] == "\\'" else '\\"', inner)
        try:
            text = str(json.loads(f'"{inner}"', strict=False))
            text.encode()
        except (ValueError, UnicodeEncodeError):
            self._refuse("this quoted text has an escape that JSON does not know", start)
        self._place = found.end()
        if not text:
            self._refuse("this quoted text is empty", start)
        return text

    def _at(self, end: str) -> bool:
        self._skip_space()
        if not end:
            return self._place == len(self._text)
        return self._text.startswith(end, self._place)

    def _takes(self, sign: str) -> bool:
        self._skip_space()
        found = self._text.startswith(sign, self._place)
        self._place += len(sign) if found else 0
        return found

    def _expect(self, sign: str, expected: str) -> None:
        if not self._takes(sign):
            self._refuse(f"expected {expected}, not {self._shown()}")

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._place)
        assert found is not None
        self._place = found.end()

    def _shown(self) -> str:
        rest = self._text[self._place : self._place + 20]
        return repr(rest) if rest else "the end"

    def _refuse(self, problem: str, place: int | None = None) -> NoReturn:
        at = self._place if place is None else place
        raise SchemaError(f"fields: at character {at + 1} of {_short(self._text)}: {problem}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
