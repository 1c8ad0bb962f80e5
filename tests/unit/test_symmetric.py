"""torch's fused operators are given up with a reason, or not at all. What runs on CUDA is stood in for here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from slipstream.runtime import symmetric  # noqa: E402
from slipstream.runtime.rows import RowSplit  # noqa: E402

EVEN = RowSplit((2048, 2048))


@pytest.fixture
def group() -> Any:
    """A group of two on CUDA, as far as this module looks, with symmetric memory enabled."""
    with mock.patch.object(symmetric, "is_enabled", return_value=True):
        yield SimpleNamespace(group_name="tp")


def on_cuda() -> Any:
    return SimpleNamespace(device=torch.device("cuda", 0))


def test_reasons_why_not(group: Any) -> None:
    assert symmetric.why_not(on_cuda(), EVEN, group) is None
    assert "the tensors are on cpu" in str(symmetric.why_not(torch.zeros(1), EVEN, group))
    assert "different numbers of rows, (3, 2)" in str(symmetric.why_not(on_cuda(), RowSplit((3, 2)), group))
    with mock.patch.object(symmetric, "is_enabled", return_value=False):
        assert "call enable_symmetric_memory(group)" in str(symmetric.why_not(on_cuda(), EVEN, group))


def test_reasons_why_it_would_silently_not_overlap(group: Any) -> None:
    with mock.patch.object(symmetric, "_has_multicast", return_value=True):
        assert symmetric.why_unfused(on_cuda(), EVEN, group) is None
        assert "here 2048" in str(symmetric.why_unfused(on_cuda(), RowSplit((1024, 1024)), group))
    with mock.patch.object(symmetric, "_has_multicast", return_value=False):
        assert symmetric.why_unfused(on_cuda(), RowSplit((1024, 1024)), group) is None
    from torch.distributed import _symmetric_memory

    with _symmetric_memory._test_mode():
        assert "test mode" in str(symmetric.why_unfused(on_cuda(), EVEN, group))


def test_what_does_not_apply_becomes_a_ring_with_a_warning(group: Any) -> None:
    with pytest.warns(RuntimeWarning, match="symmetric memory is not used: the tensors are on cpu"):
        assert symmetric.or_portable("symmetric", torch.zeros(1), EVEN, group) == "ring"
    assert symmetric.or_portable("chunked", torch.zeros(1), EVEN, group) == "chunked"


def test_what_does_not_overlap_is_still_used_with_a_warning(group: Any) -> None:
    with (
        mock.patch.object(symmetric, "_has_multicast", return_value=True),
        pytest.warns(RuntimeWarning, match="does not overlap here: up to 2048 gathered rows"),
    ):
        assert symmetric.or_portable("symmetric", on_cuda(), RowSplit((4, 4)), group) == "symmetric"


def test_the_operators_exist_in_this_torch_as_they_are_called(group: Any) -> None:
    """Their schemas take our arguments; on CPU there is nothing behind them."""
    x, weights = torch.zeros(2, 3), [torch.zeros(3, 4), torch.zeros(3, 5)]
    with pytest.raises(NotImplementedError, match="CPU"):
        symmetric.all_gather_matmuls(x, weights, group)
    with pytest.raises(NotImplementedError, match="CPU"):
        symmetric.matmul_reduce_scatter(x, weights[0], group)
