"""The engine end to end: greedy answers against those of transformers (`gpu_judge`), with every
option that changes none, free slots of the pool full of NaN."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from gpu_judge import PRECISIONS, Judge, Precision
from gpu_measure import Found, Record, Setting, Skipped, raised, wait
from gpu_models import EXPERT_FAMILIES, FAMILIES, Model, tiny_model
from gpu_rows import Rows, documentation_rows, odd_rows

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.config import EngineOptions
from batchradix.engine.attention.registry import (
    BACKENDS,
    MLA_BACKENDS,
    attention_shape,
    refusal,
)
from batchradix.engine.core import RadixEngine
from batchradix.engine.device import find_device
from batchradix.engine.model_runner import ModelRunner, forward_retreat
from batchradix.engine.step import Step
from batchradix.errors import OptionError
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.report.machine import free_memory_bytes
from batchradix.settings import Machine, resolve_engine
from batchradix.types import Completion, StepStats, Usage

Options = Mapping[str, Any]

VARIANTS: Mapping[str, Options] = {
    "as it is": {},
    "in small chunks": {"prefill_tokens": 16, "batch_size": 5},
    "in a small pool": {"kv_tokens": None, "batch_size": 7},  # None: of the longest row
    "without tree": {"prefix_cache": False},
    "graphs on": {"cuda_graphs": "on"},
    "graphs off": {"cuda_graphs": "off"},
    "overlap on": {"overlap": "on"},
    "overlap off": {"overlap": "off"},
    "graphs and overlap on": {"cuda_graphs": "on", "overlap": "on"},
    "graphs and overlap off": {"cuda_graphs": "off", "overlap": "off"},
}
"""Options of the engine that change no answer."""

_STEP_PARTS = ("schedule", "forward", "mask", "sample", "collect")


def missing_option(options: Options) -> str | None:
    """Why this checkout cannot run with the options, None where it can."""
    known = {each.name for each in fields(EngineOptions)}
    unknown = [name for name in options if name not in known]
    return f"this version has no option `{unknown[0]}`" if unknown else None


class PoisoningRunner(ModelRunner):
    """Fills the free slots of the pool with NaN before every step that moves nothing, so that
    whoever reads one is found out."""

    engine: RadixEngine | None = None

    def launch(self, step: Step, chosen: torch.Tensor | None = None) -> None:
        if self.engine is not None and not len(step.moves):
            runs = self.engine.scheduler.pool.free_runs
            self.poison_free((start, start + length) for start, length in runs)
        super().launch(step, chosen)


@dataclass(slots=True)
class Run:
    """A job that ended: completions by row, what it took, and what a person should know."""

    completions: dict[int, Completion]
    usage: Usage  # of this job alone
    seconds: float
    distinct_tokens: int
    parts_s: dict[str, float]  # of the engine's steps on the host, as `StepStats` has them
    notices: list[str] = field(default_factory=list)


class Started:
    """An engine on a model's weights; ``options`` as a user gives them.

    Raises `OptionError` where they cannot be had here.
    """

    def __init__(
        self,
        model: Model,
        options: Options,
        *,
        device: torch.device,
        demand_tokens: int | None = None,
        poison: bool = False,
    ) -> None:
        config = model.checkpoint.config
        name, free_bytes = find_device(str(device))
        settings = resolve_engine(
            EngineOptions(device=name, **{"num_threads": 1, **options}),
            Machine(
                num_threads=1,
                free_memory_bytes=free_memory_bytes(),
                has_bf16=True,
                device=name,
                free_device_memory_bytes=free_bytes,
            ),
            num_kv_elements_per_token=config.num_kv_elements_per_token,
            weight_bytes_float32=4 * config.num_parameters,
            demand_tokens=demand_tokens,
        )
        self._device = device
        self._retreat = forward_retreat()
        runner = (PoisoningRunner if poison else ModelRunner)(
            model.checkpoint, settings, retreat=self._retreat, source=model.source
        )
        detokenizer = IncrementalDetokenizer(model.checkpoint.tokenizer.token_bytes)
        self.engine = RadixEngine(model.checkpoint, settings, detokenizer, runner=runner)
        if isinstance(runner, PoisoningRunner):
            runner.engine = self.engine

    def run(self, rows: Rows, *, tree: bool = True) -> Run:
        """Runs all rows. AssertionError where a row is answered twice or a slot is lost."""
        engine = self.engine
        before = replace(engine.usage)
        job = rows.job(tree=tree)
        wait(self._device)
        started_s = time.perf_counter()
        parts_s = dict.fromkeys(_STEP_PARTS, 0.0)

        def note(stats: StepStats) -> None:
            for name in _STEP_PARTS:
                parts_s[name] += getattr(stats, f"{name}_s")

        engine.observe(note)
        engine.submit(job)
        done: dict[int, Completion] = {}
        while engine.has_work:
            for completion in engine.step():
                assert completion.row not in done, f"row {completion.row} was answered twice"
                done[completion.row] = completion
        wait(self._device)
        seconds = time.perf_counter() - started_s
        engine.check()
        used = {
            each.name: getattr(engine.usage, each.name) - getattr(before, each.name)
            for each in fields(Usage)
        }
        return Run(
            done,
            Usage(**used),
            seconds,
            job.tree.distinct_tokens,
            parts_s,
            [*engine.notices, *self._retreat.notices],
        )

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *raised: object) -> None:
        self.engine.close()


def tiny(setting: Setting, attention: str) -> Iterator[Record]:
    """Tiny random models of each dense family, with every variant of the options."""
    return _try_families(FAMILIES, setting, attention)


def tiny_experts(setting: Setting, attention: str) -> Iterator[Record]:
    """The same of those with latent attention or experts."""
    return _try_families(EXPERT_FAMILIES, setting, attention)


def _try_families(families: Iterable[str], setting: Setting, attention: str) -> Iterator[Record]:
    num_rows = 24 if setting.is_small else 160
    for family in families:
        model = tiny_model(family, setting.device)
        rows = odd_rows(num_rows, model.checkpoint.config.vocab_size)
        yield from try_variants(model, rows, attention, VARIANTS, setting.device, family)


def real(setting: Setting, attention: str) -> Iterator[Record]:
    """The real small model over passages of this project's own documentation."""
    if setting.model is None:
        yield Skipped("smollm2", "no file of a small model is here; give --model or --model-parts")
        return
    model = open_model(setting.model, setting.device)
    size = (3, 4, 100) if setting.is_small else (96, 32, 800)
    rows = documentation_rows(model.checkpoint.tokenizer, *size)
    wanted = ("as it is", "graphs and overlap on", "graphs and overlap off")
    variants = {name: VARIANTS[name] for name in wanted}
    variants["in chunks"] = {"prefill_tokens": 64, "batch_size": 20}
    yield from try_variants(model, rows, attention, variants, setting.device, "smollm2")


