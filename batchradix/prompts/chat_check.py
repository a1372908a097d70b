"""Whether a chat template takes the messages that a job will give it."""

from __future__ import annotations

from batchradix.errors import TemplateError
from batchradix.prompts.chat import ChatTemplate, Conversation
from batchradix.prompts.row_problem import RowProblem


def try_chat(
    chat: ChatTemplate, conversation: Conversation, probe: str, what: str = "a user message"
) -> None:
    """Raises `TemplateError` where ``chat`` refuses a conversation of this shape, or leaves
    ``probe``, which is ``what``, out."""
    remedy = (
        "put its text into the instruction, template or user messages instead"
        if "system" in what
        else "use another model, or a raw --template"
    )
    try:
        text = "".join(span.text for span in chat.spans(conversation))
    except RowProblem as problem:
        reason = str(problem.__cause__ or problem.sentence)
        raise TemplateError(
            f"the model's chat template rejects {what} ({reason}); {remedy}"
        ) from problem
    if probe not in text:
        raise TemplateError(f"the model's chat template leaves {what} out; {remedy}")
