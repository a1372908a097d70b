"""Runs steps on the model: owns weights, KV pool, attention backend and kept hidden states.

It takes no scheduling decision: what to compute, where keys and values go and what is kept is
all in the `Step`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import torch

from batchradix.checkpoint.cache_folder import cache_folder
from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import EngineSettings
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.registry import make_backend
from batchradix.engine.cache.pool import Extent, slots_of
from batchradix.engine.cache.spill import SpillSpace
from batchradix.engine.cache.store import KVStore
from batchradix.engine.device import open_device
from batchradix.engine.memory import Retreat, enough_memory
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.registry import CausalLM, load_model
from batchradix.engine.step import KVBlock, KVLoad, KVSave, KVTransfer, Step
from batchradix.types import I64

_LOWER = "lower `prefill_tokens`, `batch_size` or `kv_tokens`"


class ModelRunner:
    """Loads the weights and allocates a pool of ``settings.kv_tokens`` slots.

    ``store`` takes what steps save, ``space`` what they spill. ``retreat`` says how many tokens
    go through the model at once.

    Raises `ModelError` when the weights cannot be loaded, `OutOfMemoryError` when they or the
    pool do not fit, and `OptionError` when there is no such device or attention backend.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: EngineSettings,
        store: KVStore | None = None,
        space: SpillSpace | None = None,
        retreat: Retreat | None = None,
    ) -> None:
        self._store = store
        self._space = space
        self._retreat = retreat or forward_retreat()
        config = checkpoint.config
        torch.set_num_threads(settings.num_threads)
        self._device = open_device(settings.device)
        self._vocab_size = config.vocab_size
        self._holds: dict[int, torch.Tensor] = {}
        self._hidden: torch.Tensor | None = None  # [R, D] of the launched step
        self._block_shape = (config.num_layers, config.num_kv_heads, -1, config.head_dim)
        shape = AttentionShape.of(
            config,
            dtype=settings.dtype,
            device=self._device,
            batch_invariant=settings.deterministic,
        )
        self._dtype = shape.dtype
        self._attention = make_backend(settings.attention, shape, cache_folder())
        loading = (
            f"while loading {checkpoint.name} in {settings.dtype} with room for "
            f"{settings.kv_tokens} tokens of keys and values"
        )
        smaller = "lower `kv_tokens` or use a smaller model"
        with enough_memory(loading, smaller), torch.inference_mode():
            self._model: CausalLM | None = load_model(
                checkpoint,
                shape.dtype,
                self._device,
                quantize=settings.quantize,
                batch_invariant=settings.deterministic,
            )
            self._pool = self._attention.allocate(settings.kv_tokens)

    @property
    def num_holds(self) -> int:
        """Hidden states kept for rows that wait for their first token."""
        return len(self._holds)

    def launch(self, step: Step) -> None:
        """Runs the step; on a device it may still be running when this returns.

        Raises `OutOfMemoryError` when what the step needs beside weights and pool does not fit,
        one token at a time.
        """
        assert self._model is not None, "the runner is closed"
        what = f"in a step of {step.num_tokens} tokens"
        with enough_memory(what, _LOWER), torch.inference_mode():
            self._hidden = self._run(self._model, step)

    def collect(self, rows: I64 | None = None) -> torch.Tensor:
        """Logits of the launched step: [len(rows), vocab_size] on the device, in the model's dtype
        or float32.

        ``rows``: int64, places among the step's logit sources; None for all of them.
        """
        model, hidden = self._launched(rows)
        with enough_memory(f"in the logits of {len(hidden)} rows", _LOWER), torch.inference_mode():
            if len(hidden) == 0:
                return torch.empty((0, self._vocab_size), device=self._device)
            return model.logits(hidden)

    def collect_few(self, rows: I64, token_ids: I64) -> torch.Tensor:
        """The logits of ``token_ids`` (int64[n]) alone: float32[len(rows), n] on the device."""
        model, hidden = self._launched(rows)
        with enough_memory(f"in the logits of {len(hidden)} rows", _LOWER), torch.inference_mode():
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
        if self._space is not None:
            self._space.close()
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
        for spill in step.spills:
            self._spill(spill)
        self._attention.move(self._pool, step.moves)
        for reload in step.reloads:
            self._reload(reload)
        for load in step.loads:
            self._load(load)
        hidden: torch.Tensor | None = None
        if step.num_tokens > 0:
            started_s = time.perf_counter()
            hidden = self._forward(model, step)
            if self._space is not None:
                self._space.note_computed(step.num_tokens, time.perf_counter() - started_s)
            for query, hold in zip(step.hold_queries.tolist(), step.hold_ids.tolist(), strict=True):
                self._holds[hold] = hidden[query].clone()
        for save in step.saves:
            self._save(save)
        wanted = self._sources(hidden, step.logit_sources)
        for hold in step.free_holds.tolist():
            del self._holds[hold]
        return wanted

    def _forward(self, model: CausalLM, step: Step) -> torch.Tensor:
        """The final hidden states of all queries, [T, hidden]."""

        def forward(first: int, last: int) -> torch.Tensor:
            part = step if last - first == step.num_tokens else step.part(first, last)
            return model.forward(
                Batch(
                    token_ids=self._tensor(part.token_ids),
                    positions=self._tensor(part.positions),
                    attention=self._attention,
                    plan=self._attention.plan(part),
                    pool=self._pool,
                )
            )

        parts = self._retreat.in_parts(step.num_tokens, forward)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _load(self, load: KVLoad) -> None:
        k, v = (
            torch.frombuffer(side, dtype=self._dtype).view(self._block_shape)
            for side in (load.block.k, load.block.v)
        )
        first = load.first
        for slot_start, num_slots in load.extents.tolist():
            self._put(slot_start, k, v, slice(first, first + num_slots))
            first += num_slots

    def _spill(self, spill: KVTransfer) -> None:
        assert self._space is not None
        slots = slots_of(_pairs(spill.extents))
        # token by token, so that any run of places is one of bytes
        k_and_v = torch.stack(self._attention.export(self._pool, slots)).permute(3, 0, 1, 2, 4)
        self._space.write(_pairs(spill.places), _bytes(k_and_v))

    def _reload(self, reload: KVTransfer) -> None:
        assert self._space is not None
        layers, heads, _, width = self._block_shape
        data = torch.frombuffer(self._space.read(_pairs(reload.places)), dtype=self._dtype)
        k, v = data.view(-1, 2, layers, heads, width).permute(1, 2, 3, 0, 4).unbind(0)
        first = 0
        for slot_start, num_slots in reload.extents.tolist():
            self._put(slot_start, k, v, slice(first, first + num_slots))
            first += num_slots

    def _put(self, slot_start: int, k: torch.Tensor, v: torch.Tensor, taken: slice) -> None:
        k, v = k[:, :, taken].to(self._device), v[:, :, taken].to(self._device)
        self._attention.load(self._pool, slot_start, k, v)

    def _save(self, save: KVSave) -> None:
        if self._store is None:
            return
        k, v = map(_bytes, self._attention.export(self._pool, save.slots))
        self._store.write(save.key, KVBlock(start=save.start, k=k, v=v))

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


def forward_retreat() -> Retreat:
    """What a runner is given to go on with less at once where memory runs out."""
    flags = "--prefill-tokens, --batch-size or --kv-tokens"
    return Retreat("in a forward pass", "tokens", flags)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().data.cast("B")


def _pairs(table: I64) -> list[Extent]:
    return [(int(start), int(length)) for start, length in table]
