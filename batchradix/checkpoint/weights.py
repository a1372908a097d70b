"""The weight files of a model folder: found and checked, but not read.

Format: safetensors (an 8-byte little-endian header length, a JSON header, the data), alone or
sharded with ``model.safetensors.index.json``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from batchradix.checkpoint.json_file import read_json
from batchradix.errors import ModelError

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_HEADER_BYTES = 100 * 2**20  # the limit of the format
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_QUANTISED = ("F8_E4M3", "I8", "I32", "I64")


def find_weights(folder: Path, *, quantised: bool = False, mxfp4: bool = False) -> tuple[Path, ...]:
    """The safetensors files of a model folder, sorted, each checked against its own header.
    ``quantised``: matrices may be in FP8 or integers, as `ModelConfig.stored` says; ``mxfp4``:
    there are bytes in ``…_blocks`` and ``…_scales`` (`ModelConfig.mxfp4`).

    Raises `ModelError` that names the file which is missing, cut short or malformed, or says
    that only pickles are there.
    """
    index = folder / INDEX_NAME
    if (folder / _SINGLE_NAME).is_file():
        files: tuple[Path, ...] = (folder / _SINGLE_NAME,)
        expected: Mapping[str, str] = {}
    elif index.is_file():
        expected = _weight_map(index)
        files = tuple(folder / name for name in sorted(set(expected.values())))
        for file in files:
            if not file.is_file():
                raise ModelError(
                    f"{file} is missing, though {INDEX_NAME} names it; fetch the model again"
                )
    else:
        files = tuple(sorted(folder.glob("*.safetensors")))
        expected = {}
        if not files:
            raise _no_weights(folder)
    headers = {
        file.name: read_safetensors_header(file, quantised=quantised, mxfp4=mxfp4) for file in files
    }
    for tensor, name in expected.items():
        if tensor not in headers[name]:
            raise ModelError(
                f"{folder / name} has no tensor {tensor}, though {INDEX_NAME} says so; "
                f"fetch the model again"
            )
    return files


def _no_weights(folder: Path) -> ModelError:
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        return ModelError(
            f"{folder} holds its weights only as pickles ({pickles[0]}), which can run code and "
            f"are never opened; convert them to safetensors or use another copy of the model"
        )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return ModelError(f"{folder} holds no safetensors; name the file {ggufs[0]} itself")
    return ModelError(f"{folder} holds no *.safetensors weights; fetch the model again")


def _weight_map(index: Path) -> Mapping[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; fetch the model again")
    for name in weight_map.values():
        if not isinstance(name, str) or len(PurePosixPath(name).parts) != 1 or name == "..":
            raise ModelError(f"{index} names {name!r}, which is not a file of the folder")
    return weight_map


def read_safetensors_header(
    file: Path, *, quantised: bool = False, mxfp4: bool = False
) -> Mapping[str, Mapping[str, Any]]:
    """Tensor name to its entry (``dtype``, ``shape``, ``data_offsets``), without metadata.

    Raises `ModelError` when the file is cut short, or holds integer (quantised) matrices.
    """
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else num_bytes
            if length + 8 > num_bytes or length > _MAX_HEADER_BYTES:
                raise _damaged(file, f"its header does not fit into its {num_bytes:,} bytes")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    try:
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        matrices = [(n, str(e["dtype"])) for n, e in header.items() if len(e["shape"]) >= 2]
        missing = num_bytes - (8 + length + end)
    except (TypeError, KeyError, IndexError) as error:
        raise _damaged(file, "its header lacks data_offsets, dtype or shape") from error
    if missing:
        raise _damaged(
            file, f"it has {num_bytes:,} bytes, but its header speaks of {8 + length + end:,}"
        )
    for name, dtype in matrices:
        is_mxfp4 = mxfp4 and dtype == "U8" and name.endswith(("_blocks", "_scales"))
        if dtype not in _FLOATS and not (quantised and dtype in _QUANTISED) and not is_mxfp4:
            raise ModelError(
                f"{file}: tensor {name} is stored as {dtype}, of which the config says "
                f"nothing; use the model's unquantised weights or a GGUF file of it"
            )
    return header


def _damaged(file: Path, what: str) -> ModelError:
    return ModelError(f"{file} is damaged: {what}; fetch the file again")
