"""OpenAI batch files: every request gets its own answer or says why not, as the API would."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import openai_shapes
import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
DIGIT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": DIGIT, "strict": True}}]
DIGIT_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "digit", "strict": True, "schema": DIGIT},
}
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>arguments{% endfor %}"
    "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"
)
DIE_AT_STEP = """
import os, signal
from batchradix.engine.core import RadixEngine
step, left = RadixEngine.step, [12]
def last_step(engine):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(engine)
RadixEngine.step = last_step
import batchradix.sink.shards as shards
shards.COMMIT_ROWS = 4
"""


def request(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        body = {"messages": HI} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def lines(path: str) -> list[Any]:
    """The lines of an output or error file, each parsed by the published shapes."""
    texts = Path(path).read_text(encoding="utf-8").splitlines()
    return [openai_shapes.parsed(text) for text in texts]


@pytest.fixture
def run(cli: Any, files: ModuleType) -> Callable[..., Any]:
    """Writes requests to batch.jsonl and runs them in float32."""

    def go(requests: list[Any], *options: Any, output: str = "out.jsonl") -> Any:
        files.write_jsonl("batch.jsonl", requests)
        return cli("run", "batch.jsonl", "--dtype", "float32", "-o", output, *options)

    return go


def test_an_id_that_is_there_twice_is_refused_before_the_model_loads(
    enter: Callable[[str], Path], cli: Any, markov: Path
) -> None:
    enter("ob-01")
    ran = cli("run", "batch.jsonl", "--model", markov, "-o", "out.jsonl")
    assert ran.code == 2
    assert "'twin'" in ran.err
    assert re.findall(r"line (\d)", ran.err) == ["2", "4"]
    assert "loading" not in ran.err
    assert not Path("out.jsonl").exists()


def test_ids_that_differ_by_case_or_a_space_are_different(
    folder: Path, run: Any, markov: Path, files: ModuleType
) -> None:
    """Case ob-01, third point."""
    ids = ["twin", "Twin", "twin "]
    requests = [request(one, max_tokens=n) for n, one in enumerate(ids, 2)]
    assert run(requests, "--model", markov).code == 0
    rows = files.read_rows("out.jsonl")
    assert [(row["id"], row["text"]) for row in rows] == [
        ("twin", "ab"), ("Twin", "abc"), ("twin ", "abcd"),
    ]  # fmt: skip
    ran = run([*requests, request("")], "--model", markov)
    assert ran.code == 2
    assert "line 4 of batch.jsonl has an empty one" in ran.err


def test_parts_and_tool_turns_are_rendered_whole_and_images_refused(
    enter: Callable[[str], Path], cli: Any, markov: Path, files: ModuleType
) -> None:
    enter("ob-03")
    assert cli("run", "batch.jsonl", "--model", markov, "-o", "out.jsonl").code == 1
    rows = {row["id"]: row for row in files.read_rows("out.jsonl")}
    assert [row["text"] for row in rows.values()] == ["abcd"] * 3 + [None]
    assert rows["parts"]["prompt_tokens"] == 12
    assert rows["tools"]["prompt_tokens"] == 32
    assert rows["image"]["error"]["code"] == "unsupported_content"
    assert "images" in rows["image"]["error"]["message"]


def test_the_answers_and_failures_of_a_case_in_the_format_of_the_api(
    enter: Callable[[str], Path], cli: Any, markov: Path
) -> None:
    """Case ob-03."""
    enter("ob-03")
    options = ["--model", markov, "-o", "results.jsonl", "--format", "openai"]
    assert cli("run", "batch.jsonl", *options).code == 1
    answered = lines("results.jsonl")
    assert [line.custom_id for line, _ in answered] == ["plain", "parts", "tools"]
    assert [body.choices[0].message.content for _, body in answered] == ["abcd"] * 3
    assert [body.usage.prompt_tokens for _, body in answered] == [6, 12, 32]
    assert {line.response.status_code for line, _ in answered} == {200}
    assert {body.choices[0].finish_reason for _, body in answered} == {"length"}
    [(line, body)] = lines("results.errors.jsonl")
    assert (line.custom_id, line.response.status_code) == ("image", 400)
    assert line.error.code == body.error.code == "unsupported_content"


def many_features() -> list[dict[str, Any]]:
    """Requests of which the first uses more than twelve features at once."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"n":1}'}}
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    text_format = {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}
    return [
        request(
            "all",
            model="m",
            messages=turns,  # a system turn, parts, a call and its result
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            max_completion_tokens=80,
            n=3,
            seed=5,
            temperature=0.8,
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            stop=["zzz"],
            logprobs=False,
            user="u",
        ),
        request("schema", response_format=DIGIT_FORMAT, max_tokens=20),
        request("object", response_format={"type": "json_object"}, max_tokens=20),
        request(
            "named", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}}
        ),
        request("text", tools=TOOLS, tool_choice="none", max_tokens=3),
        request("completion", COMPLETIONS, prompt="ab", n=2, max_tokens=4),
        request("cut", response_format=text_format, max_tokens=5),
        request("logprobs", logprobs=True, top_logprobs=2),
    ]


