"""The result table's columns: names, order, types, and results turned into record batches.

A shard holds the result columns with the answer nested in ``value`` plus ``content_key``; a
finished file holds them as `result_schema` says. `arrange` goes from the one to the other, so
``--keep`` and ``--unnest`` never touch what is committed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchradix.errors import OptionError, RowError, RowErrorCode
from batchradix.sink.dictionaries import map_types, recode
from batchradix.sink.samples import SAMPLES, samples_field
from batchradix.types import Result, Status

EncodeValues = Callable[[list[Any]], Any]
"""Values (None for null) to a ``pa.Array`` of the job's value type."""

CUT = "cut"
NORMALISER = (
    "product over the places where choices part of the softmax of the model's logits over the "
    "tokens that the choices allow there, at temperature 1, before penalties"
)
_CHOICES_KEY = b"batchradix.choices"
_PROBABILITY = pa.struct([("choice", pa.string()), ("probability", pa.float64())])

CONTENT_KEY = pa.field("content_key", pa.binary(16))
_ERROR_TYPE = pa.struct([("code", pa.string()), ("message", pa.string())])


def probabilities_field(choices: Sequence[str]) -> pa.Field:
    """The column of every choice's probability, in this order; its metadata name the choices
    and say what the probabilities are normalised over."""
    metadata = {
        "batchradix.normaliser": NORMALISER,
        _CHOICES_KEY: json.dumps(list(choices), ensure_ascii=False),
    }
    return pa.field("probabilities", pa.list_(_PROBABILITY), metadata=metadata)


def result_schema(
    *,
    id_type: pa.DataType,
    value_type: pa.DataType | None,
    choices: Sequence[str] | None = None,
    keep: pa.Schema | None = None,
    unnest: bool = False,
    keep_truncated: bool = False,
    has_reasoning: bool = False,
    has_samples: bool = False,
    metadata: Mapping[str, str],
) -> pa.Schema:
    """The schema of a finished file; the same whatever the rows hold.

    Columns in order: ``id``; ``row`` int64, the input row's number from 0; ``status`` string
    (ok, truncated, error); ``value`` of ``value_type``, absent when that is None, with
    ``unnest`` one column a field of it instead; ``probabilities`` list of struct of choice and
    probability, absent when ``choices`` is None; with ``keep_truncated`` ``cut`` string, the
    JSON pointer of the first field that was cut short; ``text`` large_string; with
    ``has_reasoning`` ``reasoning`` large_string, null where there was no thinking; ``error`` null
    or struct of code and message; ``finish_reason`` string; ``prompt_tokens``, ``cached_tokens``,
    ``completion_tokens`` int32, and with ``has_reasoning`` ``reasoning_tokens``; with
    ``has_samples`` ``samples``, a list of structs of what each answer to the row has of its own;
    then the columns of ``keep``, whose dictionary indices become int32 so that the dictionaries of
    all batches fit together.
    ``metadata`` becomes the schema's metadata.

    Raises `OptionError` when a name would occur twice, ``unnest`` finds no object, or
    ``keep_truncated`` no values.
    """
    before = [
        pa.field("id", id_type),
        pa.field("row", pa.int64()),
        pa.field("status", pa.string()),
    ]
    if keep_truncated and value_type is None:
        raise OptionError("`keep_truncated` needs a schema: without one no answer is truncated")
    after = [pa.field(CUT, pa.string())] if keep_truncated else []
    after += [
        pa.field("text", pa.large_string()),
        *([pa.field("reasoning", pa.large_string())] if has_reasoning else []),
        pa.field("error", _ERROR_TYPE),
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("cached_tokens", pa.int32()),
        pa.field("completion_tokens", pa.int32()),
        *([pa.field("reasoning_tokens", pa.int32())] if has_reasoning else []),
    ]
    if choices is not None:
        after.insert(0, probabilities_field(choices))
    fixed = {f.name for f in before + after}
    if unnest:
        values = _unnested(value_type, fixed | {"value"})
    else:
        values = [] if value_type is None else [pa.field("value", value_type)]
    if has_samples:
        alone = [] if value_type is None else [pa.field("value", value_type)]
        after.append(samples_field(pa.schema(before + alone + after)))
        fixed.add(SAMPLES)
    kept = [] if keep is None else [f.with_type(_int32_indices(f.type)) for f in keep]
    taken = fixed | {f.name for f in values}
    colliding = sorted({f.name for f in kept if f.name in taken})
    if colliding:
        raise OptionError(
            f"kept columns have the names of result columns: {', '.join(colliding)}; "
            f"rename them in the input or do not keep them"
        )
    _refuse_doubles(kept)
    return pa.schema(before + values + after + kept, metadata=dict(metadata) or None)


