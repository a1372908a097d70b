"""Answers that their budget cuts are closed within it; answers in circles are cut."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from batchradix.engine.answer import Answer
from batchradix.engine.grammar.closing import minimal_answer
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.limits import AnswerLimits
from batchradix.engine.grammar.repetition import RepetitionGuard
from batchradix.engine.grammar.state import start
from batchradix.engine.output import RowOutput
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.schema.load import load_schema
from batchradix.types import FinishReason, GrammarSpec, RowSettings, Usage

# Bytes, some longer words that cross the seams of JSON, one half of a character, and the end.
WORDS = (*(bytes([i]) for i in range(256)), b'{"', b'":', b'","', b'"}', b'"]', b'},{"', b'":"')
WORDS += (b"ab", b"aa", b'a"', b"00", b"12", b'["', b'"yes', "é".encode(), b"\xc3\xa9\xc3", b"")
EOS = len(WORDS) - 1


@dataclass(frozen=True)
class Tokens:
    token_bytes: tuple[bytes, ...] = WORDS

    def encode_plain(self, texts, at_start):
        return [self._encode(text.encode()) for text in texts]

    def _encode(self, data):
        ids = []
        while data:
            fitting = [i for i, word in enumerate(WORDS) if word and data.startswith(word)]
            ids.append(max(fitting, key=lambda i: len(WORDS[i])))
            data = data[len(WORDS[ids[-1]]) :]
        return ids


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(Tokens(), len(WORDS), {EOS})


def spec_of(schema) -> GrammarSpec:
    return load_schema(schema).grammar


def object_of(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@dataclass(kw_only=True)
class Written:
    output: RowOutput
    usage: Usage
    raw: list[int]  # all that was taken, in order


def write(
    compiler,
    spec,
    max_tokens,
    choose,
    *,
    forced=True,
    closing=True,
    guard=True,
    stop=(),
) -> Written:
    """An answer whose tokens ``choose(place, allowed ids)`` samples."""
    compiled = compiler.compile(spec)
    limits = AnswerLimits(compiled, compiler.forced, repetition_guard=guard)
    output = RowOutput(
        settings=RowSettings(stop=stop),
        max_tokens=max_tokens,
        eos_ids=frozenset({EOS}),
        detokenizer=IncrementalDetokenizer(WORDS).start(),
        grammar=start(compiled),
        limits=limits if closing else None,
    )
    usage = Usage()
    answer = Answer(
        settings=RowSettings(),
        rng_key=np.uint64(0),
        output=output,
        forced=compiler.forced if forced else None,
        usage=usage,
    )
    opening = compiler.opening(spec)[:max_tokens] if forced else ()
    answer.open(opening)
    raw = list(opening)
    while output.finish_reason is None:
        bits = np.unpackbits(output.grammar.allowed().view(np.uint8), bitorder="little")
        raw += answer.take(choose(len(raw), np.flatnonzero(bits[: len(WORDS)])))
    return Written(output=output, usage=usage, raw=raw)


def preferring(*texts):
    """Samples the first of these tokens that is allowed, else the first token that is."""
    wanted = [WORDS.index(text.encode()) for text in texts]

    def choose(place, allowed):
        return next((i for i in wanted if i in allowed), int(allowed[0]))

    return choose


def at_random(seed):
    def choose(place, allowed):
        allowed = allowed[allowed != 0xED]  # the mask lets it begin lone surrogates
        return int(np.random.default_rng([seed, place]).choice(allowed))

    return choose


def least_tokens(compiler, spec) -> int:
    return len(compiler.forced.spell(minimal_answer(spec)))


def check_closed(compiler, spec, written, max_tokens) -> None:
    output = written.output
    assert output.finish_reason in (FinishReason.LENGTH, FinishReason.REPETITION)
    assert output.cut_at is not None
    data = output.text.encode()
    assert b"".join(WORDS[i] for i in output.token_ids) == data
    assert len(output.token_ids) == output.completion_tokens <= max_tokens
    assert output.token_ids[: output.num_kept] == written.raw[: output.num_kept]
    assert b"".join(WORDS[i] for i in written.raw).startswith(data[: output.cut_at])
    state = start(compiler.compile(spec))
    assert state.accept_text(data)
    assert state.can_stop


STRING = {"type": "string"}
TREE = {
    "$defs": {"tree": object_of(v=STRING, next={"anyOf": [{"$ref": "#/$defs/tree"}, STRING]})},
    "$ref": "#/$defs/tree",
}


def schemas() -> st.SearchStrategy:
    leaves = st.sampled_from(
        [
            STRING,
            {"type": "string", "minLength": 2, "maxLength": 9},
            {"type": "string", "pattern": "^(ab|é)+-[0-9]{2}$"},
            {"type": "string", "format": "date"},
            {"type": "integer"},
            {"type": "integer", "minimum": 100, "maximum": 12000},
            {"type": "number"},
            {"type": "boolean"},
            {"enum": ["yes", "ya", "é", 12, None, {"a": ["b"]}]},
            TREE["$defs"]["tree"]["properties"]["v"],
        ]
    )

    def inner(children):
        names = st.text('ab"é:', max_size=3)
        return st.one_of(
            st.builds(
                lambda parts, is_open: {
                    "type": "object",
                    "properties": parts,
                    "required": list(parts)[is_open:],
                    "additionalProperties": False,
                },
                st.dictionaries(names, children, min_size=1, max_size=3),
                st.integers(0, 1),
            ),
            st.builds(
                lambda item, least: {"type": "array", "items": item, "minItems": least},
                children,
                st.integers(0, 2),
            ),
            st.builds(lambda parts: {"anyOf": parts}, st.lists(children, min_size=1, max_size=3)),
        )

    return st.recursive(leaves, inner, max_leaves=5) | st.just(TREE)


@settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=schemas(), more=st.integers(0, 60), seed=st.integers(0, 999), forced=st.booleans())
def test_every_answer_with_a_sufficient_budget_is_whole(compiler, schema, more, seed, forced):
    spec = spec_of(schema)
    budget = least_tokens(compiler, spec) + more
    written = write(compiler, spec, budget, at_random(seed), forced=forced, guard=False)
    output, usage = written.output, written.usage
    assert output.error is None
    assert Draft202012Validator(schema).is_valid(json.loads(output.text, strict=False))
    assert usage.completion_tokens == output.completion_tokens <= budget
    assert 0 <= usage.forced_tokens <= usage.completion_tokens
    plain = write(compiler, spec, budget, at_random(seed), forced=forced, closing=False).output
    if plain.finish_reason is FinishReason.STOP:  # one that ends by itself is left alone
        assert output.finish_reason is FinishReason.STOP
        assert (output.token_ids, output.cut_at) == (plain.token_ids, None)
    elif output.finish_reason is FinishReason.STOP:  # what was missing was forced
        assert output.cut_at is None
        assert output.text.startswith(plain.text)
    else:
        check_closed(compiler, spec, written, budget)


def test_as_much_of_a_string_stays_as_leaves_room_for_the_closing(compiler):
    spec = spec_of(object_of(s=STRING, n={"type": "integer"}))
    written = write(compiler, spec, 20, preferring("a"))
    check_closed(compiler, spec, written, 20)
    assert written.output.completion_tokens == 20
    assert written.output.text == '{"s":"' + "a" * 12 + '","n":0}'
    assert written.output.cut_at == 6 + 12
    assert written.usage.forced_tokens == 20 - 12


def test_an_answer_that_ends_with_its_very_last_token_is_not_cut(compiler):
    spec = spec_of(object_of(s={"type": "string", "maxLength": 5}))
    choose = preferring("a")
    needed = write(compiler, spec, 99, choose).output.completion_tokens
    exact = write(compiler, spec, needed, choose).output
    assert (exact.finish_reason, exact.cut_at) == (FinishReason.STOP, None)
    assert exact.text == '{"s":"aaaaa"}'
    short = write(compiler, spec, needed - 1, choose).output
    assert short.finish_reason is FinishReason.LENGTH
    assert short.text == '{"s":"aaaa"}'


def test_a_rest_that_is_forced_whole_is_no_cut(compiler):
    """Sampled byte by byte it does not fit; spelt as the tokenizer does it does."""
    spec = load_schema(object_of(ab={"const": ["yes", "yes"]})).json_grammar
    budget = least_tokens(compiler, spec)
    bytes_first = preferring(*(chr(i) for i in range(128)))
    written = write(compiler, spec, budget, bytes_first, forced=False)
    assert len(written.raw) == budget
    assert b"".join(WORDS[i] for i in written.raw) != written.output.text.encode()
    assert (written.output.finish_reason, written.output.cut_at) == (FinishReason.STOP, None)
    assert written.output.text == '{"ab":["yes","yes"]}'


def test_a_budget_that_ends_inside_a_character_is_closed_before_it(compiler):
    spec = spec_of(STRING)
    half = WORDS.index(b"\xc3\xa9\xc3")

    def choose(place, allowed):
        return half if half in allowed else int(allowed[0])

    for budget in range(4, 10):
        written = write(compiler, spec, budget, choose)
        check_closed(compiler, spec, written, budget)
        assert json.loads(written.output.text).startswith("é")
        assert written.output.text.encode()[: written.output.cut_at].decode()


def test_a_stop_string_still_ends_an_answer_and_is_not_looked_for_in_its_closing(compiler):
    spec = spec_of(object_of(s=STRING, n={"type": "integer"}))
    cut = write(compiler, spec, 20, preferring("a"), stop=('"n"',)).output
    assert cut.finish_reason is FinishReason.LENGTH
    assert json.loads(cut.text)["n"] == 0
    stopped = write(compiler, spec, 20, preferring("a"), stop=("aaa",)).output
    assert (stopped.finish_reason, stopped.text) == (FinishReason.STOP, '{"s":"')
    assert stopped.cut_at is None


def test_a_budget_below_every_answer_ends_it_as_it_stands(compiler):
    spec = spec_of(object_of(a_long_name={"type": "boolean"}))
    output = write(compiler, spec, 4, preferring("a")).output
    assert (output.finish_reason, output.cut_at) == (FinishReason.LENGTH, None)
    assert output.completion_tokens == len(output.token_ids) == 4
    assert '{"a_long_name":'.startswith(output.text)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "(ab)+-[0-9]{3}"),
        ("ebnf", 'root ::= "[" item* "]"\nitem ::= "a" | root'),
        ("ebnf", 'root ::= "a" root "b" | "12"'),
    ],
)
def test_other_grammars_are_closed_too(compiler, kind, source):
    spec = GrammarSpec(kind=kind, source=source)
    written = write(compiler, spec, 30, preferring("ab", "a"))
    check_closed(compiler, spec, written, 30)
    assert written.output.num_kept > 5


# Runaway answers


def runs_away(spec, text: str) -> bool:
    """At any of its tokens, each a byte."""
    guard = RepetitionGuard(spec, WORDS)
    ids = list(text.encode())
    return any(guard.runs_away(ids[: n + 1]) for n in range(len(ids)))


ANY_STRING = object_of(s=STRING)


@pytest.mark.parametrize("period", ["a", "ab", "abababc", " and so on", "x" * 31 + "y"])
def test_an_unbounded_string_in_circles_runs_away(period):
    spec = spec_of(ANY_STRING)
    enough = max(128, 8 * len(period)) + 16
    assert runs_away(spec, '{"s":"start ' + (period * enough)[:enough])


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (ANY_STRING, '{"s":"' + "a" * 127),
        (ANY_STRING, '{"s":"' + ("x" * 32 + "y") * 20),
        (ANY_STRING, '{"s":"' + "".join(f"{i:03} " for i in range(200))),
        (object_of(s={"type": "string", "pattern": "^[01]{600}$"}), '{"s":"' + "0" * 500),
        (object_of(s={"enum": ["a" * 500]}), '{"s":"' + "a" * 500),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 300}, "[" + "0," * 200),
        (
            {
                "type": "array",
                "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 200},
            },
            "[[" + "true," * 100,
        ),
        (object_of(a=STRING, b=STRING), '{"a":"' + "a" * 100 + '","b":"' + "a" * 100),
        (object_of(n={"type": "number"}), '{"n":0.' + "0" * 30),
        (object_of(s=STRING), '{"s":"' + "0" * 64),
    ],
)
def test_what_is_short_or_bounded_or_changes_does_not_run_away(schema, text):
    assert not runs_away(spec_of(schema), text)


def test_a_long_number_within_its_bounds_does_not_run_away():
    bounds = {"type": "integer", "minimum": 0, "maximum": 10**70}
    for schema, expected in ((bounds, False), ({"type": "integer"}, True)):
        spec = GrammarSpec(kind="json_schema", source=json.dumps(schema))
        assert runs_away(spec, "1" * 64) == expected


def test_unbounded_arrays_numbers_and_patterns_run_away():
    items = {"type": "array", "items": object_of(n={"type": "integer"}, s={"enum": ["x"]})}
    assert runs_away(spec_of(items), "[" + '{"n":1,"s":"x"},' * 20)
    assert runs_away(spec_of(object_of(n={"type": "number"})), '{"n":0.' + "12345" * 12)
    assert runs_away(
        spec_of(object_of(s={"type": "string", "pattern": "^[01]+$"})), '{"s":"' + "0" * 160
    )
    either = {"anyOf": [object_of(s={"type": "string", "maxLength": 3}), ANY_STRING]}
    assert runs_away(spec_of(either), '{"s":"' + "0" * 160)
    long = object_of(s={"type": "string", "maxLength": 600})
    assert runs_away(spec_of(long), '{"s":"' + "a" * 160)  # with escapes it would be unbounded
    assert runs_away(GrammarSpec(kind="regex", source="(ab)*"), "ab" * 80)
    assert not runs_away(GrammarSpec(kind="regex", source="(ab){0,300}"), "ab" * 80)
    assert runs_away(GrammarSpec(kind="ebnf", source='root ::= "a"*'), "a" * 160)


def test_an_answer_that_runs_away_is_closed_and_says_why(compiler):
    spec = spec_of(object_of(s=STRING, n={"type": "integer"}))
    written = write(compiler, spec, 900, preferring("a"))
    check_closed(compiler, spec, written, 900)
    assert written.output.finish_reason is FinishReason.REPETITION
    assert 128 <= written.output.completion_tokens < 128 + 32
    assert written.usage.completion_tokens == written.output.completion_tokens
    unguarded = write(compiler, spec, 900, preferring("a"), guard=False).output
    assert unguarded.finish_reason is FinishReason.LENGTH
    assert unguarded.completion_tokens == 900
