"""The time of a step: a trace replayed on streams, with the duration of each kernel from a roofline model.

The trace has the waits between streams that FSDP2 requested, so the overlap of communication and compute follows from
them and is not assumed. (Roofline: Williams, Waterman & Patterson, CACM 52(4), 2009.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdptrain.config.schema import Parallel, Recomputation
from fsdptrain.forecast.trace import (
    HOST_STREAM,
    Collective,
    Event,
    Kernel,
    Moment,
    RecordEvent,
    Synchronize,
    Trace,
    WaitEvent,
    network_share,
    ring_bytes,
)
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.pipeline import step_seconds

LATENCY_S = 20e-6  # of every collective
MOST_REPLAYED = 5  # numbers of micro-batches, from that which is simulated on
SAME_S = 1e-8  # seconds by which two times may differ that are the same
IN_FLIGHT = 8  # collectives that can overlap with one kernel: FSDP2 has a few ahead, and one reduction behind

# The host's seconds that recomputation adds to the backward of a layer: torch's hooks for each saved tensor and, if
# selective, Python code for each operator in forward and in backward. Measured in docs/internals/measurements.md.
RECOMPUTATION_S = {"none": 0.0, "full": 1e-3, "selective": 3e-3}

# Products in float8, with their casts: times the rate of those in bf16, times their memory traffic. Each operand is
# read for its largest number, read to be cast, written, and read: by rows for each product, else once for two of them.
# The rates follow from published speeds of 8B models on 8 H100s: see docs/calibration.md.
FLOAT8 = {"float8_rowwise": (1.65, 2.5), "float8_tensorwise": (1.85, 1.5)}

# What the compiler leaves of the memory traffic of operators that are not products, in layers and loss. It follows from
# a published gain, of an 8B model on 8 H100s: see docs/calibration.md.
COMPILED = 0.44

PASSES = {"forward": True, "loss": True, "end": True, "backward": False}  # first word of a moment → of a forward pass
COMPUTE_STREAM = 0  # runs everything except FSDP2's copies and collectives


@dataclass
class Timing:
    """Seconds of a step: in all, of compute alone, of communication alone, and of the host; and its FLOPs.

    `forward_s` and `backward_s` are those of all passes of a direction, with what they wait for in this rank.
    """

    step_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    host_s: float = 0.0
    flops: int = 0

    @property
    def exposed_s(self) -> float:
        """Seconds in which the compute stream waits."""
        return max(0.0, self.step_s - self.compute_s)

    def plus(self, other: Timing, times: int) -> Timing:
        """Return the sum of this and so many `times` the other."""
        return Timing(*(one + times * two for one, two in self._beside(other)))

    def equals(self, other: Timing) -> bool:
        """Return whether both are the same, but for what rounding makes of long steps."""
        return all(math.isclose(one, two, rel_tol=0, abs_tol=SAME_S) for one, two in self._beside(other))

    def _beside(self, other: Timing) -> Iterator[tuple[Any, Any]]:
        return zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)


def replay_step(trace: Trace, micro_batches: int, *machine: Any) -> Timing:
    """Time a step of so many micro-batches; `machine` are the other arguments of `replay_streams`.

    Only few are replayed if one more adds to everything what the one before it added.
    """
    timings: list[Timing] = []
    for few in range(trace.micro_batches, min(trace.micro_batches + MOST_REPLAYED, micro_batches)):
        timings.append(replay_streams(trace.repeated(few), *machine))
        gains = [more.plus(less, -1) for less, more in itertools.pairwise(timings[-3:])]
        if len(gains) == 2 and gains[0].equals(gains[1]):
            return timings[-1].plus(gains[1], micro_batches - few)
    return replay_streams(trace.repeated(micro_batches), *machine)


def time_stages(
    parallel: Parallel, timings: Mapping[int, Timing], places: list[int], micro_batches: int, message_s: float
) -> tuple[Timing, float]:
    """Return the timing of a step of a pipeline, and the share of its passes in which ranks wait for one another.

    `timings` are those of the simulated places as if they waited for nothing, `places` has for each place the one that
    stands for it, and `message_s` are the seconds of a message. Each rank's passes of one direction count as equally
    long.
    """
    passes = micro_batches * parallel.stages_of_rank
    stages = [timings[places[stage % parallel.pipeline]] for stage in range(parallel.stages)]
    seconds = {True: [each.forward_s / passes for each in stages], False: [each.backward_s / passes for each in stages]}
    passes_s = step_seconds(parallel, seconds, micro_batches, message_s)
    rest_s = max(each.step_s - (each.forward_s + each.backward_s) for each in timings.values())
    busy_s = micro_batches * (sum(seconds[True]) + sum(seconds[False])) / parallel.pipeline
    slowest = max(timings.values(), key=lambda each: each.step_s)
    return dataclasses.replace(slowest, step_s=passes_s + rest_s), 1 - busy_s / passes_s


def replay_streams(
    events: Iterable[Event], hardware: Hardware, half: bool, ranks_per_node: int, recompute_s: float = 0.0,
    compiled: bool = False,
) -> Timing:  # fmt: skip
    """Time the events; `half`: matrix products run in bf16; `recompute_s` are the host's seconds a unit in backward.

    `compiled`: the layers and the loss are compiled on a GPU.

    The host launches kernels and collectives in program order. A device stream runs them one after another, at the
    earliest when they are launched. On a CPU the host itself computes and communicates. In a collective between nodes
    each rank waits for the latest one, which delays all that follows: no compute hides that.
    """
    timing, passes_s = Timing(), {True: 0.0, False: 0.0}
    clock: dict[int, float] = defaultdict(float)  # stream → seconds at which it is free
    event_s: dict[int, float] = {}  # event → seconds at which it happens
    links = _Links(clock, event_s)
    collectives = deque[tuple[float, float]](maxlen=IN_FLIGHT)  # (start, end) of the newest ones, in seconds
    host = late = 0.0
    fuses = False  # whether what computes at this moment is compiled
    forward: bool | None = None  # whether this moment is of a forward or a backward pass; None: of neither
    since = 0.0  # when it began
    for event in events:
        if isinstance(event, Kernel):
            seconds = kernel_s(event, hardware, half)
            seconds *= COMPILED if fuses and event.stream == COMPUTE_STREAM and not (event.flops or event.link) else 1.0
            timing.flops += event.flops
            if event.stream == HOST_STREAM or hardware.is_cpu:  # the host computes, so it is busy
                seconds += hardware.launch_s * hardware.is_cpu
                host += seconds
                timing.host_s += seconds
                continue
            host += hardware.launch_s
            start = max(clock[event.stream], host)
            if event.stream == COMPUTE_STREAM:
                seconds += hardware.contention * _overlap(start, start + seconds, collectives)
                timing.compute_s += seconds
            clock[event.stream] = start + seconds
        elif isinstance(event, Collective):
            seconds = collective_s(event, hardware, ranks_per_node)
            timing.communication_s += seconds
            host += hardware.hook_s
            if hardware.is_cpu:
                host += seconds
                continue
            crosses = event.nodes(ranks_per_node) > 1
            late += crosses * hardware.late_s * len(event.ranks)
            collectives.append(links.carry(event, crosses, seconds, host))
        elif isinstance(event, RecordEvent):
            event_s[event.event] = max(clock[event.stream], host)
            links.newest[event.stream].append(event.event)
        elif isinstance(event, WaitEvent):
            clock[event.stream] = max(clock[event.stream], event_s.get(event.event, 0.0))
        elif isinstance(event, Moment):
            fuses = compiled and event.name.startswith(("forward of ", "backward of ")) and "embed" not in event.name
            host += recompute_s if event.name.startswith("backward of ") and not hardware.is_cpu else 0.0
            now = host if hardware.is_cpu else clock[COMPUTE_STREAM]
            if forward is not None:
                passes_s[forward] += now - since
            forward, since = PASSES.get(event.name.partition(" of ")[0]), now
        elif isinstance(event, Synchronize):
            host = max([host, *(clock.values() if event.event is None else [event_s.get(event.event, 0.0)])])
    timing.step_s = max([host, *clock.values()]) + late
    timing.forward_s, timing.backward_s = passes_s[True], passes_s[False]
    if hardware.is_cpu:
        timing.compute_s = timing.host_s
    return timing


class _Links:
    """The links inside the node (False) and the network (True), which collectives share.

    Those of one group run one after another. A reduction in a group of its own runs at the same time as a gather, each
    at half its speed: what was under way before ends later, with the events that were recorded behind it.
    """

    def __init__(self, clock: dict[int, float], event_s: dict[int, float]) -> None:
        self._clock, self._event_s = clock, event_s
        self._free: dict[tuple[bool, bool], tuple[float, int]] = defaultdict(lambda: (0.0, 0))  # seconds, stream
        self.newest: dict[int, list[int]] = defaultdict(list)  # stream → events since its last collective

    def carry(self, collective: Collective, crosses: bool, seconds: float, host: float) -> tuple[float, float]:
        """Return when a collective that takes `seconds` alone starts and ends, issued at `host` seconds."""
        own, other, stream = (crosses, collective.apart), (crosses, not collective.apart), collective.stream
        start = max(self._clock[stream], self._free[own][0], host)
        until, beside = self._free[other]
        shared = max(0.0, min(until - start, seconds))
        if shared:
            self._free[other] = until + shared, beside
            self._clock[beside] += shared
            for event in self.newest[beside]:
                self._event_s[event] += shared
        self._clock[stream] = start + seconds + shared
        self._free[own] = self._clock[stream], stream
        self.newest[stream].clear()
        return start, self._clock[stream]


def _overlap(start: float, end: float, collectives: Iterable[tuple[float, float]]) -> float:
    """Return the seconds between `start` and `end` in which a collective runs too."""
    return sum(max(0.0, min(end, until) - max(start, since)) for since, until in collectives)


def recomputation_s(how: Recomputation) -> float:
    """Return the host's seconds that `fsdp.activation_checkpointing` adds to the backward of a layer, on average."""
    return RECOMPUTATION_S[how.kind] / how.every


