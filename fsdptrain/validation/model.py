"""The model level of a dry run: its units, what a rank keeps, gathers and recomputes, and the disk space."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_kernels_available, is_torch_flex_attn_available

from fsdptrain.checkpoint.nodes import disk_problems, disk_space, disk_summary, host_problems, host_space, host_summary
from fsdptrain.config.adapter import base_note
from fsdptrain.config.optimizers import BYTES, NF4_BYTES, Weight
from fsdptrain.data.teacher import bytes_of_label
from fsdptrain.errors import DoesNotFit
from fsdptrain.model.adapters import quantised_ids, saved_tensors, without_adapters
from fsdptrain.model.attention import card_obstacle
from fsdptrain.model.pipeline import layers_of_stages
from fsdptrain.model.units import (
    Unit,
    base_name,
    bytes_in_host,
    decoder_layers,
    expert_count,
    model_flops,
    tied,
    weights_of,
)  # fmt: skip
from fsdptrain.parallel.shard import divide
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.plan import Counts, Plan, varied
from fsdptrain.text import size
from fsdptrain.train import preflight
from fsdptrain.validation.findings import Findings

HEADING = "Model"
UNIT_HEADER = ["unit", "class", "×", "parameters", "a rank's shard", "gathered", "after use"]


def check_model(
    plan: Plan, vocab_size: int | None, steps: int | None, findings: Findings, hardware: Hardware | None = None
) -> PreTrainedConfig:
    """Build the model without its weights, divide it into units as the run will, and compute the disk space.

    The attention kernel is that of `hardware`, by default of this machine. Returns the transformers configuration of
    the model.
    """
    findings.send_busy("building the model")
    if not attention_available(plan.recipe.model.attn_implementation):  # already a problem of the machine level
        plan = varied(plan, {"model.attn_implementation": "auto"})
    ready = preflight.prepare_model(plan, vocab_size, hardware.prefers_cudnn if hardware else None)
    for each in preflight.model_notes(ready):
        findings.add_note(each)
    if plan.recipe.adapter.from_ is not None:
        with findings.continue_on_error():
            for _ in saved_tensors(ready.trained, Path(plan.recipe.adapter.from_)):
                pass  # reading them finds values that are not finite
    if note := base_note(plan.recipe):
        findings.add_note(note)
    model = describe_model(ready.plan, ready.trained, ready.units)
    findings.add_values("model", model, HEADING, *_model_lines(model))
    rows = [
        [
            unit["unit"], " + ".join(unit["classes"]), f"{unit['count']}", f"{unit['parameters']:,}",
            size(unit["shard_bytes"]), size(unit["gathered_bytes"]), "kept" if unit["stays_gathered"] else "freed",
        ]
        for unit in model["units"]
        if unit["parameters"]  # the root may have none
    ]  # fmt: skip
    findings.add_item(HEADING, "table", header=UNIT_HEADER, rows=rows)
    here = " here" if findings.elsewhere else ""  # what is free is that of this machine
    disk = disk_space(plan, ready.weights, steps)
    findings.add_values("model", {"disk": disk}, "Disk", disk_summary(disk) + here)
    host = host_space(plan, ready.weights, steps, bytes_in_host(ready.plan, ready.trained))
    findings.add_values("model", {"host": host}, "Host memory of a node", host_summary(host) + here)
    for error in (*disk_problems(plan, disk), *([] if findings.elsewhere else host_problems(host))):
        findings.add_problem(error, this_machine_only=True)
    return ready.config


def check_teacher(plan: Plan, vocab_size: int | None, memory: int, findings: Findings) -> None:
    """Build the teacher without weights, if there is one: what a rank with `memory` holds of it, and its cache."""
    ready = preflight.prepare_teacher(plan, vocab_size)
    if ready is None:
        return
    model = describe_model(ready.plan, ready.trained, ready.units)
    held = model["shard_bytes"] + 2 * max(unit["gathered_bytes"] for unit in model["units"])  # one ahead
    labels = findings.levels.get("data", {}).get("label_tokens", 0)
    cached = labels * bytes_of_label(plan.recipe.teacher.top_k)
    forward = model_flops(ready.bare, 1, plan.recipe.data.seq_len) / 3
    values = {"rank_bytes": held, "cache_bytes": cached, "forward_flops_per_token": forward}
    findings.add_values(
        "teacher", values | {"parameters": model["parameters"]}, "Teacher",
        f"{model['architecture']}: {model['parameters']:,} parameters; before step 1 a rank holds {size(held)} of it",
        f"its cache on each node: {size(cached)} for {labels:,} label tokens (teacher.top_k)",
    )  # fmt: skip
    if 0 < memory < held:
        way_out = "use more ranks, or a smaller teacher"
        findings.add_problem(DoesNotFit(f"teacher.id: {size(held)} of {size(memory)} on each rank: {way_out}"))


def attention_available(kernel: str) -> bool:
    """Return whether an attention kernel can be imported here, by transformers' checks, and runs on these GPUs."""
    if kernel == "flash_attention_2":  # transformers also takes it from the `kernels` package
        there = is_flash_attn_2_available() or (torch.cuda.is_available() and is_kernels_available())
        return bool(there and not card_obstacle())
    return bool(kernel != "flex_attention" or is_torch_flex_attn_available())


