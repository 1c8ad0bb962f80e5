"""What a collective moves: bytes on the conventional size, groups from wherever they are told."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.timeline import UNKNOWN, Collective, Group
from slipstream.trace.collectives import DTYPE_BYTES, Descriptions, Groups, describe, parse_ranks, whole_number
from slipstream.trace.events import Args

NO_GROUPS = Groups(None)


def args(**fields: Any) -> Args:
    """As the reader decodes them."""
    return msgspec.json.decode(json.dumps(fields), type=Args)


def told(name: str, groups: Groups = NO_GROUPS, **fields: Any) -> Collective | None:
    return describe(name, args(**fields), groups)


def metadata(op: str, elements_in: Any, elements_out: Any, dtype: str = "Float", size: Any = 8) -> dict[str, Any]:
    return {
        "Collective name": op,
        "In msg nelems": elements_in,
        "Out msg nelems": elements_out,
        "dtype": dtype,
        "Group size": size,
    }


# -- bytes


@pytest.mark.parametrize(
    ("op", "elements_in", "elements_out", "size_bytes"),
    [
        ("allreduce", 1000, 1000, 4000),
        ("allreduce_coalesced", 1000, 1000, 4000),
        ("broadcast", 1000, 1000, 4000),
        ("reduce", 1000, 1000, 4000),
        ("send", 1000, 1000, 4000),
        ("all_to_all", 1000, 1000, 4000),
        ("all_to_allv", 1000, 1500, 6000),
        ("_allgather_base", 1000, 8000, 32000),
        ("all_gather_into_tensor_coalesced", 1000, 8000, 32000),
        ("allgather", 1000, 1000, 32000),  # each output of the list, as some releases count
        ("_reduce_scatter_base", 8000, 1000, 32000),
        ("reduce_scatter", 1000, 8000, 256000),
        ("gather", 1000, 8000, 32000),
        ("scatter", 8000, 1000, 32000),
        ("barrier", 0, 0, 0),
        ("barrier", 1, 1, 0),
        ("allreduce", 0, 0, 0),
    ],
)
def test_bytes_are_those_of_the_unsharded_buffer(op: str, elements_in: int, elements_out: int, size_bytes: int) -> None:
    found = told("ncclDevKernel", **metadata(op, elements_in, elements_out))
    assert found is not None and found.size_bytes == size_bytes


def test_gather_and_scatter_of_the_same_buffer_have_the_same_size() -> None:
    for shard in (1, 7, 1 << 20):
        gathered = told("k", **metadata("_allgather_base", shard, 8 * shard))
        scattered = told("k", **metadata("_reduce_scatter_base", 8 * shard, shard))
        assert gathered and scattered and gathered.size_bytes == scattered.size_bytes == 32 * shard


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        ("Float", 4),
        ("BFloat16", 2),
        ("Half", 2),
        ("c10::BFloat16", 2),
        ("Double", 8),
        ("Byte", 1),
        ("Bool", 1),
        ("Long", 8),
        ("Int", 4),
        ("Float8_e4m3fn", 1),
        ("ComplexFloat", 8),
    ],
)
def test_bytes_of_an_element(dtype: str, width: int) -> None:
    found = told("k", **metadata("allreduce", 10, 10, dtype))
    assert found == Collective("all_reduce", Group(size=8), 10 * width, dtype.removeprefix("c10::")) or (
        found is not None and found.size_bytes == 10 * width
    )


@pytest.mark.parametrize(
    ("elements", "dtype"),
    [
        (None, "Float"),
        ("many", "Float"),
        (10, "Quaternion"),
        (10, ""),
        (True, "Float"),
        (-1, "Float"),
        (10**30, "Float"),
    ],
)
def test_what_is_not_known_is_none(elements: Any, dtype: str) -> None:
    found = told("k", **metadata("allreduce", elements, elements, dtype))
    assert found is not None and found.op == "all_reduce" and found.size_bytes is None


def test_without_group_size_a_list_gather_has_no_size() -> None:
    found = told("k", **metadata("allgather", 1000, 1000, size=None))
    assert found is not None and found.size_bytes is None


@given(
    st.integers(0, 10**15),
    st.integers(0, 10**15),
    st.sampled_from(["allreduce", "allgather", "reduce_scatter", "send"]),
)
def test_sizes_are_counts_or_unknown(elements_in: int, elements_out: int, op: str) -> None:
    found = told("k", **metadata(op, elements_in, elements_out))
    assert found is not None
    assert found.size_bytes is None or 0 <= found.size_bytes < 2**63


def test_all_types_have_a_width() -> None:
    assert set(DTYPE_BYTES.values()) <= {1, 2, 4, 8, 16}
    assert all(name == name.lower() for name in DTYPE_BYTES)


# -- annotations


@pytest.mark.parametrize(
    ("name", "dims", "types", "expected"),
    [
        ("nccl:all_reduce", [[10, 20]], ["float"], ("all_reduce", 800)),
        ("nccl:all_reduce", [[10], [20]], ["c10::BFloat16", "c10::BFloat16"], ("all_reduce", 20)),
        ("nccl:all_reduce", [[[10], [5, 2]]], ["c10::Half"], ("all_reduce", 40)),
        ("gloo:all_reduce", [[590592]], ["float"], ("all_reduce", 2362368)),
        ("nccl:_all_gather_base", [[10]], ["float"], ("all_gather", None)),  # how many ranks is not told
        ("nccl:reduce_scatter", [[10]], ["float"], ("reduce_scatter", 40)),
        ("nccl:send 0->1", [[3]], ["double"], ("send", 24)),
        ("nccl:all_reduce", [], [], ("all_reduce", None)),
        ("nccl:all_reduce", [[]], [""], ("all_reduce", None)),
        ("nccl:all_reduce", [[]], ["float"], ("all_reduce", 4)),
        ("nccl:all_reduce", [[-1]], ["float"], ("all_reduce", None)),
        ("nccl:barrier", [], [], ("barrier", 0)),
        ("rccl:my_own", [], [], ("my_own", None)),
    ],
)
def test_annotations_tell_by_their_input(name: str, dims: Any, types: Any, expected: tuple[str, int | None]) -> None:
    found = told(name, **{"Input Dims": dims, "Input type": types})
    assert found is not None and (found.op, found.size_bytes) == expected


@pytest.mark.parametrize(
    "dims", ["[[1", '"[[1]]"', "7", "[7]", '[["a"]]', "[[[[1]]]]", "[null]", "{}", "[" * 900 + "]" * 900]
)
def test_annotations_with_dimensions_of_any_shape(dims: str) -> None:
    said = Args(input_dims=msgspec.Raw(dims.encode()), input_type=msgspec.Raw(dims.encode()))
    found = describe("nccl:all_reduce", said, NO_GROUPS)
    assert found is not None and found.op == "all_reduce"


@pytest.mark.parametrize("name", ["nccl:coalesced", "nccl:wait", "gloo:init"])
def test_annotations_that_say_nothing(name: str) -> None:
    assert told(name) is None


@pytest.mark.parametrize("op", ["wait", "init", "coalesced"])
def test_metadata_that_moves_nothing(op: str) -> None:
    assert told("record_param_comms", **metadata(op, 0, 0)) is None


def test_other_events_are_about_no_collective() -> None:
    assert told("aten::mm", **{"Input Dims": [[1]]}) is None
    assert told("gemm") is None


# -- groups

CONFIG = [
    {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]},
    {"pg_name": "7", "pg_desc": "mesh_tp", "pg_size": 2, "ranks": "[1, 3]"},
    {"pg_name": "9", "pg_desc": "undefined", "pg_size": 2, "ranks": "[0, 2, ...]"},
]


def test_groups_are_completed_from_the_configuration() -> None:
    groups = Groups({"world_size": 4, "pg_config": CONFIG})
    assert groups.world_size == 4
    assert groups.find(args(**{"Process Group Name": "7"})) == Group("7", "mesh_tp", 2, (1, 3))
    assert groups.find(args(**{"Process Group Name": 7})) == Group("7", "mesh_tp", 2, (1, 3))
    assert groups.find(args(**{"Process Group Name": "9"})) == Group("9", "undefined", 2, ())
    assert groups.find(args(**{"Process Group Name": "5", "Group size": 2})) == Group("5", "", 2, ())


def test_what_the_event_says_comes_before_the_configuration() -> None:
    said = {
        "Process Group Name": "7",
        "Process Group Description": "mesh_ep",
        "Group size": 3,
        "Process Group Ranks": "[5, 6, 7]",
    }
    assert Groups({"pg_config": CONFIG}).find(args(**said)) == Group("7", "mesh_ep", 3, (5, 6, 7))


def test_size_and_ranks_are_told_without_a_name() -> None:
    """As releases of early 2024 did."""
    said = args(**{"Group size": 2, "Process Group Ranks": "[0, 1]"})
    assert NO_GROUPS.find(said) == Group("", "", 2, (0, 1))
    assert Groups({"pg_config": CONFIG[:1]}).find(said) == Group("", "", 2, (0, 1))


def test_ranks_tell_the_size() -> None:
    said = {"Process Group Name": "x", "Process Group Ranks": "[0, 1, 2]"}
    assert NO_GROUPS.find(args(**said)).size == 3


def test_a_collective_without_group_is_of_the_only_one() -> None:
    assert Groups({"pg_config": CONFIG[:1]}).find(args()).description == "default_pg"
    assert Groups({"pg_config": CONFIG}).find(args()) == Group()
    assert NO_GROUPS.find(args()) == Group()


@pytest.mark.parametrize(
    "info", [None, [], "x", {"pg_config": None}, {"pg_config": "x"}, {"pg_config": [1, "x", None, {}]}]
)
def test_configurations_of_any_type(info: Any) -> None:
    assert Groups(info).find(args(**{"Process Group Name": "0"})).name == "0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[0, 1]", (0, 1)),
        ('"[0, 1]"', (0, 1)),
        ("[]", ()),
        ("", ()),
        ("null", ()),
        ("[0, 1, ...]", ()),
        ('"[0, 1, ..., 7]"', ()),
        ("[0, 1", ()),
        ('[0, "1", null, 2.5, 3]', (0, 3)),
        ("[true, 1]", (1,)),
        (f"[{10**30}, 1]", (1,)),
        ("[" * 900 + "]" * 900, ()),
        ("{}", ()),
    ],
)
def test_lists_of_ranks(text: str, expected: tuple[int, ...]) -> None:
    assert parse_ranks(text.encode()) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, 5),
        ("5", 5),
        (5.0, 5),
        (0, 0),
        (-1, -1),
        (None, None),
        (True, None),
        ("x", None),
        (float("nan"), None),
        (float("inf"), None),
        (10**30, None),
        (1e300, None),
        ([], None),
        ("9" * 5000, None),
    ],
)
def test_whole_numbers(value: Any, expected: int | None) -> None:
    assert whole_number(value) == expected


# -- each saying once


def test_sayings_are_kept_once_and_resolved_later() -> None:
    said = Descriptions()
    first = said.add("ncclDevKernel", args(**metadata("allreduce", 10, 10), **{"Process Group Name": "7"}))
    again = said.add("ncclDevKernel", args(**metadata("allreduce", 10, 10), **{"Process Group Name": "7", "Seq": 5}))
    other = said.add("ncclDevKernel", args(**metadata("allreduce", 20, 20), **{"Process Group Name": "7"}))
    nothing = said.add("gemm", args(device=0))
    assert (first, again, other, nothing, said.add("gemm", None)) == (0, 0, 1, UNKNOWN, UNKNOWN)
    found = said.resolve(Groups({"pg_config": CONFIG}))
    assert [(c.size_bytes, c.group.ranks) for c in found if c] == [(40, (1, 3)), (80, (1, 3))]