@pytest.fixture
def answered(folder: Path, run: Any, const: Any) -> list[str]:
    """The lines of the output and then of the error file for `many_features`."""
    model = const('7a}"]')
    ran = run(many_features(), "--model", model, "--format", "openai", output="results.jsonl")
    assert ran.code == 1, ran.err
    paths = [Path("results.jsonl"), Path("results.errors.jsonl")]
    return [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def test_twelve_features_at_once_are_answered_in_the_published_shapes(
    answered: list[str],
) -> None:
    found = {line.custom_id: (line, body) for line, body in map(openai_shapes.parsed, answered)}
    assert list(found) == [
        "all", "schema", "object", "named", "text", "completion", "cut", "logprobs",
    ]  # fmt: skip
    _, body = found["all"]
    assert [choice.index for choice in body.choices] == [0, 1, 2]
    for choice in body.choices:
        [call] = choice.message.tool_calls
        assert (call.function.name, choice.finish_reason) == ("add", "tool_calls")
        assert 0 <= json.loads(call.function.arguments)["n"] <= 9
        assert choice.message.content is None
    ids = [choice.message.tool_calls[0].id for choice in body.choices]
    assert len(set(ids)) == 3
    assert body.usage.completion_tokens == 3 * len('[{"name":"add","arguments":{"n":7}}]')
    assert json.loads(found["schema"][1].choices[0].message.content) == {"n": 7}
    assert isinstance(json.loads(found["object"][1].choices[0].message.content), dict)
    assert found["named"][1].choices[0].message.tool_calls[0].function.name == "add"
    assert found["text"][1].choices[0].message.tool_calls == []
    assert [choice.text for choice in found["completion"][1].choices] == ["7777"] * 2
    assert found["completion"][1].usage.completion_tokens == 8
    assert found["completion"][1].usage.prompt_tokens == 3
    [cut] = found["cut"][1].choices
    assert (cut.message.content, cut.finish_reason) == ('"777"', "length")
    assert found["logprobs"][0].error.code == "unsupported_parameter"


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="openai is not installed")
def test_the_package_of_openai_parses_every_answer(answered: list[str]) -> None:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    bodies = [json.loads(line)["response"]["body"] for line in answered[:-1]]
    parsed = [
        (Completion if body["object"] == "text_completion" else ChatCompletion).model_validate(body)
        for body in bodies
    ]
    assert len(parsed) == 7
    assert [one.to_dict() for one in parsed] == bodies
    [call] = parsed[0].choices[2].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"n"}


def test_samples_are_a_list_column_in_the_other_formats(
    folder: Path, run: Any, const: Any, files: ModuleType
) -> None:
    requests = [request("a", n=2, max_tokens=2), request("b", response_format=DIGIT_FORMAT)]
    for output in ("out.jsonl", "out.arrow", "out.parquet"):
        assert run(requests, "--model", const('7}"1'), output=output).code == 0
        first, second = files.read_rows(output)
        assert (first["id"], first["text"], first["completion_tokens"]) == ("a", "77", 4)
        assert [one["text"] for one in first["samples"]] == ["77", "77"]
        assert second["samples"][0]["value"] == second["value"]
    assert files.read_rows("out.jsonl")[1]["samples"][0]["value"] == {"n": 7}


