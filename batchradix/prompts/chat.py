"""A chat template at work: conversations to spans, with the row's own text told apart.

Templates are rendered by `batchradix.checkpoint.chat_template`, in a sandbox, to the same text
as in `transformers`. The result is cut at the added tokens that the template wrote; see
`batchradix.prompts.guard` for how the row's own text is told apart. Ids equal those of
``apply_chat_template(..., tokenize=True)`` where no text of the row looks like an added token;
a template that writes no BOS gets none.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jinja2.nodes

from batchradix.checkpoint.chat_template import (
    ChatTemplateRaised,
    compile_template,
    render_template,
)
from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.checkpoint.unseen import Unseen
from batchradix.errors import RowErrorCode, TemplateError
from batchradix.prompts.form import Form, form_of
from batchradix.prompts.guard import (
    AddedTokenMatcher,
    DataGuard,
    Marks,
    Piece,
    Span,
    choose_marks,
    noncharacters,
)
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.thinking import ThinkingStyle, find_style

ROLES = ("system", "developer", "user", "assistant", "tool")
_PROBE = "probe"
_LONGEST_REASON = 300  # characters of a template's own message that an error repeats


@dataclass(frozen=True, slots=True)
class Mixed:
    """A content made of the job's own template text and of data."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages ready for a chat template.

    Strings in ``messages`` and ``tools`` are data (`Mixed` ones in part), except roles, which
    are among ``ROLES``. ``prefill``: the last message is the assistant's, to be continued.
    ``variables`` are further ones of the template, their strings data as well; ``thinks``: whether
    the model is to think before it answers (None: as the template has it).
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    prefill: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool | None = None


