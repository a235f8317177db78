"""Identity comes from content: .venv/bin/python -m pytest tests/runs/test_cells.py"""

import hashlib
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runs.cells import Plan, canonical, cell_id, id_prefix, in_units, unit_id
from runs.errors import UserError
from tests.planted_store import DESIGN, header, plan

FIELDS = {
    "model": {"name": "SmolLM2", "revision": "abc", "dtype": "float32"},
    "policy": {"name": "certified", "window": 32, "floor": 0.1},
    "document": "f" * 64,
    "budget": 0.25,
    "seed": 0,
}


def test_a_cell_id_is_sha256_of_canonical_json():
    text = '{"budget":0.25,"seed":0}'
    assert cell_id({"seed": 0, "budget": 0.25}) == hashlib.sha256(text.encode()).hexdigest()[:24]


def test_every_field_that_can_change_a_result_changes_the_id():  # CASES 24
    changed = [
        FIELDS | {"model": FIELDS["model"] | {"revision": "abd"}},
        FIELDS | {"model": FIELDS["model"] | {"dtype": "bfloat16"}},
        FIELDS | {"policy": FIELDS["policy"] | {"floor": 0.1 + 2**-56}},
        FIELDS | {"budget": 0.5},
        FIELDS | {"seed": 1},
        FIELDS | {"document": "None"},
        FIELDS | {"document": None},
        FIELDS | {"document": ""},
        FIELDS | {"document": "NA"},
    ]
    ids = {cell_id(fields) for fields in [FIELDS, *changed]}
    assert len(ids) == len(changed) + 1


def test_the_order_of_keys_and_tuples_for_lists_do_not_change_the_id():
    assert cell_id(dict(reversed(FIELDS.items()))) == cell_id(FIELDS)
    assert cell_id({"budgets": (0.25, 0.5)}) == cell_id({"budgets": [0.25, 0.5]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_canonical_json_reads_back_as_what_was_written(value):
    text = canonical(value)
    assert text.isascii()
    assert canonical(json.loads(text)) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), {"deep": [1.0, float("nan")]}])
def test_nan_and_infinity_have_no_id(value):
    with pytest.raises(UserError, match="NaN or infinity"):
        cell_id({"budget": value})


@pytest.mark.parametrize("key", [1, None, True, 0.5])
def test_keys_that_json_would_turn_into_text_are_refused(key):
    with pytest.raises(UserError, match="not text"):
        cell_id({"axes": [{key: 1}]})


@pytest.mark.parametrize(
    "text", ["", "abc", "../../etc/passwd", "g" * 24, "a" * 25, "abcd/", "abcd\n", "$(id)", "٣٣٣٣"]
)
def test_only_hex_digits_are_an_id(text):
    with pytest.raises(UserError, match="no cell id"):
        id_prefix(text)


def test_an_id_may_be_shortened_and_upper_case():
    assert id_prefix("ABCD") == "abcd"
    assert id_prefix("0" * 24) == "0" * 24


def test_units_hold_whole_examples_of_one_model_and_task():
    made = plan(documents=5, size=2)
    assert [len(examples) for examples in made.units.values()] == [2, 2, 1]
    assert [example for examples in made.units.values() for example in examples] == [f"example {k}" for k in range(5)]
    for unit in made.units:
        assert unit_id(DESIGN, made.unit_cells(unit)["cell"].to_pylist()) == unit


def test_units_do_not_mix_what_differs_in_by():
    cells = [
        {
            "cell": cell_id({"m": m, "c": c, "e": e}),
            "example": e,
            "document": e,
            "model": m,
            "task": "t",
            "ctx_tokens": c,
        }
        for e in "ab"
        for m in "xy"
        for c in (6, 16)
    ]
    table = in_units(cells, DESIGN, 2, by=("model", "ctx_tokens"))
    assert table["cell"].to_pylist() == [cell["cell"] for cell in cells]
    groups = {(row["unit"], row["model"], row["ctx_tokens"]) for row in table.to_pylist()}
    assert len(groups) == len({unit for unit, _, _ in groups}) == 4


def test_the_same_cells_of_another_design_are_other_units():
    assert plan().cells["cell"].equals(plan(design="e" * 64).cells["cell"])
    assert not plan().units.keys() & plan(design="e" * 64).units.keys()


def test_a_cell_that_stands_twice_is_refused():
    cells = plan().cells
    with pytest.raises(UserError, match="twice"):
        Plan(header(), pa.concat_tables([cells, cells.slice(0, 1)]))


@pytest.mark.parametrize("bad", ["../x", "A" * 24, "a" * 23, None])
@pytest.mark.parametrize("column", ["cell", "unit"])
def test_ids_that_are_no_hex_never_enter_a_plan(bad, column):
    cells = plan().cells
    values = [*cells[column].to_pylist()[:-1], bad]
    with pytest.raises(UserError, match=f"column {column}"):
        Plan(header(), cells.set_column(cells.column_names.index(column), column, pa.array(values, pa.string())))


def test_a_plan_names_what_it_lacks():
    with pytest.raises(UserError, match="lacks population"):
        Plan({key: value for key, value in header().items() if key != "population"}, plan().cells)
    with pytest.raises(UserError, match="lacks document"):
        Plan(header(), plan().cells.drop_columns("document"))


def test_the_name_of_a_plan_is_a_hash_whatever_the_user_typed():
    odd = {"model": "../../x; $(id) 'quoted'\n", "data": None, "ctx": None, "args": ""}
    assert id_prefix(Plan.key("replay", "../laptop", odd))
    assert Plan.key("replay", "laptop", odd) != Plan.key("replay", "laptop", odd | {"data": ""})