def test_a_sample_under_the_run_s_schema_lacks_what_the_model_left_out(
    folder: Path, run: Any, const: Any, files: ModuleType
) -> None:
    schema = {**DIGIT, "properties": {**DIGIT["properties"], "o": {"const": 1}}}
    options = ["--model", const('7}"1'), "--schema", json.dumps(schema), "--max-tokens", 20]
    assert run([request("a", n=2)], *options).code == 0
    [row] = files.read_rows("out.jsonl")
    assert [row["value"], *(one["value"] for one in row["samples"])] == [{"n": 7}] * 3


def test_without_several_answers_there_is_no_column_of_samples(
    folder: Path, run: Any, markov: Path, files: ModuleType
) -> None:
    assert run([request("a", max_tokens=2)], "--model", markov).code == 0
    [row] = files.read_rows("out.jsonl")
    assert row.keys() & {"samples", "value"} == set()


def test_drawn_answers_differ_and_a_seed_draws_them_again(
    folder: Path, run: Any, oracle_model: Path, files: ModuleType
) -> None:
    drawn = {"n": 4, "temperature": 1.5, "max_tokens": 12}
    requests = [request("a", seed=1, **drawn), request("b", seed=1, **drawn),
                request("c", seed=2, **drawn), request("d", **drawn)]  # fmt: skip
    assert run(requests, "--model", oracle_model).code == 0
    texts = {
        row["id"]: [one["text"] for one in row["samples"]] for row in files.read_rows("out.jsonl")
    }
    assert texts["a"] == texts["b"]
    assert len({*texts["a"], *texts["c"], *texts["d"]}) == 12


def test_a_request_is_one_row_of_the_summary_however_many_answers_it_wants(
    folder: Path, run: Any, markov: Path
) -> None:
    requests = [request("a", n=5, max_tokens=2), request("b", n=0), request("c", max_tokens=1)]
    ran = run(requests, "--model", markov, "--json")
    assert ran.code == 1
    found = {name: ran.summary[name] for name in ("rows", "ok", "errors", "error_codes")}
    assert found == {"rows": 3, "ok": 2, "errors": 1, "error_codes": {"bad_setting": 1}}
    ran = run(requests, "--model", markov, "--json")
    assert (ran.summary["resumed_rows"], ran.summary["decode_steps"]) == (3, 0)


def test_a_killed_run_ends_with_the_same_files(
    folder: Path, processes: Any, markov: Path, files: ModuleType
) -> None:
    requests = [
        request(f"r{i}", n=1 + i % 3, temperature=i % 2, max_tokens=6 + i % 5, messages=[
            {"role": "user", "content": f"{i} b"}]) if i % 7 else request(f"r{i}", n=0)
        for i in range(24)
    ]  # fmt: skip
    files.write_jsonl("batch.jsonl", requests)
    options = ["run", "batch.jsonl", "--model", markov, "--dtype", "float32", "--batch-size", 4,
               "--threads", 1, "--format", "openai"]  # fmt: skip
    assert processes.run(*options, "-o", "full.jsonl").code == 1
    died = processes.run(*options, "-o", "t.jsonl", code=DIE_AT_STEP)
    assert died.code == -signal.SIGKILL
    assert list(Path("t.jsonl.batchradix/shards").iterdir())
    assert not Path("t.jsonl").exists()
    assert not Path("t.errors.jsonl").exists()
    assert processes.run(*options, "-o", "t.jsonl").code == 1
    for name in ("jsonl", "errors.jsonl"):
        texts = [Path(f"{run}.{name}").read_text() for run in ("full", "t")]
        assert re.sub(r'"created":\d+', "", texts[0]) == re.sub(r'"created":\d+', "", texts[1])
    assert len(lines("t.jsonl")) == 20
    assert len(lines("t.errors.jsonl")) == 4


def test_what_was_deleted_is_written_again_to_the_byte_without_the_model(
    folder: Path, run: Any, markov: Path
) -> None:
    requests = [request("a", max_tokens=2), request("b", n=0)]
    options = ["--model", markov, "--format", "openai", "--json"]
    run(requests, *options)
    for name in ("out.jsonl", "out.errors.jsonl"):
        before = Path(name).read_bytes()
        Path(name).unlink()
        assert run(requests, *options).summary["forward_steps"] == 0
        assert Path(name).read_bytes() == before


