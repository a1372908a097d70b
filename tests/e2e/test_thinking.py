"""Thinking before an answer, in whole runs of models whose every token is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import batchradix
from batchradix import pipeline
from batchradix.chat_options import ChatOptions
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.errors import OptionError, OutputMismatchError
from batchradix.integrations.hf_datasets import Extractor

MakeModel = Callable[..., Path]
SIX = SamplingOptions(max_tokens=6)
FIELDS = "n: bool"
SHORT = {
    "type": "object",
    "properties": {"n": {"type": "string", "maxLength": 3}},
    "required": ["n"],
}


def chats(*texts: str, **more: Any) -> list[dict[str, Any]]:
    """One row a text."""
    return [{"id": t, "messages": [{"role": "user", "content": t}], **more} for t in texts]


def answers(rows: Any, model: Path, **options: Any) -> list[dict[str, Any]]:
    """The rows of a run's table."""
    options = {"sampling": SIX, "keep": (), **options}
    found: list[dict[str, Any]] = batchradix.run(rows, model=model, **options).table.to_pylist()
    return found


def shown(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["text"], row["reasoning"], row["reasoning_tokens"], row["completion_tokens"]


@pytest.mark.parametrize(
    ("kind", "markers", "num_prompt", "num_thought"),
    [
        ("switch", "added", 8, 3),
        ("switch", "special", 8, 3),
        ("switch", "text", 14, 10),
        ("opens", "added", 8, 3),
        ("opens", "text", 14, 10),
        ("toggle", "added", 7, 3),
        ("mentions", "special", 8, 3),
    ],
)
def test_what_is_thought_goes_to_a_column_of_its_own(
    thinker_folder: MakeModel, kind: str, markers: str, num_prompt: int, num_thought: int
) -> None:
    model = thinker_folder(kind, markers=markers)
    for thinking in ("on", "auto") if kind != "mentions" else ("on",):
        (row,) = answers(chats("ab"), model, thinking=thinking)
        assert shown(row) == ("42", "um", num_thought, num_thought + 3)
        assert (row["status"], row["finish_reason"]) == ("ok", "stop")
        assert row["prompt_tokens"] == num_prompt


def test_a_template_that_cannot_turn_it_on_is_left_as_it_is(thinker_folder: MakeModel) -> None:
    (row,) = answers(chats("ab"), thinker_folder("mentions"))
    assert (row["text"], row["prompt_tokens"]) == ("abcdef", 6)
    assert "reasoning" not in row


@pytest.mark.parametrize(
    ("kind", "num_prompt"), [("switch", 12), ("opens", 12), ("toggle", 7), ("mentions", 12)]
)
def test_off_leaves_no_open_block(thinker_folder: MakeModel, kind: str, num_prompt: int) -> None:
    (row,) = answers(chats("ab"), thinker_folder(kind), thinking="off")
    assert row["prompt_tokens"] == num_prompt
    assert "reasoning" not in row


@pytest.mark.parametrize("forced_text", [True, False])
@pytest.mark.parametrize("schema", [SHORT, {"enum": ["yes", "no"]}])
def test_a_schema_begins_behind_the_thinking(
    thinker_folder: MakeModel, schema: Any, forced_text: bool
) -> None:
    engine = EngineOptions(forced_text=forced_text)
    options = {"schema": schema, "engine": engine, "sampling": SamplingOptions(max_tokens=12)}
    (row,) = answers(chats("ab"), thinker_folder("opens"), thinking="on", **options)
    assert row["reasoning"] == "um"
    assert row["value"] == json.loads(row["text"])
    assert row["prompt_tokens"] == 8  # the opening is not in it
    gap = 2
    assert row["reasoning_tokens"] == 3 + gap
    assert row["completion_tokens"] == row["reasoning_tokens"] + len(row["text"])


def test_under_a_schema_it_is_off_by_itself_and_said_so(thinker_folder: MakeModel) -> None:
    done = batchradix.run(chats("ab"), model=thinker_folder("switch"), fields=FIELDS)
    assert any("--thinking on lets it" in text for text in done.summary.warnings)
    assert "reasoning" not in done.table.column_names
    assert done.table["prompt_tokens"].to_pylist() == [12]


def test_a_budget_closes_the_thinking_and_the_answer_has_its_own(
    thinker_folder: MakeModel,
) -> None:
    model = thinker_folder("opens", text="a", ends=False)
    (row,) = answers(chats("Q"), model, thinking_tokens=10)
    closing = len("\n\n\n") + 1
    assert shown(row) == ("abcdef", "abcdefghij", 10 + closing, 10 + closing + 6)
    assert row["finish_reason"] == "length"


@pytest.mark.parametrize(("guard", "num_thought"), [(True, 208), (False, 300)])
def test_thinking_in_circles_is_closed(
    thinker_folder: MakeModel, guard: bool, num_thought: int
) -> None:
    model = thinker_folder("opens", text="a", ends=False)
    engine = EngineOptions(repetition_guard=guard)
    (row,) = answers(chats("Q"), model, thinking_tokens=300, engine=engine)
    assert len(row["reasoning"]) == num_thought
    assert row["text"] == "abcdef"


def test_an_end_of_the_sequence_ends_the_thinking_alone(thinker_folder: MakeModel) -> None:
    model = thinker_folder("opens", text=" ", ends=False)  # a space is followed by the end
    for overlap in ("off", "on"):
        (row,) = answers(chats("Q"), model, engine=EngineOptions(overlap=overlap))
        assert shown(row) == ("", "", 1 + 4, 5 + 2)


def test_a_context_too_short_for_both_is_shared(thinker_folder: MakeModel) -> None:
    model = thinker_folder("opens", text="a", ends=False)
    text = "x" * 400  # of 512
    (row,) = answers(chats(text), model, sampling=SamplingOptions())
    assert row["status"] == "ok"
    room = 512 - row["prompt_tokens"]
    assert row["completion_tokens"] == room
    assert len(row["reasoning"]) == (room - 4) // 2
    refused, *_ = answers(chats("x" * 504), model)
    assert refused["error"]["code"] == "prompt_too_long"


def test_stop_strings_are_for_the_answer(thinker_folder: MakeModel) -> None:
    model = thinker_folder("switch", text="um", answer="\tx7y")
    (row,) = answers(
        chats("Q"), model, sampling=SamplingOptions(max_tokens=9, stop=("m", "7", "\t"))
    )
    assert shown(row)[:2] == ("x", "um")


def mixed() -> list[dict[str, Any]]:
    """Rows of which some think, some do not, and some are equal."""
    rows = [chats(f"Question {i % 7}")[0] | {"id": str(i)} for i in range(16)]
    formats = [{"type": "json_object"}, {"type": "text"}, None]
    for i, row in enumerate(rows):
        row["response_format"] = formats[i % 3]
        row["chat_template_kwargs"] = {"enable_thinking": i % 5 != 0}
    return rows


@pytest.fixture(scope="module")
def wanderer(tiny_model_folder: MakeModel, thinker_folder: MakeModel) -> Path:
    """A random model, so that each token depends on all before, which now and then ends its
    thinking, and its answers."""
    from safetensors.torch import load_file, save_file

    folder: Path = thinker_folder("switch", base=tiny_model_folder("random"))
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[262] = -0.5 * head[258]  # the end marker where the end of the sequence is unlikely
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


BUDGET = 10
WANDERING = {"thinking_tokens": BUDGET, "sampling": SamplingOptions(max_tokens=12)}
PARTS = ("status", "text", "value", "reasoning", "completion_tokens", "reasoning_tokens")


@pytest.fixture(scope="module")
def wandered(wanderer: Path) -> list[dict[str, Any]]:
    """What each of the mixed rows gets alone."""
    engine = EngineOptions(batch_size=1, prefix_cache=False, dtype="float32")
    return answers(mixed(), wanderer, engine=engine, **WANDERING)


def parts(rows: list[dict[str, Any]]) -> list[list[Any]]:
    return [[row[name] for name in PARTS] for row in rows]


def test_rows_of_all_kinds_stand_beside_each_other(wandered: list[dict[str, Any]]) -> None:
    for i, row in enumerate(wandered):
        assert (row["reasoning"] is None) == (i % 5 == 0)
        assert row["status"] in ("ok", "truncated")
    lengths = {row["reasoning_tokens"] for row in wandered if row["reasoning"] is not None}
    assert len(lengths) > 2  # some ended by themselves, some were closed
    by_key: dict[Any, list[Any]] = {}
    for i, row in enumerate(parts(wandered)):
        by_key.setdefault((i % 7, i % 3 == 0, i % 5 == 0), []).append(row)
    assert all(row == rows[0] for rows in by_key.values() for row in rows)


@pytest.mark.parametrize(
    "engine",
    [
        {"overlap": "on"},
        {"speculate": 4},
        {"speculate": "auto", "batch_size": 5},
        {"kv_tokens": 100},  # rows give way to others
        {"deterministic": True},
        {"prefill_tokens": 3},
    ],
    ids=str,
)
def test_how_the_engine_runs_changes_no_thought(
    wanderer: Path, wandered: list[dict[str, Any]], engine: dict[str, Any]
) -> None:
    options = EngineOptions(dtype="float32", **engine)
    assert parts(answers(mixed(), wanderer, engine=options, **WANDERING)) == parts(wandered)


def test_thoughts_and_answers_are_those_of_transformers(
    wanderer: Path, wandered: list[dict[str, Any]]
) -> None:
    from transformers import AutoModelForCausalLM

    from batchradix.checkpoint.checkpoint import open_checkpoint

    model = AutoModelForCausalLM.from_pretrained(wanderer, dtype="float32").eval()
    bytes_of = open_checkpoint(str(wanderer)).tokenizer.token_bytes
    eos, end, line = {258, 263}, 262, ord("\n")

    def chosen(ids: list[int]) -> Iterator[int]:
        while True:
            with torch.inference_mode():
                token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
            yield token
            ids.append(token)

    def text(ids: list[int]) -> str:
        return b"".join(bytes_of[i] for i in ids).decode()

    ends = []
    for i, row in enumerate(wandered):
        if i % 3 == 0 or i % 5 == 0:
            continue
        ids = [257, 260, *f"Question {i % 7}".encode(), 263, 261, 256, line]
        thoughts: list[int] = []
        for token in chosen(ids):
            if token in eos:
                ids += [line, end, line, line]
                ends.append("sequence")
                break
            thoughts.append(token)
            if token == end or len(thoughts) == BUDGET:
                ids += [token] if token == end else [token, line, end, line, line]
                ends.append("marker" if token == end else "budget")
                break
        answer: list[int] = []
        for token in chosen(ids):
            if token in eos:
                break
            answer.append(token)
            if len(answer) == 12:
                break
        assert row["reasoning"] == text([t for t in thoughts if t != end]).strip()
        assert row["text"] == text(answer).lstrip()
    assert len(ends) >= 6
    assert {*ends} == {"sequence", "marker", "budget"}


def test_drawn_thoughts_depend_on_the_row_alone(wanderer: Path) -> None:
    sampling = SamplingOptions(max_tokens=8, temperature=0.8, seed=3)
    options = {"sampling": sampling, "thinking_tokens": 12}
    one = EngineOptions(dtype="float32", batch_size=1)
    many = EngineOptions(dtype="float32", overlap="on")
    rows = chats("a", "b", "b")
    alone = answers(rows, wanderer, engine=one, **options)
    assert parts_free(alone) == parts_free(answers(rows, wanderer, engine=many, **options))
    assert alone[1]["reasoning"] != alone[2]["reasoning"]


def parts_free(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [shown(row) for row in rows]


@pytest.mark.parametrize("ending", ["arrow", "jsonl"])
def test_a_run_that_was_stopped_goes_on_to_the_same_table(
    wanderer: Path, tmp_path: Path, ending: str
) -> None:
    def config(name: str) -> RunConfig:
        return RunConfig(
            input=mixed(),
            model=str(wanderer),
            chats=ChatOptions(thinking_tokens=BUDGET),
            sampling=SamplingOptions(max_tokens=12),
            engine=EngineOptions(dtype="float32", batch_size=3),
            output=OutputOptions(path=tmp_path / f"{name}.{ending}"),
        )

    steps = iter(range(1000))
    stopped = pipeline.run(config("a"), stop_requested=lambda: 15 if next(steps) > 40 else None)
    assert 0 < stopped.summary.rows < 16
    done = pipeline.run(config("a"))
    assert done.summary.resumed_rows == stopped.summary.rows
    pipeline.run(config("b"))
    read = batchradix.sink.formats.read_table
    assert parts(read(tmp_path / f"a.{ending}").to_pylist()) == parts(
        read(tmp_path / f"b.{ending}").to_pylist()
    )


def test_equal_rows_think_once_and_prompts_are_computed_once(thinker_folder: MakeModel) -> None:
    done = batchradix.run(chats("a", "b", "a"), model=thinker_folder("switch"), sampling=SIX)
    assert done.summary.duplicate_rows == 1
    assert done.table["reasoning"].to_pylist() == ["um"] * 3
    assert done.summary.usage.computed_tokens == done.summary.distinct_tokens
    assert done.summary.usage.completion_tokens == 12
    assert done.summary.completion_tokens == 18


def test_another_budget_is_another_job(thinker_folder: MakeModel, tmp_path: Path) -> None:
    model = thinker_folder("opens", text="a", ends=False)
    out = tmp_path / "o.arrow"
    batchradix.run(chats("Q"), model=model, sampling=SIX, output=out, thinking_tokens=3)
    with pytest.raises(OutputMismatchError, match="thinking_tokens"):
        batchradix.run(chats("Q"), model=model, sampling=SIX, output=out, thinking_tokens=4)


def request(name: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "ab"}]
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": messages, "max_tokens": 6, **body},
    }