def _unnested(value_type: pa.DataType | None, fixed: set[str]) -> list[pa.Field]:
    if value_type is None or not pa.types.is_struct(value_type):
        what = "there is no schema" if value_type is None else f"its values are {value_type}"
        raise OptionError(f"`unnest` needs a schema whose top is an object with properties; {what}")
    fields = [value_type.field(i).with_nullable(True) for i in range(value_type.num_fields)]
    colliding = sorted({f.name for f in fields if f.name in fixed})
    if colliding:
        raise OptionError(
            f"`unnest` would make columns with the names of result columns: "
            f"{', '.join(colliding)}; rename these properties or leave out `unnest`"
        )
    _refuse_doubles(fields)
    return fields


def _refuse_doubles(fields: Sequence[pa.Field]) -> None:
    counts = Counter(field.name for field in fields)
    doubled = sorted(name for name, count in counts.items() if count > 1)
    if doubled:
        raise OptionError(f"columns occur twice: {', '.join(doubled)}; rename one of each")


def _int32_indices(type_: pa.DataType) -> pa.DataType:
    return map_types(type_, lambda d: pa.dictionary(pa.int32(), d.value_type, ordered=d.ordered))


def shard_schema(
    *,
    id_type: pa.DataType,
    value_type: pa.DataType | None,
    choices: Sequence[str] | None = None,
    has_reasoning: bool = False,
    job: str = "",
) -> pa.Schema:
    """The schema of a shard: result columns, the answer nested, and ``content_key``.

    Where there are values, ``cut`` is there too, whatever the finished file will hold.
    Dictionary-encoded values are stored plain, so that shards need no common dictionary.
    ``job`` is the digest of the fingerprint of the job the results belong to.
    """
    plain = None if value_type is None else map_types(value_type, lambda d: d.value_type)
    schema = result_schema(
        id_type=id_type,
        value_type=plain,
        choices=choices,
        keep_truncated=value_type is not None,
        has_reasoning=has_reasoning,
        metadata={"batchradix.job": job},
    )
    return schema.append(CONTENT_KEY)