def test_another_format_of_the_same_answers_computes_nothing(
    folder: Path, run: Any, markov: Path, files: ModuleType
) -> None:
    requests = [request("a", max_tokens=2)]
    run(requests, "--model", markov)
    assert files.column("out.jsonl", "text") == ["ab"]
    ran = run(requests, "--model", markov, "--format", "openai", "--json")
    assert ran.summary["forward_steps"] == 0
    [(_, body)] = lines("out.jsonl")
    assert body.choices[0].message.content == "ab"


def test_the_error_file_goes_once_nothing_fails(folder: Path, run: Any, markov: Path) -> None:
    options = ["--model", markov, "--format", "openai"]
    assert run([request("a", max_tokens=2), request("b", n=0)], *options).code == 1
    assert Path("out.errors.jsonl").exists()
    assert run([request("a", max_tokens=2), request("b", max_tokens=2)], *options).code == 0
    assert not Path("out.errors.jsonl").exists()
    assert [line.custom_id for line, _ in lines("out.jsonl")] == ["a", "b"]


def test_an_error_file_of_somebody_else_is_not_replaced(
    folder: Path, run: Any, markov: Path
) -> None:
    Path("out.errors.jsonl").write_text("mine\n")
    ran = run([request("a", n=0)], "--model", markov, "--format", "openai")
    assert ran.code == 2
    assert "out.errors.jsonl exists already" in ran.err
    assert Path("out.errors.jsonl").read_text() == "mine\n"


def test_requests_that_failed_are_collected_as_they_were(
    folder: Path, run: Any, cli: Any, markov: Path, files: ModuleType
) -> None:
    bad = request("b", n=2, max_tokens=500, messages=[{"role": "user", "content": "x" * 600}])
    requests = [request("a", n=2, max_tokens=2), bad, "{broken"]
    assert run(requests, "--model", markov, "--errors", "failed.jsonl").code == 1
    assert files.read_rows("failed.jsonl") == [bad]
    assert cli("run", "failed.jsonl", "--model", markov, "-o", "again.jsonl").code == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--format", "openai", "-o", "out.arrow"], "ends in .jsonl"),
        (["--format", "jsonl", "-o", "out.jsonl"], "--format must be openai"),
        (["--format", "openai", "-o", "out.jsonl", "--keep", "url"], "no place for what --keep"),
        (["--template", "{{ body }}", "-o", "out.jsonl"], "--template is for tables of rows"),
        (["--tools", json.dumps(TOOLS), "--tool-format", "json", "-o", "out.jsonl"],
         "--tools is for tables of rows"),
        (["--probabilities", "--choices", "a,b", "-o", "out.jsonl"],
         "--probabilities is for tables of rows"),
        (["--tool-format", "none", "-o", "out.jsonl"], "--tool-format must be one of"),
        (["--format", "openai", "-o", "out.jsonl", "--errors", "out.errors.jsonl"],
         "is the input or the output"),
    ],
)  # fmt: skip
def test_options_that_batch_files_have_no_room_for_are_refused(
    folder: Path, cli: Any, markov: Path, files: ModuleType, options: list[str], words: str
) -> None:
    files.write_jsonl("batch.jsonl", [request("a")])
    ran = cli("run", "batch.jsonl", "--model", markov, *options)
    assert ran.code == 2
    assert words in ran.err


def test_a_table_of_rows_has_no_responses(
    folder: Path, cli: Any, markov: Path, files: ModuleType
) -> None:
    files.write_jsonl("jobs.jsonl", [{"prompt": "x"}])
    options = ["run", "jobs.jsonl", "--model", markov, "-o", "out.jsonl"]
    ran = cli(*options, "--format", "openai")
    assert ran.code == 2
    assert "jobs.jsonl is no OpenAI batch file" in ran.err
    ran = cli(*options, "--tool-format", "json")
    assert ran.code == 2
    assert "--tool-format needs --tools" in ran.err


def test_another_model_in_the_requests_is_reported(folder: Path, run: Any, markov: Path) -> None:
    model = shutil.copytree(markov, "mine")
    options = ["--model", model, "--format", "openai"]
    ran = run([request("a", model="gpt-4o-mini", max_tokens=2)], *options)
    assert ran.code == 0
    assert "name the model 'gpt-4o-mini', and mine answers them" in ran.err
    [(_, body)] = lines("out.jsonl")
    assert body.model == "mine"
    assert "answers them" not in run([request("a", model="mine", max_tokens=2)], *options).err
    requests = [request("a", model="mine"), request("b", model="other")]
    ran = run(requests, *options)
    assert ran.code == 2
    assert "'mine' in line 1 of batch.jsonl; 'other' in line 2" in ran.err


