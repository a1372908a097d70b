"""The ``quantization_config`` of a ``config.json``: which stored weights can be read.

Its fields are those that AutoAWQ, AutoGPTQ and GPTQModel, compressed-tensors and `transformers`
write. What it says of activations is not followed: they are not rounded here, which is more exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.stored_weights import StoredWeights
from batchradix.errors import ModelError

_UNQUANTISED = "use the model's unquantised weights or a GGUF file of it"
_GPTQ_BITS = (2, 3, 4, 8)
_PACKED_BITS = (2, 4, 8)
_MIN_ACTIVATION_BITS = 8
_BLOCK_OF_DEEPSEEK = [128, 128]


def stored_weights(fields: Fields) -> StoredWeights | None:
    """How weights are stored, None for plain floats.

    Raises `ModelError` for a way that cannot be read, saying what to use instead.
    """
    settings = fields.config.get("quantization_config", fields.config.get("compression_config"))
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    read = _METHODS.get(str(method))
    if read is None:
        raise fields.error(
            f"weights quantised with {method or 'an unknown method'} are not supported, only with "
            f"{', '.join(_METHODS)}; {_UNQUANTISED}"
        )
    return read(fields, settings)


def _refused(fields: Fields, what: str, supported: str) -> ModelError:
    return fields.error(f"{what} is not supported, only {supported}; {_UNQUANTISED}")


def _awq(fields: Fields, settings: Mapping[str, Any]) -> StoredWeights:
    version = settings.get("version", settings.get("checkpoint_format")) or "gemm"
    backend = settings.get("backend") or "autoawq"
    bits = settings.get("bits", settings.get("w_bit", 4))
    if str(version).lower() != "gemm" or backend == "llm-awq":
        raise _refused(fields, f"AWQ's layout {version} of {backend}", "gemm of autoawq")
    if bits != 4 or settings.get("zero_point", True) is not True:
        what = f"AWQ with {bits} bits and zero_point {settings.get('zero_point', True)}"
        raise _refused(fields, what, "4 bits with zero points")
    return StoredWeights(layout="awq")


def _gptq(fields: Fields, settings: Mapping[str, Any]) -> StoredWeights:
    format_ = settings.get("checkpoint_format", settings.get("format")) or "gptq"
    if settings.get("is_marlin_format"):
        format_ = "marlin"
    offsets = {"gptq": 1, "gptq_v2": 0}
    if not isinstance(format_, str) or format_ not in offsets:
        raise _refused(fields, f"GPTQ's checkpoint_format {format_}", " and ".join(offsets))
    bits, word = settings.get("bits"), settings.get("pack_dtype", "int32")
    if bits not in _GPTQ_BITS or word != "int32":
        supported = f"{', '.join(map(str, _GPTQ_BITS))} bits in int32"
        raise _refused(fields, f"GPTQ with {bits} bits in {word}", supported)
    return StoredWeights(layout="gptq", zero_offset=offsets[format_])


def _fp8(fields: Fields, settings: Mapping[str, Any]) -> StoredWeights:
    kind = settings.get("fmt", "e4m3")
    if kind != "e4m3":
        raise _refused(fields, f"FP8 of format {kind!r}", "e4m3")
    block = settings.get("weight_block_size", _BLOCK_OF_DEEPSEEK)
    return StoredWeights(layout="scaled", block=_block(fields, "weight_block_size", block))


def _fbgemm_fp8(fields: Fields, settings: Mapping[str, Any]) -> StoredWeights:
    return StoredWeights(layout="scaled")


def _block(fields: Fields, name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise fields.error(f"{name} is {value!r}, not the rows and columns of a block")
    return value[0], value[1]


def _compressed_tensors(fields: Fields, settings: Mapping[str, Any]) -> StoredWeights | None:
    sparsity = settings.get("sparsity_config") or {}
    sparse = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if sparse != "dense":
        raise _refused(fields, f"the sparse format {sparse}", "dense weights")
    if settings.get("transform_config"):
        raise _refused(fields, "transform_config (rotated activations)", "plain layers")
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise fields.error(f"config_groups is {groups!r}, not an object of objects")
    found = {
        _compressed_group(fields, group, group.get("format") or settings.get("format"))
        for group in groups.values()
    } - {None}
    if len(found) > 1:
        raise _refused(fields, "a mixture of formats among config_groups", "one for all")
    return next(iter(found), None)


def _compressed_group(
    fields: Fields, group: Mapping[str, Any], format_: Any
) -> StoredWeights | None:
    if format_ == "dense" or group.get("weights") is None:
        return None
    weights, inputs = group["weights"], group.get("input_activations") or {}
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping):
        raise fields.error(f"a group of config_groups is {group!r}, which is malformed")
    bits, kind, of_inputs = (
        weights.get("num_bits", 8),
        weights.get("type", "int"),
        inputs.get("num_bits", 8),
    )
    if type(of_inputs) is not int or of_inputs < _MIN_ACTIVATION_BITS:
        what = f"activations in {of_inputs} bits, for which weights were made,"
        raise _refused(fields, what, f"{_MIN_ACTIVATION_BITS} or more")
    if format_ == "pack-quantized" and kind == "int" and bits in _PACKED_BITS:
        return StoredWeights(layout="packed")
    is_int8 = format_ in ("int-quantized", "naive-quantized") and kind == "int"
    is_fp8 = format_ in ("float-quantized", "naive-quantized") and kind == "float"
    if bits == 8 and (is_int8 or is_fp8):
        block = weights.get("block_structure") if weights.get("strategy") == "block" else None
        if isinstance(block, str):  # as it was written at first: "128x128"
            block = [int(size) if size.isdecimal() else size for size in block.split("x")]
        return StoredWeights(layout="scaled", block=_block(fields, "block_structure", block))
    raise _refused(
        fields,
        f"compressed-tensors' format {format_} with {kind} weights of {bits} bits",
        "pack-quantized integers of 2, 4 or 8 bits, int-quantized and float-quantized of 8",
    )


_METHODS: Mapping[str, Callable[[Fields, Mapping[str, Any]], StoredWeights | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
}
