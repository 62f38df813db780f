"""Hosts on this machine, as namespaces: each with its own address, name, processes and folder, on one switch.

A host can be cut off, slowed down, frozen and killed. Nothing outlives the context that made it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
from injection import holder

PROGRAMS = ("setpriv", "unshare", "nsenter", "ip", "tc")
NAMESPACES = ("--mount", "--net", "--uts", "--pid")
HEADER_BYTES = 14 + 20 + 32  # of Ethernet, IPv4, and TCP with timestamps


class Sent(NamedTuple):
    """What a host has sent so far: packets as the kernel counts them, before they are cut to the size of the wire."""

    size: int
    packets: int

    def payload_since(self, before: Sent) -> int:
        """Return the bytes that programs sent through TCP: without headers, and without bare acknowledgements."""
        return self.size - before.size - HEADER_BYTES * (self.packets - before.packets)


@dataclass
class Host:
    """A host. `local` is a path that is another folder on each host; `own` is that folder, seen from outside."""

    name: str
    address: str
    local: Path
    own: Path
    _first: int  # the first process of the host: all others are killed with it
    _switch: int

    @property
    def prefix(self) -> list[str]:
        """The command that runs a command on this host."""
        return inside(self._first)

    def processes(self) -> list[int]:
        """Return the processes that run on this host, by their numbers outside, without those that have ended.

        Nobody waits for orphans here: the first process sleeps.
        """
        mine, found = Path(f"/proc/{self._first}/ns/pid").readlink(), []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                zombie = (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if (path / "ns" / "pid").readlink() == mine and int(path.name) != self._first and not zombie:
                    found.append(int(path.name))
        return found

    def signal(self, name: str) -> None:
        """Send a signal to every process of this host."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.Signals[name])

    def connect(self, state: str = "up") -> None:
        """Connect this host to the switch (`up`), or cut its cable (`down`)."""
        call(*inside(self._switch), "ip", "link", "set", self.name, state)

    @contextlib.contextmanager
    def slow(self, megabits: int) -> Iterator[str]:
        """Let so many megabits a second pass in each direction, each packet 20 ms late; yield what does it.

        Skips the test where the kernel has no netem.
        """
        ends = [(self.prefix, "eth0"), (inside(self._switch), self.name)]
        words = f"netem delay 20ms rate {megabits}mbit"
        for at, device in ends:
            try:
                call(*at, "tc", "qdisc", "replace", "dev", device, "root", *words.split())
            except AssertionError as error:
                if "qdisc kind is unknown" in str(error):
                    pytest.skip("the kernel has no netem, which makes a link slow")
                raise
        yield words
        for at, device in ends:
            call(*at, "tc", "qdisc", "delete", "dev", device, "root")

    def sent(self) -> Sent:
        """Return what this host has sent to others."""
        found = call(*self.prefix, "ip", "-json", "-statistics", "link", "show", "dev", "eth0")
        counts = json.loads(found)[0]["stats64"]["tx"]
        return Sent(counts["bytes"], counts["packets"])

    def small_disk(self, size: str) -> None:
        """Mount an empty file system of this size on `local`."""
        call(*self.prefix, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.local)

    def usual_disk(self) -> None:
        """Undo `small_disk`."""
        call(*self.prefix, "umount", self.local)


def missing() -> str:
    """Return why there can be no hosts here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: iproute2, util-linux)"
    probe = subprocess.run(["unshare", *NAMESPACES, "--fork", "ip", "link", "add", "type", "veth"], capture_output=True)
    return f"no network namespaces here: {probe.stderr.decode().strip()}" if probe.returncode else ""


@contextlib.contextmanager
def switched_hosts(folder: Path, count: int) -> Iterator[list[Host]]:
    """Make so many hosts in this folder: `host-0` is 10.78.0.1, and so on. All see all other folders of the machine.

    As on Debian, each resolves its own name to 127.0.1.1, where no other can reach it.
    """
    addresses = {f"host-{n}": f"10.78.0.{n + 1}" for n in range(count)}
    local = folder / "local"
    local.mkdir()
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(namespaces("ip link add switch type bridge; ip link set switch up"))
        hosts = []
        for name, address in addresses.items():
            own = folder / name
            own.mkdir()
            names = {**addresses, name: "127.0.1.1"}
            table = "".join(f"{place} {host}\n" for host, place in [("localhost", "127.0.0.1"), *names.items()])
            (folder / f"{name}.hosts").write_text(table)
            first = stack.enter_context(namespaces(
                f"hostname {name}; mount --bind {folder}/{name}.hosts /etc/hosts; mount --bind {own} {local}; "
                "ip link set lo up"
            ))  # fmt: skip
            call(*f"ip link add eth0 netns {first} type veth peer name {name} netns {switch}".split())
            call(*inside(switch), "ip", "link", "set", name, "master", "switch", "up")
            call(*inside(first), "ip", "address", "add", f"{address}/24", "dev", "eth0")
            call(*inside(first), "ip", "link", "set", "eth0", "up")
            hosts.append(Host(name, address, local, own, first, switch))
        yield hosts


@contextlib.contextmanager
def namespaces(script: str) -> Iterator[int]:
    """Make namespaces, set up by a shell script; yield their first process, with which all others in them end."""
    with holder(*NAMESPACES, "--fork", "--kill-child", "--mount-proc", script=script) as made:
        yield int(Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text())


def inside(pid: int) -> list[str]:
    """Return the command that runs a command in the namespaces of a process."""
    return ["nsenter", "--target", str(pid), *NAMESPACES]


def call(*words: object) -> str:
    """Run a command; return what it printed."""
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout
