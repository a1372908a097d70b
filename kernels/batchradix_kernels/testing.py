"""How kernels are compared with their references: three tolerances at once, poisoned memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """``absolute`` or ``relative`` must hold of every element, ``cosine`` of the whole."""

    absolute: float
    relative: float
    cosine: float  # largest 1 - cosine similarity


TOLERANCES = {
    torch.float32: Tolerance(absolute=2e-5, relative=2e-5, cosine=1e-9),
    torch.float16: Tolerance(absolute=4e-3, relative=4e-3, cosine=1e-5),
    torch.bfloat16: Tolerance(absolute=2e-2, relative=2e-2, cosine=1e-4),
}


def assert_matches(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, *, what: str = "output"
) -> None:
    """Raises AssertionError when ``actual`` leaves the tolerance, or is not finite."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    got, want = actual.double(), expected.double()
    assert bool(torch.isfinite(got).all()), f"{what}: holds NaN or infinity"
    if want.numel() == 0:
        return
    error = (got - want).abs()
    allowed = torch.maximum(
        torch.full_like(want, tolerance.absolute), tolerance.relative * want.abs()
    )
    worst = int((error - allowed).argmax())
    assert bool((error <= allowed).all()), (
        f"{what}: element {worst} is {got.flatten()[worst]:.6g}, "
        f"expected {want.flatten()[worst]:.6g}"
    )
    norm = torch.linalg.vector_norm(got) * torch.linalg.vector_norm(want)
    distance = float(1 - (got * want).sum() / norm.clamp_min(1e-300))
    assert distance <= tolerance.cosine or float(norm) == 0, f"{what}: cosine is off by {distance}"


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills ``tensor`` with NaN in place and returns it."""
    return tensor.fill_(float("nan"))


def poison_except(tensor: torch.Tensor, dim: int, keep: Iterable[int]) -> torch.Tensor:
    """Fills with NaN, in place, every index of ``dim`` that is not in ``keep``."""
    unused = torch.ones(tensor.shape[dim], dtype=torch.bool)
    unused[list(keep)] = False
    return tensor.index_fill_(dim, unused.nonzero().flatten().to(tensor.device), float("nan"))
