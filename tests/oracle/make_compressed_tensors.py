"""Writes ``compressed_tensors.safetensors``: layers as the library compressed-tensors packs them,
and what it makes of them again. Only needed to make the file anew:

    pip install compressed-tensors==0.20.1 && python tests/oracle/make_compressed_tensors.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FORMATS: dict[str, dict[str, Any]] = {
    "pack-quantized/int4-group": {"num_bits": 4, "strategy": "group", "group_size": 16},
    "pack-quantized/int4-group-asymmetric": {
        "num_bits": 4,
        "strategy": "group",
        "group_size": 16,
        "symmetric": False,
    },
    "pack-quantized/int4-channel": {"num_bits": 4, "strategy": "channel"},
    "pack-quantized/int8-channel": {"num_bits": 8, "strategy": "channel"},
    "pack-quantized/int8-channel-asymmetric": {
        "num_bits": 8,
        "strategy": "channel",
        "symmetric": False,
    },
    "int-quantized/int8-channel": {"num_bits": 8, "strategy": "channel"},
    "int-quantized/int8-asymmetric": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "int-quantized/int8-tensor": {"num_bits": 8, "strategy": "tensor"},
    "float-quantized/fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "float-quantized/fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "float-quantized/fp8-block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [4, 16],
    },
}


def ranges(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest numbers that share a scale, in the shape of the scales."""
    if args.strategy == "tensor":
        parts, dims = weight, (0, 1)
        return parts.amin(dims).view(1), parts.amax(dims).view(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "group":
        grouped = weight.unflatten(1, (-1, args.group_size))
        return grouped.amin(-1), grouped.amax(-1)
    rows, columns = args.block_structure
    blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def main() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    tensors: dict[str, torch.Tensor] = {}
    for number, (name, settings) in enumerate(FORMATS.items()):
        format_ = name.split("/")[0]
        torch.manual_seed(number)
        args = QuantizationArgs(**settings)
        weight = torch.randn(16, 32) + 0.3
        scale, zero = calculate_qparams(*ranges(weight, args), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format_)
        compressor = BaseCompressor.get_value_from_registry(format_)
        packed = compressor.compress(state, scheme)
        unpacked = compressor.decompress(dict(packed), scheme)
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in packed.items()}
        tensors[f"{name}.expected"] = unpacked["weight"].float()
    path = Path(__file__).with_name("compressed_tensors.safetensors")
    save_file(tensors, path)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
