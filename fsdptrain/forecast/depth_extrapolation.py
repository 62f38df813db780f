"""Forecast a stack of equal layers from two shallow copies of the model.

Each further layer adds the same bytes and seconds, so the figures of the copies are extrapolated.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdptrain.forecast.forecaster import Forecast
from fsdptrain.plan.plan import Plan, varied

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SHALLOW_LAYERS = 4  # of the shallower copy: two at each end differ from those between them
DEPTH_STEP = 4  # minimum difference in layers between the two copies, and between the deeper copy and the model
MAX_REACH = 6  # maximum extrapolation, in differences between the copies: fragments are not quite linear in the depth
MAX_ALLOCATED = 0.97  # of torch's share of the card: with more allocated, releasing fragments does not help

UNIFORM_VALUES = {  # settings that can make layers differ, and the value with which they do not
    "first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1, "moe_layer_freq": 1,
    "interleave_moe_layer_step": 1, "sliding_window_pattern": 1, "attn_layer_period": 1, "expert_layer_period": 1,
    "hybrid_override_pattern": "", "num_kv_shared_layers": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Shallow:
    """How to make a model of equal layers shallow: the key with their number, the number, lists with one entry each."""

    key: str
    layers: int
    lists: dict[str, list[Any]]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shallow | None:
        """Return how to cut the model of a configuration; None if its layers differ or there are too few of them."""
        key = next((key for key in LAYER_KEYS if isinstance(config.get(key), int)), None)
        if key is None or config[key] < SHALLOW_LAYERS + 2 * DEPTH_STEP:
            return None
        layers = config[key]
        lists = {name: value for name, value in config.items() if isinstance(value, list) and len(value) == layers}
        unequal = any(config.get(name) not in (uniform, None) for name, uniform in UNIFORM_VALUES.items())
        if unequal or any(entry != entries[0] for entries in lists.values() for entry in entries):
            return None
        return cls(key, layers, lists)

    def depths(self, plan: Plan) -> tuple[int, int] | None:
        """Return the numbers of layers of the two copies; units gathered ahead make the ends longer.

        None if copies cannot stand for the model: it has too few layers, or it is on one GPU, where the strategy
        depends on whether there is room for a copy of all weights (see `fastest_on_one_gpu`).
        """
        topology = plan.topology
        if topology.device == "cuda" and topology.world_size == 1 and not plan.recipe.fsdp.cpu_offload:
            return None
        few = SHALLOW_LAYERS + 2 * plan.recipe.fsdp.forward_prefetch
        more = few + max(DEPTH_STEP, (self.layers - few) // MAX_REACH)
        return (few, more) if few + 2 * DEPTH_STEP <= self.layers else None

    def cut(self, plan: Plan, depth: int) -> Plan:
        """Return the plan with a model of `depth` layers."""
        lists = {name: entries[:depth] for name, entries in self.lists.items()}
        return varied(plan, {"model.config": {**plan.recipe.model.config, **lists, self.key: depth}})


def extrapolate(few: Forecast, more: Forecast, a: int, b: int, layers: int) -> Forecast | None:
    """Extrapolate the forecast of this many equal layers from those of `a` and `b`; None if their moments differ.

    A layer is identified by its distance from the nearer end: its memory is then linear in the depth. Between the ends
    memory rises or falls evenly, so the peak is at one of them. Fields that cannot be extrapolated are left empty.
    """
    below, above = ({_place(m, n, a // 2): x for m, x in f.peaks.items()} for f, n in ((few, a), (more, b)))
    if below.keys() != above.keys() - {None}:
        return None

    def line(x: float, y: float) -> float:
        return x + (y - x) * (layers - a) / (b - a)

    peaks = {_moment_name(place, layers): round(line(need, above[place])) for place, need in below.items() if place}
    moment = max(peaks, key=lambda name: peaks[name])
    linear: dict[str, Any] = {
        name: line(getattr(few, name), getattr(more, name))
        for name in ("flops", "model_flops", "step_s", "compute_s", "communication_s", "exposed_s")
    }
    reserved = max(peaks[moment], round(line(few.reserved_bytes, more.reserved_bytes)))
    available = more.memory_bytes - more.overhead_bytes
    tight = reserved > available and peaks[moment] <= MAX_ALLOCATED * available
    tokens = more.tokens_per_s * more.step_s
    return dataclasses.replace(
        more, **linear, peaks=peaks, moment=moment, peak_bytes=peaks[moment], reserved_bytes=reserved, tight=tight,
        fits=reserved <= available or tight, host_bytes=round(line(few.host_bytes, more.host_bytes)), breakdown={},
        collectives=[], tokens_per_s=tokens / linear["step_s"],
        step_s_range=[line(*both) for both in zip(few.step_s_range, more.step_s_range, strict=True)],
        mfu=line(few.mfu * few.step_s, more.mfu * more.step_s) / linear["step_s"],
    )  # fmt: skip


# A moment's name, split at the number of its layer, which is counted from the nearer end.
_Place = tuple[str, int | None, str]


def _place(moment: str, layers: int, ends: int) -> _Place | None:
    """Return where in a stack of this many layers a moment is; None between the ends."""
    found = re.search(r"\.(\d+)(?=\.|$)", moment)
    if found is None:
        return moment, None, ""
    number = int(found[1])
    if ends <= number < layers - ends:
        return None
    return moment[: found.start(1)], number if number < ends else number - layers, moment[found.end() :]


def _moment_name(place: _Place, layers: int) -> str:
    before, number, after = place
    return before if number is None else f"{before}{number % layers}{after}"
