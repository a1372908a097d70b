"""The runner's logits against transformers, on steps put together by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchradix.engine.layers.moe import ExpertWeights, PackedExperts
from batchradix.errors import OptionError, OutOfMemoryError
from batchradix_kernels.experts import experts_reference

TOLERANCE = 1e-4
rng = np.random.default_rng(7)
PROMPT = rng.integers(3, 97, 37).tolist()
LEFT = rng.integers(3, 97, 5).tolist()
RIGHT = rng.integers(3, 97, 8).tolist()


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    assert actual.shape == wanted.shape
    assert (actual - wanted).abs().max().item() < TOLERANCE


@pytest.fixture
def runner(request, lab, saved):
    kind = getattr(request, "param", "llama")
    runner = lab.open_runner(saved(kind)[0])
    runner.kind = kind
    yield runner
    runner.close()


def every_family(function):
    from_conftest = (
        "llama llama-tied llama-one-kv-head llama-no-groups llama-biases llama-rope-llama3 "
        "llama-rope-linear llama-rope-yarn mistral qwen2 qwen3 qwen3-tied mixtral qwen2-moe "
        "qwen3-moe deepseek-v2-lite deepseek-v2 deepseek-v3 deepseek-v3-no-groups "
        "deepseek-v3-halved-rope llama-rope-dynamic llama-rope-longrope mistral-sliding "
        "mixtral-sliding qwen2-sliding qwen3-sliding qwen3-moe-sliding gemma gemma2 gemma3 "
        "gemma3-capped phi3 phi3-sliding phi3-partial-longrope gpt-oss smollm3 smollm3-sliding "
        "smollm3-sliding-by-name olmo2 olmo3 granite"
    )
    return pytest.mark.parametrize("runner", from_conftest.split(), indirect=True)(function)


def test_the_families_under_test_are_all_there_are(lab):
    marks = test_a_whole_prompt_in_one_step_equals_transformers.pytestmark
    assert set(marks[0].args[1]) == set(lab.families)


@every_family
def test_a_whole_prompt_in_one_step_equals_transformers(runner, lab, expected):
    n = len(PROMPT)
    logits = lab.run(
        runner, PROMPT, range(n), range(11, 11 + n), causal=[(11, n, 0, n)], logits=range(n)
    )
    close(logits, expected(runner.kind, PROMPT))


@every_family
def test_a_parent_and_its_two_children_in_one_step_equal_two_separate_sequences(
    runner, lab, expected
):
    p, a, b = len(PROMPT), len(LEFT), len(RIGHT)
    n = p + a + b
    logits = lab.run(
        runner,
        PROMPT + LEFT + RIGHT,
        [*range(p), *range(p, p + a), *range(p, p + b)],
        [*range(50, 50 + p), *range(100, 100 + a), *range(120, 120 + b)],
        context=[(50, p, p, n)],
        causal=[(50, p, 0, p), (100, a, p, p + a), (120, b, p + a, n)],
        logits=[p - 1, p + a - 1, n - 1],
    )
    close(logits[0], expected(runner.kind, PROMPT)[-1])
    close(logits[1], expected(runner.kind, PROMPT + LEFT)[-1])
    close(logits[2], expected(runner.kind, PROMPT + RIGHT)[-1])


@every_family
def test_decoding_over_steps_with_private_tails_equals_transformers(runner, lab, expected):
    p, num_rows = len(PROMPT), 6
    answers = [rng.integers(3, 97, 9).tolist() for _ in range(num_rows)]
    lab.run(runner, PROMPT, range(p), range(p), causal=[(0, p, 0, p)])
    for step in range(9):
        tails = [(40 + 20 * row, step + 1, row, row + 1) for row in range(num_rows)]
        logits = lab.run(
            runner,
            [answer[step] for answer in answers],
            [p + step] * num_rows,
            [start + step for start, *_ in tails],
            context=[(0, p, 0, num_rows), *tails],
            logits=range(num_rows),
        )
    wanted = [expected(runner.kind, PROMPT + answer)[-1] for answer in answers]
    close(logits, torch.stack(wanted))


@pytest.mark.parametrize("chunk", [1, 2, 7, 36])
def test_a_prompt_cut_into_chunks_equals_the_whole(runner, lab, expected, chunk):
    rows = []
    for start in range(0, len(PROMPT), chunk):
        tokens = PROMPT[start : start + chunk]
        n = len(tokens)
        rows.append(
            lab.run(
                runner,
                tokens,
                range(start, start + n),
                range(3 + start, 3 + start + n),
                context=[(3, start, 0, n)] if start else [],
                causal=[(3 + start, n, 0, n)],
                logits=range(n),
            )
        )
    close(torch.cat(rows), expected("llama", PROMPT))


def test_prefill_and_decode_stand_side_by_side_in_one_step(runner, lab, expected):
    p, b = len(PROMPT), len(RIGHT)
    lab.run(runner, PROMPT, range(p), range(p), causal=[(0, p, 0, p)])
    lab.run(runner, LEFT[:1], [p], [60], context=[(0, p, 0, 1), (60, 1, 0, 1)])
    logits = lab.run(
        runner,
        [LEFT[1], *RIGHT],
        [p + 1, *range(p, p + b)],
        [61, *range(90, 90 + b)],
        context=[(0, p, 0, 1 + b), (60, 2, 0, 1)],
        causal=[(90, b, 1, 1 + b)],
        logits=[0, b],
    )
    close(logits[0], expected("llama", PROMPT + LEFT[:2])[-1])
    close(logits[1], expected("llama", PROMPT + RIGHT)[-1])


def test_a_chain_of_more_nodes_than_the_merge_has_levels_equals_one_sequence(runner, lab, expected):
    tokens = rng.integers(3, 97, 40).tolist()
    nodes = [(2 * i, 2) for i in range(20)]  # node i holds positions 2i, 2i + 1
    slots = rng.permutation(20) * 3
    context = [(slots[i], 2, 2 * (i + 1), 40) for i in range(19)]
    causal = [(slots[i], 2, start, start + 2) for i, (start, _) in enumerate(nodes)]
    placed = [slots[t // 2] + t % 2 for t in range(40)]
    logits = lab.run(
        runner, tokens, range(40), placed, context=context, causal=causal, logits=range(40)
    )
    close(logits, expected("llama", tokens))


def test_a_long_prompt_is_cut_without_a_seam(runner, lab, expected):
    tokens = rng.integers(3, 97, 150).tolist()
    logits = lab.run(
        runner, tokens, range(150), range(20, 170), causal=[(20, 150, 0, 150)], logits=range(150)
    )
    close(logits, expected("llama", tokens))


def test_a_row_gone_bad_spoils_no_other_row(runner, lab, expected):
    p, num_rows = len(PROMPT), 6
    lab.run(runner, PROMPT, range(p), range(p), causal=[(0, p, 0, p)])
    tails = [(40 + 10 * row, 3, row, row + 1) for row in range(num_rows)]
    for step in range(2):
        lab.run(
            runner,
            LEFT[step : step + 1] * num_rows,
            [p + step] * num_rows,
            [start + step for start, *_ in tails],
            context=[(0, p, 0, num_rows), *((s, step + 1, a, b) for s, _, a, b in tails)],
        )
    runner.poison_free([(60, 61)])  # the first slot of row 2
    logits = lab.run(
        runner,
        LEFT[2:3] * num_rows,
        [p + 2] * num_rows,
        [start + 2 for start, *_ in tails],
        context=[(0, p, 0, num_rows), *tails],
        logits=range(num_rows),
    )
    assert torch.isnan(logits[2]).all()
    good = [0, 1, 3, 4, 5]
    close(logits[good], expected("llama", PROMPT + LEFT[:3])[[-1] * 5])


def test_many_small_siblings_of_unlike_length_equal_their_sequences(runner, lab, expected):
    p = len(PROMPT)
    lengths = [1, 1, 2, 3, 3, 4, 5, 7, 9, 11]
    siblings = [rng.integers(3, 97, n).tolist() for n in lengths]
    ends = np.cumsum(lengths).tolist()
    starts = [end - n for end, n in zip(ends, lengths, strict=True)]
    logits = lab.run(
        runner,
        PROMPT + [t for s in siblings for t in s],
        [*range(p), *(p + i for n in lengths for i in range(n))],
        [*range(p), *(60 + 12 * j + i for j, n in enumerate(lengths) for i in range(n))],
        context=[(0, p, p, p + ends[-1])],
        causal=[(0, p, 0, p)]
        + [
            (60 + 12 * j, n, p + s, p + s + n)
            for j, (s, n) in enumerate(zip(starts, lengths, strict=True))
        ],
        logits=[p + end - 1 for end in ends],
    )
    close(logits, torch.stack([expected("llama", PROMPT + s)[-1] for s in siblings]))


def test_moved_keys_and_values_are_found_at_their_new_place(runner, lab, expected):
    p, a = len(PROMPT), len(LEFT)
    lab.run(runner, PROMPT, range(p), range(20, 20 + p), causal=[(20, p, 0, p)])
    runner.poison_free([(0, 20)])
    logits = lab.run(
        runner,
        LEFT,
        range(p, p + a),
        range(60, 60 + a),
        moves=[(20, 15, p)],  # overlaps itself
        context=[(15, p, 0, a)],
        causal=[(60, a, 0, a)],
        logits=[a - 1],
    )
    close(logits[0], expected("llama", PROMPT + LEFT)[-1])


def test_two_runs_may_change_places_in_one_step(runner, lab, expected):
    p = len(PROMPT)
    half = p // 2
    lab.run(runner, PROMPT, range(p), range(p), causal=[(0, p, 0, p)])
    logits = lab.run(
        runner,
        LEFT[:1],
        [p],
        [99],
        moves=[(0, half, half), (half, 0, half)],
        context=[
            (0, half, 0, 1),
            (half, half, 0, 1),
            (2 * half, p - 2 * half, 0, 1),
            (99, 1, 0, 1),
        ],
        logits=[0],
    )
    close(logits[0], expected("llama", PROMPT + LEFT[:1])[-1])


def test_moves_run_in_a_step_without_tokens(runner, lab, expected):
    p = len(PROMPT)
    lab.run(runner, PROMPT, range(p), range(20, 20 + p), causal=[(20, p, 0, p)])
    assert lab.run(runner, moves=[(20, 120, p)]).shape == (0, lab.vocab)
    runner.poison_free([(0, 120)])
    logits = lab.run(runner, LEFT[:1], [p], [7], context=[(120, p, 0, 1), (7, 1, 0, 1)], logits=[0])
    close(logits[0], expected("llama", PROMPT + LEFT[:1])[-1])


def test_a_held_state_gives_the_logits_of_its_own_step_until_it_is_freed(runner, lab, expected):
    p, a = len(PROMPT), len(LEFT)
    wanted = expected("llama", PROMPT)[-1]
    lab.run(runner, PROMPT, range(p), range(p), causal=[(0, p, 0, p)], holds=[(p - 1, 5), (3, 9)])
    assert runner.num_holds == 2
    alone = lab.run(runner, logits=[-1 - 5], free=[9])  # no token in this step
    assert runner.num_holds == 1
    mixed = lab.run(
        runner,
        LEFT,
        range(p, p + a),
        range(50, 50 + a),
        context=[(0, p, 0, a)],
        causal=[(50, a, 0, a)],
        logits=[-1 - 5, a - 1, -1 - 5],
        free=[5],
    )
    close(alone[0], wanted)
    close(mixed, torch.stack([wanted, expected("llama", PROMPT + LEFT)[-1], wanted]))
    assert runner.num_holds == 0


def test_a_state_held_and_wanted_and_freed_in_one_step_gives_its_logits(runner, lab, expected):
    p = len(PROMPT)
    logits = lab.run(
        runner,
        PROMPT,
        range(p),
        range(p),
        causal=[(0, p, 0, p)],
        holds=[(p - 1, 2)],
        logits=[-1 - 2, p - 1],
        free=[2],
    )
    close(logits, expected("llama", PROMPT)[[-1, -1]])
    assert runner.num_holds == 0


def test_a_step_that_wants_nothing_gives_no_row(runner, lab):
    assert lab.run(runner).shape == (0, lab.vocab)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(lab, saved, expected, dtype):
    runner = lab.open_runner(saved("llama")[0], dtype)
    p, a = len(PROMPT), len(LEFT)
    logits = lab.run(
        runner,
        PROMPT + LEFT,
        range(p + a),
        range(p + a),
        context=[(0, p, p, p + a)],
        causal=[(0, p, 0, p), (p, a, p, p + a)],
        logits=range(p + a),
    )
    wanted = expected("llama", PROMPT + LEFT)
    assert logits.dtype in (getattr(torch, dtype), torch.float32)
    cosine = torch.nn.functional.cosine_similarity(logits.float(), wanted, dim=-1)
    assert cosine.min().item() > 0.999


def test_a_closed_runner_may_be_closed_again(lab, saved):
    runner = lab.open_runner(saved("llama")[0])
    runner.close()
    runner.close()
    with pytest.raises(AssertionError):
        lab.run(runner)


def test_a_pool_larger_than_memory_is_refused_with_a_remedy(lab, saved):
    with pytest.raises(OutOfMemoryError, match="lower kv_tokens"):
        lab.open_runner(saved("llama")[0], num_slots=10**12)


@pytest.mark.parametrize("device", ["meteor", "xpu"])
def test_a_device_that_is_not_there_is_refused(lab, saved, device):
    with pytest.raises(OptionError, match=f"device '{device}'"):
        lab.open_runner(saved("llama")[0], device=device)


@pytest.mark.model
def test_the_real_small_model_equals_transformers_reading_the_same_gguf(lab):
    import transformers

    from batchradix.checkpoint.checkpoint import open_checkpoint

    path = open_checkpoint("smollm2-135m").path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokens = rng.integers(100, 49000, 24).tolist()
    runner = lab.open_runner(path)
    logits = lab.run(
        runner, tokens, range(24), range(24), causal=[(0, 24, 0, 24)], logits=range(24)
    )
    with torch.inference_mode():
        wanted = model(torch.tensor([tokens])).logits[0]
    assert (logits - wanted).abs().max().item() < 1e-3


@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe", "deepseek-v3"])
@pytest.mark.parametrize("packed", [True, False])
def test_experts_in_bfloat16_are_near_those_in_float32(
    lab, tmp_path, monkeypatch, kind, packed
) -> None:
    if packed and not PackedExperts.serves(64, 32):
        pytest.skip("this CPU has no products of bfloat16")
    if not packed:
        monkeypatch.setattr(PackedExperts, "serves", lambda *sizes: False)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    folder = lab.save_model(lab.build_model(kind, **sizes).bfloat16(), tmp_path)
    n = len(PROMPT)
    found = []
    for dtype in ("float32", "bfloat16"):
        runner = lab.open_runner(folder, dtype)
        logits = lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=[n - 1])
        found.append(logits[0].float())
        runner.close()
    assert 0 < (found[1] - found[0]).norm() / found[0].norm() < 0.05


def test_experts_with_stacked_weights_are_those_with_layers_of_their_own() -> None:
    torch.manual_seed(0)
    weights = ExpertWeights(gate_up=torch.randn(5, 16, 12), down=torch.randn(5, 12, 8))
    x = torch.randn(7, 12)
    expert_ids = torch.stack([torch.randperm(5)[:3] for _ in range(7)])
    shares = torch.rand(7, 3)
    wanted = experts_reference(x, expert_ids, shares, weights.gate_up, weights.down)
    torch.testing.assert_close(weights.experts()(x, expert_ids, shares), wanted)
