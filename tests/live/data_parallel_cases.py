"""Models and one training run of bucketed data parallel, against one process that sees everybody's data.

Weights and data are small integers, so every sum is exact in any order, and results must be equal bit for bit. Buffers
hold NaN before each use. Between steps, parameters are rounded to small integers again, on all sides alike.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.runtime import collectives
from slipstream.runtime.buckets import ByCap, ByFinish, Fixed, Link, Planner
from slipstream.runtime.data_parallel import DataParallel
from slipstream.runtime.tail import StepByBucket
from slipstream.runtime.zero1 import Zero1

WIDTH, BATCH, STEPS = 6, 3, 4

PLANNED = ByFinish(Link(1e-5, 1e6), backwards=2)

PLACE: dict[str, Any] = {"device": torch.device("cpu"), "group": None}
"""Where cases run; a rank with a GPU changes it."""

# --- models ----------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Linear layers; `run` says how forward uses them."""

    def __init__(self, run: Callable[[Layers, Any], Any], count: int = 4, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(count))
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def in_turn(model: Layers, x: Any) -> Any:
    for layer in model.layers:
        x = layer(x).relu()
    return x


def one_twice(model: Layers, x: Any) -> Any:
    return model.layers[2](model.layers[0](model.layers[1](model.layers[0](x)).relu()))


def checkpointed(model: Layers, x: Any, reentrant: bool) -> Any:
    """Layer 0 lies in two checkpointed pieces: under reentrant checkpointing its gradient arrives twice."""
    x = x.requires_grad_()  # the reentrant kind differentiates nothing for the sake of parameters alone
    x = checkpoint(lambda y: model.layers[1](model.layers[0](y)).relu(), x, use_reentrant=reentrant)
    x = checkpoint(lambda y: model.layers[0](y).relu(), x, use_reentrant=reentrant)
    return model.layers[2](x)


def reentrant(model: Layers, x: Any) -> Any:
    return checkpointed(model, x, True)


def not_reentrant(model: Layers, x: Any) -> Any:
    return checkpointed(model, x, False)


@dataclass
class Output:
    logits: Any
    extras: dict[str, Any] = field(default_factory=dict)


def as_dataclass(model: Layers, x: Any) -> Any:
    return Output(in_turn(model, x), {"nothing": None})


def in_double(model: Layers, x: Any) -> Any:
    return in_turn(model, x.double())


def weight_read_by_parent(model: Layers, x: Any) -> Any:
    """As torch's MultiheadAttention does with its output projection: layer 1 is never called."""
    x = model.layers[0](x).relu()
    x = nn.functional.linear(x, model.layers[1].weight, model.layers[1].bias)
    return model.layers[2](x)


def some_by_rank(model: Layers, x: Any) -> Any:
    """Layer 0 is used by all, layer 1 by rank 0, layer 2 by odd ranks, layer 3 by nobody; the data tells the rank."""
    rank = int(x[0, 0]) % 100
    x = model.layers[0](x % 100 - rank)
    if rank == 0:
        x = model.layers[1](x)
    return model.layers[2](x) if rank % 2 else x


def build(run: Callable[[Layers, Any], Any] = in_turn, count: int = 4, dtype: Any = torch.float32) -> Any:
    return to_integers(Layers(run, count, dtype))


def tied() -> Any:
    model = build()
    model.layers[3].weight = model.layers[0].weight
    return model


def frozen() -> Any:
    model = build()
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    return model


def mixed() -> Any:
    """Every other layer in float64."""
    model = build(lambda m, x: m.layers[2](m.layers[1](m.layers[0](x).double()).float().relu()), count=3)
    model.layers[1].double()
    return model


class Images(nn.Module):
    """Convolutions in channels last, whose parameters are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2))

    def forward(self, x: Any) -> Any:
        return self.convolutions(torch.stack([x, -x], 1).unsqueeze(-1).expand(-1, -1, -1, WIDTH))


def images() -> Any:
    return to_integers(Images().to(memory_format=torch.channels_last))


def to_integers(model: Any) -> Any:
    """Round parameters to integers from -2 to 2."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter * 7).round().remainder(5) - 2)
    return model