def results_to_batch(
    results: Sequence[Result], schema: pa.Schema, encode_values: EncodeValues | None
) -> pa.RecordBatch:
    """Results as one record batch of ``schema`` (neither unnested nor with kept columns).

    ``schema`` is that of `result_schema` or `shard_schema`. ``encode_values`` takes
    the values in order and is None exactly when there is no ``value`` column. Text that
    is not valid Unicode has its lone surrogates replaced by U+FFFD. A value that the encoder
    refuses makes its row an error row (``not_representable``), the other rows stay.
    """
    getters: dict[str, Callable[[Result], Any]] = {
        "id": lambda r: r.id,
        "row": lambda r: r.row,
        "status": lambda r: r.status.value,
        CUT: lambda r: r.cut,
        "text": lambda r: r.text,
        "error": lambda r: r.error and {"code": r.error.code.value, "message": r.error.message},
        "finish_reason": lambda r: r.finish_reason.value,
        "prompt_tokens": lambda r: r.prompt_tokens,
        "cached_tokens": lambda r: r.cached_tokens,
        "completion_tokens": lambda r: r.completion_tokens,
        "reasoning": lambda r: r.reasoning,
        "reasoning_tokens": lambda r: r.reasoning_tokens,
        "content_key": lambda r: r.content_key,
    }
    values = None
    if encode_values is not None:
        results, values = _encoded(results, encode_values)
    columns = []
    for field in schema:
        if field.name == "value":
            array = values
        elif field.name == "probabilities":
            array = _probabilities(results, field)
        else:
            array = _array([getters[field.name](r) for r in results], field.type)
        columns.append(recode(array, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


_REFUSALS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def _encoded(
    results: Sequence[Result], encode_values: EncodeValues
) -> tuple[Sequence[Result], pa.Array]:
    try:
        return results, _one_array(encode_values([r.value for r in results]))
    except _REFUSALS:
        results = [_checked(r, encode_values) for r in results]
        return results, _one_array(encode_values([r.value for r in results]))


def _probabilities(results: Sequence[Result], field: pa.Field) -> pa.Array:
    """The results' probabilities beside the names of the choices, null where there are none."""
    choices = json.loads(field.metadata[_CHOICES_KEY])
    listed = [r.probabilities for r in results if r.probabilities is not None]
    items = pa.StructArray.from_arrays(
        [
            pa.array(choices * len(listed), pa.string()),
            pa.array([p for probabilities in listed for p in probabilities], pa.float64()),
        ],
        fields=list(_PROBABILITY),
    )
    sizes = [0 if r.probabilities is None else len(choices) for r in results]
    offsets = list(accumulate(sizes, initial=0))
    missing = pa.array([r.probabilities is None for r in results], pa.bool_())
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), items, type=field.type, mask=missing
    )


def _one_array(array: Any) -> Any:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _checked(result: Result, encode_values: EncodeValues) -> Result:
    """The result, or an error in its place when its value has no place in the type."""
    try:
        encode_values([result.value])
    except _REFUSALS as e:
        if result.status is Status.TRUNCATED:
            return replace(result, value=None)
        error = RowError(
            RowErrorCode.NOT_REPRESENTABLE, f"the value does not fit its column's type: {e}"
        )
        return replace(result, status=Status.ERROR, value=None, error=error)
    return result


def _array(items: list[Any], type_: pa.DataType) -> pa.Array:
    try:
        return pa.array(items, type_)
    except UnicodeEncodeError:
        return pa.array([_clean(x) for x in items], type_)


def _clean(item: Any) -> Any:
    """Strings (in an error's dict as well) with lone surrogates replaced by U+FFFD."""
    if isinstance(item, str):
        return item.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(item, dict):
        return {k: _clean(v) for k, v in item.items()}
    return item


def _null_where(values: pa.Array, mask: pa.Array) -> pa.Array:
    """``values``, of any type, with null where ``mask`` is true."""
    if not pc.any(mask).as_py():
        return values
    places = pa.array(np.arange(len(values), dtype=np.int64))
    return values.take(pc.if_else(mask, pa.scalar(None, pa.int64()), places))


def arrange(
    batch: pa.RecordBatch, schema: pa.Schema, *, unnest: bool, kept: pa.RecordBatch | None
) -> pa.RecordBatch:
    """A batch of shard columns as one of the finished file's ``schema``.

    Where that has no ``cut``, values of truncated rows become null.
    ``kept`` has as many rows and holds, by name, the columns that ``batch`` does not.
    """
    columns: dict[str, pa.Array] = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns.pop(CONTENT_KEY.name)
    if CUT not in schema.names and "value" in columns:
        is_truncated = pc.equal(columns["status"], Status.TRUNCATED.value)
        columns["value"] = _null_where(columns["value"], is_truncated)
    if unnest:
        value = columns.pop("value")
        columns |= dict(zip([f.name for f in value.type], value.flatten(), strict=True))
    if kept is not None:
        columns |= {
            name: kept.column(kept.schema.get_field_index(name))
            for name in schema.names
            if name not in columns
        }
    arrays = [recode(columns[f.name], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
