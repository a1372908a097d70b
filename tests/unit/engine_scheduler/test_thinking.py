"""Where a row's thinking ends, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from batchradix.engine.answer import Answer
from batchradix.engine.output import RowOutput
from batchradix.engine.thinking import ThinkingAnswer, Thoughts
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.types import FinishReason, RowSettings, Thinking, Usage

WORDS = (b"a", b"b", b"</th", b"ink>", b"ink>\n\nc", b"<think>", b"\xc3", b" \n", b"", b"")
END, EOS = 8, 9
CLOSING = (7, END, 7)


def thinking(**changes: Any) -> Thinking:
    values: dict[str, Any] = {
        "start": "<think>", "end": "</think>", "end_id": END, "closing_ids": CLOSING,
        "gap_ids": (7,), "max_tokens": 5, "answer_tokens": 3,
    }  # fmt: skip
    return Thinking(**(values | changes))


def answer(usage: Usage | None = None, *, total: int = 11, stop: tuple[str, ...] = ()) -> Answer:
    settings = RowSettings(thinking=thinking(), stop=stop)
    detokenizer = IncrementalDetokenizer(WORDS)
    output = RowOutput(
        settings=settings,
        max_tokens=total,
        eos_ids=frozenset({EOS}),
        detokenizer=detokenizer.start(),
        grammar=None,
    )
    return ThinkingAnswer(
        settings=settings,
        rng_key=np.uint64(0),
        output=output,
        forced=None,
        usage=usage or Usage(),
        detokenizer=detokenizer.start(),
        eos_ids=frozenset({EOS}),
        total_tokens=total,
        has_guard=True,
    )


def taken(row: Answer, *token_ids: int) -> list[int]:
    return [one for token_id in token_ids for one in row.take(token_id)]


@pytest.mark.parametrize(
    ("ids", "text", "rest"),
    [
        ([0, 1, END], "ab", ""),
        ([0, 2, 3], "a", ""),
        ([0, 2, 4], "a", "\n\nc"),
        ([2, 2, 3], "</th", ""),
        ([7, 5, 7, 0, END], "a", ""),
        ([0, 6, END], "a\ufffd", ""),
    ],
)
def test_the_end_marker_is_a_token_or_text(ids: list[int], text: str, rest: str) -> None:
    thoughts = Thoughts(thinking(), IncrementalDetokenizer(WORDS).start())
    *before, last = [thoughts.push(token_id) for token_id in ids]
    assert before == [None] * (len(ids) - 1)
    assert last == rest
    thoughts.close()
    assert thoughts.text == text


def test_an_answer_begins_behind_its_white_space() -> None:
    row = answer()
    assert taken(row, 0, END, 7, 7, 1) == [0, END, 7, 7, 1]
    assert row.output.finish_reason is FinishReason.LENGTH  # white space counts
    assert (row.reasoning, row.output.text, row.num_thought) == ("a", "b", 2)


def test_text_behind_a_marker_in_the_same_token_begins_the_answer() -> None:
    row = answer()
    assert taken(row, 0, 2, 4, 1, EOS) == [0, 2, 4, 1, EOS]
    assert (row.reasoning, row.output.text) == ("a", "cb")
    row = answer(stop=("c",))
    taken(row, 2, 4)
    assert (row.output.finish_reason, row.output.text) == (FinishReason.STOP, "")


def test_a_budget_that_is_used_up_closes_it_and_leaves_the_answer_its_own() -> None:
    usage = Usage()
    row = answer(usage)
    assert taken(row, *[0] * 5) == [*[0] * 5, *CLOSING]
    assert row.num_kept is None
    assert (row.grammar, row.num_generated, row.num_thought) == (None, 8, 8)
    assert taken(row, 1, 1, 1) == [1, 1, 1]
    assert (row.output.finish_reason, row.output.text) == (FinishReason.LENGTH, "bbb")
    assert (usage.completion_tokens, usage.forced_tokens) == (11, 3)


def test_an_end_of_the_sequence_is_replaced_by_the_closing() -> None:
    usage = Usage()
    row = answer(usage)
    taken(row, 0)
    assert row.take(EOS) == list(CLOSING)
    assert row.num_kept == 1
    assert row.take(1) == [1]
    assert row.num_kept is None
    assert list(row.generated_ids) == [0, *CLOSING, 1]
    assert (usage.completion_tokens, usage.forced_tokens) == (5, 3)


def test_a_short_context_leaves_the_answer_what_is_left() -> None:
    row = answer(total=8)  # 5 beside the closing: 2 to think, 3 to answer
    assert taken(row, 0, 0) == [0, 0, *CLOSING]
    row = answer(total=5)
    assert taken(row, 0) == [0, *CLOSING]
    taken(row, 1)
    assert row.output.finish_reason is FinishReason.LENGTH
