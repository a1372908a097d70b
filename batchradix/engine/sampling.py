"""From logits to tokens: masks, penalties, temperature, cuts, and one draw a row.

The order, and what each step means, is that of transformers: grammar mask, repetition penalty,
presence and frequency penalty (these two as vLLM), temperature, top-k, top-p, min-p, draw.
Every row is computed from its own logits, settings and random number only, with reductions
that run along the row in order, so a row gets the same token alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchradix.engine.rng import uniforms
from batchradix.types import I64, U32, U64, RowSettings
from batchradix_kernels.masked_sampling import GREEDY_BELOW, apply_bitmask, masked_argmax

_Any = TypeVar("_Any", bound=np.generic)

_NEG_INF = float("-inf")
_NUCLEUS_GUESS = 256  # top-p looks at this many tokens before it sorts the vocabulary
_BLOCK = 64  # tokens whose weights are summed in float32 before float64 takes over
_CHUNK_ELEMENTS = 1 << 19  # logits drawn from at a time on the CPU: float64 sums stay in cache


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """What `Sampler.sample` needs of ``R`` rows beside their logits.

    ``rng_key``: uint64[R]; ``num_generated``: int64[R], the position in the answer (from 0) of
    the token to be sampled. ``prompt_ids[r]`` is the *whole* prompt, however much of it was
    cached; it and ``generated_ids[r]`` are read for rows with penalties only.
    ``bitmask``: int32[R, ceil(vocab_size / 32)] on the CPU, bit ``i % 32`` of word ``i // 32``
    set where token ``i`` is allowed; read where ``masked_rows``: bool[R].
    """

    settings: Sequence[RowSettings]
    rng_key: U64
    num_generated: I64
    prompt_ids: Sequence[U32]
    generated_ids: Sequence[Sequence[int]]
    bitmask: Tensor | None
    masked_rows: NDArray[np.bool_]

    def take(self, rows: I64) -> SamplingBatch:
        """The batch of the given rows alone."""
        return SamplingBatch(
            settings=[self.settings[r] for r in rows],
            rng_key=self.rng_key[rows],
            num_generated=self.num_generated[rows],
            prompt_ids=[self.prompt_ids[r] for r in rows],
            generated_ids=[self.generated_ids[r] for r in rows],
            bitmask=None if self.bitmask is None else self.bitmask[torch.from_numpy(rows)],
            masked_rows=self.masked_rows[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """``token_ids``: int64[R]. ``non_finite``: bool[R], rows that got no token (id 0 instead).

    Such a row's logits hold NaN or +inf, or nothing was left to choose from;
    ``nothing_allowed``: bool[R], the part of these whose mask left no token with a finite logit.
    """

    token_ids: I64
    non_finite: NDArray[np.bool_]
    nothing_allowed: NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: Sequence[SampledTokens]) -> SampledTokens:
        """One batch of the rows of all parts, in order; of at least one part."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            non_finite=np.concatenate([part.non_finite for part in parts]),
            nothing_allowed=np.concatenate([part.nothing_allowed for part in parts]),
        )

    def beside(self, other: SampledTokens, rows: I64, other_rows: I64) -> SampledTokens:
        """One batch of both: int64 ``rows`` are the places of these, the others' beside them."""

        def merged(mine: NDArray[_Any], theirs: NDArray[_Any]) -> NDArray[_Any]:
            out = np.empty(len(rows) + len(other_rows), dtype=mine.dtype)
            out[rows], out[other_rows] = mine, theirs
            return out

        return SampledTokens(
            token_ids=merged(self.token_ids, other.token_ids),
            non_finite=merged(self.non_finite, other.non_finite),
            nothing_allowed=merged(self.nothing_allowed, other.nothing_allowed),
        )


