"""What a card and its links can do: published peaks, and the shares of them that training reaches.

Each card says what its figures for time are based on. FLOP/s and memory bandwidths are from NVIDIA's data sheets and,
for GeForce cards, the A6000 and the RTX PRO 6000, from the white papers on their chips. Only `late_s` and the
`product_share` of the A100 and of the H100 are fitted, to published runs, by `benchmarks/calibrate.py`;
docs/calibration.md has the errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

from fsdptrain.config.schema import Recipe
from fsdptrain.errors import RecipeError
from fsdptrain.text import GIB

CALIBRATED = "calibrated on published runs"
SAME_CHIP = "calibrated on published runs of the H100"
ESTIMATED = "estimated"
MEASURED = "measured on this machine"
SPREADS = {CALIBRATED: 0.1, SAME_CHIP: 0.25, ESTIMATED: 0.35, MEASURED: 0.4}  # of the printed range of time, ±
BF16_CAPABILITY, FLOAT8_CAPABILITY = (8, 0), (8, 9)  # of the first cards with units: Ampere; Ada, then Hopper
BEYOND_RUNS = 0.1  # added to it where a card is calibrated, but on no run like this one

# Shares of the bf16 peak that attention reaches in forward and in backward: means of published TFLOP/s at 2,048, 4,096
# and 8,192 tokens, causal, heads of 128. None is fitted; `make gpu` measures those of a card. docs/calibration.md has
# the figures and where they are from. "flash" is FlashAttention 2, FA3 and FA4 its successors.
AMPERE = {"flash": (0.64, 0.51), "efficient": (0.32, 0.26), "flex": (0.58, 0.43)}
HOPPER = {
    "cudnn": (0.58, 0.47), "flash": (0.32, 0.26), "efficient": (0.16, 0.13), "FA3": (0.57, 0.47), "flex": (0.40, 0.27),
}  # fmt: skip
TURING = {"efficient": (0.32, 0.26)}  # and Volta: FlashAttention begins with Ampere
BLACKWELL = {
    "cudnn": (0.53, 0.44), "flash": (0.14, 0.11), "efficient": (0.07, 0.055), "FA4": (0.51, 0.46), "flex": (0.19, 0.17),
}  # fmt: skip


CUSTOM_NAME = "custom"  # of a card that `--hardware` describes


@dataclass(frozen=True)
class Hardware:
    """The card of one rank, in bytes, FLOP/s and bytes/s.

    `memory` is the total that torch reports. `flops` is the dense bf16 peak (of a card without units for it, that of
    fp16), `flops32` that of float32 without tensor cores. Bandwidths of one rank: `intra_bw` in a ring inside a node,
    `inter_bw` in the network between nodes, `host_bw` of host memory, `pcie_bw` between card and host. `context` is the
    memory that driver and libraries take before torch allocates anything, `communicator` what NCCL takes for each group
    of ranks, `cublas` what cuBLAS gets from torch's allocator: a workspace for the thread of forward, and one for
    autograd's. The `_share`s are the parts
    of the peak that matrix products, attention (by kernel: forward, backward) and other kernels reach. While a
    collective runs, kernels take 1 + `contention` times as long: NCCL uses multiprocessors and memory bandwidth.
    `launch_s` are the host's seconds for a kernel, `hook_s` those for a collective with FSDP2's hooks around it
    (docs/internals/measurements.md, "Host time of a layer"). `late_s` are the seconds by which a collective between
    nodes delays the step, for each of its ranks: all wait for the latest. `basis` says what the figures for time are
    based on.
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
    cublas: int = 2 * 8_519_680  # bytes of `:4096:2:16:8`, torch's default
    product_share: float = 0.6
    attention_share: Mapping[str, Sequence[float]] = field(default_factory=lambda: AMPERE)
    memory_share: float = 0.82
    contention: float = 0.25  # arXiv:2507.03114 measures slowdowns of 19% on average and of up to 40%
    launch_s: float = 6e-6
    hook_s: float = 5e-4
    late_s: float = 4e-6
    basis: str = ESTIMATED
    bf16: bool = True  # it has matrix units for bf16
    float8: bool = True  # and for float8, with twice their peak: from Ada on
    flash: str = "flash"  # the key of `attention_share` for the FlashAttention that computes torch's varlen operator

    def __post_init__(self) -> None:
        shares = {kernel: tuple(pair) for kernel, pair in self.attention_share.items()}  # JSON has lists
        object.__setattr__(self, "attention_share", shares)

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on a CPU."""
        return self.name == "cpu"

    @property
    def spread(self) -> float:
        """The printed range of a time, as a share of it to both sides."""
        return SPREADS[self.basis]

    @property
    def prefers_cudnn(self) -> bool:
        """Whether torch takes cuDNN's attention first: since 2.11 from Hopper on, with cuDNN 9.15 or later."""
        return "cudnn" in self.attention_share

    @property
    def has_flash(self) -> bool:
        """Whether FlashAttention runs on this card: not before Ampere."""
        return "flash" in self.attention_share

    @property
    def faster_flash(self) -> str | None:
        """The key of a successor of FlashAttention 2 that torch's varlen operator could use here, but does not."""
        if self.flash != "flash" or self.name == CUSTOM_NAME:
            return None
        return next((name for name in ("FA3", "FA4") if name in self.attention_share), None)

    def with_attention(self, kernel: str) -> Hardware:
        """Return this card if `kernel`, a key of `attention_share`, computes what flash and cuDNN would.

        A kernel without a rate of its own counts as FlashAttention 2.
        """
        if not self.has_flash:
            return self
        flash = self.attention_share.get(kernel, self.attention_share["flash"])
        others = {key: shares for key, shares in self.attention_share.items() if key != "cudnn"}
        return dataclasses.replace(self, attention_share={**others, "flash": flash})


