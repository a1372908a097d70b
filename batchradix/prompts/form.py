"""The form of a prompt that all rows of a job share: token ids, and blanks for the row's text.

Where added tokens stand is up to the template's own text alone, so a job's prompts are cut once.
What stands between blanks is encoded once as well; a row only brings the text of its blanks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.guard import AddedTokenMatcher, Span, Stretch
from batchradix.prompts.surrogates import clean_text

Part = Span | tuple[int, ...]
"""What is encoded as one, or token ids that are known."""


@dataclass(frozen=True, slots=True)
class Blank:
    """A stretch of text with data in it; an int among ``texts`` is the number of a fill."""

    texts: tuple[str | int, ...]
    stretch: Stretch

    def filled(self, fills: Sequence[str]) -> str:
        if self.texts == (0,):
            return self.stretch.trimmed(fills[0])
        return self.stretch.trimmed(
            "".join(text if isinstance(text, str) else fills[text] for text in self.texts)
        )


class Form:
    """A prompt with blanks; made by `form_of`."""

    def __init__(
        self, matcher: AddedTokenMatcher, parts: Sequence[Blank | tuple[int, ...]]
    ) -> None:
        self._matcher = matcher
        self._parts = tuple(parts)

    def fill(self, fills: Sequence[str]) -> list[Part]:
        """The prompt with ``fills`` in its blanks, cut as `AddedTokenMatcher` cuts the whole."""
        out: list[Part] = []
        for part in self._parts:
            if isinstance(part, tuple):
                out.append(part)
            else:
                out += self._matcher.text_spans(part.filled(fills), part.stretch.at_start)
        return out


def form_of(
    matcher: AddedTokenMatcher,
    tokenizer: Tokenizer,
    mask: str,
    holes: Sequence[str],
    order: Sequence[int] | None = None,
    *,
    is_raw: bool,
) -> Form | None:
    """The form of a prompt whose text is ``mask``, in which each of the characters ``holes``
    stands for a fill: the one of its own number, or, with one hole and an ``order``, for the
    fills of these numbers in turn. A raw prompt gets what the tokenizer puts around it.

    None where cutting takes more than the mask: at tokens that only stand between word
    boundaries, or when it is up to the row whether the prompt begins with a BOS of its own.
    """
    numbers = iter(order or ())
    parts: list[Blank | Span] = []
    for stretch in matcher.stretches(mask):
        if stretch.token is not None and stretch.token.single_word:
            return None
        texts: list[str | int] = []
        for is_hole, run in groupby(stretch.raw, key=holes.__contains__):
            if is_hole:
                texts += [holes.index(c) if order is None else next(numbers) for c in run]
            else:
                texts.append("".join(run))
        if any(isinstance(text, int) for text in texts):
            parts.append(Blank(tuple(texts), stretch))
        else:
            parts += matcher.text_spans(stretch.trimmed(stretch.raw), stretch.at_start)
        if stretch.token is not None:
            parts.append(Span(stretch.token.content, stretch.token.id))
    if is_raw:
        first = next((p for p in parts if isinstance(p, Span)), None)
        begins = tokenizer.prefix_ids[:1]
        if begins and first is not None and (first.token_id,) == begins:
            if parts[0] is not first:
                return None
        else:
            parts = [*(Span("", i) for i in tokenizer.prefix_ids), *parts]
        parts += [Span("", i) for i in tokenizer.suffix_ids]
    return Form(matcher, _encoded(parts, tokenizer))


def _encoded(parts: Sequence[Blank | Span], tokenizer: Tokenizer) -> list[Blank | tuple[int, ...]]:
    out: list[Blank | tuple[int, ...]] = []
    for is_known, run in groupby(parts, key=lambda part: isinstance(part, Span)):
        if not is_known:
            out += [part for part in run if isinstance(part, Blank)]
            continue
        ids: list[int] = []
        for span in run:
            assert isinstance(span, Span)
            if span.token_id is not None:
                ids.append(span.token_id)
            else:
                text = clean_text(span.text)
                ids += tokenizer.encode_plain([text], [span.at_start])[0]
        out.append(tuple(ids))
    return out
