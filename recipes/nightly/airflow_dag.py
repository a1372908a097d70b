"""The nightly run as an Airflow DAG (Airflow 3). Put the file into the folder of DAGs.

A retry is cheap: it goes on where the run before it was. Two runs cannot overlap: the second would
end with exit code 4, which skips the task.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

JOB = os.environ.get("BATCHRADIX_JOB", "/opt/batchradix/recipes/nightly/job.toml")

with DAG(
    dag_id="batchradix_nightly",
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": timedelta(minutes=10)},
) as dag:
    BashOperator(
        task_id="answer_new_rows",
        # 143: the job's deadline; the rows that are left are the next night's.
        bash_command='batchradix run "$BATCHRADIX_JOB" --json || { code=$?; '
        '[ "$code" -eq 143 ] || exit "$code"; }',
        env={"BATCHRADIX_JOB": JOB},
        append_env=True,
        skip_on_exit_code=4,
        do_xcom_push=True,
    )
