"""One value of several: the answers to the parts of a text that was too long to be read at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchradix.errors import OptionError

_TEXTS_JOINED = "\n\n"
_SEPARATOR = "."


@dataclass(frozen=True, slots=True)
class Rules:
    """How fields combine: ``by_path`` (``vendor.name``; "" for all others) names ``first`` (the
    first that is not null), ``union`` (all distinct elements, of texts the distinct ones, in order
    of appearance), ``vote`` (the most frequent that is not null; of several the first in the order
    of their JSON, whichever part said it) or ``ask`` (what the model said of all answers).

    Else lists take ``union``, booleans and enums ``vote``, everything else ``first``; objects
    combine field by field. Answers that are any text take ``union``.
    """

    by_path: Mapping[str, str]

    def text(self, texts: Sequence[str], asked: str | None, path: str = "") -> str:
        """One text of several."""
        rule = self.by_path.get(path) or self.by_path.get("") or "union"
        if rule == "ask":
            return asked or ""
        if rule == "union":
            return _TEXTS_JOINED.join(dict.fromkeys(texts))
        return _vote(texts) if rule == "vote" else texts[0]

    def value(self, values: Sequence[Any], asked: Any, type_: pa.DataType, path: str = "") -> Any:
        """One value of several of ``type_``, as Arrow gives them; ``asked`` is what the model said
        of all of them, where it was."""
        rule = self.by_path.get(path) if path else None
        here = [value for value in values if value is not None]
        if rule is None and pa.types.is_struct(type_):
            if not here and asked is None:
                return None
            return {
                field.name: self.value(
                    [value[field.name] for value in here],
                    None if asked is None else asked[field.name],
                    field.type,
                    _below(path, field.name),
                )
                for field in type_
            }
        rule = rule or self.by_path.get("") or default_rule(type_)
        if rule == "ask":
            return asked
        if not here:
            return None
        if rule == "vote":
            return _vote(here)
        return _union(here) if rule == "union" else here[0]

    def check(self, type_: pa.DataType | None, texts: Sequence[str] = ()) -> None:
        """Raises `OptionError` for a rule that names no field of values of ``type_`` (None: any
        text), or that its field has no use for. ``texts``: fields that are any text."""
        for path, rule in self.by_path.items():
            if not path or path in texts:
                continue
            found = None if type_ is None else _at(type_, path)
            if found is None:
                raise OptionError(
                    f"`combine` has a rule for {path!r}, and answers have no such field; name one "
                    f"that they have, or give the rule alone for all fields"
                )
            if rule == "union" and not (_is_list(found) or _is_text(found)):
                raise OptionError(
                    f"`combine` {path}=union: {path} is {found}, and only lists and texts have a "
                    f"union; give first, vote or ask"
                )


def default_rule(type_: pa.DataType) -> str:
    """What values of a type take where nothing is said."""
    if _is_list(type_):
        return "union"
    is_listed = pa.types.is_boolean(type_) or pa.types.is_dictionary(type_)
    return "vote" if is_listed else "first"


def _union(values: Sequence[Any]) -> Any:
    if isinstance(values[0], str):
        return "\n".join(dict.fromkeys(values))
    if not isinstance(values[0], list):
        return values[0]
    found = {_key(element): element for value in values for element in value}
    return list(found.values())


def _vote(values: Sequence[Any]) -> Any:
    counts = Counter(map(_key, values))
    most = max(counts.values())
    winner = min(key for key, count in counts.items() if count == most)
    return next(value for value in values if _key(value) == winner)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _below(path: str, name: str) -> str:
    return f"{path}{_SEPARATOR}{name}" if path else name


def _at(type_: pa.DataType, path: str) -> pa.DataType | None:
    """The type of the field that a path names; names may hold dots themselves."""
    if not pa.types.is_struct(type_):
        return None
    for field in type_:
        if path == field.name:
            return field.type
        if path.startswith(f"{field.name}{_SEPARATOR}"):
            found = _at(field.type, path[len(field.name) + 1 :])
            if found is not None:
                return found
    return None


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))
