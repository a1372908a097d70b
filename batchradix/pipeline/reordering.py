"""The fields of a template's list in an order for each row, so that prompts share more of them."""

from __future__ import annotations

import numpy as np

from batchradix.jobs.base import JobSource
from batchradix.pipeline.field_table import read_fields
from batchradix.plan.columns import computed_tokens, order_fields
from batchradix.prompts.build import PromptBuilder


def reorder(source: JobSource, prompts: PromptBuilder) -> str:
    """Has ``prompts`` list the fields of each row in the order found for it, and says what that is
    expected to save. Nothing changes where no order saves anything.

    Raises `TemplateError` where the template lists no fields.
    """
    fields = prompts.list_fields()
    table = read_fields(source, prompts.required_columns, fields)
    as_written = np.broadcast_to(np.arange(len(fields), dtype=np.int8), table.codes.shape)
    found = order_fields(table.codes, table.tokens)
    before, after = (
        computed_tokens(table.codes, table.tokens, orders) for orders in (as_written, found)
    )
    listed = int(table.tokens.sum(dtype=np.int64))
    if after >= before:
        return f"no order of the {len(fields)} fields shares more than the template's own"
    orders = np.tile(as_written[:1], (int(table.rows[-1]) + 1, 1))
    orders[table.rows] = found
    prompts.reorder(orders)
    count = len(np.unique(found, axis=0))
    return (
        f"{count:,} {'order' if count == 1 else 'orders'} of the {len(fields)} fields: of about "
        f"{listed:,} tokens in them {after:,} are to be computed instead of {before:,}"
    )
