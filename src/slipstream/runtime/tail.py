"""Steps the optimizer bucket by bucket, behind the reductions that are still on their way.

What is exposed at the end of backward is the tail of the reductions, and then the optimizer. Only the step of the
last bucket has to come after all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import record_function

from slipstream.core.errors import UsageError
from slipstream.runtime.data_parallel import DataParallel


class StepByBucket:
    """Takes over `optimizer.step()` of a DataParallel model.

        optimizer = StepByBucket(torch.optim.AdamW(model.parameters()), model)
        loss_of(model(batch)).backward()    # returns while buckets are still being reduced
        optimizer.step()                    # waits for each, and steps it
        optimizer.zero_grad()

    `.grad` may be read after `model.finish()` only, which gives up the overlap, as `clip_grad_norm_` must. The
    optimizer has to treat each parameter by itself: SGD, Adam and most others do, LBFGS does not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: DataParallel) -> None:
        self.optimizer = optimizer
        self._reducer = model.reducer
        self._reducer.deferred = True
        self._partial = PartialSteps(optimizer)

    def step(self) -> None:
        """Step every parameter of the optimizer once, each bucket's as soon as its gradients are there."""
        self._partial.begin()
        for bucket in self._reducer.reduced():
            self._reducer.observe("step", bucket.number)
            with record_function(f"slipstream::bucket {bucket.number} step"):
                self._partial.step(bucket.parameters.values())
        self._partial.step_rest()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own."""
        self._reducer.finish()
        self.optimizer.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Wait for all gradients, scale them to a joint 2-norm of at most `max_norm`, and return what it was."""
        self._reducer.finish()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm: torch.Tensor = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return norm


class PartialSteps:
    """Steps an optimizer in parts, and refuses its plain `step()`, which would come too early or miss gradients.

    A part is a step with only some parameters in the optimizer's groups, so its state, its groups' options and a
    schedule of the learning rate stay where they are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._group_of: dict[int, int] = {}  # of each parameter that is still to be stepped
        self._in_part = False
        optimizer.register_step_pre_hook(self._refuse_plain_step)

    def begin(self) -> None:
        """Every parameter is to be stepped once."""
        groups = self._optimizer.param_groups
        self._group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}

    def step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step those of `parameters` that the optimizer has."""
        part: list[list[torch.Tensor]] = [[] for _ in self._optimizer.param_groups]
        for parameter in parameters:
            number = self._group_of.pop(id(parameter), None)
            if number is not None:
                part[number].append(parameter)
        if any(part):
            self._step_with(part)

    def step_rest(self) -> None:
        """Step what no part has held."""
        groups = self._optimizer.param_groups
        self.step([p for group in groups for p in group["params"] if id(p) in self._group_of])

    def _step_with(self, part: list[list[torch.Tensor]]) -> None:
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        self._in_part = True
        try:
            for group, parameters in zip(groups, part, strict=True):
                group["params"] = parameters
            self._optimizer.step()
        finally:
            self._in_part = False
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def _refuse_plain_step(self, *_: Any) -> None:
        if not self._in_part:
            raise UsageError("this optimizer is stepped in parts", do="call step() of what wraps it")
