"""The mechanisms that hide communication behind compute in training, on torch.distributed.

Needs the extra `torch`. Imports nothing of Slipstream above `slipstream.core`.

    DataParallel                  gradients reduced in buckets while backward runs
    FullySharded                  parameters sharded, each layer gathered ahead of its use
    ColumnParallelLinear, RowParallelLinear   tensor parallelism with GEMMs split beside their communication
"""

from slipstream.runtime.buckets import ByCap, ByFinish, Fixed
from slipstream.runtime.data_parallel import DataParallel
from slipstream.runtime.failures import PeerError
from slipstream.runtime.linear import ColumnParallelLinear, RowParallelLinear
from slipstream.runtime.sharded import FullySharded
from slipstream.runtime.split_choice import Split
from slipstream.runtime.split_gemm import all_gather_matmul, matmul_reduce_scatter
from slipstream.runtime.tail import StepByBucket
from slipstream.runtime.zero1 import Zero1

__all__ = [
    "ByCap",
    "ByFinish",
    "ColumnParallelLinear",
    "DataParallel",
    "Fixed",
    "FullySharded",
    "PeerError",
    "RowParallelLinear",
    "Split",
    "StepByBucket",
    "Zero1",
    "all_gather_matmul",
    "matmul_reduce_scatter",
]
