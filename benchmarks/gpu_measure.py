"""What the parts of `gpu_check.py` say, and how they compare and time."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from batchradix_kernels.testing import Tolerance, assert_matches

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXACT = Tolerance(absolute=0.0, relative=0.0, cosine=1e-12)
REPEAT = 20
WARM_UP = 2
FLUSH_BYTES = 256 << 20  # written between two calls: more than any second-level cache holds
HEAD_START_CYCLES = 2_000_000  # a millisecond in which the host launches all of a call
_PER_UNIT = {"GB/s": 1e9, "TFLOP/s": 1e12, "rows/s": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the parts run on. ``model``: the file or folder of a real small model; ``size``: of the
    large ones with random weights (`gpu_large.LARGE`), over ``num_rows`` rows."""

    device: torch.device
    model: Path | None = None
    size: str = "tiny"
    num_rows: int = 24

    @property
    def is_small(self) -> bool:
        """Whether sizes are those of a test, which proves the logic and times nothing."""
        return self.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class Found:
    """A comparison: whether it holds, what is wrong if not, and what was compared."""

    label: str
    ok: bool
    error: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """What was timed: ``rate`` in ``unit`` (of `_PER_UNIT`), and the microseconds it took."""

    label: str
    us: float
    rate: float
    unit: str
    detail: str = ""

    @classmethod
    def of(cls, label: str, seconds: float, amount: float, unit: str, detail: str = "") -> Timed:
        """``amount`` of bytes, operations or rows in so many seconds."""
        rate = amount / seconds / _PER_UNIT[unit]
        return cls(label, round(seconds * 1e6, 2), float(f"{rate:.4g}"), unit, detail)


@dataclass(frozen=True, slots=True)
class Skipped:
    """What could not be tried here, and why."""

    label: str
    why: str


Record = Found | Timed | Skipped


def as_json(record: Record) -> dict[str, Any]:
    return {"record": type(record).__name__.lower(), **asdict(record)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a kernel gave beside what its reference gave, from the same inputs."""

    label: str
    actual: torch.Tensor
    expected: torch.Tensor
    tolerance: Tolerance


@dataclass(frozen=True, slots=True)
class Call:
    """A call to be timed, the bytes that it must read and write at least, and which of a kernel's
    calls it is. One that is bound by products has ``num_flops``."""

    label: str
    run: Callable[[], object]
    num_bytes: int
    what: str = ""
    num_flops: float = 0.0


Compare = Callable[[torch.device, torch.dtype], Iterator[Comparison | Found | Skipped]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """``compare`` runs a kernel on odd shapes in one dtype; ``calls`` makes what is timed, from
    about so many elements on."""

    compare: Compare
    calls: Callable[[torch.device, int], Iterator[Call]]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare_all(
    compare: Compare, device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Found | Skipped]:
    """Compares in each dtype. A comparison that fails is found and does not end the others."""
    for dtype in dtypes:
        torch.manual_seed(0)
        try:
            for one in compare(device, dtype):
                yield _judged(one, dtype) if isinstance(one, Comparison) else one
        except Exception as error:  # of any kind: it is what is to be reported
            yield raised(f"all further in {dtype_name(dtype)}", error)


def _judged(one: Comparison, dtype: torch.dtype) -> Found:
    label = f"{one.label} {dtype_name(dtype)}"
    try:
        assert_matches(one.actual, one.expected, one.tolerance)
    except AssertionError as error:
        return Found(label, False, str(error))
    return Found(label, True)


def raised(label: str, error: Exception) -> Found:
    """A comparison that ended with an exception, whose traceback is its detail."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        said = f"memory ran out: {str(error).splitlines()[0]}"
    return Found(label, False, said, "".join(traceback.format_exception(error)))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """What a call takes on the device: the median after two that warm up, the second-level cache
    flushed before each and the host ahead, so that its launches cost nothing."""
    if device.type != "cuda":
        return host_seconds_of(run, device)
    took = []
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(REPEAT + WARM_UP):
        flushed.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(took[WARM_UP:])


def host_seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """What a call takes on the clock until the device is done; the median after two."""
    took = []
    for _ in range(REPEAT + WARM_UP):
        wait(device)
        began_s = time.perf_counter()
        run()
        wait(device)
        took.append(time.perf_counter() - began_s)
    return statistics.median(took[WARM_UP:])


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
