"""Rows to prompts: the door of this room.

A job asks in one of four ways, settled once in `PromptBuilder`: the input's ``messages`` (chat)
or ``prompt`` (raw) column, a template over columns (raw, or chat), or an instruction with a
column (chat). Everything that can be refused without reading rows is refused when the builder
is made or its columns are checked; what befalls a single row is that row's `RowError`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchradix.chat_options import ChatOptions
from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import PromptOptions
from batchradix.errors import OptionError, RowError, RowErrorCode, TemplateError
from batchradix.prompts import cautions
from batchradix.prompts.chat import ChatTemplate, Conversation, Mixed
from batchradix.prompts.chat_check import try_chat
from batchradix.prompts.chat_forms import ChatForms, chat_form
from batchradix.prompts.columns import check_input_columns, check_places
from batchradix.prompts.field_list import FieldList, find_list
from batchradix.prompts.fields import ListFields, TemplateFields
from batchradix.prompts.form import Form, Texts, form_of, sections_of, trimmings
from batchradix.prompts.guard import AddedTokenMatcher, Piece, Span, choose_marks, noncharacters
from batchradix.prompts.instruction import SCHEMA_LINE, shared_text, user_conversation
from batchradix.prompts.messages import ends_with_assistant
from batchradix.prompts.open_chat import open_chat
from batchradix.prompts.own import OwnPrompts
from batchradix.prompts.passages import PassageOrders
from batchradix.prompts.repeated import TextEncoder
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.surrogates import clean_text
from batchradix.prompts.template import Place, Template, parse_place, parse_template
from batchradix.prompts.thinking import KWARGS_COLUMN, Asked, ThinkingRule, ThinkingStyle
from batchradix.prompts.tokenise import Part, count_tokens, encode_prompts
from batchradix.prompts.view import PromptView, SpanView
from batchradix.types import I8, Row, Thinking, TokenTable


@dataclass(frozen=True, slots=True)
class _Shape:
    """A template, what its prompts share where they share anything, and the sections of a chat
    message's text, by the numbers of the template's parts."""

    template: Template | None
    form: Form | None
    sections: list[Texts]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts of a batch of rows. ``tokens`` has one row for each, in order, empty where the row
    has an error; ``errors`` is keyed by position in the batch. ``num_cleaned``: rows in which
    lone surrogates were replaced by U+FFFD. ``thinks``: bool[n], rows that think before they
    answer, whose prompts end where that begins."""

    tokens: TokenTable
    errors: dict[int, RowError]
    num_cleaned: int
    thinks: NDArray[np.bool_]


