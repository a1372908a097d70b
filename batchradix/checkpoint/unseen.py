"""A text that a chat template may place and trim, but not look at.

When a template renders such a text without asking anything about it, it treats all texts alike:
it has to run once for a whole job, and each row's text goes into the places where this one stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn


class AskedError(Exception):
    """The template asked what only the text itself can answer."""


def _ask(*args: object, **kwargs: object) -> NoReturn:
    raise AskedError("it looks into a text")


class Unseen(str):
    """Stands for a text of which only the beginning is known. What is added to it is unseen too.

    ``marks`` are four characters that occur nowhere else: for the text, and for it with white
    space taken off its start, its end, both.
    """

    begins: str
    marks: tuple[str, ...]
    __slots__ = ("begins", "marks")

    def __new__(cls, marks: tuple[str, ...], begins: str, spelt: str | None = None) -> Unseen:
        new = super().__new__(cls, marks[0] if spelt is None else spelt)
        new.begins, new.marks = begins, marks
        return new

    def __str__(self) -> str:
        return str.__str__(self)

    def __bool__(self) -> bool:
        return True if self.begins else _ask()

    def __add__(self, other: str) -> Unseen:
        return Unseen(self.marks, self.begins, str(self) + str(other))

    def __radd__(self, other: str) -> Unseen:
        begins = str(other) + self.begins
        return Unseen(self.marks, begins, str(other) + str(self))

    def startswith(self, prefix: Any, *place: Any) -> bool:
        if place or not isinstance(prefix, str):
            _ask()
        if not prefix.startswith(self.begins[: len(prefix)]):
            return False
        return True if len(prefix) <= len(self.begins) else _ask()

    def strip(self, chars: str | None = None, /) -> Unseen:
        return self._trimmed(3, chars)

    def lstrip(self, chars: str | None = None, /) -> Unseen:
        return self._trimmed(1, chars)

    def rstrip(self, chars: str | None = None, /) -> Unseen:
        return self._trimmed(2, chars)

    def _trimmed(self, sides: int, chars: str | None) -> Unseen:
        if chars is not None or str(self) not in self.marks:
            _ask()
        sides |= self.marks.index(str(self))
        begins = self.begins.lstrip() if sides & 1 else self.begins
        # A beginning of white space alone may go with what follows.
        return Unseen(self.marks, begins if begins.strip() else "", self.marks[sides])


_KNOWN = {name for name in vars(Unseen) if callable(getattr(Unseen, name))} | {
    "__class__",
    "__getattribute__",
    "__init__",
    "__init_subclass__",
    "__setattr__",
    "__subclasshook__",
}
for _name in dir(str):
    if callable(getattr(str, _name)) and _name not in _KNOWN:
        setattr(Unseen, _name, _ask)


def is_unseen(value: Any, marks: str) -> bool:
    """Whether there is an unseen text in a value, at any depth, or what was made of one."""
    if isinstance(value, Unseen):
        return True
    if isinstance(value, str):
        return any(mark in value for mark in marks)
    if isinstance(value, Mapping):
        return any(is_unseen(part, marks) for part in [*value.keys(), *value.values()])
    if isinstance(value, list | tuple):
        return any(is_unseen(part, marks) for part in value)
    return not isinstance(value, bool | int | float | None)
