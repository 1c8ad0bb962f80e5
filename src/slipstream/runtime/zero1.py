"""ZeRO-1: each rank keeps and steps its share of the optimizer's state, and the parameters come back behind forward.

The bytes are those of an all-reduce: a reduce-scatter behind backward, and an all-gather behind the next forward,
where each module waits for its own parameters only. Gathers go in reverse order of the buckets: the bucket that
became ready last in backward is used first in forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from slipstream.core.errors import UsageError
from slipstream.runtime import collectives
from slipstream.runtime.data_parallel import DataParallel
from slipstream.runtime.failures import naming
from slipstream.runtime.optimizer_state import Piece, State, gather_state, load_options, load_state
from slipstream.runtime.reducer import Bucket
from slipstream.runtime.reductions import Flat, ReduceScatter, own_share
from slipstream.runtime.tail import PartialSteps


class Share:
    """What this rank owns of one flat buffer: a piece of some of its parameters, as tensors that can be stepped."""

    def __init__(self, parameters: dict[str, torch.Tensor], values: Flat, own: torch.Tensor) -> None:
        self.values, self.own = values, own
        begin = own.storage_offset()
        self.pieces: dict[str, Piece] = {}
        self._spans: dict[str, slice] = {}  # where each piece lies in what this rank owns
        for name, parameter in parameters.items():
            offset = values.offsets[name]
            first, last = max(offset, begin), min(offset + parameter.numel(), begin + own.numel())
            if first < last:
                span = slice(first - begin, last - begin)
                self.pieces[name] = Piece(first - offset, last - offset, torch.nn.Parameter(own[span]))
                self._spans[name] = span

    def gradients(self, result: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each piece's part of this rank's reduced share."""
        return {name: result[span] for name, span in self._spans.items()}


