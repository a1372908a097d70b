from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from batchradix.checkpoint.hub import fetch_gguf, fetch_snapshot
from batchradix.errors import ModelError


def failure(kind: type[Exception], message: str = "no") -> Exception:
    """An error of `huggingface_hub` without the response it usually carries."""
    error = kind.__new__(kind)
    error.args = (message,)
    return error


def raising(error: Exception) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (errors.GatedRepoError, "gated.*HF_TOKEN"),
        (errors.RepositoryNotFoundError, "no model o/r on the hub, or it is private"),
        (errors.RevisionNotFoundError, "no revision 'v1'"),
        (errors.LocalEntryNotFoundError, "cannot be reached.*HF_HUB_OFFLINE"),
        (errors.OfflineModeIsEnabled, "cannot be reached"),
        (errors.HfHubHTTPError, "refuses"),
        (ConnectionError, "cannot be reached"),
        (OSError, "cannot be stored"),
    ],
)
def test_every_failure_of_the_hub_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], says: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(failure(kind)))
    with pytest.raises(ModelError, match=says):
        fetch_snapshot("o/r", "v1", print)


def test_only_safetensors_settings_and_templates_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch_snapshot("o/r", None, print) == tmp_path
    from huggingface_hub.utils import filter_repo_objects

    names = ["model-1.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    names += ["chat_template.jinja", "config.json"]
    others = ["pytorch_model.bin", "modeling.py", "original/consolidated.safetensors"]
    others += ["consolidated.safetensors", "model.gguf", "onnx/config.json"]
    kept = filter_repo_objects(
        names + others,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == names


def test_without_the_hub_a_cached_gguf_file_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repo = tmp_path / "models--o--r"
    snapshot = repo / "snapshots" / ("a" * 40)
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "blobs" / "b1").write_bytes(b"GGUF")
    (snapshot / "m-Q8_0.gguf").symlink_to(repo / "blobs" / "b1")
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", raising(failure(errors.OfflineModeIsEnabled))
    )
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda repo, name, **_: str(snapshot / name)
    )
    assert fetch_gguf("o/r", "q8_0", None, print) == snapshot / "m-Q8_0.gguf"
    with pytest.raises(ModelError, match="it has Q8_0"):
        fetch_gguf("o/r", "Q4_0", None, print)
    with pytest.raises(ModelError, match="cannot be reached"):
        fetch_gguf("o/r", "Q8_0", "v2", print)