def dtype_fault(recipe: Recipe, card: str, bf16: bool, float8: bool) -> str | None:
    """Return why a recipe cannot be computed on a card that has units for these dtypes or not; None if it can."""
    if not bf16 and recipe.fsdp.mixed_precision.param_dtype == "bfloat16":
        return f"fsdp.mixed_precision.param_dtype: {card} has no bfloat16 units: use float16 or float32"
    if not float8 and recipe.train.float8:
        return f"train.float8: {card} has no float8 units: remove it"
    return None


def _gpu(name: str, gib: float, *rates: float, **other: Any) -> Hardware:
    """Make a card; `rates` are flops (dense, without sparsity), flops32, memory_bw, intra_bw and inter_bw."""
    flops, flops32, memory_bw, intra, inter = rates
    return Hardware(name, int(gib * GIB), flops, flops32, memory_bw, intra, inter, **other)


_without_float8 = partial(_gpu, float8=False)  # Ampere and before
_before_ampere = partial(_without_float8, bf16=False, attention_share=TURING)
# With Hopper's kernels, or Blackwell's: on both, torch gives cuBLAS 32 MiB.
_hopper = partial(_gpu, attention_share=HOPPER, cublas=2 * 2**25, pcie_bw=45e9)


KNOWN = {
    hardware.name: hardware
    for hardware in (
        _hopper("h100-80gb", 79.1, 989e12, 67e12, 3.35e12, 330e9, 45e9, product_share=0.62, basis=CALIBRATED),
        _hopper("h100-pcie-80gb", 79.1, 756e12, 51e12, 2.0e12, 36e9, 22e9),
        _hopper("h100-nvl-94gb", 93.1, 835e12, 60e12, 3.9e12, 36e9, 22e9),  # NVLink connects pairs only
        _hopper("h200-141gb", 139.8, 989e12, 67e12, 4.8e12, 330e9, 45e9, product_share=0.62, basis=SAME_CHIP),
        _hopper("gh200-96gb", 94.5, 989e12, 67e12, 4.0e12, 330e9, 45e9, pcie_bw=300e9, gpus_per_node=1),
        _without_float8("a100-80gb", 79.1, 312e12, 19.5e12, 2.0e12, 220e9, 22e9, product_share=0.76, basis=CALIBRATED),
        _without_float8("a100-40gb", 39.4, 312e12, 19.5e12, 1.55e12, 220e9, 22e9, product_share=0.76, basis=CALIBRATED),
        _gpu("l40s-48gb", 44.4, 362e12, 91.6e12, 864e9, 18e9, 10e9),
        _gpu("l40-48gb", 44.4, 181e12, 90.5e12, 864e9, 18e9, 10e9),
        _gpu("rtx4090-24gb", 23.6, 165e12, 82.6e12, 1.0e12, 9e9, 3e9, product_share=0.85),
        _hopper(
            "b200-192gb", 178.3, 2.25e15, 75e12, 8.0e12, 650e9, 45e9, product_share=0.65, attention_share=BLACKWELL,
        ),
        _hopper(
            "b300-288gb", 267.0, 2.25e15, 75e12, 8.0e12, 650e9, 90e9, product_share=0.65, attention_share=BLACKWELL,
        ),
        _hopper(  # nodes of four; between them only the network is counted, although NVLink connects a whole rack
            "gb200-186gb", 184.0, 2.5e15, 80e12, 8.0e12, 650e9, 45e9, pcie_bw=150e9, product_share=0.65,
            attention_share=BLACKWELL, gpus_per_node=4,
        ),
        _hopper("h20-96gb", 95.1, 148e12, 44e12, 4.0e12, 330e9, 45e9, product_share=0.85),
        _without_float8("a6000-48gb", 47.5, 155e12, 38.7e12, 768e9, 18e9, 3e9),
        _gpu("rtx-pro-6000-96gb", 95.0, 504e12, 126e12, 1.79e12, 36e9, 10e9, pcie_bw=45e9),
        _gpu("rtx5090-32gb", 31.4, 210e12, 105e12, 1.79e12, 18e9, 3e9, product_share=0.85, pcie_bw=45e9),
        _gpu("rtx4080-16gb", 15.6, 97.5e12, 48.7e12, 717e9, 9e9, 3e9, product_share=0.85),
        _without_float8("rtx3090-24gb", 23.7, 71e12, 35.6e12, 936e9, 9e9, 3e9, product_share=0.85),
        _gpu("l4-24gb", 22.0, 121e12, 30.3e12, 300e9, 18e9, 1.5e9),
        _without_float8("a10-24gb", 22.0, 125e12, 31.2e12, 600e9, 18e9, 3e9),
        _without_float8("a10g-24gb", 22.0, 70e12, 35e12, 600e9, 9e9, 1.5e9),
        _before_ampere("t4-16gb", 14.6, 65e12, 8.1e12, 320e9, 5e9, 1.5e9, pcie_bw=6e9),
        _before_ampere("v100-32gb", 31.7, 125e12, 15.7e12, 900e9, 130e9, 6e9, pcie_bw=12e9),
    )
}  # fmt: skip

