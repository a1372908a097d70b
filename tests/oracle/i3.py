"""Greedy answers against an oracle that computed every row alone.

Two correct programs add in different orders, so where the oracle's best two logits all but tie
either token is right. The protocol: ids are equal, or at the first difference the oracle's gap
is at most `TIE_GAP` and ours is the second of the two; then the oracle goes on from our token.
Such ties must stay under `MAX_TIE_SHARE` of all steps.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIE_GAP = 1e-3
MAX_TIE_SHARE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleRow:
    """A row's greedy answer, alone. Per generated token: its id, the id that came second, and
    how far its logit was below. ``ids`` ends with the end of sequence if that was reached."""

    prompt: tuple[int, ...]
    max_tokens: int
    ids: tuple[int, ...]
    second: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is under test said: ids without the end of sequence, and whether that came."""

    ids: tuple[int, ...]
    ended: bool

    @classmethod
    def of(cls, completion: Any, ids: Iterable[int] | None = None) -> Answer:
        """From a `batchradix` completion, or from a result without ids and the ids beside it."""
        return cls(
            ids=tuple(completion.token_ids if ids is None else ids),
            ended=completion.finish_reason == "stop",
        )


@dataclass(slots=True, kw_only=True)
class Comparison:
    """``num_steps`` oracle steps of ``num_rows`` rows were compared; ``failures`` say in a
    sentence each which row breaks the protocol."""

    num_rows: int = 0
    num_steps: int = 0
    num_ties: int = 0
    failures: list[str] = field(default_factory=list)

    def check(self) -> None:
        """AssertionError unless every row is right and ties are as rare as they must be."""
        shown = "\n".join(self.failures[:5])
        assert not self.failures, f"{len(self.failures)} of {self.num_rows} rows differ:\n{shown}"
        assert self.num_rows > 0
        assert self.num_ties <= MAX_TIE_SHARE * self.num_steps, (
            f"{self.num_ties} ties in {self.num_steps} steps"
        )


Continue = Callable[[Sequence[int], int], OracleRow]
"""A prompt and the most tokens to generate, to the oracle's greedy answer."""


class Alone:
    """The oracle: a transformers model in float32 that generates one row at a time.

    ``model`` is a causal language model in evaluation mode; no batch, no prefix is shared.
    ``rounding`` is what keys and values go through before anything attends to them.
    """

    def __init__(
        self, model: Any, eos_ids: Sequence[int], rounding: Callable[[Any], Any] | None = None
    ) -> None:
        self._model = model
        self._eos_ids = frozenset(eos_ids)
        self._rounding = rounding

    @classmethod
    def load(
        cls,
        folder: Path,
        eos_ids: Sequence[int],
        *,
        rounding: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> Alone:
        """Loads with ``AutoModelForCausalLM.from_pretrained(folder, **kwargs)``."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)
        return cls(model.eval(), eos_ids, rounding)

    def __call__(self, prompt: Sequence[int], max_tokens: int) -> OracleRow:
        import torch

        ids: list[int] = []
        second: list[int] = []
        gaps: list[float] = []
        cache = None if self._rounding is None else _rounding_cache(self._rounding)
        next_ids = list(prompt)
        with torch.inference_mode():
            while len(ids) < max_tokens and not (ids and ids[-1] in self._eos_ids):
                out = self._model(
                    input_ids=torch.tensor([next_ids]),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = out.past_key_values
                best = out.logits[0, -1].topk(2)
                first_id, second_id = best.indices.tolist()
                ids.append(first_id)
                second.append(second_id)
                gaps.append(float(best.values[0] - best.values[1]))
                next_ids = [first_id]
        return OracleRow(
            prompt=tuple(int(token) for token in prompt),
            max_tokens=max_tokens,
            ids=tuple(ids),
            second=tuple(second),
            gaps=tuple(gaps),
        )


def _rounding_cache(rounding: Callable[[Any], Any]) -> Any:
    """A cache of transformers that holds what ``rounding`` makes of keys and values."""
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *others: Any, **named: Any) -> Any:
            return super().update(rounding(key_states), rounding(value_states), *others, **named)

    return RoundingCache()


def compare(
    oracle: Sequence[OracleRow],
    answers: Mapping[int, Answer],
    eos_ids: Sequence[int],
    continue_from: Continue,
) -> Comparison:
    """Compares the answer of every row; ``answers`` by place in ``oracle``, one for each.

    ``continue_from`` is called at ties only.
    """
    result = Comparison()
    if answers.keys() != set(range(len(oracle))):
        result.failures.append(f"{len(answers)} answers do not match {len(oracle)} rows")
    for number, row in enumerate(oracle):
        if number in answers:
            result.num_rows += 1
            failure = _compare_row(row, answers[number], frozenset(eos_ids), continue_from, result)
            if failure is not None:
                result.failures.append(f"row {number}: {failure}")
    return result


def _compare_row(
    row: OracleRow,
    answer: Answer,
    eos_ids: frozenset[int],
    continue_from: Continue,
    result: Comparison,
) -> str | None:
    """What is wrong with an answer, None if nothing; counts steps and ties."""
    ours: list[int | None] = [*answer.ids, None] if answer.ended else [*answer.ids]
    done = 0  # of our tokens, found right or a tie

    def agree(token: int | None, expected: int) -> bool:
        return expected in eos_ids if token is None else token == expected

    while True:
        rest = ours[done:]
        pairs = zip(rest, row.ids, strict=False)
        place = next((i for i, pair in enumerate(pairs) if not agree(*pair)), None)
        if place is None:
            result.num_steps += len(row.ids)
            if len(rest) != len(row.ids):
                return f"{len(ours)} tokens, the oracle has {done + len(row.ids)}"
            return None
        result.num_steps += place + 1
        token, gap = rest[place], row.gaps[place]
        if gap > TIE_GAP or not agree(token, row.second[place]):
            return (
                f"token {done + place} is {'the end' if token is None else token}, the oracle "
                f"has {row.ids[place]}, then {row.second[place]} {gap:.2g} below"
            )
        result.num_ties += 1
        done += place + 1
        room = row.max_tokens - place - 1
        if token is None:
            return None if done == len(ours) else "goes on after its end"
        if room == 0:
            return None if done == len(ours) else "is longer than max_tokens"
        row = continue_from([*row.prompt, *row.ids[:place], token], room)


def save_rows(path: Path, rows: Sequence[OracleRow], **facts: Any) -> None:
    """Writes rows, and ``facts`` about how they came about, as gzipped JSON."""
    content = {
        **facts,
        "rows": [
            {
                "prompt": row.prompt,
                "max_tokens": row.max_tokens,
                "ids": row.ids,
                "second": row.second,
                "gaps": [float(f"{gap:.4g}") for gap in row.gaps],
            }
            for row in rows
        ],
    }
    data = json.dumps(content, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))


def load_rows(path: Path) -> tuple[list[OracleRow], dict[str, Any]]:
    """The rows of `save_rows`, and the facts about them."""
    facts = json.loads(gzip.decompress(path.read_bytes()))
    rows = [
        OracleRow(
            prompt=tuple(row["prompt"]),
            max_tokens=row["max_tokens"],
            ids=tuple(row["ids"]),
            second=tuple(row["second"]),
            gaps=tuple(row["gaps"]),
        )
        for row in facts.pop("rows")
    ]
    return rows, facts
