"""What a span is, told from its name: one table, each row with its reason and where the name was seen.

The first row whose pattern is found in the name decides. A user's own rows (`--kind 'REGEX=comm'`) come before all
others. Names that no row matches are compute: a device has two occupations, and communication is the one that
announces itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from slipstream.core.errors import UsageError
from slipstream.core.timeline import Kind


@dataclass(frozen=True)
class Rule:
    """One row: names in which `pattern` is found (case matters unless the pattern says so) are of this kind."""

    pattern: str
    kind: Kind
    reason: str
    seen: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.pattern)


# Patterns that begin with ^ look at the function's own name: `void `, return types and namespaces in front of it are
# allowed by _NAME, template arguments behind it are not searched, because they name other functions.
_NAME = r"^(?:void )?(?:\w+::|\(anonymous namespace\)::)*"
_IN_NAME = r"^(?:void )?(?:[\w:]|\(anonymous namespace\)::)*?"

KERNELS: tuple[Rule, ...] = (
    Rule(
        r"^triton_(poi|red|per|tem|for|unk)_|^(void )?at::(native|cuda)::",
        Kind.COMPUTE,
        "kernels that a compiler fused are named after the operators in them, collectives' outputs included; ATen's "
        "own kernels only ever work on their device",
        "TorchInductor: triton_poi_fused_all_gather_into_tensor_1 is a copy beside the gather",
    ),
    Rule(
        r"\b(deep_ep|dpsk::ep)::layout::",
        Kind.COMPUTE,
        "counts on its own device where each token goes; dispatch and combine move them",
        "DeepEP's get_dispatch_layout",
    ),
    Rule(
        r"^__amd_rocclr_(copy|fill)Buffer",
        Kind.COPY,
        "the ROCm runtime copies and fills with blit kernels; they compute nothing",
        "ROCm 5 and 6 traces, where name rules for memcpy miss them",
    ),
    Rule(
        _NAME + r"nccl(Sym|Symk)?(Dev)?(Kernel|Func)?\w*",
        Kind.COMM,
        "NCCL and RCCL kernels: ncclKernel_* (2022-24), ncclDevKernel_* (2023-), ncclDevKernel_Generic[_N] (RCCL, the "
        "operation is in the metadata only), ncclSymDevKernel_*/ncclSymkDevKernel_* (symmetric memory, 2025-), "
        "ncclAllReduceRingLLKernel_* (2020)",
        "NCCL 2.7 to 2.30, RCCL 2.22",
    ),
    Rule(r"(?i)\brccl", Kind.COMM, "RCCL's own kernels", "ROCm"),
    Rule(r"(?i)msccl", Kind.COMM, "MSCCL and MSCCL++ collectives", "MSCCL++ traces, ROCm's built-in MSCCL"),
    Rule(
        r"(?i)(nv|roc|i|open|x)shmem",
        Kind.COMM,
        "device-side transfers and barriers of the SHMEM libraries",
        "NVSHMEM in PyTorch symmetric memory and DeepEP; rocSHMEM",
    ),
    Rule(
        r"(?i)dpsk::ep::|deep_ep::|deepep|hybrid_ep::|uccl(_ep)?::|pplx.*(dispatch|combine|all_?to_?all)|\bmori::"
        r"|(?-i:\bEp(Dispatch|Combine)|moeA2A)",
        Kind.COMM,
        "expert-parallel dispatch and combine move tokens between GPUs under names of their own",
        "DeepEP, hybrid EP, UCCL, pplx-kernels, MORI, TensorRT-LLM; 113 ms of them counted as 0 by readers that look "
        "for nccl",
    ),
    Rule(
        r"cross_device_reduce|reduce_scatter_cross_device|all_?gather_cross_device|quickreduce|custom_all_?reduce",
        Kind.COMM,
        "one- and two-stage all-reduce over peer memory",
        "vLLM, SGLang, AITER",
    ),
    Rule(
        r"(one|two)_?[sS]hot_?[aA]ll_?[rR]educe|multimem_|all_?reduce_fusion|lamport",
        Kind.COMM,
        "all-reduce and all-gather over multicast and symmetric memory; fused all-reduce + norm kernels are mostly "
        "transfer",
        "PyTorch symmetric memory, TensorRT-LLM, FlashInfer; 22 us reported where it was 2,141",
    ),
    Rule(
        r"symmetric_memory::|\b(put_signal|wait_signal)_kernel",
        Kind.COMM,
        "barriers and signals between GPUs of a symmetric-memory group wait for peers",
        "PyTorch symmetric memory",
    ),
    Rule(
        r"userbuffers_",
        Kind.COMM,
        "Transformer Engine's userbuffers exchange chunks around a GEMM",
        "Transformer Engine",
    ),
    Rule(r"(?i)\boneccl_|\bccl_kernel", Kind.COMM, "oneCCL device kernels", "Intel GPUs"),
    Rule(r"(?i)\bhccl|\bhcom_", Kind.COMM, "HCCL device kernels", "Gaudi, Ascend"),
    Rule(
        r"(?i)\bmtia\w*(comm|collective|ccl)|\bxccl",
        Kind.COMM,
        "collectives of other accelerators",
        "MTIA, XCCL back ends",
    ),
    Rule(
        r"(?i)^(?!.*(gemm|matmul))"
        + _IN_NAME
        + r"(?<!warp)(?<!warp_)(?<!block)(?<!block_)(?<!wave)(?<!wave_)(?<!thread)(?<!thread_)"
        r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)(?!_copy)",
        Kind.COMM,
        "a kernel whose own name is a collective's; reductions inside a warp or block are not, nor are GEMMs that "
        "fuse one",
        "kernels written by users; unknown libraries",
    ),
)

COPY_CATEGORIES = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
"""Categories of spans that are copies whatever their name: never compute."""

COPY_NAME = re.compile(r"(?i)^mem(cpy|set)\b")
"""How profilers name copies."""

PEER_COPY = re.compile(r"(?i)\bPtoP\b|\bP2P\b|\bpeer")
"""Copies between GPUs: communication, unless the trace shows that no collective launched them."""

HOST_COMM = re.compile(r"^(gloo|mpi|ucc|xccl|oneccl|ccl):")
"""Annotations that are the communication itself in a trace without a device (gloo's worker threads run it)."""

HOST_LAUNCH_ANNOTATION = re.compile(r"^(nccl|gloo|mpi|ucc|xccl|hccl|ccl|rccl):(\w+)")
"""Host annotations that a process group puts around the launch of a collective."""

COLLECTIVE_HOST_OPS = re.compile(r"^(c10d|_?c10d_functional(_autograd)?|symm_mem|record_param_comms)\b")
"""Host operators that launch, wait for, or describe communication."""

HOST_WAIT = re.compile(r"(?i)(?<![a-z])(wait|barrier|synchroni[sz]e|sync|join|block_until|flush|sleep)(?![a-z])")
"""Host ranges in which a thread is blocked: neither they nor the operators around them are compute."""

HOST_CONTAINERS = re.compile(
    r"^(autograd::|torch::autograd::|FSDP::|profiler::)|Backward\d*$"
    r"|^(?!(graph_\d+_)?(cpp|triton)_\w*fused)(?!.*::)"
)
"""Host operators that only enclose other work; their own time is dispatch or waiting. Work is done by operators of a
library, which have a namespace (`aten::mm`), and by compiled kernels. A name without one is a Python function's, an
engine node's or a wrapper's: a custom `autograd.Function` whose backward waits is a leaf as long as the wait."""

_SOUNDS_LIKE_COMM = re.compile(
    r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|shmem|(?<![a-z])(send|recv|peer|p2p)(?![a-z])|exchange"
    r"|dispatch|combine_|broadcast_(?!to)|collective|nccl|rccl"
)
"""Stricter than `_LOOKS_LIKE_COMM`: worth a word even in a trace where other communication was recognised."""

_LOOKS_LIKE_COMM = re.compile(
    r"(?i)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send|recv|peer|comm|ring|shmem|exchange|dispatch"
    r"|combine|barrier|sync|collective|gather|scatter|reduce"
)

OPS: dict[str, str] = {
    "all_reduce": r"all_?reduce|cross_device_reduce",
    "reduce_scatter": r"reduce_?scatter",
    "all_gather": r"all_?gather",
    "all_to_all": r"all_?2_?all|all_?to_?all",
    "send_recv": r"send_?recv",
    "broadcast": r"broadcast",
    "barrier": r"barrier",
    "dispatch": r"dispatch",
    "combine": r"combine",
    "reduce": r"reduce",
    "gather": r"gather",
    "scatter": r"scatter",
    "send": r"send",
    "recv": r"recv",
}
"""Names of operations, with the pattern that finds each in the many spellings of kernels and metadata. Order
matters: the first that is found wins."""

_OP_PATTERNS = tuple((op, re.compile(pattern, re.IGNORECASE)) for op, pattern in OPS.items())


def own_name(name: str) -> str:
    """A kernel's name without return type of `void`, template arguments and parameters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name, maxsplit=1)[0] or name


def operation(name: str) -> str | None:
    """The operation that a kernel, an annotation or a metadata field names, e.g. `_allgather_base` -> `all_gather`."""
    base = own_name(name)
    return next((op for op, pattern in _OP_PATTERNS if pattern.search(base)), None)


class Classifier:
    """Decides the kind of device spans by category and name; remembers its answers."""

    def __init__(self, user_rules: Sequence[Rule] = ()) -> None:
        self._user_rules = tuple(user_rules)
        self._rules = (*user_rules, *KERNELS)
        self._known: dict[tuple[str, str], Kind] = {}

    def kind(self, category: str, name: str) -> Kind:
        """Kind of a device span of this category and name."""
        key = (category, name)
        if key not in self._known:
            self._known[key] = self._decide(category, name)
        return self._known[key]

    def user_kind(self, name: str) -> Kind | None:
        """What the user's own rows say of a name, if anything."""
        return next((rule.kind for rule in self._user_rules if rule.regex.search(name)), None)

    def _decide(self, category: str, name: str) -> Kind:
        if category in COPY_CATEGORIES:
            user = self.user_kind(name)
            return Kind.COPY if user is None else user
        return next((rule.kind for rule in self._rules if rule.regex.search(name)), Kind.COMPUTE)


def parse_user_rule(text: str) -> Rule:
    """Read `REGEX=KIND`, the form of `--kind`. The last `=` separates, so that the pattern may hold others."""
    pattern, _, kind_name = text.rpartition("=")
    kinds = {kind.name.lower(): kind for kind in Kind}
    if not pattern or kind_name not in kinds:
        raise UsageError(
            f"--kind {text!r} is not REGEX=KIND",
            do=f"write for example --kind 'my_exchange=comm' ({', '.join(kinds)})",
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--kind {text!r} holds a bad pattern: {error}", do="mend the regular expression") from error
    return Rule(pattern, kinds[kind_name], "asked for with --kind", "this command line")


def sounds_like_communication(name: str) -> bool:
    """Whether a compute kernel's own name makes one wonder. The decided rows of the table raise no doubt."""
    return bool(_SOUNDS_LIKE_COMM.search(own_name(name))) and not any(rule.regex.search(name) for rule in KERNELS)


def most_like_communication(names: Iterable[tuple[str, int]], limit: int = 5) -> list[str]:
    """Of device-kernel names with their total time, those that look most like communication; the longest first."""
    alike = [(time, name) for name, time in names if _LOOKS_LIKE_COMM.search(own_name(name))]
    return [name for _, name in sorted(alike, key=lambda pair: (-pair[0], pair[1]))[:limit]]
