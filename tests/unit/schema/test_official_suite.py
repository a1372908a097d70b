"""The official test suite for JSON Schema, and the page that is made from it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from batchradix.schema.load import load_schema

pytest.importorskip("xgrammar")

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="session")
def docs_importable():
    sys.path.insert(0, str(DOCS))
    yield
    sys.path.remove(str(DOCS))


@pytest.fixture(scope="session")
def suite(docs_importable, request) -> Path:
    from schema_suite import SuiteMissing, suite_folder

    try:
        return suite_folder(Path(request.config.cache.mkdir("json-schema-test-suite")))
    except SuiteMissing as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["draft2020-12", "draft7"])
def groups(suite, request):
    from schema_suite import judged

    found = judged(suite, request.param)
    instances = [instance for group in found for instance in group.instances]
    assert len(found) - sum(1 for group in found if group.refusal) >= 250
    assert len(instances) >= 1300
    return found


def told(group, instance) -> str:
    return f"{group.file}: {group.description}: {instance.description}: {instance.error}"


def test_a_refused_schema_is_refused_by_place(groups):
    for group in groups:
        if group.refusal is not None and group.schema is not False:
            assert "#" in group.refusal, (group.file, group.description)
            assert any(f"{word} " in group.refusal for word in ("$ref", "$id", "$schema", "at"))


def test_a_valid_answer_is_taken_unless_its_column_cannot_hold_it_or_a_format_is_broken(groups):
    wrong = [
        told(group, instance)
        for group in groups
        for instance in group.instances
        if instance.is_narrower
        and not instance.misfits_column
        and not (group.file == "format" and "is not a" in str(instance.error))
    ]
    assert wrong == []


def test_an_invalid_answer_is_never_taken(groups):
    wrong = [
        told(group, instance)
        for group in groups
        for instance in group.instances
        if not instance.is_valid and instance.error is None
    ]
    assert wrong == []


def test_what_the_grammar_lets_pass_breaks_a_keyword_that_is_listed_as_checked(groups):
    silent = [
        (told(group, instance), instance.unlisted)
        for group in groups
        for instance in group.instances
        if instance.unlisted
    ]
    assert silent == []


def test_the_committed_page_is_the_one_that_is_made(suite):
    from make_schemas_page import PAGE, page

    assert PAGE.read_text("utf-8") == page(suite), "run docs/make_schemas_page.py"


def test_the_examples_of_the_page_are_what_it_says(docs_importable):
    from make_schemas_page import KEYWORD_EXAMPLES, outcome
    from schema_suite import byte_compiler

    compiler = byte_compiler()
    page = (DOCS / "schemas.md").read_text("utf-8")
    for example in KEYWORD_EXAMPLES:
        assert outcome(example, compiler) in page


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        ({"type": "string", "maxlength": 3}, ("#", "maxlength")),
        ({"type": "integer", "then": {"minimum": 3}}, ("#", "then")),
        ({"type": "array", "maxContains": 3}, ("#", "maxContains")),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "properties": {"a": {"$ref": "#/definitions/s", "maxLength": 1}},
                "definitions": {"s": {"type": "string"}},
            },
            ("#/properties/a", "maxLength"),
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "array",
                "prefixItems": [{"type": "string"}],
            },
            ("#", "prefixItems"),
        ),
    ],
)
def test_what_has_no_meaning_is_listed_and_changes_nothing(schema, ignored):
    loaded = load_schema(schema)
    assert loaded.ignored_keywords == (ignored,)
    _, keyword = ignored
    assert keyword not in loaded.json_grammar.source


@pytest.mark.parametrize("key", ["title", "description", "examples", "default", "x-order"])
def test_words_that_forbid_nothing_are_not_mentioned(key):
    assert load_schema({"type": "string", key: "a"} | {"examples": []}).ignored_keywords == ()


def test_a_pattern_of_names_that_no_grammar_says_leaves_the_names_open():
    loaded = load_schema(
        {
            "type": "object",
            "patternProperties": {r"^\p{Letter}+$": {"type": "integer"}},
            "additionalProperties": False,
        }
    )
    assert ("#", "patternProperties") in loaded.validated_keywords
    assert ("#", "additionalProperties") in loaded.validated_keywords
    assert "false" not in loaded.json_grammar.source


def test_every_place_of_a_keyword_that_was_merged_is_listed():
    loaded = load_schema({"allOf": [{"multipleOf": 0.5}, {"type": "number", "multipleOf": 0.2}]})
    places = {pointer for pointer, keyword in loaded.validated_keywords if keyword == "multipleOf"}
    assert {"#/allOf/0", "#/allOf/1"} <= places


def test_a_float_of_more_digits_than_the_compiler_keeps_is_checked_and_not_rounded():
    loaded = load_schema({"enum": [1 / 3, "x"]})
    assert loaded.validated_keywords == (("#", "enum"),)
    assert "0.33" not in loaded.json_grammar.source
    assert loaded.parse(repr(1 / 3)) == 1 / 3
