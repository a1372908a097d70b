"""The output layer: the logits of all tokens, or of a few of them alone.

A few are computed in float64 from the rows of the weight that belong to them, and then rounded
to float32: so they depend neither on the rows beside them nor on the tokens beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from batchradix.engine.layers.linear import Linear

MAX_KEPT_ROWS = 8192
_MAX_COLUMNS = 4096  # tokens whose rows are in float64 at a time


class WeightRows(Protocol):
    """Rows of a weight by token id, in any floating dtype."""

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids), D], on the device of the model."""
        ...


class TableRows:
    """Rows of a table [V, D] that is in memory as it is."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(token_ids, dtype=torch.int64, device=self._table.device)
        return self._table.index_select(0, index)


class StoredRows:
    """Rows read from the model's file when they are first asked for, and kept.

    For a weight that is in memory only in a packed layout: grammars ask for the same few
    tokens again and again, so this takes far less than a second copy. ``read(ids)`` gives
    [len(ids), D].
    """

    def __init__(self, read: Callable[[Sequence[int]], torch.Tensor]) -> None:
        self._read = read
        self._places: dict[int, int] = {}
        self._kept: torch.Tensor | None = None

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        missing = [i for i in token_ids if i not in self._places]
        if missing and len(self._places) + len(missing) > MAX_KEPT_ROWS:
            self._places.clear()
            self._kept = None
            missing = list(token_ids)
        if missing:
            first = len(self._places)
            self._places.update({token: first + i for i, token in enumerate(missing)})
            rows = self._read(missing)
            self._kept = rows if self._kept is None else torch.cat((self._kept, rows))
        assert self._kept is not None
        index = torch.tensor([self._places[i] for i in token_ids], device=self._kept.device)
        return self._kept.index_select(0, index)


class OutputHead:
    """``linear`` gives all logits, ``rows`` the parts of its weight for `few`. Logits are
    multiplied by ``scale``, and with a ``softcap`` become cap · tanh(logit / cap)."""

    def __init__(
        self, linear: Linear, rows: WeightRows, scale: float = 1.0, softcap: float | None = None
    ) -> None:
        self._linear = linear
        self._rows = rows
        self._scale = scale
        self._softcap = softcap

    def all(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Normalised hidden states to [R, V], in the model's dtype or float32."""
        logits = self._linear(x_RD)
        if self._scale == 1.0 and self._softcap is None:
            return logits
        return self._finish(logits.float())

    def few(self, x_RD: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """float32[R, len(token_ids)]: the logits of these (at least one) tokens alone."""
        x_RD = x_RD.double()
        parts = [
            self._finish(x_RD @ self._rows(token_ids[at : at + _MAX_COLUMNS]).double().T).float()
            for at in range(0, len(token_ids), _MAX_COLUMNS)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap, in place."""
        if self._scale != 1.0:
            logits.mul_(self._scale)
        if self._softcap is not None:
            # On a CPU the last bits of tanh depend on where in a tensor a number stands.
            for rows in logits.unbind(0) if logits.is_cpu else (logits,):
                rows.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
