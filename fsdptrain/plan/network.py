"""The network interface through which this machine reaches another one. No torch."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fsdptrain.errors import RecipeError

SIOCGIFCONF = 0x8912  # the ioctl that lists addresses; `struct ifreq` has 40 bytes on 64-bit Linux
IFREQ_BYTES, MAX_ADDRESSES = 40, 1024
DEFAULT_PORTS = (32768, 60999)  # of Linux, for connections
LOWEST_PORT, PORTS_TRIED = 10_000, 100  # below are well-known services
ANYWHERE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation: the default route leads there


class LocalEnd(NamedTuple):
    """The end of a connection on this machine."""

    interface: str
    address: str


def local_end(host: str) -> LocalEnd | None:
    """Return the interface and the address of this machine on the way to `host`, or None. No packet is sent.

    A name that leads to a loopback address is the name of this machine: Debian gives it 127.0.1.1, which other machines
    cannot reach. Then it is the interface of the default route, or the only one besides loopback.
    """
    interfaces = dict(_addresses())
    address = _source(host)
    all_here = host == "localhost" or is_loopback(host)
    if all_here or address is None or not is_loopback(address):
        return _end(address, interfaces)
    for elsewhere in ANYWHERE:
        if found := _end(_source(elsewhere), interfaces):
            return found
    reachable: dict[str, str] = {}
    for own, name in interfaces.items():
        parsed = ipaddress.ip_address(own)
        if not (parsed.is_loopback or parsed.is_link_local):
            reachable.setdefault(name, own)
    return LocalEnd(*reachable.popitem()) if len(reachable) == 1 else None


def address_of(host: str) -> str | None:
    """Return the first address to which this machine resolves a name; None if it knows none."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None)[0][4][0])
    return None


def ephemeral_ports() -> tuple[int, int]:
    """Return the first and the last port that this machine's kernel gives to connections, and to gloo and NCCL."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split())
        return first, last
    return DEFAULT_PORTS


def unused_port() -> int:
    """Return a port of loopback on which nothing listens, for a process that listens on it later.

    Until then any connection of this machine may take a port of those that the kernel gives to connections: so it is
    a lower one, if there are any.
    """
    lower = range(LOWEST_PORT, max(LOWEST_PORT, ephemeral_ports()[0]))
    tried = random.SystemRandom().sample(lower, min(PORTS_TRIED, len(lower)))
    for port in [*tried, 0]:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as free:
            return int(free.getsockname()[1])
    raise RecipeError("no port of 127.0.0.1 is free: end processes that listen")


def is_this_machine(host: str) -> bool:
    """Return whether a name or an address leads to this machine."""
    own = {address for address, _ in _addresses()}
    with contextlib.suppress(OSError):
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return any(address in own or is_loopback(address) for address in found)
    return False


def set_gloo_interface(host: str) -> None:
    """Make gloo listen on the interface on the way to `host`, unless GLOO_SOCKET_IFNAME is set; say so in the log.

    By default gloo listens on the address to which this machine resolves its own name.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ and (end := local_end(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = end.interface
        way = f"{end.interface} ({end.address}), the way to {host}"
        print(f"fsdptrain: gloo listens on {way}; GLOO_SOCKET_IFNAME chooses another interface", flush=True)


def _end(address: str | None, interfaces: dict[str, str]) -> LocalEnd | None:
    return LocalEnd(interfaces[address], address) if address in interfaces else None


def _source(host: str) -> str | None:
    """Return the address from which this machine would send to a host; None if it knows no way."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as end:
                end.connect(address)
                return str(end.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    """Return whether an address leads to the machine itself; False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield the addresses of this machine's interfaces that are up, each with the name of its interface."""
    buffer = array.array("B", bytes(IFREQ_BYTES * MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        filled = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), SIOCGIFCONF, request))[0]
    for at in range(0, filled, IFREQ_BYTES):
        name = buffer[at : at + 16].tobytes().partition(b"\0")[0].decode()
        yield socket.inet_ntoa(buffer[at + 20 : at + 24]), name.partition(":")[0]  # an alias is eth0:1
    listed = Path("/proc/net/if_inet6")
    for line in listed.read_text(encoding="ascii").splitlines() if listed.exists() else ():
        digits, *_, name = line.split()
        yield str(ipaddress.IPv6Address(bytes.fromhex(digits))), name
