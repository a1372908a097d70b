"""Text from a row never becomes a special or added token.

A prompt is cut at added tokens that the template itself wrote, and the stretches between them
are encoded whole with added-token matching off. So the question is only who wrote what. In raw
prompts that is known piece by piece. A chat template is a program that mixes its own text with
the row's, so the row's strings are marked beforehand with Unicode noncharacters, which occur in
neither and which the cut takes out again:

- a *break* stands inside every added token's text in data, and at an end of data that could
  become part of one together with template text beside it;
- a *flag* stands before a token's text in data that must stay in one piece.

Added tokens that are nothing but white space and are not special (runs of spaces, which some
tokenizers list) carry no control and are matched everywhere, as the tokenizer does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from batchradix.checkpoint.tokenizer import AddedToken
from batchradix.errors import RowErrorCode
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.spot import Spot

_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_NONCHARACTER = re.compile("[\ufdd0-\ufdef]")
_WORD = re.compile(r"\w")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a prompt's text; ``from_data`` is False for the template's own."""

    text: str
    from_data: bool


@dataclass(frozen=True, slots=True)
class Span:
    """What is encoded as one: a token by its id, or a stretch of text.

    ``at_start`` marks the text at the very beginning of the prompt's text, ``is_inner`` one that
    goes on behind a border of the tokenizer. ``spots``: the texts that it was put together from,
    each with its place in the job's prompts, where these are known.
    """

    text: str
    token_id: int | None = None
    at_start: bool = False
    is_inner: bool = False
    spots: tuple[tuple[str, Spot], ...] = ()


@dataclass(frozen=True, slots=True)
class Marks:
    """Noncharacters that stand for something in one row: break, flag, and end of a prefill."""

    broken: str
    flagged: str
    end: str


def noncharacters(texts: Iterable[str]) -> frozenset[str]:
    """Those of U+FDD0 to U+FDEF that occur in any of ``texts``."""
    return frozenset(c for t in texts if not t.isascii() for c in _NONCHARACTER.findall(t))


def choose_marks(used: frozenset[str], count: int) -> tuple[str, ...]:
    """Noncharacters that are not ``used``; raises `RowProblem` if fewer are left."""
    free = [char for char in _NONCHARACTERS if char not in used]
    if len(free) < count:
        raise RowProblem(
            RowErrorCode.BAD_VALUE,
            "the text uses up the Unicode noncharacters U+FDD0 to U+FDEF, which are needed to "
            "tell it from the template's own text; remove them",
        )
    return tuple(free[:count])


