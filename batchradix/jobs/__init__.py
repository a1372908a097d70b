"""Where rows come from: `open_job` turns a file, a pipe or a table into a `JobSource`."""

from batchradix.jobs.base import RESULT_COLUMNS, JobSource
from batchradix.jobs.detect import open_job
from batchradix.jobs.row_settings import SETTING_COLUMNS, RowSettingsReader, read_row_settings

__all__ = [
    "RESULT_COLUMNS",
    "SETTING_COLUMNS",
    "JobSource",
    "RowSettingsReader",
    "open_job",
    "read_row_settings",
]
