"""Arrow columns as plain Arrow types, and as the Python values that prompts are made of."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

# KeyError: a time zone that this machine does not know.
_NO_PYTHON_VALUE = (ValueError, OverflowError, KeyError, pa.ArrowException)


class Unreadable:
    """Stands for a value that has no Python counterpart; ``reason`` says why."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


def plain_type(type_: pa.DataType) -> pa.DataType:
    """The type without the encodings in which a file happened to store it.

    Dictionaries and run lengths are decoded, views become large types, a top-level UUID
    becomes its text and any other extension type its storage; nested types likewise.
    """
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        is_uuid = type_.extension_name == "arrow.uuid"
        return pa.string() if is_uuid else plain_type(type_.storage_type)
    if types.is_dictionary(type_) or types.is_run_end_encoded(type_):
        return plain_type(type_.value_type)
    if types.is_string_view(type_):
        return pa.large_string()
    if types.is_binary_view(type_):
        return pa.large_binary()
    if types.is_struct(type_):
        return pa.struct([_plain_field(f) for f in type_.fields])
    if types.is_map(type_):
        return pa.map_(_plain_field(type_.key_field), _plain_field(type_.item_field))
    if types.is_fixed_size_list(type_):
        return pa.list_(_plain_field(type_.value_field), type_.list_size)
    if types.is_large_list(type_) or types.is_large_list_view(type_):
        return pa.large_list(_plain_field(type_.value_field))
    if types.is_list(type_) or types.is_list_view(type_):
        return pa.list_(_plain_field(type_.value_field))
    return type_


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, plain_type(field.type), field.nullable)


def plain_array(array: pa.Array, target: pa.DataType | None = None) -> pa.Array:
    """An array of the type ``target`` (by default its own `plain_type`), values unchanged."""
    target = plain_type(array.type) if target is None else target
    if array.type == target:
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        if array.type.extension_name == "arrow.uuid":
            texts = [None if v is None else str(v) for v in array.to_pylist()]
            return pa.array(texts, target)
        return plain_array(array.storage, target)
    if pa.types.is_dictionary(array.type):
        return plain_array(array.dictionary_decode(), target)
    if pa.types.is_run_end_encoded(array.type):
        return plain_array(pc.run_end_decode(array), target)
    if _needs_rebuilding(array.type):
        return pa.array([_texts_of_uuids(v) for v in array.to_pylist()], target)
    return array.cast(target)


def _needs_rebuilding(type_: pa.DataType) -> bool:
    """Whether the type holds, at any depth, what Arrow's cast cannot take apart."""
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return True
    if types.is_list_view(type_) or types.is_large_list_view(type_):
        return True  # their cast to lists drops values (seen in Arrow 26)
    if types.is_run_end_encoded(type_):
        return True
    if types.is_null(type_):
        return True  # sliced structs of nulls within others make their cast abort (Arrow 26)
    return any(_needs_rebuilding(type_.field(i).type) for i in range(type_.num_fields))


def _texts_of_uuids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _texts_of_uuids(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_texts_of_uuids(v) for v in value]
    return str(value) if type(value).__name__ == "UUID" else value


def to_python(array: pa.Array) -> list[Any]:
    """One Python value a row: str, int, float, bool, Decimal, date, datetime, bytes, list, dict.

    Maps become dicts. A float of 32 bits becomes the double that is written the same, so that
    0.1 does not turn into 0.10000000149011612. Times in nanoseconds become Python's own, in
    microseconds, where that loses nothing, and else text. What Python cannot hold (bytes that
    are not UTF-8 in a string column, the year 20000) becomes an `Unreadable`.
    """
    array = _without_nanoseconds(_without_float32(plain_array(array)))
    try:
        values: list[Any] = array.to_pylist()
    except _NO_PYTHON_VALUE:
        values = [_value_at(array, i) for i in range(len(array))]
    if _holds(array.type, pa.types.is_map):
        values = [_maps_to_dicts(v, array.type) for v in values]
    return values


def _value_at(array: pa.Array, row: int) -> Any:
    try:
        return array[row].as_py()
    except UnicodeDecodeError as error:
        return Unreadable(f"its text is not UTF-8 ({error.reason})")
    except _NO_PYTHON_VALUE as error:
        return Unreadable(f"its {array.type} has no Python value ({error})")


