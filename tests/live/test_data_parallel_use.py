"""Bucketed data parallel in use: loops as people write them, mistakes and their messages, export, profiles, state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.live

import torch.distributed as dist  # noqa: E402
from data_parallel_cases import WIDTH, Layers, as_dataclass, build, in_turn, scalar, some_by_rank  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch import nn  # noqa: E402

from slipstream.core.errors import SlipstreamError  # noqa: E402
from slipstream.runtime.buckets import MIB, ByCap, ByFinish, Fixed, Link  # noqa: E402
from slipstream.runtime.data_parallel import DataParallel  # noqa: E402
from slipstream.runtime.tail import StepByBucket  # noqa: E402
from slipstream.runtime.zero1 import Zero1  # noqa: E402

ONE_EACH = ByCap((1,))


def batch(seed: int) -> Any:
    return torch.randint(-2, 3, (3, WIDTH), generator=torch.Generator().manual_seed(seed)).float()


def gradients(model: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def mean_of_ranks(model: Any, loss: Callable[[Any, int], Any]) -> list[Any]:
    """The mean of what every rank's loss would leave in `.grad`."""
    alone = copy.deepcopy(model)
    for rank in range(dist.get_world_size()):
        loss(alone, rank).backward()
    return [None if p.grad is None else p.grad / dist.get_world_size() for p in alone.parameters()]


def trained(model: Any, loss: Callable[[Any, int], Any]) -> bool:
    """Whether three backwards on the wrapped model, the later ones on its final plan, give the mean of all ranks."""
    expected = mean_of_ranks(model.module, loss)
    for _ in range(3):
        model.zero_grad()
        loss(model, dist.get_rank()).backward()
        if not same(gradients(model.module), expected):
            return False
    return True


def loops() -> dict[str, bool]:
    """Each way to use the wrapper, and whether it gave the right gradients."""
    rank = dist.get_rank()
    found = {}

    def two_forwards(model: Any, rank: int) -> Any:
        return scalar(model(batch(rank))) + 2 * scalar(model(batch(10 + rank)))

    found["two forwards, one backward"] = trained(DataParallel(build(), plan=ONE_EACH), two_forwards)

    def part_of_output(model: Any, rank: int) -> Any:
        return scalar(model(batch(rank)).logits[:1])

    found["a dataclass"] = trained(DataParallel(build(as_dataclass), plan=ONE_EACH), part_of_output)

    model = DataParallel(build(), plan=ONE_EACH)
    mine = lambda m, r: scalar(m(batch(r)))  # noqa: E731
    expected = mean_of_ranks(model.module, mine)
    for _ in range(2):
        mine(model, rank).backward()
    found["two backwards add up"] = same(gradients(model), [2 * g for g in expected])

    x = batch(rank).requires_grad_()
    (by_input,) = torch.autograd.grad(mine(model, rank) + scalar(model(x)), x)
    model.zero_grad()
    mine(model, rank).backward()
    found["a backward to the inputs alone"] = same(gradients(model), expected) and bool(by_input.abs().sum() > 0)

    with model.no_sync():
        model.zero_grad()
        mine(model, rank).backward()
    found["no_sync"] = same(gradients(model), gradients_alone(model.module, rank))
    model.reduce()
    found["reduced later"] = same(gradients(model), expected)

    with torch.no_grad():
        model.eval()(batch(0)) if rank == 0 else None
    model.train().zero_grad()
    mine(model, rank).backward()
    found["evaluation on one rank"] = same(gradients(model), expected)

    found["measured again"] = True
    before = model.report
    model.measure_again()
    for _ in range(3):
        model.zero_grad()
        mine(model, rank).backward()
        found["measured again"] &= same(gradients(model), expected)
    found["measured again"] &= model.report.gradients != before.gradients and model.report.plan == before.plan

    stepped = DataParallel(build(), plan=ONE_EACH)
    optimizer = StepByBucket(torch.optim.SGD(stepped.parameters(), lr=0.0), stepped)
    expected = mean_of_ranks(stepped.module, mine)
    for _ in range(2):
        stepped.zero_grad()
        mine(stepped, rank).backward()
    with stepped.no_sync():  # no step between: autograd must not add to what is on its way
        mine(stepped, rank).backward()
    alone = gradients_alone(stepped.module, rank)
    found["backward before step"] = same(gradients(stepped), [a + b for a, b in zip(expected, alone, strict=True)])
    optimizer.step()

    module = model.module
    model.remove()
    model.zero_grad()
    mine(model, rank).backward()
    found["removed"] = same(gradients(module), gradients_alone(module, rank))
    found["wrapped again"] = trained(DataParallel(module, plan=ONE_EACH), mine)

    half = (
        dist.new_group([0, 1], use_local_synchronization=True)
        if rank < 2
        else dist.new_group([2, 3], use_local_synchronization=True)
    )
    torch.manual_seed(0)
    model = DataParallel(build(), plan=ONE_EACH, group=half, wire_dtype=torch.bfloat16)
    mine(model, rank).backward()
    partner = gradients_alone(model.module, rank ^ 1)
    expected = [(a + b) / 2 for a, b in zip(gradients_alone(model.module, rank), partner, strict=True)]
    rounded = [g.to(torch.bfloat16).float() for g in expected]
    found["a group of its own"] = all(
        torch.allclose(a, b, rtol=2**-7) for a, b in zip(gradients(model), rounded, strict=True)
    )
    return found


