"""The model as peers read it: the same weights, rounded to bfloat16, in their formats.

Both are made once, from the file that batchradix reads, and kept beside the environments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchradix.checkpoint.checkpoint import Checkpoint

DTYPE = "bfloat16"


def peer_model(folder: Path, checkpoint: Checkpoint, peer: str) -> Path:
    """What ``peer`` is given: a folder of safetensors, for llama.cpp a GGUF file."""
    stem = f"{checkpoint.name.rpartition('/')[2]}-{checkpoint.content_hash[:12]}-{DTYPE}"
    if peer == "llama.cpp":
        if checkpoint.format != "gguf":
            raise SystemExit("llama.cpp needs a model that is a GGUF file; choose another --model")
        place, write = folder / "models" / f"{stem}.gguf", _write_gguf
    else:
        place, write = folder / "models" / stem, _write_folder
    if not place.exists():
        scratch = place.with_name(f"{place.name}.{os.getpid()}")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing {place.name} for {peer}", flush=True)
        write(checkpoint, scratch)
        os.replace(scratch, place)
    return place


def load_transformers(checkpoint: Checkpoint, dtype: str) -> tuple[Any, Any]:
    """The tokenizer and the model as transformers has them, every weight a plain tensor."""
    import transformers

    source, options = _place(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    return tokenizer, load_peer(checkpoint, dtype)


def load_peer(checkpoint: Checkpoint, dtype: str, **options: Any) -> Any:
    """The model alone; ``options`` go to ``from_pretrained``."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source, named = _place(checkpoint)
    if named and hasattr(transformers, "GgufConfig"):
        # By default it multiplies quantised blocks, in float32 and slower than plain weights.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=getattr(torch, dtype), **named, **options
    )
    return model.eval()


def _place(checkpoint: Checkpoint) -> tuple[Path, dict[str, Any]]:
    """What ``from_pretrained`` is given."""
    if checkpoint.format == "gguf":
        return checkpoint.path.parent, {"gguf_file": checkpoint.path.name}
    return checkpoint.path, {}


def _write_folder(checkpoint: Checkpoint, place: Path) -> None:
    """By transformers, which reads every format that this benchmark does."""
    tokenizer, model = load_transformers(checkpoint, DTYPE)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)


def _write_gguf(checkpoint: Checkpoint, place: Path) -> None:
    """A copy of the file with every matrix as bfloat16 and every vector as float32."""
    import gguf
    import numpy as np
    from gguf.quants import dequantize, quantize

    reader = gguf.GGUFReader(checkpoint.path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(place, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, *parts = field.types
        if field.name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
        else:
            sub_type = parts[-1] if parts else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            raw = quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
