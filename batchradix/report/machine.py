"""What this process may use of the machine: cores, memory, bfloat16."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from batchradix.settings import Machine

_CGROUP = Path("/sys/fs/cgroup")


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_free_bytes() -> int | None:
    """Free memory under the control group's limit, None where there is no limit."""
    limit = _read_int(_CGROUP / "memory.max")
    used = _read_int(_CGROUP / "memory.current")
    if limit is None:
        limit = _read_int(_CGROUP / "memory" / "memory.limit_in_bytes")
        used = _read_int(_CGROUP / "memory" / "memory.usage_in_bytes")
        if limit is not None and limit >= 1 << 60:
            return None
    if limit is None or used is None:
        return None
    inactive = 0
    try:
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                inactive = int(value)
    except (OSError, ValueError):
        pass
    return max(0, limit - used + inactive)


def num_oom_kills() -> int:
    """Processes of this control group that the kernel has killed for want of memory."""
    try:
        for line in (_CGROUP / "memory.events").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def free_memory_bytes() -> int:
    """Memory that can be taken without swapping; the control group's limit counts."""
    free: int | None = None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    if free is None:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        free = pages * page_bytes // 2
    limited = _cgroup_free_bytes()
    return free if limited is None else min(free, limited)


def num_threads() -> int:
    """Cores this process may run on: affinity and the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            cores = max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def has_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, Arm BF16)."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return platform.system() == "Darwin" and platform.machine() == "arm64"
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def machine(device: str = "cpu", free_device_memory_bytes: int | None = None) -> Machine:
    """Measures the machine; ``device`` is what the engine found ("cpu", "cuda:0")."""
    return Machine(
        num_threads=num_threads(),
        free_memory_bytes=free_memory_bytes(),
        has_bf16=has_bf16(),
        device=device,
        free_device_memory_bytes=free_device_memory_bytes,
    )


def peak_rss_bytes() -> int:
    """The most resident memory this process had at once."""
    try:  # what getrusage says begins with the memory of the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
