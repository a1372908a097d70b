"""The chat template of a job's model, where its prompts may need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import PromptOptions
from batchradix.errors import TemplateError
from batchradix.prompts.chat import ChatTemplate
from batchradix.prompts.guard import AddedTokenMatcher
from batchradix.prompts.surrogates import clean_text


def open_chat(
    checkpoint: Checkpoint,
    options: PromptOptions,
    matcher: AddedTokenMatcher,
    literals: Sequence[str],
    variables: Mapping[str, Any],
) -> tuple[ChatTemplate | None, str]:
    """The chat template, where this job may need it, or None and why there is none.

    ``literals``: texts of the job's own template; ``variables``: further ones of the chat template.
    Raises `TemplateError` for what is malformed or missing, but for inputs whose columns may yet
    turn out to be raw prompts.
    """
    none = "the model has no chat template"
    wanted = options.chat or options.instruction is not None
    if not wanted and options.template is not None:
        return None, none
    if checkpoint.chat_template is None:
        if wanted:
            raise TemplateError(
                f"model {checkpoint.name} has no chat template, which "
                f"{'--chat' if options.chat else '--instruction'} needs; use an instruct model "
                f"or a raw --template"
            )
        return None, none
    try:
        chat = ChatTemplate(
            clean_text(checkpoint.chat_template),
            matcher,
            special_texts=_special_texts(checkpoint),
            literals=tuple(literals),
            variables=dict(variables),
        )
    except TemplateError as error:
        if wanted:
            raise
        return None, str(error)
    return chat, none


def _special_texts(checkpoint: Checkpoint) -> dict[str, str]:
    """The named special tokens as templates know them; what a model has not stays undefined."""
    named = {"bos_token": checkpoint.bos_token, "eos_token": checkpoint.eos_token}
    return {name: text for name, text in {**named, **checkpoint.special_texts}.items() if text}
