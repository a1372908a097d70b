"""The check for machines with a GPU: its parts hold on a CPU, and its report hides nothing."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from batchradix.engine.attention.mla_torch import TorchMla
from batchradix.engine.attention.registry import BACKENDS, MLA_BACKENDS
from batchradix.engine.attention.torch_backend import TorchAttention
from batchradix.errors import OutOfMemoryError
from batchradix.types import Completion, FinishReason
from batchradix_kernels.tree_attention.reference import (
    tree_attention_lse_reference,
    tree_attention_reference,
)

FOLDER = Path(__file__).parents[3] / "benchmarks"
CPU = torch.device("cpu")
MODULES = (
    *("check", "parts", "report", "measure", "kernels", "kv", "attention", "latents"),
    *("models", "rows", "judge", "engine", "large"),
)
EMPTY: Mapping[str, Any] = {
    "checks": [],
    "speeds": [],
    "skips": [],
    "error": None,
    "seconds": 12.3,
    "limit_s": 60.0,
}
MACHINE = {"device": "cuda", "name": "H200", "versions": {"torch": "2.11.0"}, "seconds": 300.0}


@pytest.fixture
def gpu() -> Iterator[SimpleNamespace]:
    """The modules of the check."""
    path, before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: import_module(f"gpu_{name}") for name in MODULES})
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if name.startswith("gpu_") or name in ("peer_models", "random_model"):
                del sys.modules[name]


@pytest.fixture
def setting(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CPU, everything timed once."""
    monkeypatch.setattr(gpu.measure, "REPEAT", 1)
    monkeypatch.setattr(gpu.measure, "WARM_UP", 0)
    return gpu.measure.Setting(device=CPU)


def records(gpu: SimpleNamespace, kind: str, some: list[Any]) -> list[Any]:
    return [one for one in some if isinstance(one, getattr(gpu.measure, kind))]


def test_every_part_names_a_function_that_is_there(gpu):
    for part in gpu.parts.PARTS.values():
        assert callable(getattr(import_module(part.module), part.function))
    assert set(gpu.parts.KERNELS) == set(gpu.kernels.KERNELS)


@pytest.mark.parametrize(
    "name",
    [
        *("rms_norm", "swiglu", "rope", "rope_delta", "masked_sampling"),
        *("kv_store", "kv_move", "lse_merge"),
        *("latent_store", "mla_attention", "moe_routing", "moe_gemm"),
    ],
)
def test_each_kernel_agrees_and_is_timed_on_a_cpu(gpu, setting, name, monkeypatch):
    kernel = gpu.kernels.KERNELS[name]
    some = gpu.measure.Kernel(
        lambda device, dtype: itertools.islice(kernel.compare(device, dtype), 7), kernel.calls
    )
    monkeypatch.setattr(gpu.kernels, "KERNELS", {name: some})
    found = list(gpu.kernels.compare(setting, name))
    assert len(found) >= 9
    assert [one for one in found if not one.ok] == []
    timed = list(gpu.kernels.speed(setting))
    assert timed
    assert all(one.us > 0 and one.unit in ("GB/s", "TFLOP/s") for one in timed)
    assert len({one.label for one in timed}) == len(timed)
    assert timed[0].label.startswith(name)


def test_the_ceilings_are_rates(gpu, setting):
    copy, product = gpu.kernels.ceilings(setting)
    assert (copy.label, copy.unit, product.unit) == ("copy", "GB/s", "TFLOP/s")
    assert copy.rate > 0
    assert product.rate > 0


def test_a_wrong_kernel_is_found_and_ends_nothing(gpu):
    def compare(device, dtype):
        one = torch.ones(3, device=device, dtype=dtype)
        for label, actual in (("wrong", one + 1), ("broken", one * torch.nan), ("right", one)):
            yield gpu.measure.Comparison(label, actual, one.double(), gpu.kernels.TOLERANCES[dtype])

    found = list(gpu.measure.compare_all(compare, CPU))
    assert [one.ok for one in found] == [False, False, True] * 3
    assert "expected 1" in found[0].error
    assert found[0].label == "wrong float32"


