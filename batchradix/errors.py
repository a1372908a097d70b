"""Every error a user can meet, in one tree.

``BatchradixError`` is the root; the class decides the exit code of the command line, the
message is one sentence that says what happened, where (file, row, field) and what to do.
Options stand in it in backticks, by the names they have in Python.
What befalls a single row is not raised: it is a `RowError`, and becomes that row's result.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_OPTION = re.compile(r"`([a-z]\w*)`")


class BatchradixError(Exception):
    """Root of the tree. ``exit_code`` is what the command line returns for it."""

    exit_code = 3

    def __str__(self) -> str:
        return self.spelt(lambda name: name)

    def spelt(self, spell: Callable[[str], str]) -> str:
        """The sentence with ``spell(name)`` wherever an option is named."""
        return _OPTION.sub(lambda found: spell(found[1]), super().__str__())


class UsageError(BatchradixError):
    """The job is refused before weights load; mend the command or the files and run again."""

    exit_code = 2


class OptionError(UsageError):
    """An option has no such value, or two options exclude each other."""


class InputError(UsageError):
    """The input cannot be read as a job: missing file, unknown format, missing columns."""


class SchemaError(UsageError):
    """The output schema is malformed, or holds what can be neither enforced nor validated."""


class TemplateError(UsageError):
    """The prompt template or chat template is malformed, or names a column no row has."""


class ModelError(UsageError):
    """The model cannot be had or cannot be run: missing, gated, unsupported, damaged."""


class OutputMismatchError(UsageError):
    """The output holds another job's results; the message says what changed."""


class OutputHeldError(BatchradixError):
    """Another run holds the output."""

    exit_code = 4


class RunError(BatchradixError):
    """The run failed after it began; what was committed stays and a new run continues."""


class TooManyFailuresError(RunError):
    """As many rows failed as the run was told to bear."""


class EngineError(RunError):
    """The engine cannot go on."""


class OutOfMemoryError(EngineError):
    """Host or device memory ran out; the message says what to lower."""


class SinkError(RunError):
    """Results cannot be written: disk full, folder gone, damaged shard."""


class RowErrorCode(StrEnum):
    """Stable codes in the ``error.code`` field of a result row."""

    BAD_LINE = "bad_line"  # the input line or record could not be parsed
    BAD_VALUE = "bad_value"  # a column holds what a prompt cannot take
    BAD_SETTING = "bad_setting"  # a per-row option (max_tokens, ...) has a bad value
    MISSING_FIELD = "missing_field"  # the template names a field this row has not
    NULL_FIELD = "null_field"  # the template names a field that is null here
    TEMPLATE_FAILED = "template_failed"  # the chat template raised for this row
    UNSUPPORTED_CONTENT = "unsupported_content"  # images, audio, ... in messages
    UNSUPPORTED_PARAMETER = "unsupported_parameter"  # of a request: logprobs, logit_bias, ...
    UNSUPPORTED_ENDPOINT = "unsupported_endpoint"  # of a request: another url or method
    PROMPT_EMPTY = "prompt_empty"  # the prompt has no token
    PROMPT_TOO_LONG = "prompt_too_long"  # prompt leaves no room in the context
    KV_POOL_TOO_SMALL = "kv_pool_too_small"  # this row alone exceeds the KV pool
    INVALID_JSON = "invalid_json"  # the finished answer is not JSON
    SCHEMA_MISMATCH = "schema_mismatch"  # the finished answer breaks the schema
    NOT_REPRESENTABLE = "not_representable"  # the value does not fit its Arrow type
    NON_FINITE_LOGITS = "non_finite_logits"  # the model produced NaN or infinity
    ROW_TIMEOUT = "row_timeout"  # its answer took longer than one may
    WORKER_LOST = "worker_lost"  # worker after worker ended with it
    ENGINE_FAILED = "engine_failed"  # anything else that befell this row alone


TRANSIENT_CODES = frozenset(
    {RowErrorCode.KV_POOL_TOO_SMALL, RowErrorCode.NON_FINITE_LOGITS, RowErrorCode.ENGINE_FAILED}
)
"""What befell a row for reasons outside of it: the next run tries it again."""


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row has no answer: a stable code and one sentence."""

    code: RowErrorCode
    message: str
