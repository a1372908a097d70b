"""Writes docs/schemas.md: what becomes of each JSON Schema keyword, and of each type.

``python docs/make_schemas_page.py`` from the repository root. Nothing in the tables is written by
hand: each line is an example that is loaded, compiled and tried, or a count over the official
test suite.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schema_examples import KEYWORD_EXAMPLES, REFUSED_EXAMPLES, TYPE_EXAMPLES, Example
from schema_suite import PACKAGE, Group, batches, byte_compiler, judged, suite_folder

from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.state import GrammarState
from batchradix.errors import SchemaError
from batchradix.schema.answers import InvalidAnswer
from batchradix.schema.load import load_schema
from batchradix.schema.output_schema import OutputSchema

PAGE = Path(__file__).with_name("schemas.md")

_OPENING = """\
# Schemas

<!-- Written by docs/make_schemas_page.py; change that, not this. -->

A keyword of your JSON Schema (draft 2020-12; drafts 4 to 7 and 2019-09 are read too) is one of
four things:

- **enforced**: while it writes, the model can only write what the keyword allows;
- **checked**: the model may write what breaks it, but every finished answer is checked, and a
  row whose answer breaks it becomes an error row;
- **refused**: the job ends before the model loads, with a sentence that names the keyword and
  its place;
- **without meaning**: JSON Schema itself gives it none where it stands; a notice lists it.

Nothing is passed over in silence: what is only checked, and what has no meaning, is said before
the run. Whatever is enforced is checked as well.

Three readings are narrower than the letter of JSON Schema, because the letter helps nobody:
keywords that all speak of one type (`maxLength`, `properties`, ...) mean that type; an object
with `properties` has no others unless `additionalProperties` says so; and every `format` that
JSON Schema defines is a rule, not a remark.
"""

_TYPES = """\
## Arrow types

The type of the `value` column follows from the schema alone, so it is the same whatever the rows
said, and also when all of them failed. Every column and field is nullable.
"""

_UNIONS = """\
A cell of JSON text tells `7`, `"7"` and `null` apart; its field carries the metadata
`batchradix.encoding: json`. In a struct, an absent optional property and a null one are both
null. A value that does not fit its column (an integer that float64 would round, a time finer
than a microsecond) makes an error row with the code `not_representable`; nothing is rounded.
"""

_SUITE = """\
## The official test suite

The suite for draft 2020-12 (as it comes with {package}) has {schemas} schemas. {refused} of them
are refused before a model would load, {loaded} are loaded. Under these it gives {instances}
instances: {agreed} are judged as the suite says, {misfit} valid ones do not fit the column's type
(see the narrower readings above), {formats} break a `format` that the suite takes for a remark, and
no invalid one is let through. The grammar alone lets {passed} of the {invalid} invalid ones pass;
each of these breaks a keyword that was listed as checked.
"""


def page(suite: Path) -> str:
    """The text of docs/schemas.md."""
    compiler = byte_compiler()
    parts = [
        _OPENING,
        "## Keywords\n",
        _table(
            ("keyword", "for example", "taken", "not taken", "it is"),
            (_keyword_line(example, compiler) for example in KEYWORD_EXAMPLES),
        ),
        "## What is refused\n",
        _table(("schema", "the sentence"), map(_refusal_line, REFUSED_EXAMPLES)),
        _TYPES,
        _table(
            ("rule", "schema", "Arrow type", "an answer", "its cell"),
            map(_type_line, TYPE_EXAMPLES),
        ),
        _UNIONS,
        *_suite_part(judged(suite)),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _table(head: tuple[str, ...], lines: Iterator[tuple[str, ...]]) -> str:
    rows = [head, tuple("---" for _ in head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _json(value: Any) -> str:
    return _code(json.dumps(value, ensure_ascii=False))


def outcome(example: Example, compiler: GrammarCompiler) -> str:
    """What an example shows, tried on the grammar and on the check of finished answers."""
    schema = load_schema(example.schema)
    if not _fits(schema, example.good):
        raise AssertionError(f"{example} should be taken")
    words = example.keyword.split(" ")
    if any(keyword in words for _, keyword in schema.ignored_keywords):
        if not _fits(schema, example.bad):
            raise AssertionError(f"{example} has a meaning after all")
        return "without meaning"
    if _fits(schema, example.bad):
        raise AssertionError(f"{example} should not be taken")
    passes = _passes(GrammarState(compiler.compile(schema.json_grammar)), example.bad)
    listed = any(keyword in words for _, keyword in schema.validated_keywords)
    if passes and not listed:
        raise AssertionError(f"{example} is ignored in silence")
    if not passes:
        return "enforced, fine points checked" if listed else "enforced"
    return "checked"


def _fits(schema: OutputSchema, value: Any) -> bool:
    try:
        schema.parse(json.dumps(value))
    except InvalidAnswer:
        return False
    return True


def _passes(state: GrammarState, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return all(map(state.accept, text.encode())) and state.can_stop


def _keyword_line(example: Example, compiler: GrammarCompiler) -> tuple[str, ...]:
    words = " ".join(_code(word) for word in example.keyword.split(" "))
    note = f" ({example.note})" if example.note else ""
    return (
        f"{words}{note}",
        _json(example.schema),
        _json(example.good),
        _json(example.bad),
        outcome(example, compiler),
    )


def _refusal_line(schema: Any) -> tuple[str, ...]:
    try:
        load_schema(schema)
    except SchemaError as error:
        return _json(schema), str(error).replace("|", "\\|")
    raise AssertionError(f"{schema} is not refused")


def _type_line(entry: tuple[str, Any, Any]) -> tuple[str, ...]:
    words, schema, answer = entry
    loaded = load_schema(schema)
    cell = loaded.to_arrow([loaded.parse(json.dumps(answer))])
    shown = cell.to_pylist()[0]
    kind = str(loaded.arrow_type) + (" of JSON text" if _is_json(loaded) else "")
    return words, _json(schema), _code(kind), _json(answer), _code(repr(shown))


def _is_json(schema: OutputSchema) -> bool:
    return bool(schema.arrow_field("value").metadata)


def _suite_part(groups: list[Group]) -> Iterator[str]:
    total: Counter[str] = Counter()
    lines = []
    for name, members in batches(groups):
        count = _counted(members)
        total += count
        columns = ("schemas", "refused", "instances", "misfit", "formats", "invalid", "passed")
        lines.append((name, *(str(count[column]) for column in columns)))
    yield _SUITE.format_map({"package": PACKAGE.replace("==", " "), **_Zero(total)})
    head = ("part", "schemas", "refused", "instances", "misfit", "format", "invalid", "passed")
    yield _table(head, iter(lines))
    yield (
        "*misfit*: valid for the suite, not for the column's type; *format*: valid for the suite, "
        "which takes formats for remarks; *passed*: invalid ones that the grammar lets pass and "
        "the check catches.\n"
    )


class _Zero(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def _counted(groups: list[Group]) -> Counter[str]:
    count: Counter[str] = Counter()
    for group in groups:
        count["schemas"] += 1
        count["refused" if group.refusal else "loaded"] += 1
        for instance in group.instances:
            count["instances"] += 1
            count["invalid"] += not instance.is_valid
            count["passed"] += not instance.is_valid and bool(instance.grammar_takes_it)
            if not instance.is_narrower:
                count["agreed"] += 1
            else:
                count["misfit" if instance.misfits_column else "formats"] += 1
    return count


def main() -> None:
    cache = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.home() / ".cache" / "batchradix-docs"
    cache.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(suite_folder(cache)), "utf-8")


if __name__ == "__main__":
    main()
