"""Whether an input has the columns that a job's prompts are made of."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from batchradix.errors import InputError, OptionError, TemplateError
from batchradix.prompts.surrogates import clean_text
from batchradix.prompts.template import SCHEMA_PLACE, Place

_LISTED_COLUMNS = 30  # names that a message lists at most


def check_input_columns(columns: Sequence[str], *, no_chat: str | None, has_system: bool) -> None:
    """Refuses an input whose rows are to bring their prompts and have none.

    ``no_chat``: why there can be no chat, None where there can. Raises `InputError`,
    `TemplateError` or `OptionError`.
    """
    if "messages" not in columns and "prompt" not in columns:
        raise InputError(
            f"the input has neither a 'prompt' nor a 'messages' column; its columns are "
            f"{listing(columns)}; rename one, or say with --template or --instruction how a "
            f"row becomes a prompt"
        )
    if "messages" in columns and no_chat is not None:
        raise TemplateError(
            f"the input has a 'messages' column, and {no_chat}; use an instruct model, "
            f"or --template with places such as {{{{ column }}}}"
        )
    if "messages" not in columns and has_system:
        raise OptionError(
            "a system message needs a chat, and the input has raw prompts; use "
            "--template '{{ prompt }}' --chat"
        )


def check_places(places: Sequence[Place], columns: Sequence[str], *, has_template: bool) -> None:
    """Refuses a template (or a ``--column``) that names a column that no row has.

    Raises `TemplateError`.
    """
    for place in places:
        if place.column not in columns:
            raise TemplateError(_unknown(place, columns, has_template))


def _unknown(place: Place, columns: Sequence[str], has_template: bool) -> str:
    if place.column == SCHEMA_PLACE and has_template:
        return (
            f"the template has {{{{ schema }}}} and the job has no schema (and no column of "
            f"that name); give one with --schema; the columns are {listing(columns)}"
        )
    near = get_close_matches(place.column, list(columns), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"{'the template' if has_template else '--column'} names column {place.column!r}, which no "
        f"row has; the columns are {listing(columns)}{hint}"
    )


def listing(names: Sequence[str]) -> str:
    """Names for a message, the first thirty of them."""
    shown = ", ".join(clean_text(str(name)) for name in names[:_LISTED_COLUMNS])
    more = len(names) - _LISTED_COLUMNS
    return f"{shown} and {more} more" if more > 0 else shown