class ChatTemplate:
    """A compiled chat template. ``source`` is Jinja text.

    ``special_texts``: the named special tokens that templates may write (``bos_token``, ...).
    ``literals``: texts of the job's own that `Mixed` contents hold. ``variables``: those that chats
    have unless they say otherwise. The time that templates are
    told is that of making this, one for all rows, so that prompts stay shared. Raises
    `TemplateError` when the template cannot be compiled.
    """

    def __init__(
        self,
        source: str,
        matcher: AddedTokenMatcher,
        *,
        special_texts: Mapping[str, str],
        literals: tuple[str, ...] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        now = datetime.datetime.now()
        self._template = compile_template(source)
        tree = self._template.environment.parse(source)
        self._matcher = matcher
        self._variables = {**special_texts, "documents": None, "strftime_now": now.strftime}
        self._source = source
        own = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
        constants = [c.value for c in tree.find_all(jinja2.nodes.Const) if isinstance(c.value, str)]
        names = [str(node.attr) for node in tree.find_all(jinja2.nodes.Getattr)]
        self._words = frozenset([*constants, *names])
        beside = [*own, *constants, *special_texts.values(), *literals, *ROLES]
        self._guard = DataGuard(matcher, beside)
        self._used = noncharacters([*own, *constants, *matcher.contents, *literals])
        habits = _Habits.of(tree)
        self.takes_parts = habits.loops_over_content
        """Whether the template takes a list of content parts apart itself."""
        self.needs_parts = habits.loops_over_content and not habits.tests_content
        """Whether it takes nothing but a list of parts."""
        self.needs_argument_objects = habits.writes_arguments and not habits.tests_arguments
        """Whether it writes tool call arguments as JSON, and so wants them as objects."""
        self.writes_date = "strftime_now" in source
        self._usual = variables or {}
        self._left_out: dict[str, bool] = {}

    @cached_property
    def thinking(self) -> ThinkingStyle | None:
        """How the model thinks, None where it does not."""
        return find_style(self._source, self._matcher.contents, self._probe)

    def leaves_out(self, role: str) -> bool:
        """Whether messages of a role are not shown, without a word."""
        if role not in self._left_out:
            turns = ("user", "assistant", role) if role == "tool" else (role, "user")
            text = self._probe({}, turns, marked=role)
            self._left_out[role] = text is not None and _PROBE not in text
        return self._left_out[role]

    def _probe(
        self,
        variables: Mapping[str, Any],
        turns: tuple[str, ...] = ("user",),
        marked: str = "user",
    ) -> str | None:
        """A chat of these turns as the template renders it; None where it does not."""
        texts = [_PROBE if role == marked else "?" for role in turns]
        messages = [
            {
                "role": role,
                "content": [{"type": "text", "text": text}] if self.needs_parts else text,
            }
            for role, text in zip(turns, texts, strict=True)
        ]
        try:
            return self._run(
                self._template,
                Conversation(messages=messages, variables={**self._usual, **variables}),
            )
        except RowProblem:
            return None

    def reads(self, name: str) -> bool:
        """Whether the template speaks of ``name`` (a message's key, a variable) at all."""
        return name in self._source

    def spans(self, conversation: Conversation) -> list[Span]:
        """The conversation as spans, ready to be encoded. Raises `RowProblem`."""
        try:
            return self._spans(conversation)
        except RowProblem as problem:
            lacking = [m for m in conversation.messages if "content" not in m]
            if problem.code != RowErrorCode.TEMPLATE_FAILED or not lacking:
                raise
            messages = [{**m, "content": m.get("content", "")} for m in conversation.messages]
            return self._spans(replace(conversation, messages=messages))

    def form(
        self,
        own: Callable[[Sequence[Any]], Conversation],
        begins: Sequence[str],
        tokenizer: Tokenizer,
    ) -> Form | None:
        """The form of the conversations ``own(texts)``, to be filled with each text, and with it
        without white space at its start, its end and both; each begins as ``begins`` says.

        Right for texts that are harmless (`is_harmless`). None where the template looks into
        a text, or the rest of the conversation needs marks.
        """
        try:
            frame = own([""] * len(begins))
            strings = _all_strings(frame)
            harmless = all(
                self._guard.is_harmless(s, known=known) for s, known in self._walk(frame)
            )
            if not harmless or frame.prefill:
                return None
            marks = choose_marks(self._used | noncharacters(strings), 4 * len(begins))
            template = compile_template(self._source, unseen_marks="".join(marks))
            of_each = (marks[4 * i : 4 * i + 4] for i in range(len(begins)))
            unseen = [Unseen(m, begin) for m, begin in zip(of_each, begins, strict=True)]
            text = self._run(template, own(unseen))
            text += self._tail(text, frame)
        except (TemplateError, RowProblem):
            return None
        return form_of(self._matcher, tokenizer, text, marks, is_raw=False)

    def is_harmless(self, text: str) -> bool:
        """Whether ``text`` of a row's can stand in a form."""
        return self._guard.is_harmless(text)

    def _spans(self, conversation: Conversation) -> list[Span]:
        strings = _all_strings(conversation)
        marks = Marks(*choose_marks(self._used | noncharacters(strings), 3))
        text = self._render(conversation, marks, None)
        harmless = all(
            self._guard.is_harmless(string, known=known)
            for string, known in self._walk(conversation)
        )
        if not harmless:
            text = self._render_guarded(conversation, marks, text)
        if conversation.prefill:
            text = self._cut_prefill(conversation, marks, text)
        else:
            text += self._tail(text, conversation)
        return self._matcher.cut_marked(text, marks)

    def _tail(self, text: str, conversation: Conversation) -> str:
        style = None if conversation.thinks is None else self.thinking
        return "" if style is None else style.tail(text, conversation.thinks)

    def _render_guarded(self, conversation: Conversation, marks: Marks, clean: str) -> str:
        """The rendered text with marks in it, which is ``clean`` without them."""
        for whole in (False, True):

            def mark(text: str, known: bool, whole: bool = whole) -> str:
                return self._guard.mark(text, marks, whole=whole, known=known)

            try:
                text = self._render(conversation, marks, mark)
            except RowProblem:
                continue
            if text.replace(marks.broken, "").replace(marks.flagged, "") == clean:
                return text
        raise RowProblem(
            RowErrorCode.TEMPLATE_FAILED,
            "the messages hold text that looks like a control token of the model, and the chat "
            "template treats it in a way that cannot be made safe; take that text out",
        )

    def _cut_prefill(self, conversation: Conversation, marks: Marks, text: str) -> str:
        """``text`` up to the end of the last message's content."""
        head, mark, rest = text.partition(marks.end)
        if mark and marks.end not in rest:
            closed = self._render(replace(conversation, prefill=False), marks, None, ask=False)
            shown = head.replace(marks.broken, "").replace(marks.flagged, "")
            if closed.startswith(shown):
                return head
            if closed.startswith(shown.rstrip()):  # the template trims contents
                return head.rstrip()
        raise RowProblem(
            RowErrorCode.UNSUPPORTED_CONTENT,
            "the last message is the assistant's, to be continued, and the model's chat template "
            "does not show its text as it is; end with a user message",
        )

    def _render(
        self,
        conversation: Conversation,
        marks: Marks,
        mark: Callable[[str, bool], str] | None,
        *,
        ask: bool = True,
    ) -> str:
        """Runs the template. ``mark`` is applied to every string of data with whether it is a
        known word; a prefill gets its end mark; ``ask`` is the generation prompt."""
        messages = [self._fill(m, mark) for m in conversation.messages]
        if conversation.prefill:
            messages[-1]["content"] = _with_end(messages[-1]["content"], marks.end)
        tools = None if conversation.tools is None else self._fill(conversation.tools, mark)
        variables = {k: self._fill(v, mark, k) for k, v in conversation.variables.items()}
        filled = replace(conversation, messages=messages, tools=tools, variables=variables)
        return self._run(self._template, filled, ask=ask)

    def _run(
        self, template: jinja2.Template, conversation: Conversation, *, ask: bool = True
    ) -> str:
        variables = {
            **self._variables,
            **conversation.variables,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "add_generation_prompt": ask and not conversation.prefill,
        }
        try:
            return render_template(template, variables)
        except ChatTemplateRaised as error:
            raise RowProblem(
                RowErrorCode.TEMPLATE_FAILED,
                f"the model's chat template refuses this row: {str(error)[:_LONGEST_REASON]}; "
                f"mend the messages",
            ) from error

    def _fill(self, value: Any, mark: Callable[[str, bool], str] | None, key: str = "") -> Any:
        """``value`` copied for the template, every string of data marked."""
        if isinstance(value, str):
            if mark is None or (key == "role" and value in ROLES):
                return value
            return mark(value, self._is_kind(key, value))
        if isinstance(value, Mixed):
            return "".join(
                mark(piece.text, False) if mark is not None and piece.from_data else piece.text
                for piece in value.pieces
            )
        if isinstance(value, Mapping):
            return {
                (mark(k, k in self._words) if mark is not None else k): self._fill(v, mark, k)
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self._fill(item, mark) for item in value]
        return value

    def _walk(self, conversation: Conversation) -> Iterator[tuple[str, bool]]:
        """Every string of data as `_fill` sees it."""
        seen: list[tuple[str, bool]] = []

        def note(text: str, known: bool) -> str:
            seen.append((text, known))
            return text

        self._fill(conversation.messages, note)
        self._fill(conversation.tools, note)
        self._fill(list(conversation.variables.values()), note)
        return iter(seen)

    def _is_kind(self, key: str, value: str) -> bool:
        """Whether a value is a word that templates compare, such as ``"type": "function"``."""
        return key == "type" and value in self._words


def _with_end(content: Any, end: str) -> Any:
    if isinstance(content, list):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]
    return content + end


