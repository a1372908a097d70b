from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.schema.pattern import grammar_pattern
from batchradix.schema.pattern_parser import UnsupportedPattern

ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\d", r"\n", '"', r"\\", r"[\\\n\"a]"])
ALPHABET = 'ab1"\\\n'


def _grow(inner):
    counts = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{1,}", "*?"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, counts).map(lambda parts: f"(?:{parts[0]}){parts[1]}"),
    )


PATTERNS = st.tuples(
    st.sampled_from(["", "^"]), st.recursive(ATOMS, _grow, max_leaves=5), st.sampled_from(["", "$"])
).map("".join)


def _matches(text: str, value: str) -> bool:
    """Whether the whole encoded string is matched, as the grammar does it."""
    return re.fullmatch(text[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]) is not None


def _found(pattern: str, value: str) -> bool:
    """ECMA semantics: anywhere, with ``$`` at the very end and ``.`` no line end."""
    return re.search(pattern.replace("$", r"\Z"), value) is not None


@settings(deadline=None, max_examples=300)
@given(
    PATTERNS,
    st.integers(0, 4),
    st.none() | st.integers(0, 6),
    st.lists(st.text(ALPHABET, max_size=6), min_size=1, max_size=12),
)
def test_a_rewritten_pattern_matches_what_the_pattern_and_the_bounds_allow(
    pattern, low, high, values
):
    written = grammar_pattern(pattern, low, high)
    for value in values:
        fits = low <= len(value) and (high is None or len(value) <= high)
        wanted = _found(pattern, value) and fits
        if written is None:
            assert not wanted
        elif written.is_exact:
            assert _matches(written.text, value) == wanted
        else:  # loosened, never too narrow, and never beyond the pattern itself
            assert _matches(written.text, value) or not wanted
            assert _found(pattern, value) or not _matches(written.text, value)


@pytest.mark.parametrize(
    ("pattern", "low", "high", "expected"),
    [
        ("^[a-z]+$", 0, 5, "^[a-z]{1,5}$"),
        ("^[a-z]*$", 2, None, "^[a-z]{2,}$"),
        (r"^[A-Z]{2}-\d+$", 0, 8, r"^[A-Z]{2}\-[0-9]{1,5}$"),
        ("^a|b$", 1, 1, "^(a|b)$"),
        ("^(ab)+$", 0, 5, "^(ab){1,2}$"),
        (r"^\u0041\x42\u{1F600}$", 0, None, "^AB\U0001f600$"),
        ("^a{3}$", 0, 2, None),
    ],
)
def test_bounds_are_worked_into_the_repetition(pattern, low, high, expected):
    written = grammar_pattern(pattern, low, high)
    if expected is None:
        assert written is None
    else:
        assert written is not None
        assert (written.text, written.is_exact) == (expected, True)


def test_two_free_parts_share_a_bound_exactly():
    written = grammar_pattern("^[a-z]+-[0-9]+$", 0, 6)
    assert written is not None
    assert written.is_exact
    assert re.fullmatch(written.text, "abc-12")
    assert not re.fullmatch(written.text, "abcd-12")


def test_many_free_parts_are_loosened_but_stay_finite():
    written = grammar_pattern("^[a-z]*-[a-z]*-[a-z]*-[a-z]*$", 0, 20)
    assert written is not None
    assert not written.is_exact
    assert re.fullmatch(written.text, "abc---")
    assert not re.fullmatch(written.text, "a" * 18 + "---")


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", "(?!a)b", "(?<=a)b", "(a)\\1", "\\bword", "\\p{L}", "(?i)a", "a^b", "a(b$)c", "[a"],
)
def test_what_is_no_plain_regular_expression_is_said_so(pattern):
    with pytest.raises(UnsupportedPattern):
        grammar_pattern(pattern)
