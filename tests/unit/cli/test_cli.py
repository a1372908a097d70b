"""The command line: its options, its exit codes, and what it prints where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer

from batchradix.cli.main import app
from batchradix.cli.options import flag, parse_share, parse_size, text_or_file
from batchradix.config import EngineOptions, OutputOptions, PromptOptions, SamplingOptions
from batchradix.errors import InputError, OptionError

MakeTinyModel = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]

PROMPT_OPTIONS = {
    "--model", "-m", "--schema", "--template", "--chat", "--instruction", "--column", "--system",
    "--id-column", "--null", "--date", "--fields", "--regex", "--grammar", "--choices",
    "--reorder-columns", "--sort-passages",
    "--tools", "--tool-choice", "--no-parallel-tool-calls", "--tool-format",
    "--questions", "--overflow", "--chunk-tokens", "--chunk-overlap", "--max-tokens",
    "--chat-template", "--chat-template-kwargs", "--thinking", "--thinking-tokens",
}  # fmt: skip
OPTIONS = {
    "run": PROMPT_OPTIONS | {
        "--schema-column", "--retries", "--shard", "--combine", "--lora",
        "--sample", "--sample-seed", "--price-per-hour", "--gold",
        "--workers", "--ray-address", "--worker-timeout",
        "--output", "-o", "--format", "--keep", "--limit", "--temperature",
        "--top-p", "--top-k", "--min-p", "--repetition-penalty", "--presence-penalty",
        "--frequency-penalty", "--seed", "--stop", "--dtype", "--quantize", "--device",
        "--attention", "--kv-dtype",
        "--batch-size", "--prefill-tokens", "--kv-tokens", "--kv-memory", "--plan-memory",
        "--kv-store", "--kv-store-size", "--kv-disk", "--kv-host-memory", "--threads",
        "--no-prefix-cache", "--no-forced-text", "--no-repetition-guard",
        "--probabilities", "--choose", "--speculate", "--deterministic",
        "--overlap", "--cuda-graphs",
        "--grammar-timeout", "--grammar-memory", "--unnest", "--keep-truncated",
        "--restart", "--resume", "--reuse", "--retry", "--errors",
        "--allow-failures", "--abort-after-failures", "--deadline", "--row-timeout",
        "--json", "--quiet", "-q", "--log-format", "--metrics", "--on-finish", "--trace",
        "--dry-run",
    },
    "plan": PROMPT_OPTIONS | {"--limit", "--json", "--schema-column", "--shards", "--report"},
    "merge": {"--allow-failures", "--json"},
    "preview": PROMPT_OPTIONS | {"--row", "--id", "--ids", "--schema-column", "--json"},
    "show": {
        "--status", "--id", "--limit", "-n", "--columns", "--wrong", "--gold", "--input", "--json",
    },
    "diff": {"--columns", "--ignore", "--tolerance", "--limit", "-n", "--json"},
    "models": {"--json"},
    "models list": {"--json"},
    "models pull": set(),
    "models path": set(),
    "models check": {"--dtype", "--kv-dtype", "--device", "--json"},
    "bench-attention": {
        "--model", "-m", "--dtype", "--kv-dtype", "--device", "--threads", "--json",
    },
    "history": {"--limit", "-n", "--json"},
    "report": {"--output", "-o", "--json"},
}  # fmt: skip
OPTIONS["check"] = OPTIONS["run"] - {"--dry-run"}


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"id": "p", "prompt": "a"}\n{"id": "q", "prompt": "b"}\n')
    return path


def each_command(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield f"{before}{name}", command
        yield from each_command(command, f"{name} ") if hasattr(command, "commands") else ()


def test_the_options_are_those_that_are_documented() -> None:
    """A change here is a change for every user: it belongs in the changelog."""
    group: Any = typer.main.get_command(app)
    found = {
        name: {
            spelling
            for parameter in command.params
            if parameter.param_type_name == "option"
            for spelling in (*parameter.opts, *parameter.secondary_opts)
        }
        - {"--help", "-h"}
        for name, command in each_command(group)
    }
    assert found == OPTIONS


def test_a_run_writes_the_table_and_ends_with_a_line_for_scripts(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.arrow"
    code, output, error = batchradix("run", jobs, "-m", markov, "--max-tokens", 3, "-o", out)
    assert code == 0, error
    assert output.splitlines()[-1].startswith("summary rows=2 ok=2 failed=0 truncated=0 seconds=")
    with pa.memory_map(str(out)) as file:
        table = pa.ipc.open_file(file).read_all()
        assert table["text"].to_pylist() == ["bcd", "cde"]


def test_a_store_warms_the_next_run_and_shows_in_its_numbers(
    batchradix: Run, markov: str, tmp_path: Path
) -> None:
    opening = "Say the next letter. " * 5
    for night, loaded in ((1, 0), (2, 96)):
        path = tmp_path / f"{night}.jsonl"
        lines = [json.dumps({"prompt": f"{opening}{night} {letter}"}) for letter in "abc"]
        path.write_text("\n".join(lines))
        code, output, error = batchradix(
            "run", path, "-m", markov, "--max-tokens", 3, "-o", tmp_path / f"{night}.arrow",
            "--kv-store", tmp_path / "store", "--kv-store-size", "10MiB", "--json",
        )  # fmt: skip
        assert code == 0, error
        summary = json.loads(output)
        assert summary["loaded_tokens"] == loaded
        assert summary["computed_tokens"] + loaded == summary["distinct_tokens"]
    code, _, error = batchradix("run", path, "-m", markov, "--kv-store-size", "1MiB")
    assert (code, "name its folder with --kv-store" in error) == (2, True)
    words = ("run", path, "-m", markov, "--kv-store", tmp_path / "store")
    code, _, error = batchradix(*words, "--no-prefix-cache")
    assert (code, "--kv-store needs the prefix cache" in error) == (2, True)


def test_a_pool_that_is_too_small_may_use_the_disk_and_not_the_memory_that_it_is_in(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    words = ("run", jobs, "-m", markov, "--max-tokens", 3, "-o", tmp_path / "out.jsonl")
    code, output, error = batchradix(
        *words, "--kv-disk", "1MiB", "--kv-host-memory", "off", "--json"
    )
    assert code == 0, error
    assert json.loads(output)["reloaded_tokens"] == 0
    for refused, sentence in (
        (
            ("--kv-host-memory", "1GiB"),
            "--kv-host-memory is for a GPU, whose own memory is short; on the CPU keys and values "
            "are in host memory as it is, so give --kv-memory more, or --kv-disk",
        ),
        (("--kv-disk", "much"), "--kv-disk must be a size such as 4GiB or 500MB"),
    ):
        code, _, error = batchradix(*words, "--restart", *refused)
        assert code == 2
        assert sentence in error


def test_probabilities_are_written_where_the_answer_is_out_of_a_few_and_refused_elsewhere(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = ("run", jobs, "-m", markov, "-o", out, "--probabilities")
    schema = ("--schema", '{"enum": ["bc", "x"]}')
    code, _, error = batchradix(*words, *schema, "--choose", "joint")
    assert code == 0, error
    first = json.loads(out.read_text().splitlines()[0])
    assert [entry["choice"] for entry in first["probabilities"]] == ["bc", "x"]
    assert abs(sum(entry["probability"] for entry in first["probabilities"]) - 1) < 1e-9
    for refused, message in (
        ((), "probabilities needs answers out of a few; give a schema"),
        (("--schema", '{"type": "string"}'), "this one is more open"),
        ((*schema, "--choose", "best"), "choose must be walk or joint"),
        (
            (*schema, "--choose", "joint", "--temperature", "1"),
            "draws nothing, so --temperature must be 0",
        ),
    ):
        code, _, error = batchradix(*words, "--restart", *refused)
        assert code == 2
        assert message in " ".join(error.split())


def test_json_prints_one_object_and_nothing_else_on_standard_output(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    code, output, _ = batchradix(
        "run", jobs, "-m", markov, "--max-tokens", 3, "-o", tmp_path / "o.csv", "--json"
    )
    assert code == 0
    summary = json.loads(output)
    assert (summary["rows"], summary["ok"]) == (2, 2)
    assert summary["computed_tokens"] == summary["distinct_tokens"] == 3


def test_failed_rows_exit_with_1_unless_they_are_allowed_for(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    jobs.write_text(jobs.read_text() + '{"id": "r"}\n')
    words = ("run", jobs, "-m", markov, "--max-tokens", 2)
    assert batchradix(*words, "-o", tmp_path / "1.jsonl")[0] == 1
    allowed = (*words, "-o", tmp_path / "2.jsonl", "--allow-failures")
    assert batchradix(*allowed, "10%")[0] == 1
    assert batchradix(*allowed, "50%")[0] == 0


def test_no_answered_row_exits_with_3(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    jobs.write_text('{"id": "r"}\n{"id": "s", "prompt": null}\n')
    code, output, _ = batchradix("run", jobs, "-m", markov, "-o", tmp_path / "o.jsonl")
    assert code == 3
    assert "rows=2 ok=0 failed=2" in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nonsense"], "No such option"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--kv-tokens", "0"], "--kv-tokens must be"),
        (["--schema", "missing.json"], "missing.json does not exist"),
        (["--fields", "a: text"], "at character 4"),
        (["--regex", "(?=a)"], "a lookaround"),
        (["--grammar", "missing.gbnf"], "missing.gbnf does not exist"),
        (["--schema-column", "nope"], "no column 'nope' to read schemas from"),
        (["--choices", "a,a"], "'a' occurs twice"),
        (["--regex", "a", "--fields", "a: str"], "--fields and --regex exclude each other"),
        (["--tools", "missing.json"], "missing.json does not exist"),
        (["--tools", '[{"name": "f"}]'], "give --tool-format hermes, llama3, mistral or json"),
        (["--tools", '[{"name": "f"}]', "--tool-choice", "g"], "--tool-choice must be auto"),
        (["--tools", '[{"name": "f"}]', "--tool-format", "xml"], "--tool-format must be hermes"),
        (["--tool-choice", "required"], "--tool-choice needs --tools"),
        (["--no-parallel-tool-calls"], "--no-parallel-tool-calls needs --tools"),
        (["--tools", '[{"name": "f"}]', "--regex", "a"], "--regex and --tools exclude each other"),
        (["--template", "{{ nope }}"], "nope"),
        (["--template", "missing.txt"], "there is no file missing.txt"),
        (["--model", "./missing"], "missing"),
        (["--lora", "missing"], "missing holds no adapter_config.json"),
        (["-o", "out.xyz"], ".xyz"),
        (["-o", "no/such/folder/out.arrow"], "no/such/folder"),
        (["--keep", "nope"], "nope"),
        (["--kv-memory", "lots"], "--kv-memory must be a size"),
        (["--allow-failures", "some"], "--allow-failures must be a share"),
        (["--restart", "--resume"], "exclude each other"),
        (["--unnest"], "unnest"),
    ],
)
def test_bad_usage_exits_with_2_and_one_sentence_before_a_model_loads(
    batchradix: Run,
    markov: str,
    jobs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, error = batchradix("run", jobs, "-m", markov, *words)
    assert code == 2
    assert sentence in error
    assert output == ""
    assert "Traceback" not in error
    assert "loading" not in error
    assert not (tmp_path / "jobs.answers.arrow").exists()


def test_an_output_that_another_run_holds_exits_with_4(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    from batchradix.sink.folder import acquire

    out = tmp_path / "out.arrow"
    with acquire(out):
        code, _, error = batchradix("run", jobs, "-m", markov, "-o", out)
    assert code == 4
    assert "held by process" in error


def test_plan_and_preview_answer_without_weights(batchradix: Run, markov: str, jobs: Path) -> None:
    code, output, _ = batchradix("plan", jobs, "-m", markov, "--json")
    assert code == 0
    plan = json.loads(output)
    assert (plan["rows"], plan["prompt_tokens"], plan["distinct_tokens"]) == (2, 4, 3)
    assert "25.0%" in batchradix("plan", jobs, "-m", markov)[1]
    assert batchradix("preview", jobs, "-m", markov, "--row", "q")[1] == "⟦<bos>⟧b\n"
    assert batchradix("preview", jobs, "-m", markov, "--row", "z")[0] == 2


def test_naming_no_model_warns_that_the_default_is_a_demonstration(
    batchradix: Run, jobs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchradix.config.DEFAULT_MODEL", "unused")
    _, _, error = batchradix("run", jobs, "--schema", "missing.json")
    assert "demonstration model" in error


def test_help_and_version_need_no_input(batchradix: Run) -> None:
    from batchradix import __version__

    assert batchradix("--version")[1] == f"batchradix {__version__}\n"
    code, output, _ = batchradix("--help")
    assert code == 0
    assert all(name in output for name in OPTIONS if " " not in name)


def test_help_shows_what_is_in_brackets(batchradix: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, said, _ = batchradix("run", "--help")
    assert "owner/repo[@revision]" in said


def test_the_module_runs_as_the_command_does() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "batchradix", "--version"], capture_output=True, check=True
    )
    assert found.stdout.startswith(b"batchradix ")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("5", 5), ("4GiB", 2**32), ("4g", 4 * 10**9), ("1.5 MB", 1_500_000), ("2Ki", 2048)],
)
def test_sizes_are_read_with_their_units(text: str, size_bytes: int) -> None:
    assert parse_size(text, "--kv-memory") == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "0", "1e30", "nan", "4 gigs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_size(text, "--kv-memory")


def test_shares_are_read_as_percent_or_number() -> None:
    assert parse_share("0.1%", "--x") == pytest.approx(0.001)
    assert parse_share("0.25", "--x") == 0.25


def test_an_option_is_a_file_where_there_is_one_and_text_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"\xef\xbb\xbfline {{ a }}\n")
    assert text_or_file(str(path), "--template") == "line {{ a }}"
    assert text_or_file("Say {{ a }}.", "--template") == "Say {{ a }}."
    assert text_or_file("x" * 5000, "--template") == "x" * 5000
    assert text_or_file(None, "--template") is None
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        text_or_file(str(path), "--template")


@pytest.mark.parametrize(
    ("sentence", "in_python", "shown"),
    [
        ("`num_threads` must be 1", "num_threads must be 1", "--threads must be 1"),
        ("lower `batch_size` or `kv_memory_bytes` and go on",
         "lower batch_size or kv_memory_bytes and go on",
         "lower --batch-size or --kv-memory and go on"),
        ("columns occur twice: max_tokens; rename",) * 3,
        ("jobs/top_k.toml: top_k must be",) * 3,
    ],
)  # fmt: skip
def test_errors_name_options_as_whoever_sees_them_spells_them(
    sentence: str, in_python: str, shown: str
) -> None:
    error = OptionError(sentence)
    assert str(error) == in_python
    assert error.spelt(flag) == shown


@pytest.mark.parametrize("kind", [SamplingOptions, PromptOptions, EngineOptions, OutputOptions])
def test_every_option_of_the_configuration_has_its_flag(kind: type[Any]) -> None:
    assert {flag(field.name) for field in fields(kind)} <= OPTIONS["run"]


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    command = [sys.executable, "-m", "batchradix", "models"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_summary_that_nothing_takes_is_told_and_the_table_stands(
    markov: str, jobs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = ["run", str(jobs), "-m", markov, "--max-tokens", "2", "-o", str(out)]
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "batchradix", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert len(out.read_text().splitlines()) == 2
    assert "the rows are done, but standard output did not take the summary" in done.stderr
    assert "No space left" in done.stderr


@pytest.mark.parametrize("words", [["models"], ["models", "--json"]])
def test_a_full_standard_output_is_told_in_one_sentence(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "batchradix", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == "error: standard output cannot be used: No space left on device\n"


def test_an_input_may_have_a_name_that_is_no_utf_8_and_an_output_may_not(
    batchradix: Run, markov: str, tmp_path: Path
) -> None:
    jobs = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    jobs.write_text('{"prompt": "a"}\n')
    words = ("-m", markov, "--max-tokens", 2, "--dtype", "float32", "--threads", 1)
    code, _, _ = batchradix("run", jobs, "-o", tmp_path / "o.arrow", *words)
    assert code == 0
    with pa.OSFile(str(tmp_path / "o.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table["text"].to_pylist() == ["bc"]
    assert table.schema.metadata[b"batchradix.input"].endswith(b"caf\\udce9.jsonl")
    code, _, said = batchradix("run", jobs, "-o", tmp_path / os.fsdecode(b"\xe9.arrow"), *words)
    assert code == 2
    assert "not UTF-8; choose another name" in said


def test_an_output_in_a_folder_that_is_gone_exits_with_2(
    batchradix: Run, jobs: Path, markov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, said = batchradix("run", jobs, "-m", markov, "-o", "o.arrow")
    assert code == 2
    assert said.startswith(
        "error: the output o.arrow cannot be written: the current folder is gone"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_first_step_stops_at_once(
    batchradix: Run, jobs: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def reads_for_long(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("it went on")

    monkeypatch.setattr("batchradix.pipeline.run", reads_for_long)
    assert batchradix("run", jobs, "-m", "any", "-o", "o.arrow") == (code, "", "stopped\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_after_the_first_step_is_asked_for_and_a_second_stops_at_once(
    batchradix: Run, jobs: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def steps(*args: Any, stop_requested: Callable[[], int | None], **kwargs: Any) -> None:
        assert stop_requested() is None
        os.kill(os.getpid(), number)
        assert stop_requested() == number
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr("batchradix.pipeline.run", steps)
    assert batchradix("run", jobs, "-m", "any", "-o", "o.arrow") == (code, "", "stopped\n")
