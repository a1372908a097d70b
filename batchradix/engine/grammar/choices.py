"""A few texts to choose from, as a trie of their canonical tokens, and one answer's place in it.

Every text has one spelling: the tokenizer's own, as of a text that follows another. So there is a
choice only where two spellings part, and a text that is a beginning of another one is told from
it by the end-of-sequence token.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchradix.errors import SchemaError
from batchradix.types import I64, GrammarSpec

Spell = Callable[[str], tuple[int, ...]]


@dataclass(slots=True, eq=False, kw_only=True)
class TrieNode:
    """A beginning of some choices: ``depth`` tokens, ``num_bytes`` bytes of their texts.

    ``choice`` is the number of the choice that ends here, if one does; ``children`` by the token
    that leads to them, in the order in which the choices were listed.
    """

    parent: TrieNode | None
    token: int  # that leads here, -1 at the root
    depth: int
    num_bytes: int
    example: int  # the number of some choice that begins so
    choice: int | None = None
    children: dict[int, TrieNode]

    @property
    def is_branch(self) -> bool:
        """Whether something has to be chosen here."""
        return len(self.children) + (self.choice is not None) > 1

    def path(self) -> list[int]:
        """The tokens from the root to here."""
        tokens = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CompiledChoices:
    """Choices ready for one vocabulary; the counterpart of `CompiledGrammar`.

    ``texts``: UTF-8, in the order listed. ``ends``: the node of each. ``branches``: the nodes
    where something is chosen, depth first. ``num_longest``: tokens of the longest choice, with
    the end-of-sequence token where that has to be chosen. ``stop_words`` is as in
    `CompiledGrammar`.
    """

    spec: GrammarSpec
    texts: tuple[bytes, ...]
    ordered: tuple[bytes, ...]  # the texts again, ascending
    root: TrieNode
    branches: tuple[TrieNode, ...]
    ends: tuple[TrieNode, ...]
    num_longest: int
    vocab_size: int
    stop_ids: tuple[int, ...]
    stop_words: NDArray[np.int32]
    compile_s: float
    always_ends: bool = True
    notices: tuple[str, ...] = ()

    def tokens_at(self, node: TrieNode) -> I64:
        """int64[n], ascending: the tokens that may follow ``node``, ends of sequence included
        where a choice ends and others go on."""
        ids = list(node.children)
        if node.is_branch and node.choice is not None:
            ids += self.stop_ids
        return np.array(sorted(ids), dtype=np.int64)


def compile_choices(
    spec: GrammarSpec,
    *,
    spell: Spell,
    token_bytes: Sequence[bytes],
    stop_ids: Sequence[int],
    stop_words: NDArray[np.int32],
    vocab_size: int,
) -> CompiledChoices:
    """The trie of a ``choices`` grammar.

    ``spell`` gives the tokenizer's ids of a text that follows another, () where it does not
    give back its bytes; such a text is cut into the fewest tokens instead. Raises `SchemaError`
    where no tokens make up a text, or a model without an end-of-sequence token would have to
    say that a choice ends where another goes on.
    """
    started = time.perf_counter()
    choices: list[str] = json.loads(spec.source)
    texts = tuple(text.encode() for text in choices)
    root = TrieNode(parent=None, token=-1, depth=0, num_bytes=0, example=0, children={})
    fewest = _FewestTokens(token_bytes, frozenset(stop_ids))
    ends = []
    for number, text in enumerate(choices):
        ids = spell(text)
        if not ids or not fewest.stop_ids.isdisjoint(ids):
            ids = fewest.cut(texts[number])
        if not ids:
            raise SchemaError(
                f"schema: the model's vocabulary has no tokens for the choice {text[:60]!r}"
            )
        ends.append(_insert(root, ids, number, token_bytes))
    branches = _branches(root)
    if not stop_ids:
        _refuse_beginnings(branches, choices)
    needs_end = [node.depth + 1 for node in branches if node.choice is not None]
    return CompiledChoices(
        spec=spec,
        texts=texts,
        ordered=tuple(sorted(texts)),
        root=root,
        branches=branches,
        ends=tuple(ends),
        num_longest=max([*needs_end, _height(root)]),
        vocab_size=vocab_size,
        stop_ids=tuple(sorted(stop_ids)),
        stop_words=stop_words,
        compile_s=time.perf_counter() - started,
    )


def _insert(
    root: TrieNode, ids: Sequence[int], number: int, token_bytes: Sequence[bytes]
) -> TrieNode:
    """Adds one choice; the node where it ends."""
    node = root
    for token in ids:
        child = node.children.get(token)
        if child is None:
            child = TrieNode(
                parent=node,
                token=token,
                depth=node.depth + 1,
                num_bytes=node.num_bytes + len(token_bytes[token]),
                example=number,
                children={},
            )
            node.children[token] = child
        node = child
    node.choice = number
    return node


def _branches(root: TrieNode) -> tuple[TrieNode, ...]:
    found, waiting = [], [root]
    while waiting:
        node = waiting.pop()
        if node.is_branch:
            found.append(node)
        waiting += reversed(node.children.values())
    return tuple(found)


def _height(root: TrieNode) -> int:
    """Tokens from the root to the deepest node."""
    height, level = 0, [root]
    while level:
        height = level[0].depth
        level = [child for node in level for child in node.children.values()]
    return height


def _refuse_beginnings(branches: Sequence[TrieNode], choices: Sequence[str]) -> None:
    for node in branches:
        if node.choice is not None:
            longer = choices[next(iter(node.children.values())).example]
            raise SchemaError(
                f"schema: the choice {choices[node.choice][:60]!r} is the beginning of "
                f"{longer[:60]!r}, and the model has no end-of-sequence token to tell them apart; "
                f"let all choices end differently"
            )


class _FewestTokens:
    """Cuts texts into the fewest tokens, longer ones first, where the tokenizer does not."""

    def __init__(self, token_bytes: Sequence[bytes], stop_ids: frozenset[int]) -> None:
        self.stop_ids = stop_ids
        self._token_bytes = token_bytes
        self._ids: dict[bytes, int] | None = None

    def cut(self, text: bytes) -> tuple[int, ...]:
        if self._ids is None:
            ids: dict[bytes, int] = {}
            for token, word in enumerate(self._token_bytes):
                if word and token not in self.stop_ids:
                    ids.setdefault(word, token)
            self._ids = ids
        known = self._ids
        longest = max(map(len, known), default=0)
        unreachable = len(text) + 1
        fewest = [unreachable] * len(text) + [0]  # tokens from each place to the end
        following = [0] * len(text)
        for start in range(len(text) - 1, -1, -1):
            for stop in range(min(len(text), start + longest), start, -1):
                if text[start:stop] in known and fewest[stop] + 1 < fewest[start]:
                    fewest[start], following[start] = fewest[stop] + 1, stop
        if fewest[0] > len(text):
            return ()
        ids_of_text, place = [], 0
        while place < len(text):
            ids_of_text.append(known[text[place : following[place]]])
            place = following[place]
        return tuple(ids_of_text)


class ChoiceState:
    """One answer's place among choices; what `GrammarState` is for other grammars."""

    def __init__(self, compiled: CompiledChoices) -> None:
        self.compiled = compiled
        # Each step's node, and the text behind it that is no whole token of a choice.
        self._places: list[tuple[TrieNode, bytes]] = [(compiled.root, b"")]
        self._is_terminated = False

    @property
    def node(self) -> TrieNode:
        """The last place in the trie that was reached with whole tokens."""
        return self._places[-1][0]

    def allowed(self) -> NDArray[np.int32]:
        """int32[ceil(vocab_size / 32)]: the tokens that may come next.

        End-of-sequence tokens are among them where a choice ends. In the middle of a token,
        where only `accept_text` leads to, no token is.
        """
        words = np.zeros(len(self.compiled.stop_words), dtype=np.uint32)
        node, tail = self._places[-1]
        if self._is_terminated or tail:
            return words.view(np.int32)
        ids = list(node.children)
        if node.choice is not None:
            ids += self.compiled.stop_ids
        for token in ids:
            words[token >> 5] |= np.uint32(1 << (token & 31))
        return words.view(np.int32)

    def fill(self, bitmask: Tensor | NDArray[np.int32], index: int = 0) -> None:
        """Writes `allowed` into row ``index`` of ``bitmask`` (or into the row itself)."""
        if isinstance(bitmask, Tensor):
            bitmask = bitmask.numpy()
        bitmask[index if bitmask.ndim == 2 else slice(None)] = self.allowed()

    def accept(self, token_id: int) -> bool:
        """Advances by one token; False, with nothing changed, where it is not allowed."""
        node, tail = self._places[-1]
        if self._is_terminated or tail:
            return False
        child = node.children.get(token_id)
        if child is not None:
            self._places.append((child, b""))
            return True
        if node.choice is None or token_id not in self.compiled.stop_ids:
            return False
        self._places.append((node, b""))
        self._is_terminated = True
        return True

    def accept_text(self, text: str | bytes) -> bool:
        """Advances by text that no token was sampled for; counts as one step in `rollback`."""
        node, tail = self._places[-1]
        tail += text.encode() if isinstance(text, str) else text
        begun = self._done(node) + tail
        if self._is_terminated or not _with_beginning(self.compiled.ordered, begun):
            return False
        texts = self.compiled.texts
        while True:  # as far as whole tokens of one choice go
            for child in node.children.values():
                word = texts[child.example][node.num_bytes : child.num_bytes]
                if tail.startswith(word):
                    node, tail = child, tail[len(word) :]
                    break
            else:
                break
        self._places.append((node, tail))
        return True

    def _done(self, node: TrieNode) -> bytes:
        return self.compiled.texts[node.example][: node.num_bytes]

    @property
    def _text(self) -> bytes:
        node, tail = self._places[-1]
        return self._done(node) + tail

    def _beginning_so(self) -> Sequence[bytes]:
        """The choices that begin as the text so far, ascending."""
        return _with_beginning(self.compiled.ordered, self._text)

    @property
    def is_terminated(self) -> bool:
        """An end-of-sequence token was accepted."""
        return self._is_terminated

    @property
    def can_stop(self) -> bool:
        """The text so far is a choice (others may go on from it)."""
        node, tail = self._places[-1]
        if not tail:
            return node.choice is not None
        return self._beginning_so()[0] == self._text

    @property
    def is_complete(self) -> bool:
        """The text so far is a choice and none goes on from it."""
        if self._is_terminated:
            return True
        node, tail = self._places[-1]
        if not tail:
            return not node.children
        return self.can_stop and len(self._beginning_so()) == 1

    def forced_ids(self) -> tuple[int, ...]:
        """The tokens that must come next, up to the next branch or the end of the choice."""
        node, tail = self._places[-1]
        ids: list[int] = []
        while not (self._is_terminated or tail or node.is_branch) and node.children:
            [(token, node)] = node.children.items()
            ids.append(token)
        return tuple(ids)

    def forced_text(self) -> str:
        """The text of `forced_ids`, in whole characters."""
        node = self.node
        for token in self.forced_ids():
            node = node.children[token]
        rest = self.compiled.texts[node.example][self.node.num_bytes : node.num_bytes]
        return rest.decode(errors="ignore")

    def shortest_rest(self) -> bytes:
        """What the shortest choice that begins as the text so far still needs."""
        return min(self._beginning_so(), key=len)[len(self._text) :]

    def fork(self) -> ChoiceState:
        """An independent state at the same place."""
        other = ChoiceState(self.compiled)
        other._places = self._places.copy()
        other._is_terminated = self._is_terminated
        return other

    def rollback(self, num_steps: int) -> None:
        """Takes back the last accepted tokens (or texts); ValueError beyond the beginning."""
        if num_steps >= len(self._places):
            raise ValueError(f"fewer than {num_steps} steps were accepted")
        if num_steps:
            del self._places[-num_steps:]
            self._is_terminated = False

    def reset(self) -> None:
        """Back to the beginning."""
        del self._places[1:]
        self._is_terminated = False


def _with_beginning(ordered: Sequence[bytes], beginning: bytes) -> Sequence[bytes]:
    first = bisect_left(ordered, beginning)
    last = bisect_left(ordered, True, lo=first, key=lambda one: not one.startswith(beginning))
    return ordered[first:last]
