"""Options are checked when they are made; open ones are settled from machine and model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batchradix.config import (
    EngineOptions,
    OutputOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.errors import OptionError
from batchradix.settings import Machine, resolve_engine

MACHINE = Machine(num_threads=2, free_memory_bytes=10**9, has_bf16=True)


def settle(options: EngineOptions, machine: Machine = MACHINE, **changes: Any) -> Any:
    sizes = {"num_kv_elements_per_token": 1000, "weight_bytes_float32": 10**8} | changes
    return resolve_engine(options, machine, **sizes)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": None}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ["a"]}, "stop"),
    ],
)
def test_a_sampling_option_out_of_range_is_refused_by_name(
    options: dict[str, Any], word: str
) -> None:
    with pytest.raises(OptionError, match=word):
        SamplingOptions(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"template": "{{ a }}", "instruction": "do", "column": "a"},
        {"instruction": "do"},
        {"column": "a"},
        {"chat": True},
    ],
)
def test_prompt_options_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        PromptOptions(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "fp8"},
        {"quantize": "int4"},
        {"kv_dtype": "int8"},
        {"attention": "magic"},
        {"batch_size": 0},
        {"speculate": "sometimes"},
        {"speculate": 0},
        {"speculate": True},
        {"speculate": 33},
        {"overlap": True},
        {"cuda_graphs": "maybe"},
        {"overlap": "on", "speculate": 4},
        {"kv_tokens": 2.5},
        {"kv_tokens": 5, "kv_memory_bytes": 5},
    ],
)
def test_engine_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        EngineOptions(**options)


def test_shares_and_limits_are_checked() -> None:
    with pytest.raises(OptionError, match="allow_failures"):
        OutputOptions(allow_failures=1.5)
    with pytest.raises(OptionError, match="limit"):
        RunConfig(input="x", limit=-1)


def test_dtype_follows_the_machine_unless_it_is_named() -> None:
    assert settle(EngineOptions()).dtype == "bfloat16"
    assert settle(EngineOptions(), replace(MACHINE, has_bf16=False)).dtype == "float32"
    assert settle(EngineOptions(dtype="float32")).dtype == "float32"


def test_quantised_layers_are_refused_off_the_cpu() -> None:
    assert settle(EngineOptions(quantize="int8")).quantize == "int8"
    with pytest.raises(OptionError, match="quantize int8 runs on the CPU alone, not on cuda:1"):
        settle(EngineOptions(quantize="int8", device="cuda:1"))


def test_kept_weights_need_bfloat16_and_leave_more_for_the_pool() -> None:
    kept = settle(EngineOptions(quantize="keep"), kept_weight_bytes=10**7)
    assert kept.kv_tokens == int((10**9 - 10**7) * 0.4) // 2000
    with pytest.raises(OptionError, match="quantize keep multiplies in bfloat16, not in float32"):
        settle(EngineOptions(quantize="keep", dtype="float32"))


def test_the_pool_takes_two_fifths_of_what_the_weights_leave() -> None:
    assert settle(EngineOptions()).kv_tokens == int((10**9 - 5 * 10**7) * 0.4) // 2000
    float32 = settle(EngineOptions(dtype="float32"))
    assert float32.kv_tokens == int((10**9 - 10**8) * 0.4) // 4000


def test_keys_and_values_in_8_bits_take_a_byte_an_element_whatever_the_dtype() -> None:
    room = (10**9 - 5 * 10**7) * 0.4
    assert settle(EngineOptions(kv_dtype="fp8")).kv_tokens == int(room) // 1000
    float32 = settle(EngineOptions(dtype="float32", kv_dtype="fp8", kv_memory_bytes=40_000))
    assert float32.kv_tokens == 40
    assert (float32.element_bytes, float32.kv_element_bytes) == (4, 1)
    assert settle(EngineOptions(kv_dtype="fp8", kv_disk_bytes=16_000)).kv_disk_bytes == 16_000


def test_the_pool_is_no_larger_than_the_job_can_use() -> None:
    assert settle(EngineOptions(), demand_tokens=77).kv_tokens == 77
    assert settle(EngineOptions(kv_tokens=500), demand_tokens=77).kv_tokens == 500
    assert settle(EngineOptions(kv_memory_bytes=40_000)).kv_tokens == 20


def test_a_device_gives_nine_tenths_of_its_free_memory() -> None:
    machine = replace(MACHINE, device="cuda:0", free_device_memory_bytes=10**8)
    settings = settle(EngineOptions(), machine)
    assert settings.kv_tokens == int((10**8 - 5 * 10**7) * 0.9) // 2000
    assert settings.device == "cuda:0"


def test_a_machine_too_small_for_the_model_is_refused_before_weights_load() -> None:
    with pytest.raises(OptionError, match="leave no memory"):
        settle(EngineOptions(), replace(MACHINE, free_memory_bytes=10**7))
    with pytest.raises(OptionError, match="not one token"):
        settle(EngineOptions(kv_memory_bytes=10))


def test_room_beside_the_pool_that_is_too_small_to_be_used_is_refused() -> None:
    assert settle(EngineOptions(kv_disk_bytes=32_000)).kv_disk_bytes == 32_000
    with pytest.raises(OptionError, match=r"kv_disk_bytes of 31999 bytes .* give 32000 bytes"):
        settle(EngineOptions(kv_disk_bytes=31_999))
    machine = replace(MACHINE, device="cuda:0", free_device_memory_bytes=10**8)
    with pytest.raises(OptionError, match="kv_host_memory_bytes of 1 bytes"):
        settle(EngineOptions(kv_host_memory_bytes=1), machine)


def test_a_device_runs_ahead_of_the_host_unless_answers_are_guessed_ahead() -> None:
    def resolved(device: str, **options: Any) -> Any:
        machine = Machine(
            num_threads=2,
            has_bf16=True,
            free_memory_bytes=2**34,
            device=device,
            free_device_memory_bytes=None if device == "cpu" else 2**34,
        )
        return resolve_engine(
            EngineOptions(**options),
            machine,
            num_kv_elements_per_token=1000,
            weight_bytes_float32=2**30,
        )

    on_gpu = resolved("cuda:0")
    assert (on_gpu.overlap, on_gpu.cuda_graphs, on_gpu.profile_kv) == (True, "auto", True)
    on_cpu = resolved("cpu")
    assert (on_cpu.overlap, on_cpu.cuda_graphs, on_cpu.profile_kv) == (False, "off", False)
    assert resolved("cpu", overlap="on").overlap
    assert not resolved("cuda:0", overlap="off").overlap
    assert not resolved("cuda:0", speculate=4).overlap
    assert not resolved("cuda:0", kv_tokens=500).profile_kv
    with pytest.raises(OptionError, match="need a GPU"):
        resolved("cpu", cuda_graphs="on")
