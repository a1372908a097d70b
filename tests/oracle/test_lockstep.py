"""Rows that answer together say what each says alone, and a row that fails ends them all."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

PROMPTS = ([72, 101, 108, 108, 111], [65], [66, 97, 98, 98, 108, 101, 32, 111, 110])
LIMITS = (6, 1, 9)


@pytest.fixture(scope="module")
def model(tiny_model_folder: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_model_folder("random")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_rows_together_say_what_each_says_alone(
    model: Any, i3: ModuleType, lockstep: ModuleType
) -> None:
    def ask(place: int) -> Any:
        return lambda seen: i3.Alone(seen, [])(PROMPTS[place], LIMITS[place])

    together = lockstep.Lockstep(model)
    for order in ((0, 1, 2), (2, 0)):
        rows = [(PROMPTS[place], ask(place)) for place in order]
        for place, answer in zip(order, together(rows), strict=True):
            alone = i3.Alone(model, [])(PROMPTS[place], LIMITS[place])
            assert answer.ids == alone.ids
            assert answer.gaps == pytest.approx(alone.gaps, abs=1e-4)


def test_a_row_that_fails_ends_all_with_its_error(
    model: Any, i3: ModuleType, lockstep: ModuleType
) -> None:
    def fails(seen: Any) -> None:
        i3.Alone(seen, [])(PROMPTS[1], 3)
        raise ValueError("no such row")

    rows = [(PROMPTS[0], lambda seen: i3.Alone(seen, [])(PROMPTS[0], 5)), (PROMPTS[1], fails)]
    with pytest.raises(ValueError, match="no such row"):
        lockstep.Lockstep(model)(rows)
