"""Ray Data: a class for ``Dataset.map_batches``, and a data set in the order of its plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from batchradix import pipeline
from batchradix.errors import InputError
from batchradix.integrations.answerer import Answerer
from batchradix.integrations.batches import answered
from batchradix.integrations.options import job_config
from batchradix.plan.shards import split_plan
from batchradix.report.progress import Silent


class RayExtractor(Answerer):
    """A class for ``dataset.map_batches(RayExtractor, fn_constructor_kwargs=job, concurrency=2,
    batch_format="pyarrow", batch_size=None)``, which answers every row of a block.

    Each actor loads the model once and keeps its prefixes between blocks; it takes as many threads
    as Ray gave it CPUs (``num_cpus``), and the GPU that it was given (``num_gpus=1``), unless
    the options say otherwise. Options and columns are those of `Answerer`; name ``kv_memory_bytes``
    where several share a machine.
    """

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with the columns of the answers behind its own. Raises `InputError` for a batch
        of another kind, and the `UsageError` of whatever is wrong with the job."""
        if not isinstance(batch, pa.Table):
            raise InputError(
                f'give map_batches batch_format="pyarrow", so that columns keep their types: a '
                f"batch is a {type(batch).__name__} here"
            )
        if self._session is None and self._config.engine.num_threads is None:
            self._config = replace(
                self._config, engine=replace(self._config.engine, num_threads=_given_threads())
            )
        return answered(batch, self.answers(batch))


def _given_threads() -> int | None:
    """The CPUs that Ray gave this actor; None where it gave none."""
    import ray

    if not ray.is_initialized():
        return None
    given = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
    return int(given) or None


def ordered_by_plan(dataset: Any, num_blocks: int, **options: Any) -> Any:
    """A ``ray.data.Dataset`` of the same rows, those that share prefixes side by side.

    Its ``num_blocks`` blocks are the planner's shards: about the same work, cut where the least is
    computed twice. ``options`` are those of the `RayExtractor` that is to follow. The rows come
    to this process, which tokenises their prompts and loads no weights; rows that cannot run are
    in the last block. Raises the `UsageError` of whatever is wrong with the job.
    """
    import ray

    blocks = ray.get(dataset.to_arrow_refs())
    table = pa.concat_tables(blocks, promote_options="default").combine_chunks()
    config = replace(job_config(options), input=table)
    parts = pipeline.open_parts(config, progress=Silent())
    planned = pipeline.plan_rows(parts, folder=None, progress=Silent())
    order, rows = planned.plan.order, planned.rows
    shards = split_plan(planned.plan, rows.lengths, rows.requests.max_tokens, num_blocks)
    runs = np.zeros(len(table), dtype=np.bool_)
    runs[order] = True
    edges = shards.cuts.tolist()
    places = [order[first:last] for first, last in itertools.pairwise(edges)]
    places[-1] = np.concatenate([places[-1], np.flatnonzero(~runs)])
    return ray.data.from_arrow([table.take(pa.array(rows)) for rows in places])
