"""What the trace of a run is told beside its steps: the plan, as a picture can show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchradix.plan.outline import TreeOutline, outline_tree
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.report.trace import TracedPlan, TraceWriter
from batchradix.scratch import Scratch
from batchradix.settings import EngineSettings
from batchradix.types import Engine, EngineJob, Observable

_LABEL_TOKENS = 24
_LABEL_CHARACTERS = 48


class Tracing:
    """Traces one run into ``folder``: hand it the engine, then the job, and `close` it.

    ``token_bytes`` are those of the tokenizer; what cannot be written is told to ``warn``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        settings: EngineSettings,
        token_bytes: Sequence[bytes],
        scratch: Scratch,
        warn: Callable[[str], None],
    ) -> None:
        self._writer = TraceWriter(folder, warn)
        self._model = model
        self._settings = settings
        self._detokenizer = IncrementalDetokenizer(token_bytes)
        self._scratch = scratch

    def attach(self, engine: Engine) -> None:
        """Has every step of the engine written; one that shows none leaves the plan alone."""
        if isinstance(engine, Observable):
            engine.observe(self._writer)

    def begin(self, job: EngineJob) -> None:
        """Writes what is to be done; call it before the first step."""
        lengths = self._scratch.zeros(len(job.tokens), np.int64)
        for part in self._scratch.windows(len(lengths)):
            lengths[part] = np.diff(job.tokens.offsets[part.start : part.stop + 1])
        outline = outline_tree(job.plan, job.tree, lengths, scratch=self._scratch)
        settings = self._settings
        facts = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": self._model,
            "dtype": settings.dtype,
            "device": settings.device,
            "batch_size": settings.batch_size,
            "kv_tokens": settings.kv_tokens,
            "rows": len(job.plan),
            "planned_tokens": int(outline.bin_planned_tokens.sum()),
            "distinct_tokens": int(outline.bin_distinct_tokens.sum()),
            "bin_planned_tokens": outline.bin_planned_tokens.tolist(),
            "bin_distinct_tokens": outline.bin_distinct_tokens.tolist(),
        }
        self._writer.begin(TracedPlan(facts=facts, pieces=self._pieces(job, outline)))
        self._scratch.let_go()

    def close(self) -> None:
        """Writes the last steps; idempotent."""
        self._writer.close()

    def _pieces(self, job: EngineJob, outline: TreeOutline) -> pa.Table:
        is_node = outline.node >= 0
        labels = [
            self._label(job, first, start, start + size) if shown else ""
            for first, start, size, shown in zip(
                outline.first.tolist(),
                outline.start.tolist(),
                outline.distinct_tokens.tolist(),
                is_node.tolist(),
                strict=True,
            )
        ]
        return pa.table(
            {
                "first": outline.first,
                "last": outline.last,
                "start": outline.start,
                "is_node": np.asarray(is_node),
                "num_nodes": outline.num_nodes,
                "planned_tokens": outline.planned_tokens,
                "distinct_tokens": outline.distinct_tokens,
                "label": pa.array(labels, pa.string()),
            }
        )

    def _label(self, job: EngineJob, position: int, start: int, end: int) -> str:
        """How the text of a node begins."""
        tokens = job.tokens[int(job.plan.order[position])][start : min(end, start + _LABEL_TOKENS)]
        state = self._detokenizer.start()
        text = "".join(state.push(token) for token in tokens.tolist())
        return text[:_LABEL_CHARACTERS]
