"""One job on several workers: its plan cut into parts that engines in other processes run."""

from batchradix.fleet.engine import FleetEngine
from batchradix.fleet.engines import engines_for

__all__ = ["FleetEngine", "engines_for"]
