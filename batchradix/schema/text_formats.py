"""Answers that are texts: those that match a pattern or a grammar, or one out of a list."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchradix.errors import RowErrorCode, SchemaError
from batchradix.schema.answers import VALUE_METADATA, InvalidAnswer
from batchradix.schema.pattern_parser import UnsupportedPattern
from batchradix.schema.pattern_text import PatternCheck, plain_pattern, whole_pattern
from batchradix.types import GrammarSpec

if TYPE_CHECKING:
    import pyarrow as pa

_ROOT = re.compile(r"^\s*root\s*::=", re.MULTILINE)


class _TextFormat:
    """``value`` is the answer's text, a string."""

    takes_stop = True
    notices: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None

    @property
    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.string()

    def arrow_field(self, name: str) -> pa.Field:
        """A nullable field whose values JSON lines quote."""
        import pyarrow as pa

        return pa.field(name, self.arrow_type, nullable=True, metadata=VALUE_METADATA)

    def to_arrow(self, values: Sequence[Any | None]) -> pa.Array:
        """An array of `arrow_type` from answers; None (no answer) becomes null."""
        import pyarrow as pa

        return pa.array(values, type=self.arrow_type)


class RegexFormat(_TextFormat):
    """Answers that match a regular expression (ECMA-262) from beginning to end."""

    kind = "regex"
    prompt_line = "Answer with text that matches this regular expression:"

    def __init__(self, pattern: str) -> None:
        """Raises `SchemaError` for a pattern that is malformed or not regular."""
        if not isinstance(pattern, str):
            raise SchemaError(f"regex: a pattern is text, not {type(pattern).__name__}")
        try:
            expression = whole_pattern(pattern)
            self._check = PatternCheck(expression)
        except UnsupportedPattern as problem:
            raise SchemaError(
                f"regex: {_short(pattern)} holds {problem}, which cannot be enforced; the pattern "
                f"is of ECMA-262 without lookarounds, back references, \\b and flags"
            ) from None
        except RecursionError:
            raise SchemaError("regex: the pattern nests too deeply to be read") from None
        if not any(self._check.chars):
            raise SchemaError("regex: the pattern matches nothing but the empty text")
        self.text = pattern
        self.grammar = GrammarSpec(kind="regex", source=plain_pattern(expression))

    def parse(self, text: str) -> str:
        """The text itself. Raises `InvalidAnswer` where it does not match."""
        if not self._check.matches(text):
            raise InvalidAnswer(
                RowErrorCode.SCHEMA_MISMATCH,
                f"{_short(text)} does not match the pattern {_short(self.text)}",
            )
        return text


class EbnfFormat(_TextFormat):
    """Answers of a context-free grammar in EBNF as xgrammar and GBNF write it."""

    kind = "ebnf"
    prompt_line = "Answer with text that matches this grammar:"
    takes_stop = False  # decoding alone knows the grammar

    def __init__(self, source: str) -> None:
        """Raises `SchemaError` for a grammar without a rule ``root``. The rest is read when it
        is compiled, which is before weights load as well."""
        if not _ROOT.search(source):
            raise SchemaError(
                "grammar: there is no rule 'root'; begin with a line such as root ::= ..."
            )
        self.text = source
        self.grammar = GrammarSpec(kind="ebnf", source=source)

    def parse(self, text: str) -> str:
        """The text itself: an answer that was finished matches."""
        return text


class ChoiceFormat(_TextFormat):
    """Answers out of a list of distinct texts; ``value`` is dictionary-encoded."""

    kind = "choices"
    prompt_line = "Answer with one of these texts and nothing else:"

    def __init__(self, choices: Sequence[str]) -> None:
        """Raises `SchemaError` for no choices, for what is no text, an empty or repeated one."""
        for choice in choices:
            if not isinstance(choice, str):
                raise SchemaError(f"choices: {choice!r} is no text")
            if not choice:
                raise SchemaError(
                    "choices: one of them is empty, and an answer is some text; leave it out"
                )
            try:
                choice.encode()
            except UnicodeEncodeError:
                raise SchemaError(f"choices: {choice!r} is no Unicode text") from None
        if not choices:
            raise SchemaError("choices: there are none; give at least one")
        if len(set(choices)) < len(choices):
            repeated = next(choice for choice in choices if list(choices).count(choice) > 1)
            raise SchemaError(f"choices: {repeated!r} occurs twice; give it once")
        self._texts = self.choices = tuple(choices)
        self.text = json.dumps(self._texts, ensure_ascii=False, separators=(",", ":"))
        self.grammar = GrammarSpec(kind="choices", source=self.text)

    @property
    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.dictionary(pa.int32(), pa.string())

    def parse(self, text: str) -> str:
        """The text itself. Raises `InvalidAnswer` where it is no choice."""
        if text not in self._texts:
            raise InvalidAnswer(
                RowErrorCode.SCHEMA_MISMATCH, f"{_short(text)} is none of the choices"
            )
        return text


def read_grammar(given: str | Path) -> str:
    """The text of a grammar: ``given`` itself where it holds ``::=``, else the file it names.

    Raises `SchemaError` when there is no such file or it is no text.
    """
    if isinstance(given, str) and "::=" in given:
        return given
    if not isinstance(given, str | Path):
        raise SchemaError(f"grammar: expected a file or EBNF text, not {type(given).__name__}")
    return _file_text(Path(given), "grammar", "a file of EBNF")


def read_choices(given: str | Path | Sequence[str]) -> Sequence[str]:
    """The choices: a sequence of texts as it is; of a text its parts between commas, or, where
    it names a file, the file's JSON list or lines.

    Raises `SchemaError` when the file cannot be read or holds no list.
    """
    if not isinstance(given, str | Path):
        if not isinstance(given, list | tuple):
            raise SchemaError(f"choices: expected a list of texts, not {type(given).__name__}")
        return given
    if isinstance(given, str) and not _is_file(given):
        return _parts(given)
    text = _file_text(Path(given), "choices", "texts with commas between them, or a file")
    if text.lstrip().startswith("["):
        return _json_list(text, str(given))
    return [line.strip() for line in text.splitlines() if line.strip()]


def _parts(given: str) -> Sequence[str]:
    if given.lstrip().startswith("["):
        return _json_list(given, "the text")
    return [part.strip() for part in given.split(",")]


def _json_list(text: str, source: str) -> list[str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"choices: {source} is no JSON list: {error}") from None
    assert isinstance(found, list)  # it begins with [
    return found


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _file_text(path: Path, option: str, expected: str) -> str:
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise SchemaError(f"{option}: the file {path} does not exist; give {expected}") from None
    except UnicodeDecodeError as error:
        raise SchemaError(f"{option}: {path} is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SchemaError(f"{option}: {path} cannot be read: {reason}") from None


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
