"""The first lines of a run (what is trained, on what, and where), and the last ones: what is done with a model next.

The first are shown before anything is imported or started; the last are commands and a few lines of Python to paste.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rich.text import Text

from fsdptrain.checkpoint.resume import EarlierAttempts
from fsdptrain.config.adapter import ADAPTER_CONFIG, base_note
from fsdptrain.config.mixture import prompt_source
from fsdptrain.config.paths import places
from fsdptrain.config.schema import node_range
from fsdptrain.errors import listed
from fsdptrain.plan.plan import Plan
from fsdptrain.report.trackers import TrackerState
from fsdptrain.run_folder.records import RunState, Tail
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.page import Page
from fsdptrain.text import counted


def heading(plan: Plan, rundir: RunDir, earlier: EarlierAttempts) -> str:
    """Return a labelled line each for run, model, data, ranks, batch, learning rate; what is trained; the Hub."""
    train, optim, schedule = plan.recipe.train, plan.recipe.optim, plan.recipe.schedule
    batch = counted(train.global_batch_size, "sequence") if plan.topology.is_elastic else _describe_factors(plan)
    length = counted(train.steps, "step") if train.steps else f"{train.epochs:g} epoch{'s' * (train.epochs != 1)}"
    data, kinds = plan.recipe.data, listed(dict.fromkeys(source.data.format for source in plan.sources), 3)
    sources = [short_path(Path(name)) if Path(name).is_absolute() else name for name in places(plan.data_path)]
    lines = {
        "run": f"{plan.recipe.name}: {_describe_state(rundir, earlier)}, in {short_path(rundir.root)}",
        "model": _describe_model(plan),
        "trains": _describe_trained(plan) if plan.freezes else "",
        "data": f"{listed(sources, 3)}: {kinds}, sequences of {data.seq_len:,} tokens, packing {data.packing}",
        "ranks": _describe_ranks(plan),
        "batch": f"{batch}; {train.global_batch_size * plan.recipe.data.seq_len:,} tokens a step",
        "lr": f"{optim.lr:g}, {schedule.name}; {length}",
        "note": "; ".join(filter(None, [base_note(plan.recipe), *earlier.faults])),
    }
    if names := plan.hub_names():
        # huggingface_hub itself takes a second to import.
        offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
        is_offline = offline.upper() in ("1", "ON", "YES", "TRUE")
        state = "from the cache only (HF_HUB_OFFLINE)" if is_offline else "downloaded if not cached"
        lines["hub"] = f"{', '.join(names)}: {state}"
    return "\n".join(f"{label:<7}{text}" for label, text in lines.items() if text)


def _describe_state(rundir: RunDir, earlier: EarlierAttempts) -> str:
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
    hybrid = 1 < plan.shard_size < plan.stage_ranks
    copies = f", {plan.replicas} copies of {plan.shard_size} shards" if hybrid else ""
    sharding = f"{plan.recipe.fsdp.strategy}{copies}{plan.division_text}"
    return f"{topology.world_size} × {topology.device}{nodes}{topology.origin}, {sharding}"


def _describe_factors(plan: Plan) -> str:
    train = plan.recipe.train
    factors = f"{plan.ranks_text} × {counted(plan.accumulation, 'micro-batch', 'es')}"
    return f"{train.global_batch_size} = {factors} × {train.micro_batch_size}"


def short_path(path: Path) -> str:
    """Return a path for display: relative if it is below the working folder, else absolute."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


LENGTH_KEYS = ("train.steps", "train.epochs")
VLLM_RANK = 16  # the largest rank that vLLM serves unless it is given a larger one
QUESTION = "What is 7 times 6?"


def next_steps(plan: Plan, words: Sequence[str], page: Page) -> None:
    """Print what can be pasted after a finished run: commands, and a program that generates from what was exported.

    `words` is the command line of the run behind `fsdptrain`. What needs the exported folder is left out without it.
    """
    rundir, export = plan.rundir, plan.rundir.export
    page.say("")
    for label, command in _commands(plan, words):
        page.command(command, label=f"{label:<8}")
    if rundir.profiles.is_dir():
        files = "traces for ui.perfetto.dev, snapshots for pytorch.org/memory_viz"
        page.say(f"profile {short_path(rundir.profiles)} ({files})")
    if export.is_dir():
        page.say("try it in Python:")
        page.draw(Text("\n".join(_snippet(plan, export))))


