"""Which attention backend bears which name, and which one ``auto`` means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.config import EngineOptions
from batchradix.engine.attention.base import AttentionBackend, AttentionShape
from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.attention.flashinfer_backend import FlashInferAttention
from batchradix.engine.attention.flashinfer_mla import FlashInferMla
from batchradix.engine.attention.measured import fastest, read_tiles, read_times, table_key
from batchradix.engine.attention.mla_base import MlaBackend, MlaShape
from batchradix.engine.attention.mla_cpu import CpuMla
from batchradix.engine.attention.mla_torch import TorchMla
from batchradix.engine.attention.mla_triton import TritonMla
from batchradix.engine.attention.torch_backend import TorchAttention
from batchradix.engine.attention.triton_backend import TritonAttention, without_triton
from batchradix.errors import OptionError
from batchradix.settings import Machine, resolve_dtype
from batchradix_kernels.native import library
from batchradix_kernels.triton_runtime import interprets

BACKENDS: dict[str, Callable[[AttentionShape], AttentionBackend]] = {
    "torch": TorchAttention,
    "cpu": CpuAttention,
    "triton": TritonAttention,
    "flashinfer": FlashInferAttention,
}

MLA_BACKENDS: dict[str, Callable[[MlaShape], MlaBackend]] = {
    "torch": TorchMla,
    "cpu": CpuMla,
    "triton": TritonMla,
    "flashinfer": FlashInferMla,
}


def make_mla_backend(name: str, shape: MlaShape) -> MlaBackend:
    """The backend of that name for latent attention; ``auto`` is that of the C kernels or, on a
    GPU, Triton's where they serve the shape, else torch.

    Raises `OptionError` for a name that is not in `MLA_BACKENDS`, or one that cannot serve.
    """
    if shape.batch_invariant:
        raise OptionError(
            "`deterministic` is not supported for models with latent attention (MLA); leave it out"
        )
    if name == "auto":
        usual = "triton" if shape.device.type == "cuda" else "cpu"
        name = usual if _mla_refusal(usual, shape) is None else "torch"
    if name not in MLA_BACKENDS:
        raise OptionError(
            f"`attention` must be auto, {', '.join(MLA_BACKENDS)} for models with latent attention "
            f"(MLA), not {name!r}"
        )
    why_not = _mla_refusal(name, shape)
    if why_not is not None:
        raise OptionError(f"`attention` {why_not}")
    return MLA_BACKENDS[name](shape)


def _mla_refusal(name: str, shape: MlaShape) -> str | None:
    """Why a backend of `MLA_BACKENDS` cannot serve, and what to do; None where it can."""
    if name == "cpu" and not CpuMla.serves(shape):
        why = CpuMla.missing(shape)
        return f"cpu, the kernels in C, cannot be used here: {why}; use torch"
    if name == "triton" and (missing := without_triton(shape.device)) is not None:
        return f"triton, the kernels for GPUs, cannot be used here: {missing}"
    if name == "flashinfer" and (missing := FlashInferMla.missing(shape)) is not None:
        return f"flashinfer, kernels for GPUs, cannot be used here: {missing}"
    return None


def num_kv_copies(config: ModelConfig, options: EngineOptions, machine: Machine) -> int:
    """How often the pool of the backend that will serve holds what the model keeps of a token."""
    device = machine.device if options.device == "auto" else options.device
    if config.mla is None or options.attention not in ("auto", "cpu"):
        return 1
    dtype = resolve_dtype(options.dtype, device=device, has_bf16=machine.has_bf16)
    shape = MlaShape.of(config, dtype=dtype, device=torch.device(device))
    return CpuMla.num_copies if CpuMla.serves(shape) else 1


def make_backend(name: str, shape: AttentionShape, folder: Path | None = None) -> AttentionBackend:
    """The backend of that name; of ``auto``, what `automatic` says. ``folder`` is the cache folder:
    Triton's kernels take the tiles from it that were measured fastest here.

    Raises `OptionError` for a name that is not in `BACKENDS`, or one that cannot serve.
    """
    serves = CpuAttention.serves(shape)
    if shape.batch_invariant and not (serves and name in ("auto", "cpu")):
        why = f"`attention` is {name}" if serves else CpuAttention.missing(shape)
        raise OptionError(
            f"`deterministic` needs the attention kernels in C, and {why}; change that, or leave "
            f"`deterministic` out"
        )
    if name == "auto":
        name = automatic(shape, folder)
    if name not in BACKENDS:
        raise OptionError(f"`attention` must be auto, {', '.join(BACKENDS)}, not {name!r}")
    why_not = refusal(name, shape)
    if why_not is not None:
        raise OptionError(f"`attention` {why_not}")
    if name == "triton" and folder is not None:
        return TritonAttention(shape, read_tiles(folder, shape))
    return BACKENDS[name](shape)


def automatic(shape: AttentionShape, folder: Path | None = None) -> str:
    """What ``auto`` means: the C kernels or, on a GPU, Triton's where they serve the shape, else
    torch operations, unless a table in ``folder``, the cache folder, says that something else is
    faster here."""
    usual = "cpu" if CpuAttention.serves(shape) else "torch"
    if shape.device.type == "cuda" and TritonAttention.missing(shape) is None:
        usual = "triton"
    if folder is None or shape.batch_invariant:
        return usual
    times = read_times(folder, table_key(shape, measurable(shape)))
    return usual if times is None else fastest(times, usual)


def refusal(name: str, shape: AttentionShape) -> str | None:
    """Why a backend of `BACKENDS` cannot serve, and what to do; None where it can."""
    if name == "cpu" and not CpuAttention.serves(shape):
        why = CpuAttention.missing(shape)
        return f"cpu, the kernels in C, cannot be used here: {why}; use torch"
    if name == "triton" and (missing := TritonAttention.missing(shape)) is not None:
        return f"triton, the kernels for GPUs, cannot be used here: {missing}"
    if name == "flashinfer" and (missing := FlashInferAttention.missing(shape)) is not None:
        return f"flashinfer, kernels for GPUs, cannot be used here: {missing}"
    return None


def unmeasured(shape: AttentionShape) -> dict[str, str]:
    """The backends that are no choice for ``auto``, each with why, and what to do."""
    reasons = {name: refusal(name, shape) for name in BACKENDS}
    if reasons["triton"] is None and interprets():
        reasons["triton"] = (
            "triton is interpreted here, which says nothing of its speed; unset TRITON_INTERPRET"
        )
    return {name: why for name, why in reasons.items() if why is not None}


def measurable(shape: AttentionShape) -> list[str]:
    """The backends that ``auto`` can choose from."""
    reasons = unmeasured(shape)
    return [name for name in BACKENDS if name not in reasons]


def missing_kernels(name: str, device: str) -> str | None:
    """What to tell a user whose attention is slow since the C kernels were not built."""
    if device != "cpu" or name != "auto" or library() is not None:
        return None
    return (
        "the C kernels were not built, so attention runs several times slower, in torch "
        "operations; install a C compiler and then batchradix again"
    )