class PromptBuilder:
    """Turns rows into token ids by one job's options.

    ``columns``: the input's top-level columns where they are known, else None (then call
    `check_columns` once they are). ``schema_text``: what answers must match as text, such as the
    output schema as compact JSON; ``schema_line`` introduces it below an instruction. ``tools``:
    functions in OpenAI's shape for every chat. A chat template that has a place for them shows
    them there, and then the instruction does not. ``are_requests``: rows are those of an OpenAI
    batch file, which say themselves whether a last assistant message is to be continued.
    ``is_bound`` and ``bound`` tell `ThinkingRule` whether answers have to match something.

    Raises `TemplateError`, `OptionError` or `InputError` for what no row could mend.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: PromptOptions,
        *,
        columns: Sequence[str] | None,
        schema_text: str | None = None,
        schema_line: str = SCHEMA_LINE,
        tools: list[dict[str, Any]] | None = None,
        are_requests: bool = False,
        chats: ChatOptions | None = None,
        is_bound: Callable[[Row], bool] = lambda row: False,
        bound: Collection[bool] = (False,),
    ) -> None:
        self._chats = chats or ChatOptions()
        self._options = options
        self._are_requests = are_requests
        self._tokenizer = checkpoint.tokenizer
        self._encoder = TextEncoder(checkpoint.tokenizer)
        self._schema_text = None if schema_text is None else clean_text(schema_text)
        self._schema_line = schema_line
        self._system = None if options.system is None else clean_text(options.system)
        self._has_chats = True
        self._has_tools = tools is not None
        # None as well where the chat template has no place for them.
        self._tools = tools if tools and "tools" in (checkpoint.chat_template or "") else None
        self._matcher = AddedTokenMatcher(checkpoint.tokenizer.added_tokens)
        self._template = self._parse(columns or ())
        self._list: FieldList | None = None
        self._orders: I8 | None = None
        self._passages: PassageOrders | None = None
        self._shapes: dict[bytes, _Shape] = {}
        variables = self._chats.chat_template_kwargs or {}
        self._chat, no_chat = open_chat(
            checkpoint, options, self._matcher, self._literals(), variables
        )
        self._own = OwnPrompts(
            self._chat, no_chat, self._system, self._has_tools, self._tools, are_requests
        )
        self._forms = None if self._chat is None else ChatForms(self._chat, self._tokenizer)
        self._check_options()
        self._columns: tuple[str, ...] = ()
        self._rule = ThinkingRule(
            self._thinking_style(), self._chats, is_bound=is_bound, bound=bound
        )
        self._check_chat()
        if columns is not None:
            self.check_columns(columns)

    # -- what the job asks for ------------------------------------------------------------

    @property
    def required_columns(self) -> frozenset[str]:
        """Top-level input columns that prompts are made of; readers need no others for them."""
        if self._template is None:
            return self._own.columns
        has_own = self._chat is not None and KWARGS_COLUMN in self._columns
        own = (KWARGS_COLUMN,) if has_own else ()
        return frozenset([*(place.column for place in self._template.places), *own])

    @cached_property
    def thinking(self) -> Thinking | None:
        """How rows think that do, None where none can."""
        style = None if self._chat is None else self._chat.thinking
        if style is None:
            return None
        return style.settings(self._matcher, self._tokenizer, self._chats.thinking_tokens)

    @property
    def may_think(self) -> bool:
        """Whether any row may think."""
        return self._chat is not None and self._has_chats and self._rule.may_think(self._columns)

    @property
    def places(self) -> tuple[Place, ...] | None:
        """Where prompts show text of their row; None where they are columns of the input."""
        return None if self._template is None else self._template.places

    def check_columns(self, columns: Sequence[str]) -> None:
        """Refuses a job whose input has not the columns it needs; ``columns`` is what the input
        has. Nothing is refused where it is empty, as an input without rows has no columns.

        Raises `TemplateError`, `OptionError` or `InputError`.
        """
        if not columns:
            return
        self._columns = tuple(columns)
        self._template = self._parse(columns)
        self.__dict__.pop("_common", None)
        if self._template is not None and self._chat is None:
            self._rule.refuse_raw()
        if self._template is None:
            self._has_chats = "messages" in columns
            if not self._has_chats and "prompt" in columns:
                self._rule.refuse_raw()
            check_input_columns(
                columns,
                no_chat=None if self._chat is not None else self._own.no_chat,
                has_system=self._system is not None,
            )
            return
        has_template = self._options.template is not None
        check_places(self._template.places, columns, has_template=has_template)

    @property
    def shows_schema(self) -> bool:
        """Whether prompts hold the output schema's text."""
        if self._schema_text is None or self._template is None:
            return False
        shows_by_line = self._options.instruction is not None and self._tools is None
        return shows_by_line or self._template.has_schema

    @property
    def _shows_tools(self) -> bool:
        return self._chat is not None and self._chat.reads("tools")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and probably not meant, a sentence each."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        template, options = self._template, self._options
        if self._chat is not None and self._chat.writes_date:
            yield cautions.DATE_WRITTEN
        if self._rule.is_kept_from_thinking and self._has_chats:
            yield cautions.KEPT_FROM_THINKING
        if self._has_tools:
            is_told = self._tools is not None and self._chat is not None and self._has_chats
            if not (is_told or self.shows_schema):
                yield cautions.TOOLS_UNTOLD
        elif self._are_requests and "tools" in self._columns and not self._shows_tools:
            yield cautions.REQUEST_TOOLS_UNTOLD
        elif template is None and self._schema_text is not None:
            yield cautions.SCHEMA_UNTOLD
        if template is not None and options.template is not None:
            schema_text = None if self._has_tools else self._schema_text
            yield from cautions.template_cautions(options, template, schema_text)

    # -- rows -----------------------------------------------------------------------------

    def encode(self, rows: Sequence[Row]) -> PromptBatch:
        """Token ids of the rows' prompts. Rows that carry an error are passed over."""
        rows = [self._arranged(row) for row in rows]
        prompts: list[Sequence[Part]] = []
        errors: dict[int, RowError] = {}
        num_cleaned = 0
        thinks = np.zeros(len(rows), dtype=np.bool_)
        for position, row in enumerate(rows):
            parts: Sequence[Part] = ()
            if row.error is None:
                try:
                    asked = self._asked(row)
                    parts, cleaned = _cleaned(self._parts(row, asked))
                    num_cleaned += cleaned
                    thinks[position] = bool(asked.thinks)
                except RowProblem as problem:
                    errors[position] = problem.at(row)
            prompts.append(parts)
        tokens = self._encoder.encode(prompts)
        for position in np.flatnonzero(tokens.lengths == 0).tolist():
            if rows[position].error is None and position not in errors:
                errors[position] = _empty(rows[position])
        return PromptBatch(tokens, errors, num_cleaned, thinks)

    def explain(self, row: Row) -> PromptView:
        """One row's prompt with its spans and their ids, for people to look at."""
        if row.error is not None:
            return PromptView(error=row.error)
        try:
            asked = self._asked(row)
            found = self._spans(self._arranged(row), asked)
            spans = [replace(span, text=clean_text(span.text)) for span in found]
        except RowProblem as problem:
            return PromptView(error=problem.at(row))
        table = encode_prompts(self._tokenizer, [[span] for span in spans])
        if table.num_tokens == 0:
            return PromptView(error=_empty(row))
        return PromptView(
            spans=tuple(
                SpanView(
                    text=span.text,
                    is_token=span.token_id is not None,
                    ids=tuple(table[i].tolist()),
                )
                for i, span in enumerate(spans)
            ),
            thinks=bool(asked.thinks),
        )

    def fields(self) -> TemplateFields | None:
        """The job's template as fields, None where it has none or shows no column."""
        options, template = self._options, self._template
        if options.template is None or template is None or not template.places:
            return None
        return TemplateFields(template, self._tokenizer, self._arranged)

    def list_fields(self) -> ListFields:
        """The lines that list fields in the template. Raises `TemplateError` where none do."""
        assert self._template is not None, "`reorder_columns` needs a template"
        self._list = find_list(self._template)
        return ListFields(self._list, self._tokenizer, self._arranged)

    def reorder(self, orders: I8) -> None:
        """Has each row's prompt list its fields in an order of its own.

        ``orders``: int8[n, k] by row number, the lines of `list_fields`; rows behind have them as
        the template has. Call `list_fields` before.
        """
        self._orders = orders

    def arrange(self, passages: PassageOrders) -> None:
        """Has each row's list stand in an order of its own, here and in `fields`."""
        self._passages = passages

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has by itself."""
        return count_tokens(self._tokenizer, texts)

    def _arranged(self, row: Row) -> Row:
        return row if self._passages is None else self._passages.arranged(row)

    def _asked(self, row: Row) -> Asked:
        """What a row's chat asks for beside its messages. Raises `RowProblem`."""
        if self._chat is None:
            return Asked()
        messages = row.values.get("messages")
        if self._template is not None:
            return self._rule.of(row)
        if messages is None:
            is_raw = row.values.get("prompt") is not None
            return self._rule.of_raw() if is_raw else Asked()  # without either it is an error
        may_continue = self._own.may_continue(row.values)
        return self._rule.of(row, continues=may_continue and ends_with_assistant(messages))

    def _spans(self, row: Row, asked: Asked) -> list[Span]:
        template = self._shape(row).template
        if template is None:
            return self._input_spans(row, asked)
        pieces = template.pieces(row.values)
        if self._chat is None:
            return self._raw_spans(pieces)
        return self._chat.spans(self._conversation(self._chat, asked, Mixed(tuple(pieces))))

    def _conversation(self, template: ChatTemplate, asked: Asked, content: Any) -> Conversation:
        chat = user_conversation(content, template, self._system)
        return asked.applied(replace(chat, tools=self._tools))

    def _parts(self, row: Row, asked: Asked) -> Sequence[Part]:
        """As `_spans`, with what is known encoded already, where the row fits the job's form."""
        shape, values = self._shape(row), row.values
        form, template = shape.form, shape.template
        if form is None:
            return self._spans(row, asked)
        if template is None:
            prompt = values.get("prompt")
            if not isinstance(prompt, str) or values.get("messages") is not None or self._system:
                return self._input_parts(row, asked)
            return form.fill(((prompt,),))
        texts = template.texts(values)
        if self._chat is None:
            return form.fill([(text,) for text in texts])
        if asked is self._rule.default and all(map(self._chat.is_harmless, texts)):
            return form.fill(trimmings(shape.sections, texts))
        return self._spans(row, asked)

    def _shape(self, row: Row) -> _Shape:
        """The template of a row's prompt, and its form."""
        if self._orders is None or self._list is None or row.index >= len(self._orders):
            return self._common
        order = self._orders[row.index]
        shape = self._shapes.get(order.tobytes())
        if shape is None:
            template = self._list.ordered(order.tolist())
            shape = self._shapes[order.tobytes()] = self._shape_of(template)
        return shape

    @cached_property
    def _common(self) -> _Shape:
        """What all prompts of the job share."""
        return self._shape_of(self._template)

    def _shape_of(self, template: Template | None) -> _Shape:
        parts = () if template is None else template.parts
        texts = [i if isinstance(part, Place) else _constant(part) for i, part in enumerate(parts)]
        sections = sections_of(texts, self._tokenizer.borders)
        return _Shape(template, self._form_of(template), sections)

    def _form_of(self, template: Template | None) -> Form | None:
        """None where each prompt has to be made by itself."""
        if template is None or self._chat is None:
            parts = [None] if template is None else template.parts
            literals = [part for part in parts if isinstance(part, str)]
            (hole,) = choose_marks(noncharacters(literals), 1)
            mask = "".join(part if isinstance(part, str) else hole for part in parts)
            order = [i for i, part in enumerate(parts) if not isinstance(part, str)]
            return form_of(self._matcher, self._tokenizer, mask, (hole,), order, is_raw=True)
        chat, first = self._chat, template.parts[0]
        begins = "" if isinstance(first, Place) else _constant(first)
        asked = self._rule.default
        return chat_form(
            chat, self._tokenizer, lambda texts: self._conversation(chat, asked, texts[0]), [begins]
        )

    def _input_parts(self, row: Row, asked: Asked) -> Sequence[Part]:
        """As `_input_spans`, by the form of the row's conversation where it has one."""
        chat = self._own.conversation(row.values, asked)
        if chat is None or self._chat is None or self._forms is None:
            return self._spans(row, asked)
        return self._forms.parts(chat) or self._chat.spans(chat)

    def _input_spans(self, row: Row, asked: Asked) -> list[Span]:
        """A row of an input with a ``messages`` or ``prompt`` column; messages come first."""
        values = row.values
        chat = self._own.conversation(values, asked)
        if chat is not None and self._chat is not None:
            return self._chat.spans(chat)
        return self._raw_spans([Piece(self._own.raw(values), True)])

    def _raw_spans(self, pieces: list[Piece]) -> list[Span]:
        """Raw text with what the tokenizer puts around it, which is never put there twice."""
        spans = self._matcher.cut_pieces(pieces)
        prefix = self._tokenizer.prefix_ids
        if prefix and not (spans and spans[0].token_id == prefix[0]):
            spans = [*map(self._token_span, prefix), *spans]
        return [*spans, *map(self._token_span, self._tokenizer.suffix_ids)]

    def _token_span(self, token_id: int) -> Span:
        text = self._matcher.token_text(token_id)
        if text is None:
            text = self._tokenizer.token_bytes[token_id].decode(errors="replace")
        return Span(text, token_id)

    # -- checks ---------------------------------------------------------------------------

    def _parse(self, columns: Collection[str]) -> Template | None:
        """The template of this job; instruction and column make one as well."""
        options, schema = self._options, self._schema_text
        if options.template is not None:
            template = parse_template(clean_text(options.template), columns, schema)
            return replace(template, null_text=options.null_text)
        if options.instruction is None or options.column is None:
            return None
        place = parse_place(options.column, columns) or Place(options.column)
        instruction = clean_text(options.instruction)
        if self._tools is not None:
            schema = None
        front = Piece(shared_text(instruction, schema, self._schema_line), True)
        return Template((front, place), (), options.null_text)

    def _thinking_style(self) -> ThinkingStyle | None:
        """How the model thinks. Raises `OptionError` where it has to and cannot."""
        style = None if self._chat is None else self._chat.thinking
        if self._chats.thinking == "on" and self._chat is not None and style is None:
            raise OptionError(
                "`thinking` on is not possible: neither the chat template nor the tokenizer of the "
                "model knows a marker such as <think>; use a model that thinks, or leave it out"
            )
        return style

    def _literals(self) -> tuple[str, ...]:
        if self._template is None:
            return ()
        return tuple(part for part in self._template.parts if isinstance(part, str))

    def _check_options(self) -> None:
        options = self._options
        if options.template is not None and not options.template:
            raise TemplateError("the template is empty; write a prompt into it")
        if options.instruction is not None and not options.instruction.strip():
            raise OptionError("the instruction is empty; say what to do with the column's text")
        if self._system is not None and options.template is not None and not options.chat:
            raise OptionError(
                "a system message needs a chat: add --chat, or write it into the raw template"
            )

    def _check_chat(self) -> None:
        """Tries the chat template on the shape of message that the job will give it."""
        if self._chat is None:
            return
        probe = "probe"
        if self._template is not None:
            chat = user_conversation(probe, self._chat, None)
            chat = self._rule.default.applied(replace(chat, tools=self._tools))
            try_chat(self._chat, chat, probe)
        if self._system is not None:
            chat = self._rule.default.applied(user_conversation("?", self._chat, probe))
            try_chat(self._chat, chat, probe, what="a system message")


def _empty(row: Row) -> RowError:
    problem = RowProblem(RowErrorCode.PROMPT_EMPTY, "the prompt is empty; give it some text")
    return problem.at(row)


def _cleaned(parts: Sequence[Part]) -> tuple[Sequence[Part], bool]:
    """Parts without lone surrogates, and whether there were any."""
    for part in parts:
        if isinstance(part, Span) and clean_text(part.text) is not part.text:
            break
    else:
        return parts, False
    return [
        replace(part, text=clean_text(part.text)) if isinstance(part, Span) else part
        for part in parts
    ], True


def _constant(part: str | Piece) -> str:
    return part if isinstance(part, str) else part.text
