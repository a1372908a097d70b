"""``batchradix bench-attention``: what it prints and what it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

MakeTinyModel = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]
WordsOf = Callable[[str], list[str]]
BACKENDS = {"torch", "cpu", "triton", "flashinfer"}
STEPS = ["shared", "prefill", "separate"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHRADIX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def words_of(tiny_model_folder: MakeTinyModel) -> WordsOf:
    def words_of(family: str) -> list[str]:
        folder = str(tiny_model_folder("random", family=family))
        return ["bench-attention", "-m", folder, "--dtype", "float32", "--threads", "1"]

    return words_of


@pytest.fixture
def words(words_of: WordsOf) -> list[str]:
    return words_of("llama")


def test_json_has_a_time_for_every_backend_and_step_or_says_why_not(
    batchradix: Run, words: list[str], cache: Path
) -> None:
    code, output, error = batchradix(*words, "--json")
    assert code == 0, error
    found = json.loads(output)
    assert (found["layers"], found["heads"], found["kv_heads"], found["head_dim"]) == (2, 4, 2, 16)
    assert (found["dtype"], found["threads"]) == ("float32", 1)
    times, reasons = found["ms_per_layer"], found["unmeasured"]
    assert times.keys() | reasons.keys() == BACKENDS
    assert not times.keys() & reasons.keys()
    assert {tuple(steps) for steps in times.values()} == {tuple(STEPS)}
    assert found["auto"] in times
    table = Path(found["table"])
    assert table.is_relative_to(cache)
    assert json.loads(table.read_text())["milliseconds"] == times


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "BACKENDS"), ("deepseek-v3", "MLA_BACKENDS")]
)
def test_a_run_reads_the_table_that_was_kept(
    batchradix: Run, words_of: WordsOf, cache: Path, tmp_path: Path, native: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str,
) -> None:  # fmt: skip
    """What the command measured is turned round, and the run takes the other backend."""
    from batchradix.engine.attention import registry

    native()
    words, backends = words_of(family), getattr(registry, kind)
    path = Path(json.loads(batchradix(*words, "--json")[1])["table"])
    table = json.loads(path.read_text())
    for name, steps in table["milliseconds"].items():
        table["milliseconds"][name] = dict.fromkeys(steps, 1.0 if name == "torch" else 2.0)
    path.write_text(json.dumps(table))
    made: list[str] = []
    monkeypatch.setitem(backends, "torch", _noting(made, backends["torch"]))
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"prompt": "a"}\n')
    run = ["run", jobs, *words[1:], "--max-tokens", 2, "-o"]
    for number, (option, wanted) in enumerate((("auto", 1), ("cpu", 0))):
        made.clear()
        out = tmp_path / f"{number}.jsonl"
        code, _, error = batchradix(*run, out, "--attention", option)
        assert code == 0, error
        assert len(made) == wanted


def _noting(made: list[str], backend: Callable[..., object]) -> Callable[..., object]:
    def make(shape: object) -> object:
        made.append("torch")
        return backend(shape)

    return make


def test_people_get_a_table_with_what_auto_takes(
    batchradix: Run, words: list[str], cache: Path
) -> None:
    code, output, error = batchradix(*words)
    assert code == 0, error
    lines = output.splitlines()
    heads = next(place for place, line in enumerate(lines) if line.startswith("ms a layer"))
    names = lines[heads].split()[3:]
    for step, line in zip(STEPS, lines[heads + 1 :], strict=False):
        assert line.split()[0] == step
        assert all(float(number) >= 0 for number in line.split()[1 : 1 + len(names)])
    [said] = [line for line in lines if line.startswith("      auto  takes ")]
    assert said.split()[-1] in names
    assert "triton, the kernels for GPUs, cannot be used here" in output
    assert "flashinfer, kernels for GPUs, cannot be used here: it needs a GPU of NVIDIA" in output


def test_a_dtype_that_the_c_kernels_lack_leaves_torch(
    batchradix: Run, words: list[str], cache: Path, native: Callable[[], None]
) -> None:
    native()
    code, output, error = batchradix(*words, "--dtype", "float16", "--json")
    assert code == 0, error
    found = json.loads(output)
    assert (list(found["ms_per_layer"]), found["auto"]) == (["torch"], "torch")
    assert "cannot be used here: there is none for --dtype float16" in found["unmeasured"]["cpu"]


def test_a_cache_folder_that_cannot_be_written_is_told_and_the_table_printed(
    batchradix: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHRADIX_CACHE", str(tmp_path / "file" / "cache"))
    code, output, error = batchradix(*words, "--json")
    assert code == 0
    assert json.loads(output)["table"] is None
    assert "the times are not kept" in error
    assert "set BATCHRADIX_CACHE" in error


@pytest.mark.parametrize(
    ("option", "value"), [("--device", "tpu"), ("--dtype", "int4"), ("--threads", "0")]
)
def test_what_a_run_refuses_is_refused(
    batchradix: Run, words: list[str], option: str, value: str
) -> None:
    code, output, error = batchradix(*words, option, value)
    assert (code, output) == (2, "")
    assert option in error


def test_latent_attention_is_measured_and_told_in_its_own_sizes(
    batchradix: Run, words_of: WordsOf, cache: Path
) -> None:
    code, output, error = batchradix(*words_of("deepseek-v3"))
    assert code == 0, error
    assert "2 layers, 4 heads over latents of 32 and rotated keys of 8" in output
    [table] = (cache / "attention").iterdir()
    kept = json.loads(table.read_text())
    assert kept["key"].items() >= {"nope_dim": 16, "v_dim": 24, "kv_lora_rank": 32}.items()
    assert "torch" in kept["milliseconds"]
    assert {tuple(steps) for steps in kept["milliseconds"].values()} == {tuple(STEPS)}


def test_latents_in_8_bits_are_refused_as_a_run_refuses_them(
    batchradix: Run, words_of: WordsOf, cache: Path
) -> None:
    code, output, error = batchradix(*words_of("deepseek-v3"), "--kv-dtype", "fp8")
    assert (code, output) == (2, "")
    assert "--kv-dtype fp8 is not supported for models with latent attention" in error
    assert not cache.exists()
