"""The comparison itself must be able to fail."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.testing import Tolerance, assert_matches, poison, poison_except

TOLERANCE = Tolerance(absolute=1e-3, relative=1e-3, cosine=1e-6)


@pytest.mark.parametrize(
    ("actual", "sentence"),
    [
        (torch.tensor([1.0, 2.0]), "is not"),
        (torch.tensor([1.0, float("nan"), 3.0]), "NaN"),
        (torch.tensor([1.0, 2.0, 3.1]), "element 2 is 3.1, expected 3"),
    ],
)
def test_a_wrong_result_is_described(actual, sentence):
    with pytest.raises(AssertionError, match=sentence):
        assert_matches(actual, torch.tensor([1.0, 2.0, 3.0]), TOLERANCE)


def test_many_small_errors_that_turn_the_whole_are_found():
    wanted = torch.full((1000,), 1e-3)
    actual = wanted * torch.linspace(0.2, 1.8, 1000)
    with pytest.raises(AssertionError, match="cosine"):
        assert_matches(actual, wanted, TOLERANCE)


def test_poison_spares_what_is_kept():
    tensor = poison_except(torch.ones(2, 5), 1, [1, 3])
    assert torch.isfinite(tensor[:, [1, 3]]).all()
    assert torch.isnan(tensor[:, [0, 2, 4]]).all()
    assert torch.isnan(poison(tensor)).all()
