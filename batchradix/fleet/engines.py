"""What makes the engine of a job that runs on workers, here and in each of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import EngineOptions, RunConfig
from batchradix.errors import ModelError
from batchradix.fleet.engine import FleetEngine
from batchradix.fleet.ray_crew import Place, RayCrew
from batchradix.fleet.ray_session import RaySession, check_ray
from batchradix.pipeline.job import EngineFactory, RadixEngines
from batchradix.report.machine import machine
from batchradix.schema.answer_format import AnswerFormat
from batchradix.settings import EngineSettings, resolve_engine
from batchradix.types import Engine, GrammarSpec


def engines_for(config: RunConfig) -> EngineFactory | None:
    """What makes the engine of a job as its options ask for; None where this process runs it.

    Raises `OptionError` where there is no Ray for workers.
    """
    if not config.fleet.is_wanted:
        return None
    check_ray(config.fleet)
    return lambda checkpoint, schema: FleetEngines(checkpoint, schema, config=config)


class FleetEngines:
    """Makes a `FleetEngine` on Ray; grammars compile here first, and workers read them from the
    cache. A `pipeline.EngineMaker`."""

    def __init__(
        self, checkpoint: Checkpoint, schema: AnswerFormat | None, *, config: RunConfig
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._here = RadixEngines(checkpoint, schema, options=config.engine)

    def opening(self, spec: GrammarSpec) -> Sequence[int]:
        """The tokens with which every answer under a grammar begins."""
        return self._here.opening(spec)

    def check_scores(self, spec: GrammarSpec) -> None:
        """Raises `SchemaError` where a grammar's choices part at too many places."""
        self._here.check_scores(spec)

    def __call__(self, settings: EngineSettings) -> Engine:
        """Starts Ray and the workers; returns when the first of them is ready."""
        self._here.close()
        config = self._config
        session = RaySession(config.fleet, config.engine)
        try:
            count, place = session.places(config.fleet, config.engine)
            is_local = config.fleet.ray_address is None
            name = config.model
            recipe = EngineRecipe(
                model=os.path.abspath(name) if is_local and os.path.exists(name) else name,
                lora=None if config.lora is None else os.path.abspath(config.lora),
                content_hash=None if is_local else self._checkpoint.content_hash,
                options=replace(config.engine, dtype=settings.dtype),
                place=place,
                demand_tokens=settings.kv_tokens if is_local else None,
            )
            crew = RayCrew(recipe, count, place, session.close)
        except BaseException:
            session.close()
            raise
        return FleetEngine(
            crew,
            context_length=self._checkpoint.config.context_length,
            batch_size=settings.batch_size,
            prefix_cache=settings.prefix_cache,
            timeout_s=config.fleet.worker_timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """Makes a worker's engine in its process: the model by its name, and the options settled on
    its machine, of which it has the share that ``place`` says. ``content_hash``: of the driver's
    checkpoint, None where both read the same files. ``demand_tokens``: the most KV tokens that the
    whole job can use, None where that is not known."""

    model: str
    lora: str | None
    content_hash: str | None
    options: EngineOptions
    place: Place
    demand_tokens: int | None

    def __call__(self) -> Engine:
        """Loads the weights. Raises `ModelError` where the model is another one here."""
        from batchradix.engine.attention.registry import num_kv_copies
        from batchradix.engine.device import find_device

        checkpoint = open_checkpoint(self.model, lora=self.lora)
        if self.content_hash not in (None, checkpoint.content_hash):
            raise ModelError(
                f"a worker's machine has another model under the name {self.model}; give every "
                f"machine the same files"
            )
        place, model = self.place, checkpoint.config
        device = "cuda" if place.num_gpus else "cpu"
        options = replace(self.options, device=device, num_threads=place.num_threads)
        found, free_device_memory_bytes = find_device(device)
        here = machine(found, free_device_memory_bytes)
        here = replace(here, free_memory_bytes=here.free_memory_bytes // place.num_sharing)
        settings = resolve_engine(
            options,
            here,
            num_kv_copies=num_kv_copies(model, options, here),
            num_kv_elements_per_token=model.num_kv_elements_per_token,
            weight_bytes_float32=4 * model.num_parameters,
            demand_tokens=self.demand_tokens,
        )
        return RadixEngines(checkpoint, options=options)(settings)
