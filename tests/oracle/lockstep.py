"""Many rows of the plain loop over one model at once, a forward pass for a token of each.

Each row is a `Constrained` in a thread of its own, which knows nothing of the others: what it
takes for a model waits until all have asked. Prompts are computed one by one. Rows that answer
together stand in a left-padded batch, which rounds otherwise than a row alone, far below what
counts as a tie.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

Ask = Callable[[Any], Any]
"""Runs one row to its end on a model that is called as transformers models are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefilled:
    """A prompt's last logits and its keys and values, [1, heads, tokens, width] a layer."""

    logits: Any
    layers: tuple[tuple[Any, Any], ...]
    num_tokens: int


class _RowModel:
    """The model as one row sees it: its prompt first, then a token a call."""

    def __init__(self, row: int, prompt: Sequence[int], first: Any, asked: SimpleQueue[Any]):
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self._row, self._prompt, self._first, self._asked = row, list(prompt), first, asked

    def __call__(self, *, input_ids: Any, past_key_values: Any, **_: Any) -> Any:
        ids = input_ids[0].tolist()
        if past_key_values is None:
            assert ids == self._prompt
            return SimpleNamespace(logits=self._first, past_key_values=self)
        (token,) = ids
        self._asked.put((self._row, token))
        logits = self.answers.get()
        if logits is None:
            raise RuntimeError("another row failed")
        return SimpleNamespace(logits=logits, past_key_values=self)


class Lockstep:
    """``model``: a transformers causal language model in evaluation mode."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], _Prefilled] = {}

    def __call__(self, rows: Sequence[tuple[Sequence[int], Ask]]) -> list[Any]:
        """What each row returns; ``rows``: prompts, each with what asks the model for it."""
        asked: SimpleQueue[Any] = SimpleQueue()
        prompts = [self._prefill(tuple(prompt)) for prompt, _ in rows]
        models = [
            _RowModel(row, prompt, prompts[row].logits, asked)
            for row, (prompt, _) in enumerate(rows)
        ]
        results: dict[int, Any] = {}

        def run(row: int) -> None:
            try:
                results[row] = rows[row][1](models[row])
            except BaseException as error:
                results[row] = error
            asked.put((row, None))

        threads = [threading.Thread(target=run, args=(row,)) for row in range(len(rows))]
        for thread in threads:
            thread.start()
        try:
            self._serve(prompts, models, asked)
        finally:
            for model in models:
                model.answers.put(None)
            for thread in threads:
                thread.join()
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        return [results[row] for row in range(len(rows))]

    def _serve(
        self, prompts: Sequence[_Prefilled], models: Sequence[_RowModel], asked: SimpleQueue[Any]
    ) -> None:
        """Forward passes over all rows that go on, until none does."""
        import torch

        live = list(range(len(prompts)))
        cache, mask = _stack(prompts)
        positions = torch.tensor([prompt.num_tokens for prompt in prompts])
        while True:
            answers = dict(asked.get() for _ in live)
            places = [place for place, row in enumerate(live) if answers[row] is not None]
            if not places:
                return
            if len(places) < len(live):
                chosen = torch.tensor(places)
                cache.batch_select_indices(chosen)
                mask, positions = mask[chosen], positions[chosen]
                live = [live[place] for place in places]
            mask = torch.cat([mask, torch.ones(len(live), 1, dtype=mask.dtype)], dim=1)
            with torch.inference_mode():
                out = self._model(
                    input_ids=torch.tensor([[answers[row]] for row in live]),
                    attention_mask=mask,
                    position_ids=positions[:, None],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            cache, positions = out.past_key_values, positions + 1
            for place, row in enumerate(live):
                models[row].answers.put(out.logits[place : place + 1])

    def _prefill(self, prompt: tuple[int, ...]) -> _Prefilled:
        import torch

        if prompt not in self._known:
            with torch.inference_mode():
                out = self._model(input_ids=torch.tensor([prompt]), use_cache=True)
            self._known[prompt] = _Prefilled(
                logits=out.logits[:, -1:],
                layers=tuple((layer.keys, layer.values) for layer in out.past_key_values.layers),
                num_tokens=len(prompt),
            )
        return self._known[prompt]


def _stack(prompts: Sequence[_Prefilled]) -> tuple[Any, Any]:
    """A cache of all prompts, padded at the left, and its attention mask [B, tokens]."""
    import torch
    from transformers import DynamicCache

    longest = max(prompt.num_tokens for prompt in prompts)
    pads = [longest - prompt.num_tokens for prompt in prompts]
    cache = DynamicCache()
    for layer in range(len(prompts[0].layers)):
        both = [
            torch.cat(
                [
                    torch.nn.functional.pad(prompt.layers[layer][side], (0, 0, pad, 0))
                    for prompt, pad in zip(prompts, pads, strict=True)
                ]
            )
            for side in (0, 1)
        ]
        cache.update(*both, layer)
    mask = torch.ones(len(prompts), longest, dtype=torch.int64)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return cache, mask
