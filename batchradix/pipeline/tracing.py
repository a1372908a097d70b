"""What the trace of a run is told beside its steps: the plan, as a picture can show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from batchradix.pipeline.tree_picture import tree_picture
from batchradix.report.trace import TraceWriter
from batchradix.scratch import Scratch
from batchradix.settings import EngineSettings
from batchradix.types import EngineJob, StepObserver


class Tracing:
    """Traces one run into ``folder``: show `observer` the steps, hand it the job, `close` it.

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
        self._token_bytes = token_bytes
        self._scratch = scratch

    @property
    def observer(self) -> StepObserver:
        """Writes every step of the engine that it is shown."""
        return self._writer

    def begin(self, job: EngineJob) -> None:
        """Writes what is to be done; call it before the first step."""
        settings = self._settings
        picture = tree_picture(
            job.tokens,
            job.plan,
            job.tree,
            token_bytes=self._token_bytes,
            scratch=self._scratch,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            model=self._model,
            dtype=settings.dtype,
            device=settings.device,
            batch_size=settings.batch_size,
            kv_tokens=settings.kv_tokens,
        )
        self._writer.begin(picture)

    def close(self) -> None:
        """Writes the last steps; idempotent."""
        self._writer.close()