def test_requests_get_their_thinking_as_reasoning_content(
    thinker_folder: MakeModel, tmp_path: Path
) -> None:
    requests = [
        request("two", n=2),
        request("off", chat_template_kwargs={"enable_thinking": False}),
        request("schema", response_format={"type": "json_object"}),
        request("bad", chat_template_kwargs=[1]),
        request("taken", chat_template_kwargs={"messages": []}),
    ]
    out = tmp_path / "out.jsonl"
    batchradix.run(requests, model=thinker_folder("switch"), output=out, format="openai")
    bodies = [json.loads(line)["response"]["body"] for line in out.read_text().splitlines()]
    two, off, schema = bodies
    for choice in two["choices"]:
        assert choice["message"]["content"] == "42"
        assert choice["message"]["reasoning_content"] == "um"
    assert two["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert two["usage"]["completion_tokens"] == 12
    for body in (off, schema):
        assert "reasoning_content" not in body["choices"][0]["message"]
        assert body["usage"]["prompt_tokens"] == 12
    errors = (tmp_path / "out.errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in errors] == ["bad", "taken"]
    assert all("chat_template_kwargs" in line for line in errors)


def test_rows_say_for_themselves_whether_they_think(thinker_folder: MakeModel) -> None:
    rows = [
        *chats("on", chat_template_kwargs={"enable_thinking": True}),
        *chats("off", chat_template_kwargs='{"enable_thinking": false}'),
        *chats("run", chat_template_kwargs=None),
        *chats("bad", chat_template_kwargs="no JSON"),
    ]
    on, off, run, bad = answers(rows, thinker_folder("switch"))
    assert [row["reasoning"] for row in (on, off, run)] == ["um", None, "um"]
    assert bad["error"]["code"] == "bad_value"
    on, off, run, bad = answers(rows, thinker_folder("switch"), thinking="off")
    assert [row["reasoning"] for row in (on, off, run)] == ["um", None, None]
    rows = [{"q": row["id"], **row} for row in rows]
    found = answers(rows[:3], thinker_folder("switch"), template="{{ q }}", chat=True)
    assert [row["reasoning"] for row in found] == ["um", None, "um"]


def test_a_prefill_is_continued_and_not_thought_about(thinker_folder: MakeModel) -> None:
    rows = chats("ab")
    rows[0]["messages"].append({"role": "assistant", "content": "x"})
    (row,) = answers(rows, thinker_folder("switch"))
    assert shown(row) == ("yz" + "abcd", None, 0, 6)
    (row,) = answers(rows, thinker_folder("switch"), thinking="on")
    assert row["error"]["code"] == "unsupported_content"
    assert "too late to think" in row["error"]["message"]


def test_what_cannot_be_thought_about_is_refused(
    thinker_folder: MakeModel, tiny_model_folder: MakeModel
) -> None:
    model, plain = thinker_folder("switch"), tiny_model_folder("markov")
    for match, options in {
        "raw prompts": {"input": [{"prompt": "x"}], "model": model},
        "prompts are raw|raw prompts": {
            "input": [{"q": "x"}], "model": model, "template": "{{ q }}",
        },
        "knows a marker": {"input": chats("x"), "model": plain},
        "every choice": {
            "input": chats("x"), "model": model, "choices": ["1", "2"],
            "sampling": SamplingOptions(probabilities=True),
        },
        "opposite": {
            "input": chats("x"), "model": model,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    }.items():  # fmt: skip
        with pytest.raises(OptionError, match=match):
            batchradix.run(options.pop("input"), thinking="on", **options)
    (row,) = batchradix.run(
        [{"prompt": "x", "messages": None}, *chats("y")], model=model, thinking="on"
    ).table.to_pylist()[:1]
    assert row["error"]["code"] == "bad_value"


def test_sessions_maps_and_frames_have_the_column_too(thinker_folder: MakeModel) -> None:
    import datasets
    import polars

    import batchradix.integrations.polars  # registers the namespace

    model = thinker_folder("switch")
    chat = [{"role": "user", "content": "ab"}]
    with batchradix.LLM(model) as llm:
        result, again = llm.generate([chat, chat], sampling=SIX)
        assert (result.text, result.reasoning, result.reasoning_tokens) == ("42", "um", 3)
        assert again.reasoning == "um"
        off = llm.generate([chat], sampling=SIX, chats=ChatOptions(thinking="off"))[0]
        assert off.reasoning is None
    table = datasets.Dataset.from_list([{"messages": chat}])
    mapped = table.map(Extractor(model=model, max_tokens=6), batched=True)
    assert (mapped[0]["text"], mapped[0]["reasoning"]) == ("42", "um")
    frame = polars.DataFrame({"messages": [chat]})
    found = frame.batchradix.run(model=model, max_tokens=16, thinking="on", fields=FIELDS)
    assert found["reasoning"].to_list() == ["um"]


def test_raw_prompts_among_chats_do_not_think(thinker_folder: MakeModel) -> None:
    rows = [{"prompt": "ab", "messages": None}, {"prompt": None, **chats("ab")[0]}] * 2
    found = answers([{**row, "id": str(i)} for i, row in enumerate(rows)], thinker_folder("opens"))
    assert [(row["text"], row["reasoning"]) for row in found] == [
        ("cdefgh", None),
        ("42", "um"),
    ] * 2


def test_calls_of_tools_follow_the_thinking(thinker_folder: MakeModel) -> None:
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = {"tools": [{"name": "add", "parameters": parameters}], "tool_choice": "required"}
    tools = tools | {"tool_format": "json", "parallel_tool_calls": False}
    sampling = SamplingOptions(max_tokens=60)
    (row,) = answers(
        chats("ab"), thinker_folder("opens"), thinking="on", sampling=sampling, **tools
    )
    assert row["reasoning"] == "um"
    assert row["value"][0]["name"] == "add"
    (row,) = answers(chats("ab"), thinker_folder("opens"), sampling=sampling, **tools)
    assert "reasoning" not in row


def test_a_preview_shows_where_the_row_s_thinking_begins(thinker_folder: MakeModel) -> None:
    job = RunConfig(input=mixed(), model=str(thinker_folder("switch")))
    ends = [
        pipeline.preview(job, row).view.marked().rpartition("⟦<|assistant|>⟧")[2] for row in "12"
    ]
    assert ends == ["⟦<think>⟧\n", "⟦<think>⟧\n"]
    bare = [{k: v for k, v in row.items() if k != "chat_template_kwargs"} for row in mixed()]
    job = RunConfig(input=bare, model=str(thinker_folder("switch")))
    ends = [
        pipeline.preview(job, row).view.marked().rpartition("⟦<|assistant|>⟧")[2] for row in "012"
    ]
    assert ends == ["⟦<think>⟧\n\n⟦</think>⟧\n\n", "⟦<think>⟧\n", "⟦<think>⟧\n"]
    bound = chats("a", response_format={"type": "json_object"})
    for thinking in ("on", "off"):
        chat = ChatOptions(thinking=thinking)  # type: ignore[arg-type]
        seen = pipeline.preview(RunConfig(input=bound, model=job.model, chats=chat))
        assert (seen.opening_text == "{") == (thinking == "off")


def test_parts_of_a_job_are_joined_with_their_thinking(wanderer: Path, tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole.arrow", tmp_path / "parted.arrow"
    options: dict[str, Any] = {"model": wanderer, "engine": EngineOptions(dtype="float32")}
    batchradix.run(mixed(), output=whole, **options, **WANDERING)
    for shard in ("1/2", "2/2"):
        batchradix.run(mixed(), output=parted, shard=shard, **options, **WANDERING)
    batchradix.merge(parted)
    read = batchradix.sink.formats.read_table
    assert parts(read(parted).to_pylist()) == parts(read(whole).to_pylist())


def test_a_table_without_the_column_is_not_gone_on_with(
    thinker_folder: MakeModel, tmp_path: Path
) -> None:
    model, out = thinker_folder("switch"), tmp_path / "o.arrow"
    batchradix.run(chats("a"), model=model, output=out, sampling=SIX, thinking="off")
    rows = chats("a", chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(OutputMismatchError, match="reasoning"):
        batchradix.run(rows, model=model, output=out, sampling=SIX, thinking="off")


def test_a_map_that_is_planned_whole_has_the_column(thinker_folder: MakeModel) -> None:
    import datasets

    table = datasets.Dataset.from_list([{"messages": row["messages"]} for row in chats("a", "b")])
    mapped = batchradix.map_dataset(table, Extractor(model=thinker_folder("opens"), max_tokens=6))
    assert mapped["reasoning"][:] == ["um", "um"]


def test_an_invalid_answer_is_thought_about_again(thinker_folder: MakeModel) -> None:
    options = {"fields": FIELDS, "sampling": SamplingOptions(max_tokens=16, stop=("true", "false"))}
    done = batchradix.run(
        chats("a"), model=thinker_folder("opens"), thinking="on", retries=2, **options
    )
    assert done.summary.retried_rows == 1
    (row,) = done.table.to_pylist()
    assert (row["status"], row["reasoning"] is None) == ("error", False)


@pytest.mark.parametrize("speculate", ["off", 4, 5, 8])
def test_a_guess_beyond_the_thinking_is_held_to_the_grammar(
    thinker_folder: MakeModel, speculate: Any
) -> None:
    template = (
        "{{ messages[0].content }}<|assistant|>"
        "{{ '<think>\\n' if enable_thinking is not defined or enable_thinking else '</think>' }}"
    )
    options: dict[str, Any] = {"regex": "[79]x", "thinking": "on", "chat_template": template}
    engine = EngineOptions(speculate=speculate)
    rows = chats("\num</think>42")  # what it will think, and would say if it could
    (row,) = answers(rows, thinker_folder("mentions", markers="text"), engine=engine, **options)
    assert (row["status"], row["text"], row["reasoning"]) == ("ok", "7x", "um")
    assert row["reasoning_tokens"] == len("um</think>")
