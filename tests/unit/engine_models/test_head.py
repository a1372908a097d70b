"""The output layer of a few tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchradix.engine.layers import head
from batchradix.engine.layers.head import OutputHead, StoredRows, TableRows
from batchradix.engine.layers.linear import make_linear

PROMPT = list(range(3, 40))


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3-tied"])
def test_the_logits_of_a_few_tokens_are_those_of_the_whole_layer(kind, lab, saved) -> None:
    runner = lab.open_runner(saved(kind)[0])
    n = len(PROMPT)
    runner.launch(
        lab.make_step(PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=[0, 5, n - 1])
    )
    whole = runner.collect()
    assert whole.shape == (3, lab.vocab)
    for rows, ids in (([0, 2], [1, 7, 96]), ([0, 1, 2], [5]), ([2], list(range(lab.vocab)))):
        few = runner.collect_few(np.array(rows), np.array(ids))
        assert few.dtype == torch.float32
        assert (few - whole[rows][:, ids]).abs().max() < 1e-5
        assert torch.equal(runner.collect(np.array(rows)), whole[rows])
    runner.close()


def test_few_logits_do_not_depend_on_what_is_computed_beside_them() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 64)
    layer = OutputHead(make_linear(weight), TableRows(weight))
    x = torch.randn(9, 64)
    together = layer.few(x, list(range(300)))
    assert torch.equal(layer.few(x[4:5], [17, 250]), together[4:5, [17, 250]])


def test_rows_are_read_once_and_forgotten_when_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head, "MAX_KEPT_ROWS", 5)
    weight = torch.randn(50, 4)
    asked: list[list[int]] = []

    def read(ids):
        asked.append(list(ids))
        return weight[list(ids)]

    rows = StoredRows(read)
    for ids in ([3, 1], [1, 3, 4], [4], [10, 11], [4, 12], [3, 1]):
        assert torch.equal(rows(ids), weight[ids])
    assert asked == [[3, 1], [4], [10, 11], [4, 12], [3, 1]]
    many = list(range(20))
    assert torch.equal(rows(many), weight[many])


def test_many_columns_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(50, 8), torch.randn(3, 8)
    layer = OutputHead(make_linear(weight), TableRows(weight))
    whole = layer.few(x, list(range(50)))
    monkeypatch.setattr(head, "_MAX_COLUMNS", 7)
    assert torch.equal(layer.few(x, list(range(50))), whole)
