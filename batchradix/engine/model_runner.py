"""Runs steps on the model: owns weights, KV pool, attention backend and kept hidden states.

It takes no scheduling decision: what to compute, where keys and values go and what is kept is
all in the `Step`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from batchradix.checkpoint.cache_folder import cache_folder
from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.accelerator import Accelerator, open_accelerator
from batchradix.engine.attention.base import FixedPlans, KVBackend, torch_dtype
from batchradix.engine.attention.registry import attention_shape, make_any_backend
from batchradix.engine.cache.pool import Extent, slots_of
from batchradix.engine.cache.spill import SpillSpace
from batchradix.engine.cache.store import KVStore
from batchradix.engine.decode_graphs import DecodeGraphs
from batchradix.engine.device import open_device
from batchradix.engine.kv_room import fitting_slots
from batchradix.engine.memory import Retreat, enough_memory
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.registry import CausalLM, load_model
from batchradix.engine.models.source import TensorSource
from batchradix.engine.step import KVBlock, KVLoad, KVSave, KVTransfer, Step
from batchradix.errors import OptionError
from batchradix.settings import EngineSettings
from batchradix.types import I64

_LOWER = "lower `prefill_tokens`, `batch_size` or `kv_tokens`"


class ModelRunner:
    """Loads the weights and allocates a pool of ``settings.kv_tokens`` slots.

    ``store`` takes what steps save, ``space`` what they spill. ``retreat`` says how many tokens
    go through the model at once. ``source``: weights from elsewhere than the checkpoint's files.

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
        accelerator: Accelerator | None = None,
        *,
        source: TensorSource | None = None,
    ) -> None:
        self._store = store
        self._space = space
        self._retreat = retreat or forward_retreat()
        config = checkpoint.config
        torch.set_num_threads(settings.num_threads)
        self._device = open_device(settings.device)
        self._accelerator = accelerator or open_accelerator(self._device)
        self._vocab_size = config.vocab_size
        self._holds: dict[int, torch.Tensor] = {}
        self._hidden: torch.Tensor | None = None  # [R, D] of the launched step
        heads, *sizes = config.kv_shape
        self._block_shapes = [(config.num_layers, heads, -1, size) for size in sizes]
        self._attention, self._kv_dtype = _make_attention(config, settings, self._device)
        loading = (
            f"while loading {checkpoint.name} in {settings.dtype} with room for "
            f"{settings.kv_tokens} tokens of keys and values"
        )
        smaller = "lower `kv_tokens` or use a smaller model"
        with enough_memory(loading, smaller), torch.inference_mode():
            self._model: CausalLM | None = load_model(
                checkpoint,
                torch_dtype(settings.dtype),
                self._device,
                quantize=settings.quantize,
                batch_invariant=settings.deterministic,
                source=source,
            )
            self.num_slots = settings.kv_tokens
            if settings.profile_kv:
                self.num_slots = self._fitting_slots(self._model, config, settings)
            self._pool = self._attention.allocate(self.num_slots)
        self._graphs: DecodeGraphs | None = None
        recordable = isinstance(self._attention, FixedPlans) and self._model.is_recordable
        if settings.cuda_graphs == "on" or (settings.cuda_graphs == "auto" and recordable):
            self._graphs = self._make_graphs(self._model, config, settings)

    @property
    def notices(self) -> list[str]:
        """What went otherwise than was asked for."""
        return [] if self._graphs is None else self._graphs.notices

    @property
    def num_holds(self) -> int:
        """Hidden states kept for rows that wait for their first token."""
        return len(self._holds)

    def launch(self, step: Step, chosen: torch.Tensor | None = None) -> None:
        """Runs the step; on a device it may still be running when this returns.

        ``chosen``: int64 on the device, the tokens that the step's negative token ids stand for:
        ``-1 - i`` for ``chosen[i]``. Raises `OutOfMemoryError` when what the step needs beside
        weights and pool does not fit, one token at a time.
        """
        assert self._model is not None, "the runner is closed"
        what = f"in a step of {step.num_tokens} tokens"
        with enough_memory(what, _LOWER), torch.inference_mode():
            self._hidden = self._run(self._model, step, chosen)

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

    def _make_graphs(
        self, model: CausalLM, config: ModelConfig, settings: EngineSettings
    ) -> DecodeGraphs:
        if not isinstance(self._attention, FixedPlans):
            if config.mla is not None:
                raise OptionError(
                    "`cuda_graphs` are not supported for models with latent attention (MLA); "
                    "leave them out"
                )
            raise OptionError(
                f"`cuda_graphs` need an `attention` of triton, not {settings.attention}; change "
                f"that, or leave them out"
            )
        if not model.is_recordable:
            raise OptionError(
                "`cuda_graphs` are not supported for the experts of this model, which the host "
                "has to count in each layer; leave them out"
            )
        return DecodeGraphs(
            self._accelerator, self._attention, self._pool, max_tokens=settings.batch_size
        )

    def _fitting_slots(self, model: CausalLM, config: ModelConfig, settings: EngineSettings) -> int:
        """Slots for which there is memory beside what the largest step takes, of those wanted."""
        return fitting_slots(
            self._accelerator,
            model,
            self._attention,
            most=settings.kv_tokens,
            token_bytes=config.num_kv_elements_per_token * settings.kv_element_bytes,
            prefill_tokens=settings.prefill_tokens,
            batch_size=settings.batch_size,
        )

    def _launched(self, rows: I64 | None) -> tuple[CausalLM, torch.Tensor]:
        assert self._model is not None, "the runner is closed"
        assert self._hidden is not None, "no step was launched"
        hidden = self._hidden
        if rows is not None and len(rows) < len(hidden):
            hidden = hidden[self._accelerator.upload(rows)]
        return self._model, hidden

    def close(self) -> None:
        """Drops weights, pool and kept states; idempotent."""
        if self._space is not None:
            self._space.close()
        self._model = None
        self._pool = None
        self._hidden = None
        self._holds.clear()
        if self._graphs is not None:
            self._graphs.close()

    def poison_free(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fills the slots ``[start, end)`` with NaN: whoever reads them is found out."""
        with torch.inference_mode():
            for start, end in ranges:
                self._attention.poison(self._pool, start, end - start)

    def _run(self, model: CausalLM, step: Step, chosen: torch.Tensor | None) -> torch.Tensor:
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
            hidden = self._forward(model, step, chosen)
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

    def _forward(self, model: CausalLM, step: Step, chosen: torch.Tensor | None) -> torch.Tensor:
        """The final hidden states of all queries, [T, hidden]."""
        token_ids = self._token_ids(step, chosen)
        if self._graphs is not None:
            hidden = self._graphs.run(model, step, token_ids)
            if hidden is not None:
                return hidden

        def forward(first: int, last: int) -> torch.Tensor:
            part = step if last - first == step.num_tokens else step.part(first, last)
            return model.forward(
                Batch(
                    token_ids=token_ids[first:last],
                    positions=self._accelerator.upload(part.positions),
                    attention=self._attention,
                    plan=self._attention.plan(part),
                    pool=self._pool,
                )
            )

        parts = self._retreat.in_parts(step.num_tokens, forward)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _token_ids(self, step: Step, chosen: torch.Tensor | None) -> torch.Tensor:
        """int64[T] on the device, with no token left open."""
        token_ids = self._accelerator.upload(step.token_ids)
        if (step.token_ids >= 0).all():
            return token_ids
        assert chosen is not None, "a step waits for tokens that nobody chooses"
        return torch.where(token_ids < 0, chosen[(-1 - token_ids).clamp_min(0)], token_ids)

    def _load(self, load: KVLoad) -> None:
        k, v = (
            torch.frombuffer(side, dtype=self._kv_dtype).view(shape)
            for side, shape in zip((load.block.k, load.block.v), self._block_shapes, strict=True)
        )
        first = load.first
        for slot_start, num_slots in load.extents.tolist():
            self._put(slot_start, k, v, slice(first, first + num_slots))
            first += num_slots

    def _spill(self, spill: KVTransfer) -> None:
        assert self._space is not None
        slots = slots_of(_pairs(spill.extents))
        # token by token, so that any run of places is one of bytes
        k_and_v = torch.cat(self._attention.export(self._pool, slots), dim=-1).permute(2, 0, 1, 3)
        self._space.write(_pairs(spill.places), _bytes(k_and_v))

    def _reload(self, reload: KVTransfer) -> None:
        assert self._space is not None
        (layers, heads, _, k_size), (*_, v_size) = self._block_shapes
        data = torch.frombuffer(self._space.read(_pairs(reload.places)), dtype=self._kv_dtype)
        k_and_v = data.view(-1, layers, heads, k_size + v_size).permute(1, 2, 0, 3)
        k, v = k_and_v[..., :k_size], k_and_v[..., k_size:]
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
            return hidden.index_select(0, self._accelerator.upload(sources))
        rows = [
            self._holds[-1 - source] if hidden is None or source < 0 else hidden[source]
            for source in sources.tolist()
        ]
        return torch.stack(rows)


def _make_attention(
    config: ModelConfig, settings: EngineSettings, device: torch.device
) -> tuple[KVBackend, torch.dtype]:
    """The backend, and what it stores. Raises `OptionError` when there is none for the model."""
    shape = attention_shape(
        config,
        dtype=settings.dtype,
        device=device,
        batch_invariant=settings.deterministic,
        kv_dtype=settings.kv_dtype,
    )
    return make_any_backend(settings.attention, shape, cache_folder()), shape.pool_dtype


def forward_retreat() -> Retreat:
    """What a runner is given to go on with less at once where memory runs out."""
    flags = "--prefill-tokens, --batch-size or --kv-tokens"
    return Retreat("in a forward pass", "tokens", flags)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().data.cast("B")


def _pairs(table: I64) -> list[Extent]:
    return [(int(start), int(length)) for start, length in table]