def with_valid_text(array: pa.Array) -> pa.Array:
    """A plain array with U+FFFD in the place of what is not UTF-8 in its text, at any depth.

    Parquet files may hold such text, and every format but Arrow's own would refuse to write it.
    Raises `pyarrow.ArrowException` for other damage.
    """
    if not _holds(array.type, _is_text):
        return array
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raw = _text_as_bytes(array)
        raw.validate(full=True)
        return pa.array([_decoded(v, array.type) for v in raw.to_pylist()], array.type)
    return array


def check_array(array: pa.Array) -> None:
    """Raises `pyarrow.ArrowInvalid` where offsets or lengths are broken, so that nothing reads
    beyond its memory. Text that is not UTF-8 passes in plain arrays: it is its row's own error."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if array.type != plain_type(array.type):
            raise
        _text_as_bytes(array).validate(full=True)


def _text_as_bytes(array: pa.Array) -> pa.Array:
    return array.cast(_with_leaves(array.type, _is_text, _bytes_like))


def _bytes_like(type_: pa.DataType) -> pa.DataType:
    return pa.binary() if pa.types.is_string(type_) else pa.large_binary()


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _decoded(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if _is_text(type_):
        return value.decode(errors="replace")
    if pa.types.is_struct(type_):
        return {f.name: _decoded(value[f.name], f.type) for f in type_.fields}
    if pa.types.is_map(type_):
        return [(_decoded(k, type_.key_type), _decoded(v, type_.item_type)) for k, v in value]
    if isinstance(value, list):
        return [_decoded(v, type_.value_type) for v in value]
    return value


def _without_float32(array: pa.Array) -> pa.Array:
    if not _holds(array.type, _is_float32):
        return array
    texts = array.cast(_with_leaves(array.type, _is_float32, lambda _: pa.string()))
    return texts.cast(_with_leaves(array.type, _is_float32, lambda _: pa.float64()))


def _is_float32(type_: pa.DataType) -> bool:
    return bool(pa.types.is_float32(type_))


def _without_nanoseconds(array: pa.Array) -> pa.Array:
    if not _holds(array.type, _is_nanoseconds):
        return array
    try:
        return array.cast(_with_leaves(array.type, _is_nanoseconds, _in_microseconds))
    except pa.ArrowInvalid:
        return array.cast(_with_leaves(array.type, _is_nanoseconds, _as_text))


def _is_nanoseconds(type_: pa.DataType) -> bool:
    temporal = (pa.types.is_timestamp, pa.types.is_time64, pa.types.is_duration)
    return any(f(type_) for f in temporal) and type_.unit == "ns"


def _in_microseconds(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(type_):
        return pa.timestamp("us", type_.tz)
    return pa.time64("us") if pa.types.is_time64(type_) else pa.duration("us")


def _as_text(type_: pa.DataType) -> pa.DataType:
    return pa.int64() if pa.types.is_duration(type_) else pa.string()


def _holds(type_: pa.DataType, test: Any) -> bool:
    return test(type_) or any(_holds(type_.field(i).type, test) for i in range(type_.num_fields))


def _with_leaves(type_: pa.DataType, test: Any, replace: Any) -> pa.DataType:
    """A plain type with every leaf that passes a test replaced."""

    def inner(field: pa.Field) -> pa.Field:
        return pa.field(field.name, _with_leaves(field.type, test, replace), field.nullable)

    types = pa.types
    if test(type_):
        return replace(type_)
    if types.is_struct(type_):
        return pa.struct([inner(f) for f in type_.fields])
    if types.is_map(type_):
        return pa.map_(inner(type_.key_field), inner(type_.item_field))
    if types.is_fixed_size_list(type_):
        return pa.list_(inner(type_.value_field), type_.list_size)
    if types.is_large_list(type_):
        return pa.large_list(inner(type_.value_field))
    return pa.list_(inner(type_.value_field)) if types.is_list(type_) else type_


def _maps_to_dicts(value: Any, type_: pa.DataType) -> Any:
    if value is None or isinstance(value, Unreadable):
        return value
    if pa.types.is_map(type_):
        return {k: _maps_to_dicts(v, type_.item_type) for k, v in value}
    if pa.types.is_struct(type_):
        return {f.name: _maps_to_dicts(value.get(f.name), f.type) for f in type_.fields}
    if isinstance(value, list):
        return [_maps_to_dicts(v, type_.value_type) for v in value]
    return value
