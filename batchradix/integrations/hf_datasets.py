"""Hugging Face datasets: a function to map, a map over the whole data set, a card for the hub."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from batchradix.errors import OptionError
from batchradix.integrations.answerer import Answerer
from batchradix.integrations.batches import answered, rows_of
from batchradix.integrations.dataset_card import TAGS, section, status_counts, with_section
from batchradix.sink.dictionaries import map_types, recode


def need_datasets() -> Any:
    """The package `datasets`. Raises `OptionError` where it is not installed."""
    if importlib.util.find_spec("datasets") is None:
        raise OptionError(
            "Hugging Face datasets is not installed; install it with: pip install datasets"
        )
    import datasets

    return datasets


class Extractor(Answerer):
    """A function for ``Dataset.map(extractor, batched=True)`` that answers every row.

    It adds the columns of a result (``status``, ``value``, ``text``, ``error``, ...) or, with
    ``unnest``, one a field of the answer; see `Answerer` for their names and
    ``result_columns``. All other options are those of `batchradix.run`, and the fields of
    ``sampling`` and ``engine`` by their own names (``max_tokens=64``).

    It pickles to its configuration, and `datasets` hashes it by its `fingerprint`: the same in
    every process, so that a map that was done is read from the cache and no model is loaded.
    With ``num_proc`` each process loads its own.
    """

    def __init__(
        self,
        *,
        unnest: bool = False,
        result_columns: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(unnest=unnest, result_columns=result_columns, **options)
        _hash_by_fingerprint()

    def __call__(self, batch: Any, *numbers: Any) -> Any:
        """The answers to a batch in its own kind: a dict of columns for a dict of columns; a
        table or frame with columns added for one. ``numbers``: what ``with_indices`` and
        ``with_rank`` add. Raises the `UsageError` of whatever is wrong with the job."""
        rank = next((n for n in reversed(numbers) if isinstance(n, int)), None)
        return answered(batch, plain(self.answers(rows_of(batch), rank)))

    def features(self, dataset: Any, *, remove_columns: str | Iterable[str] = ()) -> Any:
        """The `datasets.Features` after the map: for its argument ``features``.

        ``dataset`` is what is mapped, ``remove_columns`` as the map is told. Types come from the
        schema, texts out of a few as plain strings.
        """
        removed = {remove_columns} if isinstance(remove_columns, str) else set(remove_columns)
        known = getattr(dataset, "features", None)
        if known is None:
            raise OptionError("the features of this data set are not known; name its columns first")
        kept = {name: feature for name, feature in known.items() if name not in removed}
        return need_datasets().Features(kept | self.answer_features(list(known)))

    def answer_features(self, columns: Sequence[str]) -> Any:
        """The `datasets.Features` of the answers beside a data set with these columns."""
        schema = plain_schema(self.answer_schema(columns))
        return need_datasets().Features.from_arrow_schema(schema)

    def push_to_hub(self, dataset: Any, repo_id: str, **options: Any) -> Any:
        """``dataset.push_to_hub(repo_id, ...)``, with a card that says how the answers came about.

        ``dataset`` is what a map with this extractor gave, one split or a dict of them. The card
        names model, revision, schema, template and the shares of rows that are ok, truncated and
        failed; what else a card holds stays. ``options`` are those of ``Dataset.push_to_hub``,
        whose ``CommitInfo`` is returned. Raises what `huggingface_hub` raises.
        """
        if repo_id.startswith("buckets/"):
            raise OptionError(
                "a bucket has no card; name a data set repository, or use the data set's own "
                "push_to_hub"
            )
        counts = status_counts(dataset)
        text = section(
            self.config,
            self.checkpoint,
            self.format,
            dtype=self.dtype,
            num_rows=sum(map(len, dataset.values())) if isinstance(dataset, dict) else len(dataset),
            counts=counts,
        )
        commit = dataset.push_to_hub(repo_id, **options)
        token = options.get("token")
        revision = commit.pr_revision or options.get("revision")
        card = _card(commit.repo_url.repo_id, revision, token)
        card.text = with_section(card.text, text)
        card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or ()), *TAGS]))
        card.push_to_hub(
            commit.repo_url.repo_id,
            revision=revision,
            token=token,
            repo_type="dataset",
            commit_message="Say how the answers were made",
        )
        return commit


def _card(repo_id: str, revision: str | None, token: Any) -> Any:
    """The card of a data set that was pushed just now."""
    from huggingface_hub import DatasetCard, hf_hub_download

    path = hf_hub_download(
        repo_id, "README.md", repo_type="dataset", revision=revision, token=token
    )
    return DatasetCard.load(path)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """``schema`` with strings in place of dictionaries, which data sets do not have."""
    types = [map_types(field.type, lambda d: d.value_type) for field in schema]
    return pa.schema([pa.field(f.name, t) for f, t in zip(schema, types, strict=True)])


def plain(table: pa.Table) -> pa.Table:
    """``table`` as one of `plain_schema`."""
    schema = plain_schema(table.schema)
    columns = [
        pa.chunked_array([recode(chunk, field.type) for chunk in column.chunks], field.type)
        for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.table(columns, schema=schema)


def _hash_by_fingerprint() -> None:
    """Has `datasets` hash extractors by their fingerprint and not by all of their configuration,
    of which device and batch size are a part that changes no answer."""
    if importlib.util.find_spec("datasets") is None:
        return
    try:
        from datasets.utils._dill import pklregister
    except ImportError:
        return  # it pickles then, and a changed device is computed anew

    def save(pickler: Any, extractor: Extractor) -> None:
        pickler.save_reduce(Extractor, (extractor.fingerprint,), obj=extractor)

    pklregister(Extractor)(save)
