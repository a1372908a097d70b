"""The Python face: `run` and `plan` for a whole table, `LLM` for lists of prompts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa

from batchradix import fleet, pipeline
from batchradix.chat_options import ChatOptions
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import (
    DEFAULT_MODEL,
    EngineOptions,
    OutputOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
    Shard,
)
from batchradix.errors import OptionError
from batchradix.fleet_options import DEFAULT_WORKER_TIMEOUT_S, FleetOptions
from batchradix.plan.cached import PlanSummary
from batchradix.report.progress import choose_progress
from batchradix.report.summary import Summary
from batchradix.row_options import long_rows
from batchradix.schema.answer_format import answer_format
from batchradix.schema.questions import read_questions
from batchradix.trial import TrialOptions
from batchradix.types import Result, Status, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What `run` did: its counts, and the table of answers or where it was written."""

    summary: Summary
    table: pa.Table | None
    path: Path | None

    def to_arrow(self) -> pa.Table:
        """The table of answers, read back when it went to a file."""
        if self.table is not None:
            return self.table
        from batchradix.sink.formats import read_table

        assert self.path is not None
        return read_table(self.path)

    def to_reader(self) -> pa.RecordBatchReader:
        """The table of answers as a stream; one that went to an Arrow or Parquet file is read
        batch by batch, as it is asked for."""
        if self.table is not None:
            return self.table.to_reader()
        from batchradix.sink.formats import read_batches

        assert self.path is not None
        return read_batches(self.path)

    def to_polars(self) -> Any:
        """The table of answers as a ``polars.DataFrame``."""
        import polars

        return polars.from_arrow(self.to_arrow())


def _prompt_options(
    template: str | None,
    chat: bool,
    instruction: str | None,
    column: str | None,
    system: str | None,
    null_text: str | None,
    reorder_columns: bool,
    sort_passages: str | None,
) -> PromptOptions:
    return PromptOptions(
        template=template,
        chat=chat,
        instruction=instruction,
        column=column,
        system=system,
        null_text=null_text,
        reorder_columns=reorder_columns,
        sort_passages=sort_passages,
    )