def _all_strings(conversation: Conversation) -> list[str]:
    parts = (conversation.messages, conversation.tools, conversation.variables)
    return [text for part in parts for text in _strings(part)]


def _strings(value: Any) -> Iterator[str]:
    """Every string in a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mixed):
        yield from (piece.text for piece in value.pieces)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


@dataclass(frozen=True, slots=True)
class _Habits:
    """What a template does with contents and tool call arguments, read off its syntax tree."""

    loops_over_content: bool
    tests_content: bool
    writes_arguments: bool
    tests_arguments: bool

    @classmethod
    def of(cls, tree: jinja2.nodes.Template) -> _Habits:
        loops = [node.iter for node in tree.find_all(jinja2.nodes.For)]
        tests = [
            n.node for n in tree.find_all(jinja2.nodes.Test) if n.name in ("string", "mapping")
        ]
        filters = [
            node.node
            for node in tree.find_all(jinja2.nodes.Filter)
            if node.name in ("tojson", "items", "dictsort") and node.node is not None
        ]
        return cls(
            loops_over_content=any(_names(node, "content") for node in loops),
            tests_content=any(_names(node, "content") for node in tests),
            writes_arguments=any(_names(node, "arguments") for node in [*filters, *loops]),
            tests_arguments=any(_names(node, "arguments") for node in tests),
        )


def _names(node: jinja2.nodes.Node, name: str) -> bool:
    """Whether an expression is ``name``, ``x.name`` or ``x['name']``, or has it as its subject."""
    if isinstance(node, jinja2.nodes.Name):
        return node.name == name
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == name or (node.attr == "items" and _names(node.node, name))
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == name
    if isinstance(node, jinja2.nodes.Call):
        return _names(node.node, name)
    if isinstance(node, jinja2.nodes.Filter):
        return node.node is not None and _names(node.node, name)
    return False
