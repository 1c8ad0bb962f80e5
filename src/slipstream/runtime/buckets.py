"""Which gradients are reduced together: PyTorch's rule, and the boundaries that let the last reduction finish first.

A plan names the gradients of each bucket, in the order in which the buckets are launched. The planned rule rests on
a model with two numbers: one reduction takes `alpha_s` and its bytes at `bytes_per_s`, and reductions follow each
other on the link. Bucket k starts when its last gradient is ready and bucket k - 1 has ended, so

    finish(k) = max(finish(k - 1), ready(k)) + alpha + bytes(k) / B

Later starts never help, hence the best plan of a prefix is part of a best plan of the whole: dynamic programming is
exact. Small buckets start early and pay alpha; large ones do not: the optimum depends on where the bytes become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.core.errors import UsageError

MIB = 1024 * 1024

TORCH_CAPS = (1 * MIB, 25 * MIB)
"""The caps of torch DDP in bytes while `bucket_cap_mb` is None: a small first bucket, then 25 MiB."""

BucketPlan: TypeAlias = tuple[tuple[str, ...], ...]
"""The names of the parameters of each bucket, in the order in which the buckets are launched."""

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient: its `size` in bytes on the wire, and when it is ready, counted from the start of backward.

    Gradients of different `dtype` may share a bucket, but each dtype is a collective of its own.
    """

    name: str
    size: int
    ready_ns: int
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Link:
    """What a reduction costs: `alpha_s` seconds each, and its buffer at `bytes_per_s`.

    This is algorithm bandwidth (the buffer's bytes over the time), which holds the 2 (n - 1) / n of an all-reduce.
    """

    alpha_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.alpha_s >= 0 and self.bytes_per_s > 0):
            raise UsageError(f"a link needs alpha_s >= 0 and bytes_per_s > 0, not {self.alpha_s}, {self.bytes_per_s}")

    def ns(self, size: int, collectives: int = 1) -> float:
        """Nanoseconds to reduce `size` bytes in so many collectives."""
        return self.alpha_s * 1e9 * collectives + size / self.bytes_per_s * 1e9


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Least squares on observed reductions, of `sizes` bytes in `seconds` each.

    Weighted by 1 / time, as if long ones were many short ones: unweighted, the largest message alone decides, and with
    errors relative to the time, the small ones that a rate limiter's burst lets through make the link 10 % too fast.
    Where they fit a negative alpha, it is zero.
    """
    size, took = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    root = np.sqrt(took)
    (alpha, per_byte), *_ = np.linalg.lstsq(np.column_stack([1 / root, size / root]), root, rcond=None)
    if alpha < 0:
        alpha, per_byte = 0.0, size.sum() / (size**2 / took).sum()
    # On a very fast link noise can hide the slope. The largest message still bounds the rate from below.
    per_byte = per_byte if per_byte > 0 else float(took.max() / size.max())
    return Link(float(alpha), float(1 / per_byte))


def plan_by_cap(gradients: Iterable[Gradient], caps: Sequence[int] = TORCH_CAPS) -> BucketPlan:
    """PyTorch's rule: a bucket closes once it has reached its cap in bytes, so it may be larger than the cap.

    The k-th bucket of a dtype closes at `caps[k]`, and the last cap holds for all later ones. Gradients come in ready
    order.
    """
    if not caps or min(caps) <= 0:
        raise UsageError(f"bucket caps are positive numbers of bytes, not {list(caps)}")
    closed: list[tuple[int, tuple[str, ...]]] = []
    open_: dict[str, list[str]] = {}
    filled: dict[str, int] = {}
    closed_of: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, gradient in enumerate(gradients):
        key = gradient.dtype
        open_.setdefault(key, []).append(gradient.name)
        filled[key] = filled.get(key, 0) + gradient.size
        last[key] = position
        if filled[key] >= caps[min(closed_of.get(key, 0), len(caps) - 1)]:
            closed.append((position, tuple(open_.pop(key))))
            filled[key], closed_of[key] = 0, closed_of.get(key, 0) + 1
    rest = [(last[key], tuple(names)) for key, names in open_.items()]
    return tuple(names for _, names in sorted(closed + rest))


def plan_by_finish(gradients: Sequence[Gradient], link: Link, slack: float = 0.0) -> BucketPlan:
    """The contiguous buckets, in ready order, whose last reduction is predicted to finish first; of those the fewest.

    `slack` trades time for fewer buckets: the part that stays exposed after the last gradient may grow by this share.
    Takes O(buckets x gradients^2).
    """
    if not gradients:
        return ()
    costs = _Costs(gradients, link)
    best = costs.best_finish()
    starts = costs.fewest_buckets(best + slack * (best - float(costs.ready[-1])))
    ends = [*starts[1:], len(gradients)]
    names = [gradient.name for gradient in gradients]
    return tuple(tuple(names[start:end]) for start, end in zip(starts, ends, strict=True))


def predict_finish(plan: BucketPlan, gradients: Iterable[Gradient], link: Link) -> float:
    """When the last reduction of `plan` ends, in nanoseconds from the start of backward."""
    by_name = {gradient.name: gradient for gradient in gradients}
    finish = -np.inf
    for names in plan:
        bucket = [by_name[name] for name in names]
        start = max(finish, max(gradient.ready_ns for gradient in bucket))
        finish = start + link.ns(sum(g.size for g in bucket), len({g.dtype for g in bucket}))
    return float(finish)


def ddp_caps_mb(plan: BucketPlan, sizes: Mapping[str, int]) -> list[float]:
    """The plan as torch DDP's `bucket_cap_mb_list`: each cap is what its bucket holds, so DDP closes it exactly there.

    `sizes` are the bytes of each gradient in its own dtype, the ones DDP counts. It holds for gradients of one dtype
    that become ready in the plan's order.
    """
    return [sum(sizes[name] for name in names) / MIB for names in plan]


class Planner(Protocol):
    """Decides the plan when gradients have been measured, in the first of so many `backwards` and again after the last.

    The first pass is cold, which changes times more than order; the later ones count by their median.
    """

    @property
    def backwards(self) -> int: ...

    def plan(self, gradients: Sequence[Gradient], measure_link: Callable[[], Link]) -> BucketPlan:
        """Plan for `gradients` in ready order. `measure_link` is a collective call: on all ranks or on none."""
        ...


@dataclass(frozen=True, slots=True)
class ByCap:
    """`plan_by_cap` in the ready order of the first backward."""

    caps: tuple[int, ...] = TORCH_CAPS
    backwards: int = 1

    def plan(self, gradients: Sequence[Gradient], measure_link: Callable[[], Link]) -> BucketPlan:
        """See `Planner`."""
        return plan_by_cap(gradients, self.caps)


@dataclass(frozen=True, slots=True)
class ByFinish:
    """`plan_by_finish` with measured ready times, and a measured link unless one is given.

    A link is measured alone, and slower beside compute: plans are made for one that is `contention` times slower. They
    would otherwise send at the last moment at which the tail does not suffer, and miss it.
    """

    link: Link | None = None
    slack: float = 0.05
    contention: float = 1.25
    backwards: int = 5

    def plan(self, gradients: Sequence[Gradient], measure_link: Callable[[], Link]) -> BucketPlan:
        """See `Planner`."""
        link = self.link or measure_link()
        slower = Link(link.alpha_s * self.contention, link.bytes_per_s / self.contention)
        return plan_by_finish(gradients, slower, self.slack)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A plan made elsewhere, for example by an earlier run of the same model."""

    buckets: BucketPlan
    backwards: int = 1

    def plan(self, gradients: Sequence[Gradient], measure_link: Callable[[], Link]) -> BucketPlan:
        """See `Planner`."""
        return self.buckets


