"""Models, data and a reference for tests of FullySharded: integers in float64, so every order of summing agrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from slipstream.runtime.sharded import FullySharded, Groups

EXACT = 2.0**53
PLACE = {"device": torch.device("cpu")}
WIDTH = 5  # prime, and smaller than the padding: with four ranks some hold nothing but padding


class Block(nn.Module):
    """x + down(relu(up(x))), no two of its shapes alike."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class InPlace(Block):
    """Adds to its input in place, as many transformer blocks do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.down(torch.relu(self.up(-x)))  # of a copy: backward needs the input of a linear layer
        return x


class Unused(Block):
    """Has a parameter that never gets a gradient, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class TwoDtypes(Block):
    """Some parameters in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.bias.double()


class Adapter(Block):
    """Frozen weights beside trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.low = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low(super().forward(x))


class Keywords(Block):
    """Takes and gives more than one tensor, in containers and keywords."""

    def forward(self, x: torch.Tensor, *, extra: dict[str, Any] | None = None) -> Any:
        y = super().forward(x)
        assert extra is not None
        return {"x": y, "extra": {"sum": extra["sum"] + y.detach().sign(), "side": (y, 1)}}


@dataclass
class Box:
    """What torch's pytree does not look into."""

    x: torch.Tensor
    steps: int


class Boxed(Adapter):
    """Trained weights behind a frozen one, whose input nobody can see and which backward needs last."""

    def forward(self, box: Box) -> Box:
        return Box(super().forward(box.x), box.steps + 1)


class Net(nn.Module):
    """Root parameters, layers between them."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.last = nn.Linear(WIDTH, 2)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x))) * self.scale

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Bare(Net):
    """Everything is a layer but one scale: the first layer's input has no gradient."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__(block, layers=3)
        self.first, self.last = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(torch.cat([x, x], dim=1)[:, :WIDTH])


class Reused(Net):
    """Runs its layers in the order 0 1 0 2 2."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0, 2, 2):
            x = self.blocks[index](x)
        return x


class Shared(Net):
    """The same module under several names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1], self.blocks[0]])


class Recomputing(nn.Module):
    """A layer that recomputes what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Branches(Net):
    """Two towers and a skip connection."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.blocks[0](x), self.blocks[1](x)
        return self.blocks[2](left) + self.blocks[3](right) + x


class Rich(Net):
    """Layers that pass dictionaries on."""

    def __init__(self) -> None:
        super().__init__(Keywords)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        found: dict[str, Any] = {"x": x, "extra": {"sum": torch.zeros_like(x)}}
        for block in self.blocks:
            found = block(found["x"], extra=found["extra"])
        return found["x"] + found["extra"]["sum"]


class Boxes(Net):
    """Layers that pass dataclasses on."""

    def __init__(self) -> None:
        super().__init__(Boxed)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        box = Box(x, 0)
        for block in self.blocks:
            box = block(box)
        return box.x


