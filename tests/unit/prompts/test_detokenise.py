"""Ids of an answer to text, token by token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.prompts.detokenise import IncrementalDetokenizer

BYTES = IncrementalDetokenizer([bytes([b]) for b in range(256)] + [b"", b"<think>"])


def run(ids):
    state = BYTES.start()
    pushed = [state.push(i) for i in ids]
    return pushed, state.finish()


@settings(deadline=None)
@given(st.text())
def test_text_comes_back_whole_and_in_whole_characters(text):
    pushed, rest = run(text.encode())
    assert "".join(pushed) == text
    assert rest == ""
    assert "\ufffd" not in "".join(pushed).replace("\ufffd", "", text.count("\ufffd"))


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_give_what_decoding_them_at_once_gives(data):
    pushed, rest = run(data)
    assert "".join(pushed) + rest == data.decode(errors="replace")


def test_half_a_character_waits_and_is_replaced_only_when_it_is_certain():
    euro = "€".encode()
    assert run(euro) == (["", "", "€"], "")
    assert run(euro[:2]) == (["", ""], "\ufffd")
    assert run([*euro[:2], 97]) == (["", "", "\ufffda"], "")
    assert run([0xFF]) == (["\ufffd"], "")


def test_special_tokens_and_unknown_ids_yield_nothing_and_others_their_text():
    euro = "€".encode()
    assert run([97, 256, 98, 999, -1]) == (["a", "", "b", "", ""], "")
    assert run([euro[0], 256, *euro[1:]]) == (["", "", "", "€"], "")
    assert run([257]) == (["<think>"], "")


def test_answers_are_decoded_apart():
    first, second = BYTES.start(), BYTES.start()
    assert first.push(0xE2) == ""
    assert second.push(97) == "a"
    assert first.finish() == "\ufffd"


def test_a_tokenizer_s_own_ids_decode_to_the_text(kind):
    text = "Grüße 東京 👩‍👩‍👧 12 \n x"
    tokenizer = kind.checkpoint.tokenizer
    state = IncrementalDetokenizer(tokenizer.token_bytes).start()
    ids = tokenizer.encode_plain([text], [False])[0]
    assert "".join(map(state.push, ids)) + state.finish() in (text, f" {text}")
