"""The cost model of splitting, on the numbers that its documentation works through, and its laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from slipstream.runtime.split_choice import UNSPLIT, Link, Problem, Rates, Split, choose_split, predicted_ns

NVLINK = Link(alpha_ns=0.0, bytes_per_s=450e9)
H100 = Rates(989e12, launch_ns=0.0, row_costs=((512, 512),), gather=NVLINK, scatter=NVLINK, ring=NVLINK)
GATE_UP = Problem("gather", ranks=8, rows=8192, moved=8192, multiplied=7168, element_bytes=2)


def falling(drawn: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Costs a row that do not rise with the number of rows."""
    rows, a_row = sorted({rows for rows, _ in drawn}), sorted((cost for _, cost in drawn), reverse=True)
    return tuple((few, few * cost) for few, cost in zip(rows, a_row, strict=False))


links = st.builds(Link, alpha_ns=st.floats(0, 1e6), bytes_per_s=st.floats(1e7, 1e12))
row_costs = st.lists(st.tuples(st.integers(1, 4096), st.floats(1, 8)), min_size=1).map(falling)
rates = st.builds(
    Rates,
    flops_per_s=st.floats(1e9, 1e15),
    launch_ns=st.floats(0, 1e5),
    row_costs=row_costs,
    gather=links,
    scatter=links,
    ring=links,
    friction=st.floats(0, 2),
)
problems = st.builds(
    Problem,
    direction=st.sampled_from(["gather", "scatter"]),
    ranks=st.integers(2, 16),
    rows=st.integers(1, 100_000),
    moved=st.integers(1, 20_000),
    multiplied=st.integers(1, 20_000),
    element_bytes=st.sampled_from([2, 4]),
)
chunks = st.sampled_from([1, 2, 3, 8])


def us(split: Split, problem: Problem) -> int:
    return round(predicted_ns(split, problem, H100) / 1000)


def test_the_worked_example() -> None:
    assert us(UNSPLIT, GATE_UP) == 1234
    assert us(Split("chunked", 4), GATE_UP) == 1038
    assert round(1234 / 1038, 2) == 1.19
    few = replace(GATE_UP, rows=512)
    assert us(UNSPLIT, few) == 77
    assert round(predicted_ns(Split("chunked", 2), few, H100) / 1000, -1) == 130
    assert choose_split(few, H100) == UNSPLIT


def test_a_ring_whose_gemms_fill_the_machine_has_no_head() -> None:
    assert us(Split("ring", 1), GATE_UP) == 973
    assert choose_split(GATE_UP, H100) == Split("ring", 1)


@pytest.mark.parametrize(("n_out", "hides"), [(57_344, True), (15_400, True), (15_300, False), (10_240, False)])
def test_what_hides_does_not_depend_on_the_tokens(n_out: int, hides: bool) -> None:
    """n_out >= (n - 1) F/B = 15,384: then all but 1/c of the transfer is hidden."""
    for rows in (8192, 65_536):
        problem = replace(GATE_UP, rows=rows, multiplied=n_out // 8)
        gemm, transfer = H100.gemm_ns(rows, 8192 * (n_out // 8)), NVLINK.ns(problem.received)
        split = predicted_ns(Split("chunked", 4), problem, H100)
        assert (split == pytest.approx(gemm + transfer / 4)) is hides


def test_few_rows_cost_what_was_measured() -> None:
    measured = replace(H100, row_costs=((64, 90), (128, 140), (512, 512)))
    found = [measured.gemm_ns(rows, 989e12 / 2e9) for rows in (8, 64, 96, 512, 600)]
    assert found == pytest.approx([90, 90, 115, 512, 600])


@given(problems, rates, chunks, st.sampled_from(["ring", "chunked"]))
def test_no_split_beats_the_longer_of_compute_and_transfer(problem: Problem, rate: Rates, c: int, how: str) -> None:
    link = {"ring": rate.ring, "gather": rate.gather, "scatter": rate.scatter}[
        "ring" if how == "ring" else problem.direction
    ]
    flops = 2 * problem.rows * problem.moved * problem.multiplied
    bound = max(1e9 * flops / rate.flops_per_s, 1e9 * problem.received / link.bytes_per_s)
    assert predicted_ns(Split(how, c), problem, rate) >= bound * (1 - 1e-9)


@given(problems, rates)
def test_the_choice_is_unsplit_or_wins(problem: Problem, rate: Rates) -> None:
    chosen = choose_split(problem, rate)
    assert chosen == UNSPLIT or predicted_ns(chosen, problem, rate) < 0.95 * predicted_ns(UNSPLIT, problem, rate)


@given(problems, rates)
def test_nothing_is_split_where_hiding_costs_what_it_saves(problem: Problem, rate: Rates) -> None:
    same = replace(rate, friction=1.0, gather=rate.ring, scatter=rate.ring)
    assert choose_split(problem, same) == UNSPLIT


def test_a_slow_reduce_scatter_makes_the_ring_the_better_scatter() -> None:
    """gloo's reduce-scatter moves twice the bytes."""
    wire = Link(2e5, 118e6)
    gloo = Rates(60e9, 2e3, ((16, 16),), gather=wire, scatter=replace(wire, bytes_per_s=59e6), ring=wire)
    problem = Problem("scatter", ranks=2, rows=512, moved=1024, multiplied=2048, element_bytes=4)
    assert choose_split(problem, gloo).exchange == "ring"
