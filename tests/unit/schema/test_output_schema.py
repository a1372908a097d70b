from __future__ import annotations

import datetime
import json
import re

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from batchradix.errors import RowErrorCode, SchemaError
from batchradix.schema.answers import InvalidAnswer
from batchradix.schema.load import load_schema

NAMES = ["a", "b", "c"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 8),
    st.sampled_from([0.5, 2.0, -1.5]),
    st.text("ab1", max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=5,
)


def _some(**keywords):
    """A dictionary with any subset of the keywords."""
    return st.fixed_dictionaries({}, optional=keywords)


SIZE = st.integers(0, 3)
STRINGS = _some(
    minLength=SIZE, maxLength=SIZE, pattern=st.sampled_from(["^a", "b$", "^[ab]+$", "1", "(?=a)"])
).map(lambda more: {"type": "string", **more})
BOUND = st.integers(-3, 8)
INTEGERS = _some(minimum=BOUND, maximum=BOUND, multipleOf=st.integers(1, 3)).map(
    lambda more: {"type": "integer", **more}
)
NUMBERS = _some(minimum=BOUND, exclusiveMaximum=BOUND, multipleOf=st.just(0.5)).map(
    lambda more: {"type": "number", **more}
)
ENUMS = st.lists(SCALARS, min_size=1, max_size=3).map(lambda values: {"enum": values})
CONSTS = VALUES.map(lambda value: {"const": value})
PLAIN = st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}])


def _compound(inner):
    lists = st.tuples(inner, _some(minItems=SIZE, maxItems=SIZE, uniqueItems=st.booleans())).map(
        lambda pair: {"type": "array", "items": pair[0], **pair[1]}
    )
    tuples = st.lists(inner, min_size=1, max_size=2).map(
        lambda parts: {"type": "array", "prefixItems": parts, "items": False}
    )
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    objects = st.tuples(properties, st.lists(st.sampled_from(NAMES), unique=True, max_size=2)).map(
        lambda pair: {
            "type": "object",
            "properties": pair[0],
            "required": [name for name in pair[1] if name in pair[0]],
            "additionalProperties": False,
        }
    )
    branches = st.lists(inner, min_size=1, max_size=3)
    choices = st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), branches).map(
        lambda pair: {pair[0]: pair[1]}
    )
    beside = st.tuples(objects, st.lists(st.sampled_from(NAMES), min_size=1, max_size=2)).map(
        lambda pair: {**pair[0], "anyOf": [{"required": [name]} for name in pair[1]]}
    )
    negated = st.tuples(inner, CONSTS).map(lambda pair: {**pair[0], "not": pair[1]})
    return st.one_of(lists, tuples, objects, choices, beside, negated)


LEAVES = st.one_of(STRINGS, INTEGERS, NUMBERS, ENUMS, CONSTS, PLAIN)
SCHEMAS = st.recursive(LEAVES, _compound, max_leaves=4)
RELAXED = settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def loaded(schema):
    try:
        return load_schema(schema)
    except SchemaError:
        assume(False)


def instances(schema):
    """Values that have a fair chance of matching: guided by the schema, or anything."""
    options = [VALUES]
    if "const" in schema:
        options.append(st.just(schema["const"]))
    if "enum" in schema:
        options.append(st.sampled_from(schema["enum"]))
    for key in ("anyOf", "oneOf", "allOf"):
        options += [instances(branch) for branch in schema.get(key, ())]
    kind = schema.get("type")
    if kind == "integer":
        options.append(st.integers(-3, 8))
    elif kind == "number":
        options.append(st.integers(-3, 8) | st.sampled_from([0.5, 1.5, 2.5]))
    elif kind == "string":
        options.append(st.text("ab1", max_size=4))
    elif kind == "array" and isinstance(schema.get("items"), dict):
        options.append(st.lists(instances(schema["items"]), max_size=4))
    elif kind == "array" and "prefixItems" in schema:
        options.append(st.tuples(*map(instances, schema["prefixItems"])).map(list))
    elif kind == "object" and "properties" in schema:
        parts = {name: instances(part) for name, part in schema["properties"].items()}
        options.append(st.fixed_dictionaries(parts))
        options.append(st.fixed_dictionaries({}, optional=parts))
    return st.one_of(*reversed(options))


