"""FullySharded on integers: bit-equal to one process, whatever the depth, policy, model and number of ranks."""

from functools import partial

import pytest

pytest.importorskip("torch")

import torch.distributed as dist
from ranks import run_ranks
from sharded_cases import (
    Adapter,
    Bare,
    Boxes,
    Branches,
    Case,
    Checkpointed,
    InPlace,
    Net,
    Recomputing,
    Reused,
    Rich,
    Shared,
    Tied,
    TwoDtypes,
    Unused,
    check,
    frozen_parts,
)

from slipstream.runtime.sharded import Groups

pytestmark = pytest.mark.live

ZERO2 = {"reshard_after_forward": False}
MODELS = {
    "plain": Net,
    "bare": Bare,
    "bare, unused": partial(Bare, Unused),
    "tied": Tied,
    "reused": Reused,
    "branches": Branches,
    "shared": Shared,
    "recomputing layers": partial(Net, Recomputing),
    "in place": partial(Net, InPlace),
    "unused": partial(Net, Unused),
    "adapters": partial(Net, Adapter),
    "bare adapters": partial(Bare, Adapter),
    "two dtypes": partial(Net, TwoDtypes),
    "dictionaries": Rich,
    "dataclasses": Boxes,
    "frozen": frozen_parts,
    "checkpointed": Checkpointed,
    "checkpointed in pairs": partial(Checkpointed, span=2),
    "checkpointed in threes": partial(Checkpointed, span=3),
    "checkpointed to the end": partial(Checkpointed, early_stop=False),
    "checkpointed in pairs to the end": partial(Checkpointed, span=2, early_stop=False),
    "checkpointed, reentrant": partial(Checkpointed, reentrant=True),
    "checkpointed in pairs, reentrant": partial(Checkpointed, span=2, reentrant=True),
}
POLICIES = [{"depth": depth, **policy} for depth in (0, 1, 2, 9) for policy in ({}, ZERO2)]


def all_cases() -> None:
    """Every model under every policy on two ranks; elsewhere under two policies, others for each model."""
    groups = Groups.new()
    every = dist.get_world_size() == 2
    for place, (name, model) in enumerate(MODELS.items()):
        for options in POLICIES if every else [POLICIES[place % 8], POLICIES[(3 * place + 1) % 8]]:
            check(Case(f"{name} {options}", model, options), groups)
    for options in POLICIES[:4]:
        for hold in (False, True):
            check(Case(f"3 micro-batches {options} {hold}", Net, options, micro_batches=3, hold=hold), groups)
            check(Case(f"3 micro-batches, reused {options} {hold}", Reused, options, 3, hold), groups)
    for depth in (0, 1, 2):
        for name in ("plain", "reused", "tied", "checkpointed in pairs"):
            check(Case(f"{name}, last kept", MODELS[name], {"depth": depth, "keep_last": True}), groups)
    for limit in (0, 1):
        check(Case(f"{limit} scatters at a time", Net, {"scatters_in_flight": limit, "depth": 0}), groups)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_one_process(ranks: int) -> None:
    run_ranks(ranks, all_cases)


def hybrid_cases() -> None:
    for size in (1, 2, 4):
        groups = Groups.new(size)
        assert (groups.replicate is None) == (size == dist.get_world_size())
        for options in POLICIES[:4]:
            for name in ("plain", "tied", "reused", "adapters", "checkpointed"):
                check(Case(f"{name} {options}", MODELS[name], options), groups)
        check(Case("3 micro-batches", Net, {}, 3), groups)
        check(Case("3 micro-batches, held", Net, {}, 3, True), groups)


def test_hybrid_equals_one_process() -> None:
    run_ranks(4, hybrid_cases)
