"""Laws of cutting rows: nothing is lost, nothing is doubled, whatever divides or not."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.errors import UsageError

torch = pytest.importorskip("torch")

from slipstream.runtime.rows import RowSplit, even_shares, length  # noqa: E402

splits = st.builds(RowSplit, st.lists(st.integers(0, 9), min_size=1, max_size=5).map(tuple), chunks=st.integers(1, 6))


@given(st.integers(0, 100), st.integers(1, 12))
def test_even_shares_differ_by_one_and_fall(total: int, parts: int) -> None:
    shares = even_shares(total, parts)
    assert sum(shares) == total
    assert len(shares) == parts
    assert all(0 <= a - b <= 1 for a, b in pairwise(shares))
    assert shares[0] - shares[-1] <= 1


@given(splits)
def test_pieces_cover_every_row_once_in_order(split: RowSplit) -> None:
    ranks = range(len(split.counts))
    rows = [row for r in ranks for k in range(split.chunks) for row in range(split.total)[split.piece(r, k)]]
    assert rows == list(range(split.total))
    assert [row for r in ranks for row in range(split.total)[split.owned(r)]] == rows


@given(splits)
def test_blocks_of_all_chunks_are_views_of_every_row(split: RowSplit) -> None:
    whole = torch.zeros(split.total, 2)
    for chunk in range(split.chunks):
        for block in split.blocks(whole, chunk):
            block += 1
    assert torch.equal(whole, torch.ones_like(whole))


@given(splits)
def test_a_padded_buffer_shows_the_same_blocks(split: RowSplit) -> None:
    """What a collective gathers, each rank's piece padded, read through the blocks is the rows of the chunk."""
    whole = torch.arange(2.0 * split.total).view(-1, 2)
    for chunk in range(split.chunks):
        longest = split.longest(chunk)
        buffer = torch.full((len(split.counts) * longest, 2), torch.nan)
        for rank in range(len(split.counts)):
            piece = whole[split.piece(rank, chunk)]
            buffer[rank * longest : rank * longest + len(piece)] = piece
        for seen, wanted in zip(split.padded_blocks(buffer, chunk), split.blocks(whole, chunk), strict=True):
            assert torch.equal(seen, wanted)


@given(splits, st.data())
def test_a_piece_is_the_same_rows_in_the_whole_and_in_the_shard(split: RowSplit, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(split.counts) - 1))
    chunk = data.draw(st.integers(0, split.chunks - 1))
    whole = torch.arange(split.total)
    shard = whole[split.owned(rank)]
    assert torch.equal(whole[split.piece(rank, chunk)], shard[split.local_piece(rank, chunk)])
    assert length(split.piece(rank, chunk)) <= split.longest(chunk)


def test_one_gemm_a_chunk_where_ranks_have_the_same_rows() -> None:
    even, ragged = RowSplit((5, 5), 2), RowSplit((5, 4), 2)
    assert [block.shape for block in even.blocks(torch.zeros(10, 3), 0)] == [(2, 3, 3)]
    assert [block.shape for block in ragged.blocks(torch.zeros(9, 3), 1)] == [(1, 2, 3), (1, 2, 3)]
    assert [block.shape for block in RowSplit((5, 5)).blocks(torch.zeros(10, 3), 0)] == [(1, 10, 3)]


@pytest.mark.parametrize(("counts", "chunks", "ranks"), [([1], 1, 2), ([1, -1], 1, 2), ([1, 1], 0, 2)])
def test_nonsense_is_refused(counts: list[int], chunks: int, ranks: int) -> None:
    with pytest.raises(UsageError):
        RowSplit.of(counts, chunks, ranks)
