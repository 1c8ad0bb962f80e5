"""Bucketed data parallel on real ranks: exact results, order of events, counts of collectives, agreement on plans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.live

import data_parallel_cases as cases  # noqa: E402
from data_parallel_cases import CASES, FEWER, STEPS, run_cases  # noqa: E402
from ranks import run_ranks  # noqa: E402

Events = list[tuple[str, Any]]


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """What each of two ranks found, in every case."""
    return run_ranks(2, run_cases, list(CASES), timeout=300)


@pytest.fixture(scope="module", params=[1, 3, 4])
def others(request: Any) -> list[dict[str, Any]]:
    return run_ranks(request.param, run_cases, FEWER, timeout=300)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_get_what_one_process_gets(two: list[dict[str, Any]], name: str) -> None:
    assert [result[name]["wrong"] for result in two] == [[], []]


@pytest.mark.parametrize("name", FEWER)
def test_every_number_of_ranks_gets_what_one_process_gets(others: list[dict[str, Any]], name: str) -> None:
    assert [result[name]["wrong"] for result in others] == [[]] * len(others)


def subjects(events: Events, kind: str) -> list[Any]:
    return [subject for event, subject in events if event == kind]


def steps(two: list[dict[str, Any]], name: str, after: int = 1) -> list[tuple[Events, Counter[str], int]]:
    """Events, counts and the number of buckets of each step on each rank, once the first backward has been learned."""
    return [
        (result[name]["events"][step], result[name]["counts"][step], len(result[name]["reports"][step].buckets))
        for result in two
        for step in range(after, STEPS)
    ]


@pytest.mark.parametrize("name", ["one each", "one each bf16", "capped", "any plan 1", "reentrant"])
def test_buckets_are_launched_in_order_and_before_the_last_gradient_is_ready(two: Any, name: str) -> None:
    for events, _, buckets in steps(two, name):
        assert subjects(events, "launch") == subjects(events, "wait") == list(range(buckets))
        last_ready = max(i for i, (event, _) in enumerate(events) if event == "ready")
        if name != "any plan 1":  # there, the gradient that comes last is in the first bucket
            assert events.index(("launch", 0)) < last_ready
        assert events.index(("wait", 0)) > last_ready, "a wait during backward would stop compute"
        assert events.index(("wait", buckets - 1)) < max(
            i for i, (event, _) in enumerate(events) if event == "returned"
        )


@pytest.mark.parametrize("name", ["one each", "capped", "tied", "one twice"])
def test_a_bucket_is_launched_when_its_last_gradient_is_ready(two: Any, name: str) -> None:
    """No bucket holds back one that is ready: with plans in ready order, a launch follows its last gradient at once."""
    for result in two:
        for step in range(2, STEPS):
            events = result[name]["events"][step]
            for number, bucket in enumerate(result[name]["reports"][step].buckets):
                launch = events.index(("launch", number))
                assert events[launch - 1][0] == "ready"
                assert events[launch - 1][1] in bucket.names


def test_each_gradient_is_ready_once_even_where_it_arrives_twice(two: Any) -> None:
    for name in ("reentrant", "tied", "one twice", "frozen"):
        for events, _, _ in steps(two, name):
            ready = subjects(events, "ready")
            assert len(ready) == len(set(ready)) == sum(len(b.names) for b in two[0][name]["reports"][0].buckets)


def test_the_optimizer_steps_behind_the_reductions_that_are_left(two: Any) -> None:
    for events, _, buckets in steps(two, "one each step"):
        after = events[events.index(("launch", buckets - 1)) + 1 :]
        assert after[0][0] == "returned", "backward does not wait"
        assert after[1:] == [(event, k) for k in range(buckets) for event in ("wait", "step")]


def test_zero1_gathers_what_forward_uses_first_first(two: Any) -> None:
    for events, _, buckets in steps(two, "one each zero1"):
        assert subjects(events, "gather") == list(reversed(range(buckets)))
        assert subjects(events, "step") == list(range(buckets))


@pytest.mark.parametrize(
    ("name", "collectives"),
    [
        ("capped", {"all_reduce": 1}),
        ("capped step", {"all_reduce": 1}),
        ("capped bf16", {"all_to_all_single": 1, "all_gather": 1}),
        ("capped zero1", {"all_to_all_single": 1, "all_gather": 1}),
        ("capped bf16 zero1", {"all_to_all_single": 1, "all_gather": 1}),
        ("accumulation", {"all_reduce": 1}),
        ("accumulation zero1", {"all_to_all_single": 1, "all_gather": 1}),
        ("all used", {"all_reduce": 2}),
        ("frozen", {"all_reduce": 1}),
    ],
)
def test_a_bucket_costs_so_many_collectives(two: Any, name: str, collectives: dict[str, int]) -> None:
    for _, count, buckets in steps(two, name, after=3):
        assert count == {kind: times * buckets for kind, times in collectives.items()}


@pytest.mark.parametrize("name", ["measured", "planned", "capped", "measured zero1", "unused"])
def test_all_ranks_agree_on_plan_and_measurements(two: Any, name: str) -> None:
    assert two[0][name]["reports"] == two[1][name]["reports"]


def test_the_plan_stands_after_two_backwards_or_after_one_where_optimizers_are_sharded(two: Any) -> None:
    first, second, third, fourth = (report.gradients for report in two[0]["measured"]["reports"])
    assert first == second != third == fourth, "the second backward is measured warm, and used from the third on"
    assert len({report.gradients for report in two[0]["measured zero1"]["reports"]}) == 1


def test_a_report_adds_up(two: Any) -> None:
    for name, bytes_each in (("measured", 4), ("capped bf16", 2)):
        report = two[0][name]["reports"][-1]
        assert sum(bucket.size for bucket in report.buckets) == bytes_each * sum(
            p.numel() for p in cases.build().parameters()
        )
        times = [gradient.ready_ns for gradient in report.gradients]
        assert times == sorted(times)
        assert times[0] > 0
        assert report.buckets[-1].ready_ns == times[-1]
        if report.link:
            assert report.finish_ns > times[-1]
