"""The comparison lets ties pass and nothing else; the oracle is transformers' own generation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EOS_ID = 99


@pytest.fixture
def row(i3: ModuleType) -> Any:
    """An oracle row in which only the third token is nearly a tie."""
    return i3.OracleRow(
        prompt=(1, 2),
        max_tokens=4,
        ids=(10, 11, 12, 13),
        second=(20, 21, 22, 23),
        gaps=(1, 1, 0, 1),
    )


def run(
    i3: ModuleType, row: Any, ids: Sequence[int], *, ended: bool = False, rest: Any = None
) -> Any:
    """The comparison of one answer; ``rest`` is what the oracle says after a tie."""

    def continue_from(prompt: Sequence[int], max_tokens: int) -> Any:
        assert rest is not None, "the oracle is asked without a tie"
        assert (tuple(prompt), max_tokens) == (rest.prompt, rest.max_tokens)
        return rest

    answer = i3.Answer(ids=tuple(ids), ended=ended)
    return i3.compare([row], {0: answer}, [EOS_ID], continue_from)


def test_equal_ids_pass_and_their_steps_are_counted(i3: ModuleType, row: Any) -> None:
    result = run(i3, row, [10, 11, 12, 13])
    result.check()
    assert (result.num_rows, result.num_steps, result.num_ties) == (1, 4, 0)


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([10, 21, 12, 13], id="the second best where the gap is wide"),
        pytest.param([10, 11, 30, 13], id="another token at a tie"),
        pytest.param([10, 11, 12], id="too short"),
        pytest.param([10, 11, 12, 13, 14], id="too long"),
        pytest.param([], id="empty"),
    ],
)
def test_other_ids_fail(i3: ModuleType, row: Any, ids: list[int]) -> None:
    with pytest.raises(AssertionError, match="1 of 1 rows differ"):
        run(i3, row, ids).check()


@pytest.mark.parametrize("last", [13, 14])
def test_after_a_tie_the_oracle_goes_on_from_our_token(i3: ModuleType, row: Any, last: int) -> None:
    rest = i3.OracleRow(
        prompt=(1, 2, 10, 11, 22), max_tokens=1, ids=(14,), second=(24,), gaps=(1.0,)
    )
    result = run(i3, row, [10, 11, 22, last], rest=rest)
    assert bool(result.failures) == (last != 14)
    assert result.num_steps == 4
    assert result.num_ties == 1


def test_a_tie_at_the_last_token_needs_no_continuation(i3: ModuleType) -> None:
    row = i3.OracleRow(prompt=(1,), max_tokens=1, ids=(10,), second=(20,), gaps=(0.0,))
    assert not run(i3, row, [20]).failures
    assert run(i3, row, [20, 21]).failures


def test_an_answer_ends_where_the_oracle_does(i3: ModuleType) -> None:
    row = i3.OracleRow(
        prompt=(1,), max_tokens=5, ids=(10, EOS_ID), second=(20, 21), gaps=(1.0, 1.0)
    )
    assert not run(i3, row, [10], ended=True).failures
    assert run(i3, row, [10], ended=False).failures
    assert run(i3, row, [], ended=True).failures
    assert run(i3, row, [10, 11], ended=True).failures


def test_an_end_that_ties_is_right_too(i3: ModuleType) -> None:
    row = i3.OracleRow(
        prompt=(1,), max_tokens=2, ids=(10, 11), second=(20, EOS_ID), gaps=(1.0, 0.0)
    )
    result = run(i3, row, [10], ended=True)
    assert not result.failures
    assert result.num_ties == 1


def test_every_row_needs_an_answer(i3: ModuleType, row: Any) -> None:
    with pytest.raises(AssertionError):
        i3.compare([row], {}, [EOS_ID], None).check()


def test_many_ties_are_no_ties(i3: ModuleType) -> None:
    i3.Comparison(num_rows=1, num_steps=2000, num_ties=2).check()
    with pytest.raises(AssertionError, match="3 ties in 2000 steps"):
        i3.Comparison(num_rows=1, num_steps=2000, num_ties=3).check()


def test_saved_rows_come_back(i3: ModuleType, row: Any, tmp_path: Path) -> None:
    i3.save_rows(tmp_path / "rows.json.gz", [row], model="some")
    assert i3.load_rows(tmp_path / "rows.json.gz") == ([row], {"model": "some"})


def test_the_oracle_generates_what_transformers_generates(
    i3: ModuleType, tiny_model_folder: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_model_folder("random", family="llama", prepend_bos=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    alone = i3.Alone(model, [258, 263])
    for prompt in (b"a", b"What is a river?", b"stone " * 9):
        row = alone(list(prompt), 12)
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=12,
                return_dict_in_generate=True,
                output_logits=True,
            )
        assert list(row.ids) == out.sequences[0, len(prompt) :].tolist()
        best = torch.cat(out.logits).topk(2)
        assert list(row.second) == best.indices[:, 1].tolist()
        assert row.gaps == pytest.approx((best.values[:, 0] - best.values[:, 1]).tolist(), abs=1e-4)