def is_valid(schema, value) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@RELAXED
@given(SCHEMAS, st.data())
def test_parse_accepts_what_an_independent_validator_accepts(schema, data):
    output = loaded(schema)
    for _ in range(4):
        value = data.draw(instances(schema))
        if is_valid(schema, value):
            assert output.parse(json.dumps(value)) == value
        else:
            with pytest.raises(InvalidAnswer) as caught:
                output.parse(json.dumps(value))
            assert caught.value.code is RowErrorCode.SCHEMA_MISMATCH


def same(cell, value, kind) -> bool:
    """Whether an Arrow cell holds a value, absent and null properties being one."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        if value is None or cell is None:
            return value is None and cell is None
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return set(value) <= set(cell) and all(
            encoded(cell[f.name], value.get(f.name), f, f.name in value) for f in fields
        )
    if pa.types.is_list(kind):
        if value is None or cell is None:
            return value is None and cell is None
        return len(cell) == len(value) and all(
            encoded(c, v, kind.value_field, True) for c, v in zip(cell, value, strict=True)
        )
    return type(cell) is type(value) and cell == value if kind != "float64" else cell == value


def encoded(cell, value, field, present) -> bool:
    if field.metadata and present:
        return json.loads(cell) == value and type(json.loads(cell)) is type(value)
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return cell == value and not isinstance(value, bool)
    return same(cell, value, field.type)


@RELAXED
@given(SCHEMAS, st.data())
def test_arrow_gives_back_every_answer(schema, data):
    output = loaded(schema)
    value = data.draw(instances(schema).filter(lambda value: is_valid(schema, value)))
    array = output.to_arrow([output.parse(json.dumps(value)), None])
    assert array.type == output.arrow_type
    cell, nothing = array.to_pylist()
    assert nothing is None
    assert encoded(cell, value, output.arrow_field("value"), value is not None)


@RELAXED
@given(SCHEMAS, st.data())
def test_the_grammar_keeps_all_that_is_valid_and_notes_what_it_lets_through(schema, data):
    output = loaded(schema)
    source = json.loads(output.json_grammar.source)
    for _ in range(4):
        value = data.draw(instances(schema))
        if is_valid(schema, value):
            assert is_valid(source, value)
        elif not output.validated_keywords:
            assert not is_valid(source, value)


AWKWARD = {
    "q": 'say "hi"',
    "win": "C:\\new\\dir",
    "tab": "a\tb",
    "ctl": "\u0001",
    "nfd": "e\u0301",
    "nfc": "\u00e9",
    "zwj": "\U0001f469\U0001f3fd\u200d\U0001f680",
    "zh": "\u5317\u4eac\u00b7\u5728\u7ebf",
    "ls": "\u2028\u2029",
    "eos": "</s><|im_end|>",
    "slash": "a/b",
    "empty": "",
}


@pytest.mark.parametrize("wrap", [lambda v: {"const": v}, lambda v: {"enum": [v, v + "x"]}])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_awkward_text_stays_the_same_code_point_for_code_point(wrap, is_ascii):
    schema = {
        "type": "object",
        "properties": {name: wrap(value) for name, value in AWKWARD.items()},
        "required": list(AWKWARD),
        "additionalProperties": False,
    }
    output = load_schema(json.dumps(schema))
    source = json.loads(output.json_grammar.source)["properties"]
    assert all(
        value in source[n].get("enum", [source[n].get("const")]) for n, value in AWKWARD.items()
    )
    assert AWKWARD["zh"] in output.json_grammar.source  # written raw, not as escapes
    parsed = output.parse(json.dumps(AWKWARD, ensure_ascii=is_ascii))
    assert output.to_arrow([parsed]).to_pylist() == [AWKWARD]
    assert output.property_names == tuple(AWKWARD)


def refusal(schema, text) -> InvalidAnswer:
    with pytest.raises(InvalidAnswer) as caught:
        load_schema(schema).parse(text)
    return caught.value


@pytest.mark.parametrize(
    "text",
    ["", "{", "NaN", '{"a":Infinity}', "1 2", "'a'", "[1,]", '{"a":1,"a":2}', "[" * 100_000],
)
def test_what_is_not_strict_json_is_invalid_json(text):
    assert refusal(True, text).code is RowErrorCode.INVALID_JSON


@pytest.mark.parametrize(
    ("schema", "text", "pointer"),
    [
        ({"type": "integer"}, str(2**63), ""),
        ({"type": "integer"}, str(-(2**63) - 1), ""),
        ({"type": "integer"}, "1e300", ""),
        ({"type": "integer"}, "9" * 5000, ""),
        ({"type": "integer", "maximum": 10**40}, str(10**39), ""),
        ({"type": "number"}, str(2**53 + 1), ""),
        ({"type": "number"}, "1e400", ""),
        ({"type": "array", "items": {"type": "string"}}, '["a","\\ud800"]', ""),
        ({"type": "string", "format": "date-time"}, '"2024-01-01T10:00:60Z"', ""),
        ({"type": "string", "format": "date-time"}, '"2024-01-01T10:00:00.1234567Z"', ""),
        ({"type": "array", "items": {"type": "integer"}}, f"[1,{2**63}]", "/1"),
        ({"properties": {"a": {}}}, '{"b":1}', ""),
    ],
)
def test_what_a_column_cannot_hold_is_refused_and_never_changed(schema, text, pointer):
    error = refusal(schema, text)
    if "60Z" not in text:  # a leap second at ten o'clock is no date-time to begin with
        assert error.code is RowErrorCode.NOT_REPRESENTABLE
    assert error.pointer == pointer


def test_the_edges_of_the_columns_are_kept_exactly():
    for value in (2**63 - 1, -(2**63)):
        output = load_schema({"type": "integer"})
        assert output.to_arrow([output.parse(str(value))]).to_pylist() == [value]
    output = load_schema({"type": "integer", "maximum": 10**38 - 1})
    assert str(output.arrow_type) == "decimal128(38, 0)"
    assert int(output.to_arrow([output.parse("9" * 38)])[0].as_py()) == 10**38 - 1
    output = load_schema({"type": "integer"})
    assert output.to_arrow([output.parse("1e3")]).to_pylist() == [1000]


def test_big_integers_are_compared_exactly():
    assert refusal({"type": "integer", "maximum": 2**53}, str(2**53 + 1)).code is (
        RowErrorCode.SCHEMA_MISMATCH
    )
    assert refusal({"const": 2**62}, str(2**62 + 1)).code is RowErrorCode.SCHEMA_MISMATCH
    assert load_schema({"const": 2**70}).parse(str(2**70)) == 2**70
    assert refusal({"const": 2**70}, str(2**70 + 1)).code is RowErrorCode.SCHEMA_MISMATCH


def test_a_mismatch_says_what_and_where():
    schema = {"properties": {"a": {"type": "array", "items": {"type": "string"}}}}
    error = refusal(schema, '{"a":["x",3]}')
    assert error.code is RowErrorCode.SCHEMA_MISMATCH
    assert error.pointer == "/a/1"
    assert error.row_error.message == 'the answer at /a/1: 3 is not of type "string"'


@pytest.mark.parametrize(
    ("name", "good", "bad", "cell"),
    [
        ("date", "2024-02-29", "2023-02-29", datetime.date(2024, 2, 29)),
        ("date", "2024-01-31", "2024-02-31", datetime.date(2024, 1, 31)),
        ("time", "10:00:00.5+02:00", "25:00:00Z", datetime.time(8, 0, 0, 500000)),
        (
            "date-time",
            "2024-01-01T00:30:00+01:00",
            "2024-01-01 25:00:00Z",
            datetime.datetime(2023, 12, 31, 23, 30, tzinfo=datetime.UTC),
        ),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123", None),
        ("email", "a@example.org", "a", None),
        ("regex", "a+", "(", None),
    ],
)
def test_formats_are_checked_and_times_become_arrow_times(name, good, bad, cell):
    output = load_schema({"type": ["string", "null"], "format": name})
    assert output.to_arrow([output.parse(json.dumps(good))]).to_pylist() == [cell or good]
    assert output.parse("null") is None
    assert refusal({"type": "string", "format": name}, json.dumps(bad)).code is (
        RowErrorCode.SCHEMA_MISMATCH
    )


@pytest.mark.parametrize("name", ["date", "time", "date-time"])
def test_the_grammar_of_a_time_leads_to_cells_only(name):
    output = load_schema({"type": "string", "format": name})
    pattern = re.compile(json.loads(output.json_grammar.source)["pattern"])
    days = ["2024-02-29", "2100-02-29", "2000-02-29", "2023-02-29", "0000-01-01", "2023-04-31"]
    days += ["0001-01-01", "9999-12-31", "1900-02-28", "2024-13-01", "2024-00-10", "0004-02-29"]
    times = ["00:00:00Z", "23:59:59.999999+23:59", "24:00:00Z", "10:00:60Z", "10:00:00.1234567Z"]
    texts = {"date": days, "time": times}.get(name) or [f"{d}T{t}" for d in days for t in times]
    for text in texts:
        try:
            output.parse(json.dumps(text))
            fits = True
        except InvalidAnswer:
            fits = False
        if pattern.fullmatch(text) and not re.match("0001|9999", text):
            assert fits, text
        elif fits:
            assert pattern.fullmatch(text), text


def test_only_unknown_formats_go_unchecked_and_are_listed():
    output = load_schema({"properties": {"a": {"type": "string", "format": "phone"}}})
    assert output.ignored_keywords == (("#/properties/a", "format"),)
    assert output.parse('{"a":"x"}') == {"a": "x"}


@pytest.mark.parametrize(
    ("keyword", "more"),
    [
        ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        ("contains", {"type": "array", "contains": {"const": 1}}),
        ("not", {"type": "string", "not": {"const": "a"}}),
        ("if", {"type": "object", "properties": {"x": {}}, "if": {"required": ["x"]}, "then": {}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("multipleOf", {"type": "number", "multipleOf": 0.5}),
        ("multipleOf", {"type": "integer", "multipleOf": 2, "minimum": 0}),
        ("pattern", {"type": "string", "pattern": "(?=a)"}),
        ("maxLength", {"type": "string", "format": "date", "maxLength": 3}),
        ("format", {"type": "string", "format": "regex"}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        ("patternProperties", {"type": "object", "patternProperties": {"^a": {"type": "null"}}}),
    ],
)
def test_what_only_validation_catches_is_listed_with_its_place(keyword, more):
    output = load_schema({"type": "object", "properties": {"a": more}, "required": ["a"]})
    assert ("#/properties/a", keyword) in output.validated_keywords


def test_a_choice_beside_properties_is_written_out():
    text = {"type": "string", "maxLength": 4}
    output = load_schema(
        {
            "type": "object",
            "properties": {"email": text, "phone": text},
            "additionalProperties": False,
            "anyOf": [{"required": ["email"]}, {"required": ["phone"]}],
        }
    )
    assert output.validated_keywords == ()
    branches = json.loads(output.json_grammar.source)["anyOf"]
    assert [branch["required"] for branch in branches] == [["email"], ["phone"]]
    assert all(set(branch["properties"]) == {"email", "phone"} for branch in branches)
    assert str(output.arrow_type) == "struct<email: string, phone: string>"


def test_keywords_beside_a_reference_are_merged_into_it():
    output = load_schema(
        {"$defs": {"s": {"type": "string", "minLength": 1}}, "$ref": "#/$defs/s", "maxLength": 3}
    )
    assert json.loads(output.json_grammar.source) == {
        "type": "string",
        "minLength": 1,
        "maxLength": 3,
    }
    assert output.validated_keywords == ()


def test_required_names_that_no_property_describes_become_properties():
    output = load_schema(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["b"],
        }
    )
    source = json.loads(output.json_grammar.source)
    assert list(source["properties"]) == ["a", "b"]
    assert str(output.arrow_type) == "struct<a: int64, b: string>"


def test_a_tagged_union_needs_no_validation():
    def shape(tag, **more):
        properties = {"kind": {"const": tag}, **more}
        return {"type": "object", "properties": properties, "required": ["kind"]}

    output = load_schema(
        {"oneOf": [shape("dot", size={"type": "integer"}), shape("line", to={"type": "string"})]}
    )
    assert output.validated_keywords == ()
    assert output.parse('{"kind":"line","to":"x"}') == {"kind": "line", "to": "x"}


def test_a_schema_that_contains_itself_stays_finite():
    node = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "children": {"type": "array", "items": {"$ref": "#"}},
        },
        "required": ["name"],
    }
    output = load_schema(node)
    assert str(output.arrow_type) == "struct<name: string, children: list<item: string>>"
    value = {"name": "a", "children": [{"name": "b"}]}
    cell = output.to_arrow([output.parse(json.dumps(value))])[0].as_py()
    assert json.loads(cell["children"][0]) == {"name": "b"}


def test_a_large_enum_is_loaded_quickly_and_in_order():
    values = [f"SKU-{i:05d}" for i in range(20_000)]
    output = load_schema({"properties": {"sku": {"type": "string", "enum": [*values, 3]}}})
    assert json.loads(output.json_grammar.source)["properties"]["sku"]["enum"] == values
