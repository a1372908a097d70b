"""The shape of an answer: its grammar, its Arrow type, and the check of every value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchradix.errors import RowErrorCode, SchemaError
from batchradix.schema.answers import InvalidAnswer, json_text, pointer_step, read_json
from batchradix.schema.document import SchemaDocument, open_document
from batchradix.schema.grammar import GrammarWriter
from batchradix.schema.listing import finite_texts
from batchradix.schema.merge import Node, alternatives_of
from batchradix.schema.normalise import Normalised
from batchradix.types import GrammarSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from batchradix.schema.arrow_types import Codec


class OutputSchema:
    """A JSON Schema that answers must match; immutable, built by `load_schema`.

    An `answer_format.AnswerFormat`. ``json``: the schema as given. ``text``: the same as compact
    JSON in the given order, for prompts and metadata. ``grammar``: what decoding enforces; where
    few texts match at all, these (kind ``choices``), else ``json_grammar``, a JSON Schema.
    ``choices``: what to call these texts, in order: the strings themselves where all are strings,
    else JSON; None elsewhere. ``validated_keywords``: ``(pointer, keyword)`` of what
    ``json_grammar`` does not enforce, so that only the check of every value catches it.
    ``ignored_keywords``: the same of what nothing checks: formats that JSON Schema does not
    define, keywords that the schema's draft does not know, or knows only beside another one.
    ``property_names``: the properties of the answer itself, in column order.
    """

    kind = "json_schema"
    prompt_line = "Answer with JSON that matches this schema:"
    takes_stop = True

    def __init__(self, schema: dict[str, Any] | bool) -> None:
        """Raises `SchemaError` when the schema is malformed or nothing can match it."""
        try:
            document = open_document(schema)
            normalised = Normalised(document)
            writer = GrammarWriter(normalised)
            source = writer.source()
            listed = GrammarWriter(normalised, keeps_values=True).source()
            texts = _matching(finite_texts(json.loads(listed)), document)
        except RecursionError:
            raise SchemaError("schema: it nests too deeply to be read") from None
        self.json: dict[str, Any] = document.root
        self.text = json_text(document.root)
        self.json_grammar = GrammarSpec(kind="json_schema", source=source)
        self.grammar = self.json_grammar
        self.choices: tuple[str, ...] | None = None
        if texts:
            self.grammar = GrammarSpec(kind="choices", source=json_text(texts))
            self.choices = _labels(texts)
        self.validated_keywords: tuple[tuple[str, str], ...] = normalised.notes
        self.ignored_keywords: tuple[tuple[str, str], ...] = (
            *document.without_meaning,
            *writer.ignored,
        )
        self.property_names = _property_names(normalised)
        self._normalised = normalised
        self._validator = document.validator
        self._codec: Codec | None = None

    @property
    def notices(self) -> tuple[str, ...]:
        """What decoding does not enforce, in words."""
        found = []
        if self.validated_keywords and self.choices is None:
            found.append(
                "not enforced while decoding, but checked on every answer (a row that breaks it "
                f"becomes an error row): {_places(self.validated_keywords)}"
            )
        if self.ignored_keywords:
            found.append(
                "JSON Schema gives these no meaning, so nothing checks them: "
                f"{_places(self.ignored_keywords)}"
            )
        return tuple(found)

    @property
    def codec(self) -> Codec:
        """The way from a parsed answer to its Arrow cell."""
        if self._codec is None:
            from batchradix.schema.arrow_types import codec_of

            self._codec = codec_of(self._normalised)
        return self._codec

    @property
    def arrow_type(self) -> pa.DataType:
        """The Arrow type of an answer; depends on the schema alone."""
        return self.codec.type

    def arrow_field(self, name: str) -> pa.Field:
        """A nullable field of `arrow_type`, marked in its metadata where it is JSON text."""
        from batchradix.schema.arrow_types import codec_field

        return codec_field(name, self.codec)

    def parse(self, text: str) -> Any:
        """The value of a finished answer.

        Raises `InvalidAnswer`: ``invalid_json`` for what is no JSON, ``schema_mismatch`` for
        what breaks the schema, ``not_representable`` for what does not fit its Arrow type.
        """
        value = self.check(text)
        self.codec.convert(value, "")
        return value

    def check(self, text: str) -> Any:
        """The value of a finished answer that need not fit an Arrow type; else as `parse`."""
        value = read_json(text)
        self._validate(value)
        return value

    def to_arrow(self, values: Sequence[Any | None]) -> pa.Array:
        """An array of `arrow_type` from parsed answers; None (no answer) becomes null.

        Raises `InvalidAnswer` for a value that `parse` would have refused.
        """
        import pyarrow as pa

        cells = [None if value is None else self.codec.convert(value, "") for value in values]
        return pa.array(cells, type=self.arrow_type)

    def _validate(self, value: Any) -> None:
        try:
            if self._validator.is_valid(value):
                return
            error = next(iter(self._validator.iter_errors(value)))
        except (ValueError, RecursionError) as failure:
            message = str(failure).splitlines()[0]
            raise InvalidAnswer(
                RowErrorCode.SCHEMA_MISMATCH, f"cannot be checked: {message}"
            ) from None
        message = error.message if len(error.message) <= 200 else f"{error.message[:197]}..."
        pointer = ""
        for step in error.instance_path:
            pointer = pointer_step(pointer, step)
        raise InvalidAnswer(RowErrorCode.SCHEMA_MISMATCH, message, pointer)


def _matching(texts: Sequence[str] | None, document: SchemaDocument) -> tuple[str, ...]:
    """Those of the texts whose values match the whole schema; () where nothing was listed."""
    try:
        return tuple(text for text in texts or () if document.validator.is_valid(read_json(text)))
    except (InvalidAnswer, ValueError):
        return ()  # the check of every answer will say what is wrong


def _labels(texts: Sequence[str]) -> tuple[str, ...]:
    if all(text.startswith('"') for text in texts):
        return tuple(read_json(text) for text in texts)
    return tuple(texts)


def _places(keywords: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{word} at {place}" for place, word in keywords)


def _property_names(normalised: Normalised) -> tuple[str, ...]:
    names: dict[str, None] = {}
    waiting: list[Node] = [normalised.root]
    seen: set[str] = set()
    while waiting:
        node = waiting.pop(0)
        if "$ref" in node:
            if node["$ref"] not in seen:
                seen.add(node["$ref"])
                waiting.append(normalised.defs[node["$ref"]])
        elif "anyOf" in node:
            waiting += alternatives_of(node)
        else:
            names.update(dict.fromkeys(node.get("properties", ())))
    return tuple(names)