@dataclass(frozen=True, slots=True)
class _Match:
    start: int
    stop: int
    token: AddedToken


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text up to the next added token (None at the end), as it stands in a mask.

    ``strips_start``: the token before it takes the white space with it.
    """

    raw: str
    token: AddedToken | None
    at_start: bool
    strips_start: bool

    def trimmed(self, text: str, *, start: bool = True, end: bool = True) -> str:
        """``text``, which stands in this place, without the white space that tokens take;
        ``start`` and ``end``: whether it begins and ends where the stretch does."""
        if start and self.strips_start:
            text = text.lstrip()
        strips_end = end and self.token is not None and self.token.lstrip
        return text.rstrip() if strips_end else text


class AddedTokenMatcher:
    """Finds added tokens in template text the way the tokenizer does in a text.

    Leftmost first, the longest of those, tokens that are matched before normalisation ahead of
    the others; white space beside a token goes with it where the token says so.
    """

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        tokens = [token for token in tokens if token.content]
        layout = [token for token in tokens if token.content.isspace() and not token.special]
        control = [token for token in tokens if token not in layout]
        self._by_content = {token.content: token for token in tokens}
        self._text_of = {token.id: token.content for token in tokens}
        self._passes = [
            _any_of([token.content for token in control if token.normalized == normalized])
            for normalized in (False, True)
            if any(token.normalized == normalized for token in control)
        ]
        self._layout = _any_of([token.content for token in layout]) if layout else None
        self._control = _any_of([token.content for token in control]) if control else None
        self.contents = tuple(token.content for token in control)
        """The texts that data must not become."""

    def token_text(self, token_id: int) -> str | None:
        """The text of an added token, None for any other id."""
        return self._text_of.get(token_id)

    def cut_pieces(self, pieces: Sequence[Piece]) -> list[Span]:
        """The spans of a raw prompt; only template pieces can hold added tokens."""
        own = noncharacters(piece.text for piece in pieces if not piece.from_data)
        (hole,) = choose_marks(own, 1)
        mask = "".join(hole if piece.from_data else piece.text for piece in pieces)
        return self._cut(mask, hole, [piece.text for piece in pieces if piece.from_data], "")

    def cut_marked(self, text: str, marks: Marks) -> list[Span]:
        """The spans of a text in which data was marked by a `DataGuard`; marks are taken out."""
        fills = [""] * text.count(marks.broken)
        spans = self._cut(text, marks.broken, fills, marks.flagged)
        return [
            Span(span.text.replace(marks.flagged, ""), at_start=span.at_start)
            if span.token_id is None and marks.flagged in span.text
            else span
            for span in spans
        ]

    def _cut(self, mask: str, hole: str, fills: Sequence[str], flag: str) -> list[Span]:
        """Cuts ``mask`` at its tokens; each ``hole`` in it stands for the next of ``fills``."""
        matches = self._matches(mask, _neighbours(mask, hole, fills), flag)
        filler = iter(fills)
        spans: list[Span] = []
        for stretch in _stretches(mask, matches):
            text = stretch.trimmed(_filled(stretch.raw, hole, filler))
            spans.extend(self.text_spans(text, stretch.at_start))
            if stretch.token is not None:
                spans.append(Span(stretch.token.content, stretch.token.id))
        return spans

    def stretches(self, mask: str) -> Iterator[Stretch]:
        """``mask`` cut at its tokens, those included that stand only between word boundaries,
        wherever they stand."""
        return _stretches(mask, self._matches(mask, lambda start, stop: ("", ""), ""))

    def text_spans(
        self,
        text: str,
        at_start: bool,
        is_inner: bool = False,
        spots: tuple[tuple[str, Spot], ...] = (),
    ) -> Iterable[Span]:
        """A stretch of text, or what goes on of one, cut at white-space tokens where the tokenizer
        has such."""
        if self._layout is None:
            return (Span(text, None, at_start, is_inner, spots),) if text else ()
        return self._laid_out(text, self._layout, at_start, is_inner, spots)

    def _laid_out(
        self,
        text: str,
        layout: re.Pattern[str],
        at_start: bool,
        is_inner: bool,
        spots: tuple[tuple[str, Spot], ...],
    ) -> Iterator[Span]:
        position = 0
        for match in layout.finditer(text):
            if match.start() > position:
                between = text[position : match.start()]
                yield Span(between, None, at_start, is_inner, spots)
            at_start = is_inner = False
            yield Span(match.group(), self._by_content[match.group()].id)
            position = match.end()
        if position < len(text):
            yield Span(text[position:], None, at_start, is_inner, spots)

    def _matches(
        self, mask: str, neighbours: Callable[[int, int], tuple[str, str]], flag: str
    ) -> list[_Match]:
        found: list[_Match] = []
        taken = self._flagged(mask, flag) if flag else []
        for pattern in self._passes:
            gaps = zip(
                [0, *(stop for _, stop in taken)],
                [*(start for start, _ in taken), len(mask)],
                strict=True,
            )
            new = [
                _Match(match.start(), match.end(), self._by_content[match.group()])
                for start, stop in gaps
                for match in pattern.finditer(mask, start, stop)
            ]
            found += [
                m for m in new if not m.token.single_word or _alone(*neighbours(m.start, m.stop))
            ]
            taken = sorted([*taken, *((match.start, match.stop) for match in new)])
        return sorted(found, key=lambda match: match.start)

    def _flagged(self, mask: str, flag: str) -> list[tuple[int, int]]:
        """Where data holds a token's text in one piece: [start, stop) after each flag."""
        regions: list[tuple[int, int]] = []
        at = mask.find(flag)
        while at >= 0 and self._control is not None:
            match = self._control.match(mask, at + 1)
            if match is not None:
                regions.append(match.span())
            at = mask.find(flag, match.end() if match is not None else at + 1)
        return regions


def _stretches(mask: str, matches: Sequence[_Match]) -> Iterator[Stretch]:
    position, strips = 0, False
    for match in matches:
        yield Stretch(mask[position : match.start], match.token, position == 0, strips)
        position, strips = match.stop, match.token.rstrip
    yield Stretch(mask[position:], None, position == 0, strips)


def _any_of(contents: Iterable[str], flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Matches any of the texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))), flags)


def _filled(raw: str, hole: str, filler: Iterator[str]) -> str:
    first, *others = raw.split(hole)
    return first + "".join(next(filler) + other for other in others) if others else first


