"""What a model consists of, unit by unit: parameters, a rank's share of them, what is gathered, what is recomputed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from fsdptrain.config.plan import Plan
from fsdptrain.model.units import Unit, blocks_of, tied
from fsdptrain.text import size

HEADER = ["unit", "class", "×", "parameters", "a rank's shard", "gathered", "after use"]


def model_facts(plan: Plan, model: Any, units: list[Unit]) -> dict[str, Any]:
    """A skeleton and its units in numbers."""
    fsdp, blocks = plan.recipe.fsdp, blocks_of(model)
    kind = fsdp.activation_checkpointing
    every = kind["every"] if isinstance(kind, dict) else 1
    owned = list(owned_by_unit(model, units))
    rows = [unit_facts(plan, *unit) for unit in owned]
    embedding = model.get_input_embeddings().weight
    home = next(name for name, _, params in owned if any(param is embedding for param in params))
    return {
        "architecture": type(model).__name__,
        "attention": plan.recipe.model.attn_implementation,
        "parameters": sum(row["parameters"] for row in rows),
        "shard_bytes": sum(row["shard_bytes"] for row in rows),
        "wrapped": sorted({type(module).__name__ for unit in units for module in unit.modules}),
        "units": grouped(rows),
        "tied": {"tied": tied(model), "weights": shared_names(model), "unit": home if tied(model) else None},
        "dtypes": {
            "master": plan.recipe.model.dtype,
            "compute": fsdp.mixed_precision.param_dtype,
            "reduce": fsdp.mixed_precision.reduce_dtype,
            "buffers": fsdp.mixed_precision.buffer_dtype,
        },
        "blocks": len(blocks),
        "recomputed_blocks": 0 if kind == "none" else len(blocks[::every]),
    }


def owned_by_unit(model: Any, units: list[Unit]) -> Iterator[tuple[str, list[str], list[nn.Parameter]]]:
    """(name, classes, parameters) of every unit, and of the root, which has what no unit claims; tied weights once."""
    taken: set[int] = set()
    for name, modules in [*((unit.name, unit.modules) for unit in units), ("root", [model])]:
        mine = {id(p): p for module in modules for p in module.parameters() if id(p) not in taken}
        taken |= mine.keys()
        yield name, [type(module).__name__ for module in modules], list(mine.values())


def unit_facts(plan: Plan, name: str, classes: list[str], params: list[nn.Parameter]) -> dict[str, Any]:
    """One unit: its size, the largest shard of it, and what a rank holds while it is gathered.

    FSDP2 shards dimension 0 in runs of ceil(rows / ranks), so that rank 0 always has a largest shard.
    """
    compute = getattr(torch, plan.recipe.fsdp.mixed_precision.param_dtype).itemsize
    count = sum(param.numel() for param in params)
    return {
        "unit": name,
        "classes": classes,
        "parameters": count,
        "shard_bytes": sum(_largest_shard(param, plan.shard_size) * param.itemsize for param in params),
        "gathered_bytes": count * compute,
        "stays_gathered": not plan.recipe.fsdp.strategy.reshards or name in ("head", "root"),  # as `shard` has it
    }


def _largest_shard(param: nn.Parameter, ranks: int) -> int:
    rows = param.shape[0] if param.ndim else 1
    return -(-rows // ranks) * (param.numel() // rows)


def grouped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Units that differ by a number in their name alone, as one row with a count; numbers are each unit's."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        key = str({**row, "unit": re.sub(r"\d+", "*", row["unit"])})
        groups.setdefault(key, []).append(row)
    return [
        {**group[0], "unit": _span([row["unit"] for row in group]), "count": len(group)} for group in groups.values()
    ]


def _span(names: list[str]) -> str:
    """`model.layers.0`, `model.layers.1` … → `model.layers.0-79`; with gaps or several numbers `model.layers.*`."""
    numbers = [re.findall(r"\d+", name) for name in names]
    if len(names) == 1:
        return names[0]
    first, last = numbers[0], numbers[-1]
    if len(first) == 1 and int(last[0]) - int(first[0]) == len(names) - 1:
        return re.sub(r"\d+", f"{first[0]}-{last[0]}", names[0])
    return re.sub(r"\d+", "*", names[0])


def shared_names(model: Any) -> list[str]:
    """Every name beyond its first that a parameter goes by: `lm_head.weight = model.embed_tokens.weight`."""
    first: dict[int, str] = {}
    found = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            found.append(f"{name} = {first[id(param)]}")
    return found


def model_lines(facts: dict[str, Any]) -> list[str]:
    """Those facts for the person, but for the table of units."""
    dtypes, units = facts["dtypes"], facts["units"]
    count = sum(unit["count"] for unit in units)
    shared = facts["tied"]
    home = f"tied ({', '.join(shared['weights'])}, in {shared['unit']})" if shared["tied"] else "not tied"
    recomputed = facts["recomputed_blocks"]
    return [
        f"{facts['architecture']}: {facts['parameters']:,} parameters in {count} units ({', '.join(facts['wrapped'])} "
        "and the root)",
        f"embedding and head are {home}",
        f"a rank keeps at most {size(facts['shard_bytes'])} of weights in {dtypes['master']}; compute in "
        f"{dtypes['compute']} with {facts['attention']} attention, gradients summed in {dtypes['reduce']}"
        + (f", buffers in {dtypes['buffers']}" if dtypes["buffers"] else ""),
        f"activations of {recomputed} of {facts['blocks']} blocks are recomputed in the backward pass"
        if recomputed
        else f"activations of all {facts['blocks']} blocks are kept for the backward pass",
    ]


def unit_rows(facts: dict[str, Any]) -> list[list[str]]:
    """The table of units, under `HEADER`."""
    return [
        [
            unit["unit"],
            " + ".join(unit["classes"]),
            f"{unit['count']}",
            f"{unit['parameters']:,}",
            size(unit["shard_bytes"]),
            size(unit["gathered_bytes"]),
            "kept" if unit["stays_gathered"] else "freed",
        ]
        for unit in facts["units"]
        if unit["parameters"]  # the root's own may be none
    ]


def length_facts(lengths: np.ndarray[Any, Any], seq_len: int) -> dict[str, Any]:
    """Rows by length. A bin is {from, to, rows}, both ends in it; bins double, and one of them ends at `seq_len`."""
    longest = int(lengths.max())
    edges = {2**power for power in range(int(lengths.min()).bit_length(), longest.bit_length())} | {seq_len}
    tops = [*sorted(edge for edge in edges if edge < longest), longest]
    counts = np.bincount(np.searchsorted(tops, lengths), minlength=len(tops))
    bins = [
        {"from": low, "to": top, "rows": int(count)}
        for low, top, count in zip([0, *(top + 1 for top in tops)], tops, counts, strict=False)
    ]
    return {
        "bins": bins,
        "longest": longest,
        "median": int(np.median(lengths)),
        "mean": float(lengths.mean()),
        "over_seq_len": int((lengths > seq_len).sum()),
    }
