"""Chats made from options: one user message, with what all rows share in front.

The order is what makes rows share: instruction, then schema, then the row's own text.
"""

from __future__ import annotations

from typing import Any

from batchradix.prompts.chat import ChatTemplate, Conversation, Mixed
from batchradix.prompts.guard import Piece

SCHEMA_LINE = "Answer with JSON that matches this schema:"


def shared_text(instruction: str, schema_text: str | None, schema_line: str = SCHEMA_LINE) -> str:
    """What stands before every row's text: the instruction and, where there is one, the schema,
    below ``schema_line``."""
    parts = [instruction]
    if schema_text is not None:
        parts.append(f"{schema_line}\n{schema_text}")
    return "\n\n".join(parts) + "\n\n"


def user_conversation(content: Any, template: ChatTemplate, system: str | None) -> Conversation:
    """One user message of ``content`` (`Mixed` or data), after a system message where ``system``
    is given."""
    system_message = [] if system is None else [("system", Mixed((Piece(system, True),)))]
    turns = [*system_message, ("user", content)]
    return Conversation(
        messages=[
            {
                "role": role,
                "content": [{"type": "text", "text": text}] if template.needs_parts else text,
            }
            for role, text in turns
        ]
    )
