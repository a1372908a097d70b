"""Tool calls from the options to the finished table, and what the model is told of the tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchradix
from batchradix import pipeline
from batchradix.config import (
    EngineOptions,
    OutputOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.errors import OptionError
from batchradix.report.progress import Silent
from batchradix.schema.tools import ToolSet
from batchradix.types import Row, Status

MakeTinyModel = Callable[..., Path]

PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "description": "End <|end|> it."}},
]
TEMPLATE = (
    "{% if tools %}[{% for t in tools %}{{ t | tojson }}{% endfor %}]"
    """Reply <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}"""
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def sevens(tiny_model_folder: MakeTinyModel) -> str:
    """A model that writes 7 wherever it may, and whose chat template knows no tools."""
    return str(tiny_model_folder("const", prefer='7a}"]'))


@pytest.fixture(scope="module")
def caller(tiny_model_folder: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that would rather call than talk, with a chat template that shows tools."""
    folder = tmp_path_factory.mktemp("caller") / "model"
    shutil.copytree(tiny_model_folder("const", prefer="<7a}"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def config(model: str, rows: Any, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=120),
    }
    return RunConfig(input=rows, model=model, **options | changes)


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral", "json"])
def test_a_required_call_is_a_value_in_every_format(sevens: str, style: str) -> None:
    tools = ToolSet(TOOLS, choice="add", style=style)
    table = pipeline.run(config(sevens, [{"prompt": "x"}], schema=tools)).table
    assert table is not None
    [row] = table.to_pylist()
    assert (row["status"], row["finish_reason"]) == ("ok", "stop")
    assert row["value"] == [{"name": "add", "arguments": '{"n":7}'}]


def test_free_text_has_an_empty_list_and_its_text(sevens: str) -> None:
    tools = ToolSet(TOOLS, style="llama3")
    rows = [{"prompt": "x", "max_tokens": 3}]
    job = config(sevens, rows, schema=tools, output=OutputOptions(keep_truncated=True))
    table = pipeline.run(job).table
    assert table is not None
    [row] = table.to_pylist()
    assert (row["status"], row["value"], row["text"]) == ("truncated", [], "777")


def test_a_markov_model_that_ends_its_text_is_ok_without_calls(
    tiny_model_folder: MakeTinyModel,
) -> None:
    model = str(tiny_model_folder("markov", text="yes"))
    tools = ToolSet(TOOLS, style="hermes")
    table = pipeline.run(config(model, [{"messages": HELLO}], schema=tools)).table
    assert table is not None
    [row] = table.to_pylist()
    assert (row["status"], row["value"], row["text"]) == ("ok", [], "yes")


def test_a_model_that_never_stops_calling_is_cut_and_closed(
    tiny_model_folder: MakeTinyModel,
) -> None:
    tools = ToolSet([TOOLS[0]], choice="required", style="json")
    sampling = SamplingOptions(max_tokens=100)
    job = config(
        str(tiny_model_folder("const", prefer="7,a")),
        [{"prompt": "x"}],
        schema=tools,
        sampling=sampling,
        output=OutputOptions(keep_truncated=True),
    )
    [row] = pipeline.run(job).table.to_pylist()  # type: ignore[union-attr]
    calls = json.loads(row["text"])
    assert (row["status"], row["finish_reason"]) == ("truncated", "length")
    assert calls == [{"name": "add", "arguments": {"n": 7}}] * 2
    assert len(row["value"]) == 2


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral", "json"])
def test_whatever_a_model_writes_is_valid_and_the_same_without_forced_text(
    tiny_model_folder: MakeTinyModel, style: str
) -> None:
    model = str(tiny_model_folder("random", seed=7))
    tools = ToolSet(TOOLS, choice="required", style=style)
    rows = [{"prompt": f"{n} or {n * n}", "temperature": float(n % 2)} for n in range(8)]
    tables = [
        pipeline.run(
            config(
                model,
                rows,
                schema=tools,
                engine=EngineOptions(dtype="float32", num_threads=1, forced_text=forced),
                output=OutputOptions(keep_truncated=True),
            )
        ).table
        for forced in (True, False)
    ]
    first, second = [table.to_pylist() for table in tables if table is not None]
    assert {row["status"] for row in first} <= {"ok", "truncated"}
    for row in first:
        assert row["value"], row["text"]
        for call in row["value"]:
            arguments = json.loads(call["arguments"])
            assert arguments == {} if call["name"] == "stop" else 0 <= arguments["n"] <= 9
    assert [row["text"] for row in first[::2]] == [row["text"] for row in second[::2]]


def test_a_budget_below_the_shortest_call_is_refused(sevens: str) -> None:
    tools = ToolSet(TOOLS, choice="add", style="hermes")
    job = config(sevens, [{"prompt": "x"}], schema=tools, sampling=SamplingOptions(max_tokens=9))
    with pytest.raises(OptionError, match="the shortest answer of the schema, <tool_call> "):
        pipeline.run(job)


def told(model: str, prompt: PromptOptions, row: dict[str, Any]) -> tuple[str, list[str]]:
    """The prompt of a row as text, and the warnings of the job."""
    tools = ToolSet(TOOLS, style="hermes")
    parts = pipeline.open_parts(
        config(model, [row], schema=tools, prompt=prompt), progress=Silent()
    )
    view = parts.prompts.explain(Row(index=0, values=row))
    assert view.error is None, view.error
    return "".join(span.text for span in view.spans), list(parts.warnings)


def test_the_chat_template_shows_the_tools_and_the_instruction_does_not(caller: str) -> None:
    for prompt, row in [
        (PromptOptions(), {"messages": HELLO}),
        (PromptOptions(template="Say {{ t }}", chat=True), {"t": "hello"}),
        (PromptOptions(instruction="Say", column="t"), {"t": "hello"}),
    ]:
        text, warnings = told(caller, prompt, row)
        assert text.count('"name": "add"') == 1
        assert text.count("End <|end|> it.") == 1
        assert warnings == []


def test_an_instruction_tells_of_the_tools_where_the_chat_template_cannot(sevens: str) -> None:
    prompt = PromptOptions(instruction="Say", column="t")
    text, warnings = told(sevens, prompt, {"t": "hello"})
    assert 'by writing\n<tool_call>\n{"name": "NAME", "arguments": {ARGUMENTS}}' in text
    assert '"name":"add"' in text
    assert warnings == []


def test_a_model_that_is_not_told_of_the_tools_is_a_warning(sevens: str, caller: str) -> None:
    for model, prompt, row in [
        (sevens, PromptOptions(), {"messages": HELLO}),
        (caller, PromptOptions(), {"prompt": "hello"}),
        (caller, PromptOptions(template="Say {{ t }}"), {"t": "hello"}),
    ]:
        text, [warning] = told(model, prompt, row)
        assert "add" not in text
        assert warning.startswith("the model is not told of the tools")
    _, warnings = told(caller, PromptOptions(template="{{ schema }} {{ t }}"), {"t": "hello"})
    assert warnings == []


def test_the_format_of_the_chat_template_is_taken(caller: str) -> None:
    with batchradix.LLM(caller, engine=EngineOptions(dtype="float32", num_threads=1)) as llm:
        [result] = llm.generate(
            [HELLO],
            tools=TOOLS,
            tool_choice="add",
            sampling=SamplingOptions(max_tokens=120),
        )
    assert result.status is Status.OK
    assert result.text == ('<tool_call>\n{"name": "add", "arguments": {"n":7}}\n</tool_call>')


def test_a_row_s_own_tools_beside_those_of_the_run_are_its_error(caller: str) -> None:
    rows = [{"messages": HELLO, "tools": json.dumps(TOOLS)}, {"messages": HELLO, "tools": None}]
    result = batchradix.run(
        rows,
        model=caller,
        tools=TOOLS,
        tool_choice="stop",
        parallel_tool_calls=False,
        sampling=SamplingOptions(max_tokens=120),
        engine=EngineOptions(dtype="float32", num_threads=1),
    )
    first, second = result.to_arrow().to_pylist()
    assert first["error"]["code"] == "bad_value"
    assert "the row has 'tools' of its own" in first["error"]["message"]
    assert second["value"] == [{"name": "stop", "arguments": "{}"}]


def test_json_lines_hold_calls_as_json(sevens: str, tmp_path: Path) -> None:
    tools = ToolSet(TOOLS, choice="add", style="mistral")
    output = OutputOptions(path=tmp_path / "out.jsonl")
    pipeline.run(config(sevens, [{"prompt": "x"}], schema=tools, output=output))
    [line] = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["value"] == [{"name": "add", "arguments": {"n": 7}}]


def test_another_choice_is_another_job(sevens: str, tmp_path: Path) -> None:
    output = OutputOptions(path=tmp_path / "out.arrow")
    rows = [{"prompt": "x"}]
    first = ToolSet(TOOLS, choice="add", style="json")
    pipeline.run(config(sevens, rows, schema=first, output=output))
    other = ToolSet(TOOLS, choice="stop", style="json")
    with pytest.raises(batchradix.errors.OutputMismatchError, match="another job"):
        pipeline.run(config(sevens, rows, schema=other, output=output))
