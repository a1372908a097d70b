"""Thinking before an answer, as far as it is a matter of prompts.

Chat templates show in their text by which markers a model thinks. Some have a variable that turns
thinking on and off, some open the block themselves, and in many models the answer begins with it.
Here a prompt of a row that is to think always ends behind the start marker, so that it does; one
of a row that is not to think ends behind an empty block where the template would leave it open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from batchradix.chat_options import (
    DEFAULT_THINKING_TOKENS,
    SWITCHES,
    ChatOptions,
    read_kwargs,
    thinking_wish,
)
from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.errors import OptionError, RowErrorCode
from batchradix.prompts.guard import AddedTokenMatcher, Piece
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.values import plain
from batchradix.types import Row, Thinking

if TYPE_CHECKING:
    from batchradix.prompts.chat import Conversation

KWARGS_COLUMN = "chat_template_kwargs"
_MARKERS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingStyle:
    """How a model thinks: its markers, and what its chat template does about them.

    ``switches``: the variables by which the template turns it on and off; ``opens``: whether the
    prompt of a row that thinks ends in an open block; ``in_template``: whether the template names
    the markers at all, or the tokenizer alone. ``gap``: what stands behind the end marker.
    """

    start: str
    end: str
    switches: tuple[str, ...]
    opens: bool
    in_template: bool
    gap: str

    @property
    def is_offered(self) -> bool:
        """Whether the template itself can have the model think."""
        return self.opens or bool(self.switches)

    def variables(self, thinks: bool | None) -> dict[str, bool]:
        """What the template is told."""
        return {} if thinks is None else dict.fromkeys(self.switches, thinks)

    def tail(self, text: str, thinks: bool | None) -> str:
        """What goes behind a rendered prompt. Raises `RowProblem` where it is too late to think."""
        shown = text.rstrip()
        if thinks is None:
            return ""
        if thinks and shown.endswith(self.end):
            raise RowProblem(
                RowErrorCode.TEMPLATE_FAILED,
                "the row is to think, and the model's chat template ends its thinking in the "
                "prompt; change what tells it so, or leave --thinking on out",
            )
        if shown.endswith(self.start):
            rest = "\n" if text.endswith("\n") else "\n\n"
            return "" if thinks else f"{rest}{self.end}{self.gap}"
        if thinks:
            return f"{self.start}\n"
        is_left_open = self.in_template and not self.is_offered and not shown.endswith(self.end)
        return f"{self.start}\n\n{self.end}{self.gap}" if is_left_open else ""

    def settings(
        self, matcher: AddedTokenMatcher, tokenizer: Tokenizer, max_tokens: int | None
    ) -> Thinking:
        """What the engine has to know of it."""

        def ids(text: str) -> tuple[int, ...]:
            out: list[int] = []
            for span in matcher.cut_pieces([Piece(text, False)]):
                known = span.token_id is not None
                out += (
                    [span.token_id or 0]
                    if known
                    else tokenizer.encode_plain([span.text], [False])[0]
                )
            return tuple(out)

        return Thinking(
            start=self.start,
            end=self.end,
            end_id=tokenizer.added_token_id(self.end),
            closing_ids=ids(f"\n{self.end}{self.gap}"),
            gap_ids=ids(self.gap),
            max_tokens=DEFAULT_THINKING_TOKENS if max_tokens is None else max_tokens,
        )


def find_style(
    source: str, tokens: tuple[str, ...], render: Callable[[Mapping[str, Any]], str | None]
) -> ThinkingStyle | None:
    """The style of a chat template, None where neither it nor the tokenizer's added ``tokens`` know
    of thinking. ``render``: a prompt with these variables, None where there is none."""
    for places in (source, tokens):
        pair = next((p for p in _MARKERS if p[0] in places or p[1] in places), None)
        if pair is not None:
            break
    if pair is None:
        return None
    start, end = pair
    names = tuple(name for name in SWITCHES if re.search(rf"\b{name}\b", source))
    shown, silent = (render(dict.fromkeys(names, on)) for on in (True, False))
    if shown == silent or shown is None or silent is None:
        names = ()
    behind = re.search(rf"{re.escape(end)}(\s*)\Z", silent or "")
    return ThinkingStyle(
        start=start,
        end=end,
        switches=names,
        opens=shown is not None and shown.rstrip().endswith(start),
        in_template=start in source or end in source,
        gap="\n\n" if behind is None else behind[1],
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """What a chat's template is told beside messages and tools, and whether the row thinks (None:
    as the template has it)."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool | None = None

    def applied(self, conversation: Conversation) -> Conversation:
        return replace(conversation, variables=self.variables, thinks=self.thinks)


