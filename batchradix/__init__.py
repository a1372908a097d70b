"""Run an LLM over a table: every shared prompt prefix computed once, every answer typed.

>>> import batchradix
>>> batchradix.run("jobs.parquet", schema="schema.json", output="answers.arrow")  # doctest: +SKIP
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from batchradix._version import VERSION as __version__

if TYPE_CHECKING:
    from batchradix.api import LLM, RunResult, merge, plan, run
    from batchradix.chat_options import ChatOptions
    from batchradix.config import EngineOptions, SamplingOptions
    from batchradix.errors import BatchradixError
    from batchradix.integrations.dataset_map import map_dataset
    from batchradix.integrations.hf_datasets import Extractor
    from batchradix.types import Result

_HOMES = {
    "LLM": "api",
    "RunResult": "api",
    "merge": "api",
    "plan": "api",
    "run": "api",
    "EngineOptions": "config",
    "SamplingOptions": "config",
    "ChatOptions": "chat_options",
    "BatchradixError": "errors",
    "Extractor": "integrations.hf_datasets",
    "Result": "types",
    "map_dataset": "integrations.dataset_map",
}

__all__ = [
    "LLM",
    "BatchradixError",
    "ChatOptions",
    "EngineOptions",
    "Extractor",
    "Result",
    "RunResult",
    "SamplingOptions",
    "__version__",
    "map_dataset",
    "merge",
    "plan",
    "run",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `batchradix --help` answers at once.
    if name in _HOMES:
        return getattr(import_module(f"batchradix.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """Keeps ``batchradix.plan`` the function: importing the room of that name would bind the
    room there instead."""

    @property
    def plan(self) -> Any:
        return import_module("batchradix.api").plan

    @plan.setter
    def plan(self, room: ModuleType) -> None:
        del room


sys.modules[__name__].__class__ = _Package
