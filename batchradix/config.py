"""What a user may ask for, as frozen dataclasses; ``None`` means "decide for me".

The command line, the Python API and job files all build these; nothing below reads a global.
Checks of single values are in ``__post_init__`` and raise `OptionError`; what depends on the
machine or the model is settled in `batchradix.settings`.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from batchradix.chat_options import ChatOptions
from batchradix.fleet_options import FleetOptions
from batchradix.prompt_options import COLUMN_NEEDED
from batchradix.prompt_options import PromptOptions as PromptOptions
from batchradix.prompt_options import require as require
from batchradix.row_options import LongRows, Question
from batchradix.trial import TrialOptions

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_TOKENS = 1024
DEFAULT_BATCH_SIZE = 64
DEFAULT_PREFILL_TOKENS = 512
DEFAULT_GRAMMAR_TIMEOUT_S = 120.0
DEFAULT_KV_STORE_BYTES = 2**30
MAX_SPECULATE = 32
MAX_SHARDS = 100_000
MIN_SPILL_TOKENS = 16
"""What is shorter is computed again: a call costs as much as its bytes."""

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantize = Literal["off", "int8", "keep"]
Switch = Literal["auto", "on", "off"]
KVDType = Literal["auto", "fp8"]
# Tokens of a row that are guessed in every step; auto: as many as measurements say pay.
Speculate = Literal["auto", "off"] | int


def _require_seconds(name: str, value: object) -> None:
    require(
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1e6,
        f"`{name}` must be a number of seconds above 0 (at most 1e6), not {value!r}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling for every row that does not say otherwise in a column of the same name.

    ``probabilities`` and ``choose`` are the run's alone, for answers out of a few:
    ``probabilities`` gives those of every choice; ``choose`` is ``walk`` (token by token, as any
    answer) or ``joint`` (the choice that is likeliest as a whole, which leaves nothing to draw).
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    probabilities: bool = False
    choose: Literal["walk", "joint"] = "walk"

    def __post_init__(self) -> None:
        def finite(name: str) -> float:
            value = getattr(self, name)
            number = math.nan
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                with suppress(OverflowError):
                    number = float(value)
            require(math.isfinite(number), f"`{name}` must be a finite number, not {value!r}")
            return number

        def integer(name: str) -> int | None:
            value = getattr(self, name)
            require(
                value is None or (isinstance(value, int) and not isinstance(value, bool)),
                f"`{name}` must be an integer, not {value!r}",
            )
            return value  # type: ignore[no-any-return]

        max_tokens = integer("max_tokens")
        require(
            max_tokens is None or 1 <= max_tokens < 2**31,
            f"`max_tokens` must be at least 1 and fit 32 bits, not {max_tokens}",
        )
        require(
            finite("temperature") >= 0, f"`temperature` must be 0 or more, not {self.temperature}"
        )
        require(0 < finite("top_p") <= 1, f"`top_p` must be in (0, 1], not {self.top_p}")
        top_k = integer("top_k")
        require(
            top_k is not None and top_k >= -1, f"`top_k` must be 0 (off) or more, not {self.top_k}"
        )
        require(0 <= finite("min_p") <= 1, f"`min_p` must be in [0, 1], not {self.min_p}")
        require(
            finite("repetition_penalty") > 0,
            f"`repetition_penalty` must be above 0, not {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            require(
                -2 <= finite(name) <= 2, f"`{name}` must be in [-2, 2], not {getattr(self, name)}"
            )
        seed = integer("seed")
        require(
            seed is None or -(2**63) <= seed < 2**63, f"`seed` must fit 64 bits, not {self.seed}"
        )
        require(
            isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
            f"`stop` must be non-empty strings, not {self.stop!r}",
        )
        require(
            isinstance(self.probabilities, bool),
            f"`probabilities` must be True or False, not {self.probabilities!r}",
        )
        require(
            self.choose in ("walk", "joint"), f"`choose` must be walk or joint, not {self.choose!r}"
        )
        require(
            self.choose == "walk" or self.temperature == 0,
            f"`choose` joint takes the likeliest choice and draws nothing, so `temperature` must "
            f"be 0, not {self.temperature}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine runs; never changes a greedy float32 answer, except for five things:
    ``quantize`` int8 rounds weights and activations of the linear layers to 8 bits (keep: weights
    of a GGUF file stay in memory as they are there, which changes no number); ``kv_dtype`` fp8
    rounds keys and values to float8_e4m3fn, without a scale;
    without ``forced_text`` every token is sampled, and text that the schema forces may be split
    into other tokens; without ``repetition_guard`` an answer under a schema that goes round in
    circles goes on to ``max_tokens``; with ``row_timeout_s`` a row whose answer takes longer than
    that, counted from its first token on, becomes an error row.

    ``deterministic``: to the last bit, what a row gets depends on the row alone, not on the rows
    beside it, their order, the batch, the pool or a resumed run, in bfloat16 and int8 too.

    ``grammar_timeout_s`` and ``grammar_memory_bytes`` (None: a quarter of the machine's, 4 GiB
    at most) limit the compiling of one schema's grammar. ``plan_memory_bytes`` (None: 256 MiB) is
    about what sorting the prompts takes; more of them are sorted in parts. ``kv_store``: a folder
    that keeps keys and values of widely shared prefixes for later runs, ``kv_store_bytes`` (None:
    1 GiB) the most it may take. ``kv_disk_bytes`` (on a GPU ``kv_host_memory_bytes`` instead): the
    most that keys and values take which the pool has no room for and a planned row will want.

    ``overlap``: the host prepares a step while the device runs the one before (auto: on a GPU,
    where nothing is guessed ahead). ``cuda_graphs``: small steps are replayed as CUDA graphs (auto:
    on a GPU, where the attention backend can).
    """

    dtype: DType = "auto"
    quantize: Quantize = "off"
    kv_dtype: KVDType = "auto"
    deterministic: bool = False
    device: str = "auto"
    attention: str = "auto"
    batch_size: int | None = None
    prefill_tokens: int | None = None
    kv_tokens: int | None = None
    kv_memory_bytes: int | None = None
    prefix_cache: bool = True
    forced_text: bool = True
    repetition_guard: bool = True
    speculate: Speculate = "off"
    overlap: Switch = "auto"
    cuda_graphs: Switch = "auto"
    num_threads: int | None = None
    grammar_timeout_s: float = DEFAULT_GRAMMAR_TIMEOUT_S
    grammar_memory_bytes: int | None = None
    plan_memory_bytes: int | None = None
    row_timeout_s: float | None = None
    kv_store: Path | str | None = None
    kv_store_bytes: int | None = None
    kv_disk_bytes: int | None = None
    kv_host_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        require(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            f"`dtype` must be auto, float32, bfloat16 or float16, not {self.dtype!r}",
        )
        require(
            self.quantize in ("off", "int8", "keep"),
            f"`quantize` must be off, int8 or keep, not {self.quantize!r}",
        )
        require(
            self.kv_dtype in ("auto", "fp8"),
            f"`kv_dtype` must be auto or fp8, not {self.kv_dtype!r}",
        )
        require(
            isinstance(self.device, str),
            f"`device` must be auto, cpu, cuda or cuda:N, not {self.device!r}",
        )
        for name in ("prefix_cache", "forced_text", "repetition_guard", "deterministic"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"`{name}` must be True or False, not {value!r}")
        require(
            self.attention in ("auto", "torch", "cpu", "triton", "flashinfer"),
            f"`attention` must be auto, torch, cpu, triton or flashinfer, not {self.attention!r}",
        )
        require(
            self.speculate in ("auto", "off")
            or (
                isinstance(self.speculate, int)
                and not isinstance(self.speculate, bool)
                and 1 <= self.speculate <= MAX_SPECULATE
            ),
            f"`speculate` must be auto, off or a number of tokens from 1 to {MAX_SPECULATE}, "
            f"not {self.speculate!r}",
        )
        for name in ("overlap", "cuda_graphs"):
            switch = getattr(self, name)
            require(
                switch in ("auto", "on", "off"), f"`{name}` must be auto, on or off, not {switch!r}"
            )
        require(
            self.overlap != "on" or self.speculate == "off",
            "`overlap` and `speculate` exclude each other: guesses follow tokens that are known; "
            "give one of them",
        )
        tiers = ("kv_store_bytes", "kv_disk_bytes", "kv_host_memory_bytes")
        counts = ("batch_size", "prefill_tokens", "kv_tokens", "kv_memory_bytes", "num_threads")
        for name in (*counts, "grammar_memory_bytes", "plan_memory_bytes", *tiers):
            value = getattr(self, name)
            require(
                value is None
                or (isinstance(value, int) and not isinstance(value, bool) and value >= 1),
                f"`{name}` must be an integer of at least 1, not {value!r}",
            )
        _require_seconds("grammar_timeout_s", self.grammar_timeout_s)
        if self.row_timeout_s is not None:
            _require_seconds("row_timeout_s", self.row_timeout_s)
        require(
            self.kv_tokens is None or self.kv_memory_bytes is None,
            "`kv_tokens` and `kv_memory_bytes` exclude each other; give one of them",
        )
        require(
            not (self.deterministic and self.kv_dtype == "fp8"),
            "`deterministic` needs the attention kernels in C, which know no `kv_dtype` fp8; give "
            "one of the two",
        )
        require(
            self.attention != "cpu" or self.kv_dtype != "fp8",
            "`attention` cpu, the kernels in C, knows no `kv_dtype` fp8; leave `attention` out, or "
            "give torch",
        )
        require(
            self.kv_store is None or isinstance(self.kv_store, (Path, str)),
            f"`kv_store` must be a folder, not {self.kv_store!r}",
        )
        require(
            self.kv_store is None or Path(self.kv_store) != Path(),
            "`kv_store` must be a folder of its own, not the current one; name one",
        )
        require(
            self.kv_store_bytes is None or self.kv_store is not None,
            "`kv_store_bytes` is the most that a store may take; name its folder with `kv_store`",
        )
        require(
            self.kv_store is None or self.prefix_cache,
            "`kv_store` needs the prefix cache, which is turned off; give one of them",
        )
        require(
            self.kv_disk_bytes is None or self.kv_host_memory_bytes is None,
            "`kv_disk_bytes` and `kv_host_memory_bytes` exclude each other; give one of them",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where results go and in which shape.

    ``reuse``: where the job has changed, rows whose prompt and settings are the same keep their
    results. ``retry``: statuses (``error``, ``truncated``) of an earlier run's rows that run again.
    ``failed_rows``: a file that takes the input rows that failed. ``abort_after_failures``:
    error rows after which the run is given up. ``keep_truncated``: truncated rows keep the
    value they were closed to, and a column ``cut`` says from where on it is not the model's.
    ``trace``: each step of the engine is written to the output's work folder. ``format`` is
    ``openai`` for the output and error files of OpenAI's Batch API, None to go by the name's
    ending.
    """

    path: Path | None = None
    format: str | None = None
    keep: tuple[str, ...] | Literal["all"] = ()
    unnest: bool = False
    keep_truncated: bool = False
    restart: bool = False
    reuse: bool = False
    retry: tuple[str, ...] = ()
    failed_rows: Path | None = None
    allow_failures: float = 0.0
    abort_after_failures: int | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        require(self.format in (None, "openai"), f"`format` must be openai, not {self.format!r}")
        if self.format is not None:
            self._check_openai()
        for status in self.retry:
            require(
                status in ("error", "truncated"),
                f"`retry` must be error, truncated or both, not {status!r}",
            )
        require(isinstance(self.trace, bool), f"`trace` must be True or False, not {self.trace!r}")
        require(
            not self.trace or self.path is not None,
            "`trace` lies beside the output; give an output file",
        )
        require(not (self.retry and self.restart), "`retry` and `restart` exclude each other")
        require(not (self.reuse and self.restart), "`reuse` and `restart` exclude each other")
        limit = self.abort_after_failures
        require(
            limit is None or (type(limit) is int and limit >= 1),
            f"`abort_after_failures` must be an integer of at least 1, not {limit!r}",
        )
        require(
            0 <= self.allow_failures <= 1,
            f"`allow_failures` must be a share between 0% and 100%, not {self.allow_failures}",
        )

    def _check_openai(self) -> None:
        require(
            self.path is not None and self.path.suffix.lower() == ".jsonl",
            "`format` openai is JSON lines; give an output that ends in .jsonl",
        )
        for name in ("keep", "unnest", "keep_truncated"):
            require(
                not getattr(self, name),
                f"`format` openai has no place for what `{name}` adds; leave out one of them",
            )

    @property
    def errors_path(self) -> Path | None:
        """Where ``format`` openai puts the requests that failed: beside the output."""
        if self.path is None or self.format is None:
            return None
        return self.path.with_name(f"{self.path.stem}.errors{self.path.suffix}")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a job that one of several workers does: the ``number``-th of ``count``."""

    number: int
    count: int

    def __post_init__(self) -> None:
        numbers = (self.number, self.count)
        require(
            all(isinstance(one, int) and not isinstance(one, bool) for one in numbers)
            and 1 <= self.number <= self.count <= MAX_SHARDS,
            f"`shard` must be a part and how many there are, from 1/1 to "
            f"{MAX_SHARDS}/{MAX_SHARDS}, not {self}",
        )

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From ``2/4``; raises `OptionError`."""
        number, _, count = str(text).partition("/")
        require(
            number.strip().isdecimal() and count.strip().isdecimal(),
            f"`shard` must be a part and how many there are, such as 2/4, not {text!r}",
        )
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def part_of(self, output: Path, format_: str | None = None) -> Path:
        """Where this part of an output goes. It is Arrow, whatever the whole will be.

        Raises `OptionError` where the whole has a ``format_`` that is not its extension's.
        """
        require(
            format_ is None,
            f"`shard` and `format` {format_} exclude each other: parts are joined as tables",
        )
        return output.with_name(f"{output.name}.{self.number}-of-{self.count}.arrow")

    def beside(self, path: Path) -> Path:
        """What this part calls another file of the run: ``errors.2-of-4.jsonl``."""
        return path.with_name(f"{path.stem}.{self.number}-of-{self.count}{path.suffix}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole job. ``input`` is a path, ``-`` for standard input, or an in-memory table.

    ``lora``: the folder of a LoRA adapter that is merged into the model as it loads.
    ``schema``: what every answer must match, as `schema.answer_format.load_format` takes it, or
    the functions that answers call, a `schema.tools.ToolSet`.
    ``schema_column``: the input column of schemas that hold for their row instead; without it
    a column ``response_format`` does. ``tool_format``: how the tools of an OpenAI batch file's
    requests are called, where their model's chat template does not say it. ``retries``: how often
    a row whose finished answer is invalid runs again. ``shard``: the part of the job that is to be
    run, into an output that holds its rows alone (`Shard.part_of`). ``questions``: what every row
    is asked, in prompts of its own each, its text first. ``long_rows``: what becomes of rows that
    do not fit the context.
    """

    input: Any
    model: str = DEFAULT_MODEL
    lora: str | None = None
    schema: Any = None
    schema_column: str | None = None
    tool_format: str | None = None
    retries: int = 0
    id_column: str | None = None
    limit: int | None = None
    shard: Shard | None = None
    prompt: PromptOptions = field(default_factory=PromptOptions)
    chats: ChatOptions = field(default_factory=ChatOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    questions: tuple[Question, ...] = ()
    long_rows: LongRows = field(default_factory=LongRows)
    trial: TrialOptions = field(default_factory=TrialOptions)
    fleet: FleetOptions = field(default_factory=FleetOptions)

    def __post_init__(self) -> None:
        for name, kind in (
            ("prompt", PromptOptions),
            ("chats", ChatOptions),
            ("sampling", SamplingOptions),
            ("engine", EngineOptions),
            ("output", OutputOptions),
            ("long_rows", LongRows),
            ("trial", TrialOptions),
            ("fleet", FleetOptions),
        ):
            value = getattr(self, name)
            require(isinstance(value, kind), f"{name} must be {kind.__name__}, not {value!r}")
        require(
            self.prompt.column is None
            or self.prompt.instruction is not None
            or self.questions != (),
            COLUMN_NEEDED,
        )
        require(
            self.limit is None
            or (isinstance(self.limit, int) and not isinstance(self.limit, bool)),
            f"`limit` must be an integer, not {self.limit!r}",
        )
        require(
            isinstance(self.retries, int)
            and not isinstance(self.retries, bool)
            and 0 <= self.retries <= 100,
            f"`retries` must be an integer from 0 to 100, not {self.retries!r}",
        )
        require(
            self.limit is None or self.limit >= 0, f"`limit` must be 0 or more, not {self.limit}"
        )
        require(
            self.shard is None or isinstance(self.shard, Shard),
            f"`shard` must be a Shard, not {self.shard!r}",
        )
        require(
            self.shard is None or self.output.path is not None,
            "`shard` runs a part of a job for others to join with; give an output file",
        )
        require(
            self.shard is None or self.trial.sample is None,
            "`shard` and `sample` exclude each other: a sample is taken of the whole job",
        )
        require(
            not (self.fleet.is_wanted and self.output.trace),
            "`workers` and `trace` exclude each other: a trace is of one engine's steps",
        )
