"""``about.json`` in a work folder: where the last run's rows came from, for who looks at them.

Nothing depends on it but what `batchradix show` puts beside answers: no job is told by it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from batchradix.sink.durable import write_durably

_NAME = "about.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """``input``: the path or pattern of the input, None where it was no file; ``limit`` and
    ``id_column`` as they were given; ``gold``: the column of right answers, if there was one."""

    input: str | None = None
    limit: int | None = None
    id_column: str | None = None
    gold: str | None = None


def write_about(work: Path, about: About) -> None:
    """Notes it in the work folder; where that fails, nothing is noted."""
    with suppress(OSError, UnicodeEncodeError):
        data = json.dumps(asdict(about)).encode()
        write_durably(data, work / "tmp" / _NAME, work / _NAME)


def read_about(work: Path) -> About:
    """What was noted in a work folder, nothing where that cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        found = json.loads((work / _NAME).read_bytes())
        return About(**{name: found.get(name) for name in About.__dataclass_fields__})
    return About()
