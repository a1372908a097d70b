"""Measures how long prompts take to become token ids, beside encoding each prompt whole.

The plain way gives batches of prompts to the `tokenizers` library, each whole but for special
tokens, and puts the ids into one array. Rendering prompts is left out of its time and is in ours.
Both have the same threads and are run in turns.
"""

from __future__ import annotations

import random
import re
import resource
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import PromptOptions
from batchradix.prompts.build import PromptBuilder
from batchradix.types import Row

DOCS = Path(__file__).parents[1] / "docs"
BATCH_ROWS = 512
ROUNDS = 3


def sentences() -> list[str]:
    """Prose: the paragraphs of this project's own pages, without tables and code."""
    pages = sorted(DOCS.glob("*.md"))
    text = "\n\n".join(re.sub(r"```.*?```", "", page.read_text(), flags=re.S) for page in pages)
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n") if p[:1].isalpha()]
    return [s for p in paragraphs for s in re.split(r"(?<=[.!?]) ", p) if len(s) > 20]


class Texts:
    """Made-up texts of real sentences."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._sentences = sentences()

    def some(self, num_chars: int) -> str:
        """``num_chars`` of sentences, the first words of each text its own."""
        parts = [f"No. {self._random.randrange(10**9)}."]
        while sum(map(len, parts)) < num_chars:
            parts.append(self._random.choice(self._sentences))
        return " ".join(parts)[:num_chars]

    def shuffled(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._random.sample(rows, len(rows))

    def one_of(self, texts: list[str]) -> str:
        return self._random.choice(texts)


QUESTION = (
    "Answer from the document alone.\n\nDocument: {{ doc }}\n\nQuestion: {{ question }}\nAnswer:"
)
SHOTS = (
    "Label the message.\n\nProduct: {{ product }}\nRules: {{ rules }}\nExample: {{ example }}\n"
    "Message: {{ message }}\nLabel:"
)


def jobs(num_rows: int) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Options of prompts and rows, by name. Rows are in no order."""
    texts = Texts()
    docs = [texts.some(2_000) for _ in range(max(1, num_rows // 20))]
    asked = [{"doc": docs[i % len(docs)], "question": texts.some(60)} for i in range(num_rows)]
    asked = texts.shuffled(asked)
    products, rules = ([texts.some(n) for _ in range(20)] for n in (60, 400))
    examples = [texts.some(300) for _ in range(20)]
    shots = [
        {
            "product": texts.one_of(products),
            "rules": texts.one_of(rules),
            "example": texts.one_of(examples),
            "message": texts.some(80),
        }
        for _ in range(num_rows)
    ]
    systems = [texts.some(1_500) for _ in range(4)]
    chats = [
        {
            "messages": [
                {"role": "system", "content": texts.one_of(systems)},
                {"role": "user", "content": texts.some(120)},
            ]
        }
        for _ in range(num_rows)
    ]
    whole = [{"prompt": f"{row['doc']}\n\nQuestion: {row['question']}"} for row in asked]
    alone = [{"doc": texts.some(2_000), "question": texts.some(60)} for _ in range(num_rows)]
    short = [{name: texts.some(40) for name in "abcdefgh"} for _ in range(num_rows)]
    fields = "\n".join(f"{name}: {{{{ {name} }}}}" for name in "abcdefgh")
    return {
        "20 questions to a document": ({"template": QUESTION}, asked),
        "the same as chats": ({"template": QUESTION, "chat": True}, asked),
        "the same in a prompt column": ({}, whole),
        "three repeated columns": ({"template": SHOTS}, shots),
        "four system messages": ({}, chats),
        "documents that do not repeat": ({"template": QUESTION}, alone),
        "short fields that do not repeat": ({"template": fields}, short),
    }


def cpu_s() -> float:
    """Seconds of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock and of the processors."""
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    work()
    return time.perf_counter() - began_s, cpu_s() - began_cpu_s


def measure_tokenising(model: str, num_rows: int) -> list[dict[str, Any]]:
    """Seconds for each of `jobs`, the median of some rounds; both must give the same ids."""
    checkpoint = open_checkpoint(model)
    return [
        {"job": name, **measure_job(checkpoint, options, values)}
        for name, (options, values) in jobs(num_rows).items()
    ]


def measure_job(
    checkpoint: Checkpoint, options: dict[str, Any], values: list[dict[str, Any]]
) -> dict[str, Any]:
    rows = [Row(index=i, values=v) for i, v in enumerate(values)]
    batches = [rows[i : i + BATCH_ROWS] for i in range(0, len(rows), BATCH_ROWS)]

    def builder() -> PromptBuilder:
        return PromptBuilder(checkpoint, PromptOptions(**options), columns=list(values[0]))

    slow = builder()
    views = [[slow.explain(row).spans for row in batch] for batch in batches]

    def whole(views: list[Any]) -> np.ndarray[Any, Any]:
        texts = [span.text for spans in views for span in spans if not span.is_token]
        found = iter(checkpoint.tokenizer.encode_plain(texts, [False] * len(texts)))
        ids = (span.ids if span.is_token else next(found) for spans in views for span in spans)
        return np.fromiter(chain.from_iterable(ids), np.uint32)

    def once() -> list[Any]:
        ours = builder()
        return [ours.encode(batch).tokens.values for batch in batches]

    for mine, plain in zip(once(), map(whole, views), strict=True):
        assert np.array_equal(mine, plain)
    rounds = [(timed(lambda: list(map(whole, views))), timed(once)) for _ in range(ROUNDS)]
    (whole_s, whole_cpu_s), (once_s, once_cpu_s) = (
        np.median(np.array(part), axis=0).tolist() for part in zip(*rounds, strict=True)
    )
    num_tokens = sum(len(span.ids) for batch in views for spans in batch for span in spans)
    return {
        "rows": len(rows),
        "tokens": num_tokens,
        "whole_s": whole_s,
        "whole_cpu_s": whole_cpu_s,
        "seconds": once_s,
        "cpu_s": once_cpu_s,
        "times_as_fast": whole_s / once_s,
        "times_less_cpu": whole_cpu_s / once_cpu_s,
    }
