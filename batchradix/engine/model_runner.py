"""Runs steps on the model: owns weights, KV pool, attention backend and kept hidden states.

It takes no scheduling decision: what to compute, where keys and values go and what is kept is
all in the `Step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import EngineSettings
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.registry import make_backend
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.registry import CausalLM, load_model
from batchradix.engine.step import Step
from batchradix.errors import OptionError, OutOfMemoryError
from batchradix.types import I64

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class ModelRunner:
    """Loads the weights and allocates a pool of ``settings.kv_tokens`` slots.

    Raises `ModelError` when the weights cannot be loaded, `OutOfMemoryError` when they or the
    pool do not fit, and `OptionError` when there is no such device or attention backend.
    """

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config = checkpoint.config
        torch.set_num_threads(settings.num_threads)
        self._device = _open_device(settings.device)
        self._vocab_size = config.vocab_size
        self._holds: dict[int, torch.Tensor] = {}
        self._hidden: torch.Tensor | None = None  # [R, D] of the launched step
        dtype = _DTYPES[settings.dtype]
        self._attention = make_backend(
            settings.attention,
            AttentionShape(
                num_layers=config.num_layers,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
                dtype=dtype,
                device=self._device,
            ),
        )
        with torch.inference_mode():
            try:
                self._model: CausalLM | None = load_model(
                    checkpoint, dtype, self._device, quantize=settings.quantize
                )
                self._pool = self._attention.allocate(settings.kv_tokens)
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                raise OutOfMemoryError(
                    f"memory ran out while loading {checkpoint.name} in {settings.dtype} with "
                    f"room for {settings.kv_tokens} tokens of keys and values; lower kv_tokens "
                    f"or use a smaller model"
                ) from error

    @property
    def num_holds(self) -> int:
        """Hidden states kept for rows that wait for their first token."""
        return len(self._holds)

    def launch(self, step: Step) -> None:
        """Runs the step; on a device it may still be running when this returns.

        Raises `OutOfMemoryError` when what the step needs beside weights and pool does not fit.
        """
        assert self._model is not None, "the runner is closed"
        with _enough_memory(f"a step of {step.num_tokens} tokens"), torch.inference_mode():
            self._hidden = self._run(self._model, step)

    def collect(self, rows: I64 | None = None) -> torch.Tensor:
        """Logits of the launched step: float32[len(rows), vocab_size] on the device.

        ``rows``: int64, places among the step's logit sources; None for all of them.
        """
        model, hidden = self._launched(rows)
        with _enough_memory(f"the logits of {len(hidden)} rows"), torch.inference_mode():
            if len(hidden) == 0:
                return torch.empty((0, self._vocab_size), device=self._device)
            return model.logits(hidden)

    def collect_few(self, rows: I64, token_ids: I64) -> torch.Tensor:
        """The logits of ``token_ids`` (int64[n]) alone: float32[len(rows), n] on the device."""
        model, hidden = self._launched(rows)
        with torch.inference_mode():
            return model.logits_of(hidden, token_ids.tolist())

    def _launched(self, rows: I64 | None) -> tuple[CausalLM, torch.Tensor]:
        assert self._model is not None, "the runner is closed"
        assert self._hidden is not None, "no step was launched"
        hidden = self._hidden
        if rows is not None and len(rows) < len(hidden):
            hidden = hidden[self._tensor(rows)]
        return self._model, hidden

    def close(self) -> None:
        """Drops weights, pool and kept states; idempotent."""
        self._model = None
        self._pool = None
        self._hidden = None
        self._holds.clear()

    def poison_free(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fills the slots ``[start, end)`` with NaN: whoever reads them is found out."""
        with torch.inference_mode():
            for start, end in ranges:
                self._attention.poison(self._pool, start, end - start)

    def _run(self, model: CausalLM, step: Step) -> torch.Tensor:
        self._attention.move(self._pool, step.moves)
        hidden: torch.Tensor | None = None
        if step.num_tokens > 0:
            hidden = model.forward(
                Batch(
                    token_ids=self._tensor(step.token_ids),
                    positions=self._tensor(step.positions),
                    attention=self._attention,
                    plan=self._attention.plan(step),
                    pool=self._pool,
                )
            )
            for query, hold in zip(step.hold_queries.tolist(), step.hold_ids.tolist(), strict=True):
                self._holds[hold] = hidden[query].clone()
        wanted = self._sources(hidden, step.logit_sources)
        for hold in step.free_holds.tolist():
            del self._holds[hold]
        return wanted

    def _sources(self, hidden: torch.Tensor | None, sources: I64) -> torch.Tensor:
        """The hidden states [R, hidden] that the step wants logits of, copied."""
        if len(sources) == 0:
            return torch.empty((0, 0), device=self._device)
        is_query = sources >= 0
        if hidden is not None and is_query.all():
            return hidden.index_select(0, self._tensor(sources))
        rows = [
            self._holds[-1 - source] if hidden is None or source < 0 else hidden[source]
            for source in sources.tolist()
        ]
        return torch.stack(rows)

    def _tensor(self, array: I64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _open_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"the device {name!r} cannot be used here ({reason}); use cpu") from error
    return device


@contextmanager
def _enough_memory(what: str) -> Iterator[None]:
    """Raises `OutOfMemoryError` where torch says so in its own ways."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"memory ran out in {what}; lower prefill_tokens, batch_size or kv_tokens"
        ) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
