"""A slow cable, for kernels without netem: carries frames between two interfaces, late and at a limited rate.

    python cable.py INTERFACE OTHER --megabits RATE --delay SECONDS

Prints `ready` when it carries frames.
"""

from __future__ import annotations

import argparse
import select
import socket
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 3
LARGEST = 2**17  # bytes of a frame: the kernel cuts it later, as the header before it says


class End:
    """One interface, and the frames that are on the way to it."""

    def __init__(self, interface: str, rate: float, delay: float) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)  # checksums that the kernel has yet to fill in
        self._socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        self._socket.bind((interface, 0))
        self._rate, self._delay, self._free_at = rate, delay, 0.0
        self._frames: deque[tuple[float, bytes]] = deque()

    def fileno(self) -> int:
        """Return the number that `select` needs."""
        return self._socket.fileno()

    def receive(self) -> bytes:
        """Return the next frame that this interface receives."""
        return self._socket.recv(LARGEST)

    def take(self, frame: bytes) -> None:
        """Accept a frame, to be delivered after those before it."""
        self._free_at = max(self._free_at, time.monotonic()) + len(frame) / self._rate
        self._frames.append((self._free_at + self._delay, frame))

    def deliver(self) -> float | None:
        """Send the frames that are due; return the seconds until the next one is, None if there is none."""
        while self._frames and (wait := self._frames[0][0] - time.monotonic()) <= 0:
            self._socket.send(self._frames.popleft()[1])
        return wait if self._frames else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("interfaces", nargs=2)
    parser.add_argument("--megabits", type=float, required=True)
    parser.add_argument("--delay", type=float, required=True)
    options = parser.parse_args()
    one, two = (End(name, options.megabits * 1e6 / 8, options.delay) for name in options.interfaces)
    print("ready", flush=True)
    while True:
        waits = [wait for end in (one, two) if (wait := end.deliver()) is not None]
        readable, _, _ = select.select([one, two], [], [], min(waits, default=None))
        for end in readable:
            (two if end is one else one).take(end.receive())


if __name__ == "__main__":
    main()
