"""Plans a table of many rows from disk in a process of its own, and says what it took.

    python benchmarks/large_plan.py FOLDER MEMORY_BYTES

prints one JSON object: seconds by the clock and of the processors, and the most memory that was
resident, pages of mapped files included.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from batchradix.plan.order import DEFAULT_PLAN_MEMORY_BYTES, make_plan
from batchradix.plan.store import TokenTableWriter, read_table
from batchradix.scratch import Scratch
from batchradix.types import TokenTable

ROW_TOKENS = 600
QUESTION_TOKENS = 12
INSTRUCTION_TOKENS = 40
WRITTEN_ROWS = 10_000
VOCABULARY = 49_152
SHAPES = ("shared documents", "random")


def write(folder: Path, shape: str, num_rows: int) -> None:
    """A table of rows of 600 tokens: an instruction, one of ``num_rows // 50`` documents and a
    question, in no order; or nothing in common."""
    random = np.random.default_rng(0)
    document_tokens = ROW_TOKENS - INSTRUCTION_TOKENS - QUESTION_TOKENS
    instruction = random.integers(0, VOCABULARY, INSTRUCTION_TOKENS, dtype=np.uint32)
    size = (max(1, num_rows // 50), document_tokens)
    documents = random.integers(0, VOCABULARY, size, dtype=np.uint32)
    with TokenTableWriter(folder) as writer:
        for begin in range(0, num_rows, WRITTEN_ROWS):
            count = min(WRITTEN_ROWS, num_rows - begin)
            rows = random.integers(0, VOCABULARY, (count, ROW_TOKENS), dtype=np.uint32)
            if shape == "shared documents":
                rows[:, :INSTRUCTION_TOKENS] = instruction
                which = random.integers(0, len(documents), count)
                rows[:, INSTRUCTION_TOKENS:-QUESTION_TOKENS] = documents[which]
            offsets = np.arange(count + 1, dtype=np.int64) * ROW_TOKENS
            writer.append(TokenTable(rows.reshape(-1), offsets))
        writer.finish()


def measure_large(num_rows: int) -> list[dict[str, Any]]:
    """Both shapes in the default memory of a plan, and with as much again as the tokens take."""
    results = []
    token_bytes = 4 * num_rows * ROW_TOKENS
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), shape, num_rows)
            for memory_bytes in (DEFAULT_PLAN_MEMORY_BYTES, token_bytes // 2):
                command = [sys.executable, __file__, folder, str(memory_bytes)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results.append(
                    {
                        "shape": shape,
                        "rows": num_rows,
                        "row_tokens": ROW_TOKENS,
                        "token_bytes": token_bytes,
                        "plan_memory_bytes": memory_bytes,
                        **json.loads(done.stdout),
                    }
                )
    return results


def main() -> None:
    folder, memory_bytes = Path(sys.argv[1]), int(sys.argv[2])
    table = read_table(folder)
    scratch = Scratch()
    scratch.watch(table.values)
    scratch.watch(table.offsets)
    before = resource.getrusage(resource.RUSAGE_SELF)
    began_s = time.perf_counter()
    plan = make_plan(table, memory_bytes=memory_bytes, scratch=scratch)
    seconds = time.perf_counter() - began_s
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_s": cpu_s,
                "peak_rss_bytes": used.ru_maxrss * 1024,
                "shared_tokens": int(plan.lcp.sum(dtype=np.int64)),
            }
        )
    )


if __name__ == "__main__":
    main()