def gradients_alone(module: Any, rank: int) -> list[Any]:
    alone = copy.deepcopy(module)
    alone.zero_grad()
    scalar(alone(batch(rank))).backward()
    return gradients(alone)


def test_loops_as_people_write_them() -> None:
    for found in run_ranks(4, loops):
        assert found == dict.fromkeys(found, True)


def messages() -> dict[str, str]:
    """Each mistake, and the message it gets."""
    found = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        found[name] = "nothing"
        try:
            action()
        except SlipstreamError as error:
            found[name] = f"{type(error).__name__}: {error}"

    def step(model: Any, optimizer: Any = None) -> None:
        scalar(model(batch(0))).backward()
        if optimizer:
            optimizer.step()

    unused = DataParallel(build(lambda m, x: m.layers[1](m.layers[0](x)), 3))
    attempt("unused", lambda: step(unused))
    attempt("after an error", lambda: step(unused))

    thawed = build()
    thawed.layers[0].weight.requires_grad_(False)
    model = DataParallel(thawed)
    thawed.layers[0].weight.requires_grad_(True)
    attempt("unfrozen", lambda: step(model))

    attempt("nothing to train", lambda: DataParallel(nn.ReLU()))

    sparse = DataParallel(nn.Embedding(4, 4, sparse=True))
    attempt("sparse", lambda: sparse(torch.tensor([1])).sum().backward())

    twice = DataParallel(build())
    attempt("create_graph", lambda: scalar(twice(batch(0))).backward(create_graph=True))

    attempt("wrong plan", lambda: step(DataParallel(build(), plan=Fixed((("layers.0.weight",),)))))
    attempt("no plan yet", lambda: DataParallel(build()).ddp_arguments())
    attempt("no plan to reduce by", lambda: DataParallel(build()).reduce())
    mixed = build(lambda m, x: m.layers[1](m.layers[0](x).double()), 2)
    mixed.layers[1].double()
    mixed = DataParallel(mixed)
    step(mixed)
    attempt("dtypes", mixed.ddp_arguments)

    model = DataParallel(build())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    StepByBucket(plain, model)
    attempt("plain step", lambda: step(model, plain))

    model = DataParallel(build())
    step(model)
    attempt("late zero1", lambda: Zero1(torch.optim.SGD(model.parameters()), model))
    attempt("state", lambda: Zero1(torch.optim.Adagrad(model.parameters()), DataParallel(build())))
    model = DataParallel(build())
    attempt("strangers", lambda: Zero1(torch.optim.SGD([*model.parameters(), nn.Parameter(batch(0))]), model))
    Zero1(torch.optim.SGD(model.parameters()), model)
    step(model)
    attempt("no step between", lambda: step(model))
    attempt("no plan but the first", model.measure_again)

    def grows(m: Any, x: Any) -> Any:
        for _ in range(m.pieces):
            x = torch.utils.checkpoint.checkpoint(m.layers[0], x.requires_grad_(), use_reentrant=True)
        return m.layers[1](x)

    growing = build(grows, 2)
    growing.pieces = 1
    model = DataParallel(growing)
    step(model)
    growing.pieces = 2
    attempt("arrives more often", lambda: step(model))
    return found


