"""The picture of a plan: on a page, and in a terminal."""

from __future__ import annotations

import io
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from batchradix.plan.cached import LintSummary, MemorySummary, PlanSummary
from batchradix.report.plan_page import MarkedText, marked_up, plan_page
from batchradix.report.terminal_plan import draw_plan
from batchradix.report.trace import PLAN, TracedPlan

EVIL = "</title><script>document.title='bad'</script>\u202e&\"'\x00\n"
TEMPLATE = "Day {{ day }} of {{ year }}\nRead {{text}} now"
PIECES = [
    (0, 4, 0, True, 1, 40, 10, "Read this"),
    (0, 2, 10, True, 1, 20, 10, EVIL),
    (2, 4, 10, False, 3, 30, 25, ""),
]
DAY = LintSummary(
    lines=(1, 1), places=("day", "year"), kinds=("a number", "a date or time"), values=(4, 2),
    rows=4, lost_tokens=30,
)  # fmt: skip
SUMMARY = PlanSummary(
    rows=5, planned_rows=4, duplicates=1, over_long=0, prompt_tokens=90, opening_tokens=0,
    distinct_tokens=45, shared_share=0.5, num_nodes=5, length_min=1, length_p50=2, length_p90=3,
    length_p99=4, length_max=5,
    memory=MemorySummary(
        needed_tokens=20, demand_tokens=90, batch_size=64, token_bytes=8,
        curve=((1, 0.1), (2, 0.2), (4, 0.4), (20, 0.5)),
    ),
    lint=(DAY,),
)  # fmt: skip


def picture(pieces: list[tuple[Any, ...]], num_rows: int) -> TracedPlan:
    columns = list(zip(*pieces, strict=True)) or [[]] * len(PLAN)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, PLAN, strict=True)], schema=PLAN)
    planned, distinct = (sum(piece[k] for piece in pieces) for k in (5, 6))
    facts = {"rows": num_rows, "planned_tokens": planned, "distinct_tokens": distinct}
    bins = {"bin_planned_tokens": [10] * num_rows, "bin_distinct_tokens": [10, *[2] * 3][:num_rows]}
    return TracedPlan(facts=facts | bins, pieces=table)


def page(template: str | None = TEMPLATE, summary: PlanSummary = SUMMARY) -> str:
    return plan_page(EVIL, summary, picture(PIECES, 4), [("rows", EVIL)], template)


def test_the_page_stands_alone_and_text_from_rows_stays_text() -> None:
    html = page(TEMPLATE + EVIL)
    assert "<script" not in html
    assert "\x00" not in html
    assert "\u202e" not in html
    for outside in ("http", "@import", "url(", " src=", " href="):
        assert outside not in html


def test_the_template_is_marked_where_it_breaks_sharing() -> None:
    assert marked_up(TEMPLATE, [DAY]) == [
        [
            MarkedText("Day "),
            MarkedText("{{ day }}", 1),
            MarkedText(" of "),
            MarkedText("{{ year }}", 1),
            MarkedText(""),
        ],
        [MarkedText("Read {{text}} now")],
    ]
    other = replace(DAY, lines=(2,), places=("text",))
    assert marked_up(TEMPLATE, [DAY, other])[1][1] == MarkedText("{{text}}", 2)
    html = page()
    assert html.count("<mark") == 2
    assert "about 30 tokens are computed again" in html


def test_a_plan_without_lint_memory_or_rows_has_a_page() -> None:
    html = page(None, replace(SUMMARY, lint=(), memory=None))
    assert "What breaks sharing" not in html
    assert "keys and values kept" not in html
    empty = plan_page("t", replace(SUMMARY, lint=(), memory=None), picture([], 0), [], None)
    assert "No row has a prompt to run." in empty


def test_the_curve_is_drawn_as_high_as_its_shares() -> None:
    html = page()
    assert "share of prompt tokens reused, by tokens of keys and values kept" in html
    # bars of 250 pixels, as high as a tenth, ... a half of 150
    for x, share in ((0, 0.1), (250, 0.2), (500, 0.4), (750, 0.5)):
        height = 150 * share
        assert f"M{x:.2f} {150 - height:.2f}h250.00v{height:.2f}h-250.00z" in html


def drawn(plan: TracedPlan, **options: Any) -> str:
    out = io.StringIO()
    draw_plan(plan, Console(file=out, width=100, **options))
    return out.getvalue()


def test_a_terminal_shows_the_heaviest_branches() -> None:
    assert drawn(picture(PIECES, 4)).splitlines() == [
        "4 rows",
        "└── Read this… 10 tokens of 4 rows",
        "    ├── </title><script>document.title='… 10 tokens of 2 rows",
        "    └── 3 more nodes: 2 rows",
        "▁▇▇▇ reused, over the planned order of rows",
    ]
    assert drawn(picture([], 0)) == ""


def test_a_wide_tree_is_summed_up() -> None:
    wide = [(k, k + 1, 0, True, 1, 100 - k, 100 - k, "[bold]x") for k in range(9)]
    lines = drawn(picture(wide, 9)).splitlines()
    assert lines[1] == "├── [bold]x… 100 tokens of 1 row"
    assert lines[4] == "└── 6 more nodes: 6 rows"
    assert len(lines) == 6


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium here")
def test_a_browser_shows_the_page_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "plan.html").write_text(page(TEMPLATE + EVIL), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'u'}"]
    command = ["chromium", *options, "--dump-dom", f"file://{tmp_path / 'plan.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "<title>&lt;/title&gt;&lt;script&gt;" in done.stdout
    assert done.stdout.count('<rect class="node"') == 2 + 1  # and the key
    assert done.stdout.count("<mark") == 2
    picture_file = tmp_path / "plan.png"
    command = ["chromium", *options, f"--screenshot={picture_file}", "--window-size=1200,1600"]
    subprocess.run(
        [*command, f"file://{tmp_path / 'plan.html'}"], capture_output=True, timeout=120, check=True
    )
    assert picture_file.stat().st_size > 20_000  # an empty page of this size has 7,000 bytes