class Zero1:
    """Takes over `optimizer.step()` of a DataParallel model, and shards the optimizer's state over its ranks.

        optimizer = Zero1(torch.optim.AdamW(model.parameters()), model)
        loss_of(model(batch)).backward()
        optimizer.step()                    # parameters are complete when the next forward needs them

    From the first backward on, parameters are views of flat buffers and the optimizer's groups hold pieces of them, so
    it must work element by element (SGD, Adam; not LAMB or Muon) and be new. `.grad` is None after backward: clip with
    `clip_grad_norm_`. To read parameters after `step()` and before the next forward, call `wait()` first; a module's
    `state_dict()` does so by itself. A parameter must not be read by a module that runs before the one it belongs to.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: DataParallel) -> None:
        reducer = model.reducer
        if optimizer.state or reducer.buckets:
            raise UsageError(
                "the optimizer has state already" if optimizer.state else "the model has run a backward already",
                do="make Zero1 before the first backward, of an optimizer that makes its state in step()",
            )
        ours = set(map(id, reducer.parameters.values()))
        if any(p.requires_grad and id(p) not in ours for group in optimizer.param_groups for p in group["params"]):
            raise UsageError("the optimizer has parameters that the model has not", do="step those with another one")
        self.optimizer = optimizer
        self._model, self._reducer = model, reducer
        reducer.deferred = reducer.sharded = True
        reducer.reduction = ReduceScatter(reducer.group, reducer.divide, reducer.sum_dtype)
        reducer.on_plan = self._shard
        self._partial = PartialSteps(optimizer)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._shares: dict[int, list[Share]] = {}  # by bucket
        self._pieces: dict[int, Piece] = {}  # by id of the parameter
        self._arriving: dict[int, list[dist.Work]] = {}
        self._called: set[torch.nn.Module] = set()
        self._needs: dict[torch.nn.Module, set[int]] = {}
        self._to_load: State | None = None
        self._hooks = [module.register_forward_pre_hook(self._before_forward) for module in model.module.modules()]
        self._hooks.append(model.register_forward_hook(lambda *_: self.wait()))
        self._hooks.append(model.module.register_state_dict_pre_hook(lambda *_: self.wait()))

    def step(self) -> None:
        """Step this rank's share of each bucket as soon as it is reduced, then start gathering the parameters."""
        self._partial.begin()
        for bucket in self._reducer.reduced():
            self._step(bucket)
        for bucket in self._reducer.buckets:
            if bucket.results:  # reduced before, by clip_grad_norm_
                self._step(bucket)
        self._partial.step_rest()
        for bucket in reversed(self._reducer.buckets):
            self._gather(bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were accumulated without a step."""
        self._model.zero_grad(set_to_none)

    def wait(self) -> None:
        """Wait until all parameters are complete."""
        self._receive(list(self._arriving))

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Wait for all gradients, scale them to a joint 2-norm of at most `max_norm`, and return what it was.

        A collective call. The norm is over the parameters of the wrapped model.
        """
        self._reducer.finish()
        gradients = [gradient for bucket in self._reducer.buckets for gradient in self._gradients(bucket).values()]
        square = torch.zeros((), device=self._reducer.device)
        for gradient in gradients:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        dist.all_reduce(square, group=self._reducer.group)
        norm = square.sqrt()
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))  # torch's own formula
        return norm

    def state_dict(self) -> State:
        """The whole optimizer's state, as an unsharded one gives it, on every rank's CPU. A collective call."""
        return gather_state(self.optimizer, self._groups, self._pieces, self._reducer.group)

    def load_state_dict(self, state: State) -> None:
        """Take over a whole state, of this class or of an unsharded optimizer; before the first backward or later."""
        load_options(state, self.optimizer, self._groups)
        if self._pieces:
            load_state(state, self.optimizer, self._groups, self._pieces)
        else:
            self._to_load = state

    def remove(self) -> None:
        """Take the hooks of this and of the wrapper off the module. Its parameters stay views of flat buffers."""
        self.wait()
        self._model.remove()
        for hook in self._hooks:
            hook.remove()

    def _shard(self) -> None:
        """Move the parameters to flat buffers, and give the optimizer this rank's pieces of them in their stead."""
        for bucket in self._reducer.buckets:
            self._shares[bucket.number] = [self._share(bucket, flat) for flat in bucket.flats]
            for name, piece in self._pieces_of(bucket).items():
                self._pieces[id(bucket.parameters[name])] = piece
        for group in self.optimizer.param_groups:
            group["params"] = [self._pieces[id(p)].tensor for p in group["params"] if id(p) in self._pieces]
        self._needs = _find_needs(self._model.module, self._reducer.buckets, self._called)
        if self._to_load is not None:
            load_state(self._to_load, self.optimizer, self._groups, self._pieces)
            self._to_load = None

    def _pieces_of(self, bucket: Bucket) -> dict[str, Piece]:
        return {name: piece for share in self._shares[bucket.number] for name, piece in share.pieces.items()}

    def _share(self, bucket: Bucket, gradients: Flat) -> Share:
        parameters = {name: bucket.parameters[name] for name in gradients.slots}
        dtype = next(iter(parameters.values())).dtype
        values = Flat(parameters, dtype, self._reducer.ranks)
        for name, parameter in parameters.items():
            values.slots[name].copy_(parameter.detach())
            parameter.data = values.slots[name]
        return Share(parameters, values, own_share(values.buffer, self._reducer.group))

    def _gradients(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The reduced gradients of this rank's pieces; those that no rank has used are left out."""
        found: dict[str, torch.Tensor] = {}
        for share, result in zip(self._shares[bucket.number], bucket.results, strict=True):
            found.update(share.gradients(result))
        return {name: gradient for name, gradient in found.items() if name not in bucket.unused}

    def _step(self, bucket: Bucket) -> None:
        self._reducer.observe("step", bucket.number)
        pieces = {name: piece.tensor for name, piece in self._pieces_of(bucket).items()}
        with record_function(f"slipstream::bucket {bucket.number} step"):
            for name, gradient in self._gradients(bucket).items():
                pieces[name].grad = gradient.to(pieces[name].dtype)
            self._partial.step(pieces.values())
        for piece in pieces.values():
            piece.grad = None
        bucket.results = []

    def _gather(self, bucket: Bucket) -> None:
        self._reducer.observe("gather", bucket.number)
        group = self._reducer.group
        with record_function(f"slipstream::bucket {bucket.number} gather"), naming(f"gathering {bucket}"):
            self._arriving[bucket.number] = [
                collectives.all_gather(share.values.buffer, share.own, group) for share in self._shares[bucket.number]
            ]

    def _before_forward(self, module: torch.nn.Module, _arguments: Any) -> None:
        self._called.add(module)
        if self._arriving:
            self._receive(self._needs.get(module, ()))

    def _receive(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            works = self._arriving.pop(number, [])
            if works:
                self._reducer.observe("receive", number)
                with naming(f"gathering {self._reducer.buckets[number]}"):
                    for work in works:
                        work.wait()


def _find_needs(
    module: torch.nn.Module, buckets: list[Bucket], called: set[torch.nn.Module]
) -> dict[torch.nn.Module, set[int]]:
    """Which buckets each module has to wait for: those with its own parameters.

    Some modules are never called, for their parent reads their parameters: the output projection of torch's
    MultiheadAttention, every ParameterList. Their nearest ancestor that was `called` waits in their stead.
    """
    number_of = {id(p): bucket.number for bucket in buckets for p in bucket.parameters.values()}
    needs: dict[torch.nn.Module, set[int]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        own = {number_of[id(p)] for p in part.parameters(recurse=False) if id(p) in number_of}
        needs.setdefault(part, set()).update(own)
        while part not in called and path:
            path = path.rpartition(".")[0]
            part = module.get_submodule(path)
        needs.setdefault(part, set()).update(own)
    return needs