def test_mistakes_have_messages_that_help() -> None:
    (found,) = run_ranks(1, messages)
    expected = {
        "unused": "UsageError: 2 of 6 parameters have no gradient: layers.2.weight, layers.2.bias",
        "after an error": "UsageError: the last backward ended with an error",
        "unfrozen": "UsageError: layers.0.weight: it was unfrozen after wrapping",
        "nothing to train": "UsageError: trainable parameters on one device are needed, not on none",
        "sparse": "UsageError: weight: its gradient is sparse",
        "create_graph": "UsageError: layers.3.bias: its gradient is itself differentiable",
        "wrong plan": "UsageError: the bucket plan does not name each trainable parameter once",
        "no plan yet": "UsageError: there is no plan yet",
        "no plan to reduce by": "UsageError: there is no plan yet",
        "dtypes": "UsageError: DDP has no list of caps for gradients of several dtypes",
        "plain step": "UsageError: this optimizer is stepped in parts",
        "late zero1": "UsageError: the model has run a backward already",
        "state": "UsageError: the optimizer has state already",
        "strangers": "UsageError: the optimizer has parameters that the model has not",
        "no step between": "UsageError: a second backward before step() would lose the first",
        "no plan but the first": "UsageError: the optimizer is sharded along the plan",
        "arrives more often": "UsageError: layers.0.bias: its gradient arrived 2 times, and 1 in the first backward",
    }
    assert found.keys() == expected.keys()
    for name, message in expected.items():
        assert found[name].startswith(message), name


def labels_in_profile() -> set[str]:
    model = DataParallel(build(), plan=ByCap((300,)))
    optimizer = StepByBucket(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scalar(model(batch(0))).backward()
    optimizer.step()
    with torch.profiler.profile() as profile:
        scalar(model(batch(0))).backward()
        optimizer.step()
    return {event.key for event in profile.key_averages() if event.key.startswith("slipstream::")}


def test_a_profile_shows_the_buckets() -> None:
    for labels in run_ranks(2, labels_in_profile):
        assert {"slipstream::bucket 0 launch 336 B", "slipstream::bucket 0 wait", "slipstream::bucket 1 step"} <= labels


def ddp_buckets() -> tuple[list[int], list[int], list[int]]:
    """What DDP makes of our plan; and its own default, against ours by cap. Bytes in launch order."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))

    def ddp_sizes(**arguments: Any) -> list[int]:
        ddp = nn.parallel.DistributedDataParallel(copy.deepcopy(module), **arguments)
        for _ in range(3):
            ddp(torch.ones(1, 1024)).sum().backward()
        return [int(size) for size in ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")]

    link = Link(1e-6, 1e9)
    ours = DataParallel(copy.deepcopy(module), plan=ByFinish(link, slack=0))
    by_cap = DataParallel(copy.deepcopy(module), plan=ByCap())
    for _ in range(3):
        for model in (ours, by_cap):
            model(torch.ones(1, 1024)).sum().backward()
    planned = [bucket.size for bucket in ours.report.buckets]
    capped = [bucket.size for bucket in by_cap.report.buckets]
    with suppress(SlipstreamError):  # a torch whose DDP has no list of caps
        assert ddp_sizes(**ours.ddp_arguments()) == planned
    return ddp_sizes(), capped, planned


def test_torch_ddp_makes_the_same_buckets() -> None:
    for theirs, ours, planned in run_ranks(2, ddp_buckets):
        assert theirs == ours == [4 * MIB, 28 * MIB, 16 * MIB]
        assert len(planned) > 1


class Block(nn.Module):
    """Attention whose output projection is never called by itself, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.extra = nn.ParameterList([nn.Parameter(torch.ones(8))])
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        return x + self.linear(self.attention(y, y, y, need_weights=False)[0] * self.extra[0])


def blocks() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def train(model: Any, optimizer: Any, steps: int, schedule: Any = None) -> None:
    for step in range(steps):
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        model(x).square().sum().backward()
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()


def adamw(module: Any) -> Any:
    """AdamW as it is used: no weight decay on what has one dimension.

    The large eps keeps noise small where a gradient is zero but for rounding: that of attention's key bias.
    """
    flat = [p for p in module.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": [p for p in module.parameters() if p.dim() > 1]}, {"params": flat, "weight_decay": 0}], eps=1e-3
    )


def with_zero1() -> dict[str, bool]:
    """ZeRO-1 on a small transformer, against the plain wrapper, saved and loaded on the way."""
    found = {}
    plain = DataParallel(blocks())
    their_optimizer = adamw(plain.module)
    their_schedule = torch.optim.lr_scheduler.ExponentialLR(their_optimizer, 0.5)
    model = DataParallel(blocks(), plan=ByCap((400,)))
    inner = adamw(model.module)
    optimizer, schedule = Zero1(inner, model), torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    train(plain, their_optimizer, 3, their_schedule)
    train(model, optimizer, 3, schedule)

    state = model.state_dict()  # waits for the gathers
    close = lambda a, b: all(torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=True))  # noqa: E731
    found["parameters"] = close(state.values(), plain.state_dict().values())
    saved, theirs = optimizer.state_dict(), their_optimizer.state_dict()
    found["groups"] = saved["param_groups"] == theirs["param_groups"]
    found["state"] = all(
        close(saved["state"][i].values(), theirs["state"][i].values())
        for i in theirs["state"].keys() | saved["state"].keys()
    )
    found["shapes"] = all(
        saved["state"][i]["exp_avg"].shape == theirs["state"][i]["exp_avg"].shape for i in theirs["state"]
    )
    own = sum(s["exp_avg"].numel() for s in inner.state.values())
    found["sharded"] = own <= sum(p.numel() for p in model.parameters()) // dist.get_world_size() + 100

    again = DataParallel(blocks(), plan=ByCap((3000,)))
    again.load_state_dict(state)
    new = Zero1(adamw(again.module), again)
    new.load_state_dict(saved)
    train(again, new, 2)
    train(plain, their_optimizer, 2)
    found["resumed on another plan"] = close(again.state_dict().values(), plain.state_dict().values())

    back = adamw(plain.module)
    back.load_state_dict(new.state_dict())
    found["loaded by a plain optimizer"] = len(back.state) == len(their_optimizer.state)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_zero1_trains_saves_and_resumes_as_the_plain_optimizer(ranks: int) -> None:
    for found in run_ranks(ranks, with_zero1):
        assert found == dict.fromkeys(found, True)


