"""How many tokens of keys and values there is memory for, found out by a step of the largest kind.

What a step takes beside weights and pool depends on kernels and libraries, so it is measured.
"""

from __future__ import annotations

import numpy as np

from batchradix.engine.accelerator import Accelerator
from batchradix.engine.attention.base import KVBackend
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.registry import CausalLM
from batchradix.engine.step import Step, empty_i64, i64_table
from batchradix.errors import OutOfMemoryError

SHARE = 0.9  # of what is left; graphs, libraries and other processes take some more later


def fitting_slots(
    accelerator: Accelerator,
    model: CausalLM,
    attention: KVBackend,
    *,
    most: int,
    token_bytes: int,
    prefill_tokens: int,
    batch_size: int,
) -> int:
    """Slots of ``token_bytes`` each, ``most`` at most, that fit beside a step of ``prefill_tokens``
    tokens and ``batch_size`` rows that decode.

    Raises `OutOfMemoryError` where not one does. A pool for the trial step is there meanwhile.
    """
    num_tokens = prefill_tokens + batch_size
    peak_bytes = accelerator.peak_bytes(
        lambda: _largest_step(accelerator, model, attention, num_tokens, batch_size)
    )
    peak_bytes = max(0, peak_bytes - num_tokens * token_bytes)  # its pool goes again
    room = int((accelerator.free_bytes() - peak_bytes) * SHARE)
    slots = min(most, room // token_bytes)
    if slots < 1:
        raise OutOfMemoryError(
            f"a step of {num_tokens:,} tokens takes {peak_bytes / 2**30:.1f} GiB beside the "
            f"weights, which leaves no memory for keys and values; lower `prefill_tokens` or "
            f"`batch_size`, or use a smaller model"
        )
    return slots


def _largest_step(
    accelerator: Accelerator,
    model: CausalLM,
    attention: KVBackend,
    num_tokens: int,
    num_rows: int,
) -> None:
    """Tokens that all see those before them, and the logits of some, in float32 too."""
    places = np.arange(num_tokens, dtype=np.int64)
    step = Step(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=places,
        slots=places,
        context=empty_i64(0, 4),
        causal=i64_table([(0, num_tokens, 0, num_tokens)], 4),
    )
    hidden = model.forward(
        Batch(
            token_ids=accelerator.upload(step.token_ids),
            positions=accelerator.upload(step.positions),
            attention=attention,
            plan=attention.plan(step),
            pool=attention.allocate(num_tokens),
        )
    )
    logits = model.logits(hidden[:num_rows])
    logits.float().exp_()
