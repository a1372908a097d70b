"""Charts as numbers and SVG paths; the page they stand on is `page.html.jinja`.

All have a box of `WIDTH` by their own height, in pixels. Nothing here comes from a row but the
labels of the tree, which the page escapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from batchradix.report.figures import Floats, column, lasted_s, tokens_by_kind
from batchradix.report.trace import PARTS, TracedPlan, TracedRun

WIDTH = 1000
_HEIGHT = 150
_TREE_HEIGHT = 460
_MOST_GROUPS = 300
_CHARACTER = 6.2  # width of one of a label, about
_LINE = 11
_EDGE = 0.6  # free between two boxes of the tree, if they have at least
_LEAST_EDGED = 3.0
_STYLES = {
    "computed": "c0", "again": "c1", "decoded": "c2", "appended": "c3", "guessed": "c4",
    "schedule": "c5", "forward": "c2", "mask": "c4", "sample": "c3", "collect": "c0", "sink": "c1",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One colour of a chart: its name, its CSS class and all its bars as one path."""

    name: str
    style: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Stacked bars. ``x_ticks``, ``y_ticks``: pixels and text; ``marks``: pixels of vertical
    lines."""

    title: str
    height: int
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    marks: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A piece of the tree. ``label`` is what fits into it, "" for nothing."""

    x: float
    y: float
    width: float
    height: float
    style: str
    title: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeChart:
    """The tree: rows to the right, token depth downwards. ``computed``: a path over the boxes,
    of each the share that is computed."""

    height: int
    boxes: tuple[Box, ...]
    computed: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def timeline(runs: Sequence[TracedRun]) -> list[Chart]:
    """The steps of all runs, one run after the other; none where there was no step.

    Where there are many, some that follow each other share a bar as wide as they took.
    """
    steps, starts_s = _one_after_another(runs)
    if not len(steps):
        return []
    total_s = max(1e-9, float(starts_s[-1] + lasted_s(steps)[-1]))
    first = np.flatnonzero(np.diff(np.floor(starts_s / total_s * _MOST_GROUPS), prepend=-1))
    edges_s = np.append(starts_s[first], total_s)
    widths_s = np.maximum(np.diff(edges_s), 1e-9)
    numbers = column(steps, "run")
    marks = tuple((starts_s[np.flatnonzero(np.diff(numbers)) + 1] / total_s * WIDTH).tolist())

    def per_second(values: Floats) -> Floats:
        rates: Floats = np.add.reduceat(values, first) / widths_s
        return rates

    pool = {run.number: max(1, int(run.plan.facts["kv_tokens"])) for run in runs}
    fill = column(steps, "kv_tokens") / np.array([pool[int(number)] for number in numbers])
    shares = {part: np.add.reduceat(column(steps, part), first) for part in PARTS}
    sums = np.maximum(np.sum(list(shares.values()), axis=0), 1e-12)
    kinds = tokens_by_kind(steps)
    running = np.maximum.reduceat(column(steps, "running_rows"), first)
    charts: list[tuple[str, Mapping[str, Floats], float | None]] = [
        ("tokens through the model a second", {k: per_second(v) for k, v in kinds.items()}, None),
        ("KV pool taken", {"taken": np.maximum.reduceat(fill, first)}, 1.0),
        ("rows finished a second", {"rows": per_second(column(steps, "finished_rows"))}, None),
        ("rows running", {"running": running}, None),
        ("time by part", {p.removesuffix("_s"): v / sums for p, v in shares.items()}, 1.0),
    ]
    ticks = _ticks(total_s, total_s, "s")
    return [
        _bars(title, edges_s / total_s, series, top=top, x_ticks=ticks, marks=marks)
        for title, series, top in charts
    ]


def hit_share(plan: TracedPlan) -> Chart | None:
    """The share of prompt tokens that an earlier row brought along, over the plan's order."""
    planned = np.array(plan.facts["bin_planned_tokens"], dtype=np.float64)
    distinct = np.array(plan.facts["bin_distinct_tokens"], dtype=np.float64)
    if not len(planned):
        return None
    return _bars(
        "share of prompt tokens reused, over the planned order of rows",
        np.linspace(0, 1, len(planned) + 1),
        {"reused": 1 - distinct / np.maximum(planned, 1)},
        top=1.0,
        x_ticks=_ticks(float(plan.facts["rows"]), float(plan.facts["rows"]), ""),
    )


def curve(points: Sequence[tuple[int, float]]) -> Chart:
    """The share of prompt tokens reused by how many tokens of keys and values are kept: a bar of
    the same width for each of ``points``, (tokens, share), few as they are."""
    width = WIDTH / len(points)
    every = math.ceil(len(points) / 12)
    last = len(points) - 1
    return _bars(
        "share of prompt tokens reused, by tokens of keys and values kept",
        np.linspace(0, 1, len(points) + 1),
        {"reused": np.array([share for _, share in points])},
        top=1.0,
        x_ticks=tuple(
            (round((place + 0.5) * width, 1), f"{tokens:,}")
            for place, (tokens, _) in enumerate(points)
            if (last - place) % every == 0
        ),
    )


