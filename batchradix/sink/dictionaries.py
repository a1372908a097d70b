"""Dictionary-encoded columns, at any depth: changing their type, and one dictionary for all.

An Arrow IPC file holds a single dictionary a field, so batches that come with dictionaries of
their own are brought to a common one (`DictionaryUnion`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Path = tuple[int | str, ...]


def map_types(type_: pa.DataType, leaf: Callable[[Any], pa.DataType]) -> pa.DataType:
    """``type_`` with every dictionary type inside it replaced by ``leaf(it)``."""
    if pa.types.is_dictionary(type_):
        return leaf(type_)

    def mapped(field: pa.Field) -> pa.Field:
        return field.with_type(map_types(field.type, leaf))

    if pa.types.is_struct(type_):
        return pa.struct([mapped(type_.field(i)) for i in range(type_.num_fields)])
    if pa.types.is_map(type_):
        return pa.map_(mapped(type_.key_field), mapped(type_.item_field), type_.keys_sorted)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(mapped(type_.value_field), type_.list_size)
    if pa.types.is_large_list(type_):
        return pa.large_list(mapped(type_.value_field))
    if pa.types.is_list(type_):
        return pa.list_(mapped(type_.value_field))
    return type_


def recode(array: pa.Array, target: pa.DataType) -> pa.Array:
    """``array`` as ``target``, which may have other dictionaries, or plain values in their
    place. Unlike a cast it takes no offence at what lies below null structs.

    Raises ``pa.ArrowException`` when a value does not fit.
    """
    return _rebuild(array, target, _recoded, ())


def _recoded(array: pa.Array, target: pa.DataType, path: Path) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        if not pa.types.is_dictionary(target):
            return array.dictionary.take(array.indices).cast(target)
        indices = array.indices.cast(target.index_type)
        values = array.dictionary.cast(target.value_type)
        return pa.DictionaryArray.from_arrays(indices, values, ordered=target.ordered)
    return array.cast(target)


def _rebuild(
    array: pa.Array, target: pa.DataType, leaf: Callable[..., pa.Array], path: Path
) -> pa.Array:
    """``array`` with type ``target``, which differs at leaves alone: ``leaf(array,
    target, path)`` turns those that differ and every dictionary."""
    source = array.type
    # Names of nested fields' encodings stand in their metadata, which writers read.
    if source.equals(target, check_metadata=True) and not pa.types.is_dictionary(source):
        return array
    if source.id != target.id or not pa.types.is_nested(source):
        return leaf(array, target, path)
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(source):
        # flatten makes fields null below null structs, where anything may lie otherwise
        children = [
            _rebuild(child, target.field(i).type, leaf, (*path, i))
            for i, child in enumerate(array.flatten())
        ]
        return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)
    if pa.types.is_fixed_size_list(source):
        size = source.list_size
        inner = array.values.slice(array.offset * size, len(array) * size)
        inner = _rebuild(inner, target.value_type, leaf, (*path, "item"))
        return pa.FixedSizeListArray.from_arrays(inner, type=target, mask=mask)
    offsets = array.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    offsets = pc.subtract(offsets, offsets[0])
    if pa.types.is_map(source):
        keys, items = (x.slice(first, last - first) for x in (array.keys, array.items))
        keys = _rebuild(keys, target.key_type, leaf, (*path, "key"))
        items = _rebuild(items, target.item_type, leaf, (*path, "item"))
        return pa.MapArray.from_arrays(offsets, keys, items, type=target, mask=mask)
    inner = array.values.slice(first, last - first)
    inner = _rebuild(inner, target.value_type, leaf, (*path, "item"))
    return type(array).from_arrays(offsets, inner, type=target, mask=mask)


class DictionaryUnion:
    """Brings batches with differing dictionaries to one dictionary a field.

    The union keeps the order in which values are met, so it is a function of the rows alone.
    `index` turns dictionaries into plain indices of the union so far; as the union only
    grows, `restore` makes dictionaries of them again once all batches have been seen.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.index_schema = pa.schema(
            [f.with_type(map_types(f.type, lambda d: d.index_type)) for f in schema]
        )
        self._values: dict[Path, pa.Array] = {}

    @property
    def needed(self) -> bool:
        """Whether any field holds a dictionary."""
        return not self.index_schema.equals(self.schema)

    def index(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with indices in place of dictionaries; its values join the union."""
        return self._each(batch, self.index_schema, self._to_indices)

    def restore(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch of `index` with dictionaries again, every batch with the same ones."""
        return self._each(batch, self.schema, self._to_dictionary)

    @staticmethod
    def _each(
        batch: pa.RecordBatch, schema: pa.Schema, leaf: Callable[..., pa.Array]
    ) -> pa.RecordBatch:
        columns = [
            _rebuild(column, field.type, leaf, (i,))
            for i, (column, field) in enumerate(zip(batch.columns, schema, strict=True))
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _to_indices(self, array: pa.Array, target: pa.DataType, path: Path) -> pa.Array:
        known = self._values.get(path, array.dictionary.slice(0, 0))
        new = array.dictionary.filter(pc.invert(pc.is_in(array.dictionary, value_set=known)))
        # unique and drop_null: a dictionary may itself repeat values or hold a null
        known = self._values[path] = pa.concat_arrays([known, new.unique().drop_null()])
        positions = pc.index_in(array.dictionary, value_set=known, skip_nulls=True)
        return positions.take(array.indices).cast(target)

    def _to_dictionary(self, array: pa.Array, target: pa.DataType, path: Path) -> pa.Array:
        values = self._values.get(path)
        if values is None:
            values = pa.array([], target.value_type)
        return pa.DictionaryArray.from_arrays(array, values, ordered=target.ordered)