def kernel_s(kernel: Kernel, hardware: Hardware, half: bool) -> float:
    """Return the seconds of one operator.

    A matrix product loads its first tiles before, and stores its last ones after, the arithmetic, so that its two times
    add up: with that the published runs of `benchmarks/calibrate.py` are met closer than with the longer of the two.
    Attention keeps its tiles on the chip, and takes the longer; and on a CPU the measured rate includes the memory.
    """
    if kernel.link:
        return kernel.link / hardware.pcie_bw
    if kernel.stream == HOST_STREAM:
        return kernel.moved / hardware.host_bw
    memory = kernel.moved / (hardware.memory_bw * hardware.memory_share)
    arithmetic = kernel.flops / (hardware.flops if half else hardware.flops32)
    if is_attention(kernel):  # one without a share of the peak (varlen) has the flash kernel's
        shares = hardware.attention_share
        kind = next((kind for kind in shares if kind in kernel.name), "flash" if hardware.has_flash else "efficient")
        return max(arithmetic / shares[kind]["backward" in kernel.name], memory)
    arithmetic /= hardware.product_share
    if kernel.name in FLOAT8 and not hardware.is_cpu:  # which emulates it
        rate, traffic = FLOAT8[kernel.name]
        arithmetic, memory = arithmetic / rate, memory * traffic
    return max(arithmetic, memory) if hardware.is_cpu else arithmetic + memory


def is_attention(kernel: Kernel) -> bool:
    """Return whether an operator computes attention, forward or backward, in one kernel."""
    return "attention" in kernel.name or "varlen" in kernel.name


def collective_s(collective: Collective, hardware: Hardware, ranks_per_node: int) -> float:
    """Return the seconds of a ring: the slower of the links inside the nodes and the links between them."""
    ranks, nodes = len(collective.ranks), collective.nodes(ranks_per_node)
    if ranks == 1:
        return 0.0
    sent = ring_bytes(collective.kind, collective.size, ranks)
    inside = sent / hardware.intra_bw if ranks > nodes else 0.0
    between = sent * network_share(ranks, nodes) / hardware.inter_bw
    return max(inside, between) + LATENCY_S
