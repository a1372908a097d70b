"""The parts of `gpu_check.py`, by name: what runs in a process of its own, and for how long.

A part is a generator of records (`gpu_measure.Record`) in a module that is imported only where
the part runs, so that what one needs and is not installed is a part that is skipped.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from gpu_measure import Setting, Skipped, as_json

OUR_PACKAGES = ("batchradix", "batchradix_kernels")


@dataclass(frozen=True, slots=True)
class Part:
    """``function`` of ``module`` takes the setting and ``arguments``. One that is not ``alone``
    measures no time and runs beside others."""

    module: str
    function: str
    arguments: tuple[str, ...] = ()
    limit_s: float = 90
    alone: bool = False


KERNELS = (
    *("rms_norm", "swiglu", "rope", "rope_delta", "masked_sampling"),
    *("kv_store", "kv_move", "lse_merge"),
    *("latent_store", "mla_attention", "moe_routing", "moe_gemm"),
)
PARTS: Mapping[str, Part] = {
    "ceilings": Part("gpu_kernels", "ceilings", limit_s=60, alone=True),
    # Those that take longest begin first.
    **{
        f"{what}-{attention}": Part("gpu_engine", function, (attention,), limit_s=150)
        for what, function in (
            ("engine", "tiny"),
            ("experts", "tiny_experts"),
            ("smollm2", "real"),
        )
        for attention in ("flashinfer", "triton", "torch")
    },
    **{
        f"attention-{dtype}": Part("gpu_attention", "compare", (dtype,), limit_s=150)
        for dtype in ("float32", "float16", "bfloat16")
    },
    "latents": Part("gpu_latents", "compare", limit_s=150),
    **{name: Part("gpu_kernels", "compare", (name,)) for name in KERNELS},
    "attention-speed": Part("gpu_attention", "speed", limit_s=75, alone=True),
    "latents-speed": Part("gpu_latents", "speed", limit_s=75, alone=True),
    "llama": Part("gpu_large", "compare", ("llama",), limit_s=150, alone=True),
    "deepseek": Part("gpu_large", "compare", ("deepseek",), limit_s=120, alone=True),
    "kernel-speed": Part("gpu_kernels", "speed", limit_s=90, alone=True),
}


def run_part(part: Part, setting: Setting) -> Iterator[dict[str, Any]]:
    """The records of a part in this process, and last how it ended."""
    error = None
    try:
        function = getattr(import_module(part.module), part.function)
        for record in function(setting, *part.arguments):
            yield as_json(record)
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if not name or name in OUR_PACKAGES or name == part.module:
            error = traceback.format_exc()
        else:
            why = f"{name} is not installed here; bring its wheel along (docs/gpu.md)"
            yield as_json(Skipped(name, why))
    except torch.OutOfMemoryError as memory:
        error = f"memory ran out: {str(memory).splitlines()[0]}"
    except Exception:  # of any kind: it is what is to be reported
        error = traceback.format_exc()
    yield {"record": "end", "error": error}
