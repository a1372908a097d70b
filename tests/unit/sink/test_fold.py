"""Which results belong together where a table holds some of its rows alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchradix.sink.fold import chosen_groups


@given(data=st.data(), inner=st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_chosen_rows_keep_their_groups_through_every_fold(
    data: st.DataObject, inner: list[int]
) -> None:
    cuts = data.draw(st.sets(st.integers(1, len(inner) - 1))) if len(inner) > 1 else set()
    outer = np.array([0, *sorted(cuts), len(inner)], dtype=np.int64)
    parts = np.concatenate([[0], np.cumsum(inner)]).astype(np.int64)
    whole = [
        [list(range(parts[group], parts[group + 1])) for group in range(first, last)]
        for first, last in pairwise(outer.tolist())
    ]
    wanted = sorted(data.draw(st.sets(st.integers(0, len(whole) - 1))))
    rows = np.array([n for row in wanted for part in whole[row] for n in part], dtype=np.int64)
    groups, starts = chosen_groups(parts, rows)
    found = [rows[a:b].tolist() for a, b in pairwise(starts)]
    assert found == [part for row in wanted for part in whole[row]]
    numbers, starts = chosen_groups(outer, groups)
    assert numbers.tolist() == wanted
    assert [found[a:b] for a, b in pairwise(starts)] == [whole[row] for row in wanted]
