from __future__ import annotations

import pytest

from batchradix.errors import TemplateError
from batchradix.prompts.field_list import find_list
from batchradix.prompts.template import parse_template

TEMPLATE = """Is this film for children? {{ hint }}
Title: {{ title }}
Genre: {{ genre }} (major)
{{ plot }}

Answer for {{ title }} by {{ who }}:"""
COLUMNS = ("hint", "title", "genre", "plot", "who")
VALUES = {name: name.upper() for name in COLUMNS}


def rendered(text: str, order: list[int]) -> str:
    listed = find_list(parse_template(text, COLUMNS, None))
    return "".join(listed.ordered(order).texts(VALUES))


def test_lines_with_one_place_change_places_and_all_else_stays() -> None:
    assert rendered(TEMPLATE, [0, 1, 2, 3]) == "".join(
        parse_template(TEMPLATE, COLUMNS, None).texts(VALUES)
    )
    assert rendered(TEMPLATE, [2, 0, 3, 1]) == (
        "Genre: GENRE (major)\nIs this film for children? HINT\nPLOT\nTitle: TITLE\n\n"
        "Answer for TITLE by WHO:"
    )


@pytest.mark.parametrize("text", ["{{ title }}\n{{ plot }}", "\n{{ title }}\n{{ plot }}\n"])
def test_a_list_may_begin_or_end_the_template(text: str) -> None:
    assert rendered(text, [0, 1]) == text.format("").replace("{ title }", "TITLE").replace(
        "{ plot }", "PLOT"
    )
    assert rendered(text, [1, 0]).strip() == "PLOT\nTITLE"


def test_the_longest_list_counts_and_the_first_of_equals() -> None:
    text = "a {{ title }}\nb {{ who }}\n\nc {{ plot }}\nd {{ genre }}\n\ne {{ hint }}"
    assert rendered(text, [1, 0]).startswith("b WHO\na TITLE\n\nc PLOT")


@pytest.mark.parametrize("text", ["{{ title }} {{ who }}\n{{ plot }}", "a\n{{ who }}\n\nb", "a"])
def test_a_template_without_a_list_is_refused(text: str) -> None:
    with pytest.raises(TemplateError, match="two lines or more"):
        find_list(parse_template(text, COLUMNS, None))


def test_a_line_with_the_schema_is_no_field() -> None:
    with pytest.raises(TemplateError, match="two lines or more"):
        find_list(parse_template("{{ who }}\n{{ schema }}", COLUMNS, "{}"))
