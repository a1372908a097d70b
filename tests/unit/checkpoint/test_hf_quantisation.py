"""Which stored weights a config.json may speak of, and what is refused before any is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.hf_quantisation import stored_weights
from batchradix.checkpoint.stored_weights import StoredWeights
from batchradix.errors import ModelError

AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
SCALED = StoredWeights(layout="scaled")


def read(settings: Any, key: str = "quantization_config") -> StoredWeights | None:
    return stored_weights(Fields(Path("model/config.json"), {key: settings}))


def compressed(format_: str, weights: Any, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


@pytest.mark.parametrize(
    ("settings", "means"),
    [
        (None, None),
        (AWQ, StoredWeights(layout="awq")),
        (GPTQ, StoredWeights(layout="gptq", zero_offset=1)),
        (GPTQ | {"bits": 3, "checkpoint_format": "gptq_v2"}, StoredWeights(layout="gptq")),
        (compressed("pack-quantized", INT4), StoredWeights(layout="packed")),
        (compressed("int-quantized", INT8, input_activations=INT8), SCALED),
        (compressed("float-quantized", FP8, input_activations=FP8 | {"dynamic": True}), SCALED),
        (compressed("naive-quantized", FP8), SCALED),
        (
            compressed(
                "float-quantized", FP8 | {"strategy": "block", "block_structure": [128, 64]}
            ),
            StoredWeights(layout="scaled", block=(128, 64)),
        ),
        (compressed("dense", INT4), None),
        (compressed("pack-quantized", None), None),
        ({"quant_method": "fp8"}, StoredWeights(layout="scaled", block=(128, 128))),
        ({"quant_method": "fp8", "weight_block_size": None}, SCALED),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, SCALED),
    ],
)
def test_what_can_be_read(settings: Any, means: StoredWeights | None) -> None:
    assert read(settings) == means


def test_the_old_name_of_the_settings_is_read_too() -> None:
    assert read(compressed("pack-quantized", INT4), "compression_config") is not None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "exl2"}, "exl2.*only with awq, gptq"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "quanto"}, "quanto"),
        ({"load_in_8bit": True}, "an unknown method"),
        (3, "an unknown method"),
        (AWQ | {"version": "gemv_fast"}, "layout gemv_fast"),
        (AWQ | {"backend": "llm-awq"}, "of llm-awq"),
        (AWQ | {"bits": 3}, "AWQ with 3 bits"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        (GPTQ | {"checkpoint_format": ["gptq"]}, r"checkpoint_format \['gptq'\]"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format marlin"),
        (GPTQ | {"bits": 5}, "GPTQ with 5 bits"),
        (GPTQ | {"pack_dtype": "int16"}, "in int16"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        (compressed("marlin-24", INT4), "format marlin-24"),
        (compressed("nvfp4-pack-quantized", FP8 | {"num_bits": 4}), "float weights of 4 bits"),
        (compressed("pack-quantized", INT4 | {"num_bits": 3}), "int weights of 3 bits"),
        (compressed("int-quantized", INT8, input_activations=INT4), "activations in 4 bits"),
        (
            compressed("pack-quantized", INT4)
            | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse-24-bitmask",
        ),
        (compressed("pack-quantized", INT4) | {"transform_config": {"r1": {}}}, "transform_config"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": INT4, "format": "pack-quantized"},
                    "b": {"weights": FP8, "format": "float-quantized"},
                },
            },
            "mixture of formats",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups is"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(settings: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        read(settings)
    assert str(caught.value).startswith("model/config.json: ")
    if "config_groups is" not in says:
        assert "unquantised weights or a GGUF file" in str(caught.value)
