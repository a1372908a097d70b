"""``batchradix models``: what is listed, found, fetched and checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.hf_api import ModelInfo

from batchradix.settings import Machine

Run = Callable[..., tuple[int, str, str]]
MakeTinyModel = Callable[..., Path]
GIB = 2**30
COMMIT = "c0ffee" * 6 + "c0ff"


@pytest.fixture
def markov(tiny_model_folder: MakeTinyModel) -> Path:
    return tiny_model_folder("markov")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which itself is out of reach; and an empty cache of ours."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("BATCHRADIX_CACHE", str(tmp_path / "ours"))
    real = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: real(folder))
    fetch = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: fetch(*a, cache_dir=folder, **k)
    )
    return folder


def put(hub: Path, repo: str, model: Path) -> Path:
    """The model as the hub's cache holds what was fetched."""
    place = hub / f"models--{repo.replace('/', '--')}"
    shutil.copytree(model, place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return place / "snapshots" / COMMIT


def here(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(
        "batchradix.pipeline.models.machine",
        lambda *_: Machine(num_threads=2, free_memory_bytes=free_bytes, has_bf16=True),
    )


def listed(batchradix: Run) -> dict[str, Any]:
    code, output, error = batchradix("models", "list", "--json")
    assert code == 0, error
    return {entry["name"]: entry for entry in json.loads(output)}


@pytest.mark.parametrize(("free", "fits"), [(40 * GIB, True), (16 * GIB, False)])
def test_the_list_says_which_models_fit_here(
    batchradix: Run, hub: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    here(monkeypatch, free)
    entries = listed(batchradix)
    needs = entries["Qwen/Qwen3-8B"]["needs"]
    # 36 layers, 8 heads of 128, keys and values, 2 bytes each
    assert needs["kv_token_bytes"] == 36 * 8 * 128 * 2 * 2
    assert needs["weight_bytes"] == 2 * needs["num_parameters"]
    assert needs["fits"] is fits
    assert entries["meta-llama/Llama-3.3-70B-Instruct"]["needs"]["kv_tokens"] == 0
    assert entries["smollm2-135m"]["path"] is None
    shown = batchradix("models")[1]
    line = next(line for line in shown.splitlines() if "Qwen/Qwen3-8B" in line)
    assert "too large here" in line if not fits else "KV tokens" in line


def test_the_list_shows_what_the_cache_of_the_hub_holds(
    batchradix: Run, hub: Path, markov: Path
) -> None:
    there = put(hub, "Qwen/Qwen3-0.6B", markov)
    broken = put(hub, "some/broken", markov)
    (broken / "config.json").write_text('{"model_type": "bert"}')
    entries = listed(batchradix)
    fetched = entries["Qwen/Qwen3-0.6B"]  # known too, and listed once
    assert (fetched["place"], fetched["path"]) == ("cache", str(there))
    assert entries["some/broken"]["needs"] is None
    assert "bert" in entries["some/broken"]["problem"]
    assert "cannot be run: " in batchradix("models")[1]


def test_path_finds_what_is_here_and_fetches_nothing(
    batchradix: Run, hub: Path, markov: Path
) -> None:
    there = put(hub, "some/model", markov)
    assert batchradix("models", "path", "some/model")[1] == f"{there}\n"
    assert batchradix("models", "path", f"some/model@{COMMIT}")[1] == f"{there}\n"
    assert batchradix("models", "path", markov)[1] == f"{markov}\n"
    for name in ("smollm2-135m", "some/other", "some/other:Q4_K_M"):
        code, output, error = batchradix("models", "path", name)
        assert (code, output) == (2, "")
        assert "has not been fetched to this machine" in error
        assert "batchradix models pull" in error


def test_path_names_the_gguf_file_of_a_quantisation(
    batchradix: Run, hub: Path, markov: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(hub, "some/model", markov)
    file = folder / "model-q4_k_m.gguf"
    file.write_bytes(b"")
    fetch = huggingface_hub.hf_hub_download
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *a, **k: fetch(*a, cache_dir=hub, **k)
    )
    assert batchradix("models", "path", "some/model:Q4_K_M")[1] == f"{file}\n"
    code, _, error = batchradix("models", "path", "some/model:Q8_0")
    assert code == 2
    assert "it has Q4_K_M" in error


def test_pull_prints_where_the_model_lies(batchradix: Run, hub: Path, markov: Path) -> None:
    there = put(hub, "some/model", markov)
    code, output, error = batchradix("models", "pull", "some/model")
    assert (code, output) == (0, f"{there}\n")
    assert "looking for some/model" in error
    assert batchradix("models", "pull", "some/other")[0] == 2


def test_check_tells_what_a_model_is_without_its_weights(batchradix: Run, markov: Path) -> None:
    code, output, error = batchradix("models", "check", markov, "--dtype", "float32", "--json")
    assert code == 0, error
    found = json.loads(output)
    config = json.loads((markov / "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["head_dim"]
    assert found["kv_token_bytes"] == config["num_hidden_layers"] * heads * size * 2 * 4
    assert found["context_length"] == config["max_position_embeddings"]
    assert found["stored_bytes"] == (markov / "model.safetensors").stat().st_size
    assert (found["dtype"], found["fits"], found["problems"]) == ("float32", True, [])
    assert found["has_chat_template"]
    halved = json.loads(batchradix("models", "check", markov, "--kv-dtype", "fp8", "--json")[1])
    assert 4 * halved["kv_token_bytes"] == found["kv_token_bytes"]
    assert "LlamaForCausalLM" in batchradix("models", "check", markov)[1]


def test_check_says_what_is_amiss(
    batchradix: Run, markov: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(markov, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    here(monkeypatch, 1000)
    code, output, _ = batchradix("models", "check", folder)
    assert code == 1
    assert "it does not fit" in output
    assert "no chat template" in output
    assert batchradix("models", "check", folder, "--dtype", "int3")[0] == 2
    code, _, error = batchradix("models", "check", tmp_path / "nowhere" / "at" / "all")
    assert code == 2
    assert "there is no file or folder" in error


@pytest.mark.parametrize("has_weights", [True, False])
def test_check_fetches_of_the_hub_what_is_no_weight(
    batchradix: Run,
    hub: Path,
    markov: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_weights: bool,
) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(markov, snapshot)
    (snapshot / "model.safetensors").unlink()
    files = [{"rfilename": file.name, "size": file.stat().st_size} for file in snapshot.iterdir()]
    files.append({"rfilename": "original/consolidated.safetensors", "size": 9})
    name = "model.safetensors" if has_weights else "pytorch_model.bin"
    files.append({"rfilename": name, "size": 7 * GIB})
    asked: list[Any] = []

    def download(repo: str, *, allow_patterns: list[str], local_files_only: bool, **_: Any) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("no")
        asked.extend(allow_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "model_info",
        lambda *_, **__: ModelInfo(id="some/model", siblings=files),
    )
    code, output, error = batchradix("models", "check", "some/model", "--json")
    assert asked == ["*.json", "*.jinja"]
    if has_weights:
        found = json.loads(output)
        assert (code, found["is_fetched"], found["stored_bytes"]) == (0, False, 7 * GIB)
    else:
        assert code == 2
        assert "pickles" in error


def test_check_of_a_model_that_is_nowhere_is_one_sentence(batchradix: Run, hub: Path) -> None:
    code, output, error = batchradix("models", "check", "some/model")
    assert (code, output) == (2, "")
    assert "cannot be reached" in error
    assert len(error.strip().splitlines()) <= 2
