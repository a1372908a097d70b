"""Small steps as graphs: recorded once a size, then replayed with the inputs of each step.

Launching the kernels of a decode step one by one takes the host longer than the device takes to
run them. A graph fixes the kernels, their sizes and the memory they work on, so steps are filled
up to one of a few sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from batchradix.engine.accelerator import Accelerator, Replay
from batchradix.engine.attention.base import FixedPlans, KVBackend
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.registry import CausalLM
from batchradix.engine.step import Step

MAX_TOKENS = 512  # of larger steps the device takes longer than the host
MAX_GRAPHS = 128  # each takes some memory of the device


@dataclass(frozen=True, slots=True)
class _Graph:
    batch: Batch
    replay: Replay


class DecodeGraphs:
    """Runs steps of at most ``max_tokens`` tokens; ``attention`` must have `FixedPlans`.

    ``notices`` says so when memory for graphs runs out; then `run` runs no step any more.
    """

    def __init__(
        self, accelerator: Accelerator, attention: KVBackend, pool: Any, max_tokens: int
    ) -> None:
        assert isinstance(attention, FixedPlans)
        self._accelerator = accelerator
        self._attention = attention
        self._plans: FixedPlans = attention
        self._pool = pool
        self._sizes = token_sizes(min(max_tokens, MAX_TOKENS))
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self.notices: list[str] = []

    def run(self, model: CausalLM, step: Step, token_ids: torch.Tensor) -> torch.Tensor | None:
        """`CausalLM.forward` of the step: [T, hidden], valid until the next step; None where it
        has to run without a graph. ``token_ids``: int64[T] on the device."""
        num_tokens = step.num_tokens
        if self.notices or num_tokens > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        layout = self._plans.lay_out(step)
        key = self._plans.sizes(layout, size)
        graph = self._graphs.get(key)
        try:
            batch = self._batch(key, size) if graph is None else graph.batch
            batch.token_ids[:num_tokens].copy_(token_ids)
            batch.positions[:num_tokens].copy_(self._accelerator.upload(step.positions))
            self._plans.fill(batch.plan, layout)
            if graph is None:
                graph = _Graph(batch, self._accelerator.capture(lambda: model.forward(batch)))
        except torch.OutOfMemoryError:
            self._graphs.clear()
            self.notices.append(
                "memory ran out for CUDA graphs; it goes on without them, which is slower for few "
                "rows; lower --kv-memory or --kv-tokens next time"
            )
            return None
        self._keep(key, graph)
        return graph.replay()[:num_tokens]

    def close(self) -> None:
        self._graphs.clear()

    def _batch(self, key: Hashable, size: int) -> Batch:
        device = self._accelerator.device
        return Batch(
            token_ids=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            attention=self._attention,
            plan=self._plans.empty_plan(key),
            pool=self._pool,
        )

    def _keep(self, key: Hashable, graph: _Graph) -> None:
        self._graphs[key] = graph
        self._graphs.move_to_end(key)
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)


def token_sizes(most: int) -> list[int]:
    """The sizes that steps are filled up to, ascending: about an eighth more at most, from 8 on."""
    sizes = [1, 2, 4]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(4, 1 << max(0, sizes[-1].bit_length() - 4)))
    return [size for size in sizes if size < most] + [most]
