"""Rows for the engine: prompts as token ids that share beginnings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.plan.order import common_prefixes
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.types import EngineJob, Plan, RequestTable, RowSettings, TokenTable


@dataclass(frozen=True, slots=True)
class Rows:
    """Prompts as token ids, and the most tokens that each answer may have."""

    prompts: Sequence[Sequence[int]]
    max_tokens: Sequence[int]

    @property
    def most_slots(self) -> int:
        """KV slots of the row that needs most: its prompt and its answer but for the last."""
        pairs = zip(self.prompts, self.max_tokens, strict=True)
        return max(len(prompt) + most - 1 for prompt, most in pairs)

    def job(self, *, tree: bool = True) -> EngineJob:
        """Planned; without Polars, which is seldom on a machine with a GPU that is lent."""
        tokens = TokenTable.from_rows(self.prompts)
        order = sorted(range(len(self.prompts)), key=lambda row: tuple(self.prompts[row]))
        rows = np.array(order, dtype=np.int64)
        plan = Plan(order=rows, lcp=common_prefixes(tokens, rows))
        return EngineJob(
            tokens=tokens,
            plan=plan,
            tree=(build_tree if tree else flat_tree)(plan, tokens.lengths),
            requests=RequestTable(
                settings=(RowSettings(),),
                settings_id=np.zeros(len(order), dtype=np.int32),
                max_tokens=np.array(self.max_tokens, dtype=np.int32),
                rng_key=np.zeros(len(order), dtype=np.uint64),
            ),
        )


def odd_rows(num_rows: int, vocab_size: int) -> Rows:
    """Questions about documents below one root, prompts that begin others, duplicates, and some
    that share nothing."""
    draw = random.Random(11)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, vocab_size) for _ in range(count)]

    root = tokens(23)
    documents = [root + tokens(draw.randrange(5, 60)) for _ in range(max(2, num_rows // 8))]
    prompts = []
    for number in range(num_rows):
        asked = documents[number % len(documents)] + tokens(draw.randrange(1, 9))
        kind = number % 8
        if kind == 5 and prompts:
            asked = draw.choice(prompts)
        elif kind == 6:
            asked = asked[: draw.randrange(1, len(asked))]
        elif kind == 7:
            asked = tokens(draw.randrange(1, 30))
        prompts.append(asked)
    return Rows(prompts, [(1, 5, 16)[number % 3] for number in range(num_rows)])


def documentation_rows(
    tokenizer: Tokenizer, num_rows: int, max_tokens: int, num_characters: int
) -> Rows:
    """Questions about passages, so long, of this project's own documentation."""
    folder = Path(__file__).parents[1] / "docs"
    text = (folder / "architecture.md").read_text("utf-8") + (folder / "runs.md").read_text("utf-8")
    questions = ["What is this about?", "Which file is named?", "In one word:", "Say it shorter.\n"]
    texts = []
    for number in range(num_rows):
        start = num_characters * (number // len(questions))
        asked = questions[number % len(questions)]
        texts.append(f"Read this:\n\n{text[start : start + num_characters]}\n\n{asked}")
    prompts = tokenizer.encode_plain(texts, [True] * num_rows)
    return Rows(prompts, [max_tokens] * num_rows)