def _commands(plan: Plan, words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what each command is for, and its words."""
    rundir, recipe, folder = plan.rundir, plan.recipe, short_path(plan.rundir.export)
    for name in recipe.log.chosen_trackers:
        if shown_by := TrackerState.read(rundir, name).shown_by:
            *command, last = shown_by
            yield "curves", [*command, short_path(Path(last)) if last.startswith("/") else last]
    yield "report", ["fsdptrain", "report", short_path(rundir.root)]
    if rundir.export.is_dir():
        yield "chat", ["fsdptrain", "chat", short_path(rundir.root)]
        yield "eval", ["fsdptrain", "eval", short_path(rundir.root), "--data", "FILE"]
        if serving := _serve(plan, folder):
            yield "serve", serving
        yield "share", ["hf", "upload", "ORG/NAME", folder]
    key, value = _longer(plan)

    def without(replaced: Collection[str]) -> list[str]:
        kept = [word for word in words if word != "--fresh" and word.partition("=")[0] not in replaced]
        return ["fsdptrain", *kept]

    yield "longer", [*without(LENGTH_KEYS if key in LENGTH_KEYS else [key]), f"{key}={value:g}"]
    if plan.pretrained and rundir.export.is_dir():
        start = "adapter.from" if _is_adapter(rundir.export) else "model.id"
        again = {start: folder, "data.path": "MORE_DATA", "output_dir": f"{short_path(rundir.root)}-2"}
        yield "more", [*without(again), *(f"{key}={value}" for key, value in again.items())]
    if not rundir.export.is_dir():
        yield "export", ["fsdptrain", "export", short_path(rundir.root)]


def _longer(plan: Plan) -> tuple[str, float]:
    """Return the key that has ended the run, and twice its value."""
    train, patience = plan.recipe.train, plan.recipe.eval.patience
    if patience and "early_stop" in RunState.of(Tail(plan.rundir.metrics, from_end=False).read()).newest:
        return "eval.patience", 2 * patience
    return ("train.steps", 2 * train.steps) if train.steps else ("train.epochs", 2 * (train.epochs or 1))


def _serve(plan: Plan, folder: str) -> list[str]:
    """Return vLLM's command for an export; none for an adapter that vLLM does not serve."""
    adapter = plan.recipe.adapter
    if not _is_adapter(plan.rundir.export):
        return ["vllm", "serve", folder]
    if adapter.use_dora or adapter.modules_to_save or plan.recipe.model.id is None:
        return []
    rank = ["--max-lora-rank", str(adapter.r)] if adapter.r > VLLM_RANK else []
    modules = ["--enable-lora", "--lora-modules", f"{plan.recipe.name}={folder}"]
    return ["vllm", "serve", short_path(Path(plan.recipe.model.id)), *modules, *rank]


def _snippet(plan: Plan, export: Path) -> list[str]:
    """Return a program that generates from the exported folder; its prompt has the format of the training rows.

    Its lines are short: a terminal that breaks one would break a word.
    """
    if _is_adapter(export):  # peft loads the model that the adapter belongs to, too
        imports = ["from peft import AutoPeftModelForCausalLM as Model"]
    else:
        imports = ["from transformers import AutoModelForCausalLM as Model"]
    trust = ", trust_remote_code=True" if plan.trust_remote_code else ""
    data = prompt_source(plan.recipe.data).data
    if data.format.is_chat:
        settings = {"add_generation_prompt": True, **data.chat_template_kwargs, "return_dict": True}
        encode = [
            "inputs = tokenizer.apply_chat_template(",
            f'    [{{"role": "user", "content": "{QUESTION}"}}],',
            *(f"    {name}={value!r}," for name, value in settings.items()),
            '    return_tensors="pt",',
            ")",
        ]
    else:
        text = QUESTION + data.separator if data.format.has_prompt or data.format.answers else "Once upon a time"
        encode = [f"text = {json.dumps(text, ensure_ascii=False)}", 'inputs = tokenizer(text, return_tensors="pt")']
    return [
        *imports,
        "from transformers import AutoTokenizer",
        f"folder = {json.dumps(str(export), ensure_ascii=False)}",
        f"model = Model.from_pretrained(folder{trust})",
        f"tokenizer = AutoTokenizer.from_pretrained(folder{trust})",
        *encode,
        'ids = inputs["input_ids"]',
        "output = model.generate(input_ids=ids, max_new_tokens=64)",
        "print(tokenizer.decode(output[0]))",
    ]


def _is_adapter(export: Path) -> bool:
    return (export / ADAPTER_CONFIG).is_file()
