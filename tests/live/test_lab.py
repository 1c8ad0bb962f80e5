"""The lab's wires carry what they are sold for, and nothing of a lab is left, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from slipstream.bench.lab import lab, unavailable

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(bool(unavailable()), reason=f"no lab can be made here: {unavailable()}"),
]

SENDER = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001), timeout=20) as wire:
    wire.sendall(bytes(int(sys.argv[2])))
"""
RECEIVER = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5001)) as server:
    print("ready", flush=True)
    server.settimeout(20)
    with server.accept()[0] as wire:
        received, began = len(wire.recv(1 << 20)), time.monotonic()
        while piece := wire.recv(1 << 20):
            received += len(piece)
        print(received / (time.monotonic() - began), flush=True)
"""
HELD = """
import os, time
from slipstream.bench.lab import lab
with lab(2, "1gbit"):
    print("up", flush=True)
    time.sleep(60)
"""


def namespaces(owner: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"sl{owner}h")]


@pytest.mark.parametrize(("hosts", "megabit"), [(2, 200), (3, 80)])
def test_a_wire_carries_its_rate(hosts: int, megabit: int) -> None:
    size = 4_000_000
    with lab(hosts, f"{megabit}mbit") as (first, *_, last):
        receive = first.command([sys.executable, "-c", RECEIVER, first.address])
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            send = last.command([sys.executable, "-c", SENDER, first.address, str(size)])
            subprocess.run(send, check=True, timeout=30)
            bits = 8 * float(receiver.stdout.readline())
    # The limiter's burst goes through at once; framing takes a few percent.
    assert 0.7 * megabit < bits / 1e6 < 1.3 * megabit
    assert namespaces(os.getpid()) == []


def test_an_error_inside_takes_the_lab_down() -> None:
    with pytest.raises(ZeroDivisionError), lab(2, "1gbit"):
        assert len(namespaces(os.getpid())) == 3
        raise ZeroDivisionError
    assert namespaces(os.getpid()) == []


def started() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HELD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_an_interrupt_takes_the_lab_down() -> None:
    process = started()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert namespaces(process.pid) == []


def test_what_a_killed_process_left_is_taken_down_by_the_next_lab() -> None:
    process = started()
    process.kill()
    process.communicate(timeout=20)
    assert len(namespaces(process.pid)) == 3
    began = time.monotonic()
    with lab(2, "1gbit"):
        assert namespaces(process.pid) == []
    assert time.monotonic() - began < 20
