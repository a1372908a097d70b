"""``batchradix bench-attention``: what attention takes on this machine, of a model's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchradix.cli import options as shared

if TYPE_CHECKING:
    from batchradix.engine.attention.bench import BenchStep
    from batchradix.engine.attention.measured import Times
    from batchradix.engine.attention.mla_base import AnyShape
    from batchradix.report.progress import Progress
    from batchradix_kernels.tree_attention.tiles import Tile


def bench_attention(
    model: shared.Model = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="auto, or fp8: keys and values in 8 bits.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", help="CPU threads; as many as there are cores.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the attention backends on this machine, and keep the times for --attention auto.

    Of the model only its shape is read, no weights. Runs of the same model shape, dtypes and number
    of threads then take the fastest backend.
    """
    import torch

    from batchradix.checkpoint.cache_folder import cache_folder
    from batchradix.checkpoint.checkpoint import open_checkpoint
    from batchradix.config import EngineOptions
    from batchradix.engine.attention.bench import measure, typical_steps
    from batchradix.engine.attention.measured import fastest
    from batchradix.engine.attention.registry import attention_shape, automatic, unmeasured
    from batchradix.engine.device import find_device, open_device, processor_name
    from batchradix.errors import OptionError
    from batchradix.report.machine import has_bf16, num_threads
    from batchradix.report.progress import choose_progress
    from batchradix.settings import resolve_dtype

    # Refuses what a run refuses.
    wanted = EngineOptions(
        dtype=dtype,  # type: ignore[arg-type]  # checked by EngineOptions
        kv_dtype=kv_dtype,  # type: ignore[arg-type]  # checked by EngineOptions
        device=device,
        num_threads=threads,
    )
    progress = choose_progress(quiet=False)
    checkpoint = open_checkpoint(shared.named_model(model), notify=progress.message)
    place, _ = find_device(wanted.device)
    resolved = resolve_dtype(wanted.dtype, device=place, has_bf16=has_bf16())
    torch.set_num_threads(wanted.num_threads or num_threads())
    shape = attention_shape(
        checkpoint.config, dtype=resolved, device=open_device(place), kv_dtype=wanted.kv_dtype
    )
    steps = typical_steps()
    tiles = _tune(shape, steps, progress)
    times = measure(shape, steps, folder=cache_folder())
    found: dict[str, Any] = {
        "model": checkpoint.name,
        "dtype": resolved,
        "kv_dtype": wanted.kv_dtype,
        "device": place,
        "processor": processor_name(shape.device),
        "threads": torch.get_num_threads(),
        **{name.removeprefix("num_"): size for name, size in shape.sizes.items()},
        "steps": {each.name: each.what for each in steps},
        "ms_per_layer": times,
        "tiles": None if tiles is None else [str(tile) for tile in tiles],
        "unmeasured": {
            name: OptionError(why).spelt(shared.flag) for name, why in unmeasured(shape).items()
        },
        "auto": fastest(times, automatic(shape)),
        "table": _keep(shape, times, progress),
    }
    for line in [json.dumps(found, ensure_ascii=False)] if as_json else _lines(found):
        typer.echo(line)


def _tune(shape: AnyShape, steps: Sequence[BenchStep], progress: Progress) -> Sequence[Tile] | None:
    """The tiles that runs will take from now on, None where Triton does not serve, or chooses them
    by the shape alone, as for latent attention."""
    from batchradix.checkpoint.cache_folder import cache_folder
    from batchradix.engine.attention.bench import tune
    from batchradix.engine.attention.measured import write_tiles
    from batchradix.engine.attention.mla_base import MlaShape
    from batchradix.engine.attention.registry import measurable
    from batchradix.errors import ModelError

    if isinstance(shape, MlaShape) or "triton" not in measurable(shape):
        return None
    tiles = tune(shape, steps)
    try:
        write_tiles(cache_folder(), shape, tiles)
    except (ModelError, OSError) as error:
        progress.warn(f"the fastest tiles are not kept, so the built-in ones serve: {error}")
    return tiles


def _keep(shape: AnyShape, times: Times, progress: Progress) -> str | None:
    """The file that ``auto`` will look at, None where it cannot be written."""
    from batchradix.checkpoint.cache_folder import cache_folder
    from batchradix.engine.attention.measured import table_key, write_times
    from batchradix.errors import ModelError

    try:
        return str(write_times(cache_folder(), table_key(shape, list(times)), times))
    except (ModelError, OSError) as error:
        progress.warn(f"the times are not kept, so auto goes by its rule: {error}")
        return None


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """The table for people."""
    if "kv_heads" in found:
        heads = f"{found['heads']} query and {found['kv_heads']} key heads of {found['head_dim']}"
    else:
        latent = f"latents of {found['kv_lora_rank']} and rotated keys of {found['rope_dim']}"
        heads = f"{found['heads']} heads over {latent}"
    dtype = found["dtype"]
    if found["kv_dtype"] == "fp8":
        dtype += ", keys and values in fp8"
    yield f"     model  {found['model']} in {dtype}: {found['layers']} layers, {heads}"
    threads = "1 thread" if found["threads"] == 1 else f"{found['threads']} threads"
    yield f" processor  {found['processor']}, {threads}, {found['device']}"
    times = found["ms_per_layer"]
    yield "ms a layer" + "".join(f"{name:>10}" for name in times)
    for step, what in found["steps"].items():
        yield (
            f"{step:>10}" + "".join(f"{each[step]:10.3f}" for each in times.values()) + f"  {what}"
        )
    if found["tiles"] is not None:
        tiles = "; ".join(found["tiles"])
        yield f"     tiles  {tiles} (rows × slots, warps × stages)"
    for why in found["unmeasured"].values():
        yield f"         -  {why}"
    yield f"      auto  takes {found['auto']}"
    if found["table"] is not None:
        yield f"     table  {found['table']}"
