"""The picture of a plan: what a job's prompts share, before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchradix.report.charts import curve, hit_share, printable, tree
from batchradix.report.pages import render_page
from batchradix.report.trace import TracedPlan

if TYPE_CHECKING:
    from batchradix.plan.cached import LintSummary, PlanSummary


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A piece of a line of the template; ``finding``: from 1, of what breaks sharing, or 0."""

    text: str
    finding: int = 0


def plan_page(
    title: str,
    summary: PlanSummary,
    picture: TracedPlan,
    lines: Sequence[tuple[str, str]],
    template: str | None,
) -> str:
    """The whole page. ``lines``: name and value pairs of the summary for a person; ``template``:
    the prompt that ``summary.lint`` speaks of."""
    memory = summary.memory
    return render_page(
        "plan.html.jinja",
        title,
        tables=[[["", ""], *([name, printable(text)] for name, text in lines)]],
        hits=hit_share(picture),
        curve=None if memory is None or not memory.curve else curve(memory.curve),
        tree=tree(picture),
        lint=[printable(found.in_words()) for found in summary.lint],
        prompt=marked_up(template, summary.lint) if template is not None and summary.lint else [],
    )


def marked_up(template: str, lint: Sequence[LintSummary]) -> list[list[MarkedText]]:
    """The lines of a template, cut where a place that breaks sharing begins and ends."""
    lines = []
    for number, line in enumerate(template.split("\n"), 1):
        found = {
            place: index
            for index, each in enumerate(lint, 1)
            for at, place in zip(each.lines, each.places, strict=True)
            if at == number
        }
        names = "|".join(map(re.escape, sorted(found, key=len, reverse=True)))
        pieces: list[MarkedText] = []
        end = 0
        for match in re.finditer(rf"\{{\{{\s*({names})\s*\}}\}}", line) if names else ():
            pieces += [
                MarkedText(printable(line[end : match.start()])),
                MarkedText(printable(match[0]), found[match[1]]),
            ]
            end = match.end()
        lines.append([*pieces, MarkedText(printable(line[end:]))])
    return lines
