"""The form of a prompt that all rows of a job share: token ids, and blanks for the row's text.

Where added tokens stand is up to the template's own text alone, so a job's prompts are cut once.
What stands between blanks is encoded once as well; a row only brings the text of its blanks. Where
the template's text beside a blank has a border of the tokenizer, it is cut there too, so that what
is encoded with one of the row's texts depends on no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from batchradix.checkpoint.borders import Borders
from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.guard import AddedTokenMatcher, Span, Stretch
from batchradix.prompts.spot import Spot
from batchradix.prompts.surrogates import clean_text
from batchradix.prompts.tokenise import Part, encode_prompts
from batchradix.types import U32

Texts = tuple[str | int, ...]
"""What stands side by side: texts, and the numbers of fills."""
_Run = tuple[tuple[str, Spot], ...]
_UNWATCHED = Spot()
_UNWATCHED.looks_up = False
_SAMPLED = 8  # one of so many rows says whether a place begins to repeat that did not
_LONG_CHARS = 32  # of a constant text that is worth to be encoded by itself


class Blank:
    """A stretch of text with data in it, in the sections that borders make of it; one without data
    is token ids."""

    def __init__(self, sections: Sequence[Texts | U32], stretch: Stretch) -> None:
        self._sections = tuple(sections)
        self._merged = tuple(_merged(sections))
        self._stretch = stretch
        self._spots: list[Spot] = []  # of sections, as far as rows had them
        self._is_cold = False
        self._num_filled = 0

    def filled(self, fills: Sequence[Sequence[str]], matcher: AddedTokenMatcher) -> Iterator[Part]:
        """The stretch with the fills in it; those of their texts that repeat each by itself."""
        if self._num_filled % _SAMPLED == 0:
            self._is_cold = not any(spot.looks_up for spot in self._spots)
        runs: list[_Run | U32]
        if self._is_cold and self._num_filled % _SAMPLED:
            runs = [
                ((_whole(section, fills), _UNWATCHED),) if isinstance(section, tuple) else section
                for section in self._merged
            ]
        else:
            runs = list(self._runs(fills))
        self._num_filled += 1
        for number, run in enumerate(runs):
            if isinstance(run, tuple):
                text = "".join([text for text, _ in run])
                is_last = number == len(runs) - 1
                text = self._stretch.trimmed(text, start=number == 0, end=is_last)
                at_start = self._stretch.at_start and number == 0
                yield from matcher.text_spans(text, at_start, number > 0, run)
            else:
                yield run

    def _runs(self, fills: Sequence[Sequence[str]]) -> Iterator[_Run | U32]:
        """Sections with their spots; those side by side that are not looked up are one run."""
        cold: list[tuple[str, Spot]] = []
        number = 0
        for section in self._sections:
            if not isinstance(section, tuple):
                if cold:
                    yield tuple(cold)
                    cold = []
                yield section
                continue
            for text in _joined(section, fills):
                if number == len(self._spots):
                    self._spots.append(Spot())
                spot = self._spots[number]
                number += 1
                if not spot.looks_up:
                    cold.append((text, spot))
                    continue
                if cold:
                    yield tuple(cold)
                    cold = []
                yield ((text, spot),)
        if cold:
            yield tuple(cold)


def _merged(sections: Iterable[Texts | U32]) -> Iterator[Texts | U32]:
    """Sections without the borders between two that are texts."""
    for is_text, run in groupby(sections, key=lambda section: isinstance(section, tuple)):
        if is_text:
            yield tuple(text for section in run if isinstance(section, tuple) for text in section)
        else:
            yield from run


def _whole(section: Texts, fills: Sequence[Sequence[str]]) -> str:
    return "".join([text if isinstance(text, str) else "".join(fills[text]) for text in section])


def _joined(section: Texts, fills: Sequence[Sequence[str]]) -> list[str]:
    """A section's text, cut where its fills are."""
    texts = [""]
    for text in section:
        if isinstance(text, str):
            texts[-1] += text
        else:
            first, *others = fills[text]
            texts[-1] += first
            texts += others
    return texts


class Form:
    """A prompt with blanks; made by `form_of`."""

    def __init__(self, matcher: AddedTokenMatcher, parts: Sequence[Blank | U32]) -> None:
        self._matcher = matcher
        self._parts = tuple(parts)

    def fill(self, fills: Sequence[Sequence[str]]) -> list[Part]:
        """The prompt with ``fills`` in its blanks, cut as `AddedTokenMatcher` cuts the whole.

        Each fill is one text or more, with a border of the tokenizer between any two.
        """
        out: list[Part] = []
        for part in self._parts:
            if isinstance(part, Blank):
                out += part.filled(fills, self._matcher)
            else:
                out.append(part)
        return out


def sections_of(texts: Sequence[str | int], borders: Borders) -> list[Texts]:
    """``texts``, cut at borders within the constant ones that stand beside numbers of fills.

    A border that is nearest to a fill is one that stands behind as much constant text, or before
    it: so what comes before a fill does not depend on it, and little of what comes after does.
    """
    sections: list[list[str | int]] = [[]]
    for i, text in enumerate(texts):
        if isinstance(text, int):
            sections[-1].append(text)
            continue
        cuts = []
        last = borders.last(text, 1, len(text)) if i + 1 < len(texts) else None
        first = borders.next(text, 1, len(text)) if i > 0 else None
        if first is not None and (last is None or last - first >= _LONG_CHARS):
            cuts.append(first)
        if last is not None:
            cuts.append(last)
        begin = 0
        for cut in cuts:
            sections[-1].append(text[begin:cut])
            sections.append([])
            begin = cut
        sections[-1].append(text[begin:])
    return [tuple(section) for section in sections]


def trimmings(sections: Sequence[Texts], texts: Sequence[str]) -> list[list[str]]:
    """What a form of `ChatTemplate.form` is filled with: ``sections`` of ``texts`` by number."""
    whole = ["".join([t if isinstance(t, str) else texts[t] for t in part]) for part in sections]
    left, right = [whole[0].lstrip(), *whole[1:]], [*whole[:-1], whole[-1].rstrip()]
    both = [*left[:-1], left[-1].rstrip()]
    return [whole, left, right, both]


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
            parts.append(_blank(texts, stretch, matcher, tokenizer))
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


def _blank(
    texts: Sequence[str | int], stretch: Stretch, matcher: AddedTokenMatcher, tokenizer: Tokenizer
) -> Blank:
    sections: list[Texts | U32] = []
    listed = sections_of(texts, tokenizer.borders)
    for number, section in enumerate(listed):
        if any(isinstance(text, int) for text in section):
            sections.append(section)
            continue
        text = "".join(map(str, section))
        text = stretch.trimmed(text, start=number == 0, end=number == len(listed) - 1)
        at_start = stretch.at_start and number == 0
        sections.append(_ids(matcher.text_spans(text, at_start, number > 0), tokenizer))
    return Blank(sections, stretch)


def _encoded(parts: Sequence[Blank | Span], tokenizer: Tokenizer) -> list[Blank | U32]:
    out: list[Blank | U32] = []
    for is_known, run in groupby(parts, key=lambda part: isinstance(part, Span)):
        if is_known:
            out.append(_ids([part for part in run if isinstance(part, Span)], tokenizer))
        else:
            out += [part for part in run if isinstance(part, Blank)]
    return out


def _ids(spans: Iterable[Span], tokenizer: Tokenizer) -> U32:
    cleaned = [replace(span, text=clean_text(span.text)) for span in spans]
    return encode_prompts(tokenizer, [cleaned])[0]
