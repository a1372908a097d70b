"""Attention over tree nodes through the Triton kernels of the kernel library.

For GPUs. On the CPU the kernels run in Triton's interpreter where it was asked for, which proves
what they compute and takes about a thousand times as long.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from batchradix.engine.attention import plain_pool
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.step import Step
from batchradix.types import I64
from batchradix_kernels.triton_runtime import is_installed, serves

if TYPE_CHECKING:
    from batchradix_kernels.tree_attention.tiles import Tile
    from batchradix_kernels.tree_attention.triton import PlanSizes, TreeLayout, TritonTreePlan


Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Windowed(Generic[Part]):
    """``windows``: of each layer; ``of``: something for each of them."""

    windows: tuple[int | None, ...]
    of: dict[int | None, Part]


if TYPE_CHECKING:
    TritonPlans = Windowed[TritonTreePlan]


class TritonAttention:
    """Implements `AttentionBackend` and `FixedPlans`; ``tiles``: see `TritonTreeAttention`."""

    def __init__(self, shape: AttentionShape, tiles: Sequence[Tile] | None = None) -> None:
        # Not everywhere where batchradix runs is there a Triton to import.
        from batchradix_kernels.tree_attention.triton import TritonTreeAttention

        self.shape = shape
        self._kernel = TritonTreeAttention(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.scale,
            dtype=shape.dtype,
            device=shape.device,
            kv_dtype=shape.kv_dtype,
            tiles=tiles,
            softcap=shape.softcap,
        )

    @staticmethod
    def missing(shape: AttentionShape) -> str | None:
        """Why it does not serve, and what to do instead; None where it does."""
        in_8_bits = shape.pool_dtype != shape.dtype
        why_not = without_triton(shape.device)
        return _without_float8(shape.device) if why_not is None and in_8_bits else why_not

    def allocate(self, num_slots: int) -> torch.Tensor:
        return plain_pool.allocate(self.shape, num_slots)

    def move(self, pool: torch.Tensor, moves: I64) -> None:
        plain_pool.move(pool, moves, triton=True)

    def poison(self, pool: torch.Tensor, slot_start: int, num_slots: int) -> None:
        plain_pool.poison(pool, slot_start, num_slots)

    def export(self, pool: torch.Tensor, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
        return plain_pool.export(pool, slots)

    def load(self, pool: torch.Tensor, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        plain_pool.load(pool, slot_start, k, v)

    def plan(self, step: Step) -> TritonPlans:
        layout = self.lay_out(step)
        plan = self._empty_plan(Windowed(layout.windows, _sizes_of(layout)), shared=False)
        self.fill(plan, layout)
        return plan

    def lay_out(self, step: Step) -> Windowed[TreeLayout]:
        windows = self.shape.windows_within(step)
        pieces = step.slots, step.context, step.causal
        return Windowed(
            windows,
            {each: self._kernel.lay_out(*pieces, window=each) for each in dict.fromkeys(windows)},
        )

    def sizes(self, layout: Windowed[TreeLayout], num_tokens: int) -> Hashable:
        sizes = _sizes_of(layout)
        return layout.windows, tuple(each.rounded(num_tokens) for each in sizes.values())

    def empty_plan(self, sizes: Any) -> TritonPlans:
        windows, of_each = sizes
        return self._empty_plan(
            Windowed(windows, dict(zip(dict.fromkeys(windows), of_each, strict=True))), shared=True
        )

    def fill(self, plan: TritonPlans, layout: Windowed[TreeLayout]) -> None:
        for window, each in layout.of.items():
            self._kernel.fill(plan.of[window], each)

    def run(
        self,
        layer: int,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        pool: torch.Tensor,
        plan: TritonPlans,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        of_layer = plan.of[plan.windows[layer]]
        return self._kernel.run(of_layer, pool[layer], q_THE, k_TKE, v_TKE, sinks=sinks_H)

    def _empty_plan(self, sizes: Windowed[PlanSizes], *, shared: bool) -> TritonPlans:
        """``shared``: as in `TritonTreeAttention.empty_plan`."""
        kernel = self._kernel
        plans = {w: kernel.empty_plan(each, shared=shared) for w, each in sizes.of.items()}
        return Windowed(sizes.windows, plans)


def _sizes_of(layout: Windowed[TreeLayout]) -> dict[int | None, PlanSizes]:
    return {window: each.sizes for window, each in layout.of.items()}


def without_triton(device: torch.device) -> str | None:
    """Why Triton does not serve a device, and what to do instead; None where it does."""
    if not is_installed():
        return "Triton is not installed; run pip install triton, or use torch"
    if serves(device):
        return None
    if device.type == "cpu":
        return (
            "it needs a GPU (TRITON_INTERPRET=1 runs its kernels on the CPU, very slowly, "
            "for tests); use cpu or torch"
        )
    return f"it does not serve {device.type} here (TRITON_INTERPRET must not be set)"


def _without_float8(device: torch.device) -> str | None:
    """Why a device that Triton serves takes no keys and values in 8 bits, None where it does."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = str(properties.gcnArchName).partition(":")[0]
        is_native = name == "gfx950" or name.startswith("gfx12")
    else:
        name = f"sm_{properties.major}{properties.minor}"
        is_native = (properties.major, properties.minor) >= (8, 9)
    if is_native:
        return None
    return f"a GPU of {name} has no float8_e4m3fn, which `kv_dtype` fp8 stores; use torch"
