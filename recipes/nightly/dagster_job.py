"""The nightly run as a Dagster job: dagster dev -f dagster_job.py."""

import json
import os
import subprocess

import dagster as dg

JOB = os.environ.get("BATCHRADIX_JOB", "/opt/batchradix/recipes/nightly/job.toml")
DONE = (0, 143)  # 143: the job's deadline; the rows that are left are the next night's


@dg.op(retry_policy=dg.RetryPolicy(max_retries=2, delay=600))
def answer_new_rows(context: dg.OpExecutionContext) -> int:
    """Runs the job file; returns how many rows were answered. A retry goes on where it was."""
    ran = subprocess.run(["batchradix", "run", JOB, "--json"], stdout=subprocess.PIPE, text=True)
    lines = ran.stdout.splitlines()
    summary = json.loads(lines[-1]) if lines else {}
    if ran.returncode not in DONE:
        raise dg.Failure(
            f"batchradix ended with exit code {ran.returncode}", metadata={"summary": summary}
        )
    rows, kept = summary["rows"], summary["resumed_rows"]
    context.log.info("%d rows, %d of them kept, %d left", rows, kept, summary["rows_left"])
    context.add_output_metadata({"summary": summary})
    return int(rows - kept)


@dg.job
def batchradix_nightly() -> None:
    answer_new_rows()


nightly = dg.ScheduleDefinition(job=batchradix_nightly, cron_schedule="0 2 * * *")
definitions = dg.Definitions(jobs=[batchradix_nightly], schedules=[nightly])
