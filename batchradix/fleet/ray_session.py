"""A Ray that is started for a run and ends with it, or a cluster that is there already."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from batchradix.config import EngineOptions
from batchradix.errors import OptionError, RunError
from batchradix.fleet.ray_crew import Place
from batchradix.fleet_options import FleetOptions
from batchradix.report.machine import num_threads

_OBJECT_STORE_BYTES = 256 * 2**20
_ORPHANED_S = "10"
_LONGEST_FOLDER = 40  # characters: the names of Ray's sockets below it must stay under 108


def check_ray(options: FleetOptions) -> None:
    """Raises `OptionError` where there is no Ray to run workers on."""
    if options.is_wanted and importlib.util.find_spec("ray") is None:
        raise OptionError(
            "`workers` run on Ray, which is not installed; run pip install 'batchradix[ray]', or "
            "leave them out"
        )


class RaySession:
    """Ray, started or joined; ``close`` ends what was started here and is idempotent.

    A Ray that this process is connected to already is used as it is, and left so. Raises
    `RunError` where Ray cannot be started, or the cluster not be reached.
    """

    def __init__(self, options: FleetOptions, engine: EngineOptions) -> None:
        self._folder: str | None = None
        self._is_mine = False
        # Nobody is told of a run, and workers without a GPU need no warning about theirs.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        with _own_signals():
            import ray

            self._ray: Any = ray
            if ray.is_initialized():
                return
            quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
            try:
                if options.ray_address is not None:
                    ray.init(address=options.ray_address, **quiet)
                else:
                    self._start(options, engine, quiet)
            except Exception as error:
                self.close()
                where = options.ray_address
                what = "Ray could not be started" if where is None else f"no Ray answers at {where}"
                raise RunError(f"{what}: {str(error).strip().splitlines()[0]}") from error
            self._is_mine = True

    def _start(self, options: FleetOptions, engine: EngineOptions, quiet: dict[str, Any]) -> None:
        folder = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="batchradix-", dir=folder if len(folder) <= _LONGEST_FOLDER else "/tmp"
        )
        # When this process is killed, Ray's own look for its head so long before they end too.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", _ORPHANED_S)
        count = options.workers if isinstance(options.workers, int) else 1
        self._ray.init(
            address="local",
            num_cpus=max(num_threads(), count * (engine.num_threads or 1)),
            num_gpus=0 if engine.device == "cpu" else None,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            _temp_dir=self._folder,
            **quiet,
        )

    def places(self, options: FleetOptions, engine: EngineOptions) -> tuple[int, Place]:
        """How many workers there are to be on the nodes that are there, and what each gets."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return divide(nodes, options.workers, engine)

    def close(self) -> None:
        if self._is_mine:
            self._is_mine = False
            with _own_signals():
                self._ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def divide(
    nodes: Sequence[Mapping[str, float]], workers: int | str | None, engine: EngineOptions
) -> tuple[int, Place]:
    """How many workers there are to be, and what each gets of its node: GPUs and cores are divided
    evenly. ``nodes``: what each of them has, as Ray says it. Raises `OptionError` where they have
    too little."""
    nodes = [node for node in nodes if node.get("CPU", 0) >= 1]
    gpus = 0 if engine.device == "cpu" else sum(int(node.get("GPU", 0)) for node in nodes)
    count = workers if isinstance(workers, int) else gpus or len(nodes)
    if gpus and count > gpus:
        raise OptionError(
            f"there are {gpus} GPUs for {count} workers, and each needs one of its own; lower "
            f"`workers`, or set `device` to cpu"
        )
    if gpus:
        nodes = [node for node in nodes if node.get("GPU", 0) >= 1]
        sharing = max(int(node["GPU"]) for node in nodes)
    else:
        sharing = -(-count // max(1, len(nodes)))
    sharing = max(1, min(sharing, count))
    cores = [int(node["CPU"]) for node in nodes]
    threads = engine.num_threads or max(1, min(cores, default=1) // sharing)
    if sum(one // threads for one in cores) < count or not count:
        raise OptionError(
            f"Ray has {sum(cores)} cores on {len(cores)} machines for {max(1, count)} workers of "
            f"{threads} threads; lower `workers` or `num_threads`"
        )
    return count, Place(num_threads=threads, num_gpus=int(gpus > 0), num_sharing=sharing)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Puts back the handlers that Ray replaces: a signal ends a run as it does without Ray."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
