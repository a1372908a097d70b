"""Which attention backend bears which name, and which one ``auto`` means."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from batchradix.checkpoint.cache_folder import cache_folder
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.config import EngineOptions, KVDType
from batchradix.engine.attention.base import AttentionBackend, AttentionShape, KVBackend
from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.attention.flashinfer_backend import FlashInferAttention
from batchradix.engine.attention.flashinfer_mla import FlashInferMla
from batchradix.engine.attention.measured import fastest, read_tiles, read_times, table_key
from batchradix.engine.attention.mla_base import AnyShape, MlaBackend, MlaShape
from batchradix.engine.attention.mla_cpu import CpuMla, one_key_head
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


def attention_shape(
    config: ModelConfig,
    *,
    dtype: str,
    device: torch.device,
    batch_invariant: bool = False,
    kv_dtype: KVDType = "auto",
) -> AnyShape:
    """What a model asks of a backend; ``dtype`` and ``kv_dtype`` are named as in `EngineSettings`.

    Raises `OptionError` for latents in 8 bits.
    """
    of: dict[str, Any] = {"dtype": dtype, "device": device, "batch_invariant": batch_invariant}
    if config.mla is None:
        return AttentionShape.of(config, kv_dtype=kv_dtype, **of)
    if kv_dtype != "auto":
        raise OptionError(
            f"`kv_dtype` {kv_dtype} is not supported for models with latent attention (MLA), which "
            f"keep little as it is; leave it out"
        )
    return MlaShape.of(config, **of)


def make_any_backend(name: str, shape: AnyShape, folder: Path | None = None) -> KVBackend:
    """What `make_mla_backend` or `make_backend` gives, as the shape has it."""
    if isinstance(shape, MlaShape):
        return make_mla_backend(name, shape, folder)
    return make_backend(name, shape, folder)


def make_mla_backend(name: str, shape: MlaShape, folder: Path | None = None) -> MlaBackend:
    """The backend of that name for latent attention; of ``auto``, what `automatic` says.

    Raises `OptionError` for a name that is not in `MLA_BACKENDS`, or one that cannot serve.
    """
    if shape.batch_invariant:
        raise OptionError(
            "`deterministic` is not supported for models with latent attention (MLA); leave it out"
        )
    if name == "auto":
        name = automatic(shape, folder)
    if name not in MLA_BACKENDS:
        raise OptionError(
            f"`attention` must be auto, {', '.join(MLA_BACKENDS)} for models with latent attention "
            f"(MLA), not {name!r}"
        )
    why_not = refusal(name, shape)
    if why_not is not None:
        raise OptionError(f"`attention` {why_not}")
    return MLA_BACKENDS[name](shape)


def num_kv_copies(config: ModelConfig, options: EngineOptions, machine: Machine) -> int:
    """How often the pool of the backend that will serve holds what the model keeps of a token."""
    device = machine.device if options.device == "auto" else options.device
    if config.mla is None or device != "cpu":
        return 1
    name = options.attention
    if name == "auto":
        dtype = resolve_dtype(options.dtype, device=device, has_bf16=machine.has_bf16)
        shape = MlaShape.of(config, dtype=dtype, device=torch.device(device))
        name = automatic(shape, cache_folder(), options.num_threads or machine.num_threads)
    return CpuMla.num_copies if name == "cpu" else 1


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


def automatic(shape: AnyShape, folder: Path | None = None, num_threads: int | None = None) -> str:
    """What ``auto`` means: the C kernels or, on a GPU, Triton's where they serve the shape, else
    torch operations, unless a table in ``folder``, the cache folder, says that something else is
    faster here. ``num_threads`` as `table_key` says."""
    usual = "triton" if shape.device.type == "cuda" else "cpu"
    if refusal(usual, shape) is not None:
        usual = "torch"
    if folder is None or shape.batch_invariant:
        return usual
    times = read_times(folder, table_key(shape, measurable(shape), num_threads))
    return usual if times is None else fastest(times, usual)


def refusal(name: str, shape: AnyShape) -> str | None:
    """Why a backend of that name cannot serve, and what to do; None where it can."""
    if name == "cpu":
        heads = one_key_head(shape) if isinstance(shape, MlaShape) else shape
        if not CpuAttention.serves(heads):
            why = CpuAttention.missing(heads)
            return f"cpu, the kernels in C, cannot be used here: {why}; use torch"
    if name == "triton" and (missing := _without_triton(shape)) is not None:
        return f"triton, the kernels for GPUs, cannot be used here: {missing}"
    if name == "flashinfer" and (missing := _without_flashinfer(shape)) is not None:
        return f"flashinfer, kernels for GPUs, cannot be used here: {missing}"
    return None


def _without_triton(shape: AnyShape) -> str | None:
    if isinstance(shape, MlaShape):
        return without_triton(shape.device)
    return TritonAttention.missing(shape)


def _without_flashinfer(shape: AnyShape) -> str | None:
    if isinstance(shape, MlaShape):
        return FlashInferMla.missing(shape)
    return FlashInferAttention.missing(shape)


def unmeasured(shape: AnyShape) -> dict[str, str]:
    """The backends that are no choice for ``auto``, each with why, and what to do."""
    reasons = {name: refusal(name, shape) for name in _backends(shape)}
    if reasons["triton"] is None and interprets():
        reasons["triton"] = (
            "triton is interpreted here, which says nothing of its speed; unset TRITON_INTERPRET"
        )
    return {name: why for name, why in reasons.items() if why is not None}


def measurable(shape: AnyShape) -> list[str]:
    """The backends that ``auto`` can choose from."""
    reasons = unmeasured(shape)
    return [name for name in _backends(shape) if name not in reasons]


def _backends(shape: AnyShape) -> Collection[str]:
    return MLA_BACKENDS if isinstance(shape, MlaShape) else BACKENDS


def missing_kernels(name: str, device: str) -> str | None:
    """What to tell a user whose attention is slow since the C kernels were not built."""
    if device != "cpu" or name != "auto" or library() is not None:
        return None
    return (
        "the C kernels were not built, so attention runs several times slower, in torch "
        "operations; install a C compiler and then batchradix again"
    )
