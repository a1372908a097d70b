"""Schemas that rows bring along, in OpenAI's ``response_format`` or as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batchradix.errors import SchemaError
from batchradix.schema.answers import VALUE_METADATA, json_text
from batchradix.schema.load import load_schema
from batchradix.schema.output_schema import OutputSchema

if TYPE_CHECKING:
    import pyarrow as pa

    from batchradix.schema.answer_format import AnswerFormat

RESPONSE_FORMAT = "response_format"
"""The column that is read without being asked for, in OpenAI's shape."""

_SHAPES = ("json_schema", "json_object", "text")


class RowFormats:
    """Reads the cells of the column ``column``; equal cells share one schema.

    A cell is an object or its JSON text: ``{"type": "json_schema", "json_schema": {"schema":
    ...}}``, ``{"type": "json_object"}`` (any object), ``{"type": "text"}``, or, unless the column
    is `RESPONSE_FORMAT`, a JSON Schema. ``drops_nulls``: objects come from columns with types,
    where a key that only other rows have is null.
    """

    def __init__(self, column: str, *, drops_nulls: bool) -> None:
        self.column = column
        self._drops_nulls = drops_nulls
        self._known: dict[str, AnswerFormat | SchemaError | None] = {}

    @property
    def columns(self) -> frozenset[str]:
        """The input columns that formats are read from."""
        return frozenset({self.column})

    def cell(self, values: Mapping[str, Any]) -> Any:
        """What a row's columns say of its format; None for the run's own."""
        return values.get(self.column)

    def name_of(self, cell: Any) -> str:
        """The column that messages name for a cell."""
        return self.column

    def read(self, cell: Any) -> AnswerFormat | None:
        """The format of a row whose cell is not null; None for any text.

        The same object for equal cells. Raises `SchemaError` for what is no schema.
        """
        try:
            key = cell if isinstance(cell, str) else json.dumps(cell)
        except (TypeError, ValueError, RecursionError) as error:
            raise SchemaError(f"{type(cell).__name__} is no JSON: {error}") from None
        if key not in self._known:
            try:
                self._known[key] = self._load(self._value(cell))
            except SchemaError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, SchemaError):
            raise found
        return found

    def _value(self, cell: Any) -> Any:
        if isinstance(cell, str):
            try:
                return json.loads(cell)
            except (ValueError, RecursionError) as error:
                raise SchemaError(f"the text is not JSON: {error}") from None
        return _without_nulls(cell) if self._drops_nulls else cell

    def _load(self, value: Any) -> AnswerFormat | None:
        if isinstance(value, Mapping) and value.get("type") in _SHAPES:
            return self._openai_format(value)
        if self.column == RESPONSE_FORMAT:
            raise SchemaError(
                f"expected an object whose type is "
                f"{', '.join(_SHAPES[:-1])} or {_SHAPES[-1]}, not {_short(value)}"
            )
        if not isinstance(value, Mapping | bool):
            raise SchemaError(f"expected an object or its JSON text, not {_short(value)}")
        return load_schema(value)

    def _openai_format(self, value: Mapping[str, Any]) -> OutputSchema | None:
        if value["type"] == "text":
            return None
        if value["type"] == "json_object":
            return OutputSchema({"type": "object"})
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if isinstance(schema, str):
            schema = self._value(schema)
        if not isinstance(schema, Mapping | bool):
            raise SchemaError("there is no schema at json_schema.schema")
        return load_schema(schema)


class JsonTexts:
    """The ``value`` column of a job whose rows have schemas of their own: JSON text.

    Null where there is no value, as for rows whose answer is any text. A `ValueColumn`.
    """

    choices: tuple[str, ...] | None = None

    @property
    def arrow_type(self) -> pa.DataType:
        """The Arrow type of every answer."""
        import pyarrow as pa

        return pa.string()

    def arrow_field(self, name: str) -> pa.Field:
        """A nullable field that says that it holds JSON text."""
        import pyarrow as pa

        from batchradix.schema.arrow_types import JSON_METADATA

        metadata = {**JSON_METADATA, **VALUE_METADATA}
        return pa.field(name, self.arrow_type, nullable=True, metadata=metadata)

    def to_arrow(self, values: Sequence[Any | None]) -> pa.Array:
        """Parsed answers as JSON texts; None becomes null."""
        import pyarrow as pa

        cells = [None if value is None else json_text(value) for value in values]
        return pa.array(cells, type=self.arrow_type)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