class Tied(Net):
    """A tied embedding and head, both of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, WIDTH)
        self.last = nn.Linear(WIDTH, 7, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first((x[:, 0] + 1).long())))


class Checkpointed(Net):
    """Recomputes its layers in backward, `span` at a time."""

    def __init__(
        self, block: Callable[[], nn.Module] = Block, span: int = 1, reentrant: bool = False, early_stop: bool = True
    ) -> None:
        super().__init__(block)
        self.span, self.reentrant, self.early_stop = span, reentrant, early_stop

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for start in range(0, len(self.blocks), self.span):
            layers = self.blocks[start : start + self.span]
            with set_checkpoint_early_stop(self.early_stop):
                x = checkpoint(partial(_run, layers), x, use_reentrant=self.reentrant)
        return x


def _run(layers: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Lstm(Net):
    """nn.LSTM keeps a list of its weights beside its parameters. Not integer: compare with a tolerance."""

    def __init__(self) -> None:
        super().__init__(partial(nn.LSTM, WIDTH, WIDTH), layers=2)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)[0]
        return x


def frozen_parts() -> Net:
    """A whole layer and a part of the root do not train."""
    net = Net()
    net.blocks[1].requires_grad_(False)
    net.first.requires_grad_(False)
    return net


def integers(model: nn.Module, seed: int = 0) -> nn.Module:
    """Cast to float64 (what is not float32 on purpose), fill with -1, 0, 1, and move to the device under test."""
    generator = torch.Generator().manual_seed(seed)
    keep = {name for name, module in model.named_modules() if isinstance(module, TwoDtypes)}
    for name, parameter in model.named_parameters():
        value = torch.randint(-1, 2, parameter.shape, generator=generator)
        own = name.endswith(".bias") and name.removesuffix(".bias") in keep
        parameter.data = value.float() if own else value.double()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.double())
    return model.to(PLACE["device"])


def batch(step: int, rows: int = 12) -> torch.Tensor:
    """Integers in -1..1, (rows, 3)."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(-1, 2, (rows, 3), generator=generator).double().to(PLACE["device"])


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A sum in which each column has another weight, so that no two gradients are alike."""
    return (output * torch.arange(1, output.shape[1] + 1, dtype=output.dtype, device=output.device)).sum()


class Sign(torch.optim.Optimizer):
    """Adds -1, 0 or 1: parameters stay small integers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign())


@dataclass(frozen=True)
class Case:
    """A model and how it is sharded and trained."""

    name: str
    model: Callable[[], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    hold: bool = False
    steps: int = 2


def check(case: Case, groups: Groups) -> list[tuple[str, str]]:
    """Train with and without sharding; loss, gradients and parameters must be bit-equal after every step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reference, model = integers(case.model()), integers(case.model())
    events: list[tuple[str, str]] = []
    options = {"mean": False, "poison": True, "observe": lambda *event: events.append(event), **case.options}
    sharded = FullySharded(model, model.blocks, groups=groups, **options)  # type: ignore[arg-type]
    optimizers = [Sign(reference.parameters()), Sign(sharded.parameters())]
    for step in range(case.steps):
        for micro in range(case.micro_batches):
            x = batch(step * case.micro_batches + micro)
            expected = loss_of(reference(x))
            expected.backward()
            last = micro == case.micro_batches - 1
            found = run(sharded, x[rank::ranks], hold=case.hold and not last)
            assert torch.equal(found, expected.detach().cpu()), (case.name, step, found, expected)
        same_gradients(case.name, reference, sharded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same_values(case.name, reference.state_dict(), sharded.full_state_dict())
    left = sharded.memory
    assert (left.unsharded_bytes, left.gradient_bytes, left.layers) == (0, 0, 0), (case.name, left)
    return events


def run(sharded: FullySharded, x: torch.Tensor, *, hold: bool = False) -> torch.Tensor:
    """Forward and backward on this rank's rows; gives the loss summed over all ranks."""
    if hold:
        with sharded.no_sync():
            return run(sharded, x)
    loss = loss_of(sharded(x))
    loss.backward()
    total = loss.detach().cpu().clone()
    dist.all_reduce(total)  # on the default group, which is gloo's in every test
    return total


def same_gradients(name: str, reference: nn.Module, sharded: FullySharded) -> None:
    found = full_gradients(sharded)
    for parameter_name, parameter in reference.named_parameters():
        expected = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        assert expected.abs().max() < EXACT
        if parameter.requires_grad:
            assert torch.equal(found[parameter_name], expected), (name, parameter_name)
        else:
            assert parameter_name not in found


def full_gradients(sharded: FullySharded) -> dict[str, torch.Tensor]:
    """Gather the gradients under the model's names."""
    found = {}
    for flat in [flat for unit in sharded._units for flat in unit.flats if flat.trainable]:
        shard = torch.zeros_like(flat.shard)
        for index, piece in enumerate(flat.pieces):
            if piece.grad is not None:
                flat.piece_of(shard, index).copy_(piece.grad)
        found.update(zip((slot.name for slot in flat.slots), flat.whole(shard), strict=True))
    return found


def same_values(name: str, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert list(expected) == list(found), name
    for key, value in expected.items():
        assert torch.equal(found[key], value), (name, key)
