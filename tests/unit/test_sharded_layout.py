"""Laws of the flat layout: shards tile the buffer, parts tile each parameter, gaps are what is left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from slipstream.runtime.sharded.layout import ALIGN, Layout

counts = st.lists(st.integers(0, 100), min_size=1, max_size=6)
ranks = st.integers(1, 9)


@given(counts, ranks)
def test_the_parts_of_all_ranks_are_the_parameter(counts: list[int], ranks: int) -> None:
    layout = Layout.of(counts, ranks)
    for index, count in enumerate(counts):
        parts = [layout.part(index, rank) for rank in range(ranks)]
        assert [element for first, last in parts for element in range(first, last)] == list(range(count))


@given(counts, ranks)
def test_a_part_lies_in_the_shard_where_the_gathered_buffer_has_it(counts: list[int], ranks: int) -> None:
    layout = Layout.of(counts, ranks)
    for rank in range(ranks):
        for index in range(len(counts)):
            (first, last), (start, end) = layout.part(index, rank), layout.place(index, rank)
            assert end - start == last - first
            assert 0 <= start <= end <= layout.shard
            if first < last:
                assert rank * layout.shard + start == layout.starts[index] + first


@given(counts, ranks, st.sets(st.integers(0, 5)))
def test_gaps_and_filled_parameters_tile_the_buffer(counts: list[int], ranks: int, some: set[int]) -> None:
    layout = Layout.of(counts, ranks)
    filled = {index for index in some if index < len(counts)}
    covered = [e for i in filled for e in range(layout.starts[i], layout.starts[i] + counts[i])]
    gaps = [e for start, end in layout.gaps(filled) for e in range(start, end)]
    assert sorted(covered + gaps) == list(range(layout.total))


@given(counts, ranks)
def test_everything_is_aligned_and_little_is_wasted(counts: list[int], ranks: int) -> None:
    layout = Layout.of(counts, ranks)
    assert all(start % ALIGN == 0 for start in (*layout.starts, layout.shard))
    assert sum(counts) <= layout.total < sum(counts) + ALIGN * (len(counts) + ranks + 1)
