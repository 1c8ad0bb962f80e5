"""Split GEMMs on real gloo ranks: bit-equal to one process, in the right order, with the fewest messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from itertools import chain, count, product
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from slipstream.core.errors import UsageError  # noqa: E402
from slipstream.runtime import collectives, symmetric  # noqa: E402
from slipstream.runtime.failures import PeerError  # noqa: E402
from slipstream.runtime.rows import RowSplit, even_shares  # noqa: E402
from slipstream.runtime.split_gemm import all_gather_matmul, all_gather_matmuls, matmul_reduce_scatter  # noqa: E402

pytestmark = pytest.mark.live

EXCHANGES = ("ring", "chunked")
CHUNKS = (1, 2, 3, 5)
Layout = Callable[[Any], Any]


def whole(shape: tuple[int, int], seed: int, dtype: Any = torch.float32, most: int = 4) -> Any:
    """The same integers on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def row_counts(ranks: int) -> list[tuple[int, ...]]:
    """Even, one more here and there, very uneven, and ranks with nothing."""
    nearly = even_shares(4 * ranks + ranks // 2, ranks)
    return [(4,) * ranks, nearly, tuple(range(7, 7 - 2 * ranks, -2)), (5, *(0,) * (ranks - 1))]


def garbage_in_new_memory() -> None:
    """From here on torch.empty and its like are full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()


def check_gather(
    counts: tuple[int, ...], widths: list[int], dtype: Any, layout: Layout, k: int = 6, **how: Any
) -> None:
    """all_gather_matmuls equals x @ w on the whole matrix, and so do its gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = RowSplit(counts).owned(rank)
    x = whole((sum(counts), k), 0, dtype, 1).requires_grad_()
    # Each rank has its own columns, some ranks more of them than others.
    weights = [
        [layout(whole((k, width + r % 2), 10 * i + r, dtype, 1)).requires_grad_() for i, width in enumerate(widths)]
        for r in range(size)
    ]
    gradients = [[whole((sum(counts), w.shape[1]), 5 + i, dtype, 1) for i, w in enumerate(ws)] for ws in weights]
    wanted = [[x @ w for w in ws] for ws in weights]
    torch.autograd.backward(list(chain(*wanted)), list(chain(*gradients)))

    shard = x.detach()[mine].requires_grad_()
    local = [w.detach().clone(memory_format=torch.preserve_format).requires_grad_() for w in weights[rank]]
    outputs = all_gather_matmuls(shard, local, rows=counts, **how)
    torch.autograd.backward(outputs, gradients[rank])
    for output, want in zip(outputs, wanted[rank], strict=True):
        assert torch.equal(output, want)
    assert torch.equal(shard.grad, x.grad[mine])
    for w, want in zip(local, weights[rank], strict=True):
        assert torch.equal(w.grad, want.grad)
        assert w.grad.stride() == w.stride()


def check_scatter(counts: tuple[int, ...], width: int, dtype: Any, layout: Layout, **how: Any) -> None:
    """matmul_reduce_scatter equals this rank's rows of x @ w on whole matrices, and so do its gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, depth = RowSplit(counts).owned(rank), RowSplit(even_shares(3 * size + 1, size)).owned(rank)
    x = whole((sum(counts), 3 * size + 1), 1, dtype, 1).requires_grad_()
    weight = layout(whole((3 * size + 1, width), 2, dtype, 1)).requires_grad_()
    gradient = whole((sum(counts), width), 3, dtype, 1)
    wanted = x @ weight
    wanted.backward(gradient)

    x_local = x.detach()[:, depth].contiguous().requires_grad_()
    w_local = weight.detach()[depth].requires_grad_()
    output = matmul_reduce_scatter(x_local, w_local, rows=counts, **how)
    output.backward(gradient[mine])
    assert torch.equal(output, wanted[mine])
    assert torch.equal(x_local.grad, x.grad[:, depth])
    assert torch.equal(w_local.grad, weight.grad[depth])


def large_messages_are_exact() -> None:
    """Messages of about a megabyte, which do not fit in a socket's buffers: a buffer that is reused too soon shows."""
    garbage_in_new_memory()
    size = dist.get_world_size()
    for exchange, counts in product(EXCHANGES, [(600,) * size, even_shares(601 * size + 1, size)]):
        check_gather(counts, [8, 3], torch.float32, row_major, k=1024, exchange=exchange, chunks=2)
        check_scatter(counts, 1024, torch.float32, row_major, exchange=exchange, chunks=2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bit_equal_with_messages_larger_than_any_buffer(ranks: int) -> None:
    run_ranks(ranks, large_messages_are_exact)


def row_major(w: Any) -> Any:
    return w


def as_linear(w: Any) -> Any:
    """A view of memory in the layout of torch.nn.Linear.weight."""
    return w.t().contiguous().t()


def exact_everywhere() -> int:
    garbage_in_new_memory()
    checked = 0
    for counts, exchange, chunks in product(row_counts(dist.get_world_size()), EXCHANGES, CHUNKS):
        for dtype, layout in product((torch.float32, torch.bfloat16), (row_major, as_linear)):
            check_gather(counts, [3], dtype, layout, exchange=exchange, chunks=chunks)
            check_gather(counts, [3, 1, 4], dtype, layout, exchange=exchange, chunks=chunks)
            check_scatter(counts, 5, dtype, layout, exchange=exchange, chunks=chunks)
            checked += 3
    return checked


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bit_equal_to_one_process_for_every_chunking_exchange_and_shape(ranks: int) -> None:
    assert run_ranks(ranks, exact_everywhere) == [4 * len(EXCHANGES) * len(CHUNKS) * 4 * 3] * ranks


def fused_gather(x: Any, weights: Any, group: Any, keep: bool = False) -> Any:
    """What torch.ops.symm_mem.fused_all_gather_matmul returns, without CUDA."""
    whole = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
    collectives.all_gather(whole, x.contiguous(), group).wait()
    return tuple(whole @ weight for weight in weights), whole if keep else None


def fused_scatter(x: Any, weight: Any, group: Any) -> Any:
    shard = x.new_empty(x.shape[0] // dist.get_world_size(), weight.shape[1])
    collectives.reduce_scatter(shard, x @ weight, group).wait()
    return shard


def symmetric_is_wired() -> None:
    with (
        mock.patch.object(symmetric, "or_portable", side_effect=lambda how, *_: how),
        mock.patch.object(symmetric, "all_gather_matmuls", side_effect=fused_gather) as gather,
        mock.patch.object(symmetric, "matmul_reduce_scatter", side_effect=fused_scatter) as scatter,
    ):
        check_gather((4, 4), [3], torch.float32, row_major, exchange="symmetric")
        assert (gather.call_count, scatter.call_count) == (1, 1)
        check_gather((4, 4), [3, 1], torch.float32, as_linear, exchange="symmetric")
        assert (gather.call_count, scatter.call_count) == (2, 1)  # no fused operator sums two products
        check_scatter((4, 4), 5, torch.float32, row_major, exchange="symmetric")
        assert (gather.call_count, scatter.call_count) == (3, 2)


def test_symmetric_memory_is_wired_into_forward_and_backward() -> None:
    run_ranks(2, symmetric_is_wired)


def falls_back() -> None:
    with pytest.warns(RuntimeWarning, match="the tensors are on cpu"):
        check_gather((4, 4), [3], torch.float32, row_major, exchange="symmetric")


def test_without_cuda_symmetric_memory_becomes_a_ring() -> None:
    run_ranks(2, falls_back)


class Log(TorchDispatchMode):
    """What was started, waited for and computed, in this order. No clocks."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm_", "baddbmm_"):
            self.events.append("gemm")
        return result

    def watch(self, name: str, function: str) -> Any:
        """Stand in for a function of `collectives`: note when it starts, and when what it started is waited for."""
        real, numbers = getattr(collectives, function), count()

        def start(*args: Any) -> Any:
            message = f"{name} {next(numbers)}"
            self.events.append(f"start {message}")
            works = real(*args)
            if isinstance(works, list):
                return [Waited(works, partial(self.events.append, f"wait {message}"))]
            return Waited([works], partial(self.events.append, f"wait {message}"))

        return mock.patch.object(collectives, function, start)


@dataclass
class Waited:
    """Stands for the Works of one message."""

    works: list[Any]
    note: Callable[[], None]

    def wait(self) -> None:
        self.note()
        for work in self.works:
            work.wait()


@contextmanager
def logged() -> Iterator[list[str]]:
    log = Log()
    with (
        log.watch("gather", "all_gather"),
        log.watch("scatter", "reduce_scatter"),
        log.watch("ring", "ring_exchange"),
        log,
    ):
        yield log.events


Events = dict[str, list[str]]


def all_orders() -> dict[tuple[str, int], Events]:
    return {(exchange, chunks): order_of_events(exchange, chunks) for exchange in EXCHANGES for chunks in (1, 2, 3)}


@cache
def orders(ranks: int) -> list[dict[tuple[str, int], Events]]:
    """The event logs of each rank, for each exchange and number of chunks; the ranks are started once."""
    return run_ranks(ranks, all_orders)


def order_of_events(exchange: str, chunks: int) -> Events:
    """Event logs of both operators, forward and backward, six rows a rank, two weights in the gather."""
    rank, found = dist.get_rank(), {}
    shard, local = whole((6, 4), rank).requires_grad_(), whole((6 * dist.get_world_size(), 4), rank)
    weights = [whole((4, 3), 2 * rank + i).requires_grad_() for i in range(2)]
    with logged() as found["gather forward"]:
        outputs = all_gather_matmuls(shard, weights, chunks=chunks, exchange=exchange)
    with logged() as found["gather backward"]:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    with logged() as found["scatter forward"]:
        output = matmul_reduce_scatter(local.requires_grad_(), weights[0], chunks=chunks, exchange=exchange)
    with logged() as found["scatter backward"]:
        output.backward(torch.ones_like(output))
    return found


def split(text: str) -> list[str]:
    return [event.strip() for event in text.split(",")]


def test_chunked_starts_the_next_transfer_before_this_gemm() -> None:
    for found in orders(2):
        assert found["chunked", 3]["gather forward"] == split(
            "start gather 0, wait gather 0, start gather 1, gemm, gemm, wait gather 1, start gather 2, gemm, gemm,"
            "wait gather 2, gemm, gemm"
        )
        assert found["chunked", 3]["scatter forward"] == split(
            "gemm, start scatter 0, gemm, wait scatter 0, start scatter 1, gemm, wait scatter 1, start scatter 2,"
            "wait scatter 2"
        )


def test_ring_starts_the_next_transfer_before_this_gemm() -> None:
    for found in orders(3):
        assert found["ring", 1]["gather forward"] == split(
            "start ring 0, gemm, gemm, wait ring 0, start ring 1, gemm, gemm, wait ring 1, gemm, gemm"
        )
        assert found["ring", 1]["scatter forward"] == split(
            "gemm, start ring 0, gemm, wait ring 0, start ring 1, gemm, wait ring 1"
        )
    for found in orders(2):
        assert found["ring", 2]["gather forward"] == split(
            "start ring 0, start ring 1, gemm, gemm, gemm, gemm, wait ring 0, gemm, gemm, wait ring 1, gemm, gemm"
        )
        assert found["ring", 2]["scatter forward"] == split(
            "gemm, start ring 0, gemm, start ring 1, gemm, gemm, wait ring 0, wait ring 1"
        )


def test_backward_hides_the_second_gather_and_the_last_scatter() -> None:
    for found in orders(2):
        # Two GEMMs a chunk, the input gradients of two weights; at the end two weight gradients.
        assert found["chunked", 2]["gather backward"] == split(
            "start gather 0, gemm, gemm, start scatter 0, gemm, gemm, wait scatter 0, start scatter 1, wait gather 0,"
            "gemm, gemm, wait scatter 1"
        )
        assert found["chunked", 2]["scatter backward"] == split(
            "start gather 0, wait gather 0, start gather 1, gemm, wait gather 1, gemm, gemm"
        )
        assert found["ring", 1]["gather backward"] == split(
            "start gather 0, gemm, gemm, start ring 0, gemm, gemm, wait gather 0, gemm, gemm, wait ring 0"
        )
        assert found["ring", 1]["scatter backward"] == split("start ring 0, gemm, wait ring 0, gemm, gemm")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_counts_of_messages(ranks: int, chunks: int) -> None:
    hops = (ranks - 1) * chunks
    for found in orders(ranks):
        for exchange, messages in (("ring", hops), ("chunked", chunks)):
            counted = {name: sum("start" in event for event in log) for name, log in found[exchange, chunks].items()}
            # Backward of the gather gathers once more, whole.
            wanted = {"gather forward": messages, "gather backward": messages + 1}
            assert counted == wanted | {"scatter forward": messages, "scatter backward": messages}


def what_is_saved() -> dict[str, list[tuple[int, ...]]]:
    rank, shapes, found = dist.get_rank(), [], {}
    shard, weights = whole((6, 4), rank).requires_grad_(), [whole((4, 3), i).requires_grad_() for i in range(2)]
    local = whole((12, 4), rank).requires_grad_()

    def pack(tensor: Any) -> Any:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        all_gather_matmuls(shard, weights, chunks=2)
        found["gather"], shapes = shapes, []
        matmul_reduce_scatter(local, weights[0], chunks=2)
        found["scatter"] = shapes
    return found


def test_the_shard_is_saved_for_backward_not_what_was_gathered() -> None:
    for found in run_ranks(2, what_is_saved):
        assert found == {"gather": [(6, 4), (4, 3), (4, 3)], "scatter": [(12, 4), (4, 3)]}


def gradients_on_demand() -> dict[str, list[str]]:
    """Only what needs a gradient costs GEMMs and messages."""
    found: dict[str, list[str]] = {}
    for name, needs_x, needs_w in [("x", True, False), ("w", False, True)]:
        shard, weight = whole((6, 4), 0).requires_grad_(needs_x), whole((4, 3), 0).requires_grad_(needs_w)
        output = all_gather_matmul(shard, weight, exchange="chunked")
        with logged() as found[f"gather {name}"]:
            output.sum().backward()
        local = whole((12, 4), 0).requires_grad_(needs_x)
        output = matmul_reduce_scatter(local, weight, exchange="chunked")
        with logged() as found[f"scatter {name}"]:
            output.sum().backward()
        assert all((t.grad is not None) == needed for t, needed in [(shard, needs_x), (weight, needs_w)])
    return found


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    for found in run_ranks(2, gradients_on_demand):
        assert found["gather x"] == split("gemm, start scatter 0, wait scatter 0")
        assert found["gather w"] == split("start gather 0, wait gather 0, gemm")
        assert found["scatter x"] == split("start gather 0, wait gather 0, gemm")
        assert found["scatter w"] == split("start gather 0, wait gather 0, gemm")


def under_autocast_and_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    rank = dist.get_rank()
    shard, weight = whole((6, 4), rank, most=1).requires_grad_(), whole((4, 3), 0, most=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        plain = all_gather_matmul(shard, weight, chunks=2)
        again = checkpoint(all_gather_matmul, shard, weight, chunks=2, use_reentrant=False)
    assert plain.dtype == again.dtype == torch.bfloat16
    assert torch.equal(plain, again)
    wanted = torch.autograd.grad(plain.sum(), [shard, weight])
    found = torch.autograd.grad(again.sum(), [shard, weight])
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(wanted, found, strict=True))
    with torch.no_grad():
        assert not matmul_reduce_scatter(whole((6, 4), rank), weight).requires_grad


def test_autocast_checkpointing_and_no_grad() -> None:
    run_ranks(2, under_autocast_and_checkpoint)


def labels() -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        output = all_gather_matmul(whole((6, 4), 0), whole((4, 3), 0).requires_grad_(), chunks=2, exchange="chunked")
        matmul_reduce_scatter(output, whole((3, 2), 0)).sum().backward()
    return {event.name for event in profiler.events() if event.name.startswith("slipstream::")}


def test_profiler_labels() -> None:
    for found in run_ranks(2, labels):
        assert found == {
            "slipstream::all_gather_matmul chunk 1/2",
            "slipstream::all_gather_matmul chunk 2/2",
            "slipstream::matmul_reduce_scatter chunk 1/2",
            "slipstream::matmul_reduce_scatter chunk 2/2",
            "slipstream::matmul_reduce_scatter input gradient chunk 1/2",
            "slipstream::matmul_reduce_scatter input gradient chunk 2/2",
            "slipstream::all_gather_matmul weight gradient",
            "slipstream::wait gather of rows",
            "slipstream::wait scatter of sums",
        }


def one_rank_leaves(exchange: str) -> str:
    """Rank 1 is gone when the others exchange."""
    x, w = whole((6, 4), 0), whole((4, 3), 0)
    group = dist.new_group(timeout=timedelta(seconds=3))
    all_gather_matmul(x, w, group, exchange=exchange)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(PeerError) as error:
        for _ in range(3):
            matmul_reduce_scatter(all_gather_matmul(x, w, group, exchange=exchange), w.t(), group, exchange=exchange)
    return str(error.value)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_that_does_not_come_is_named_by_what_was_missed(exchange: str) -> None:
    said, nothing = run_ranks(2, one_rank_leaves, exchange, timeout=60.0)
    assert said.startswith("gather of rows failed: ")
    assert said.endswith("; the cause is on the rank that stopped first: look for its error")
    assert not nothing


def refused() -> list[str]:
    x, w = whole((6, 4), 0), whole((4, 3), 0)
    wrong: list[Callable[[], Any]] = [
        lambda: all_gather_matmul(x[0], w),
        lambda: all_gather_matmul(x, w.t()),
        lambda: all_gather_matmul(x, w, chunks=0),
        lambda: all_gather_matmul(x, w, rows=[6]),
        lambda: all_gather_matmul(x, w, rows=[5, 5]),
        lambda: matmul_reduce_scatter(x, w, rows=[7, -1]),
        lambda: matmul_reduce_scatter(x, w, exchange="pipe"),
    ]
    found = []
    for call in wrong:
        with pytest.raises(UsageError) as error:
            call()
        found.append(str(error.value))
    return found


def test_what_does_not_fit_together_is_refused_before_anything_moves() -> None:
    for found in run_ranks(2, refused):
        assert found == [
            "x of shape (4,) is not a matrix; flatten its leading dimensions: x.flatten(0, -2)",
            "x of shape (6, 4) cannot multiply a weight of shape (3, 4); weights are (k, n_out):"
            " give linear.weight.t()",
            "chunks: cannot cut rows in 0 chunks; give 1 or more",
            "rows: 1 counts for a group of 2; give one for each rank of the group",
            "x: x has 6 rows where `rows` gives this rank 5",
            "rows: a rank cannot have fewer than no rows: (7, -1)",
            "exchange: no exchange 'pipe'; give one of ring, chunked, symmetric",
        ]
