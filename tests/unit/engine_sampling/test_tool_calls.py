"""Grammars of tool calls take exactly what is read back, and unfinished calls are closed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchradix.engine.grammar.closing import Closer, minimal_answer
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.cost import is_cheap
from batchradix.engine.grammar.repetition import RepetitionGuard
from batchradix.engine.grammar.state import GrammarState
from batchradix.errors import SchemaError
from batchradix.schema.answers import InvalidAnswer
from batchradix.schema.tool_styles import STYLES
from batchradix.schema.tools import ToolFormat, ToolSet

BYTES = tuple(bytes([value]) for value in range(256)) + (b"",) * 8
NAMES = ["f", "fo", "é_b", 'a"b\\c']
TOOLS = [
    {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer"},
                "s": {"type": "string", "maxLength": 3},
                "l": {"type": "array", "items": {"enum": ["}", "]", "é"]}},
            },
            "required": ["x"],
        },
    },
    {"name": "fo", "parameters": {"type": "object", "properties": {}}},
    {"name": "é_b", "parameters": {"properties": {"s": {"type": "string"}}, "required": ["s"]}},
    {"name": 'a"b\\c'},
]
WAYS = [
    (style, choice, parallel)
    for style in STYLES
    for choice in ("auto", "required", "f")
    for parallel in (None, False)
    if (style, choice) != ("json", "auto")
]

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
_X = st.integers(-(2**63), 2**63 - 1)
_F = st.fixed_dictionaries(
    {"x": _X},
    optional={"s": _TEXTS, "l": st.lists(st.sampled_from(["}", "]", "é"]), max_size=2)},
).map(lambda arguments: {key: arguments[key] for key in "xsl" if key in arguments})
_ARGUMENTS = {
    "f": _F,
    "fo": st.just({}),
    "é_b": st.fixed_dictionaries({"s": st.text(st.characters(exclude_categories=["Cs"]))}),
    'a"b\\c': st.just({}),
}
CALLS = st.lists(
    st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), _ARGUMENTS[name])),
    max_size=3,
)


def format_of(style: str, choice: str | None = None, parallel: bool | None = None) -> ToolFormat:
    return ToolSet(TOOLS, style=style, choice=choice, parallel=parallel).format_for("m", None)


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def rendered(style: str, calls: list[tuple[str, Any]]) -> str:
    return STYLES[style].render([(name, compact(arguments)) for name, arguments in calls])


def takes(compiler: GrammarCompiler, format_: ToolFormat, text: str) -> bool:
    state = GrammarState(compiler.compile(format_.grammar))
    return all(map(state.accept, text.encode())) and state.can_stop


def is_allowed(choice: str, parallel: bool | None, style: str, names: list[str]) -> bool:
    if choice == "f":
        return names == ["f"]
    if len(names) > 1 and (parallel is False or style == "llama3"):
        return False
    return bool(names) or choice == "auto"


@given(st.sampled_from(WAYS), CALLS)
@settings(derandomize=True, max_examples=80, deadline=None)
def test_the_calls_that_are_allowed_are_taken_and_read_back(
    byte_compiler: GrammarCompiler, way: tuple[str, str, bool | None], calls: list[tuple[str, Any]]
) -> None:
    style, choice, parallel = way
    # One style has no separator: its calls cannot even be written one after the other.
    assume(style != "llama3" or len(calls) < 2)
    format_ = format_of(style, choice, parallel)
    text = rendered(style, calls)
    is_right = is_allowed(choice, parallel, style, [name for name, _ in calls])
    assert takes(byte_compiler, format_, text) == is_right
    if is_right:
        assert [(c["name"], json.loads(c["arguments"])) for c in format_.parse(text)] == calls
    else:
        with pytest.raises(InvalidAnswer):
            format_.parse(text)


@given(
    st.sampled_from(WAYS),
    CALLS,
    st.integers(0, 200),
    st.sampled_from(["", " ", "x", '"', "}", "]", "<", "é"]),
)
@settings(derandomize=True, max_examples=150, deadline=None)
def test_whatever_the_grammar_takes_is_read_without_an_error(
    byte_compiler: GrammarCompiler,
    way: tuple[str, str, bool | None],
    calls: list[tuple[str, Any]],
    place: int,
    char: str,
) -> None:
    style, choice, parallel = way
    format_ = format_of(style, choice, parallel)
    text = rendered(style, calls)
    text = text[:place] + char + text[place + 1 :]  # perhaps broken there
    if takes(byte_compiler, format_, text):
        format_.parse(text)


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
def test_free_text_may_hold_anything_but_the_beginning_of_a_call(
    byte_compiler: GrammarCompiler, style: str
) -> None:
    format_ = format_of(style)
    marker = STYLES[style].marker
    for text in ["", "é\n\0{", marker[:-1], f"{marker[:-1]}x", f"{marker[0]}{marker[:-1]}"]:
        assert takes(byte_compiler, format_, text), text
        assert format_.parse(text) == []
    assert not takes(byte_compiler, format_, marker)
    assert not takes(byte_compiler, format_, f"{marker} and so on")
    call = rendered(style, [("f", {"x": 1})])
    text = f"Let me see. {call}"
    assert takes(byte_compiler, format_, text)
    # A call of Llama's is the whole answer, or it is text.
    assert len(format_.parse(text)) == (0 if style == "llama3" else 1)
    assert not takes(byte_compiler, format_, f"{call} and so on")


def test_what_is_forced_up_to_the_name_and_the_first_argument(
    byte_compiler: GrammarCompiler,
) -> None:
    def forced(*way: Any) -> str:
        return GrammarState(byte_compiler.compile(format_of(*way).grammar)).forced_text()

    assert forced("hermes", "required") == '<tool_call>\n{"name": "'
    assert forced("hermes", "f") == '<tool_call>\n{"name": "f", "arguments": {"x":'
    assert forced("hermes", "fo") == rendered("hermes", [("fo", {})])
    assert forced("hermes", "auto") == ""


def closed(compiler: GrammarCompiler, format_: ToolFormat, text: bytes) -> bytes:
    state = GrammarState(compiler.compile(format_.grammar))
    assert all(map(state.accept, text))
    rest = Closer(format_.grammar, BYTES).close(state, text)
    assert rest is not None, text
    return text + rest


@given(st.sampled_from(WAYS), CALLS, st.data())
@settings(derandomize=True, max_examples=80, deadline=None)
def test_calls_are_closed_wherever_they_were_cut(
    byte_compiler: GrammarCompiler,
    way: tuple[str, str, bool | None],
    calls: list[tuple[str, Any]],
    data: st.DataObject,
) -> None:
    style, choice, parallel = way
    assume(is_allowed(choice, parallel, style, [name for name, _ in calls]))
    format_ = format_of(style, choice, parallel)
    whole = rendered(style, calls).encode()
    text = whole[: data.draw(st.integers(0, len(whole)))]
    answer = closed(byte_compiler, format_, text).decode()
    assert takes(byte_compiler, format_, answer)
    assert len(format_.parse(answer)) <= max(1, len(calls))


def test_a_cut_call_is_closed_as_its_function_asks(byte_compiler: GrammarCompiler) -> None:
    def ended(style: str, choice: str, text: str) -> str:
        return closed(byte_compiler, format_of(style, choice), text.encode()).decode()

    assert ended("hermes", "auto", "Let me <tool") == "Let me <tool"
    assert ended("json", "required", "") == rendered("json", [("fo", {})])
    assert ended("json", "required", '[{"name":"f"') == rendered("json", [("f", {"x": 0})])
    text = rendered("mistral", [("f", {"x": 12, "l": ["}"]})])
    assert ended("mistral", "required", text[: text.index("}")]) == text
    two = rendered("hermes", [("fo", {}), ("fo", {})])
    assert ended("hermes", "required", two[: two.rindex("fo")]) == two


@pytest.mark.parametrize("style", list(STYLES))
def test_the_shortest_answer_is_one(byte_compiler: GrammarCompiler, style: str) -> None:
    for choice in ("required", "f"):
        format_ = format_of(style, choice)
        shortest = minimal_answer(format_.grammar)
        assert shortest is not None
        assert takes(byte_compiler, format_, shortest)
        assert len(format_.parse(shortest)) == 1
    if style != "json":
        assert minimal_answer(format_of(style).grammar) == ""


def test_text_and_calls_run_away_and_arguments_only_where_they_are_unbounded() -> None:
    def runs_away(text: str, repeated: str) -> bool:
        answer = text.encode() + repeated.encode() * 400
        return any(guard.runs_away(answer[:length]) for length in range(16, len(answer), 16))

    tools = [
        {"name": "g", "parameters": {"properties": {
            "free": {"type": "string"}, "short": {"type": "string", "maxLength": 20},
            "n": {"type": "number"}}}},
    ]  # fmt: skip
    format_ = ToolSet(tools, style="hermes").format_for("m", None)
    guard = RepetitionGuard(format_.grammar, BYTES)
    head = STYLES["hermes"].opening + STYLES["hermes"].call_head("g")
    assert runs_away("", "la ")
    assert runs_away(f'{head}{{"free":"', "la ")
    assert not runs_away(f'{head}{{"short":"', "la ")
    assert runs_away(f'{head}{{"n":', "123")
    call = rendered("hermes", [("g", {})])
    assert runs_away("", f"{call[len(STYLES['hermes'].marker) - 1 :]}"[-8:])


def test_a_function_whose_arguments_never_end_is_refused(byte_compiler: GrammarCompiler) -> None:
    loop = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    tools = [{"name": "ok"}, {"name": "loop", "parameters": loop}]
    with pytest.raises(SchemaError, match=r"never end|nothing can match|finite"):
        byte_compiler.compile(ToolSet(tools, style="json").format_for("m", None).grammar)


def test_arguments_that_may_nest_without_end_are_taken(byte_compiler: GrammarCompiler) -> None:
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    format_ = ToolSet([{"name": "t", "parameters": tree}], style="json").format_for("m", None)
    text = '[{"name":"t","arguments":{"kids":[{"kids":[{}]},{}]}}]'
    assert takes(byte_compiler, format_, text)
    assert format_.parse(text)[0]["arguments"] == '{"kids":[{"kids":[{}]},{}]}'


def test_plain_functions_are_cheap_to_compile_and_others_are_not() -> None:
    def cheap(schema: Any) -> bool:
        tools = [{"name": "f", "parameters": {"properties": {"a": schema}}}]
        return is_cheap(ToolSet(tools, style="json").format_for("m", None).grammar)

    assert cheap({"type": "integer"})
    assert not cheap({"type": "string", "pattern": "^(a{0,50}b{0,50}){0,50}$"})
