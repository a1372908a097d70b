"""The only place that knows all rooms: it joins jobs, prompts, plan, engine and sink."""

from batchradix.pipeline.answers import Answers, drive
from batchradix.pipeline.check import Checked, check
from batchradix.pipeline.differences import diff
from batchradix.pipeline.job import EngineMaker, Outcome, RadixEngines, run
from batchradix.pipeline.looking import Shown, Wanted, look
from batchradix.pipeline.parts import Parts, open_parts
from batchradix.pipeline.planned import (
    Planned,
    check_budget,
    check_scores,
    make_job,
    plan_rows,
    settle_engine,
)
from batchradix.pipeline.planning import DrawnPlan, draw_plan, plan
from batchradix.pipeline.preview import Previewed, preview
from batchradix.pipeline.retries import open_retries
from batchradix.pipeline.session import Session
from batchradix.pipeline.sharding import Merged, merge
from batchradix.sink.results import open_results

__all__ = [
    "Answers",
    "Checked",
    "DrawnPlan",
    "EngineMaker",
    "Merged",
    "Outcome",
    "Parts",
    "Planned",
    "Previewed",
    "RadixEngines",
    "Session",
    "Shown",
    "Wanted",
    "check",
    "check_budget",
    "check_scores",
    "diff",
    "draw_plan",
    "drive",
    "look",
    "make_job",
    "merge",
    "open_parts",
    "open_results",
    "open_retries",
    "plan",
    "plan_rows",
    "preview",
    "run",
    "settle_engine",
]
