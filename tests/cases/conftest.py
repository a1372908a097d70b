"""Jobs that went wrong elsewhere, run through the command line as a user would.

A folder of data beside the tests is one such job; `enter` makes a copy of it the working folder.
Tests of jobs whose data are made name the case in their docstring.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TAG_SCHEMA = {
    "type": "object",
    "properties": {"tag": {"const": "k"}},
    "required": ["tag"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        """The object that ``--json`` printed."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


Run = Callable[..., Ran]


def read_table(path: str | Path) -> pa.Table:
    """A finished Arrow or Parquet table."""
    if Path(path).suffix == ".parquet":
        return pq.read_table(path)
    with pa.OSFile(str(path), "rb") as file:
        return pa.ipc.open_file(file).read_all()


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a finished table; of JSON lines, each strictly valid JSON."""
    if Path(path).suffix != ".jsonl":
        rows: list[dict[str, Any]] = read_table(path).to_pylist()
        return rows

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with open(path, encoding="utf-8", newline="\n") as lines:
        return [json.loads(line, parse_constant=refuse) for line in lines]


def column(path: str | Path, name: str) -> list[Any]:
    """One column of a finished table."""
    return [row[name] for row in read_rows(path)]


def write_jsonl(path: str | Path, rows: Iterable[Mapping[str, Any] | str | bytes]) -> str:
    """Writes objects as JSON lines; text and bytes stand as they are. Returns the path."""
    with open(path, "wb") as file:
        for row in rows:
            if isinstance(row, Mapping):
                row = json.dumps(row, ensure_ascii=False)
            file.write((row.encode() if isinstance(row, str) else row) + b"\n")
    return str(path)


def write_json(path: str | Path, value: Any) -> str:
    """Writes a value as JSON, non-ASCII kept. Returns the path."""
    Path(path).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return str(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working folder; `TAG_SCHEMA` lies in it as tag.json."""
    monkeypatch.chdir(tmp_path)
    write_json("tag.json", TAG_SCHEMA)
    return tmp_path


@pytest.fixture
def enter(folder: Path) -> Callable[[str], Path]:
    """Copies a case's data into the working folder."""

    def copy(name: str) -> Path:
        shutil.copytree(HERE / name, folder, dirs_exist_ok=True)
        return folder

    return copy


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, on one thread: ``cli("run", "jobs.jsonl", ...)``."""
    from batchradix.cli.main import main

    def run(*argv: object, stdin: bytes | None = None) -> Ran:
        words = [str(word) for word in argv]
        if words[0] == "run":
            words += ["--threads", "1"]
        monkeypatch.setattr(sys, "argv", ["batchradix", *words])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(code=ended.value.code, out=said.out, err=said.err)

    return run


@pytest.fixture
def prompt_of(cli: Run) -> Callable[..., str]:
    """The prompt of a row as ``preview`` prints it; AssertionError where it has none."""

    def preview(*argv: object) -> str:
        ran = cli("preview", *argv)
        assert ran.code == 0, ran.err
        return ran.out.removesuffix("\n")

    return preview


class Processes:
    """Runs commands as processes of their own; all are gone after the test."""

    command = (sys.executable, "-W", "ignore", "-m", "batchradix")

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    @property
    def environ(self) -> dict[str, str]:
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        return {**os.environ, "PYTHONPATH": paths}

    def start(self, *argv: object, code: str | None = None, **options: Any) -> Any:
        """A `subprocess.Popen`; ``code`` runs as Python before the command."""
        command = [*self.command, *map(str, argv)]
        if code is not None:
            start = "\nfrom batchradix.cli.main import main\nmain()"
            command = [*self.command[:-2], "-c", code + start, *map(str, argv)]
        settings: dict[str, Any] = {
            "env": self.environ,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        process = subprocess.Popen(command, **(settings | options))
        self._started.append(process)
        return process

    def run(self, *argv: object, code: str | None = None, **options: Any) -> Ran:
        """Waits for the end."""
        process = self.start(*argv, code=code, **options)
        out, err = process.communicate(timeout=120)
        return Ran(code=process.returncode, out=out or "", err=err or "")

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def processes() -> Iterable[Processes]:
    started = Processes()
    yield started
    started.close()


@pytest.fixture(scope="session")
def oracle_model(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Any) -> Path:
    """The random Llama whose answers stand in the expected.jsonl of the engine cases.

    Two layers, width 256, context 1024; every matrix drawn anew, in the order of the model's
    parameters, after seed 7; only printable ASCII can win. Weights must come out bit by bit
    as when the answers were made: a first test checks them against these.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    pad, bos, eos, end = 256, 257, 258, 263
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264,
            hidden_size=256,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            rms_norm_eps=1e-6,
            bos_token_id=bos,
            eos_token_id=[eos, end],
            pad_token_id=pad,
            dtype="float32",
        )
    ).float()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, 1.0 if "embed" in name else 0.14)
    silent = [*range(32), *range(127, 264)]
    model.lm_head.weight.data[silent] = 0
    model.generation_config = GenerationConfig(
        bos_token_id=bos, eos_token_id=[eos, end], pad_token_id=pad
    )
    folder = tmp_path_factory.mktemp("oracle-model")
    shutil.copytree(tiny_model_folder("random", context_length=1024), folder, dirs_exist_ok=True)
    model.eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def const(tiny_model_folder: Any) -> Callable[..., Path]:
    """The model that prefers these bytes, whatever the prompt."""

    def make(prefer: str = "a", **options: Any) -> Path:
        made: Path = tiny_model_folder("const", prefer=prefer, **options)
        return made

    return make


@pytest.fixture(scope="session")
def markov(tiny_model_folder: Any) -> Path:
    """The model that goes on with the alphabet and with the digits."""
    made: Path = tiny_model_folder("markov")
    return made


@pytest.fixture(scope="session")
def files() -> Any:
    """This module, for its readers and writers of files."""
    return sys.modules[__name__]
