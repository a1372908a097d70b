"""The options of a job as keywords."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pydantic
import pytest

import batchradix
from batchradix.config import EngineOptions, SamplingOptions
from batchradix.errors import OptionError
from batchradix.integrations.options import PortableJob, job_config, option_names


def test_what_run_takes_for_its_rows_is_taken_here_too() -> None:
    of_the_run = {"input", "output", "format", "id_column", "keep", "limit", "shard", "unnest"}
    of_the_run |= {"restart", "trace", "show_progress"}
    of_the_run |= {"sample", "sample_seed", "price_per_hour", "gold"}
    of_the_run |= {"workers", "ray_address", "worker_timeout_s"}
    parameters = set(inspect.signature(batchradix.run).parameters) - of_the_run
    assert parameters <= set(option_names())


def test_single_settings_win_over_those_of_the_objects() -> None:
    config = job_config(
        {
            "sampling": SamplingOptions(max_tokens=5, temperature=0.5),
            "max_tokens": 7,
            "stop": ["a", "b"],
            "engine": EngineOptions(batch_size=3),
            "device": "cpu",
        }
    )
    assert config.sampling == SamplingOptions(max_tokens=7, temperature=0.5, stop=("a", "b"))
    assert config.engine == EngineOptions(batch_size=3, device="cpu")


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(OptionError, match="no option max_token; did you mean max_tokens"):
        job_config({"max_token": 3})


class Invoice(pydantic.BaseModel):
    vendor: str
    total: float | None


TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"schema": Invoice},
        {"schema": {"enum": ["x", None]}},
        {"schema": True},
        {"fields": "vendor: str, total: float?"},
        {"regex": r"\d{4}"},
        {"grammar": 'root ::= "a" | "b"'},
        {"choices": "red,green"},
    ],
)
def test_a_portable_job_is_restored_to_the_same_answers(answers: dict[str, Any]) -> None:
    config = job_config(answers)
    job = pickle.loads(pickle.dumps(PortableJob.of(config, answers)))  # noqa: S301
    restored = job.restored().schema
    if config.schema is None:
        assert restored is None
    else:
        assert (restored.kind, restored.text) == (config.schema.kind, config.schema.text)
        assert restored.grammar == config.schema.grammar
        assert restored.arrow_type == config.schema.arrow_type


def test_a_portable_job_holds_the_texts_of_files(tmp_path: Any) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "boolean"}')
    job = PortableJob.of(job_config({"schema": str(file)}), {"schema": str(file)})
    file.unlink()
    assert job.restored().schema.text == '{"type":"boolean"}'


def test_functions_travel_with_how_they_may_be_called() -> None:
    options = {"tools": [TOOL], "tool_choice": "add", "tool_format": "json"}
    restored = PortableJob.of(job_config(options), options).restored().schema
    format_ = restored.format_for("m", None)
    assert format_.kind == job_config(options).schema.format_for("m", None).kind
    assert format_.text == job_config(options).schema.format_for("m", None).text
