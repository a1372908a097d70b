"""What a run may ask of chats: the template they are written by, and thinking before an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchradix.errors import OptionError

DEFAULT_THINKING_TOKENS = 4096
_MOST_TOKENS = 2**30 - 1
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn thinking on and off."""
# What templates are given already.
_TAKEN = ("messages", "tools", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How chats become prompts, and whether the model thinks before it answers.

    ``chat_template``: Jinja text in place of the model's, or the name of one of several that the
    model has. ``chat_template_kwargs``: further variables of the template; a column of that name
    overrides single ones for its row. ``thinking``: ``auto`` is on where the template can turn it
    on and answers are free text. ``thinking_tokens``: after so many the thinking is closed (None:
    4096, or half of the context that is left, where that is less).
    """

    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    thinking: Literal["auto", "on", "off"] = "auto"
    thinking_tokens: int | None = None

    def __post_init__(self) -> None:
        template, most = self.chat_template, self.thinking_tokens
        if not (template is None or (isinstance(template, str) and template)):
            raise OptionError(f"`chat_template` must be text, not {template!r}")
        if self.thinking not in ("auto", "on", "off"):
            raise OptionError(f"`thinking` must be auto, on or off, not {self.thinking!r}")
        is_count = (
            isinstance(most, int) and not isinstance(most, bool) and 1 <= most <= _MOST_TOKENS
        )
        if most is not None and not is_count:
            raise OptionError(
                f"`thinking_tokens` must be an integer from 1 to {_MOST_TOKENS:,}, not {most!r}"
            )
        if self.chat_template_kwargs is not None:
            try:
                wish = thinking_wish(read_kwargs(self.chat_template_kwargs))
            except ValueError as error:
                raise OptionError(f"`chat_template_kwargs` {error}") from None
            if not _is_json(self.chat_template_kwargs):
                raise OptionError(
                    f"`chat_template_kwargs` must hold what JSON can, not "
                    f"{_short(self.chat_template_kwargs)}"
                )
            if self.thinking != "auto" and wish not in (None, self.thinking == "on"):
                raise OptionError(
                    f"`thinking` {self.thinking} and `chat_template_kwargs` say the opposite of "
                    f"each other; leave one of them out"
                )


def read_kwargs(value: Any) -> dict[str, Any]:
    """Variables of a chat template from an object or its JSON text. Raises `ValueError` with the
    rest of a sentence."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"must be a JSON object, not {_short(value)}") from None
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"must be an object of names and values, not {_short(value)}")
    for name in _TAKEN:
        if name in value:
            raise ValueError(f"cannot set {name!r}, which every prompt has of its own")
    return dict(value)


def thinking_wish(variables: Mapping[str, Any]) -> bool | None:
    """Whether a template's variables ask for thinking; None where they do not say."""
    given = [variables[name] for name in SWITCHES if variables.get(name) is not None]
    return bool(given[0]) if given else None


def _is_json(value: Any) -> bool:
    """Whether a value can be written down, as a job's identity has to be."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