class Sampler:
    """Samples the next token of many rows.

    ``vocab_size`` is the width of the logits; ids from ``tokenizer_vocab_size`` on are padding
    of the model's vocabulary and are never sampled.
    """

    def __init__(self, vocab_size: int, tokenizer_vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_choices = min(vocab_size, tokenizer_vocab_size)

    @torch.inference_mode()  # logits come from there and cannot be written to outside
    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        """One token a row of ``logits``: [R, vocab_size], any floating dtype.

        Greedy rows take the largest logit, the lowest id of equal ones.
        """
        return self._sample(logits.detach()[:, : self.num_choices], batch, None)

    @torch.inference_mode()
    def sample_among(self, logits: Tensor, token_ids: I64, batch: SamplingBatch) -> SampledTokens:
        """One token a row, where only some have logits: [R, n], any floating dtype.

        ``token_ids``: int64[n], ascending, the tokens of the columns. Every row is masked and
        its mask allows none but these. Otherwise the same as `sample`.
        """
        sampled = self._sample(logits.detach(), batch, token_ids)
        chosen = np.where(sampled.non_finite, 0, token_ids[sampled.token_ids])
        return replace(sampled, token_ids=chosen)

    def _sample(self, x: Tensor, batch: SamplingBatch, columns: I64 | None) -> SampledTokens:
        """Samples columns of ``x``: [R, n], which are tokens, or stand for ``columns``."""
        if batch.bitmask is not None and columns is not None:
            allowed = _bits(batch.bitmask.numpy(), columns)
            batch = replace(batch, bitmask=_packed(allowed))
        token_ids, peak = _largest(x, batch)
        broken = np.isnan(peak)
        others = np.array([is_drawn(s) or has_penalty(s) for s in batch.settings], dtype=np.bool_)
        others &= ~broken & (peak > -np.inf)
        for rows in _chunks(np.flatnonzero(others), x):
            values = x[torch.from_numpy(rows).to(x.device)].float()  # a copy
            part = batch.take(rows)
            if part.bitmask is not None:
                apply_bitmask(values, part.bitmask, np.flatnonzero(part.masked_rows))
            if any(map(has_penalty, part.settings)):
                penalise_rows(values, part, columns)
                token_ids[rows], peak[rows] = _first_argmax(values)
            drawn = np.flatnonzero(list(map(is_drawn, part.settings)) & (peak[rows] > -np.inf))
            if len(drawn):
                token_ids[rows[drawn]] = _draw(values, drawn, part)
        empty = ~broken & ~(peak > -np.inf)
        token_ids[broken | empty] = 0
        return SampledTokens(
            token_ids=token_ids,
            non_finite=broken | empty,
            nothing_allowed=empty & batch.masked_rows,
        )


def is_drawn(s: RowSettings) -> bool:
    """Whether a row's tokens are drawn and not the likeliest."""
    return s.temperature >= GREEDY_BELOW


def has_penalty(s: RowSettings) -> bool:
    """Whether what was generated before changes a row's logits."""
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def _bits(bitmask: NDArray[np.int32], token_ids: I64) -> NDArray[np.bool_]:
    """bool[R, n]: the bits of some tokens in masks: int32[R, words]."""
    return ((bitmask[:, token_ids >> 5] >> (token_ids & 31)) & 1).astype(np.bool_)


def _places(ids: I64, columns: I64) -> I64:
    """int64[k]: where ``ids`` stand among the ascending ``columns``, those that do."""
    places: I64 = np.searchsorted(columns, ids).astype(np.int64)
    found: I64 = places[columns[np.minimum(places, len(columns) - 1)] == ids]
    return found


def _packed(bits: NDArray[np.bool_]) -> Tensor:
    """bool[R, n] to a bitmask: int32[R, ceil(n / 32)]."""
    octets = np.packbits(bits, axis=1, bitorder="little")
    padded = np.zeros((len(bits), -(-bits.shape[1] // 32) * 4), dtype=np.uint8)
    padded[:, : octets.shape[1]] = octets
    return torch.from_numpy(padded.view("<i4").astype(np.int32, copy=False))


def _largest(x: Tensor, batch: SamplingBatch) -> tuple[I64, NDArray[np.float32]]:
    """(int64[R], float32[R]): what `masked_argmax` gives."""
    bitmask, masked = None, None
    if batch.bitmask is not None:
        bitmask = batch.bitmask.to(x.device)
        masked = torch.from_numpy(batch.masked_rows).to(x.device)
    token_ids, peak = masked_argmax(x, bitmask, masked)
    return token_ids.cpu().numpy(), peak.cpu().numpy()


def _chunks(rows: I64, x: Tensor) -> list[I64]:
    """``rows`` of ``x``: [R, V], as many at a time as are to be worked on together."""
    chunk = len(rows)
    if x.device.type == "cpu":
        chunk = _CHUNK_ELEMENTS // x.shape[1]
    chunk = max(1, chunk)
    return [rows[at : at + chunk] for at in range(0, len(rows), chunk)]


def penalise_rows(x: Tensor, batch: SamplingBatch, columns: I64 | None) -> None:
    """Applies penalties in place; ``x``: float32[R, V]."""
    for r, s in enumerate(batch.settings):
        if has_penalty(s):
            seen = np.asarray(batch.prompt_ids[r], dtype=np.int64)
            generated = np.asarray(batch.generated_ids[r], dtype=np.int64)
            if columns is not None:
                seen, generated = _places(seen, columns), _places(generated, columns)
            _penalise(x[r], s, seen, generated)


def _penalise(row: Tensor, s: RowSettings, prompt_ids: I64, generated: I64) -> None:
    """Applies one row's penalties in place; ``row``: float32[V]."""
    generated = generated[generated < len(row)]
    if s.repetition_penalty != 1.0:
        seen = np.concatenate([prompt_ids[prompt_ids < len(row)], generated])
        ids = torch.from_numpy(seen).to(row.device)
        values = row[ids]
        # A repeated id writes the same value again, so there is no need to make ids unique.
        row[ids] = torch.where(
            values < 0, values * s.repetition_penalty, values / s.repetition_penalty
        )
    if len(generated) and (s.presence_penalty != 0.0 or s.frequency_penalty != 0.0):
        distinct, counts = np.unique(generated, return_counts=True)
        minus = (s.presence_penalty + s.frequency_penalty * counts).astype(np.float32)
        row[torch.from_numpy(distinct).to(row.device)] -= torch.from_numpy(minus).to(row.device)


def _first_argmax(x: Tensor) -> tuple[I64, NDArray[np.float32]]:
    """(int64[R], float32[R]): the first largest entry of each row; NaN counts as largest."""
    if x.device.type == "cpu":  # numpy's is vectorised, ten times as fast as torch's here
        values = x.numpy()
        ids = values.argmax(axis=1)
        return ids, values[np.arange(len(ids)), ids]
    peak, index = x.max(dim=1)
    return index.cpu().numpy(), peak.cpu().numpy()


def _draw(x: Tensor, rows: I64, batch: SamplingBatch) -> I64:
    """int64[len(rows)]: draws for the given rows of ``x``, rows of one kind together."""
    settings = [batch.settings[r] for r in rows]
    u = uniforms(batch.rng_key[rows], batch.num_generated[rows])
    num_choices = x.shape[1]
    top_k = np.array([s.top_k for s in settings], dtype=np.int64)
    top_k[(top_k <= 0) | (top_k >= num_choices)] = 0
    top_p = np.array([s.top_p for s in settings], dtype=np.float64)
    columns = np.stack(
        [
            [s.temperature for s in settings],
            top_p,
            [s.min_p for s in settings],
            u,
        ]
    )
    kind = np.where(top_k > 0, 2, np.where(top_p < 1.0, 1, 0))
    out = np.empty(len(rows), dtype=np.int64)
    for k in np.unique(kind):
        members = np.flatnonzero(kind == k)
        whole = len(members) == len(x)
        logits = x if whole else x[torch.from_numpy(rows[members]).to(x.device)]
        params = torch.from_numpy(columns[:, members]).to(x.device)
        draw = _Draw(logits, *(p[:, None] for p in params))
        if k == 0:
            ids = draw.from_all()
        elif k == 1:
            ids = draw.from_nucleus()
        else:
            ids = draw.from_top_k(torch.from_numpy(top_k[members]).to(x.device))
        out[members] = ids.cpu().numpy()
    return out


class _Draw:
    """Draws for rows of one kind. ``x``: float32[n, V], finite maxima; the rest float64[n, 1].

    Probabilities are weights relative to the row's largest, in float32 as the logits are. The
    draw is the first token, in order of id, at which the running sum of weights exceeds ``u``
    times their total: first among blocks of tokens, then within the block.
    """

    def __init__(
        self, x: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
    ) -> None:
        self.x = x
        self.peak = x.amax(dim=1, keepdim=True)
        self.temperature = temperature.float()
        self.top_p = top_p
        self.min_p = min_p
        self.u = u

    def from_all(self) -> Tensor:
        return self.pick(self.weights(self.x))

    def from_top_k(self, top_k: Tensor) -> Tensor:
        """``top_k``: int64[n]. Tokens as likely as the k-th are kept too, as in transformers."""
        largest = self.x.topk(int(top_k.max()), dim=1).values
        ids, weights = self.candidates(largest.gather(1, top_k[:, None] - 1))
        if bool((self.top_p < 1.0).any()):
            weights = self.nucleus(weights, _block_sums(weights)[:, -1:])
        return ids.gather(1, self.pick(weights)[:, None]).squeeze(1)

    def from_nucleus(self) -> Tensor:
        """Top-p alone: looks at the most likely tokens, at all where these hold too little."""
        everything = self.weights(self.x)
        total = _block_sums(everything)[:, -1:]
        bound = self.x.topk(min(_NUCLEUS_GUESS, self.x.shape[1]), dim=1).values[:, -1:]
        ids, weights = self.candidates(bound)
        held = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
        # The margin is far above rounding, so what is enough here is enough in `nucleus`.
        short = (held < self.top_p * total * (1 + 1e-6)).squeeze(1)
        kept = self.nucleus(weights, total)
        picked = ids.gather(1, self.pick(kept)[:, None]).squeeze(1)
        if bool(short.any()):
            parts = (self.x, self.temperature, self.top_p, self.min_p, self.u)
            rest = _Draw(*(part[short] for part in parts))
            picked[short] = rest.pick(rest.nucleus(everything[short], total[short]))
        return picked

    def weights(self, values: Tensor) -> Tensor:
        """float32[n, C rounded up to whole blocks]: exp((value - largest) / temperature), so
        the largest weighs exactly 1; ``values``: float32[n, C]. The filling weighs 0."""
        shape = (len(values), -(-values.shape[1] // _BLOCK) * _BLOCK)
        out = torch.full(shape, _NEG_INF, device=values.device)
        used = out[:, : values.shape[1]]
        torch.sub(values, self.peak, out=used)
        used.div_(self.temperature)
        if out.device.type == "cpu":  # numpy's is faster, by far where masks left many -inf
            np.exp(out.numpy(), out=out.numpy())
            return out
        return out.exp_()

    def candidates(self, bound: Tensor) -> tuple[Tensor, Tensor]:
        """(int64[n, C], float32[n, C]): ids of the tokens at or above ``bound``: float32[n, 1],
        ascending, and their weights; shorter rows are filled up with weight 0. What a mask
        forbids (-inf) is no candidate."""
        bound = bound.clamp_min(torch.finfo(bound.dtype).min)
        row, token = (self.x >= bound).nonzero(as_tuple=True)
        counts = torch.bincount(row, minlength=len(self.x))
        first = counts.cumsum(0) - counts
        column = torch.arange(len(row), device=row.device) - first[row]
        shape = (len(self.x), int(counts.max()))
        ids = torch.zeros(shape, dtype=torch.int64, device=row.device)
        ids[row, column] = token
        values = torch.full(shape, _NEG_INF, device=row.device)
        values[row, column] = self.x[row, token]
        return ids, self.weights(values)

    def nucleus(self, weights: Tensor, total: Tensor) -> Tensor:
        """Zeroes the weights outside the smallest set of most likely tokens (the lower id first
        among equals) that holds ``top_p`` of ``total``: float64[n, 1]. At least one stays."""
        falling = _falling(weights)
        before = falling.double().cumsum(dim=1) - falling
        num_kept = (before < self.top_p * total).sum(dim=1, keepdim=True)
        last = falling.gather(1, num_kept - 1)
        above = weights > last
        equal = weights == last
        num_equal = num_kept - above.sum(dim=1, keepdim=True)
        kept = above | (equal & (equal.cumsum(dim=1) <= num_equal))
        # Neutral rows may stand among others: for them nothing is outside.
        return torch.where(kept | (self.top_p >= 1.0), weights, 0.0)

    def pick(self, weights: Tensor) -> Tensor:
        """int64[n]: the column drawn of each row of ``weights``: float32[n, whole blocks]."""
        if bool((self.min_p > 0).any()):
            weights = torch.where(weights < self.min_p, 0.0, weights)
        sums = _block_sums(weights)
        target = self.u * sums[:, -1:]
        block = _first_above(sums, target)
        before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_min(0)), 0.0)
        blocks = weights.view(len(weights), -1, _BLOCK)
        inside = blocks[torch.arange(len(weights), device=block.device), block.squeeze(1)]
        column = _first_above(inside.double().cumsum(dim=1), target - before)
        return (block * _BLOCK + column).squeeze(1)


def _block_sums(weights: Tensor) -> Tensor:
    """float64[n, C / _BLOCK]: running sums over blocks of ``weights``: float32[n, C]."""
    return weights.view(len(weights), -1, _BLOCK).sum(dim=2).double().cumsum(dim=1)


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """int64[n, 1]: the first column of the rising ``sums`` above ``target``; where rounding put
    the target at the end, the last column at which they still rose."""
    index = torch.searchsorted(sums, target, right=True)
    return torch.minimum(index, torch.searchsorted(sums, sums[:, -1:].contiguous()))


def _falling(weights: Tensor) -> Tensor:
    """Each row of float32[n, C] from large to small."""
    if weights.device.type == "cpu":  # numpy sorts values alone, torch carries indices along
        return torch.from_numpy(np.sort(weights.numpy(), axis=1)[:, ::-1].copy())
    return weights.sort(dim=1, descending=True).values
