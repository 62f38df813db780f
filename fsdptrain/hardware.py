"""What a card and its links can do: published figures, and the shares of them that real training reaches.

Nothing here was tuned on the runs it is compared with in docs/measurements.md.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from fsdptrain.errors import Problem, RecipeError

GIB = 2**30

# Dense bf16 FLOP/s by device name, as the vendors publish them (no sparsity); the longest matching name wins.
PEAK_FLOPS = {
    "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "GH200": 989e12,
    "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12,
}  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """One card, as a rank sees it. Bytes, FLOP/s, bytes/s.

    `memory` is what torch reports as the card's total. `flops` is the dense bf16 peak, `flops32` that of float32
    without tensor cores. `intra_bw` is the bus bandwidth of a ring inside a node, `inter_bw` one rank's share of the
    network between nodes, `host_bw` its share of host memory and `pcie_bw` its way there. `context` is what the driver
    and the libraries take before torch allocates anything, `communicator` what NCCL takes for each group of ranks.
    The `_share`s are what matrix products, attention (forward, backward) and everything else reach of their peak.
    """

    name: str
    memory: int
    flops: float
    flops32: float
    memory_bw: float
    intra_bw: float
    inter_bw: float
    pcie_bw: float = 22e9
    host_bw: float = 30e9
    gpus_per_node: int = 8
    context: int = int(0.6 * GIB)
    communicator: int = 1 * GIB
    product_share: float = 0.70
    attention_share: tuple[float, float] = (0.45, 0.38)
    memory_share: float = 0.80
    launch_s: float = 6e-6
    spread: float = 0.2

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on a CPU."""
        return self.name == "cpu"


def _gpu(name: str, card: str, gib: float, *rates: float, **other: Any) -> Hardware:
    """`rates` are flops32, memory_bw, intra_bw and inter_bw."""
    flops32, memory_bw, intra, inter = rates
    return Hardware(name, int(gib * GIB), PEAK_FLOPS[card], flops32, memory_bw, intra, inter, **other)


KNOWN = {
    hardware.name: hardware
    for hardware in (
        _gpu("h100-80gb", "H100", 79.1, 67e12, 3.35e12, 330e9, 45e9, pcie_bw=45e9),
        _gpu("h200-141gb", "H200", 139.8, 67e12, 4.8e12, 330e9, 45e9, pcie_bw=45e9),
        _gpu("a100-80gb", "A100", 79.1, 19.5e12, 2.0e12, 220e9, 22e9, product_share=0.82, attention_share=(0.6, 0.5)),
        _gpu("a100-40gb", "A100", 39.4, 19.5e12, 1.55e12, 220e9, 22e9, product_share=0.82, attention_share=(0.6, 0.5)),
        _gpu("l40s-48gb", "L40S", 44.4, 91.6e12, 864e9, 18e9, 10e9),
        _gpu("rtx4090-24gb", "RTX 4090", 23.6, 82.6e12, 1.0e12, 9e9, 3e9, product_share=0.85),
        _gpu("b200-192gb", "B200", 178.3, 75e12, 8.0e12, 650e9, 45e9, pcie_bw=45e9, product_share=0.65),
    )
}
CPU = Hardware(  # memory and rates are measured where it is used: see `estimate`
    "cpu", 0, 1e11, 1e11, 6e9, 1.5e9, 1e8, gpus_per_node=2, context=int(0.5 * GIB), communicator=0,
    product_share=0.6, attention_share=(0.3, 0.35), launch_s=5e-6, spread=0.4,
)  # fmt: skip
CARDS = {"H100": "h100-80gb", "H200": "h200-141gb", "L40S": "l40s-48gb", "4090": "rtx4090-24gb", "B200": "b200-192gb"}
CUSTOM = ("memory", "flops", "intra_bw", "inter_bw")


def parse(text: str) -> tuple[int | None, Hardware]:
    """`--hardware`: `[COUNTx]NAME`, or `memory=80e9,flops=…,intra_bw=…,inter_bw=…`; the count, where one is given.

    Raises RecipeError with the names there are.
    """
    if "=" in text:
        return None, _custom(text)
    match = re.fullmatch(r"(?:(\d+)[x×])?(.+)", text.strip().lower())
    assert match
    count, name = match.groups()
    if name == "cpu":
        return int(count) if count else None, CPU
    if name not in KNOWN or count == "0":
        raise RecipeError(
            f"--hardware: {text!r} is not known; there are {', '.join([*KNOWN, 'cpu'])}, any with a count in front "
            f"(8xh100-80gb), or give {','.join(f'{key}=…' for key in CUSTOM)}"
        )
    return int(count) if count else None, KNOWN[name]


def _custom(text: str) -> Hardware:
    pairs = dict(pair.partition("=")[::2] for pair in text.split(","))
    problems = [Problem(f"{key!r} is not one of {', '.join(CUSTOM)}", "--hardware") for key in pairs.keys() - {*CUSTOM}]
    problems += [Problem(f"needs {key}=…", "--hardware") for key in CUSTOM if key not in pairs]
    numbers: dict[str, float] = {}
    for key, value in pairs.items():
        try:
            numbers[key] = float(value)
        except ValueError:
            numbers[key] = 0.0
        if not 0 < numbers[key] < float("inf"):
            problems.append(Problem(f"{key}: {value!r} is not a number above 0 (bytes, FLOP/s, bytes/s)", "--hardware"))
    if problems:
        raise RecipeError(problems)
    near = KNOWN["h100-80gb"]  # the shares and what was not given
    bandwidth = near.memory_bw * numbers["flops"] / near.flops
    return dataclasses.replace(
        near, name="custom", memory=int(numbers.pop("memory")), memory_bw=bandwidth,
        flops32=near.flops32 * numbers["flops"] / near.flops, **numbers,  # type: ignore[arg-type]
    )  # fmt: skip


def card(name: str, memory: int) -> Hardware | None:
    """The hardware of a visible GPU by the name and the memory torch reports; None for one we have no figures of."""
    if "A100" in name:
        return dataclasses.replace(KNOWN["a100-80gb" if memory > 60 * GIB else "a100-40gb"], memory=memory)
    known = next((KNOWN[entry] for key, entry in CARDS.items() if key in name), None)
    return dataclasses.replace(known, memory=memory) if known else None
