from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchradix.engine.sampling import Sampler
from batchradix.types import RowSettings

GREEDY = RowSettings()
INF = float("inf")


def logits_of(seed, num_rows, vocab_size, spread=3.0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(
        (rng.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)
    )


def drawn_many(make_batch, row, s, num_draws=4000, **parts):
    """Token ids of one row drawn with many keys."""
    batch = make_batch([s] * num_draws, **parts)
    x = row[None].repeat(num_draws, 1)
    return Sampler(len(row), len(row)).sample(x, batch).token_ids


def test_greedy_takes_the_first_of_equal_largest_logits(make_batch):
    x = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    out = Sampler(4, 4).sample(x, make_batch([GREEDY, GREEDY]))
    assert out.token_ids.tolist() == [1, 0]
    assert out.token_ids.dtype == np.int64


@pytest.mark.parametrize("s", [GREEDY, RowSettings(temperature=1.0)])
def test_the_padded_tail_of_the_vocabulary_is_never_sampled(make_batch, s):
    x = torch.zeros(50, 16)
    x[:, 10:] = 100.0
    x[0, 12] = float("nan")
    out = Sampler(16, 10).sample(x, make_batch([s] * 50))
    assert (out.token_ids < 10).all()
    assert not out.non_finite.any()


def test_a_tokenizer_larger_than_the_model_is_no_trouble(make_batch):
    out = Sampler(4, 9).sample(torch.eye(4), make_batch([GREEDY] * 4))
    assert out.token_ids.tolist() == [0, 1, 2, 3]


def test_no_rows_give_no_tokens(make_batch):
    assert len(Sampler(4, 4).sample(torch.zeros(0, 4), make_batch([])).token_ids) == 0


@pytest.mark.parametrize(
    "s",
    [GREEDY, RowSettings(temperature=0.7), RowSettings(repetition_penalty=1.5)],
    ids=["greedy", "drawn", "penalised"],
)
@pytest.mark.parametrize("bad", [float("nan"), INF, "all -inf", "all nan"])
def test_a_row_that_is_not_finite_is_flagged_and_leaves_the_others_alone(make_batch, s, bad):
    x = logits_of(1, 3, 40)
    alone = Sampler(40, 40).sample(x[[0, 2]].clone(), make_batch([s] * 2, rng_key=KEYS[[0, 2]]))
    if bad == "all -inf":
        x[1] = -INF
    elif bad == "all nan":
        x[1] = float("nan")
    else:
        x[1, 17] = bad
    out = Sampler(40, 40).sample(x, make_batch([s] * 3, rng_key=KEYS[:3]))
    assert out.non_finite.tolist() == [False, True, False]
    assert not out.nothing_allowed.any()
    assert out.token_ids[[0, 2]].tolist() == alone.token_ids.tolist()


def test_a_nan_where_the_mask_forbids_is_flagged_too(make_batch):
    x = torch.zeros(1, 32)
    x[0, 5] = float("nan")
    mask = torch.tensor([[1]], dtype=torch.int32)
    out = Sampler(32, 32).sample(x, make_batch([GREEDY], bitmask=mask, masked_rows=YES))
    assert out.non_finite.all()


def test_a_mask_that_allows_nothing_is_told_apart(make_batch):
    mask = torch.zeros(1, 1, dtype=torch.int32)
    out = Sampler(32, 32).sample(
        torch.zeros(1, 32), make_batch([GREEDY], bitmask=mask, masked_rows=YES)
    )
    assert out.non_finite.tolist() == out.nothing_allowed.tolist() == [True]


def test_some_logits_of_minus_infinity_are_legal_and_never_drawn(make_batch):
    row = torch.tensor([-INF, 0.0, -INF, 0.0])
    for s in (RowSettings(temperature=1.0), RowSettings(temperature=1.0, top_p=0.9)):
        assert set(drawn_many(make_batch, row, s, 200).tolist()) == {1, 3}


YES = np.array([True])
KEYS = np.array([11, 22, 33, 44], dtype=np.uint64)


@pytest.mark.parametrize(
    "s",
    [
        RowSettings(temperature=1.0),
        RowSettings(temperature=0.5),
        RowSettings(temperature=2.0, top_k=4),
        RowSettings(temperature=1.0, top_p=0.8),
        RowSettings(temperature=1.0, min_p=0.2),
        RowSettings(temperature=1.5, top_k=6, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_draws_follow_the_distribution_of_transformers(make_batch, s):
    row = torch.tensor([1.0, -0.5, 2.0, 0.3, 1.7, -2.0, 0.0, 0.9])
    probs = warped(row[None], s)[0].softmax(0).double().numpy()
    n = 20_000
    counts = np.bincount(drawn_many(make_batch, row, s, n), minlength=8)
    assert (counts[probs == 0] == 0).all()
    kept = probs > 0
    chi_square = ((counts - n * probs)[kept] ** 2 / (n * probs)[kept]).sum()
    assert chi_square < 35  # at most 7 degrees of freedom: exceeded once in 80,000


def test_consecutive_positions_of_one_key_follow_the_distribution(make_batch):
    n = 20_000
    batch_parts = {"rng_key": np.full(n, 77, dtype=np.uint64), "num_generated": np.arange(n)}
    row = torch.tensor([0.0, 1.0, 2.0])
    ids = drawn_many(make_batch, row, RowSettings(temperature=1.0), n, **batch_parts)
    probs = row.softmax(0).numpy()
    assert np.abs(np.bincount(ids) / n - probs).max() < 0.015
    again = np.bincount(ids[1:][ids[:-1] == 2], minlength=3)
    assert np.abs(again / again.sum() - probs).max() < 0.02


def warped(x, s, sequence=None):
    """transformers' own processors and warpers, in the order of its generate()."""
    steps = LogitsProcessorList()
    if s.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.temperature not in (0, 1):
        steps.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        steps.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        steps.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        steps.append(MinPLogitsWarper(s.min_p))
    return steps(sequence, x.clone())


some_settings = st.builds(
    RowSettings,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 20, 299, 300, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(some_settings, min_size=1, max_size=9), st.integers(0, 10**6), st.data())
def test_a_rows_token_is_the_same_alone_and_in_any_batch(make_batch, rows, seed, data):
    vocab_size, n = 300, len(rows)
    rng = np.random.default_rng(seed)
    x = logits_of(seed, n, vocab_size)
    if data.draw(st.booleans()):
        x = x.bfloat16().float()  # many ties
    parts = {
        "rng_key": rng.integers(0, 2**63, n).astype(np.uint64),
        "num_generated": rng.integers(0, 50, n),
        "prompt_ids": [rng.integers(0, vocab_size, 7).astype(np.uint32) for _ in rows],
        "generated_ids": [rng.integers(0, vocab_size, 5).tolist() for _ in rows],
        "bitmask": torch.from_numpy(rng.integers(0, 2**31, (n, 10)).astype(np.int32)),
        "masked_rows": rng.random(n) < 0.5,
    }
    sampler = Sampler(vocab_size, 290)
    order = data.draw(st.permutations(range(n)))

    def run(chosen):
        picked = {
            k: [v[i] for i in chosen] if isinstance(v, list) else v[list(chosen)]
            for k, v in parts.items()
        }
        return sampler.sample(x[list(chosen)], make_batch([rows[i] for i in chosen], **picked))

    together = run(order).token_ids.tolist()
    assert together == [run([i]).token_ids[0] for i in order]


@settings(deadline=None, max_examples=60)
@given(some_settings, st.integers(0, 10**6))
def test_only_tokens_that_transformers_keeps_are_drawn_and_all_of_them(make_batch, s, seed):
    if s.temperature == 0:
        return
    vocab_size = 12
    row = logits_of(seed, 1, vocab_size, spread=1.5)[0]
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, vocab_size, 3)
    generated = rng.integers(0, vocab_size, 2).tolist()
    sequence = torch.tensor([[*prompt.tolist(), *generated]])
    adjusted = warped(row[None], RowSettings(repetition_penalty=s.repetition_penalty), sequence)
    for t in set(generated):
        adjusted[0, t] -= s.presence_penalty + s.frequency_penalty * generated.count(t)
    plain = RowSettings(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)
    probs = warped(adjusted, plain)[0].softmax(0)
    n = 600
    ids = drawn_many(
        make_batch,
        row,
        s,
        n,
        prompt_ids=[prompt.astype(np.uint32)] * n,
        generated_ids=[generated] * n,
    )
    assert (probs[np.unique(ids)] > 0).all()
    assert set((probs > 0.03).nonzero().flatten().tolist()) <= set(ids.tolist())


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([0.5, 1.1, 2.0]), st.integers(0, 10**6))
def test_repetition_penalty_on_greedy_rows_equals_transformers(make_batch, penalty, seed):
    vocab_size = 50
    x = logits_of(seed, 4, vocab_size)
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, vocab_size, (4, 20))
    answers = rng.integers(0, vocab_size, (4, 6))
    expected = warped(
        x,
        RowSettings(repetition_penalty=penalty),
        torch.from_numpy(np.concatenate([prompts, answers], axis=1)),
    ).argmax(1)
    batch = make_batch(
        [RowSettings(repetition_penalty=penalty)] * 4,
        prompt_ids=list(prompts.astype(np.uint32)),
        generated_ids=answers.tolist(),
    )
    assert Sampler(vocab_size, vocab_size).sample(x, batch).token_ids.tolist() == expected.tolist()


def test_presence_and_frequency_count_the_answer_and_not_the_prompt(make_batch):
    x = torch.tensor([[1.0, 0.9, 0.0]] * 3)
    s = [
        RowSettings(presence_penalty=0.5),
        RowSettings(frequency_penalty=0.06),
        RowSettings(frequency_penalty=0.06),
    ]
    batch = make_batch(
        s,
        prompt_ids=[np.array([0, 0, 0], dtype=np.uint32)] * 3,
        generated_ids=[[], [0], [0, 0]],
    )
    assert Sampler(3, 3).sample(x, batch).token_ids.tolist() == [0, 0, 1]


def test_neutral_values_change_nothing(make_batch):
    x = logits_of(3, 200, 64)
    plain = RowSettings(temperature=1.0)
    neutral = RowSettings(temperature=1.0, top_k=64, top_p=1.0, min_p=0.0)
    sampler = Sampler(64, 64)
    prompts = {"prompt_ids": [np.arange(9, dtype=np.uint32)] * 200, "generated_ids": [[1]] * 200}
    one = sampler.sample(x.clone(), make_batch([plain] * 200))
    other = sampler.sample(x.clone(), make_batch([neutral] * 200, **prompts))
    assert one.token_ids.tolist() == other.token_ids.tolist()


def test_cuts_that_cut_nothing_off_draw_the_same_tokens(make_batch):
    row = logits_of(4, 1, 64, spread=1.0)[0]
    plain = drawn_many(make_batch, row, RowSettings(temperature=1.0), 500)
    for s in (
        RowSettings(temperature=1.0, top_k=63),
        RowSettings(temperature=1.0, top_p=0.99999),
        RowSettings(temperature=1.0, min_p=1e-6),
    ):
        assert (drawn_many(make_batch, row, s, 500) == plain).mean() > 0.95


def test_tiny_top_p_and_top_k_of_one_are_greedy(make_batch):
    row = logits_of(5, 1, 700)[0]
    for s in (RowSettings(temperature=3.0, top_p=1e-9), RowSettings(temperature=3.0, top_k=1)):
        assert set(drawn_many(make_batch, row, s, 50).tolist()) == {int(row.argmax())}


def test_of_equally_likely_tokens_the_nucleus_takes_the_lowest_ids(make_batch):
    ids = drawn_many(make_batch, torch.zeros(8), RowSettings(temperature=1.0, top_p=0.5), 400)
    assert set(ids.tolist()) == {0, 1, 2, 3}


def test_a_nucleus_wider_than_the_first_look_is_whole(make_batch):
    """700 equally likely tokens, half of them kept: more than are looked at first."""
    s = RowSettings(temperature=1.0, top_p=0.5)
    ids = drawn_many(make_batch, torch.zeros(700), s, 6000)
    assert set(ids.tolist()) == set(range(350))
    flat = torch.linspace(0, -0.001, 700)
    ids = drawn_many(make_batch, flat, s, 6000)
    assert set(ids.tolist()) == set(range(350))


def test_extreme_temperatures_do_no_harm(make_batch):
    row = torch.tensor([80.0, 79.0, -1000.0])
    cold = drawn_many(make_batch, row, RowSettings(temperature=1e-4), 50)
    assert set(cold.tolist()) == {0}
    assert set(drawn_many(make_batch, row, RowSettings(temperature=1e-9), 50).tolist()) == {0}
    hot = drawn_many(make_batch, row, RowSettings(temperature=1e30), 300)
    assert set(hot.tolist()) == {0, 1, 2}


def test_mixed_rows_keep_their_places(make_batch):
    x = torch.full((4, 40), -50.0)
    x[np.arange(4), [7, 3, 9, 1]] = 50.0
    kinds = [
        RowSettings(temperature=1.0, top_p=0.9),
        GREEDY,
        RowSettings(temperature=1.0, top_k=2),
        RowSettings(temperature=1.0),
    ]
    assert Sampler(40, 40).sample(x, make_batch(kinds)).token_ids.tolist() == [7, 3, 9, 1]