def test_a_last_assistant_message_gets_an_answer_of_its_own_unless_it_is_to_go_on(
    folder: Path, prompt_of: Any, markov: Path, files: ModuleType
) -> None:
    messages = [*HI, {"role": "assistant", "content": "x"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    files.write_jsonl("batch.jsonl", [request("a", messages=messages),
                                      request("b", messages=messages, **more)])  # fmt: skip
    own, continued = (
        prompt_of("batch.jsonl", "--model", markov, "--row", row) for row in ("a", "b")
    )
    assert own.endswith("⟦<|assistant|>⟧x⟦<|end|>⟧⟦<|assistant|>⟧")
    assert continued.endswith("⟦<|assistant|>⟧x")


@pytest.fixture
def caller(folder: Path, const: Any) -> str:
    """A model that would rather call than talk, whose chat template shows tools."""
    shutil.copytree(const("<7a}"), "caller")
    Path("caller", "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return "caller"


def test_tools_are_shown_and_calls_are_written_as_the_model_does(
    run: Any, prompt_of: Any, caller: str, files: ModuleType
) -> None:
    once = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 100}
    requests = [request(one, **once, tool_choice=one) for one in ("required", "none", "auto")]
    ran = run(requests, "--model", caller)
    assert "not told" not in ran.err
    must, none, _ = files.read_rows("out.jsonl")
    assert must["value"] == [{"name": "add", "arguments": '{"n":7}'}]
    assert must["text"] == '<tool_call>\n{"name": "add", "arguments": {"n":7}}\n</tool_call>'
    assert none["value"] is None
    shown = prompt_of("batch.jsonl", "--model", caller, "--row", "required")
    assert '"name": "add"' in shown
    assert '"name": "add"' not in prompt_of("batch.jsonl", "--model", caller, "--row", "none")
    run(requests, "--model", caller, "--format", "openai")
    (_, called), (_, talked), _ = lines("out.jsonl")
    assert called.choices[0].message.content is None
    assert called.choices[0].finish_reason == "tool_calls"
    assert talked.choices[0].message.tool_calls == []


def test_tools_of_a_model_that_is_not_told_of_them(
    folder: Path, run: Any, const: Any, files: ModuleType
) -> None:
    requests = [request("auto", tools=TOOLS), request("must", tools=TOOLS, tool_choice="required")]
    ran = run(requests, "--model", const('7a}"]'))
    assert "the model is not told what they are" in ran.err
    auto, must = files.read_rows("out.jsonl")
    assert auto["error"]["code"] == "bad_setting"
    assert "tool_format" in auto["error"]["message"]
    assert must["value"][0] == {"name": "add", "arguments": '{"n":7}'}
    ran = run(requests[:1], "--model", const('<7a}"]'), "--tool-format", "hermes", "--max-tokens",
              60, output="hermes.jsonl")  # fmt: skip
    assert files.read_rows("hermes.jsonl")[0]["status"] in ("ok", "truncated")


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"type": "function"}]},
        {"tools": TOOLS, "tool_choice": "subtract"},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
        {"tools": TOOLS, "response_format": DIGIT_FORMAT},
        {"response_format": {"type": "grammar"}},
        {"response_format": "json"},
        {"response_format": True},
        {"response_format": 5},
        {"response_format": "tools"},
        {"response_format": {"tools": TOOLS}},
        {"tools": TOOLS, "parallel_tool_calls": "false"},
        {"max_tokens": 0},
        {"max_tokens": "5"},
        {"temperature": -1},
        {"stop": [""]},
        {"seed": "x"},
    ],
)
def test_a_setting_that_cannot_be_is_an_error_row_beside_good_ones(
    caller: str, run: Any, files: ModuleType, body: dict[str, Any]
) -> None:
    ran = run([request("a", max_tokens=2), request("b", **body)], "--model", caller)
    assert ran.code == 1
    good, bad = files.read_rows("out.jsonl")
    assert good["status"] == "ok"
    assert bad["error"]["code"] == "bad_setting"
    assert "row 1 (line 2)" in bad["error"]["message"]
