"""The jobs that are measured: real text, the same on every machine with the same Python.

The text is Python's own reference (`pydoc_data.topics`, part of every Python), cut into
passages, and the copyright notices of Debian packages that the recipe holds, for the larger job
with 68 more of the same kind (`notices.json`). Everything else comes from a seeded generator.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

INSTRUCTION = """You help readers of a programming language's reference manual. First comes one \
passage of the manual, then something that a reader wrote after reading it, which may quote \
another place. Say in one or two plain sentences whether the passage answers the reader, and \
if it does, what it says. Do not repeat the passage, do not write code, and do not guess: when \
the passage has no answer, say that it has none and which word the reader should look up. A \
quotation counts as answered only where the passage treats the same thing, not where it merely \
uses the same words; where two readings are possible, take the one that the passage itself uses \
first, and name it. Write for somebody who knows the language but not this part of it, keep the \
manual's own terms, and leave out version numbers unless the reader asks for them.

"""

CHAT = """A reader asks a programming language's reference manual, which answers in its own words.

"""

EXTRACTION = """Copyright notices of Debian packages as JSON: the first holder and what it is, the \
first and the last year, the licence, and whether later versions of it may be chosen.

Notice:
Copyright: 1999-2010 Robert Millan
2003 Jeroen Dekkers
License: GPL-3+
Answer: {"holder":"Robert Millan","holder_kind":"person","first_year":1999,"last_year":2010,\
"licence":"GPL","or_later":true}

Notice:
Copyright (c) 2014 Ada Miller
Permission is hereby granted, free of charge, to any person obtaining a copy
Answer: {"holder":"Ada Miller","holder_kind":"person","first_year":2014,"last_year":null,\
"licence":"MIT","or_later":false}

Notice:
Copyright:
© 1987, 1991 University of Utah. All rights reserved.
License: BSD-3-clause
Answer: {"holder":"University of Utah","holder_kind":"organisation","first_year":1987,\
"last_year":1991,"licence":"BSD","or_later":false}

Notice:
Copyright: The Foo developers and others
License: LGPL-2.1+
Answer: {"holder":"The Foo developers","holder_kind":"project","first_year":null,\
"last_year":null,"licence":"LGPL","or_later":true}

