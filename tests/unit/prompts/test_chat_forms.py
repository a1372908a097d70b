"""A chat template runs once for all rows whose messages have the same roles, where it may."""

from __future__ import annotations

import pytest

from batchradix.prompts.chat import ChatTemplate
from batchradix.types import Row

LOOKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if 'shout' in m.content %}LOUD{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
)
TEXTS = ["Hi.", "  It's  12 o'clock\n\n", "shout", "x" * 700 + " y" * 200, "Grüße, 東京 ", "", "<|"]


def rows_of(*kinds):
    rows = []
    for i in range(30):
        roles = kinds[i % len(kinds)]
        chat = [
            {"role": role, "content": TEXTS[(i + k) % len(TEXTS)]} for k, role in enumerate(roles)
        ]
        rows.append(Row(index=i, values={"messages": chat}))
    return rows


@pytest.fixture
def runs(monkeypatch):
    """Counts how often a chat template runs."""
    counted = []
    run = ChatTemplate._run
    monkeypatch.setattr(
        ChatTemplate, "_run", lambda *args, **kw: counted.append(1) or run(*args, **kw)
    )
    return counted


def assert_alike(builder, rows):
    tokens = builder.encode(rows).tokens
    for position, row in enumerate(rows):
        assert tokens[position].tolist() == list(builder.explain(row).ids), row.values


KINDS = [("user",), ("system", "user"), ("system", "user", "assistant", "user"), ("user",) * 8]


def test_messages_of_the_same_roles_have_the_ids_of_each_row_alone(kind, build):
    assert_alike(build(kind), rows_of(*KINDS))


def test_a_template_that_looks_into_texts_runs_for_each_row(byte_bpe, build, runs):
    builder = build(byte_bpe, chat_template=LOOKS)
    assert_alike(builder, rows_of(("user",)))
    runs.clear()
    builder.encode(rows_of(("user",)))
    assert len(runs) >= 30


def test_a_template_that_places_texts_runs_once_for_a_sequence_of_roles(byte_bpe, build, runs):
    builder = build(byte_bpe)
    rows = [row for row in rows_of(("system", "user")) if "<|" not in str(row.values)]
    builder.encode(rows)
    first = len(runs)
    builder.encode(rows)
    assert first < len(rows)
    assert len(runs) == first


def test_what_is_no_plain_chat_is_rendered_by_itself(byte_bpe, build):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    chats = [
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        [{"role": "user", "content": "go"}, {"role": "assistant", "content": "I "}],
        [{"role": "user", "content": "Hi", "name": "Ada"}],
        [{"role": "user", "content": "\ufdd0 <|im_end|>"}],
    ]
    builder = build(byte_bpe)
    assert_alike(builder, [Row(index=i, values={"messages": c}) for i, c in enumerate(chats)])
    bad = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert list(builder.encode([Row(index=0, values={"messages": bad})]).errors) == [0]
