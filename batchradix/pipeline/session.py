"""A loaded model that answers one small job after another and keeps their prefixes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pyarrow as pa

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import EngineOptions, RunConfig
from batchradix.errors import EngineError
from batchradix.pipeline.answers import Answers, drive
from batchradix.pipeline.job import RadixEngines
from batchradix.pipeline.parts import Parts, open_parts
from batchradix.pipeline.planned import Planned, check_budget, check_scores, plan_rows
from batchradix.pipeline.retries import open_retries
from batchradix.pipeline.table import Table
from batchradix.report.machine import machine
from batchradix.report.progress import Silent
from batchradix.settings import resolve_engine
from batchradix.types import Engine, Result, Usage

_LOGGER = logging.getLogger("batchradix")


class Session:
    """Answers jobs in memory with one engine, whose weights load with the first row to run.

    The ``engine`` of a job's config is not looked at: that of all is ``options``. Calls from
    several threads run one after the other. A call that was interrupted leaves nothing behind:
    the next one loads the weights again. What a person should know is logged (``batchradix``,
    as warnings), each sentence once.
    """

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions) -> None:
        self.checkpoint = checkpoint
        self._options = options
        self._engines = RadixEngines(checkpoint, options=options)
        self._engine: Engine | None = None
        self._former = Usage()
        self._told: set[str] = set()
        self._is_closed = False
        self._busy = threading.RLock()  # a signal handler may close while it answers

    @property
    def usage(self) -> Usage:
        """The counters of all calls so far."""
        if self._engine is None:
            return replace(self._former)
        return self._former + self._engine.usage

    def results(self, config: RunConfig) -> list[Result]:
        """One `Result` a row, in order. Raises the `UsageError` of whatever is wrong."""
        found: dict[int, Result] = {}

        def emit(result: Result) -> None:
            found[result.row] = result

        with self._busy:
            parts, planned = self._plan(config)
            self._answer(parts, planned, emit)
        return [found[row] for row in range(len(planned.rows))]

    def table(self, config: RunConfig) -> pa.Table:
        """The table that a run without an output path gives; errors as `results`."""
        with self._busy:
            parts, planned = self._plan(config)
            table = Table(
                planned.rows,
                source=parts.source,
                schema=parts.values,
                options=config.output,
                metadata={},
                fingerprint={},
                folder=None,
                cached_tokens=planned.cached,
                probabilities=config.sampling.probabilities,
                has_reasoning=parts.prompts.may_think,
            )
            self._answer(parts, planned, table.append)
            return table.finish()

    def _plan(self, config: RunConfig) -> tuple[Parts, Planned]:
        if self._is_closed:
            raise EngineError("this model is closed; make a new one")
        config = replace(config, engine=self._options)
        parts = open_parts(config, progress=Silent(), checkpoint=self.checkpoint)
        self._engines.check(parts.schema)
        check_budget(parts)
        check_scores(parts, self._engines.check_scores)
        opening = self._engines.opening
        planned = plan_rows(parts, folder=None, progress=Silent(), opening=opening)
        self._tell(parts.warnings + planned.warnings)
        return parts, planned

    def _answer(self, parts: Parts, planned: Planned, emit: Callable[[Result], None]) -> None:
        answers = Answers(planned)
        for row in planned.rows.errors:
            emit(answers.failed(row))
        todo = np.sort(planned.plan.order)
        if not len(todo):
            return
        try:
            engine = self._loaded_engine()
            drive(
                engine,
                planned,
                answers,
                todo,
                emit,
                prefix_cache=self._options.prefix_cache,
                retain=True,
                retries=open_retries(parts, planned),
            )
        except BaseException:
            self._drop_engine()  # it may be stopped halfway through a step
            raise
        self._tell(engine.notices)

    def _tell(self, sentences: Iterable[str]) -> None:
        for text in sentences:
            if text not in self._told:
                self._told.add(text)
                _LOGGER.warning(text)

    def _loaded_engine(self) -> Engine:
        if self._engine is None:
            from batchradix.engine.attention.registry import num_kv_copies
            from batchradix.engine.device import find_device

            device, free_device_memory_bytes = find_device(self._options.device)
            model = self.checkpoint.config
            here = machine(device, free_device_memory_bytes)
            settings = resolve_engine(
                self._options,
                here,
                num_kv_copies=num_kv_copies(model, self._options, here),
                num_kv_elements_per_token=model.num_kv_elements_per_token,
                weight_bytes_float32=4 * model.num_parameters,
                kept_weight_bytes=self.checkpoint.kept_bytes
                if self._options.quantize == "keep"
                else None,
            )
            self._engine = self._engines(settings)
        return self._engine

    def close(self) -> None:
        """Frees weights and cache; idempotent."""
        with self._busy:
            self._is_closed = True
            self._drop_engine()

    def _drop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            self._former += engine.usage
            engine.close()
