from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from batchradix.checkpoint.weights import find_weights
from batchradix.errors import ModelError


def write(path: Path, **tensors: np.ndarray) -> Path:
    save_file(tensors or {"a": np.zeros((2, 3), dtype=np.float32)}, path)
    return path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_is_found(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors")
    write(tmp_path / "consolidated.safetensors")
    assert find_weights(tmp_path) == (file,)


def test_shards_are_found_through_the_index_and_others_left_alone(tmp_path: Path) -> None:
    one = write(tmp_path / "model-1.safetensors", a=np.zeros(2, dtype=np.float16))
    two = write(tmp_path / "model-2.safetensors", b=np.zeros(2, dtype=np.float16))
    write(tmp_path / "other.safetensors")
    write_index(tmp_path, {"b": two.name, "a": one.name})
    assert find_weights(tmp_path) == (one, two)


def test_files_of_another_name_serve_where_there_is_no_index(tmp_path: Path) -> None:
    file = write(tmp_path / "weights.safetensors")
    assert find_weights(tmp_path) == (file,)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "model-1.safetensors"})
    with pytest.raises(ModelError, match=r"model-1\.safetensors is missing"):
        find_weights(tmp_path)


def test_a_shard_must_hold_what_the_index_says(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors")
    write_index(tmp_path, {"b": "model-1.safetensors"})
    with pytest.raises(ModelError, match="no tensor b"):
        find_weights(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "..", 3])
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, name: object) -> None:
    write_index(tmp_path, {"a": name})
    with pytest.raises(ModelError, match="not a file of the folder"):
        find_weights(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_malformed_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json"):
        find_weights(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 30, -1])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    file = write(tmp_path / "model.safetensors")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        find_weights(tmp_path)


def test_a_file_that_goes_on_after_its_tensors_is_damaged(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors")
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(ModelError, match="damaged"):
        find_weights(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        *(b"[]", b"not", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}'),
        pytest.param(b"[" * 100_000, id="deep"),
        *(b'{"a": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, %s]}}' % end
          for end in (b"null", b'"4"', b"[4]")),
    ],
)  # fmt: skip
def test_a_garbled_header_is_named(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="damaged"):
        find_weights(tmp_path)


def test_a_dtype_that_is_no_name_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors")
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'["x"]'))
    with pytest.raises(ModelError, match=r"tensor a is stored as \['x'\]"):
        find_weights(tmp_path)


def test_quantised_matrices_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", a=np.zeros((2, 2), dtype=np.int8))
    with pytest.raises(ModelError, match=r"I8.*GGUF"):
        find_weights(tmp_path)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(ModelError, match=r"pickles \(pytorch_model\.bin\).*safetensors"):
        find_weights(tmp_path)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        find_weights(tmp_path)
