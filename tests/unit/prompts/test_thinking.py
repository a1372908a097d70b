"""What a chat template says of thinking, and where prompts then end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from batchradix.chat_options import ChatOptions
from batchradix.config import PromptOptions
from batchradix.prompts.build import PromptBuilder
from batchradix.prompts.thinking import find_style
from batchradix.types import Row, Thinking

TURNS = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
ASK = "{% if add_generation_prompt %}<|assistant|>"
TEMPLATES = {
    "switch": TURNS + ASK + "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    "opens": TURNS + ASK + "{{ '<think>\\n' }}{% endif %}",
    "opens bare": TURNS + ASK + "<think>{% endif %}",
    "toggle": TURNS + ASK + "{{ '<think>' if thinking else '</think>' }}{% endif %}",
    "mentions": TURNS + ASK + "{% if '</think>' in 'x' %}{% endif %}{% endif %}",
    "other words": TURNS + ASK + "{{ '[THINK]' }}{% endif %}{% if x %}[/THINK]{% endif %}",
    "closes": TURNS + ASK + "{{ '<think>\\n</think>' }}{% endif %}",
    "none": TURNS + ASK + "{% endif %}",
}  # fmt: skip
OPEN = {
    "switch": "<think>\n", "opens": "<think>\n", "opens bare": "<think>", "toggle": "<think>",
    "mentions": "<think>\n", "other words": "[THINK]",
}  # fmt: skip
SHUT = {
    "switch": "<think>\n\n</think>\n\n", "opens": "<think>\n\n</think>\n\n",
    "opens bare": "<think>\n\n</think>\n\n", "toggle": "</think>",
    "mentions": "<think>\n\n</think>\n\n", "other words": "[THINK]\n\n[/THINK]\n\n",
}  # fmt: skip


@pytest.fixture
def thinker(tiny):
    """``thinker(kind, thinking, **options)``: a builder."""

    def make(kind, thinking="auto", chats=None, **options):
        checkpoint = dataclasses.replace(tiny.checkpoint, chat_template=TEMPLATES[kind])
        return PromptBuilder(
            checkpoint,
            PromptOptions(**options),
            columns=["messages", "q"],
            chats=chats or ChatOptions(thinking=thinking),
        )

    return make


def row(text="hi", **values):
    return Row(index=0, values={"messages": [{"role": "user", "content": text}], **values})


def tail(builder, one=None):
    text = "".join(span.text for span in builder.explain(one or row()).spans)
    return text.split("<|assistant|>")[-1]


@pytest.mark.parametrize("template", list(OPEN))
def test_on_ends_in_an_open_block_and_off_in_none(thinker, template):
    assert tail(thinker(template, "on")) == OPEN[template]
    assert tail(thinker(template, "off")) == SHUT[template]
    offered = template != "mentions"
    assert tail(thinker(template)) == (OPEN[template] if offered else "")
    for thinking in ("on", "off", "auto"):
        builder = thinker(template, thinking)
        thinks = builder.encode([row()]).thinks.tolist()
        assert thinks == [thinking == "on" or (thinking == "auto" and offered)]
        assert builder.may_think == thinks[0]


def test_a_model_without_markers_neither_thinks_nor_minds_off(thinker):
    for thinking in ("auto", "off"):
        builder = thinker("none", thinking)
        assert tail(builder) == ""
        assert builder.thinking is None
        assert not builder.may_think


def test_a_template_that_ends_every_block_cannot_think(thinker):
    builder = thinker("closes", "on")
    batch = builder.encode([row()])
    assert "ends its thinking in the prompt" in batch.errors[0].message
    assert tail(thinker("closes", "off")) == "<think>\n</think>"


@pytest.mark.parametrize("template", list(OPEN))
@pytest.mark.parametrize("thinking", ["on", "off"])
def test_prompts_made_by_a_form_end_like_those_made_one_by_one(thinker, template, thinking):
    builder = thinker(template, thinking, template="Q: {{ q }}!", chat=True)
    texts = ["x", " y ", "<think>", "</think>", "<|end|>", ""]
    rows = [Row(index=i, values={"q": text}) for i, text in enumerate(texts)]
    batch = builder.encode(rows)
    for i, one in enumerate(rows):
        assert batch.tokens[i].tolist() == list(builder.explain(one).ids)
    assert batch.thinks.tolist() == [thinking == "on"] * len(rows)


@pytest.mark.parametrize("text", ["<think>", "a </think>", "<think>\n\n</think>\n\n"])
def test_a_row_s_own_text_is_no_marker(thinker, text):
    for thinking in ("on", "off"):
        builder = thinker("switch", thinking)
        plain, forged = tail(builder), tail(builder, row(text))
        assert plain == forged


def test_the_closing_is_spelt_by_the_tokenizer(thinker):
    thinking = thinker("opens", "on", chats=ChatOptions(thinking="on", thinking_tokens=7)).thinking
    assert thinking.closing_ids == tuple(b"\n</think>\n\n")
    assert (thinking.end_id, thinking.gap_ids, thinking.max_tokens) == (None, tuple(b"\n\n"), 7)
    assert thinker("toggle", "on").thinking.gap_ids == ()


def test_markers_may_be_the_tokenizer_s_alone():
    style = find_style("{{ messages }}", ("<|end|>", "<think>", "</think>"), lambda given: "x")
    assert (style.start, style.in_template, style.is_offered) == ("<think>", False, False)
    assert style.tail("x", False) == ""
    assert style.tail("x", True) == "<think>\n"
    assert find_style("{{ messages }}", ("<|end|>",), lambda given: "x") is None


def test_a_template_that_needs_a_variable_of_the_run_is_looked_at_with_it(tiny):
    source = "{% if mode is not defined %}{{ raise_exception('mode?') }}{% endif %}"
    checkpoint = dataclasses.replace(tiny.checkpoint, chat_template=source + TEMPLATES["opens"])
    chats = ChatOptions(chat_template_kwargs={"mode": "x"})
    builder = PromptBuilder(checkpoint, PromptOptions(), columns=["messages"], chats=chats)
    assert tail(builder) == "<think>\n"


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (1000, 100),  # all fits
        (159, 100),
        (139, 80),  # the answer may have its own
        (105, 50),  # half each
        (35, 15),
        (25, 9),  # the answer needs at least 11
        (17, 1),
    ],
)
def test_a_short_room_is_shared_between_thinking_and_answer(room, expected):
    thinking = Thinking(
        start="a", end="b", end_id=None, closing_ids=(1, 2, 3, 4, 5), gap_ids=(), max_tokens=100,
        answer_tokens=54, least_tokens=11,
    )  # fmt: skip
    assert thinking.budget(min(room, thinking.total_tokens)) == expected
    assert np.all([thinking.budget(n) + 5 + 11 <= n for n in range(17, 300)])
