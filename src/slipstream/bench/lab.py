"""A lab on one machine: hosts with addresses of their own and real wires of a chosen rate between them.

Each host is a network namespace; its wire is a veth pair whose ends are shaped by `tbf`. The wire waits in the kernel
and costs little of the cores that compute, so overlap on it is real. Needs root, `ip` and `tc` (Linux).

The names of a lab carry the number of the process that made it. A lab is taken down when its block ends, however it
ends; what a killed process left behind is taken down by the next lab.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import MachineError, UsageError

_OURS = re.compile(r"\bsl(\d+)(?:h\d+|hub)\b")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g)bit(?:/s)?", re.IGNORECASE)
_BITS = {"k": 10**3, "m": 10**6, "g": 10**9}

BURST_BYTES = 256 * 1024
"""What `tbf` lets through at full speed after a pause: messages below it are not limited."""


@dataclass(frozen=True)
class Host:
    """One host of a lab: run a command in it with `command(...)`; reach it at `address`, on device `device`."""

    namespace: str
    address: str
    device: str = "wire"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def bits_per_s(rate: str) -> int:
    """Read a rate as wires are sold: `1gbit`, `500mbit`, `2.5gbit/s`. Raises UsageError for anything else."""
    found = _RATE.fullmatch(rate.strip())
    bits = round(float(found[1]) * _BITS[found[2].lower()]) if found else 0
    if bits < 10**5:
        raise UsageError(
            f"{rate!r} is not the rate of a wire", do="write for example 1gbit or 500mbit, at least 100kbit"
        )
    return bits


def unavailable() -> str:
    """Why no lab can be made here; empty if one can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (install iproute2)"
    return "" if os.geteuid() == 0 else "network namespaces need root"


@contextmanager
def lab(hosts: int, rate: str) -> Iterator[list[Host]]:
    """Make `hosts` hosts whose wires carry `rate` in each direction, and take them down at the end of the block.

    Raises MachineError where namespaces, veth or tbf are not to be had.
    """
    bits = bits_per_s(rate)
    if reason := unavailable():
        raise MachineError(f"no lab can be made: {reason}", do="run as root on Linux, or without --wire")
    _sweep()
    name = f"sl{os.getpid()}"
    try:
        yield _build(name, hosts, bits)
    finally:
        _take_down(name)


def _build(name: str, hosts: int, bits: int) -> list[Host]:
    """Hosts on one bridge, which stands in a namespace of its own so that nothing of it shows on the machine."""
    hub = f"{name}hub"
    _run("ip", "netns", "add", hub)
    _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "bridge", "up")
    return [_add_host(name, hub, number, bits) for number in range(hosts)]


def _add_host(name: str, hub: str, number: int, bits: int) -> Host:
    host = Host(f"{name}h{number}", f"10.77.0.{number + 1}")
    port = f"port{number}"
    _run("ip", "netns", "add", host.namespace)
    _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", host.device, "netns", host.namespace)
    _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.device)
    for device in ("lo", host.device):
        _run("ip", "-n", host.namespace, "link", "set", device, "up")
    _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
    # Both ends: what the host sends is shaped at its own, what it receives at the port.
    for namespace, device in ((host.namespace, host.device), (hub, port)):
        shape = ("tbf", "rate", f"{bits}bit", "burst", str(BURST_BYTES), "latency", "50ms")
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)
    return host


def _sweep() -> None:
    """Take down the labs of processes that are no longer there."""
    owners = {found[1] for found in _OURS.finditer(_run("ip", "netns", "list"))}
    for owner in owners:
        if not Path(f"/proc/{owner}").exists():
            _take_down(f"sl{owner}")


def _take_down(name: str) -> None:
    """Remove the namespaces of one lab, and with them the wires. What still runs in them is killed."""
    spaces = [found[0] for found in _OURS.finditer(_run("ip", "netns", "list")) if found[0].startswith(f"{name}h")]
    for space in dict.fromkeys(spaces):
        for process in _run("ip", "netns", "pids", space).split():
            _run("kill", "-KILL", process, check=False)
        _run("ip", "netns", "del", space, check=False)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if check and done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise MachineError(
            f"`{' '.join(command)}` failed: {said}", do="check that this kernel has veth, bridge and tbf"
        )
    return done.stdout
