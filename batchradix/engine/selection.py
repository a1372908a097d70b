"""From a launched step to one token a row: masks, few or all logits, the draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from batchradix.engine.accelerator import Accelerator
from batchradix.engine.candidates import find_candidates
from batchradix.engine.device_sampling import DeviceSampler
from batchradix.engine.grammar.state import AnyState, fill_batch
from batchradix.engine.memory import Retreat, enough_memory
from batchradix.engine.row import RunningRow
from batchradix.engine.sampling import SampledTokens, Sampler, SamplingBatch
from batchradix.engine.scored import ScoredAnswer
from batchradix.types import I64, RowSettings


class Logits(Protocol):
    """Where the logits of the launched step are had: a model runner."""

    def collect(self, rows: I64 | None = None) -> torch.Tensor:
        """[len(rows), vocab_size], any floating dtype: logits of the launched step; None for
        all rows."""
        ...

    def collect_few(self, rows: I64, token_ids: I64) -> torch.Tensor:
        """float32[len(rows), len(token_ids)], the logits of these tokens alone."""
        ...


class Choice(Protocol):
    """A place in an answer at which a token is to be chosen: an `Answer` where it stands, or
    a `DraftedPlace` further on."""

    @property
    def settings(self) -> RowSettings: ...

    @property
    def rng_key(self) -> np.uint64: ...

    @property
    def grammar(self) -> AnyState | None: ...

    @property
    def num_generated(self) -> int: ...

    @property
    def generated_ids(self) -> Sequence[int]: ...


class Chosen(Protocol):
    """Tokens that a device may still be choosing."""

    @property
    def token_ids(self) -> torch.Tensor:
        """int64[R] on the device, with no meaning where no token could be had."""
        ...

    def get(self) -> SampledTokens:
        """Waits for them."""
        ...


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Tokens that the host chose."""

    _tokens: SampledTokens
    _accelerator: Accelerator

    @property
    def token_ids(self) -> torch.Tensor:
        return self._accelerator.upload(self._tokens.token_ids)

    def get(self) -> SampledTokens:
        return self._tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is known of a step's rows before their logits: what sampling needs, and the answers
    that want logits for themselves, by row."""

    batch: SamplingBatch
    scored: dict[int, ScoredAnswer]

    def part(self, first: int, last: int) -> Prepared:
        """The rows ``[first, last)`` alone."""
        if last - first == len(self.batch.settings):
            return self
        scored = {i - first: self.scored[i] for i in range(first, last) if i in self.scored}
        return Prepared(batch=self.batch.take(np.arange(first, last)), scored=scored)


class Selector:
    """Chooses the next token of many rows. ``vocab_size`` is the width of the logits; ids from
    ``tokenizer_vocab_size`` on are never chosen. ``accelerator``: where the logits are."""

    def __init__(
        self, vocab_size: int, tokenizer_vocab_size: int, accelerator: Accelerator
    ) -> None:
        self._mask_words = -(-vocab_size // 32)
        self._sampler = Sampler(vocab_size, tokenizer_vocab_size)
        self._accelerator = accelerator
        self._device: DeviceSampler | None = None
        if accelerator.is_asynchronous:
            self._device = DeviceSampler(accelerator, self._sampler.num_choices)
        self.retreat = Retreat("while choosing the tokens", "rows", "--batch-size or --kv-tokens")

    def prepare(self, rows: Sequence[RunningRow], choices: Sequence[Choice]) -> Prepared:
        """What sampling needs beside logits, while a device computes them: masks above all."""
        states: list[AnyState] = []
        masked = np.zeros(len(rows), dtype=np.bool_)
        for i, choice in enumerate(choices):
            if choice.grammar is not None:
                masked[i] = True
                states.append(choice.grammar)
        bitmask = None
        if states:
            bitmask = torch.empty((len(rows), self._mask_words), dtype=torch.int32)
            fill_batch(states, bitmask, np.flatnonzero(masked).tolist())
        batch = SamplingBatch(
            settings=[choice.settings for choice in choices],
            rng_key=np.array([choice.rng_key for choice in choices], dtype=np.uint64),
            num_generated=np.array([choice.num_generated for choice in choices], dtype=np.int64),
            prompt_ids=[row.prompt[: len(row.prompt) - row.num_forced] for row in rows],
            generated_ids=[choice.generated_ids for choice in choices],
            bitmask=bitmask,
            masked_rows=masked,
        )
        scored = {i: a for i, a in enumerate(choices) if isinstance(a, ScoredAnswer)}
        return Prepared(batch=batch, scored=scored)

    def launch(self, logits: Logits, sources: I64, prepared: Prepared) -> Chosen:
        """Chooses a token a row; ``sources``: int64[R], the rows' places in the launched step.

        On a device it may go on after this returns, but where some answer wants its logits. On the
        CPU only a part of the output layer is computed where a row's mask leaves few tokens.
        Raises `OutOfMemoryError` when what that takes does not fit, one row at a time.
        """

        def select(first: int, last: int) -> SampledTokens:
            return self._select(logits, sources[first:last], prepared.part(first, last))

        what = f"while choosing the tokens of {len(sources)} rows"
        with enough_memory(what, "lower `batch_size` or `kv_tokens`"):
            device = self._device
            if device is not None and not prepared.scored:
                parts = self.retreat.in_parts(
                    len(sources),
                    lambda first, last: device.launch(
                        logits.collect(sources[first:last]), prepared.part(first, last).batch
                    ),
                )
                return device.download(parts, prepared.batch)
            sampled = SampledTokens.joined(self.retreat.in_parts(len(sources), select))
            return KnownTokens(sampled, self._accelerator)

    def _select(self, logits: Logits, sources: I64, prepared: Prepared) -> SampledTokens:
        sampler, batch = self._sampler, prepared.batch
        if batch.bitmask is None:
            return sampler.sample(logits.collect(sources), batch)
        found = find_candidates(batch.bitmask.numpy(), batch.masked_rows, sampler.num_choices)
        few, many = np.flatnonzero(found.is_few), np.flatnonzero(~found.is_few)
        if not len(few):
            many_logits = logits.collect(sources)
            _score(prepared, many, many_logits, None)
            return sampler.sample(many_logits, batch)
        few_logits = logits.collect_few(sources[few], found.token_ids)
        _score(prepared, few, few_logits, found.token_ids)
        sampled = sampler.sample_among(few_logits, found.token_ids, batch.take(few))
        if not len(many):
            return sampled
        many_logits = logits.collect(sources[many])
        _score(prepared, many, many_logits, None)
        others = sampler.sample(many_logits, batch.take(many))
        return sampled.beside(others, few, many)


def _score(prepared: Prepared, rows: I64, logits: torch.Tensor, columns: I64 | None) -> None:
    """Hands scored answers their logits: [len(rows), n], of all tokens or ``columns``."""
    wanted = [(place, prepared.scored.get(row)) for place, row in enumerate(rows.tolist())]
    scored = [(place, answer) for place, answer in wanted if answer is not None]
    if not scored:
        return
    table = logits.detach().float().cpu().numpy()
    for place, answer in scored:
        ids = answer.allowed_ids
        if not len(ids):
            continue
        at = ids if columns is None else np.searchsorted(columns, ids)
        values = table[place, at].astype(np.float64)
        if np.isfinite(values).any() and not (np.isnan(values) | (values == np.inf)).any():
            answer.score(values)  # else the sampler finds no token either