# --- one case, on one rank -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: Callable[[], Any] = build
    plan: Planner = PLANNED
    tail: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    clip: bool = False
    by_rank: bool = False
    keep_gradients: bool = False


def data(step: int, rank: int, micro: int, case: Case) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x = torch.randint(-2, 3, (BATCH, WIDTH), generator=generator).float().to(PLACE["device"])
    return x + rank if case.by_rank else x


def scalar(output: Any) -> Any:
    """A loss with integer gradients."""
    output = output.logits if isinstance(output, Output) else output
    return (output.float() * (torch.arange(output.numel(), device=output.device).view(output.shape) % 3 - 1)).sum()


def expected_gradients(model: Any, step: int, case: Case) -> None:
    """Sum of all ranks' gradients as the wire rounds them, divided by their number, in `.grad`.

    The result travels as well, and is rounded once more, unless it stays where it was summed.
    """
    wire = case.options.get("wire_dtype")
    wire_back = None if case.tail == "zero1" else wire
    ranks = dist.get_world_size()
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = [p.grad for p in parameters]
    total: list[Any] = [None] * len(parameters)
    for rank in range(ranks):
        model.zero_grad()
        for micro in range(case.micro_batches):
            scalar(model(data(step, rank, micro, case))).backward()
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None:
                gradient = parameter.grad if kept[i] is None else parameter.grad + kept[i]
                gradient = gradient.to(wire).to(parameter.dtype) if wire else gradient
                total[i] = gradient if total[i] is None else total[i] + gradient
    for parameter, gradient in zip(parameters, total, strict=True):
        if gradient is not None and case.options.get("mean", True):
            gradient = gradient / ranks
        parameter.grad = gradient.to(wire_back).to(parameter.dtype) if wire_back and gradient is not None else gradient


def fill_with_garbage(model: Any) -> None:
    for bucket in model.reducer.buckets:
        for flat in bucket.flats:
            flat.buffer.fill_(float("nan"))


def wrap(case: Case, module: Any, events: list[Any]) -> tuple[Any, Any]:
    """The wrapped model and what steps it."""

    def observe(event: str, subject: str | int) -> None:
        events.append((event, subject))
        if event == "gather":  # only this rank's own share is right before a gather
            for share in optimizer._shares[subject]:
                own = share.own.clone()
                share.values.buffer.fill_(float("nan"))
                share.own.copy_(own)

    model = DataParallel(module, plan=case.plan, observe=observe, group=PLACE["group"], **case.options)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5, weight_decay=0.5)
    if case.tail:
        optimizer = {"step": StepByBucket, "zero1": Zero1}[case.tail](optimizer, model)
    return model, optimizer


def one_step(model: Any, step: int, case: Case) -> None:
    for micro in range(case.micro_batches):
        with model.no_sync() if micro + 1 < case.micro_batches else nullcontext():
            scalar(model(data(step, dist.get_rank(), micro, case))).backward()


def differences(ours: Any, reference: Any, what: Callable[[Any], Any]) -> list[str]:
    found = []
    for (name, a), (_, b) in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        x, y = what(a), what(b)
        if (x is None) != (y is None) or (x is not None and not torch.equal(x, y)):
            found.append(f"{name}: {x} is not {y}")
    return found


def run_case(case: Case) -> dict[str, Any]:
    """Train both sides; gives the differences after each step, and each step's events, collectives and plan."""
    torch.manual_seed(0)
    reference = case.model().to(PLACE["device"])
    module = copy.deepcopy(reference)
    if dist.get_rank():  # all start as rank 0
        for parameter in module.parameters():
            parameter.data.fill_(float("nan"))
    events: list[Any] = []
    model, optimizer = wrap(case, module, events)
    their_optimizer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.5, weight_decay=0.5)
    found: dict[str, Any] = {"wrong": [], "events": [], "counts": [], "reports": []}
    for step in range(STEPS):
        if not case.keep_gradients:
            fill_with_garbage(model)
        with counted() as count:
            one_step(model, step, case)
            events.append(("returned", step))
            expected_gradients(reference, step, case)
            if not case.tail:
                found["wrong"] += [f"step {step} grad {d}" for d in differences(module, reference, lambda p: p.grad)]
            if case.clip:
                clip(model, optimizer, reference, case)
            optimizer.step()
        their_optimizer.step()
        if case.tail == "zero1":
            optimizer.wait()
        found["wrong"] += [f"step {step} {d}" for d in differences(module, reference, lambda p: p.detach())]
        if not case.keep_gradients:
            optimizer.zero_grad()
            their_optimizer.zero_grad()
        to_integers(module)
        to_integers(reference)
        found["counts"].append(count)
        found["events"].append(events.copy())
        found["reports"].append(model.report)
        events.clear()
    (optimizer if case.tail == "zero1" else model).remove()
    return found


