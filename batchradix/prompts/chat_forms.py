"""Forms of conversations: a chat template that treats all texts alike runs once for all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.chat import ChatTemplate, Conversation
from batchradix.prompts.form import Form, Texts, trimmings
from batchradix.prompts.guard import noncharacters
from batchradix.prompts.tokenise import Part, encode_prompts

_PROBES = (" probe \n", "\"a\" & 'b' {{ c }} \\n", "é 1")
_MOST_MESSAGES = 7  # each takes four of the 32 characters that stand for texts
_MOST_FORMS = 256
_WHOLE: list[Texts] = [(0,)]


def chat_form(
    chat: ChatTemplate,
    tokenizer: Tokenizer,
    own: Callable[[Sequence[Any]], Conversation],
    begins: Sequence[str],
) -> Form | None:
    """The form of the conversations ``own(texts)``, in which each text begins as ``begins`` says.

    It is filled with the `trimmings` of each text in turn. None where a template does not treat
    all texts alike.
    """
    form = chat.form(own, begins, tokenizer)
    if form is None:
        return None
    for number in range(len(_PROBES)):  # these have to be treated alike, or each row is its own
        probes = [_PROBES[(number + i) % len(_PROBES)] for i in range(len(begins))]
        texts = [begin + probe for begin, probe in zip(begins, probes, strict=True)]
        fills = [fill for text in texts for fill in trimmings(_WHOLE, [text])]
        both = encode_prompts(tokenizer, [form.fill(fills), chat.spans(own(texts))])
        if not all(map(chat.is_harmless, texts)) or not np.array_equal(both[0], both[1]):
            return None
    return form


class ChatForms:
    """The forms of rows' own conversations, one for each sequence of roles (and for each way to
    think, and variables that the template gets)."""

    def __init__(self, chat: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._forms: dict[tuple[Any, ...], Form | None] = {}

    def parts(self, conversation: Conversation) -> list[Part] | None:
        """The prompt of ``conversation``, as `ChatTemplate.spans` has it; None where it has more
        than a few messages of plain text, or the template has to run for it."""
        messages = conversation.messages
        texts: list[Any] = [message.get("content") for message in messages]
        if conversation.prefill or conversation.tools or len(messages) > _MOST_MESSAGES:
            return None
        if not all(len(m) == 2 and type(t) is str for m, t in zip(messages, texts, strict=True)):
            return None
        roles = tuple(message["role"] for message in messages)
        shape = roles, conversation.thinks, repr(conversation.variables)
        if shape not in self._forms and len(self._forms) < _MOST_FORMS:
            self._forms[shape] = self._form(roles, conversation)
        form = self._forms.get(shape)
        if form is None or noncharacters(texts) or not all(map(self._chat.is_harmless, texts)):
            return None
        return form.fill([fill for text in texts for fill in trimmings(_WHOLE, [text])])

    def _form(self, roles: tuple[str, ...], conversation: Conversation) -> Form | None:
        def own(texts: Sequence[Any]) -> Conversation:
            pairs = zip(roles, texts, strict=True)
            messages = [{"role": role, "content": text} for role, text in pairs]
            return replace(conversation, messages=messages)

        return chat_form(self._chat, self._tokenizer, own, [""] * len(roles))
