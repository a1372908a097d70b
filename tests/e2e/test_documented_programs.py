"""The programs in the pages on data sets and frames run, and print what the pages say.

The Python blocks of a page are one program; a block of text behind one is what it prints.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_stand_in import HubStandIn

from batchradix.integrations.dataset_card import SECTION

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```(python|text|markdown)\n(.*?)```", re.DOTALL)
PROGRESS = re.compile(r"\n?.*% ▕.*\n")  # DuckDB shows it where a query takes its time
END = "-- end of a block --"

MakeTinyModel = Callable[..., Path]


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    hub = HubStandIn()
    yield hub
    hub.close()


def read_page(page: str) -> tuple[list[str], list[str | None]]:
    """The programs of a page, and what each prints according to it."""
    programs: list[str] = []
    printed: list[str | None] = []
    for kind, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if kind == "python":
            programs.append(text)
            printed.append(None)
        elif kind == "text":
            printed[-1] = text
    return programs, printed


def run_programs(programs: list[str], folder: Path, hub: HubStandIn) -> list[str]:
    """What each block prints, run one after the other in one process."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    environ = {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        ),
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "of-nobody",
    }
    ends = f"\nprint({END!r}, flush=True)\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ends.join([*programs, ""])],
        cwd=folder,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return PROGRESS.sub("", done.stdout).split(f"{END}\n")[:-1]


PAGES = ["docs/datasets.md", "docs/frames.md"]


def need_duckdb(page: str) -> None:
    if "import duckdb" in (ROOT / page).read_text(encoding="utf-8"):
        pytest.importorskip("duckdb")


@pytest.mark.parametrize("page", PAGES)
def test_every_program_runs_and_prints_something_where_the_page_says_so(
    tiny_model_folder: MakeTinyModel, tmp_path: Path, hub: HubStandIn, page: str
) -> None:
    need_duckdb(page)
    model = str(tiny_model_folder("const", prefer='A"1}G', context_length=4096))
    programs, printed = read_page(page)
    said = run_programs([p.replace("smollm2-135m", model) for p in programs], tmp_path, hub)
    assert len(said) == len(programs)
    assert [bool(text) for text in said] == [text is not None for text in printed]


@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_every_program_prints_what_the_page_says(
    tmp_path: Path, hub: HubStandIn, page: str
) -> None:
    need_duckdb(page)
    programs, printed = read_page(page)
    assert run_programs(programs, tmp_path, hub) == [text or "" for text in printed]
    for repository in hub.files.values():
        [made] = SECTION.findall(repository["README.md"].decode())
        assert shown_card(page) in made


def shown_card(page: str) -> str:
    """The part of a card that a page shows."""
    [text] = re.findall(r"```markdown\n(.*?)\n```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    return str(text)
