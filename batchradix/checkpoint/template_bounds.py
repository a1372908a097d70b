"""How large a text or list a template's operation would build, known before it builds it.

A chat template may call any harmless method of a text: ``center(10 ** 10)`` takes 10 GB at
once. What such operations make is bounded here by their arguments alone; each function returns
at least the number of items that the result will hold, 0 for what can make nothing large.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?")
_FIELD = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_DIGITS = re.compile(r"\d+")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes"})


def call_size(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of a call; what matters are the methods of built-in types."""
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    values = [*args, *kwargs.values()]
    if name in _PADDING:
        return _largest_integer(values)
    if not isinstance(owner, str | bytes):
        return 0
    if name == "expandtabs":
        return len(owner) * max(8, _largest_integer(values))
    if name == "replace" and len(args) >= 2:
        return replaced_size(owner, args[0], args[1])
    if name == "translate":
        return len(owner) * _longest(values)
    if name == "join" and args and isinstance(args[0], Collection):
        return joined_size(owner, args[0])
    return 0


def replaced_size(text: Any, old: Any, new: Any) -> int:
    """Of replacing ``old`` by ``new`` in a text wherever it stands."""
    num_places = _length(text) // max(1, _length(old)) + 1
    return _length(text) + num_places * _length(new)


def joined_size(separator: Any, items: Iterable[Any]) -> int:
    """Of joining items that can be looked at more than once."""
    lengths = [_length(item) for item in items]
    return sum(lengths) + _length(separator) * len(lengths)


def percent_size(form: str | bytes, values: Any) -> int:
    """Of ``form % values``."""
    text = form.decode("latin-1") if isinstance(form, bytes) else form
    given = (
        list(values.values())
        if isinstance(values, Mapping)
        else list(values)
        if isinstance(values, tuple)
        else [values]
    )
    places = list(_PERCENT.finditer(text))
    widths = [width for place in places for width in place.groups() if width]
    size = sum(int(width) for width in widths if width != "*" and len(width) < 20)
    size += sum(10**20 for width in widths if len(width) >= 20)
    if "*" in widths:
        size += widths.count("*") * _largest_integer(given)
    return len(text) + size + len(places) * _longest(given)


def format_size(form: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of ``form.format(*args, **kwargs)``: every number in its fields might be a width, and
    where fields stand in fields so might every number it is given."""
    given = [*args, *kwargs.values()]
    inside = " ".join(_FIELD.findall(form))
    numbers = [int(digits[:20]) for digits in _DIGITS.findall(inside)]
    if re.search(r"\{[^{}]*\{", form):
        numbers += [_largest_integer(given)] * form.count("{")
    return len(form) + sum(numbers) + form.count("{") * _longest(given)


def _indented_size(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    indent = len(width) if isinstance(width, str) else _largest_integer([width])
    return _length(text) + (str(text).count("\n") + 2) * indent


def _wrapped_size(text: Any, *args: Any, **kwargs: Any) -> int:
    return _length(text) * (1 + _longest([*args, *kwargs.values()]))


FILTER_SIZES: Mapping[str, Callable[..., int]] = {
    "batch": lambda _, count, *rest: _largest_integer([count]),
    "center": lambda text, width=80: _largest_integer([width]),
    "format": lambda form, *args, **kwargs: percent_size(str(form), kwargs or args),
    "indent": _indented_size,
    "replace": lambda text, old, new, *rest, **_: replaced_size(text, old, new),
    "slice": lambda _, count, *rest: _largest_integer([count]),
    "wordwrap": _wrapped_size,
}
"""By a filter's name: the size of what it makes of its arguments."""


def _length(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return 0 if value is None else len(str(value)) if isinstance(value, int | float) else 1


def _longest(values: Iterable[Any]) -> int:
    """Characters of the longest text among values, or in them one level down."""
    longest = 0
    for value in values:
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        longest = max(longest, _length(value), sum(map(_length, inner)))
    return longest


def _largest_integer(values: Iterable[Any]) -> int:
    return max((value for value in values if isinstance(value, int)), default=0)
