"""Several questions to one row: their file, and the value that has a field for each of them."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchradix.errors import InputError, OptionError, SchemaError
from batchradix.row_options import Question
from batchradix.schema.answer_format import AnswerFormat, answer_format, format_arguments
from batchradix.schema.answers import VALUE_METADATA
from batchradix.schema.tools import ToolSet

if TYPE_CHECKING:
    import pyarrow as pa

QUESTION_KEY = "question\0"
"""Under this key a row's values hold the number of the question that it is to answer."""

_FORMATS = ("schema", "fields", "regex", "grammar", "choices")
_FILES = ("schema", "grammar", "choices")
_KEYS = ("question", *_FORMATS, "max_tokens")


def read_questions(given: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[Question, ...]:
    """Questions by name, from a TOML or JSON file or a mapping of the same shape.

    A question is its text, or an object with ``question`` and, where its answers are to match
    something of their own, one of ``schema``, ``fields``, ``regex``, ``grammar`` and ``choices``
    (as `answer_format` takes them; files lie beside the file of the questions), and ``max_tokens``.
    Raises `InputError`, `OptionError` and `SchemaError`, naming the question.
    """
    folder: Path | None = None
    where = "the questions"
    if not isinstance(given, Mapping):
        if not isinstance(given, (str, os.PathLike)) or not os.fspath(given):
            raise OptionError(f"`questions` must be a file or a mapping of them, not {given!r}")
        path = Path(given)
        folder, where = path.parent, str(path)
        given = _read(path)
    if not given:
        raise OptionError(f"{where}: there are none; give at least one, as name = 'text'")
    return tuple(_question(where, folder, str(name), value) for name, value in given.items())


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"there is no file of questions {path}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:  # a NUL in the name
        raise InputError(f"{str(path)!r} cannot be read: {error}") from None
    is_json = path.suffix.lower() == ".json"
    try:
        found = json.loads(text, object_pairs_hook=_once) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if is_json else "TOML"
        raise InputError(f"{path} is not {kind}: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold an object of questions by name")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without names that are there twice, as TOML has them."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


def _question(where: str, folder: Path | None, name: str, value: Any) -> Question:
    place = f"{where}, question {name!r}"
    is_text = "\0" not in name and name.encode(errors="ignore").decode() == name
    if not name.strip() or not is_text:
        raise OptionError(f"{place}: a question needs a name of text, which becomes its column")
    if isinstance(value, str):
        value = {"question": value}
    if not isinstance(value, Mapping):
        raise OptionError(f"{place}: it must be a text, or an object with 'question'")
    unknown = next((key for key in value if key not in _KEYS), None)
    if unknown is not None:
        raise OptionError(f"{place}: there is no {unknown!r}; there are {', '.join(_KEYS)}")
    text, max_tokens = value.get("question"), value.get("max_tokens")
    if not isinstance(text, str) or not text.strip():
        raise OptionError(f"{place}: 'question' must be the text of a question, not {text!r}")
    if max_tokens is not None and (type(max_tokens) is not int or not 1 <= max_tokens < 2**31):
        raise OptionError(f"{place}: max_tokens must be an integer of at least 1")
    asked = {key: _beside(folder, key, value[key]) for key in _FORMATS if key in value}
    try:
        format_ = answer_format(**asked)
    except (OptionError, SchemaError) as error:
        raise type(error)(f"{place}: {error}") from None
    answers = {} if format_ is None else format_arguments(format_)
    return Question(name=name, text=text, answers=answers, max_tokens=max_tokens)


def _beside(folder: Path | None, key: str, value: Any) -> Any:
    """The name of a file beside that of the questions, where ``value`` is one."""
    if folder is None or key not in _FILES or not isinstance(value, str) or "\n" in value:
        return value
    try:
        beside = folder / value
        return str(beside) if beside.is_file() else value
    except (OSError, ValueError):
        return value


class QuestionFormat:
    """What answers to a question must match; a value is an object with the question's field alone.

    An `AnswerFormat`.
    """

    choices: tuple[str, ...] | None = None

    def __init__(self, name: str, inner: AnswerFormat) -> None:
        self.name = name
        self.inner = inner
        self.kind = f"question {json.dumps(name)} {inner.kind}"
        self.text = inner.text
        self.grammar = inner.grammar
        self.prompt_line = inner.prompt_line
        self.notices = inner.notices
        self.takes_stop = inner.takes_stop

    @property
    def arrow_type(self) -> pa.DataType:
        return self.inner.arrow_type

    def arrow_field(self, name: str) -> pa.Field:
        return self.inner.arrow_field(name)

    def to_arrow(self, values: Sequence[Any | None]) -> pa.Array:
        return self.inner.to_arrow(values)

    def parse(self, text: str) -> Any:
        """The answer under the question's name. Raises `InvalidAnswer`."""
        return {self.name: self.inner.parse(text)}


class QuestionFormats:
    """The formats of a run's questions, and the ``value`` column they make together.

    ``formats`` has one a question, None for any text, as `RowFormats` tells those of rows; as a
    `ValueColumn` it is an object with a field a question, each with the Arrow type of its answers.
    ``own`` is the run's format, for questions without one.
    """

    choices: tuple[str, ...] | None = None
    column: str | None = None

    def __init__(self, questions: Sequence[Question], own: AnswerFormat | None) -> None:
        self.names = tuple(question.name for question in questions)
        found = [_format_of(question, own) for question in questions]
        self.formats = tuple(
            None if inner is None else QuestionFormat(name, inner)
            for name, inner in zip(self.names, found, strict=True)
        )

    @property
    def identity(self) -> list[list[str]]:
        """What the answers are and are called, as JSON."""
        return [
            [name, "text" if found is None else f"{found.kind} {found.text}"]
            for name, found in zip(self.names, self.formats, strict=True)
        ]

    @property
    def columns(self) -> frozenset[str]:
        """No column of the input: rows have the key from where they were made several."""
        return frozenset({QUESTION_KEY})

    def cell(self, values: Mapping[str, Any]) -> Any:
        return values.get(QUESTION_KEY)

    def name_of(self, cell: Any) -> str:
        return f"of question {self.names[cell]!r}"

    def read(self, cell: Any) -> AnswerFormat | None:
        """The format of question number ``cell``."""
        number: int = cell
        return self.formats[number]

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        """The fields of the value, one a question."""
        import pyarrow as pa

        return tuple(
            pa.field(name, pa.string()) if found is None else found.arrow_field(name)
            for name, found in zip(self.names, self.formats, strict=True)
        )

    @property
    def arrow_type(self) -> pa.DataType:
        import pyarrow as pa

        return pa.struct(list(self.fields))

    def arrow_field(self, name: str) -> pa.Field:
        """A nullable field; JSON lines are written from its values."""
        import pyarrow as pa

        return pa.field(name, self.arrow_type, nullable=True, metadata=VALUE_METADATA)

    def to_arrow(self, values: Sequence[Any | None]) -> pa.Array:
        """An array of `arrow_type`; None becomes null, as do fields that a value has not."""
        import pyarrow as pa

        arrays = []
        for field, found in zip(self.fields, self.formats, strict=True):
            parts = [None if value is None else value.get(field.name) for value in values]
            plain = pa.array(parts, pa.string()) if found is None else found.to_arrow(parts)
            arrays.append(plain.combine_chunks() if isinstance(plain, pa.ChunkedArray) else plain)
        missing = pa.array([value is None for value in values], pa.bool_())
        return pa.StructArray.from_arrays(arrays, fields=list(self.fields), mask=missing)


def _format_of(question: Question, own: AnswerFormat | None) -> AnswerFormat | None:
    if not question.answers:
        return own
    found = answer_format(**question.answers)
    assert not isinstance(found, ToolSet), "a question has no tools"
    return found
