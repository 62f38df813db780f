"""The time of a step: a trace replayed on streams, with the duration of each kernel from a roofline model.

The trace has the waits between streams that FSDP2 requested, so the overlap of communication and compute follows from
them and is not assumed. (Roofline: Williams, Waterman & Patterson, CACM 52(4), 2009.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fsdptrain.config.hardware import Hardware
from fsdptrain.forecast.trace import HOST_STREAM, Collective, Event, Kernel, RecordEvent, Synchronize, WaitEvent

LATENCY_S = 20e-6  # of every collective


HOP_S = 1.5e-6  # added for every rank of the ring


COMPUTE_STREAM = 0  # runs everything except FSDP2's copies and collectives


@dataclass
class Timing:
    """Seconds of a step: in all, of compute alone, of communication alone, and of the host; and its FLOPs."""

    step_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    host_s: float = 0.0
    flops: int = 0

    @property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream waits."""
        return max(0.0, self.step_s - self.compute_s)


def replay_streams(events: Iterable[Event], hardware: Hardware, half: bool, ranks_per_node: int) -> Timing:
    """Time the events; `half` says whether matrix products run in bf16.

    The host launches kernels in program order. A device stream runs them one after another, at the earliest when they
    are launched. On a CPU the host itself computes and communicates.
    """
    timing = Timing()
    clock: dict[int, float] = defaultdict(float)  # stream → seconds at which it is free
    link: dict[tuple[int, ...], float] = defaultdict(float)  # the same for a group: its collectives do not overlap
    event_s: dict[int, float] = {}  # event → seconds at which it happens
    host = 0.0
    for event in events:
        if isinstance(event, Kernel):
            seconds = kernel_s(event, hardware, half)
            timing.flops += event.flops
            if event.stream == HOST_STREAM or hardware.is_cpu:  # the host computes, so it is busy meanwhile
                host += seconds
                timing.host_s += seconds
                continue
            host += hardware.launch_s
            clock[event.stream] = max(clock[event.stream], host) + seconds
            timing.compute_s += seconds if event.stream == COMPUTE_STREAM else 0.0
        elif isinstance(event, Collective):
            seconds = collective_s(event, hardware, ranks_per_node)
            timing.communication_s += seconds
            if hardware.is_cpu:
                host += seconds
                continue
            start = max(clock[event.stream], link[event.ranks], host)
            clock[event.stream] = link[event.ranks] = start + seconds
        elif isinstance(event, RecordEvent):
            event_s[event.event] = max(clock[event.stream], host)
        elif isinstance(event, WaitEvent):
            clock[event.stream] = max(clock[event.stream], event_s.get(event.event, 0.0))
        elif isinstance(event, Synchronize):
            host = max([host, *clock.values()])
    timing.step_s = max([host, *clock.values()])
    if hardware.is_cpu:
        timing.compute_s = timing.host_s
    return timing


def kernel_s(kernel: Kernel, hardware: Hardware, half: bool) -> float:
    """Return the seconds of one operator: its arithmetic or its memory traffic, whichever takes longer."""
    if kernel.link:
        return kernel.link / hardware.pcie_bw
    if kernel.stream == HOST_STREAM:
        return kernel.moved / hardware.host_bw
    memory = kernel.moved / (hardware.memory_bw * hardware.memory_share)
    peak = hardware.flops if half else hardware.flops32
    flops, share = float(kernel.flops), hardware.product_share
    if "attention" in kernel.name or "varlen" in kernel.name:
        share = hardware.attention_share["backward" in kernel.name]
        # Flash kernels skip what a causal mask hides, and the tiles of `model.attention` at least as much. Other
        # kernels compute all of it. The FLOPs of the varlen kernel count only what is computed.
        flops /= 2 if "flash" in kernel.name or kernel.name.startswith("attention") else 1
    return max(flops / (peak * share), memory)


def collective_s(collective: Collective, hardware: Hardware, ranks_per_node: int) -> float:
    """Return the seconds of a ring: the slower of the links inside the nodes and the links between them."""
    ranks = len(collective.ranks)
    if ranks == 1:
        return 0.0
    nodes = len({rank // ranks_per_node for rank in collective.ranks})
    share = ranks / nodes  # ranks of the group on one node; each has a network card for the traffic
    inside = collective.size * (ranks - 1) / ranks / hardware.intra_bw if share > 1 else 0.0
    between = collective.size * (nodes - 1) / nodes / (hardware.inter_bw * share)
    passes = 2 if collective.kind == "all-reduce" else 1
    return passes * max(inside, between) + LATENCY_S + HOP_S * ranks
