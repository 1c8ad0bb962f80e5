"""The order of layers: learned once, predicted and checked afterwards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from slipstream.core.errors import UsageError
from slipstream.runtime.sharded.order import OnChange, Order

layers = st.lists(st.sampled_from("abcde"), min_size=1, max_size=8)


def run(order: Order, names: list[str], guess: tuple[str, ...] = ()) -> tuple[list[bool], bool]:
    order.start(guess)
    foreseen = [order.visit(name) for name in names]
    return foreseen, order.finish()


@given(layers)
def test_the_second_pass_is_foreseen(names: list[str]) -> None:
    order = Order("forward")
    assert run(order, names) == ([False] * len(names), True)
    assert run(order, names) == ([True] * len(names), False)


@given(layers, st.integers(0, 4))
def test_upcoming_is_what_follows(names: list[str], depth: int) -> None:
    order = Order("forward")
    run(order, names)
    order.start()
    assert order.upcoming(depth) == names[:depth]
    for at, name in enumerate(names):
        order.visit(name)
        assert order.upcoming(depth) == names[at + 1 : at + 1 + depth]


@given(layers, layers)
def test_another_order_is_an_error_that_names_the_layers(names: list[str], others: list[str]) -> None:
    order = Order("forward")
    run(order, names)
    if names == others:
        return
    with pytest.raises(UsageError) as error:
        run(order, others)
    at = next((i for i, pair in enumerate(zip(names, others, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(names), len(others)) if at is None else at
    for expected in (names[at : at + 1] or ["the end of the pass"]) + (others[at : at + 1] or ["the pass ended"]):
        assert expected in str(error.value)


@given(layers, layers)
def test_with_gather_the_new_order_is_learned(names: list[str], others: list[str]) -> None:
    order = Order("forward", "gather")
    run(order, names)
    run(order, others)
    assert run(order, others) == ([True] * len(others), False)


@pytest.mark.parametrize("on_change", ["raise", "gather"])
def test_nothing_is_foreseen_after_a_surprise(on_change: OnChange) -> None:
    order = Order("backward", on_change)
    order.start(guess="abc")
    assert order.visit("a")
    assert order.upcoming(2) == ["b", "c"]
    assert not order.visit("c")
    assert order.upcoming(2) == []
    assert order.finish(), "a guess is not checked, and what ran is learned"


def test_the_message_says_what_was_to_come() -> None:
    order = Order("forward")
    run(order, ["blocks.0", "blocks.1"])
    order.start()
    order.visit("blocks.0")
    with pytest.raises(UsageError) as error:
        order.visit("blocks.2")
    assert str(error.value) == (
        "forward: layers ran in another order than in the first pass: 'blocks.1' was to come after 'blocks.0', but "
        "'blocks.2' ran; run the same layers in each pass, or pass on_order_change=\"gather\" to gather them on demand"
    )