def clip(model: Any, optimizer: Any, reference: Any, case: Case) -> None:
    nn.utils.clip_grad_norm_(reference.parameters(), 3.0)
    if case.tail:
        optimizer.clip_grad_norm_(3.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the collectives that are started."""
    count: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return function(*args, **kwargs)

        return call

    places = [(dist, "all_reduce"), (dist, "all_to_all_single"), (collectives, "_all_gather")]
    with pytest.MonkeyPatch.context() as patch:
        for place, name in places:
            patch.setattr(place, name, counting(name.strip("_"), getattr(place, name)))
        yield count


def run_cases(names: list[str]) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)  # fills every torch.empty with NaN
    results = {}
    for name in names:
        try:
            results[name] = run_case(CASES[name])
        except Exception as error:
            raise RuntimeError(f"case {name}") from error
    return results


# --- the cases -------------------------------------------------------------------------------------------------------

NAMES = [f"layers.{i}.{part}" for i in range(4) for part in ("weight", "bias")]


def any_plan(seed: int) -> Fixed:
    """Some partition of the gradients, in some order."""
    chance = random.Random(seed)
    names = chance.sample(NAMES, len(NAMES))
    cuts = [0, *sorted(chance.sample(range(1, len(names)), chance.randrange(len(names)))), len(names)]
    return Fixed(tuple(tuple(names[a:b]) for a, b in itertools.pairwise(cuts)))


PLANS: dict[str, Planner] = {
    "planned": PLANNED,
    "measured": ByFinish(backwards=2),
    "one bucket": ByCap((10**9,)),
    "capped": ByCap((100, 200)),
    "one each": ByCap((1,)),
    **{f"any plan {seed}": any_plan(seed) for seed in range(6)},
}

WIRES: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"wire_dtype": torch.bfloat16},
    "sum": {"mean": False},
    "float64 sums": {"reduce_dtype": torch.float64},
}

MODELS: dict[str, Case] = {
    "one twice": Case(lambda: build(one_twice, 3)),
    "reentrant": Case(lambda: build(reentrant, 3)),
    "not reentrant": Case(lambda: build(not_reentrant, 3)),
    "dataclass": Case(lambda: build(as_dataclass)),
    "tied": Case(tied),
    "frozen": Case(frozen),
    "mixed": Case(mixed),
    "images": Case(images),
    "float64": Case(lambda: build(in_double, 3, torch.float64)),
    "weight read by parent": Case(lambda: build(weight_read_by_parent, 3)),
    "accumulation": Case(micro_batches=3),
    "unused": Case(lambda: build(some_by_rank), options={"unused": "zeros"}, by_rank=True),
    "all used": Case(options={"unused": "zeros"}),
    "clipped": Case(clip=True),
    "kept gradients": Case(keep_gradients=True, options={"mean": False}),
}

# Its norm is summed in another order than torch's, and ZeRO-1 keeps no gradients: both are tested elsewhere.
NOT_EXACT = {("clipped", "zero1"), ("kept gradients", "zero1")}

TAILS = ("", "step", "zero1")


def named(*parts: str) -> str:
    return " ".join(filter(None, parts))


CASES = {
    named(plan, wire, tail): Case(plan=PLANS[plan], options=WIRES[wire], tail=tail)
    for plan, wire, tail in itertools.product(PLANS, WIRES, TAILS)
} | {
    named(model, tail): replace(MODELS[model], tail=tail)
    for model, tail in itertools.product(MODELS, TAILS)
    if (model, tail) not in NOT_EXACT
}

# Every pair of plan and tail, of wire and tail, of model and tail: enough where all combinations take long.
FEWER = [name for name, case in CASES.items() if not case.options or case.plan == PLANNED]
