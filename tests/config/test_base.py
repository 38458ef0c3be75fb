"""Configs through dictionaries and JSON: nothing lost, nothing guessed, every mistake named."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesanet.config import (
    ConfigError,
    check_fields,
    check_in_range,
    check_not_empty,
    check_one_of,
    check_positive,
    from_dict,
    from_json,
    to_dict,
    to_json,
)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Schedule."""

    kind: Literal["cosine"] = "cosine"
    floor: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Schedule."""

    kind: Literal["constant"] = "constant"
    steps: int = 3


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Optimiser."""

    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive("rate", self.rate)
        if self.decay is not None and self.decay < 0:
            raise ValueError(f"decay: got {self.decay!r}, expected at least 0")
        if self.betas[0] > self.betas[1]:
            raise ValueError("the first beta is above the second")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a config may hold."""

    name: str
    steps: int = 10
    debug: bool = False
    precision: Literal["float32", "bfloat16"] = "float32"
    layers: tuple[str, ...] = ("mesa",)
    out: Path = Path("runs")
    limits: dict[str, int] = field(default_factory=dict)
    optimiser: Adam = field(default_factory=Adam)
    second: Adam | None = None
    stages: tuple[Adam, ...] = ()
    more: tuple[Adam, ...] | None = None
    schedule: Cosine | Constant = field(default_factory=Cosine)
    size: int | str = 1


numbers = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-30, max_value=1e30)
adams = st.builds(
    Adam, rate=positive, betas=st.tuples(numbers, numbers).map(sorted).map(tuple), decay=st.none() | positive
)
runs = st.builds(
    Run,
    name=st.text(),
    steps=st.integers(),
    debug=st.booleans(),
    precision=st.sampled_from(["float32", "bfloat16"]),
    layers=st.lists(st.text()).map(tuple),
    out=st.sampled_from([Path("a/b"), Path("/c"), Path()]),
    limits=st.dictionaries(st.text(), st.integers()),
    optimiser=adams,
    second=st.none() | adams,
    stages=st.lists(adams, max_size=2).map(tuple),
    more=st.none() | st.lists(adams, max_size=2).map(tuple),
    schedule=st.builds(Cosine, floor=numbers) | st.builds(Constant, steps=st.integers()),
    size=st.integers() | st.text(),
)


@given(runs)
def test_there_and_back(run: Run) -> None:
    assert from_dict(Run, to_dict(run)) == run
    assert from_json(Run, to_json(run)) == run
    assert json.loads(to_json(run)) == to_dict(run)


def test_absent_fields_take_their_defaults() -> None:
    assert from_dict(Run, {"name": "x", "optimiser": {"rate": 1.0}}) == Run(name="x", optimiser=Adam(rate=1.0))


def test_an_integer_is_a_number_and_becomes_one() -> None:
    rate = from_dict(Adam, {"rate": 1}).rate
    assert rate == 1.0
    assert type(rate) is float


def test_whole_numbers_stay_whole_where_both_are_accepted() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Either:
        value: float | int | None = None

    assert type(from_dict(Either, {"value": 3}).value) is int
    assert type(from_dict(Either, {"value": 3.0}).value) is float
    assert from_dict(Either, {"value": None}).value is None


@pytest.mark.parametrize(
    ("values", "field_name", "came", "accepted"),
    [
        ({"nmae": "x"}, "nmae", "did you mean 'name'?", "name, steps, debug"),
        ({"name": "x", "optimiser": {"rte": 1}}, "optimiser.rte", "did you mean 'rate'?", "rate, betas, decay"),
        ({}, "name", "missing", "a string"),
        ({"name": 3}, "name", "3 (int)", "a string"),
        ({"name": "x", "debug": "false"}, "debug", "'false' (str)", "true or false"),
        ({"name": "x", "debug": 1}, "debug", "1 (int)", "true or false"),
        ({"name": "x", "debug": None}, "debug", "None", "true or false"),
        ({"name": "x", "steps": True}, "steps", "True (bool)", "a whole number"),
        ({"name": "x", "steps": 3.0}, "steps", "3.0 (float)", "a whole number"),
        ({"name": "x", "steps": "3"}, "steps", "'3' (str)", "a whole number"),
        ({"name": "x", "precision": "fp8"}, "precision", "'fp8'", "one of 'float32', 'bfloat16'"),
        ({"name": "x", "layers": "mesa"}, "layers", "'mesa'", "a list of which each item is a string"),
        ({"name": "x", "layers": ["mesa", 3]}, "layers[1]", "3 (int)", "a string"),
        ({"name": "x", "limits": {"a": "b"}}, "limits.a", "'b'", "a whole number"),
        ({"name": "x", "limits": [1]}, "limits", "[1]", "a table of which each value is a whole number"),
        ({"name": "x", "optimiser": 3}, "optimiser", "3 (int)", "the fields of Adam"),
        ({"name": "x", "optimiser": {"rate": -1}}, "optimiser.rate", "-1", "a positive number"),
        ({"name": "x", "optimiser": {"rate": "1e-3"}}, "optimiser.rate", "'1e-3' (str)", "a number"),
        ({"name": "x", "optimiser": {"rate": True}}, "optimiser.rate", "True (bool)", "a number"),
        ({"name": "x", "optimiser": {"decay": -1.0}}, "optimiser.decay", "-1.0", "at least 0"),
        ({"name": "x", "optimiser": {"betas": [1, 0]}}, "optimiser", "first beta", "above"),
        ({"name": "x", "optimiser": {"betas": [1]}}, "optimiser.betas", "[1]", "a list of 2: a number, a number"),
        ({"name": "x", "second": {"rate": 0}}, "second.rate", "0", "a positive number"),
        ({"name": "x", "second": 5}, "second", "5", "the fields of Adam or null"),
        ({"name": "x", "stages": [{}, {"rate": 0}]}, "stages[1].rate", "0", "a positive number"),
        ({"name": "x", "more": [{}, {"rate": 0}]}, "more[1].rate", "0", "a positive number"),
        ({"name": "x", "more": 3}, "more", "3 (int)", "a list of which each item is a table"),
        ({"name": "x", "optimiser": {"rate": 10**400}}, "optimiser.rate", "too large", "a smaller one"),
        ({"name": "x", "schedule": {}}, "schedule.kind", "missing", "one of 'cosine', 'constant'"),
        ({"name": "x", "schedule": {"kind": "step"}}, "schedule.kind", "'step'", "one of 'cosine', 'constant'"),
        ({"name": "x", "schedule": {"kind": ["x"]}}, "schedule.kind", "['x']", "one of 'cosine', 'constant'"),
        (
            {"name": "x", "schedule": {"kind": "constant", "floor": 1}},
            "schedule.floor",
            "no field of Constant",
            "steps",
        ),
        ({"name": "x", "size": None}, "size", "None", "a whole number or a string"),
        ({"name": "x", "out": 3}, "out", "3 (int)", "a path"),
        ([], "Run", "[] (list)", "a table of its fields"),
    ],
)
def test_a_mistake_names_the_field_what_came_and_what_is_accepted(
    values: Any, field_name: str, came: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(Run, values)
    assert caught.value.field == field_name
    message = str(caught.value)
    assert message.startswith(f"{field_name}: ")
    assert came in message
    assert accepted in message


def test_broken_json_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Run: is not valid JSON: .* line 1"):
        from_json(Run, "{")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_json_cannot_hold_is_not_written(value: float) -> None:
    with pytest.raises(ConfigError, match="floor"):
        to_json(Cosine(floor=value))


@pytest.mark.parametrize("text", ['{"floor": NaN}', '{"floor": Infinity}', '{"floor": -Infinity}'])
def test_what_json_cannot_hold_is_not_read(text: str) -> None:
    with pytest.raises(ConfigError, match="is not valid JSON"):
        from_json(Cosine, text)


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'floor' is given twice"):
        from_json(Cosine, '{"floor": 1, "floor": 2}')


def test_fields_that_cannot_be_given_stay_out() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Derived:
        size: int = 2
        double: int = field(default=4, init=False)

    assert to_dict(Derived()) == {"size": 2}
    assert from_dict(Derived, to_dict(Derived())) == Derived()


def test_check_fields_refuses_wrong_types_at_construction() -> None:
    with pytest.raises(ConfigError, match=r"betas: got \(1,\) \(tuple\), expected a list of 2"):
        Adam(betas=(1,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"rate: got 'x' \(str\), expected a number"):
        Adam(rate="x")  # type: ignore[arg-type]


def test_a_list_becomes_the_tuple_that_a_frozen_config_holds() -> None:
    assert Adam(betas=[0.5, 0.6]) == Adam(betas=(0.5, 0.6))  # type: ignore[arg-type]
    assert isinstance(Adam(betas=[0.5, 0.6]).betas, tuple)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="betas: got"):
        Adam(betas=[0.5, "x"])  # type: ignore[list-item, arg-type]


def test_configs_that_nothing_tells_apart_are_a_programming_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Ambiguous:
        which: Adam | Constant = field(default_factory=Adam)

    with pytest.raises(AssertionError, match="tells them apart"):
        from_dict(Ambiguous, {"which": {}})


@given(st.floats(), st.floats(allow_nan=False), st.floats(allow_nan=False), st.booleans(), st.booleans())
def test_check_in_range(value: float, low: float, high: float, low_open: bool, high_open: bool) -> None:
    inside = (low < value or (low == value and not low_open)) and (value < high or (value == high and not high_open))
    if inside:
        check_in_range("x", value, low, high, low_open=low_open, high_open=high_open)
    else:
        with pytest.raises(ConfigError, match=r"x: got .*, expected a number in"):
            check_in_range("x", value, low, high, low_open=low_open, high_open=high_open)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_check_positive_refuses(value: float) -> None:
    with pytest.raises(ConfigError, match=r"x: got .*, expected a positive number"):
        check_positive("x", value)


def test_the_other_checks() -> None:
    check_positive("x", 1e-300)
    check_positive("x", 10**400)
    check_one_of("x", "a", ("a", "b"))
    check_not_empty("x", (1,))
    with pytest.raises(ConfigError, match="x: got 'c', expected one of 'a', 'b'"):
        check_one_of("x", "c", ("a", "b"))
    with pytest.raises(ConfigError, match=r"x: got \(\), expected at least one item"):
        check_not_empty("x", ())


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("model.width", "got -3, expected a positive number")))
    assert (error.field, str(error)) == ("model.width", "model.width: got -3, expected a positive number")
