"""Answers held against right ones: how many are right, field by field and label by label."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from batchradix.report.compare import is_number, same

GoldKind = Literal["object", "array", "number", "boolean", "string", "text", "any"]
"""What answers are, and so what the text of a right one is read as."""

WHOLE = "value"
"""What the one field of an answer is called that is no object."""

NO_ANSWER = "(none)"
_OTHER = "(other)"
_MOST_LABELS = 200


class BadGold(ValueError):
    """A right answer that cannot be read as one."""


def read_gold(raw: Any, kind: GoldKind) -> Any:
    """The right answer in ``raw``, a value of JSON that is not null: as it is, or read from its
    text. Raises `BadGold`."""
    if kind in ("string", "text"):
        if isinstance(raw, (dict, list)):
            raise BadGold("it is nested, and answers are texts")
        return raw if isinstance(raw, str) else json.dumps(raw, default=str)
    if isinstance(raw, str):
        text = raw.strip()
        try:
            raw = json.loads(text.lower() if kind == "boolean" else text, parse_float=Decimal)
        except (ValueError, RecursionError):
            if kind == "any":
                return raw
            raise BadGold(f"it is no {kind}") from None
    fits = {
        "object": isinstance(raw, dict),
        "array": isinstance(raw, list),
        "number": is_number(raw),
        "boolean": isinstance(raw, bool),
        "any": True,
    }
    if not fits[kind]:
        raise BadGold(f"it is no {kind}")
    return raw


def is_right(answer: Any, gold: Any) -> bool:
    """Whether an answer is the right one. Of objects the fields that ``gold`` has count."""
    if isinstance(gold, Mapping):
        found = answer if isinstance(answer, Mapping) else {}
        return isinstance(answer, Mapping) and all(
            same(found.get(name), right) for name, right in gold.items()
        )
    return same(answer, gold)


def kind_of_answer(answer: Any) -> GoldKind:
    """As what the right answer to compare with this one is to be read."""
    kinds: list[tuple[type | tuple[type, ...], GoldKind]] = [
        (dict, "object"),
        (list, "array"),
        (bool, "boolean"),
        (str, "string"),
        ((int, float, Decimal), "number"),
    ]
    return next((kind for types, kind in kinds if isinstance(answer, types)), "any")


@dataclass(slots=True)
class FieldScore:
    """How many answers were ``compared`` in a field and how many were ``correct``; ``pairs``: of
    fields with few values, how often which right label met which answer."""

    compared: int = 0
    correct: int = 0
    pairs: Counter[tuple[str, str]] | None = None

    @property
    def accuracy(self) -> float | None:
        return self.correct / self.compared if self.compared else None

    def add(self, answer: Any, gold: Any, *, is_answered: bool) -> bool:
        """Counts one answer; whether it is right."""
        is_correct = is_answered and same(answer, gold)
        self.compared += 1
        self.correct += is_correct
        if self.pairs is not None:
            right = _label(gold)
            if len(self.pairs) > _MOST_LABELS and not any(right == one for one, _ in self.pairs):
                right = _OTHER
            self.pairs[right, _label(answer) if is_answered else NO_ANSWER] += 1
        return is_correct

    def classes(self) -> dict[str, dict[str, Any]]:
        """By label: how often it was right and answered, precision and recall (None where it never
        was answered, or right)."""
        assert self.pairs is not None
        gold: Counter[str] = Counter()
        answered: Counter[str] = Counter()
        for (right, answer), count in self.pairs.items():
            gold[right] += count
            answered[answer] += count
        labels = sorted({*gold, *answered} - {NO_ANSWER})
        return {
            label: {
                "gold": gold[label],
                "answered": answered[label],
                "correct": self.pairs[label, label],
                "precision": _share(self.pairs[label, label], answered[label]),
                "recall": _share(self.pairs[label, label], gold[label]),
            }
            for label in labels
        }

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "compared": self.compared,
            "correct": self.correct,
            "accuracy": self.accuracy,
        }
        if self.pairs is not None:
            found["classes"] = self.classes()
            found["confusion"] = [
                {"gold": right, "answer": answer, "rows": count}
                for (right, answer), count in sorted(self.pairs.items())
            ]
        return found


@dataclass(slots=True, kw_only=True)
class GoldScores:
    """The scores of a table, held against the input column ``column``.

    Of ``rows`` rows ``missing`` have no right answer (null), and that of ``invalid`` rows cannot
    be read (``first_invalid``: which one and why); ``compared`` are the others, of which
    ``unanswered`` have no answer that is ok, which counts as wrong, and ``exact`` are right in all
    fields that the right answer has.
    """

    column: str
    kind: GoldKind
    labelled: Collection[str] = ()
    rows: int = 0
    missing: int = 0
    invalid: int = 0
    first_invalid: str | None = None
    compared: int = 0
    unanswered: int = 0
    exact: int = 0
    fields: dict[str, FieldScore] = field(default_factory=dict)

    def add(self, row: int, answer: Any, raw: Any, *, is_ok: bool) -> None:
        """Counts a row's answer (None unless it ``is_ok``) against the right one, both as values
        of JSON."""
        self.rows += 1
        if raw is None:
            self.missing += 1
            return
        try:
            gold = read_gold(raw, self.kind)
        except BadGold as error:
            self.invalid += 1
            if self.first_invalid is None:
                self.first_invalid = f"row {row}: {error}"
            return
        if self.kind == "text":
            gold, answer = gold.strip(), answer.strip() if isinstance(answer, str) else answer
        self.compared += 1
        self.unanswered += not is_ok
        rights = gold if isinstance(gold, dict) else {WHOLE: gold}
        found = answer if isinstance(gold, dict) else {WHOLE: answer}
        found = found if isinstance(found, dict) else {}
        right = [
            self._field(name).add(found.get(name), value, is_answered=is_ok)
            for name, value in rights.items()
        ]
        self.exact += all(right)

    def _field(self, name: str) -> FieldScore:
        if name not in self.fields:
            pairs: Counter[tuple[str, str]] | None = Counter() if name in self.labelled else None
            self.fields[name] = FieldScore(pairs=pairs)
        return self.fields[name]

    def to_json(self) -> dict[str, Any]:
        """The object under ``gold`` that ``--json`` prints."""
        return {
            "column": self.column,
            "kind": self.kind,
            "rows": self.rows,
            "missing": self.missing,
            "invalid": self.invalid,
            "first_invalid": self.first_invalid,
            "compared": self.compared,
            "unanswered": self.unanswered,
            "exact": self.exact,
            "accuracy": _share(self.exact, self.compared),
            "fields": {name: score.to_json() for name, score in self.fields.items()},
        }

    def lines(self) -> list[tuple[str, str]]:
        """Name and value pairs for a person."""
        share = _percent(self.exact, self.compared)
        text = f"{self.exact:,} of {self.compared:,} answers right{share}"
        if self.unanswered:
            text += f"; {self.unanswered:,} rows without an answer"
        if self.missing:
            text += f"; {self.missing:,} rows without a right one"
        if self.invalid:
            text += f"; {self.invalid:,} of the right ones cannot be read ({self.first_invalid})"
        lines = [("gold", text)]
        for name, score in self.fields.items():
            if [*self.fields] != [WHOLE]:
                right = f"{score.correct:,} of {score.compared:,} right"
                lines.append(("", f"{name}: {right}{_percent(score.correct, score.compared)}"))
            if score.pairs is None:
                continue
            for label, one in score.classes().items():
                precision, recall = (_shown(one[name]) for name in ("precision", "recall"))
                lines.append(
                    (
                        "",
                        f"  {label}: precision {precision}, recall {recall} "
                        f"({one['gold']:,} rows, {one['answered']:,} answers)",
                    )
                )
        return lines


def _label(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _shown(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _percent(part: int, whole: int) -> str:
    return f" ({part / whole:.1%})" if whole else ""