CPU = Hardware(  # where it is used, memory and rates are measured
    "cpu", 0, 1e11, 1e11, 6e9, 1.5e9, 1e8, gpus_per_node=2, context=int(0.5 * GIB), communicator=0, cublas=0,
    attention_share={"": (0.3, 0.35)}, launch_s=5e-6, basis=MEASURED,
)  # fmt: skip

CUSTOM = ("memory", "flops", "intra_bw", "inter_bw")

# Words of a name that do not distinguish cards.
FORM_FACTORS = re.compile(r"nvidia|geforce|tesla|quadro|rtx|gpu|sxm\d?|hbm\de?|blackwell|workstation|server|edition")

OTHER_MAKES = re.compile(r"(mi\d{2,3}[axp]?|gaudi\d?|tpu.*|instinct|radeon)")


@dataclass(frozen=True)
class HardwareChoice:
    """The value of `--hardware`: how many cards (None: as the recipe says), which, and a note on an ambiguous name.

    `count` is the number on each of `nodes` nodes, or of all if that is None: then nodes are filled.
    """

    count: int | None
    hardware: Hardware
    note: str | None = None
    nodes: int | None = None

    @property
    def cards(self) -> int | None:
        """The number of all cards; None: as the recipe says."""
        return self.count and self.count * (self.nodes or 1)


def parse_hardware(text: str) -> HardwareChoice:
    """Parse `--hardware`: `[[NODESx]COUNTx]NAME` or `NAME:COUNT`, or `memory=80e9,flops=…,intra_bw=…,inter_bw=…`.

    The usual spellings of a name are accepted: `H100`, `8 × h100 80GB`, `H100-SXM`, `RTX 4090`. Raises RecipeError with
    the known names, and the nearest.
    """
    if "=" in text:
        return HardwareChoice(None, _custom_hardware(text))
    match = re.fullmatch(r"((?:\d+\s*[x×*]\s*)*)(.*?)(?::(\d+))?", text.strip().lower())
    before, name, after = match.groups() if match else ("", text, "")
    numbers = [int(number) for number in re.findall(r"\d+", f"{before}{after or ''}")]
    if not name or len(numbers) > (1 if after else 2) or 0 in numbers:
        expected = (
            "CARD, GPUSxCARD or NODESxGPUSxCARD, with numbers above 0: 8xh100, or 16x8xh100 for 16 nodes of 8 GPUs"
        )
        raise RecipeError(f"--hardware: {text!r} is not known; expected {expected}")
    nodes, count = [None, None, *numbers][-2:]
    # Of one model, and several if the name has no memory size; `h100` is not `h100-pcie`.
    wanted = _name_words(name)
    models = {known: _model_words(known) for known in KNOWN if wanted and wanted == _name_words(known)[: len(wanted)]}
    shortest = min((len(model) for model in models.values()), default=0)
    found = [KNOWN[known] for known, model in models.items() if len(model) == shortest]
    found = [CPU] if name == "cpu" else found
    if not found:
        raise RecipeError(f"--hardware: {_unknown_hardware_message(text, name)}")
    chosen, *others = sorted(found, key=lambda hardware: -hardware.memory)
    sizes = " or ".join(hardware.name for hardware in others)
    note = f"--hardware {text}: taken as {chosen.name}, not {sizes}" if others else None
    if nodes and count:
        chosen = dataclasses.replace(chosen, gpus_per_node=count)
    return HardwareChoice(count, chosen, note, nodes)


