"""Answers under a grammar, the plain way: what every shortcut of the engine must equal.

One row alone, one forward pass of a transformers model for every token, forced ones too, all
logits, the library's mask. Only the rule that makes forced text into tokens is the engine's own,
and the one by which an answer is closed when its budget is used up.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TIE_GAP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """``ids`` are the answer without the end of sequence, which ``num_tokens`` counts.

    ``num_kept`` of them the loop wrote; the others close an answer that was cut.
    ``sampled``: by place in the answer the second best token and how far its logit was below.
    """

    ids: tuple[int, ...]
    num_tokens: int
    ended: bool
    num_kept: int
    sampled: dict[int, tuple[int, float]]

    @property
    def num_forced(self) -> int:
        num_taken_back = sum(place >= self.num_kept for place in self.sampled)
        return self.num_tokens - len(self.sampled) + num_taken_back

    @property
    def num_decode_steps(self) -> int:
        """Sampled tokens but for the first, which the prompt leads to."""
        return max(0, len(self.sampled) - 1)


class Constrained:
    """``compiler`` is a `GrammarCompiler`, ``num_choices`` the tokens of the tokenizer."""

    def __init__(self, model: Any, compiler: Any, eos_ids: Sequence[int], num_choices: int) -> None:
        self._model = model
        self._compiler = compiler
        self._eos_ids = frozenset(eos_ids)
        self._num_choices = num_choices

    def __call__(
        self,
        prompt: Sequence[int],
        spec: Any,
        max_tokens: int,
        *,
        forced_text: bool = True,
        temperature: float = 0.0,
        rng_key: int = 0,
    ) -> Reference:
        from batchradix.engine.grammar.limits import AnswerLimits
        from batchradix.engine.grammar.state import GrammarState

        limits = AnswerLimits(
            self._compiler.compile(spec), self._compiler.forced, repetition_guard=True
        )
        state = GrammarState(self._compiler.compile(spec))
        rule = self._compiler.forced.next_ids if forced_text else lambda state: ()
        forced = list(rule(state))
        ids: list[int] = []
        sampled: dict[int, tuple[int, float]] = {}
        logits, cache = self._forward(list(prompt), None)
        while True:
            is_forced = bool(forced)
            if is_forced:
                token = forced.pop(0)
            else:
                token, second, gap = self._choose(logits, state, temperature, rng_key, len(ids))
                sampled[len(ids)] = (second, gap)
            assert state.accept(token)
            if token in self._eos_ids:
                num_tokens, is_done = len(ids) + 1, True
            else:
                ids.append(token)
                num_tokens, is_done = len(ids), state.is_complete
            if is_done:
                return Reference(
                    ids=tuple(ids),
                    num_tokens=num_tokens,
                    ended=True,
                    num_kept=num_tokens,
                    sampled=sampled,
                )
            if len(ids) == max_tokens or limits.runs_away(ids):
                closed = limits.close(state, ids, max_tokens)
                return Reference(
                    ids=tuple(ids) if closed is None else closed.token_ids,
                    num_tokens=len(ids if closed is None else closed.token_ids),
                    ended=closed is not None and closed.is_forced,
                    num_kept=len(ids) if closed is None else closed.num_kept,
                    sampled=sampled,
                )
            if not is_forced:
                forced = list(rule(state))
            logits, cache = self._forward([token], cache)

    def _forward(self, ids: list[int], cache: Any) -> tuple[Any, Any]:
        import torch

        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([ids]),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return out.logits[0, -1].float().numpy(), out.past_key_values

    def _choose(
        self, logits: Any, state: Any, temperature: float, rng_key: int, position: int
    ) -> tuple[int, int, float]:
        """The token, the second best one and its distance in logits."""
        from batchradix.engine.rng import uniforms

        words = np.zeros((1, -(-len(logits) // 32)), dtype=np.int32)
        state.matcher.fill_next_token_bitmask(words, 0)
        bits = np.unpackbits(words[0].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: self._num_choices])
        values = logits[allowed].astype(np.float64)
        order = np.argsort(-values, kind="stable")
        best = order[0]
        second = order[1] if len(order) > 1 else best
        gap = float(values[best] - values[second]) if len(order) > 1 else np.inf
        if temperature > 0:
            weights = np.exp((values - values.max()) / temperature).cumsum()
            u = uniforms(np.array([rng_key], np.uint64), np.array([position]))[0]
            best = int(np.searchsorted(weights, u * weights[-1], side="right"))
        return int(allowed[best]), int(allowed[second]), gap


def compare(ours: Sequence[Any], references: Sequence[Reference]) -> int:
    """AssertionError unless completions equal the references; how many rows end in a tie.

    Where the reference's best two logits all but tie, ours may be the other one; the rest of
    such a row is not compared.
    """
    num_ties = 0
    for row, (completion, reference) in enumerate(zip(ours, references, strict=True)):
        assert completion.error is None
        pairs = zip(completion.token_ids, reference.ids, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            assert completion.token_ids == reference.ids, f"row {row}"
            assert (completion.finish_reason == "stop") == reference.ended, f"row {row}"
            assert completion.completion_tokens == reference.num_tokens, f"row {row}"
            continue
        if place >= reference.num_kept:
            # What was taken back decides where an answer is closed.
            gaps = [gap for at, (_, gap) in reference.sampled.items() if at >= reference.num_kept]
            assert min(gaps, default=np.inf) <= TIE_GAP, f"row {row} is closed differently"
            num_ties += 1
            continue
        second, gap = reference.sampled.get(place, (-1, np.inf))
        found = completion.token_ids[place]
        assert gap <= TIE_GAP, f"row {row} differs at token {place}: {found}, gap {gap:.3g}"
        assert found == second, f"row {row} differs at token {place}"
        num_ties += 1
    return num_ties


def object_of(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(length: int = 12) -> dict[str, Any]:
    return {"type": "string", "maxLength": length}


INTEGER = {"type": "integer"}
SMALL = {"type": "integer", "minimum": 0, "maximum": 120}
NUMBER = {"type": "number"}
FLAG = {"type": "boolean"}
KINDS = {"enum": ["spam", "ham", "invoice", "invitation", "in", "eggs", "egg", "ünïcode"]}
SCHEMAS: tuple[Any, ...] = (
    KINDS,
    {"enum": ["a", "ab", "abc", "abcd"]},
    {"enum": [1, 10, 100, "1", None, True, {"a": [1]}]},
    FLAG,
    {"type": ["boolean", "null"]},
    SMALL,
    NUMBER,
    text(),
    {"type": "string"},
    {"const": {"name": "fixed", "n": [1, 2.5, None]}},
    {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": KINDS, "maxItems": 3},
    {"type": "array", "prefixItems": [FLAG, SMALL, {"const": "end"}], "items": False},
    object_of(kind=KINDS),
    object_of(answer=FLAG),
    object_of(title=text(20)),
    object_of(invoice_number=text(), total=SMALL, paid=FLAG),
    object_of(
        vendor=text(16),
        invoice_date={"type": "string", "format": "date"},
        currency={"enum": ["EUR", "USD", "GBP"]},
        total=SMALL,
        paid=FLAG,
        kind=KINDS,
    ),
    object_of(a=object_of(b=object_of(c=FLAG, d=KINDS)), e=SMALL),
    object_of(id={"const": "x-1"}, version={"const": 3}, ok=FLAG),
    object_of(name=text(8), tags={"type": "array", "items": text(5), "maxItems": 2}),
    object_of(when={"type": "string", "format": "date-time"}),
    object_of(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    object_of(phone={"type": "string", "pattern": "^\\+49 [0-9]{4}/[0-9]{2}$"}, name=text(6)),
    object_of(größe=SMALL, **{'quoted "name"': FLAG, "tab\tkey": KINDS}),
    {"type": "object", "properties": {"a": FLAG, "b": SMALL}, "additionalProperties": False},
    {"anyOf": [object_of(cat=text(4)), object_of(car=SMALL), {"type": "null"}]},
    {"anyOf": [{"const": "yes"}, {"const": "no"}, {"const": "not sure"}]},
    object_of(choice={"anyOf": [KINDS, {"type": "null"}]}, weight=SMALL),
    object_of(rows={"type": "array", "items": object_of(x=SMALL, y=FLAG), "maxItems": 2}),
    object_of(long_property_name_of_many_parts=FLAG, another_long_property_name=FLAG),
    object_of(note={"type": "string"}, flag=FLAG),
    object_of(amount={"type": "integer", "minimum": -99999, "maximum": 99999}, unit=KINDS),
    {
        "$defs": {"tree": object_of(v=FLAG, next={"anyOf": [{"$ref": "#/$defs/tree"}, FLAG]})},
        "$ref": "#/$defs/tree",
    },
)


def source(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)