Notice:
"""

_YEAR = {"anyOf": [{"type": "integer", "minimum": 1950, "maximum": 2030}, {"type": "null"}]}
_NOTICE = {
    "holder": {"type": "string", "minLength": 2, "maxLength": 40},
    "holder_kind": {"enum": ["person", "organisation", "project"]},
    "first_year": _YEAR,
    "last_year": _YEAR,
    "licence": {"enum": ["GPL", "LGPL", "MIT", "BSD", "Apache", "public-domain", "other"]},
    "or_later": {"type": "boolean"},
}
_TOPIC = {
    "enum": [
        "statement",
        "expression",
        "number",
        "text",
        "container",
        "function",
        "class",
        "module",
    ]
}
_DOCUMENT_CHARACTERS = 2150  # about 500 tokens
_SHOT_CHARACTERS = 300  # about 70 tokens
_REPLY_CHARACTERS = 500  # about 120 tokens
_LONG_DOCUMENT_CHARACTERS = 29_000  # about 7,000 tokens
_NOTICES = Path(__file__).with_name("notices.json")
_RECIPE = Path(__file__).parents[1] / "recipes" / "debian_copyrights" / "jobs.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Raw prompts in a shuffled order. Each answer has ``new_tokens`` tokens, or, where it keeps
    to the JSON Schema ``schema``, at most that many.

    ``kv_share``: the KV pool as a share of the job's distinct prompt tokens, None for no limit.
    ``peer_orders``: the orders in which peers get the prompts, ``sorted`` (the best for a prefix
    cache, by token ids) or ``shuffled``.
    """

    name: str
    prompts: tuple[str, ...]
    new_tokens: int
    schema: Mapping[str, Any] | None = None
    kv_share: float | None = None
    peer_orders: tuple[str, ...] = ("sorted",)

    @property
    def num_rows(self) -> int:
        return len(self.prompts)

    @property
    def digest(self) -> str:
        """Hex SHA-256 (first 16 digits) over all prompts: equal digests are equal jobs."""
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()[:16]

    def subset(self, num_rows: int) -> Workload:
        """Rows spread evenly over the job (which is shuffled already)."""
        step = max(1, len(self.prompts) // max(1, num_rows))
        chosen = self.prompts[::step][:num_rows]
        return replace(self, prompts=chosen)


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


def shared_documents(
    num_rows: int = 512, *, num_documents: int = 64, new_tokens: int = 21
) -> Workload:
    """Many questions on few documents: one instruction, ``num_documents`` passages of about 500
    tokens, and for each row a question of about 25 tokens that no other row has."""
    rng = random.Random(20)
    documents = passages(num_documents, _DOCUMENT_CHARACTERS)
    words = " ".join(passages(2 * num_documents, _DOCUMENT_CHARACTERS)).split()
    prompts = []
    for row in range(num_rows):
        document = documents[row % num_documents]
        prompts.append(f"{INSTRUCTION}Passage:\n{document}\n\n{_question(rng, words, row)}")
    rng.shuffle(prompts)
    return Workload(name="shared-documents", prompts=tuple(prompts), new_tokens=new_tokens)


def small_pool(num_rows: int = 512, *, num_documents: int = 64) -> Workload:
    """Shared documents again, with a KV pool of an eighth of the distinct prompt tokens."""
    return replace(
        shared_documents(num_rows, num_documents=num_documents),
        name="small-pool",
        kv_share=1 / 8,
        peer_orders=("sorted", "shuffled"),
    )


def no_sharing(num_rows: int = 128) -> Workload:
    """Passages of about 500 tokens that begin differently, and a few tokens of answer each."""
    prompts = [
        f"{text}\n\nThe passage above, in a few words:"
        for text in passages(num_rows, _DOCUMENT_CHARACTERS)
    ]
    random.Random(10).shuffle(prompts)
    return Workload(name="no-sharing", prompts=tuple(prompts), new_tokens=4)


def long_document(num_rows: int = 100) -> Workload:
    """One document of about 7,000 tokens under many questions of about 25."""
    rng = random.Random(7)
    words = " ".join(passages(128, _DOCUMENT_CHARACTERS)).split()
    document = _cut(topics["compound"], _LONG_DOCUMENT_CHARACTERS)[0]
    prompts = tuple(
        f"{INSTRUCTION}Passage:\n{document}\n\n{_question(rng, words, row)}"
        for row in range(num_rows)
    )
    return Workload(name="long-document", prompts=prompts, new_tokens=21)


def many_shot(num_rows: int = 200, *, num_shots: int = 60) -> Workload:
    """Passages of about 70 tokens to be put under the section they are from, after
    ``num_shots`` worked examples that all rows share."""
    sections = {
        piece: name
        for name, text in sorted(topics.items())
        for piece in _cut(text, _SHOT_CHARACTERS)
    }
    pairs = list(sections.items())
    random.Random(60).shuffle(pairs)
    if len(pairs) < num_shots + num_rows:
        raise SystemExit(
            f"this Python's reference gives {len(pairs) - num_shots} rows; ask for fewer"
        )
    shots = "".join(f"Text: {piece}\nSection: {name}\n\n" for piece, name in pairs[:num_shots])
    prompts = tuple(
        f"{shots}Text: {piece}\nSection:" for piece, _ in pairs[num_shots : num_shots + num_rows]
    )
    return Workload(name="many-shot", prompts=prompts, new_tokens=6)


def chats(num_rows: int = 240, *, num_turns: int = 6) -> Workload:
    """Chats of ``num_turns`` turns, each turn a row that holds all turns before it: questions
    of a reader, answered by passages of about 120 tokens."""
    rng = random.Random(12)
    num_chats = -(-num_rows // num_turns)
    words = " ".join(passages(128, _DOCUMENT_CHARACTERS)).split()
    replies = iter(passages(num_chats * num_turns, _REPLY_CHARACTERS))
    prompts = []
    for chat in range(num_chats):
        text = f"{CHAT}This is chat {chat + 1}.\n\n"
        for _ in range(num_turns):
            text += (
                f"User: What does the manual say of this: {_quote(rng, words, 12, 24)}?\nManual:"
            )
            prompts.append(text)
            text += f" {next(replies)}\n\n"
    rng.shuffle(prompts)
    return Workload(name="chats", prompts=tuple(prompts[:num_rows]), new_tokens=21)


def _question(rng: random.Random, words: Sequence[str], row: int) -> str:
    return f'Reader {row + 1}: What of "{_quote(rng, words, 3, 8)}"?\n\nReply:'


def _quote(rng: random.Random, words: Sequence[str], fewest: int, most: int) -> str:
    start = rng.randrange(len(words) - 50)
    return " ".join(words[start : start + rng.randint(fewest, most)])


def extraction(num_rows: int) -> Workload:
    """Six fields of each of the recipe's copyright notices (60 of them)."""
    import pyarrow.parquet as pq

    texts = pq.read_table(_RECIPE, columns=["text"])["text"].to_pylist()
    prompts = [f"{EXTRACTION}{text}\nAnswer:" for text in texts]
    random.Random(6).shuffle(prompts)
    return Workload(
        name="structured-6-fields",
        prompts=tuple(prompts[:num_rows]),
        new_tokens=160,
        schema=_object(_NOTICE),
    )


def json_6_fields(num_rows: int = 128) -> Workload:
    """As `extraction`, over up to 128 notices."""
    import pyarrow.parquet as pq

    texts = pq.read_table(_RECIPE, columns=["text"])["text"].to_pylist()
    texts += json.loads(_NOTICES.read_text(encoding="utf-8"))
    if num_rows > len(texts):
        raise SystemExit(f"there are {len(texts)} notices, not {num_rows}; ask for fewer rows")
    prompts = [f"{EXTRACTION}{text}\nAnswer:" for text in texts]
    random.Random(6).shuffle(prompts)
    return replace(extraction(1), name="json-6-fields", prompts=tuple(prompts[:num_rows]))


def json_one_of_8(num_rows: int = 256) -> Workload:
    """As `classification`, with tokens for little more than the answer."""
    return replace(classification(num_rows), name="json-one-of-8", new_tokens=16)


def classification(num_rows: int) -> Workload:
    """Passages of about 100 tokens, each to be put under one of eight topics."""
    question = "A passage of a programming language's reference manual, and its topic."
    prompts = [f"{question}\n\n{text}\n\nTopic:" for text in passages(num_rows, 400)]
    random.Random(8).shuffle(prompts)
    return Workload(
        name="enum-of-8",
        prompts=tuple(prompts),
        new_tokens=24,
        schema=_object({"topic": _TOPIC}),
    )


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


WORKLOADS: Mapping[str, Callable[..., Workload]] = {
    "shared-documents": shared_documents,
    "small-pool": small_pool,
    "no-sharing": no_sharing,
    "json-6-fields": json_6_fields,
    "json-one-of-8": json_one_of_8,
    "long-document": long_document,
    "many-shot": many_shot,
    "chats": chats,
}
OVER_DOCUMENTS = ("shared-documents", "small-pool")  # take ``num_documents``
