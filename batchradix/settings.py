"""What the machine and the model make of a user's options: an engine with nothing left open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from batchradix.config import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_KV_STORE_BYTES,
    DEFAULT_PREFILL_TOKENS,
    MIN_SPILL_TOKENS,
    DType,
    EngineOptions,
    KVDType,
    Quantize,
    Speculate,
    Switch,
    require,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the process may use; measured once by `report.machine`, passed in explicitly."""

    num_threads: int
    free_memory_bytes: int  # of the cgroup where that is less
    has_bf16: bool  # the CPU multiplies bfloat16 in hardware
    device: str = "cpu"
    free_device_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """`EngineOptions` with nothing left open, but that ``attention`` and ``cuda_graphs`` may be
    auto: the engine knows which backends serve the model. ``profile_kv``: ``kv_tokens`` is the most
    that the pool may hold; a trial step says how much memory is left for it. ``num_kv_copies``: how
    often the pool holds what the model keeps of a token."""

    dtype: Literal["float32", "bfloat16", "float16"]
    device: str
    attention: str
    batch_size: int
    prefill_tokens: int
    kv_tokens: int
    prefix_cache: bool
    num_threads: int
    forced_text: bool = True
    repetition_guard: bool = True
    speculate: Speculate = "off"
    row_timeout_s: float | None = None
    kv_store: Path | None = None
    kv_store_bytes: int = DEFAULT_KV_STORE_BYTES
    kv_disk_bytes: int = 0
    kv_host_memory_bytes: int = 0
    quantize: Quantize = "off"
    deterministic: bool = False
    overlap: bool = False
    cuda_graphs: Switch = "off"
    profile_kv: bool = False
    kv_dtype: KVDType = "auto"
    num_kv_copies: int = 1

    @property
    def element_bytes(self) -> int:
        """Of a weight that is not quantised."""
        return element_bytes(self.dtype)

    @property
    def kv_element_bytes(self) -> int:
        """Of a key or a value."""
        return kv_element_bytes(self.kv_dtype, self.dtype)

    def pool_bytes(self, num_kv_elements_per_token: int) -> int:
        """Of the whole pool, for a model that keeps so much of a token."""
        token_bytes = self.num_kv_copies * num_kv_elements_per_token * self.kv_element_bytes
        return self.kv_tokens * token_bytes

    @property
    def precision(self) -> str:
        """What the model computes in, for people."""
        parts = [f"{self.quantize} layers"] if self.quantize == "int8" else []
        if self.quantize == "keep":
            parts.append("weights kept as they are held")
        if self.kv_dtype == "fp8":
            parts.append("fp8 keys and values")
        return f"{self.dtype} with {' and '.join(parts)}" if parts else self.dtype


def element_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def kv_element_bytes(kv_dtype: KVDType, dtype: str) -> int:
    return 1 if kv_dtype == "fp8" else element_bytes(dtype)


def resolve_dtype(
    wanted: DType, *, device: str, has_bf16: bool
) -> Literal["float32", "bfloat16", "float16"]:
    """The dtype that a model is computed in; ``has_bf16``: whether the CPU does so in hardware."""
    if wanted == "auto":
        return "bfloat16" if has_bf16 or device != "cpu" else "float32"
    return wanted


def check_host_memory(options: EngineOptions, device: str) -> None:
    """Raises `OptionError` where host memory is asked for beside host memory."""
    require(
        options.kv_host_memory_bytes is None or device != "cpu",
        "`kv_host_memory_bytes` is for a GPU, whose own memory is short; on the CPU keys and "
        "values are in host memory as it is, so give `kv_memory_bytes` more, or `kv_disk_bytes`",
    )