def describe_model(plan: Plan, model: PreTrainedModel, units: list[Unit]) -> dict[str, Any]:
    """Return the numbers of a skeleton and of its units."""
    fsdp, layers = plan.recipe.fsdp, decoder_layers(model)
    how = fsdp.recomputation
    kept = ["attention"] if how.keep_attention else []
    if how.offload:
        kept.append("in host memory")
    owned = list(parameters_by_unit(model, units))
    packed = quantised_ids(model, plan.recipe)
    own = own_parts(plan, model)
    rows = [_describe_unit(plan, *unit, packed, own) for unit in owned]
    weights = weights_of(model, packed).values()
    first: dict[int, str] = {}
    shared = []  # further names of tied parameters
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            shared.append(f"{name} = {first[id(param)]}")
    count, embedding = Counts.of(weights), model.get_input_embeddings().weight
    embedding_unit = next(name for name, _, params in owned if any(param is embedding for param in params))
    return {
        "architecture": type(model).__name__,
        "attention": plan.recipe.model.attn_implementation,
        "experts": expert_count(model.config),
        "parameters": count.all,
        "trainable_parameters": count.trained,
        "adapter_parameters": count.adapters,
        "quantised_parameters": count.quantised,
        "saved_bytes": _saved_by_freezing(plan, weights),
        "shard_bytes": _largest_shards(plan, model, rows),
        "wrapped": sorted({type(module).__name__ for unit in units for module in unit.modules}),
        "units": _grouped(rows),
        "tied": {"tied": tied(model), "weights": shared, "unit": embedding_unit if tied(model) else None},
        "dtypes": {
            "master": plan.recipe.model.dtype,
            "compute": fsdp.mixed_precision.param_dtype,
            "reduce": fsdp.mixed_precision.reduce_dtype,
            "buffers": fsdp.mixed_precision.buffer_dtype,
        },
        "blocks": len(layers),
        "kept": kept,
        "recomputed_blocks": 0 if how.kind == "none" else len(layers[:: how.every]),
    }


