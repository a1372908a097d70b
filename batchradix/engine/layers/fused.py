"""A layer as the C kernels take it, where every part of it is one of theirs."""

from __future__ import annotations

import torch

from batchradix.engine.layers.gated import GatedLinear, OneStep, TwoSteps
from batchradix.engine.layers.linear import Bf16Linear, GroupedLinear, Int8Linear, Linear
from batchradix.engine.layers.norm import NormBefore, RMSNorm
from batchradix_kernels.decoder import DecoderLayer, Weight
from batchradix_kernels.swiglu import SILU


def fused_layer(
    *,
    input_norm: NormBefore,
    mlp_norm: NormBefore,
    head_norms: tuple[torch.Tensor, torch.Tensor] | None,
    qkv: Linear,
    o: Linear,
    gate_up: GatedLinear,
    down: Linear,
) -> DecoderLayer | None:
    """The parts, still used by their owners too; None where some other library multiplies, or
    where no kernel is for this dtype or device."""
    linears: list[Bf16Linear | GroupedLinear | Int8Linear] = []
    if isinstance(gate_up, TwoSteps) and gate_up.gating != SILU:
        return None
    if not isinstance(input_norm, RMSNorm) or not isinstance(mlp_norm, RMSNorm):
        return None
    for part in (qkv, o, gate_up, down):
        linear = part.linear if isinstance(part, OneStep | TwoSteps) else part
        if not isinstance(linear, Bf16Linear | GroupedLinear | Int8Linear):
            return None
        linears.append(linear)
    weights: list[Weight] = [linear.weight for linear in linears]
    biases = [linear.bias if isinstance(linear, Int8Linear) else None for linear in linears]
    layer = DecoderLayer(
        input_norm=input_norm.weight,
        mlp_norm=mlp_norm.weight,
        head_norms=head_norms,
        qkv=weights[0],
        o=weights[1],
        gate_up=weights[2],
        down=weights[3],
        biases=tuple(biases),
    )
    return layer if layer.is_served(input_norm.weight.dtype) else None
