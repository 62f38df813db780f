"""The first lines of a run, shown before anything is imported or started: what is trained, on what, and where."""

from __future__ import annotations

import os
from pathlib import Path

from fsdptrain.checkpoint.resume import EarlierAttempts
from fsdptrain.config.adapter import base_note
from fsdptrain.config.paths import places
from fsdptrain.config.schema import node_range
from fsdptrain.errors import listed
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.text import counted


def heading(plan: Plan, rundir: RunDir, earlier: EarlierAttempts) -> str:
    """Return a labelled line each for run, model, data, ranks, batch, learning rate; what is trained; the Hub."""
    lines = {
        "run": f"{plan.recipe.name}: {_describe_state(rundir, earlier)}, in {short_path(rundir.root)}",
        "model": _describe_model(plan),
        "trains": _describe_trained(plan) if plan.freezes else "",
        "data": _describe_data(plan),
        "ranks": _describe_ranks(plan),
        "batch": _describe_batch(plan),
        "lr": _describe_schedule(plan),
        "note": "; ".join(filter(None, [base_note(plan.recipe), *earlier.faults])),
    }
    if names := plan.hub_names():
        state = "from the cache only (HF_HUB_OFFLINE)" if _offline() else "downloaded if not cached"
        lines["hub"] = f"{', '.join(names)}: {state}"
    return "\n".join(f"{label:<7}{text}" for label, text in lines.items() if text)


def _describe_state(rundir: RunDir, earlier: EarlierAttempts) -> str:
    """Return whether the run is new, resumes, or only lacks its last evaluation or its export."""
    if not earlier.step:
        return "starts from step 0 (no checkpoint yet)" if rundir.metrics.exists() else "new"
    if earlier.trained:
        return f"{earlier.step:,}/{earlier.step:,} steps; evaluation or export is not complete"
    return f"resumes after step {earlier.step}"


def _describe_model(plan: Plan) -> str:
    model, fsdp = plan.recipe.model, plan.recipe.fsdp
    where = model.id and (short_path(Path(model.id)) if Path(model.id).is_absolute() else model.id)
    name = where or model.config.get("model_type", "model")
    start = "pretrained" if plan.pretrained else "from scratch"
    weights = "" if plan.freezes else f"{model.dtype} weights, "
    float8 = f", products in float8 ({plan.recipe.train.float8})" if plan.recipe.train.float8 else ""
    return f"{name}, {start}; {weights}{fsdp.mixed_precision.param_dtype} compute{float8}"


def _describe_trained(plan: Plan) -> str:
    """Return what is trained of a model that is frozen otherwise."""
    adapter, model = plan.recipe.adapter, plan.recipe.model
    names = model.trainable if adapter.kind is None else adapter.target
    what = ", ".join(names) if len(names) <= 3 else f"{len(names)} named layers"
    if adapter.kind is not None:
        what = "all linear layers" if names == "all-linear" else what
        start = f" from {short_path(Path(adapter.from_))}" if adapter.from_ else ""
        what = f"{'DoRA' if adapter.use_dora else 'LoRA'} of rank {adapter.r}{start} on {what}"
        what += f" and {', '.join(adapter.modules_to_save)} as a whole" if adapter.modules_to_save else ""
    frozen = f"in {plan.recipe.fsdp.mixed_precision.param_dtype}"
    if adapter.kind == "qlora":
        frozen += ", linear layers in 4 bits (NF4)"
    return f"{what}, in {model.dtype}; the rest is frozen {frozen}"


def _describe_data(plan: Plan) -> str:
    data = plan.recipe.data
    kinds = listed(dict.fromkeys(source.data.format for source in plan.sources), 3)
    names = [short_path(Path(name)) if Path(name).is_absolute() else name for name in places(plan.data_path)]
    return f"{listed(names, 3)}: {kinds}, sequences of {data.seq_len:,} tokens, packing {data.packing}"


def nodes_text(plan: Plan) -> str:
    """Return two labelled lines for the nodes that have met: how many of those allowed, with which ranks and batch."""
    topology = plan.topology
    met = f"nodes  {topology.nnodes} joined ({nodes_allowed(plan)} allowed): {_describe_topology(plan)}"
    return f"{met}\nbatch  {_describe_factors(plan)}"


def nodes_allowed(plan: Plan) -> str:
    """Return how many nodes the run may have: `4`, or with a range `1 to 4`."""
    topology = plan.topology
    return " to ".join(map(str, node_range(plan.recipe.launch.nnodes))) if topology.is_elastic else str(topology.nnodes)


def _describe_ranks(plan: Plan) -> str:
    topology = plan.topology
    if topology.is_elastic:
        nodes = f"{nodes_allowed(plan)} nodes: those that reach the rendezvous at {topology.endpoint}"
        return f"{topology.nproc_per_node} × {topology.device} a node, {nodes}; {plan.recipe.fsdp.strategy}"
    return _describe_topology(plan)


def _describe_topology(plan: Plan) -> str:
    topology = plan.topology
    nodes = f" on {topology.nnodes} nodes" if topology.nnodes > 1 else ""
    hybrid = 1 < plan.shard_size < topology.world_size
    copies = f", {plan.replicas} copies of {plan.shard_size} shards" if hybrid else ""
    return f"{topology.world_size} × {topology.device}{nodes}{topology.origin}, {plan.recipe.fsdp.strategy}{copies}"


def _describe_batch(plan: Plan) -> str:
    size = plan.recipe.train.global_batch_size
    batch = counted(size, "sequence") if plan.topology.is_elastic else _describe_factors(plan)
    return f"{batch}; {size * plan.recipe.data.seq_len:,} tokens a step"


def _describe_factors(plan: Plan) -> str:
    train = plan.recipe.train
    factors = f"{plan.ranks_text} × {counted(plan.accumulation, 'micro-batch', 'es')}"
    return f"{train.global_batch_size} = {factors} × {train.micro_batch_size}"


def _describe_schedule(plan: Plan) -> str:
    train, schedule = plan.recipe.train, plan.recipe.schedule
    length = counted(train.steps, "step") if train.steps else f"{train.epochs:g} epoch{'s' * (train.epochs != 1)}"
    return f"{plan.recipe.optim.lr:g}, {schedule.name}; {length}"


def short_path(path: Path) -> str:
    """Return a path for display: relative if it is below the working folder, else absolute."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _offline() -> bool:
    """Return whether huggingface_hub will stay offline, without importing it, which takes a second."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")
