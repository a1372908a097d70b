"""The page of a run: whole, small, harmless, and true to the numbers it draws."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchradix.report.charts import WIDTH, hit_share, timeline, tree
from batchradix.report.page import page
from batchradix.report.trace import COUNTERS, COUNTS, PARTS, PLAN, STEPS, TracedPlan, TracedRun

EVIL = "</title><script>alert(1)</script>\u202e&\"'\x00\n"
VOID = {"meta"}


class Checker(HTMLParser):
    """Fails where elements are not closed in order; keeps what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def planned(pieces: list[tuple[int, int, int, bool, int, int, int, str]], num_rows: int) -> Any:
    columns = list(zip(*pieces, strict=True)) or [[]] * len(PLAN)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, PLAN, strict=True)], schema=PLAN)
    bins = min(num_rows, 256)
    return TracedPlan(
        facts={
            "started": "2026-11-30T00:00:00+00:00", "model": "m", "dtype": "float32",
            "rows": num_rows, "kv_tokens": 100,
            "planned_tokens": sum(p[5] for p in pieces),
            "distinct_tokens": sum(p[6] for p in pieces),
            "bin_planned_tokens": [10] * bins, "bin_distinct_tokens": [4] * bins,
        },
        pieces=table,
    )  # fmt: skip


def traced(plan: TracedPlan, num_steps: int, *, number: int = 0, **columns: Any) -> TracedRun:
    """Steps of a second each, half of it for the forward pass and half for the sink."""
    values: dict[str, Any] = {name: np.zeros(num_steps) for name in STEPS.names}
    values |= {"run": np.full(num_steps, number), "step": np.arange(num_steps)}
    values |= {"time_s": np.arange(num_steps), "kv_tokens": np.full(num_steps, 50)}
    values |= {"forward_s": np.full(num_steps, 0.5), "sink_s": np.full(num_steps, 0.5)}
    values |= columns
    arrays = [pa.array(values[field.name]).cast(field.type) for field in STEPS]
    return TracedRun(number=number, plan=plan, steps=pa.Table.from_arrays(arrays, schema=STEPS))


ONE_NODE = [(0, 4, 0, True, 1, 40, 10, EVIL), (0, 4, 10, False, 3, 20, 15, "")]


def area(path: str) -> float:
    sizes = re.findall(r"h([-0-9.]+)v([-0-9.]+)", path)
    return sum(float(width) * float(height) for width, height in sizes)


def test_the_page_stands_alone_and_text_from_rows_stays_text() -> None:
    html = page([traced(planned(ONE_NODE, 4), 3)], EVIL)
    seen = checked(html)
    assert "script" not in seen.seen
    assert not {name for name, _ in seen.attributes} & {"src", "href", "onload", "onclick"}
    assert "http" not in html
    assert "@import" not in html
    assert "url(" not in html
    assert "\x00" not in html
    assert "\u202e" not in html
    assert "</title><script>alert(1)</script>·&\"'·↵…" in seen.text


def test_the_page_says_what_was_predicted_and_what_was_achieved() -> None:
    run = traced(planned(ONE_NODE, 4), 2, computed_tokens=[20, 5], cached_tokens=[0, 35])
    text = " ".join(checked(page([run], "t")).text.split())
    assert "25 of 60 prompt tokens to compute" in text
    assert "25 computed, 0 again, 35 found in the cache" in text


def test_the_page_of_a_million_rows_and_steps_is_small() -> None:
    label = "<" * 48
    pieces = [(k, k + 1, 0, True, 1, 9, 9, label) for k in range(800)]
    pieces += [(1000 + k, 1001 + k, 0, False, 9, 9, 9, "") for k in range(1601)]
    run = traced(planned(pieces, 1_000_000), 200_000, computed_tokens=np.full(200_000, 7))
    html = page([run], "t")
    checked(html)
    assert len(html.encode()) < 2_000_000


def test_bars_have_the_area_of_what_they_stand_for() -> None:
    rng = np.random.default_rng(0)
    steps = {name: rng.integers(0, 50, 5000) for name in ("computed_tokens", "decode_steps")}
    total = steps["computed_tokens"] + steps["decode_steps"] + 5
    runs = [
        traced(planned(ONE_NODE, 4), 5000, model_tokens=total, **steps),
        traced(planned(ONE_NODE, 4), 5000, number=3, model_tokens=total, **steps),
    ]
    tokens, pool, _, _, parts = timeline(runs)
    drawn = {one.name: area(one.path) for one in tokens.series}
    for kind, wanted in (
        ("computed", steps["computed_tokens"]),
        ("decoded", steps["decode_steps"]),
    ):
        assert drawn[kind] / drawn["appended"] == pytest.approx(wanted.sum() / 25_000, rel=0.01)
    assert drawn["again"] == drawn["guessed"] == 0
    assert area(pool.series[0].path) == pytest.approx(WIDTH * pool.height / 2, rel=0.01)
    shares = {one.name: area(one.path) for one in parts.series}
    assert shares["forward"] == pytest.approx(shares["sink"]) == pytest.approx(WIDTH * 75, rel=0.01)
    assert tokens.marks == (WIDTH / 2,)


def test_the_trees_boxes_are_rows_times_tokens_and_marked_as_far_as_computed() -> None:
    pieces = [
        (0, 200, 0, True, 1, 20_000, 100, "root"),
        (0, 50, 100, True, 1, 5_000, 100, "a"),
        (50, 200, 100, False, 9, 15_000, 6_000, ""),
    ]
    chart = tree(planned(pieces, 200))
    assert chart is not None
    whole = sum(box.width * box.height for box in chart.boxes)
    assert whole == pytest.approx(WIDTH * chart.height, rel=0.02)
    assert area(chart.computed) / whole == pytest.approx(6_200 / 40_000, rel=0.02)
    assert [box.style for box in chart.boxes] == ["node", "node", "rest"]
    assert [box.label for box in chart.boxes] == ["root", "a", ""]
    assert chart.boxes[1].title.startswith("a…\ntokens 100 to 199 of 50 rows")


def test_labels_are_cut_to_the_box_they_stand_in() -> None:
    pieces = [(0, 9, 0, True, 1, 90, 10, "x" * 48), (9, 10, 0, True, 1, 10, 10, "y" * 48)]
    chart = tree(planned(pieces, 10))
    assert chart is not None
    assert [len(box.label) for box in chart.boxes] == [48, 16]


def test_the_share_reused_is_drawn_over_the_plan() -> None:
    chart = hit_share(planned(ONE_NODE, 4))
    assert chart is not None
    assert area(chart.series[0].path) == pytest.approx(0.6 * WIDTH * chart.height)


def test_a_trace_without_steps_or_rows_has_a_page() -> None:
    empty = traced(planned([], 0), 0)
    assert "No step of a run is in the trace." in checked(page([empty], "t")).text


def test_a_single_step_that_took_no_time_has_a_page() -> None:
    nothing = {part: [0.0] for part in PARTS}
    checked(page([traced(planned(ONE_NODE, 4), 1, **nothing)], "t"))


def test_every_column_of_a_trace_is_known_by_one_name() -> None:
    assert STEPS.names == ["run", "step", "time_s", *PARTS, *COUNTS, *COUNTERS]