def _neighbours(
    mask: str, hole: str, fills: Sequence[str]
) -> Callable[[int, int], tuple[str, str]]:
    """A function that gives the characters before and after ``mask[start:stop]``, "" at an end."""

    def around(start: int, stop: int) -> tuple[str, str]:
        filler = iter(fills)
        before = _filled(mask[:start], hole, filler)
        after = _filled(mask[stop:], hole, filler)
        return before[-1:], after[:1]

    return around


def _alone(before: str, after: str) -> bool:
    return not _WORD.match(before) and not _WORD.match(after)


class DataGuard:
    """Marks the strings of a row before a chat template mixes them with its own text.

    ``literals`` are all the texts that can stand beside data: where one of them ends in the
    beginning of an added token, data may not complete it. Case counts as equal throughout, since
    a template may change it.
    """

    def __init__(self, matcher: AddedTokenMatcher, literals: Iterable[str]) -> None:
        contents = matcher.contents
        self._contents = {content.lower() for content in contents}
        self._token = _any_of(contents, re.IGNORECASE) if contents else None
        self._token_anywhere = (
            re.compile(f"(?=({self._token.pattern}))", re.IGNORECASE) if self._token else None
        )
        self._beginnings = {c[:i] for c in self._contents for i in range(1, len(c))}
        self._endings = {c[i:] for c in self._contents for i in range(1, len(c))}
        self._longest = max(map(len, contents), default=0)
        firsts = {content[0] for content in contents}
        # Where no token begins with a letter, whose case might matter, looking for these is all.
        self._firsts = firsts if firsts and all(c.lower() == c.upper() for c in firsts) else None
        self._completable = any(self._ends_open(literal) for literal in literals)

    def is_harmless(self, text: str, *, known: bool = False) -> bool:
        """Whether ``text`` needs no mark. ``known``: it is a word of the template's own
        vocabulary (a key it reads), which no one but the template can put beside its text."""
        if self._token is None or not text:
            return True
        if self._firsts is not None and not any(first in text for first in self._firsts):
            return known or not self._closes(text)
        if self._token.search(text):
            return False
        return known or not (self._opens(text) or self._closes(text))

    def mark(self, text: str, marks: Marks, *, whole: bool, known: bool = False) -> str:
        """``text`` with its marks. ``whole`` flags tokens in it instead of breaking them up.

        Marks at the ends stand inside the white space there, so that trimming works as before.
        """
        if self.is_harmless(text, known=known):
            return text
        places = list(self._token_marks(text, marks, whole=whole))
        if not known:
            first = len(text) - len(text.lstrip())
            last = max(first, len(text.rstrip()))
            opening = {last: text[:last], len(text): text}
            closing = {first: text[first:], 0: text}
            places += [(at, marks.broken) for at, part in opening.items() if self._ends_open(part)]
            places += [(at, marks.broken) for at, part in closing.items() if self._completes(part)]
        out, position = [], 0
        for at, mark in sorted(places):
            out += [text[position:at], mark]
            position = at
        return "".join(out) + text[position:]

    def _token_marks(self, text: str, marks: Marks, *, whole: bool) -> Iterator[tuple[int, str]]:
        if self._token is None or self._token_anywhere is None:
            return
        if whole:
            for match in self._token.finditer(text):
                yield match.start(), marks.flagged
            return
        for match in self._token_anywhere.finditer(text):
            if len(match.group(1)) == 1:
                yield match.start(), marks.flagged
            else:
                yield match.start() + 1, marks.broken

    def _opens(self, text: str) -> bool:
        return self._ends_open(text) or self._ends_open(text.rstrip())

    def _closes(self, text: str) -> bool:
        return self._completes(text) or self._completes(text.lstrip())

    def _ends_open(self, text: str) -> bool:
        """Whether the end of ``text`` is the beginning of an added token."""
        end = text[-self._longest :].lower()
        return any(end[-length:] in self._beginnings for length in range(1, len(end) + 1))

    def _completes(self, text: str) -> bool:
        """Whether ``text`` could complete an added token that template text before it began."""
        if not self._completable or not text:
            return False
        start = text[: self._longest].lower()
        if any(start[:length] in self._endings for length in range(1, len(start) + 1)):
            return True
        whole = {part.lower() for part in (text, text.rstrip()) if 0 < len(part) < self._longest}
        return any(part in content for part in whole for content in self._contents)
