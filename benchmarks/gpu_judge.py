"""Greedy answers beside those of transformers, each row alone.

transformers sees a row's prompt with the engine's answer in one pass: a token is right when it is
the likeliest one behind all before it, which is what greedy decoding of that row alone would have
chosen. Where the two likeliest tokens all but tie either is right, and few steps may be ties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_models import Model
from gpu_rows import Rows

from batchradix.types import Completion, FinishReason


@dataclass(frozen=True, slots=True)
class Precision:
    """What the engine computes in beside transformers in float32, and how far below the likeliest
    token the second may be for either to be right, in at most so large a share of all steps."""

    dtype: str
    tie_gap: float
    tie_share: float


PRECISIONS = (Precision("float32", 1e-3, 1e-3), Precision("float16", 0.1, 0.1))
"""The second for attention that has no float32; it proves the wiring and no more."""


@dataclass(slots=True)
class Verdict:
    """How answers stand beside transformers: steps compared, ties among them, what is wrong."""

    num_steps: int = 0
    num_ties: int = 0
    failures: list[str] = field(default_factory=list)

    def error(self, num_rows: int, tie_share: float) -> str | None:
        """What breaks the protocol, None if nothing."""
        if self.failures:
            return f"{len(self.failures)} of {num_rows} rows differ: {self.failures[0]}"
        if self.num_ties > tie_share * self.num_steps:
            return f"{self.num_ties} ties in {self.num_steps} steps"
        return None


class Judge:
    """Tells whether answers are those of the model as transformers has it, and remembers rows
    that it has seen."""

    def __init__(self, model: Model, precision: Precision, device: torch.device) -> None:
        self.precision = precision
        self._peer = model.peer
        self._eos_ids = frozenset(model.checkpoint.tokenizer.eos_ids)
        self._device = device
        self._seen: dict[tuple[int, ...], Any] = {}

    def verdict(self, rows: Rows, completions: Mapping[int, Completion]) -> Verdict:
        found = Verdict()
        for row, (prompt, most) in enumerate(zip(rows.prompts, rows.max_tokens, strict=True)):
            failure = "it has no answer"
            if row in completions:
                failure = self._judge(prompt, most, completions[row], found) or ""
            if failure:
                found.failures.append(f"row {row}: {failure}")
        return found

    def _judge(
        self, prompt: Sequence[int], most: int, answer: Completion, found: Verdict
    ) -> str | None:
        if answer.error is not None:
            return str(answer.error)
        ids, ended = list(answer.token_ids), answer.finish_reason is FinishReason.STOP
        if not ended and len(ids) != most:
            return f"{len(ids)} tokens without an end, not {most}"
        for place, (first, second, gap) in enumerate(self._best_two(prompt, ids)):
            if place == len(ids) + ended:
                break
            found.num_steps += 1
            if self._agrees(ids, place, first):
                continue
            if gap > self.precision.tie_gap or not self._agrees(ids, place, second):
                ours = ids[place] if place < len(ids) else "the end"
                return (
                    f"token {place} is {ours}, transformers has {first}, {second} {gap:.2g} below"
                )
            found.num_ties += 1
        return None

    def _agrees(self, ids: Sequence[int], place: int, expected: int) -> bool:
        return ids[place] == expected if place < len(ids) else expected in self._eos_ids

    def _best_two(self, prompt: Sequence[int], ids: Sequence[int]) -> list[tuple[int, int, float]]:
        """The likeliest token and the next, and how far apart, behind the prompt and each id."""
        key = (*prompt, -1, *ids)
        if key not in self._seen:
            tokens = torch.tensor([[*prompt, *ids]], device=self._device)
            with torch.inference_mode():
                given = self._peer(input_ids=tokens, use_cache=False, logits_to_keep=len(ids) + 1)
                best = given.logits[0].float().topk(2)
            gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
            pairs = zip(best.indices.tolist(), gaps, strict=True)
            self._seen[key] = [(first, second, gap) for (first, second), gap in pairs]
        return self._seen[key]
