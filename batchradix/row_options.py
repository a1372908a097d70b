"""What a user may ask for beside prompts: several questions to a row, and what becomes of rows
that are too long. Part of `batchradix.config`, which has the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchradix.errors import OptionError

OVERFLOWS = ("error", "truncate-left", "truncate-middle", "chunk")
RULES = ("first", "union", "vote", "ask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of several questions to every row; its answers are the field ``name`` of the value.

    ``answers``: what they must match, as arguments of `schema.answer_format.answer_format` in
    plain values (so that they travel); empty for the run's own format, or any text where it has
    none. ``max_tokens`` goes before the run's and before a row's own.
    """

    name: str
    text: str
    answers: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRows:
    """What becomes of a row whose prompt does not fit the context together with its answer.

    ``overflow``: ``error`` (an error row, where not even one token of the answer fits),
    ``truncate-left`` (the row's text loses its beginning), ``truncate-middle`` (its middle), or
    ``chunk`` (it is cut into parts, whose answers become one). ``chunk_tokens``: the most tokens of
    the text that a part has (None: as many as fit), ``chunk_overlap``: how many it shares with the
    part before. ``combine``: pairs of a field (``vendor`` or ``vendor.name``; "" for all others)
    and a rule: ``first``, ``union``, ``vote`` or ``ask``.
    """

    overflow: Literal["error", "truncate-left", "truncate-middle", "chunk"] = "error"
    chunk_tokens: int | None = None
    chunk_overlap: int = 0
    combine: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.overflow not in OVERFLOWS:
            raise OptionError(
                f"`overflow` must be {', '.join(OVERFLOWS[:-1])} or {OVERFLOWS[-1]}, not "
                f"{self.overflow!r}"
            )
        for name, least in (("chunk_tokens", 1), ("chunk_overlap", 0)):
            value = getattr(self, name)
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if value is None and name == "chunk_tokens":
                continue
            if not is_integer or value < least:
                raise OptionError(f"`{name}` must be an integer of at least {least}, not {value!r}")
        if self.chunk_tokens is not None and self.chunk_overlap >= self.chunk_tokens:
            raise OptionError(
                f"`chunk_overlap` is {self.chunk_overlap:,} and `chunk_tokens` is "
                f"{self.chunk_tokens:,}, so no part would bring anything new; give less overlap"
            )
        if self.overflow != "chunk":
            given = {
                "chunk_tokens": self.chunk_tokens is not None,
                "chunk_overlap": self.chunk_overlap != 0,
                "combine": bool(self.combine),
            }
            lone = next((name for name, is_given in given.items() if is_given), None)
            if lone is not None:
                raise OptionError(f"`{lone}` is for rows cut into parts; give `overflow` chunk too")
        fields = [name for name, _ in self.combine]
        for name, rule in self.combine:
            if rule not in RULES:
                raise OptionError(
                    f"`combine` must be {', '.join(RULES[:-1])} or {RULES[-1]}, alone or behind a "
                    f"field and =, not {rule!r}"
                )
            if fields.count(name) > 1:
                raise OptionError(f"`combine` has two rules for {name or 'all fields'}; give one")

    @property
    def truncates(self) -> bool:
        return self.overflow.startswith("truncate")

    @property
    def chunks(self) -> bool:
        return self.overflow == "chunk"

    @property
    def asks(self) -> bool:
        """Whether the model is asked again over the answers to the parts."""
        return any(rule == "ask" for _, rule in self.combine)


def parse_combine(given: str | Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """The rules of `LongRows` from ``vote``, ``tags=union,summary=ask`` or a mapping of fields.

    Raises `OptionError` for what is neither.
    """
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple((str(name), str(rule)) for name, rule in given.items())
    if not isinstance(given, str):
        raise OptionError(f"`combine` must be text such as tags=union,vote, not {given!r}")
    rules = []
    for part in given.split(","):
        name, equals, rule = part.rpartition("=")
        if not part.strip() or (equals and not name.strip()):
            raise OptionError(
                f"`combine` must be rules such as tags=union,summary=ask or vote, not {given!r}"
            )
        rules.append((name.strip(), rule.strip()))
    return tuple(rules)


def long_rows(
    overflow: str,
    chunk_tokens: int | None,
    chunk_overlap: int,
    combine: str | Mapping[str, str] | None,
) -> LongRows:
    """`LongRows` with the rules that `parse_combine` reads. Raises `OptionError`."""
    return LongRows(
        overflow=overflow,  # type: ignore[arg-type]  # checked by LongRows
        chunk_tokens=chunk_tokens,
        chunk_overlap=chunk_overlap,
        combine=parse_combine(combine),
    )