def resolve_engine(
    options: EngineOptions,
    machine: Machine,
    *,
    num_kv_elements_per_token: int,
    weight_bytes_float32: int,
    kept_weight_bytes: int | None = None,
    demand_tokens: int | None = None,
    num_kv_copies: int = 1,
) -> EngineSettings:
    """Settles every open choice from the machine and the model; pure.

    ``num_kv_elements_per_token`` is the model's keys and values of one token over all layers,
    in elements; ``weight_bytes_float32`` what its parameters take in float32,
    ``kept_weight_bytes`` what they take as a file holds them, where they are kept so;
    ``demand_tokens`` the most KV tokens the job could ever use at once (caps the pool);
    ``num_kv_copies`` is that of the settings.
    KV memory is 40 % of what host memory the weights leave, 90 % on a device.
    Raises `OptionError` when less than one page of KV would be left, when the room beside the
    pool is too small to be of use, and for quantised layers on another device than the CPU.
    """
    device = machine.device if options.device == "auto" else options.device
    check_host_memory(options, device)
    require(
        options.quantize == "off" or device == "cpu",
        f"`quantize` {options.quantize} runs on the CPU alone, not on {device}; leave it out or "
        f"set `device` to cpu",
    )
    require(
        options.cuda_graphs != "on" or device != "cpu",
        "`cuda_graphs` need a GPU; leave them out, or set `device` to cuda",
    )
    dtype = resolve_dtype(options.dtype, device=device, has_bf16=machine.has_bf16)
    require(
        options.quantize != "keep" or dtype == "bfloat16",
        f"`quantize` keep multiplies in bfloat16, not in {dtype}; leave it out, or set `dtype` to "
        f"bfloat16 on a CPU that has it",
    )
    token_bytes = num_kv_copies * num_kv_elements_per_token
    token_bytes *= kv_element_bytes(options.kv_dtype, dtype)
    for name in ("kv_disk_bytes", "kv_host_memory_bytes"):
        room = getattr(options, name)
        least = MIN_SPILL_TOKENS * token_bytes
        require(
            room is None or room >= least,
            f"`{name}` of {room} bytes holds not the {MIN_SPILL_TOKENS} tokens that are worth a "
            f"call; give {least} bytes or more, or leave it out",
        )
    if options.kv_tokens is not None:
        kv_tokens = options.kv_tokens
    elif options.kv_memory_bytes is not None:
        kv_tokens = options.kv_memory_bytes // token_bytes
        require(
            kv_tokens >= 1,
            f"`kv_memory_bytes` of {options.kv_memory_bytes} bytes holds not one token of "
            f"{token_bytes} bytes; give more",
        )
    else:
        weights = kept_weight_bytes or weight_bytes_float32 * element_bytes(dtype) // 4
        if device == "cpu" or machine.free_device_memory_bytes is None:
            room = int((machine.free_memory_bytes - weights) * 0.4)
        else:
            room = int((machine.free_device_memory_bytes - weights) * 0.9)
        kv_tokens = room // token_bytes
        require(
            kv_tokens >= 1,
            f"the model's weights need {weights / 2**30:.1f} GiB in {dtype} and leave no memory "
            f"for keys and values; use a smaller model or a machine with more memory",
        )
        if demand_tokens is not None:
            kv_tokens = max(1, min(kv_tokens, demand_tokens))
    return EngineSettings(
        dtype=dtype,
        device=device,
        attention=options.attention,
        batch_size=options.batch_size or DEFAULT_BATCH_SIZE,
        prefill_tokens=options.prefill_tokens or DEFAULT_PREFILL_TOKENS,
        kv_tokens=kv_tokens,
        prefix_cache=options.prefix_cache,
        forced_text=options.forced_text,
        repetition_guard=options.repetition_guard,
        speculate=options.speculate,
        row_timeout_s=options.row_timeout_s,
        quantize=options.quantize,
        kv_dtype=options.kv_dtype,
        deterministic=options.deterministic,
        num_threads=options.num_threads or machine.num_threads,
        kv_store=None if options.kv_store is None else Path(options.kv_store),
        kv_disk_bytes=options.kv_disk_bytes or 0,
        kv_host_memory_bytes=options.kv_host_memory_bytes or 0,
        kv_store_bytes=options.kv_store_bytes or DEFAULT_KV_STORE_BYTES,
        num_kv_copies=num_kv_copies,
        overlap=_overlaps(options, device),
        cuda_graphs="off" if device == "cpu" else options.cuda_graphs,
        profile_kv=device != "cpu"
        and options.kv_tokens is None
        and options.kv_memory_bytes is None,
    )


def _overlaps(options: EngineOptions, device: str) -> bool:
    if options.overlap == "auto":
        return device != "cpu" and options.speculate == "off"
    return options.overlap == "on"
