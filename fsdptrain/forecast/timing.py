"""How long a step takes: a trace, replayed on streams whose kernels last as long as a roofline says.

Who waits for whom is in the trace, as FSDP2 asked for it; so the overlap of communication with compute is not assumed
but follows. (Roofline: Williams, Waterman & Patterson, CACM 52(4), 2009.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fsdptrain.config.hardware import Hardware
from fsdptrain.forecast.trace import HOST_STREAM, Collective, Event, Kernel, RecordEvent, Synchronize, WaitEvent

LATENCY_S = 20e-6  # of a collective, and for every rank that a ring passes


HOP_S = 1.5e-6


COMPUTE = 0  # the stream that everything but FSDP2's copies and collectives runs on


@dataclass
class Timing:
    """Seconds of a step: in all, of compute and of communication if each were alone, and of waiting for the latter."""

    step_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    host_s: float = 0.0
    flops: int = 0

    @property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream stood still."""
        return max(0.0, self.step_s - self.compute_s)


def replay_streams(events: Iterable[Event], hardware: Hardware, half: bool, ranks_per_node: int) -> Timing:
    """Time these events; `half` says whether products are computed in bf16."""
    timing = Timing()
    clock: dict[int, float] = defaultdict(float)  # of every stream, in seconds
    link: dict[tuple[int, ...], float] = defaultdict(float)  # a group's collectives run one after the other
    happened: dict[int, float] = {}
    host = 0.0
    for event in events:
        if isinstance(event, Kernel):
            seconds = kernel_s(event, hardware, half)
            timing.flops += event.flops
            if event.stream == HOST_STREAM or hardware.is_cpu:  # the host computes, and goes on when it is done
                host += seconds
                timing.host_s += seconds
                continue
            host += hardware.launch_s
            clock[event.stream] = max(clock[event.stream], host) + seconds
            timing.compute_s += seconds if event.stream == COMPUTE else 0.0
        elif isinstance(event, Collective):
            seconds = collective_s(event, hardware, ranks_per_node)
            timing.communication_s += seconds
            if hardware.is_cpu:
                host += seconds
                continue
            start = max(clock[event.stream], link[event.ranks], host)
            clock[event.stream] = link[event.ranks] = start + seconds
        elif isinstance(event, RecordEvent):
            happened[event.event] = max(clock[event.stream], host)
        elif isinstance(event, WaitEvent):
            clock[event.stream] = max(clock[event.stream], happened.get(event.event, 0.0))
        elif isinstance(event, Synchronize):
            host = max([host, *clock.values()])
    timing.step_s = max([host, *clock.values()])
    if hardware.is_cpu:
        timing.compute_s = timing.host_s
    return timing


def kernel_s(kernel: Kernel, hardware: Hardware, half: bool) -> float:
    """Seconds of one operator: its arithmetic or its memory traffic, whichever takes longer."""
    if kernel.link:
        return kernel.link / hardware.pcie_bw
    if kernel.stream == HOST_STREAM:
        return kernel.moved / hardware.host_bw
    memory = kernel.moved / (hardware.memory_bw * hardware.memory_share)
    peak = hardware.flops if half else hardware.flops32
    flops, share = float(kernel.flops), hardware.product_share
    if "attention" in kernel.name:
        share = hardware.attention_share["backward" in kernel.name]
        # What a causal mask hides is skipped, and by our tiles at least as much; else a given mask is computed in full.
        flops /= 2 if "flash" in kernel.name or kernel.name.startswith("attention") else 1
    return max(flops / (peak * share), memory)


def collective_s(collective: Collective, hardware: Hardware, ranks_per_node: int) -> float:
    """Seconds of a ring: the slower of the links inside the nodes and of those between them."""
    ranks = len(collective.ranks)
    if ranks == 1:
        return 0.0
    nodes = len({rank // ranks_per_node for rank in collective.ranks})
    share = ranks / nodes  # ranks of the group on one node: so many network cards carry its traffic
    inside = collective.size * (ranks - 1) / ranks / hardware.intra_bw if share > 1 else 0.0
    between = collective.size * (nodes - 1) / nodes / (hardware.inter_bw * share)
    passes = 2 if collective.kind == "all-reduce" else 1
    return passes * max(inside, between) + LATENCY_S + HOP_S * ranks