class _Costs:
    """The dynamic program: position j stands before gradient j, and a bucket (i, j) holds the gradients from i to j."""

    def __init__(self, gradients: Sequence[Gradient], link: Link) -> None:
        self.count = len(gradients)
        self.link = link
        self.ready = np.maximum.accumulate([float(gradient.ready_ns) for gradient in gradients])
        self.before = np.cumsum([0, *(gradient.size for gradient in gradients)])
        self.dtypes = [gradient.dtype for gradient in gradients]
        self.last_of_dtype: list[dict[str, int]] = [{}]
        for position, dtype in enumerate(self.dtypes):
            self.last_of_dtype.append({**self.last_of_dtype[-1], dtype: position})

    def finishes(self, end: int, before: Floats) -> Floats:
        """When bucket (i, end) ends, for each i < end, if what comes before i ends at `before[i]`."""
        sizes = self.before[end] - self.before[:end]
        starts = np.arange(end)
        collectives = np.sum([starts <= last for last in self.last_of_dtype[end].values()], axis=0)
        costs = self.link.alpha_s * 1e9 * collectives + sizes / self.link.bytes_per_s * 1e9
        finishes: Floats = np.maximum(before[:end], self.ready[end - 1]) + costs
        return finishes

    def best_finish(self) -> float:
        best = np.full(self.count + 1, -np.inf)
        for end in range(1, self.count + 1):
            best[end] = self.finishes(end, best).min()
        return float(best[-1])

    def fewest_buckets(self, target: float) -> list[int]:
        """Where each bucket starts, in the smallest plan that ends by `target` (not before `best_finish`)."""
        finish = np.full(self.count + 1, np.inf)
        finish[0] = -np.inf
        choices: list[npt.NDArray[np.int64]] = []
        while finish[-1] > target:
            finish, choice = self._one_more_bucket(finish)
            choices.append(choice)
        starts, end = [], self.count
        for choice in reversed(choices):
            end = int(choice[end])
            starts.append(end)
        return starts[::-1]

    def _one_more_bucket(self, finish: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
        """From the earliest finish of each prefix in exactly c buckets to that in c + 1, and where the last starts."""
        later, choice = np.full(self.count + 1, np.inf), np.zeros(self.count + 1, np.int64)
        for end in range(1, self.count + 1):
            finishes = self.finishes(end, finish)
            choice[end] = finishes.argmin()
            later[end] = finishes[choice[end]]
        return later, choice
