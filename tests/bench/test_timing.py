"""Timing in turns: the order, what counts, and what is kept. No test here depends on how long anything takes."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from mesanet.bench.timing import Timing, available_memory, machine, time_interleaved


@pytest.mark.parametrize(("repeats", "warm_up"), [(1, 0), (3, 1), (2, 2)])
def test_callables_run_in_turns_and_warm_up_does_not_count(repeats: int, warm_up: int) -> None:
    calls: list[str] = []
    timings = time_interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=repeats, warm_up=warm_up
    )
    assert calls == ["a", "b"] * (repeats + warm_up)
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": repeats, "b": repeats}
    assert all(math.isfinite(second) and second >= 0 for timing in timings.values() for second in timing.seconds)


def test_each_may_run_some_times_in_a_row() -> None:
    calls: list[str] = []
    work = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    timings = time_interleaved(work, repeats=2, warm_up=0, in_a_row=3)
    assert calls == [*"aaabbb"] * 2
    assert {len(timing.seconds) for timing in timings.values()} == {6}


def test_one_round_counts_however_small_the_budget() -> None:
    calls: list[str] = []
    timings = time_interleaved({"a": lambda: calls.append("a")}, repeats=5, warm_up=3, budget=0.0)
    assert calls == ["a"]
    assert len(timings["a"].seconds) == 1


def test_best_is_the_shortest_repeat() -> None:
    assert Timing(name="a", seconds=(3.0, 1.0, 2.0)).best == 1.0


def test_an_error_passes_through_and_leaves_the_collector_on() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        time_interleaved({"a": fail}, repeats=1)
    assert gc.isenabled()


def test_the_machine_says_what_matters() -> None:
    described = machine()
    assert described["threads"] == torch.get_num_threads()
    assert described["torch"] == torch.__version__
    assert described["device"] == "cpu"
    assert described["processor"]


def test_available_memory_is_less_than_all_of_it() -> None:
    available, total = available_memory(), machine()["memory_bytes"]
    if available is None:
        pytest.skip("this system does not tell how much memory is free")
    assert 0 < available <= total