class ThinkingRule:
    """Says of each row whether it thinks, and which variables its chat template gets.

    ``style``: None for a model that cannot think. ``is_bound``: whether a row's answer has to match
    something; ``bound``: what that is for rows of this job.
    """

    def __init__(
        self,
        style: ThinkingStyle | None,
        options: ChatOptions,
        *,
        is_bound: Callable[[Row], bool],
        bound: Collection[bool],
    ) -> None:
        self._style, self._options = style, options
        self._is_bound, self._bound = is_bound, bound
        self._variables = read_kwargs(options.chat_template_kwargs or {})
        self._wish: bool | None = thinking_wish(self._variables)
        if options.thinking != "auto":
            self._wish = options.thinking == "on"
        self._usual = {b: self._asked(self._variables, self._wish, b) for b in (False, True)}
        self.default = self._usual[True in bound]
        """What rows ask for that say nothing of their own, where some are bound these."""

    @property
    def is_kept_from_thinking(self) -> bool:
        """Whether rows do not think that would if their answers were free text."""
        return self._wish is None and True in self._bound and bool(self._usual[False].thinks)

    def may_think(self, columns: Collection[str]) -> bool:
        """Whether any row of an input with these columns may."""
        if self._style is None:
            return False
        return KWARGS_COLUMN in columns or any(self._usual[b].thinks for b in self._bound)

    def refuse_raw(self) -> None:
        """Raises `OptionError` where raw prompts cannot have what was asked for."""
        options = self._options
        if options.thinking == "on":
            raise OptionError(
                "`thinking` on needs chats, and the input has raw prompts; give messages, or use "
                "--template '{{ prompt }}' --chat"
            )
        if options.chat_template is not None or options.chat_template_kwargs is not None:
            raise OptionError(
                "`chat_template` and `chat_template_kwargs` are for chats, and the prompts are "
                "raw; leave them out, or send a template as a chat message with `chat`"
            )

    def of_raw(self) -> Asked:
        """What a raw prompt among chats asks for: nothing. Raises `RowProblem`."""
        if self._options.thinking == "on":
            raise RowProblem(
                RowErrorCode.BAD_VALUE,
                "the row has a raw 'prompt', which cannot be told to think; give it 'messages', or "
                "leave --thinking on out",
            )
        return Asked()

    def of(self, row: Row, *, continues: bool = False) -> Asked:
        """What a chat's row asks for; ``continues``: its answer has begun in the last message.
        Raises `RowProblem`."""
        own = row.values.get(KWARGS_COLUMN)
        wish = None
        if own is None and (self._style is None or self._wish is not None):
            asked = self.default  # bound or not
        elif own is None:
            asked = self._usual[self._is_bound(row)]
        else:
            try:
                given = {k: v for k, v in read_kwargs(own).items() if v is not None}
            except ValueError as error:
                raise RowProblem(RowErrorCode.BAD_VALUE, f"{KWARGS_COLUMN!r} {error}") from None
            wish = thinking_wish(given)
            variables = {**self._variables, **plain(given, KWARGS_COLUMN)}
            asked = self._asked(
                variables, self._wish if wish is None else wish, self._is_bound(row)
            )
        if not continues or asked.thinks is None:
            return asked
        if asked.thinks and (wish or (wish is None and self._wish)):
            raise RowProblem(
                RowErrorCode.UNSUPPORTED_CONTENT,
                "the last message is the assistant's, to be continued, and it is too late to think "
                "about an answer that has begun; end with a user message, or turn thinking off",
            )
        return Asked(asked.variables, None)

    def _asked(self, variables: Mapping[str, Any], wish: bool | None, is_bound: bool) -> Asked:
        style = self._style
        if style is None:
            return Asked(variables, None)
        if wish is None:
            wish = not is_bound if style.is_offered else None
        return Asked({**variables, **style.variables(wish)}, wish)