def cards_named_in(text: str) -> str:
    """Return the cards that a recipe's text names, as `--hardware` takes them; if it names none, 8 H100s."""
    if given := re.search(r"--hardware[ =](\S+)", text):
        return given[1]
    plain = f"-{re.sub('([^a-z0-9]|rtx|(?<=[0-9])x(?=[a-z]))+', '-', text.lower())}-"
    named = (known for known in KNOWN if f"-{'-'.join(_model_words(known))}-" in plain)
    return next(named, "8xh100-80gb")


def _name_words(name: str) -> list[str]:
    """Return the words of a card's name that tell it from others: `NVIDIA A100-SXM4-40GB` → `a100`, `40`."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\b(\d+)\s*(gb|gib|g)\b", r"\1", name.lower()))
    words = [re.sub(r"^rtx(?=[a\d])", "", word) for word in words]
    return [word for word in words if not FORM_FACTORS.fullmatch(word)]


def _model_words(known: str) -> list[str]:
    """Return the words of a known card's name without its memory size: `h100-pcie-80gb` → `h100`, `pcie`."""
    return _name_words(known.rpartition("-")[0])


def _unknown_hardware_message(text: str, name: str) -> str:
    if any(OTHER_MAKES.fullmatch(word) for word in _name_words(name)):
        return f"{text!r} is not a CUDA device: runs use NVIDIA GPUs (NCCL) or CPUs (gloo)"
    models = {known.partition("-")[0]: known for known in reversed(KNOWN)} | {known: known for known in KNOWN}
    near = get_close_matches("".join(name.split()), models, n=1)
    return (
        f"{text!r} is not known" + (f"; did you mean {models[near[0]]}?" if near else ".")
        + f" Known: {', '.join([*KNOWN, 'cpu'])}, each with optional numbers (8xh100, 16x8xh100: "
        f"16 nodes of 8); or set {','.join(f'{key}=…' for key in CUSTOM)}"
    )  # fmt: skip


def _custom_hardware(text: str) -> Hardware:
    numbers: dict[str, float] = {}
    with contextlib.suppress(ValueError):
        numbers = {key: float(value) for key, _, value in (pair.partition("=") for pair in text.split(","))}
    if numbers.keys() != {*CUSTOM} or not all(0 < number < float("inf") for number in numbers.values()):
        wanted = ",".join(f"{key}=…" for key in CUSTOM)
        raise RecipeError(f"--hardware: {text!r}: expected {wanted}: numbers above 0 (bytes, FLOP/s, bytes/s)")
    near = KNOWN["h100-80gb"]  # the shares, and the figures that were not given, are this card's
    bandwidth = near.memory_bw * numbers["flops"] / near.flops
    return dataclasses.replace(
        near, name=CUSTOM_NAME, basis=ESTIMATED, memory=int(numbers.pop("memory")), memory_bw=bandwidth,
        flops32=near.flops32 * numbers["flops"] / near.flops, **numbers,  # type: ignore[arg-type]
    )  # fmt: skip


def card(name: str, memory: int, flash: str = "flash") -> Hardware | None:
    """Return the hardware of a GPU by the name and memory that torch reports; None for an unknown one.

    `flash` is as in Hardware.
    """
    words = {*_name_words(name)}
    models = {known: model for known in KNOWN if words.issuperset(model := _model_words(known))}
    longest = max((len(model) for model in models.values()), default=0)  # an `H100 PCIe` is not an `H100`
    same = [KNOWN[known] for known, model in models.items() if len(model) == longest]
    nearest = min(same, key=lambda hardware: abs(hardware.memory - memory), default=None)
    return dataclasses.replace(nearest, memory=memory, flash=flash) if nearest else None
