"""The jobs that are measured: real text, the same on every machine with the same Python.

The text is Python's own reference (`pydoc_data.topics`, part of every Python), cut into
passages, and the copyright notices of Debian packages that the recipe holds. Everything else
comes from a seeded generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

INSTRUCTION = """You help readers of a programming language's reference manual. First comes one \
passage of the manual, then something that a reader wrote after reading it, which may quote \
another place. Say in one or two plain sentences whether the passage answers the reader, and \
if it does, what it says. Do not repeat the passage, do not write code, and do not guess: when \
the passage has no answer, say that it has none and which word the reader should look up.

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
_RECIPE = Path(__file__).parents[1] / "recipes" / "debian_copyrights" / "jobs.parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Raw prompts in a shuffled order; each answer has exactly ``new_tokens`` tokens at most,
    and keeps to the JSON Schema ``schema`` where there is one."""

    name: str
    prompts: tuple[str, ...]
    new_tokens: int
    schema: Mapping[str, Any] | None = None

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


WORKLOADS: Mapping[str, Callable[..., Workload]] = {"shared-documents": shared_documents}
