"""A prompt laid open for people: what is a special token and what is text."""

from __future__ import annotations

from dataclasses import dataclass

from batchradix.errors import RowError
from batchradix.visible import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanView:
    """One span of a prompt with its ids. ``is_token``: one added token, placed by the template
    or by the tokenizer; otherwise text, which no added token was looked for in."""

    text: str
    is_token: bool
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptView:
    """One row's prompt as `preview` shows it; without spans where the row has an ``error``.
    ``thinks``: the row thinks before it answers."""

    spans: tuple[SpanView, ...] = ()
    error: RowError | None = None
    thinks: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token_id for span in self.spans for token_id in span.ids)

    @property
    def text(self) -> str:
        """The whole prompt's text, special tokens as they are spelt."""
        return "".join(span.text for span in self.spans)

    def marked(self) -> str:
        """The text with special tokens in ⟦…⟧ and control characters made visible.

        Line breaks stay. A bracket ⟦ or ⟧ that is text is spelt out, so that nothing in a row
        can pass for a special token here either.
        """
        return "".join(
            f"⟦{visible(span.text)}⟧" if span.is_token else visible(span.text)
            for span in self.spans
        )
