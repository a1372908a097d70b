"""Tokens chosen on the device from all its logits, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from batchradix.engine.accelerator import Accelerator, Download
from batchradix.engine.rng import uniforms
from batchradix.engine.sampling import (
    SampledTokens,
    SamplingBatch,
    has_penalty,
    is_drawn,
    penalise_rows,
)
from batchradix_kernels.masked_sampling import masked_argmax, masked_sample


@dataclass(frozen=True, slots=True)
class ChosenOnDevice:
    """``token_ids``: int64[R] on the device, with no meaning where no token could be had."""

    token_ids: torch.Tensor
    _found: Download  # float64[2, R]: the tokens and their logits, in one copy
    _is_masked: NDArray[np.bool_]

    def get(self) -> SampledTokens:
        """Waits for them."""
        ids, peaks = self._found.get()
        broken, empty = np.isnan(peaks), peaks == -np.inf
        return SampledTokens(
            token_ids=np.where(broken | empty, 0, ids).astype(np.int64),
            non_finite=broken | empty,
            nothing_allowed=empty & self._is_masked,
        )


class DeviceSampler:
    """Does what `Sampler` does, in kernels that take all rows at once.

    ``num_choices``: ids from there on are never chosen. A draw may differ from the other's where
    rounding moves the border between two tokens past the row's random number.
    """

    def __init__(self, accelerator: Accelerator, num_choices: int) -> None:
        self._accelerator = accelerator
        self._num_choices = num_choices

    @torch.inference_mode()
    def launch(
        self, logits: torch.Tensor, batch: SamplingBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64[R] tokens and float32[R] their logits on the device, as `masked_argmax` has them;
        ``logits``: [R, vocab_size], any floating dtype."""
        x = logits[:, : self._num_choices]
        if any(map(has_penalty, batch.settings)):
            # Penalties change no logit that is not finite, so the mask may come after them.
            x = x.to(torch.float32, copy=True)
            penalise_rows(x, batch, None)
        bitmask, masked = None, None
        if batch.bitmask is not None:
            bitmask = self._accelerator.upload(batch.bitmask.numpy())
            masked = self._accelerator.upload(batch.masked_rows)
        if not any(map(is_drawn, batch.settings)):
            return masked_argmax(x, bitmask, masked)
        floats, top_k = self._settings(batch)
        temperature, top_p, min_p, uniform = floats
        return masked_sample(x, temperature.float(), top_k, top_p, min_p, uniform, bitmask, masked)

    def download(
        self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], batch: SamplingBatch
    ) -> ChosenOnDevice:
        """On its way to the host: what `launch` gave for the parts of a batch, in order."""
        ids = torch.cat([ids for ids, _ in parts])
        peaks = torch.cat([peaks for _, peaks in parts])
        found = torch.stack((ids.double(), peaks.double()))
        return ChosenOnDevice(ids, self._accelerator.download(found), batch.masked_rows)

    def _settings(self, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """float64[4, R] (temperature, top-p, min-p, random number) and int32[R] (top-k)."""
        settings = batch.settings
        floats = np.array(
            [
                [s.temperature for s in settings],
                [s.top_p for s in settings],
                [s.min_p for s in settings],
                uniforms(batch.rng_key, batch.num_generated),
            ]
        )
        top_k = np.array([min(max(s.top_k, 0), 2**31 - 1) for s in settings], dtype=np.int32)
        return self._accelerator.upload(floats), self._accelerator.upload(top_k)