def order_in_forward() -> list[tuple[str, Any]]:
    events: list[tuple[str, Any]] = []
    module = build(in_turn, 4)
    for number, layer in enumerate(module.layers):
        layer.register_forward_hook(lambda *_, n=number: events.append(("forward", n)))
    model = DataParallel(module, plan=Fixed(tuple((f"layers.{i}.weight", f"layers.{i}.bias") for i in (3, 2, 1, 0))))
    model.reducer.observe = lambda event, subject: events.append((event, subject))
    optimizer = Zero1(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scalar(model(batch(0))).backward()
    optimizer.step()
    events.clear()
    model(batch(0))
    return events


def test_each_module_waits_for_its_own_parameters_only() -> None:
    """Bucket 3 holds layer 0."""
    for events in run_ranks(2, order_in_forward):
        assert events == [(event, n) for layer in range(4) for event, n in (("receive", 3 - layer), ("forward", layer))]


def unused_everywhere_is_left_alone() -> list[bool]:
    """A parameter that no rank used keeps `.grad` None, so that weight decay and momentum leave it alone."""
    model = DataParallel(build(some_by_rank), unused="zeros")
    x = batch(0) + dist.get_rank()
    x[0, 0] = dist.get_rank()
    for _ in range(3):
        model.zero_grad()
        scalar(model(x)).backward()
    return [layer.weight.grad is not None for layer in model.module.layers]


def test_what_no_rank_has_used_gets_no_gradient() -> None:
    assert run_ranks(2, unused_everywhere_is_left_alone) == [[True, True, True, False]] * 2


def late_on_one_rank() -> tuple[list[int], Any]:
    import time

    module = build()
    if dist.get_rank() == 1:
        module.layers[0].register_full_backward_pre_hook(lambda *_: time.sleep(0.3))
    model = DataParallel(module, plan=ByFinish(Link(1e-3, 1e6)))
    scalar(model(batch(0))).backward()
    return [gradient.ready_ns for gradient in model.report.gradients], model.report.plan


def test_ready_times_are_those_of_the_slowest_rank() -> None:
    (times, plan), (same_times, same_plan) = run_ranks(2, late_on_one_rank)
    assert (times, plan) == (same_times, same_plan)
    assert times[-1] > 300e6
    assert set(plan[-1]) == {"layers.0.weight", "layers.0.bias"}, "what waits 0.3 s for the last layer is sent before"


def different_models() -> str:
    rank = dist.get_rank()
    try:
        DataParallel(Layers(in_turn, 3 if rank < 2 else 2, torch.float64 if rank == 1 else torch.float32))
    except SlipstreamError as error:
        return str(error)
    return "nothing"


def test_ranks_with_different_models_are_refused_on_all_ranks() -> None:
    first, other_dtype, shorter = run_ranks(3, different_models)
    assert first.startswith("the model differs on another rank")
    assert other_dtype.startswith(
        "the model differs from rank 0's: ('layers.0.weight', (6, 6), 'torch.float64', True) is"
    )
    assert shorter.startswith("the model differs from rank 0's: in its length")