def own_parts(plan: Plan, model: PreTrainedModel) -> dict[int, tuple[tuple[int, ...], int]]:
    """Return the shape that a rank has of each parameter of a skeleton, and over how many ranks that is sharded."""
    own: dict[int, tuple[tuple[int, ...], int]] = {id(p): (tuple(p.shape), plan.shard_size) for p in model.parameters()}
    if plan.division_text:
        with without_adapters(model):
            twin: Any = copy.deepcopy(model)
        divide(twin, plan.recipe, 0)
        names = {base_name(name): id(param) for name, param in model.named_parameters()}
        for name, part in twin.parts.items():
            own[names[name]] = tuple(twin.get_parameter(name).shape), max(1, plan.shard_size // part.ranks)
    return own


def _saved_by_freezing(plan: Plan, weights: Collection[Weight]) -> int:
    """Return the bytes by which frozen parameters are smaller than trained ones with state and gradients."""
    frozen = [dataclasses.replace(weight, trained=True) for weight in weights if not weight.trained]
    gradients = BYTES[plan.recipe.model.dtype] * sum(weight.numel for weight in frozen)
    return plan.state_bytes(frozen) + gradients - plan.gathered_bytes(Counts.of(weights).of_frozen())


def parameters_by_unit(model: nn.Module, units: list[Unit]) -> Iterator[tuple[str, list[str], list[nn.Parameter]]]:
    """Yield (name, classes, parameters) of each unit and of the root, which has the rest. A tied weight occurs once."""
    seen: set[int] = set()
    for name, modules in [*((unit.name, unit.modules) for unit in units), ("root", [model])]:
        params = {id(p): p for module in modules for p in module.parameters() if id(p) not in seen}
        seen |= params.keys()
        yield name, list(dict.fromkeys(type(module).__name__ for module in modules)), list(params.values())


def _describe_unit(
    plan: Plan, name: str, classes: list[str], params: list[nn.Parameter], packed: Collection[int],
    own: dict[int, tuple[tuple[int, ...], int]],
) -> dict[str, Any]:  # fmt: skip
    """Return what is shown of a unit: its parameters, its largest shard, and the bytes that are gathered.

    `packed` are the ids of parameters that will be quantised, `own` are the `own_parts`. FSDP2 shards dimension 0 in
    chunks of ceil(rows / ranks) rows, so rank 0 always has a largest shard.
    """
    compute = getattr(torch, plan.recipe.fsdp.mixed_precision.param_dtype)
    shards = gathered = 0.0
    for param in params:
        (rows, *row), ranks = own[id(param)][0] or (1,), own[id(param)][1]
        numbers, is_packed = math.prod(row), id(param) in packed
        shards += -(-rows // ranks) * numbers * (NF4_BYTES if is_packed else param.itemsize)
        if not (plan.has_whole_shards and param.dtype == compute):
            gathered += rows * numbers * (NF4_BYTES if is_packed else compute.itemsize)
    return {
        "unit": name,
        "classes": classes,
        "parameters": sum(param.numel() for param in params),
        "shard_bytes": int(shards),
        "gathered_bytes": int(gathered),
        "stays_gathered": not plan.recipe.fsdp.strategy.reshards or name in ("head", "root"),  # as in `parallel.shard`
    }


def _largest_shards(plan: Plan, model: PreTrainedModel, rows: list[dict[str, Any]]) -> int:
    """Return the bytes of all shards of a rank: of a pipeline, of the one with the most. Rows are in forward order."""
    parallel, sizes = plan.recipe.parallel, [row["shard_bytes"] for row in rows]
    if parallel.pipeline == 1:
        return sum(sizes)
    layers = {name for name, _ in decoder_layers(model)}
    of_layers = [number for number, row in enumerate(rows) if row["unit"] in layers]
    first, last = sum(sizes[: of_layers[0]]), sum(sizes[of_layers[-1] + 1 :])
    stages = [sum(sizes[of_layers[number]] for number in each) for each in layers_of_stages(model, parallel)]
    stages[0] += first + last * tied(model)  # both ends have a weight that is tied
    stages[-1] += last + first * tied(model)
    return max(sum(stages[place :: parallel.pipeline]) for place in range(parallel.pipeline))


def _grouped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row, with a count, for units that differ only by a number in their names; numbers are per unit."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        key = str({**row, "unit": re.sub(r"\d+", "*", row["unit"])})
        groups.setdefault(key, []).append(row)
    return [
        {**group[0], "unit": _name_range([row["unit"] for row in group]), "count": len(group)}
        for group in groups.values()
    ]


def _name_range(names: list[str]) -> str:
    """Return `model.layers.0-79` for `model.layers.0`, `model.layers.1` …; `model.layers.*` if there are gaps."""
    numbers = [re.findall(r"\d+", name) for name in names]
    if len(names) == 1:
        return names[0]
    first, last = numbers[0], numbers[-1]
    if len(first) == 1 and int(last[0]) - int(first[0]) == len(names) - 1:
        return re.sub(r"\d+", f"{first[0]}-{last[0]}", names[0])
    return re.sub(r"\d+", "*", names[0])


def _model_lines(model: dict[str, Any]) -> list[str]:
    dtypes, units = model["dtypes"], model["units"]
    count = sum(unit["count"] for unit in units)
    shared = model["tied"]
    tie = f"tied ({', '.join(shared['weights'])}, in {shared['unit']})" if shared["tied"] else "not tied"
    recomputed, kept = model["recomputed_blocks"], model["kept"]
    trained, share = model["trainable_parameters"], model["trainable_parameters"] / model["parameters"]
    master = f" in {dtypes['master']}" if share == 1 else ""
    packed = model["quantised_parameters"]
    nf4 = f" ({packed:,} of them in 4 bits, NF4)" if packed else ""
    frozen = [
        f"{trained:,} parameters are trained ({share:.2%}), {model['parameters'] - trained:,} are frozen in "
        f"{dtypes['compute']}{nf4}, which saves {size(model['saved_bytes'])} of master weights, gradients and "
        "optimizer state over all ranks of a copy"
    ]
    return [
        f"{model['architecture']}: {model['parameters']:,} parameters in {count} units ({', '.join(model['wrapped'])} "
        "and the root)",
        *(frozen if share < 1 else []),
        f"embedding and head are {tie}",
        f"a rank holds at most {size(model['shard_bytes'])} of weights{master}; compute in "
        f"{dtypes['compute']} with {model['attention']} attention, gradients summed in {dtypes['reduce']}"
        + (f", buffers in {dtypes['buffers']}" if dtypes["buffers"] else ""),
        f"activations of {recomputed} of {model['blocks']} layers are recomputed in the backward pass"
        + (", but not attention" if "attention" in kept else "")
        + ("; what they keep waits in host memory" if "in host memory" in kept else "")
        if recomputed
        else f"activations of all {model['blocks']} layers are kept for the backward pass",
    ]