def _path_text(value: str | os.PathLike[str], option: str) -> str:
    """The text of a name or path. Raises `OptionError` for anything else."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise OptionError(f"`{option}` must be a name or a path, not {value!r}")
    return text


def run(
    input: Any,
    *,
    output: str | os.PathLike[str] | None = None,
    format: str | None = None,
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    lora: str | os.PathLike[str] | None = None,
    schema: Any = None,
    fields: str | None = None,
    regex: str | None = None,
    grammar: str | Path | None = None,
    choices: str | Path | Sequence[str] | None = None,
    tools: Any = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    tool_format: str | None = None,
    schema_column: str | None = None,
    retries: int = 0,
    template: str | None = None,
    chat: bool = False,
    instruction: str | None = None,
    column: str | None = None,
    system: str | None = None,
    null_text: str | None = None,
    reorder_columns: bool = False,
    sort_passages: str | None = None,
    questions: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overflow: str = "error",
    chunk_tokens: int | None = None,
    chunk_overlap: int = 0,
    combine: str | Mapping[str, str] | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    thinking: Literal["auto", "on", "off"] = "auto",
    thinking_tokens: int | None = None,
    id_column: str | None = None,
    keep: Sequence[str] | Literal["all"] | None = None,
    limit: int | None = None,
    unnest: bool = False,
    keep_truncated: bool = False,
    restart: bool = False,
    trace: bool = False,
    shard: str | None = None,
    sample: int | None = None,
    sample_seed: int | None = None,
    price_per_hour: float | None = None,
    gold: str | None = None,
    workers: int | Literal["auto"] | None = None,
    ray_address: str | None = None,
    worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S,
    sampling: SamplingOptions | None = None,
    engine: EngineOptions | None = None,
    show_progress: bool = False,
) -> RunResult:
    """Runs every row of ``input`` through a model: the Python form of ``batchradix run``.

    ``input`` is a path (Parquet, JSONL, CSV, Arrow; a folder, a glob, an address) or a table in
    memory (pyarrow, Polars, a Hugging Face dataset, a list of dicts), a
    ``pyarrow.RecordBatchReader`` or a DuckDB relation. An OpenAI batch file, or a list of its
    requests, is answered as its API does with ``format="openai"``. ``lora`` is the folder of an
    adapter that is merged into the model. ``schema`` is a JSON Schema as path, text or dict, or a
    pydantic model class; instead of it ``fields`` is a schema in short
    (``"vendor: str, total: float?"``), ``regex`` a pattern that the whole answer matches,
    ``grammar`` EBNF (GBNF) as text or a file, ``choices`` the texts to choose from.
    ``tools`` are functions that answers may call (OpenAI's list, its JSON text or a file),
    ``tool_choice`` is ``"auto"``, ``"required"`` or a function's name,
    ``parallel_tool_calls=False`` allows one call an answer, ``tool_format`` says how calls are
    written where the model's chat template does not; ``value`` is then a list of name and
    arguments (JSON text).
    ``schema_column`` names a column of schemas for single rows.
    A row whose finished answer is invalid runs again up to ``retries`` times.

    Prompts come from a ``prompt`` or ``messages`` column, from ``template`` with ``{{ column }}``
    places, or from ``instruction`` and ``column``; ``null_text`` stands in for a field that is null
    or missing in a row, which is an error row otherwise. With ``reorder_columns`` the lines of a
    template that list fields stand, in each row, as rows share most of them, and with
    ``sort_passages`` so do the items of the lists in that column. ``questions`` (a file
    or a mapping, see `schema.questions.read_questions`) are asked of every row, whose text comes
    first; ``value`` has a field for each. ``overflow`` is what becomes of rows that do not fit the
    context: ``"error"``, ``"truncate-left"``, ``"truncate-middle"``, or ``"chunk"``: parts of
    ``chunk_tokens`` with ``chunk_overlap``, whose answers ``combine`` by ``"first"``, ``"union"``,
    ``"vote"`` or ``"ask"``, or by a mapping of fields to these.
    ``chat_template`` replaces the model's (Jinja text, or the name of one of several that it has),
    ``chat_template_kwargs`` are further variables of it. ``thinking`` lets the model think before
    it answers, at most ``thinking_tokens`` tokens; that goes to a column ``reasoning``. With
    ``output`` results are committed while it runs and the same call continues after a crash;
    without, the table comes back in memory. ``keep`` names input columns to carry over: by default
    all of a table in memory, none of a file. ``keep_truncated`` keeps the values that truncated
    answers were closed to, and adds a column ``cut``: the JSON pointer of the first field that was
    cut short. ``trace`` writes each step down beside the output, for ``batchradix report``.
    ``shard="2/4"`` runs the second of four parts of the job, into a file beside ``output``
    (`RunResult.path`); `merge` joins them. ``sample`` runs so many rows, chosen over the whole
    input by ``sample_seed`` (that of ``sampling`` when None), and ``RunResult.summary.estimate``
    says what the whole job would take, with ``price_per_hour`` what it would cost too; the same
    call without ``sample`` goes on with them. ``gold`` names the input column of right answers:
    ``summary.gold`` counts, field by field, how many answers are right. ``workers`` engines on Ray
    share the job (``"auto"``: one for each GPU), on the cluster at ``ray_address`` or in processes
    that end with the run; one that takes no step for ``worker_timeout_s`` seconds is replaced.

    Raises a `batchradix.errors.BatchradixError`; a row that fails is an error row instead.
    """
    if keep is None:
        keep = () if format is not None or isinstance(input, (str, os.PathLike)) else "all"
    elif isinstance(keep, str):
        keep = keep if keep == "all" else (keep,)
    elif not isinstance(keep, Iterable):
        raise OptionError(f"`keep` must be names of columns or 'all', not {keep!r}")
    path = None if output is None else Path(_path_text(output, "output"))
    part = None if shard is None else Shard.parse(shard)
    if part is not None and path is not None:
        path = part.part_of(path, format)
    config = RunConfig(
        input=input,
        model=_path_text(model, "model"),
        lora=None if lora is None else _path_text(lora, "lora"),
        schema=answer_format(
            schema=schema,
            fields=fields,
            regex=regex,
            grammar=grammar,
            choices=choices,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            tool_format=tool_format if tools is not None else None,
        ),
        schema_column=schema_column,
        tool_format=tool_format,
        retries=retries,
        id_column=id_column,
        limit=limit,
        shard=part,
        prompt=_prompt_options(
            template, chat, instruction, column, system, null_text, reorder_columns, sort_passages
        ),
        questions=() if questions is None else read_questions(questions),
        long_rows=long_rows(overflow, chunk_tokens, chunk_overlap, combine),
        chats=ChatOptions(
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            thinking=thinking,
            thinking_tokens=thinking_tokens,
        ),
        sampling=sampling or SamplingOptions(),
        engine=engine or EngineOptions(),
        output=OutputOptions(
            path=path,
            format=format,
            keep="all" if keep == "all" else tuple(keep),
            unnest=unnest,
            keep_truncated=keep_truncated,
            restart=restart,
            trace=trace,
        ),
        trial=TrialOptions(
            sample=sample, sample_seed=sample_seed, price_per_hour=price_per_hour, gold=gold
        ),
        fleet=FleetOptions(
            workers=workers, ray_address=ray_address, worker_timeout_s=worker_timeout_s
        ),
    )
    outcome = pipeline.run(
        config,
        progress=choose_progress(quiet=not show_progress),
        engines=fleet.engines_for(config),
    )
    return RunResult(summary=outcome.summary, table=outcome.table, path=config.output.path)


def merge(
    output: str | os.PathLike[str], parts: Sequence[str | os.PathLike[str]] | None = None
) -> pipeline.Merged:
    """Joins the parts that runs with ``shard`` wrote into the table ``output`` that one run writes:
    the Python form of ``batchradix merge``.

    ``parts`` are their files; when None, all that lie beside ``output`` under its name. Raises a
    `batchradix.errors.InputError` where some are missing or not of one job.
    """
    paths = [Path(_path_text(part, "parts")) for part in parts or ()]
    return pipeline.merge(Path(_path_text(output, "output")), paths)


def plan(
    input: Any,
    *,
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    schema: Any = None,
    fields: str | None = None,
    regex: str | None = None,
    grammar: str | Path | None = None,
    choices: str | Path | Sequence[str] | None = None,
    tools: Any = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    tool_format: str | None = None,
    schema_column: str | None = None,
    template: str | None = None,
    chat: bool = False,
    instruction: str | None = None,
    column: str | None = None,
    system: str | None = None,
    null_text: str | None = None,
    reorder_columns: bool = False,
    sort_passages: str | None = None,
    questions: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overflow: str = "error",
    chunk_tokens: int | None = None,
    chunk_overlap: int = 0,
    max_tokens: int | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    thinking: Literal["auto", "on", "off"] = "auto",
    thinking_tokens: int | None = None,
    id_column: str | None = None,
    limit: int | None = None,
) -> PlanSummary:
    """What the prompts of ``input`` share, without loading weights; arguments as in `run`.
    ``max_tokens``: of the answers, for which long rows have to leave room."""
    config = RunConfig(
        input=input,
        model=_path_text(model, "model"),
        schema=answer_format(
            schema=schema,
            fields=fields,
            regex=regex,
            grammar=grammar,
            choices=choices,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            tool_format=tool_format if tools is not None else None,
        ),
        schema_column=schema_column,
        tool_format=tool_format,
        id_column=id_column,
        limit=limit,
        prompt=_prompt_options(
            template, chat, instruction, column, system, null_text, reorder_columns, sort_passages
        ),
        questions=() if questions is None else read_questions(questions),
        long_rows=long_rows(overflow, chunk_tokens, chunk_overlap, None),
        sampling=SamplingOptions(max_tokens=max_tokens),
        chats=ChatOptions(
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            thinking=thinking,
            thinking_tokens=thinking_tokens,
        ),
    )
    return pipeline.plan(config)


def _without_cut_value(result: Result) -> Result:
    if result.status is Status.TRUNCATED:
        return replace(result, value=None, cut=None)
    return result


class LLM:
    """A loaded model that answers lists of prompts and keeps their prefixes between calls.

    Weights load with the first `generate`. ``lora`` is the folder of an adapter that is merged into
    them. ``engine`` says how it runs; see `batchradix.config.EngineOptions`. Usable as a context
    manager; `close` frees the memory.
    Calls from several threads run one after the other. A call that was interrupted leaves
    nothing behind: the next one loads the weights again. Raises `ModelError` when the model
    cannot be had or run.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        lora: str | os.PathLike[str] | None = None,
        engine: EngineOptions | None = None,
    ) -> None:
        name = _path_text(model, "model")
        options = RunConfig(input=None, engine=engine or EngineOptions()).engine
        adapter = None if lora is None else _path_text(lora, "lora")
        self._session = pipeline.Session(open_checkpoint(name, lora=adapter), options)

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's files, config, tokenizer and chat template."""
        return self._session.checkpoint

    @property
    def usage(self) -> Usage:
        """The engine's counters over all calls so far."""
        return self._session.usage

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[Mapping[str, Any]]],
        *,
        schema: Any = None,
        fields: str | None = None,
        regex: str | None = None,
        grammar: str | Path | None = None,
        choices: str | Path | Sequence[str] | None = None,
        tools: Any = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        tool_format: str | None = None,
        retries: int = 0,
        chats: ChatOptions | None = None,
        sampling: SamplingOptions | None = None,
        keep_truncated: bool = False,
    ) -> list[Result]:
        """One `Result` a prompt, in order; a failed prompt is a result with an error.

        A prompt is a text (raw, as it is) or a conversation: a list of messages with role and
        content (through the model's chat template). ``chats``: another template, its variables,
        thinking before the answer (`Result.reasoning`). ``schema`` as in `run`; ``value`` is the
        parsed answer then; a truncated one has none, or with ``keep_truncated`` the value it
        was closed to and ``cut``. Prompts are ordered by shared prefix, duplicates run once.
        """
        given: object = prompts
        if isinstance(given, bytes) or not isinstance(given, Iterable):
            raise OptionError(
                f"prompts must be texts or conversations, not {type(prompts).__name__}"
            )
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        if not listed:
            return []
        is_text = {isinstance(prompt, str) for prompt in listed}
        if len(is_text) != 1:
            raise OptionError("prompts must be all texts or all conversations")
        name = "prompt" if is_text == {True} else "messages"
        config = RunConfig(
            input=[{name: prompt} for prompt in listed],
            model=self.checkpoint.name,
            schema=answer_format(
                schema=schema,
                fields=fields,
                regex=regex,
                grammar=grammar,
                choices=choices,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                tool_format=tool_format,
            ),
            retries=retries,
            chats=chats or ChatOptions(),
            sampling=sampling or SamplingOptions(),
        )
        results = self._session.results(config)
        return results if keep_truncated else [_without_cut_value(one) for one in results]

    def close(self) -> None:
        """Frees weights and cache; idempotent."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