def tree(plan: TracedPlan) -> TreeChart | None:
    """The pieces of a plan's tree, each with an area of its tokens times its rows."""
    pieces = plan.pieces.to_pylist()
    num_rows = int(plan.facts["rows"])
    if not pieces or not num_rows:
        return None
    depth = max(piece["start"] + _height(piece) for piece in pieces)
    x, y = WIDTH / num_rows, _TREE_HEIGHT / depth
    boxes, computed = [], []
    for piece in pieces:
        left, top = piece["first"] * x, piece["start"] * y
        width, height = (piece["last"] - piece["first"]) * x, _height(piece) * y
        fits = height >= _LINE and width >= 5 * _CHARACTER
        edge = _EDGE if min(width, height) >= _LEAST_EDGED else 0.0
        boxes.append(
            Box(
                x=round(left, 2),
                y=round(top, 2),
                width=round(width - edge, 2),
                height=round(height - edge, 2),
                style="node" if piece["is_node"] else "rest",
                title=_describe(piece),
                label=printable(piece["label"])[: int(width / _CHARACTER)] if fits else "",
            )
        )
        share = piece["distinct_tokens"] / piece["planned_tokens"]
        width, height = width - edge, height - edge
        if piece["is_node"]:  # the first of its rows
            computed.append(_rectangle(left, top, width * share, height))
        else:  # the deepest tokens, which few rows share
            computed.append(_rectangle(left, top + height * (1 - share), width, height * share))
    return TreeChart(
        height=_TREE_HEIGHT,
        boxes=tuple(boxes),
        computed="".join(computed),
        x_ticks=_ticks(num_rows, num_rows, ""),
        y_ticks=tuple(
            (round(px / WIDTH * _TREE_HEIGHT, 1), text) for px, text in _ticks(depth, depth, "")
        ),
    )


def _height(piece: Mapping[str, Any]) -> float:
    """Tokens of a node; of what is summed up, those of one row on average."""
    return float(piece["planned_tokens"] / (piece["last"] - piece["first"]))


def _describe(piece: Mapping[str, Any]) -> str:
    rows = piece["last"] - piece["first"]
    reused = piece["planned_tokens"] - piece["distinct_tokens"]
    counts = f"{piece['distinct_tokens']:,} computed, {reused:,} reused"
    where = f"rows {piece['first']:,} to {piece['last'] - 1:,} of the plan"
    if not piece["is_node"]:
        return f"{piece['num_nodes']:,} nodes below, {where}: {counts}"
    end = piece["start"] + piece["distinct_tokens"]
    text = printable(piece["label"])
    return f"{text}…\ntokens {piece['start']:,} to {end - 1:,} of {rows:,} rows ({where}): {counts}"


def printable(text: str) -> str:
    """Text in one line, without characters that a page cannot show or that would turn it round."""
    return "".join(char if char.isprintable() else "↵" if char == "\n" else "·" for char in text)


def _one_after_another(runs: Sequence[TracedRun]) -> tuple[pa.Table, Floats]:
    """All steps, and float64[n] when each began if no time had passed between the runs."""
    starts, offset_s = [np.zeros(0)], 0.0
    for run in runs:
        if len(run.steps):
            times_s = column(run.steps, "time_s")
            starts.append(times_s + offset_s)
            offset_s += float(times_s[-1] + lasted_s(run.steps)[-1])
    return pa.concat_tables([run.steps for run in runs]), np.concatenate(starts)


def _bars(
    title: str,
    edges: Floats,
    series: Mapping[str, Floats],
    *,
    top: float | None,
    x_ticks: tuple[tuple[float, str], ...],
    marks: tuple[float, ...] = (),
) -> Chart:
    """``edges``: float64[n + 1] from 0 to 1; ``series``: float64[n] each, stacked in order;
    ``top``: the value at the upper end, where it is known (shares)."""
    highest = top or float(np.max(np.sum(list(series.values()), axis=0))) or 1.0
    base = np.zeros(len(edges) - 1)
    drawn = []
    for name, values in series.items():
        path = "".join(
            _rectangle(x * WIDTH, _HEIGHT - (low + value) * scale, width * WIDTH, value * scale)
            for x, width, low, value in zip(
                edges[:-1].tolist(),
                np.diff(edges).tolist(),
                base.tolist(),
                values.tolist(),
                strict=True,
            )
            if value > 0
            for scale in (_HEIGHT / highest,)
        )
        drawn.append(Series(name=name, style=_STYLES.get(name, "c2"), path=path))
        base = base + values
    unit = "%" if top == 1.0 else ""
    y_ticks = tuple(
        (round(_HEIGHT * (1 - px / WIDTH), 1), text)
        for px, text in _ticks(highest, highest * (100 if unit else 1), unit, most=3)
    )
    return Chart(
        title=title,
        height=_HEIGHT,
        series=tuple(drawn),
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        marks=marks,
    )


def _rectangle(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h{-width:.2f}z"


def _ticks(
    end: float, shown_end: float, unit: str, *, most: int = 8
) -> tuple[tuple[float, str], ...]:
    """Round places on an axis from 0 to ``end`` (shown as ``shown_end``), 1000 pixels long."""
    if end <= 0:
        return ()
    size = 10 ** math.floor(math.log10(shown_end / most))
    step = next(size * k for k in (1, 2, 5, 10) if shown_end / (size * k) <= most)
    count = int(shown_end / step + 1e-9)
    return tuple(
        (round(k * step / shown_end * WIDTH, 1), f"{k * step:,.10g}{unit and ' ' + unit}")
        for k in range(count + 1)
    )
