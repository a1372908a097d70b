"""The jobs that are measured: real text, the same on every machine with the same Python.

The text is Python's own reference (`pydoc_data.topics`, part of every Python), cut into
passages. Everything else comes from a seeded generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pydoc_data.topics import topics

INSTRUCTION = """You help readers of a programming language's reference manual. First comes one \
passage of the manual, then something that a reader wrote after reading it, which may quote \
another place. Say in one or two plain sentences whether the passage answers the reader, and \
if it does, what it says. Do not repeat the passage, do not write code, and do not guess: when \
the passage has no answer, say that it has none and which word the reader should look up.

"""


_DOCUMENT_CHARACTERS = 2150  # about 500 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Raw prompts in a shuffled order; each answer has exactly ``new_tokens`` tokens at most."""

    name: str
    prompts: tuple[str, ...]
    new_tokens: int

    @property
    def digest(self) -> str:
        """Hex SHA-256 (first 16 digits) over all prompts: equal digests are equal jobs."""
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()[:16]

    def subset(self, num_rows: int) -> Workload:
        """Rows spread evenly over the job (which is shuffled already)."""
        step = max(1, len(self.prompts) // max(1, num_rows))
        chosen = self.prompts[::step][:num_rows]
        return Workload(name=self.name, prompts=chosen, new_tokens=self.new_tokens)


def passages(num_passages: int, num_characters: int) -> list[str]:
    """Passages of the Python reference of about ``num_characters``, whole lines, no two equal.

    Taken in turns from all topics that are long enough, so that they differ in kind.
    """
    cut = {name: _cut(text, num_characters) for name, text in sorted(topics.items())}
    found: list[str] = []
    for turn in range(max(map(len, cut.values()))):
        found += [pieces[turn] for pieces in cut.values() if turn < len(pieces)]
    found = list(dict.fromkeys(found))
    if len(found) < num_passages:
        raise SystemExit(
            f"this Python's reference gives {len(found)} passages of {num_characters} characters, "
            f"not {num_passages}; ask for fewer documents"
        )
    return found[:num_passages]


def _cut(text: str, num_characters: int) -> list[str]:
    pieces, piece, length = [], [], 0
    for line in text.strip().splitlines():
        piece.append(line)
        length += len(line) + 1
        if length >= num_characters:
            pieces.append("\n".join(piece))
            piece, length = [], 0
    return pieces


def shared_documents(num_rows: int, *, num_documents: int = 64, new_tokens: int = 20) -> Workload:
    """Many questions on few documents: one instruction, ``num_documents`` passages of about 500
    tokens, and for each row a question of 50 to 100 tokens that no other row has."""
    rng = random.Random(20)
    documents = passages(num_documents, _DOCUMENT_CHARACTERS)
    words = " ".join(passages(2 * num_documents, _DOCUMENT_CHARACTERS)).split()
    prompts = []
    for row in range(num_rows):
        start = rng.randrange(len(words) - 50)
        quote = " ".join(words[start : start + rng.randint(22, 38)])
        prompts.append(
            f"{INSTRUCTION}Passage:\n{documents[row % num_documents]}\n\n"
            f'Reader {row + 1}: I have read elsewhere: "{quote}". Is that what this passage is '
            f"about?\n\nReply:"
        )
    rng.shuffle(prompts)
    return Workload(name="shared-documents", prompts=tuple(prompts), new_tokens=new_tokens)


WORKLOADS: Mapping[str, Callable[..., Workload]] = {"shared-documents": shared_documents}
