"""Guessing ahead changes no answer, whatever is guessed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchradix import pipeline
from batchradix.config import EngineOptions, RunConfig, SamplingOptions
from batchradix.report.summary import Summary

PROMPTS = ("a", "89", "?", "abcabc", "the cat and the hat and the")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["letter", "letters", "digit"]},
        "more": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["name", "kind", "more"],
    "additionalProperties": False,
}
ROWS = [
    {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": max_tokens}
    for prompt in PROMPTS
    for max_tokens in (1, 2, 3, 40)
    for temperature in (0.0, 0.8)
]


def run(folder: Any, rows: Any, schema: Any = None, **engine: Any) -> tuple[pa.Table, Summary]:
    sampling = engine.pop("sampling", {})
    outcome = pipeline.run(
        RunConfig(
            input=rows,
            model=str(folder),
            schema=schema,
            sampling=SamplingOptions(**sampling),
            engine=EngineOptions(dtype="float32", num_threads=1, **engine),
        )
    )
    assert outcome.table is not None
    return outcome.table.drop_columns(["cached_tokens"]), outcome.summary


@cache
def plain(folder: Path, has_schema: bool, forced_text: bool) -> tuple[pa.Table, Summary]:
    schema = SCHEMA if has_schema else None
    return run(folder, ROWS, schema, forced_text=forced_text, speculate="off")


@pytest.fixture(scope="module", params=["markov", "const", "random"])
def folder(request: pytest.FixtureRequest, tiny_model_folder: Any) -> Any:
    options = {"const": {"prefer": 'abc"'}}.get(request.param, {})
    return tiny_model_folder(request.param, **options)


@pytest.mark.parametrize("schema", [None, SCHEMA], ids=["free", "schema"])
@pytest.mark.parametrize(
    "engine",
    [
        {"speculate": 1},
        {"speculate": 5, "batch_size": 3},
        {"speculate": 32, "batch_size": 1},
        {"speculate": 4, "prefill_tokens": 3},
        {"speculate": 4, "prefix_cache": False},
        {"speculate": 6, "kv_tokens": 150},
        {"speculate": 4, "forced_text": False},
        {"speculate": "auto"},
    ],
    ids=str,
)
def test_answers_are_the_same_with_and_without(folder: Any, engine: Any, schema: Any) -> None:
    expected, before = plain(folder, schema is not None, engine.get("forced_text", True))
    found, after = run(folder, ROWS, schema, **engine)
    assert found.equals(expected)
    if engine.get("prefix_cache", True) and "kv_tokens" not in engine:
        assert after.usage.computed_tokens == after.distinct_tokens
        assert after.usage.recomputed_tokens == 0
    assert after.usage.completion_tokens == before.usage.completion_tokens
    assert after.usage.forced_tokens == before.usage.forced_tokens
    assert after.usage.accepted_tokens <= after.usage.drafted_tokens
    assert after.usage.decode_steps <= before.usage.decode_steps
    if schema is None and engine["speculate"] != "auto" and "prefill_tokens" not in engine:
        assert after.usage.accepted_tokens > 0


def test_a_text_that_goes_round_takes_a_fraction_of_the_steps(tiny_model_folder: Any) -> None:
    folder = tiny_model_folder("markov")  # after z comes a
    _, before = run(folder, ["a"], sampling={"max_tokens": 200}, speculate="off")
    _, after = run(folder, ["a"], sampling={"max_tokens": 200}, speculate=8)
    assert before.usage.decode_steps == 199
    assert after.usage.decode_steps < 50
    assert after.usage.accepted_tokens > 150
    assert after.usage.recomputed_tokens == 0


@pytest.mark.parametrize("stop", ["c", "fg", "zab", "yza"])
def test_stop_strings_end_an_answer_inside_a_guess(tiny_model_folder: Any, stop: str) -> None:
    folder = tiny_model_folder("markov")
    rows = ["abcdefgh a", "xyzab x", "a"]
    tables = [
        run(folder, rows, sampling={"max_tokens": 80, "stop": (stop,)}, speculate=speculate)[0]
        for speculate in ("off", 8)
    ]
    assert tables[0].equals(tables[1])
    assert set(tables[0].column("finish_reason").to_pylist()) == {"stop"}


def test_an_end_of_sequence_inside_a_guess_ends_the_answer(tiny_model_folder: Any) -> None:
    """The prompt goes on where the answer ends."""
    folder = tiny_model_folder("markov", text="[7,25]")
    rows = ["[7,25], [7,25], [", "[7,25] and"]
    tables = [run(folder, rows, speculate=speculate)[0] for speculate in ("off", 8)]
    assert tables[0].equals(tables[1])


def test_rows_with_penalties_are_not_guessed(tiny_model_folder: Any) -> None:
    folder = tiny_model_folder("markov")
    sampling = {"max_tokens": 60, "repetition_penalty": 1.3}
    expected, _ = run(folder, list(PROMPTS), sampling=sampling, speculate="off")
    found, summary = run(folder, list(PROMPTS), sampling=sampling, speculate=8)
    assert found.equals(expected)
    assert summary.usage.drafted_tokens == 0


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_rows_in_any_engine_answer_the_same(data: st.DataObject, folder: Any) -> None:
    rows = data.draw(
        st.lists(
            st.builds(
                lambda prompt, max_tokens, temperature: {
                    "prompt": prompt,
                    "max_tokens": max_tokens,
                    "temperature": temperature,
                },
                st.text('ab"cz19 ', min_size=1, max_size=20),
                st.integers(1, 40),
                st.sampled_from([0.0, 0.7]),
            ),
            min_size=1,
            max_size=6,
        )
    )
    schema = data.draw(st.sampled_from([None, SCHEMA]))
    expected, _ = run(folder, rows, schema, speculate="off")
    found, _ = run(
        folder,
        rows,
        schema,
        speculate=data.draw(st.integers(1, 12)),
        batch_size=data.draw(st.integers(1, 6)),
        prefill_tokens=data.draw(st.integers(1, 30)),
        kv_tokens=data.draw(st.integers(80, 300)),
    )
    assert found.equals(expected)