def open_model(path: Path, device: torch.device) -> Model:
    """A model of a file or folder; transformers reads its weights on its own."""
    from peer_models import load_peer

    checkpoint = open_checkpoint(str(path))
    peer = load_peer(checkpoint, "float32", attn_implementation="eager").to(device)
    return Model(checkpoint, peer, None)


def try_variants(
    model: Model,
    rows: Rows,
    attention: str,
    variants: Mapping[str, Options],
    device: torch.device,
    name: str,
) -> Iterator[Found | Skipped]:
    """Each variant's answers against transformers, and its counts against the tree's."""
    precision = usable_precision(model, attention, device)
    if isinstance(precision, str):
        yield Skipped(f"{name}, {attention}", precision)
        return
    judge = Judge(model, precision, device)
    for what, given in variants.items():
        label = f"{name}, {attention}, {precision.dtype}, {what}"
        options = {"kv_tokens": 20_000, "batch_size": 32, "prefill_tokens": 256} | dict(given)
        options["kv_tokens"] = options["kv_tokens"] or rows.most_slots
        reason = missing_option(options)
        if reason is not None:
            yield Skipped(what, reason)
            continue
        yield try_variant(model, rows, {**options, "attention": attention}, judge, device, label)


def usable_precision(model: Model, attention: str, device: torch.device) -> Precision | str:
    """The first of `PRECISIONS` that the attention serves, else why it serves none."""
    config, reason = model.checkpoint.config, ""
    for precision in PRECISIONS:
        reason = refusal_of(attention, config, precision.dtype, device) or ""
        if not reason:
            has_experts = config.moe is not None and len(config.moe.layers) > 0
            if has_experts and precision is not PRECISIONS[0]:
                return f"in {precision.dtype} a token now and then goes to other experts"
            return precision
    return reason


def refusal_of(attention: str, config: ModelConfig, dtype: str, device: torch.device) -> str | None:
    """Why an attention cannot serve the model in a dtype, None where it can."""
    if attention not in (BACKENDS if config.mla is None else MLA_BACKENDS):
        return f"this version has no attention {attention}"
    return refusal(attention, attention_shape(config, dtype=dtype, device=device))


def try_variant(
    model: Model, rows: Rows, options: Options, judge: Judge, device: torch.device, label: str
) -> Found | Skipped:
    """One variant; a `Found` that failed where it raises, `Skipped` where it is refused."""
    options = {"dtype": judge.precision.dtype, **options}
    try:
        with Started(model, options, device=device, poison=True) as started:
            run = started.run(rows, tree=options.get("prefix_cache", True))
        verdict = judge.verdict(rows, run.completions)
    except OptionError as error:
        return Skipped(label, str(error))
    except Exception as error:  # of any kind: it is what is to be reported
        return raised(label, error)
    error = verdict.error(len(rows.prompts), judge.precision.tie_share) or _miscounted(run)
    detail = f"{len(rows.prompts)} rows, {verdict.num_steps} steps, {verdict.num_ties} ties"
    return Found(label, error is None, error, detail)


def _miscounted(run: Run) -> str | None:
    """What the engine computed first is the tree's distinct tokens, whatever it computed again."""
    computed, distinct = run.usage.computed_tokens, run.distinct_tokens
    if computed == distinct:
        return None
    return f"{computed} prompt tokens were computed, the tree has {distinct}"