def test_the_dense_reference_is_the_one_that_goes_query_by_query(gpu):
    torch.manual_seed(0)
    for case in gpu.attention.cases(is_small=True):
        q = torch.randn(len(case.slots), 6, 20)
        k, v = torch.randn(2, 2, case.end, 20)
        out, lse = gpu.attention.dense_reference(q, k, v, case, 0.3)
        pieces = (case.context, case.causal)
        wanted = tree_attention_reference(q, k, v, *pieces, scale=0.3)
        torch.testing.assert_close(out.float(), wanted)
        wanted = tree_attention_lse_reference(q, k, *pieces, scale=0.3)
        torch.testing.assert_close(lse.float(), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_attention_agrees_and_says_once_why_a_backend_is_left_out(gpu, setting, dtype):
    said = list(gpu.attention.compare(setting, dtype))
    found = records(gpu, "Found", said)
    assert len(found) >= 40
    assert [one for one in found if not one.ok] == []
    whys = [one.why for one in records(gpu, "Skipped", said)]
    assert any("triton" in why for why in whys)
    assert len(whys) == len(set(whys))


class Deaf(TorchAttention):
    """Leaves out the last piece of every step."""

    def plan(self, step):
        some = step.context[:-1] if len(step.context) > 1 else step.context
        return super().plan(type(step)(**{**_fields(step), "context": some}))


def _fields(step: Any) -> dict[str, Any]:
    return {name: getattr(step, name) for name in type(step).__dataclass_fields__}


def test_attention_that_leaves_something_out_is_found(gpu, setting, monkeypatch):
    monkeypatch.setitem(BACKENDS, "torch", Deaf)
    monkeypatch.setattr(gpu.attention, "HEADS", gpu.attention.HEADS[1:2])
    wrong = [
        one
        for one in records(gpu, "Found", list(gpu.attention.compare(setting, "float32")))
        if not one.ok
    ]
    assert wrong
    assert all(one.label.startswith("torch") for one in wrong)


class Broken(TorchAttention):
    def plan(self, step):
        raise RuntimeError("out of shared memory")


def test_attention_that_raises_is_found_each_time_and_ends_nothing(gpu, setting, monkeypatch):
    monkeypatch.setitem(BACKENDS, "torch", Broken)
    monkeypatch.setattr(gpu.attention, "HEADS", gpu.attention.HEADS[1:2])
    said = list(gpu.attention.compare(setting, "float32"))
    wrong = [one for one in records(gpu, "Found", said) if not one.ok]
    assert len(wrong) == 5
    assert {one.error for one in wrong} == {"RuntimeError: out of shared memory"}
    assert "in plan" in wrong[0].detail
    timed = list(gpu.attention.speed(setting))
    assert {one.error for one in records(gpu, "Found", timed)} == {one.error for one in wrong}


def test_a_kernel_that_raises_in_one_dtype_is_compared_in_the_others(gpu):
    def compare(device, dtype):
        one = torch.ones(3, device=device, dtype=dtype)
        yield gpu.measure.Comparison("first", one, one, gpu.measure.EXACT)
        if dtype == torch.float16:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore.")
        yield gpu.measure.Comparison("second", one, one, gpu.measure.EXACT)

    found = list(gpu.measure.compare_all(compare, CPU))
    assert [one.ok for one in found] == [True, True, True, False, True, True]
    assert found[3].label == "all further in float16"
    assert found[3].error == "memory ran out: CUDA out of memory."


def test_pages_hold_each_slot_of_each_piece_in_order(gpu):
    case = gpu.attention.cases(is_small=True)[0]
    where, context, _, table = gpu.attention._paged(case, 4)
    assert len(set(where[case.used].tolist())) == len(case.used)
    for (start, length, *_), (first, n, *_) in zip(case.context, context.tolist(), strict=True):
        at = np.arange(length)
        assert n == length
        assert (where[start : start + n] == table[first + at // 4] * 4 + at % 4).all()


def test_attention_is_timed_beside_what_it_must_read_and_multiply(gpu, setting):
    timed = records(gpu, "Timed", list(gpu.attention.speed(setting)))
    assert {one.unit for one in timed if "decode" in one.label} == {"GB/s"}
    assert {one.unit for one in timed if "decode" not in one.label} == {"TFLOP/s"}
    assert {one.label.split(": ")[1] for one in timed} >= {"torch"}
    decode, cascade, prefill = (work.bench.step for work in gpu.attention.works(is_small=True))
    shape = gpu.attention.shape_of((4, 2, 8), torch.bfloat16, CPU)
    assert gpu.attention.kv_bytes(decode, shape) == 4 * 40 * 2 * 2 * 8 * 2
    pairs = 8 * 64 + 2 * 4 * 32 + 8 * 4
    assert gpu.attention.num_flops(cascade, shape) == 4 * pairs * 4 * 8
    assert gpu.attention.num_flops(prefill, shape) == 4 * (16 * 32 + 16 * 17 / 2) * 4 * 8


def test_latent_attention_agrees_and_says_once_why_a_backend_is_left_out(gpu, setting):
    said = list(gpu.latents.compare(setting))
    found = records(gpu, "Found", said)
    assert [one for one in found if not one.ok] == []
    of_torch = [one for one in found if one.label.startswith("torch")]
    assert len(of_torch) == 3 * 2 * len(gpu.attention.cases(is_small=True))
    assert any(one.label.startswith("pool after") for one in found)
    whys = [one.why for one in records(gpu, "Skipped", said)]
    assert {name for name in ("triton", "flashinfer") if any(name in why for why in whys)} == {
        *("triton", "flashinfer")
    }
    assert len(whys) == len(set(whys))


def test_latent_attention_that_leaves_something_out_is_found(gpu, setting, monkeypatch):
    class DeafMla(TorchMla):
        def plan(self, step):
            some = step.context[:-1] if len(step.context) > 1 else step.context
            return super().plan(type(step)(**{**_fields(step), "context": some}))

    monkeypatch.setitem(MLA_BACKENDS, "torch", DeafMla)
    monkeypatch.setattr(gpu.latents, "COMPARED", gpu.latents.COMPARED[:1])
    found = records(gpu, "Found", list(gpu.latents.compare(setting)))
    wrong = [one for one in found if not one.ok]
    assert wrong
    assert all(one.label.startswith("torch") for one in wrong)


def test_latent_attention_is_timed_beside_what_it_must_read_and_multiply(gpu, setting):
    timed = records(gpu, "Timed", list(gpu.latents.speed(setting)))
    assert {one.unit for one in timed if "decode" in one.label} == {"GB/s"}
    assert {one.unit for one in timed if "decode" not in one.label} == {"TFLOP/s"}
    assert {one.label.split(": ")[1] for one in timed} >= {"torch"}
    decode = gpu.attention.works(is_small=True)[0].bench.step
    shape = gpu.latents.shape_of((4, 64, 16, 32, 32), torch.bfloat16, CPU)
    assert gpu.latents.latent_bytes(decode, shape) == 4 * 40 * (64 + 16) * 2
    absorbed = 4 * 40 * (2 * 64 + 16) + 4 * 64 * (32 + 32)
    assert gpu.latents.num_flops(decode, shape) == 2 * 4 * absorbed
    chunk = gpu.attention.prefill(num_tokens=200, num_prefix=32).step
    pairs = 200 * 32 + 200 * 201 / 2
    expanded = pairs * (32 + 16 + 32) + (32 + 200) * 64 * (32 + 32)
    assert gpu.latents.num_flops(chunk, shape) == 2 * 4 * expanded


def test_tiny_models_answer_as_transformers_with_every_option_there_is(gpu, setting, monkeypatch):
    monkeypatch.setattr(gpu.engine, "FAMILIES", ["Qwen2"])
    said = list(gpu.engine.tiny(setting, "torch"))
    found, skipped = records(gpu, "Found", said), records(gpu, "Skipped", said)
    assert [one for one in found if not one.ok] == []
    assert len(found) + len(skipped) == len(gpu.engine.VARIANTS)
    assert len(found) >= 5
    assert all("24 rows" in one.detail for one in found)
    assert all("GPU" in one.why for one in skipped)


def test_tiny_models_of_every_family_answer_as_transformers(gpu, setting, monkeypatch):
    monkeypatch.setattr(gpu.engine, "VARIANTS", {"as it is": {}})
    found = list(gpu.engine.tiny(setting, "torch"))
    assert [one.label.split(",")[0] for one in found] == ["Llama", "Mistral", "Qwen2", "Qwen3"]
    assert [one for one in found if not one.ok] == []


def test_tiny_models_with_latents_or_experts_answer_as_transformers(gpu, setting, monkeypatch):
    wanted = ("as it is", "in a small pool", "without tree")
    some = {name: gpu.engine.VARIANTS[name] for name in wanted}
    monkeypatch.setattr(gpu.engine, "VARIANTS", some)
    found = list(gpu.engine.tiny_experts(setting, "torch"))
    assert [one.label.split(",")[0] for one in found[:: len(some)]] == [
        *("DeepseekV2", "DeepseekV2 without experts", "DeepseekV3", "Qwen3Moe")
    ]
    assert [one for one in found if not one.ok] == []


def test_in_half_precision_experts_are_left_out_and_latents_are_not(gpu, setting, monkeypatch):
    def refuses_float32(name, shape):
        return "no float32" if shape.dtype == torch.float32 else None

    monkeypatch.setattr(gpu.engine, "refusal", refuses_float32)
    monkeypatch.setattr(gpu.engine, "VARIANTS", {"as it is": {}})
    v2, dense, v3, qwen = gpu.engine.tiny_experts(setting, "torch")
    assert dense.ok
    assert "float16" in dense.label
    assert all("other experts" in one.why for one in (v2, v3, qwen))


def test_a_half_precision_is_taken_where_attention_has_no_other(gpu, setting, monkeypatch):
    def refuses_float32(name, shape):
        return "no float32" if shape.dtype == torch.float32 else None

    monkeypatch.setattr(gpu.engine, "refusal", refuses_float32)
    monkeypatch.setattr(gpu.engine, "FAMILIES", ["Llama"])
    monkeypatch.setattr(gpu.engine, "VARIANTS", {"as it is": {}})
    [found] = gpu.engine.tiny(setting, "torch")
    assert found.ok
    assert "float16" in found.label


def test_what_this_version_does_not_have_is_skipped_with_the_reason(gpu, setting, monkeypatch):
    monkeypatch.setattr(gpu.engine, "FAMILIES", ["Llama"])
    monkeypatch.setattr(gpu.engine, "VARIANTS", {"new": {"warp_drive": "on"}})
    [option] = gpu.engine.tiny(setting, "torch")
    assert option.why == "this version has no option `warp_drive`"
    [attention] = gpu.engine.tiny(setting, "telepathy")
    assert attention.why == "this version has no attention telepathy"
    [model] = gpu.engine.real(setting, "torch")
    assert "--model-parts" in model.why


def test_an_engine_that_answers_wrong_is_found(gpu, setting, monkeypatch):
    run = gpu.engine.Started.run

    def changed(self, rows, **options):
        done = run(self, rows, **options)
        answer = done.completions[2]
        ids = (*answer.token_ids[:-1], (answer.token_ids[-1] + 1) % 200)
        done.completions[2] = completion(ids, answer.finish_reason)
        return done

    monkeypatch.setattr(gpu.engine.Started, "run", changed)
    monkeypatch.setattr(gpu.engine, "FAMILIES", ["Llama"])
    monkeypatch.setattr(gpu.engine, "VARIANTS", {"as it is": {}})
    [found] = gpu.engine.tiny(setting, "torch")
    assert not found.ok
    assert found.error.startswith("1 of 24 rows differ: row 2: token")


def completion(ids: tuple[int, ...], reason: FinishReason) -> Completion:
    return Completion(
        job_id=0,
        row=0,
        token_ids=ids,
        text="",
        finish_reason=reason,
        completion_tokens=len(ids),
    )


@pytest.fixture
def judge(gpu: SimpleNamespace) -> Callable[..., Any]:
    """The verdict on an answer to the prompt 5 of at most three tokens, of a model that is sure
    of the token one above the last, but for 7, behind which 8 and 9 are ``gap`` apart; 9 ends."""

    def judged(ids: tuple[int, ...] | None, reason: FinishReason, gap: float = 1.0) -> Any:
        def peer(input_ids, use_cache, logits_to_keep):
            last = input_ids[0, -logits_to_keep:]
            logits = torch.nn.functional.one_hot(last + 1, 12).float() * 10
            logits[last == 7, 9] = 10 - gap
            return SimpleNamespace(logits=logits[None])

        model = SimpleNamespace(
            peer=peer,
            checkpoint=SimpleNamespace(tokenizer=SimpleNamespace(eos_ids=(9,))),
        )
        rows = gpu.rows.Rows([[5]], [3])
        answers = {} if ids is None else {0: completion(ids, reason)}
        return gpu.judge.Judge(model, gpu.judge.PRECISIONS[0], CPU).verdict(rows, answers)

    return judged


def test_the_likeliest_tokens_are_right_and_others_are_not(judge):
    right = judge((6, 7, 8), FinishReason.LENGTH)
    assert (right.failures, right.num_steps, right.num_ties) == ([], 3, 0)
    assert right.error(1, 1e-3) is None
    wrong = judge((6, 8, 9), FinishReason.LENGTH)
    assert len(wrong.failures) == 1
    assert wrong.failures[0].startswith("row 0: token 1 is 8, transformers has 7, ")
    assert judge(None, FinishReason.LENGTH).failures == ["row 0: it has no answer"]
    assert "2 tokens without an end" in judge((6, 7), FinishReason.LENGTH).failures[0]


def test_an_end_is_right_where_it_is_likeliest_or_all_but(judge):
    assert judge((6, 7, 8), FinishReason.STOP).failures == []
    assert "is the end" in judge((6, 7), FinishReason.STOP).failures[0]
    tie = judge((6, 7), FinishReason.STOP, gap=5e-4)
    assert (tie.failures, tie.num_ties) == ([], 1)
    assert tie.error(1, 1e-3) == "1 ties in 3 steps"
    assert tie.error(1, 0.5) is None


def test_the_model_that_is_given_answers_as_transformers(
    gpu, setting, tiny_model_folder, monkeypatch
):
    folder = tiny_model_folder("random", context_length=2048)
    given = gpu.measure.Setting(device=CPU, model=folder)
    found = records(gpu, "Found", list(gpu.engine.real(given, "torch")))
    assert len(found) >= 3
    assert [one for one in found if not one.ok] == []


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_large_models_are_timed_in_every_variant_and_beside_transformers(gpu, setting, name):
    large = gpu.large.LARGE[name]
    said = list(gpu.large.compare(setting, name))
    assert [one for one in records(gpu, "Found", said) if not one.ok] == []
    rates = {one.label: one for one in records(gpu, "Timed", said)}
    assert {"with tree", "without tree", "overlap off", "transformers"} <= set(rates)
    assert {one.unit for one in rates.values()} == {"rows/s"}
    size = large.sizes["tiny"]
    distinct = size.root + size.num_documents * size.document + 24 * size.question
    assert f"{distinct:,} computed" in rates["with tree"].detail
    alone = 6 * (size.root + size.document + size.question)
    assert f"{alone:,} computed" in rates["without tree"].detail
    labels = {one.label for one in said}
    assert labels >= {variant.label for variant in large.variants}


def test_a_variant_that_has_too_little_memory_fails_and_the_others_go_on(gpu, setting, monkeypatch):
    start = gpu.large.Started

    def starting(model, options, **others):
        if options.get("overlap") == "off":
            raise OutOfMemoryError("memory ran out while loading")
        return start(model, options, **others)

    monkeypatch.setattr(gpu.large, "Started", starting)
    said = list(gpu.large.compare(setting, "llama"))
    wrong = [one for one in records(gpu, "Found", said) if not one.ok]
    assert {one.error for one in wrong} == {"OutOfMemoryError: memory ran out while loading"}
    assert "torch attention" in {one.label for one in records(gpu, "Timed", said)}


def run_function(gpu: SimpleNamespace, function: Callable[..., Any], monkeypatch) -> Any:
    """What a part of this function says, as the parent reads it."""
    monkeypatch.setattr(gpu.kernels, "ceilings", function)
    lines = map(json.dumps, gpu.parts.run_part(gpu.parts.PARTS["ceilings"], None))
    return gpu.check.collect("ceilings", 60.0, list(lines))


def test_a_part_that_raises_is_reported_with_its_traceback_and_what_it_said(gpu, monkeypatch):
    def part(setting):
        yield gpu.measure.Found("first", True)
        raise ValueError("an illegal access")

    result = run_function(gpu, part, monkeypatch)
    assert [check["label"] for check in result["checks"]] == ["first"]
    assert "Traceback" in result["error"]
    assert not gpu.report.is_good(result)


def test_a_part_whose_memory_runs_out_says_so(gpu, monkeypatch):
    def part(setting):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nAnd more.")
        yield

    result = run_function(gpu, part, monkeypatch)
    assert result["error"] == "memory ran out: CUDA out of memory. Tried to allocate 9 GiB."


def test_a_package_that_is_missing_is_a_part_that_is_skipped_but_not_one_of_ours(gpu, monkeypatch):
    def part(setting):
        yield from import_module(name).records

    name = "xgrammar_of_another_day"
    result = run_function(gpu, part, monkeypatch)
    assert gpu.report.is_good(result)
    assert "bring its wheel" in result["skips"][0]["why"]
    name = "batchradix.engine.no_such_module"
    assert "ModuleNotFoundError" in run_function(gpu, part, monkeypatch)["error"]


def test_a_process_that_dies_or_hangs_is_a_part_that_failed_and_keeps_what_it_said(
    gpu, monkeypatch, tmp_path
):
    script = tmp_path / "part.py"
    said = '{"record": "found", "label": "one", "ok": true, "error": null, "detail": ""}'
    script.write_text(
        f"import subprocess, sys, time\nprint({said!r}, flush=True)\n"
        "if sys.argv[-1] == 'hangs': time.sleep(60)\n"
        "sys.exit('it is dead')"
    )
    monkeypatch.setattr(gpu.check, "__file__", str(script))
    dead = gpu.check.run_apart("rope", ["dies"], 60)
    assert dead["error"] == "exit code 1: it is dead\n"
    began_s = time.monotonic()
    hung = gpu.check.run_apart("rope", ["hangs"], 2)
    assert hung["error"] == "time ran out: it was not done after 2 s"
    assert time.monotonic() - began_s < 30
    for result in (dead, hung):
        assert [check["label"] for check in result["checks"]] == ["one"]
        assert not gpu.report.is_good(result)


def test_a_part_does_not_outlive_the_run_that_asked_for_it(gpu, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        f"import os, sys, time\nsys.path.insert(0, {str(FOLDER)!r})\nimport gpu_check\n"
        "gpu_check.end_with_parent(os.getppid())\nprint(os.getpid(), flush=True)\ntime.sleep(90)"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, {str(child)!r}], start_new_session=True)\n"
        "time.sleep(90)"
    )
    run = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    os.kill(pid, 0)
    run.kill()
    run.wait()
    killed_s = time.monotonic()
    assert run.stdout.read() == ""  # until the child has ended, too
    assert time.monotonic() - killed_s < 60
    run.stdout.close()


def test_parts_keep_their_order_and_their_limits_and_none_begins_behind_the_budget(
    gpu, monkeypatch
):
    limits = {}

    def apart(name, arguments, limit_s):
        limits[name] = limit_s
        time.sleep(0.3 if name == "rope" else 0)
        return EMPTY | {"part": name}

    monkeypatch.setattr(gpu.check, "run_apart", apart)
    names = ["ceilings", "rope", "swiglu", "llama"]
    results = list(gpu.check.run_all(names, [], budget_s=100.0, jobs=2))
    assert [result["part"] for result in results] == names
    assert limits["ceilings"] == 60
    assert limits["llama"] < 100
    results = list(gpu.check.run_all(names, [], budget_s=5.2, jobs=2))
    assert [result["error"] is None for result in results] == [True, True, True, False]
    assert "--budget" in results[-1]["error"]
    list(gpu.check.run_all(names, [], budget_s=1000.0, jobs=2, patience=2.0))
    assert limits["ceilings"] == 120


def speed(label: str, rate: float, unit: str = "GB/s") -> dict[str, Any]:
    return {"label": label, "us": 10.0, "rate": rate, "unit": unit, "detail": ""}


def test_the_table_sets_rates_beside_the_ceilings_and_names_what_failed(gpu):
    checks = [
        {"label": "3 × 7 float32", "ok": True, "error": None, "detail": ""},
        {"label": "3 × 7 float16", "ok": False, "error": "element 2 is 1", "detail": ""},
    ]
    lines = gpu.report.table(
        MACHINE,
        [
            EMPTY
            | {
                "part": "ceilings",
                "speeds": [speed("copy", 4000.0), speed("product", 700.0, "TFLOP/s")],
            },
            EMPTY | {"part": "rope", "checks": checks[:1]},
            EMPTY | {"part": "swiglu", "checks": checks},
            EMPTY | {"part": "attention-speed", "speeds": [speed("llama decode: triton", 3000.0)]},
            EMPTY | {"part": "engine-triton", "skips": [{"label": "x", "why": "no xgrammar"}]},
        ],
        "out.json",
    )
    text = "\n".join(lines)
    assert lines[0] == "H200, torch 2.11.0: 5 parts in 300 s"
    assert "copy 4,000 GB/s · product 700 TFLOP/s" in text
    assert "rope 1 of 1 agree, 12/60 s" in text
    assert "llama decode triton 3,000 GB/s (75%)" in text
    assert "skipped  engine-triton: no xgrammar" in text
    assert "FAILED   swiglu 1 of 2 agree, 12/60 s" in text
    assert "3 × 7 float16: element 2 is 1" in text


def test_the_table_fits_whatever_went_wrong(gpu):
    bad = [{"label": "x" * 90, "ok": False, "error": "y" * 90, "detail": ""}] * 50
    results = [
        EMPTY
        | {
            "part": name,
            "checks": bad,
            "error": f"Traceback\nline\n{'z' * 300}",
            "skips": [{"label": name, "why": f"{name} {'w' * 200}"}],
            "speeds": [speed(f"{name} {number}", 1.0) for number in range(3)],
        }
        for name in gpu.parts.PARTS
    ]
    lines = gpu.report.table(MACHINE, results, "out.json")
    assert len(lines) <= gpu.report.MOST_LINES
    assert max(map(len, lines)) <= gpu.report.WIDTH
    assert any(line.startswith("FAILED") for line in lines)
    assert "out.json" in lines[-1]


def test_the_whole_runs_part_by_part_and_writes_a_file(gpu, tmp_path, capsys):
    out = tmp_path / "check.json"
    arguments = ["--device", "cpu", "--parts", "ceilings,rope_delta", "--out", str(out)]
    assert gpu.check.main(arguments) == 0
    written = json.loads(out.read_text())
    assert [part["part"] for part in written["parts"]] == ["ceilings", "rope_delta"]
    assert written["machine"]["versions"]["torch"] == torch.__version__
    assert "9 of 9 agree" in capsys.readouterr().out


def test_a_comparison_that_fails_is_an_exit_code_of_1(gpu, tmp_path, capsys, monkeypatch):
    wrong = [{"label": "x", "ok": False, "error": "element 2 is 1", "detail": ""}]
    monkeypatch.setattr(
        gpu.check, "run_apart", lambda name, *_: EMPTY | {"part": name, "checks": wrong}
    )
    out = tmp_path / "check.json"
    assert gpu.check.main(["--device", "cpu", "--parts", "rope", "--out", str(out)]) == 1
    assert "FAILED   rope 0 of 1 agree" in capsys.readouterr().out
    assert json.loads(out.read_text())["parts"][0]["checks"] == wrong


def test_parts_of_a_file_make_the_model_or_are_refused(gpu, tmp_path, capsys, monkeypatch):
    halves = [tmp_path / "a", tmp_path / "b"]
    halves[0].write_bytes(b"one")
    halves[1].write_bytes(b"two")
    named = ",".join(map(str, halves))
    assert gpu.check.main(["--device", "cpu", "--parts", "rope", "--model-parts", named]) == 2
    assert "do not make SmolLM2" in capsys.readouterr().err
    digest = "25b6746d5172ed6352966a013d93ac846e1110d5a25e8f183b5931f4688842a1"
    monkeypatch.setattr(
        gpu.check, "SMALL_MODEL", SimpleNamespace(file_name="whole.gguf", sha256=digest)
    )
    assert gpu.check.joined(halves, tmp_path).read_bytes() == b"onetwo"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_a_sentence(gpu, tmp_path, capsys):
    assert gpu.check.main(["--out", str(tmp_path / "check.json")]) == 2
    assert capsys.readouterr().err == gpu.check.NO_GPU + "\n"
    assert not list(tmp_path.iterdir())
