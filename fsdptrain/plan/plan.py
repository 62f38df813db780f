"""Recipe + machine → `Plan`: all arithmetic of a run, as JSON, the workers' only input.

The plan also sets the order of the data: which samples make up step s, and which rank computes them. All ranks agree on
it without communication.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdptrain import __version__
from fsdptrain.config.adapter import with_adapter_of_folder
from fsdptrain.config.keys import flat, recipe_of, recipe_problems
from fsdptrain.config.mixture import MixtureSource, sources_of, without_names
from fsdptrain.config.objectives import DEFAULT_OBJECTIVE
from fsdptrain.config.optimizers import BYTES, NF4_BYTES, Weight
from fsdptrain.config.paths import (
    DataPath,
    find_all_data,
    find_data,
    is_folder,
    is_hub_data,
    model_name_fault,
    places,
    with_chat_template,
    with_expanded_paths,
)
from fsdptrain.config.reader import LoadedRecipe
from fsdptrain.config.rules import profile_problem
from fsdptrain.config.schema import Adapter, Model, Recipe, node_range
from fsdptrain.errors import Problem, RecipeError, StorageError, Unreadable, first_line, listed, shortened
from fsdptrain.plan.gpus import TESTED
from fsdptrain.plan.topology import Topology
from fsdptrain.processes import threads_for
from fsdptrain.run_folder.files import NOTHING_THERE
from fsdptrain.run_folder.records import json_object, read_text
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.text import counted

# Environment variable of agents and workers: the digest of the plan that they must read.
PLAN_DIGEST = "FSDPTRAIN_PLAN_DIGEST"
ONLY_TEACHER = "FSDPTRAIN_ONLY_TEACHER"  # of workers that end when the outputs of the teacher are in the cache

# The version of how tokens, batches and updates follow from a recipe. Raise it when that changes: caches are then built
# again, and runs of another version cannot be resumed.
LAYOUT = 6

LAYOUT_KEY = "layout"  # of LAYOUT in an identity
HAS_MOMENTUM = ".kept"  # after a key of the recipe in an identity: not 0, so that the optimizer keeps state for it
FEW_STEPS = 20  # below, a run has hardly any steps between warm-up and the end of its schedule


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a model: all, those that are trained, and those of adapters, which are trained too.

    `quantised` are the frozen ones whose numbers are stored in NF4.
    """

    all: int
    trained: int
    adapters: int = 0
    quantised: int = 0

    @classmethod
    def of(cls, weights: Collection[Weight]) -> Counts:
        """Count the parameters of a model."""
        return cls(
            all=sum(weight.numel for weight in weights),
            trained=sum(weight.numel for weight in weights if weight.trained),
            adapters=sum(weight.numel for weight in weights if weight.adapter),
            quantised=sum(weight.numel for weight in weights if weight.quantised),
        )

    def of_frozen(self) -> Counts:
        """Return the numbers without what is trained."""
        return Counts(self.all - self.trained, 0, 0, self.quantised)


HUB_TIMEOUT_S = 5.0  # how long the Hub may take to answer before only the cache is used


@dataclass(frozen=True)
class HubData:
    """A data set on the Hub, as `org/name[:config[:split]][@revision]`."""

    name: str
    config: str = ""
    split: str = ""
    revision: str = ""

    @classmethod
    def of(cls, path: str) -> HubData:
        """Parse a data path."""
        whole, _, revision = path.partition("@")
        name, _, rest = whole.partition(":")
        config, _, split = rest.partition(":")
        return cls(name, config, split, revision)

    def __str__(self) -> str:
        """Return the data path."""
        part = f"{self.name}:{self.config}:{self.split}".rstrip(":")
        return f"{part}@{self.revision}" if self.revision else part

    def at(self, revision: str) -> HubData:
        """Return the same data set at a revision."""
        return dataclasses.replace(self, revision=revision)


@dataclass(frozen=True)
class Plan:
    """All that a worker needs to know.

    There are `replicas` copies of the model, each sharded over `shard_size` ranks. One optimizer step is `accumulation`
    micro-batches on every rank. `threads` are the CPU threads of a rank.
    """

    version: str
    recipe: Recipe
    run_dir: str
    data_paths: list[DataPath]  # of each source
    eval_path: str | None
    topology: Topology
    replicas: int
    shard_size: int
    accumulation: int
    threads: int
    trust_remote_code: bool = False  # run the model's own code; set by the command line, never by a recipe
    libraries: dict[str, str] = field(default_factory=dict)  # library → version: the same on all nodes

    @property
    def rundir(self) -> RunDir:
        """The run folder, and the place of the checkpoints."""
        return RunDir(Path(self.run_dir), self.recipe.checkpoint.path)

    @property
    def sources(self) -> list[MixtureSource]:
        """The sources of the training data, each with the path that was found."""
        found = zip(sources_of(self.recipe.data), self.data_paths, strict=True)
        return [dataclasses.replace(source, data=dataclasses.replace(source.data, path=path)) for source, path in found]

    @property
    def data_path(self) -> DataPath:
        """The path of the training data; of several sources, a list of all their places."""
        if len(self.data_paths) == 1:
            return self.data_paths[0]
        return [place for path in self.data_paths for place in places(path)]

    @property
    def trains_chat(self) -> bool:
        """Whether conversations are trained, or may be, which a chat template renders."""
        return any(source.data.format.renders_chat for source in self.sources)

    @property
    def pretrained(self) -> bool:
        """Whether training starts from weights that are read."""
        return self.recipe.model.id is not None and self.recipe.model.init == "pretrained"

    @property
    def freezes(self) -> bool:
        """Whether only a part of the parameters is trained: adapters, or those of `model.trainable`."""
        return self.recipe.adapter.kind is not None or bool(self.recipe.model.trainable)

    @property
    def compiles(self) -> bool:
        """Whether torch.compile is applied to the decoder layers."""
        wanted = self.recipe.train.compile
        return self.topology.device == "cuda" if wanted == "auto" else bool(wanted)

    @property
    def has_whole_shards(self) -> bool:
        """Whether the shards of a rank are a whole copy, on its device: those in the compute dtype are not gathered."""
        return self.shard_size == 1 and not self.recipe.fsdp.cpu_offload

    @property
    def ranks_of_row(self) -> int:
        """How many consecutive ranks compute parts of the same rows."""
        return self.recipe.parallel.ranks_of_row

    @property
    def stage_ranks(self) -> int:
        """How many consecutive ranks have the same layers: of a pipeline those of one group, else all."""
        return self.topology.world_size // self.recipe.parallel.pipeline

    def place_in_pipeline(self, rank: int) -> int:
        """Return the number of the group of the pipeline in which a rank is, from 0."""
        return rank // self.stage_ranks

    def stages_text(self, rank: int) -> str:
        """Return the stages of a rank for messages: ` (stage 2 of 4)`; "" without a pipeline."""
        parallel = self.recipe.parallel
        own = range(self.place_in_pipeline(rank) + 1, parallel.stages + 1, parallel.pipeline)
        word = "stage" if len(own) == 1 else "stages"
        return f" ({word} {listed(map(str, own))} of {parallel.stages})" if parallel.pipeline > 1 else ""

    @property
    def ranks_text(self) -> str:
        """The ranks as a factor of the batch: `8 ranks`, or `4 groups of 2 ranks` that share rows."""
        of_row = self.ranks_of_row * self.recipe.parallel.pipeline
        groups = counted(self.topology.world_size // of_row, "group" if of_row > 1 else "rank")
        return groups if of_row == 1 else f"{groups} of {of_row} ranks"

    @property
    def division_text(self) -> str:
        """What ranks divide: `, layers divided among 2 ranks, a pipeline of 4 stages`; "" if nothing."""
        parallel = self.recipe.parallel
        found = {"layers": parallel.tensor, "experts": parallel.experts}
        words = [f"{name} divided among {ranks} ranks" for name, ranks in found.items() if ranks > 1]
        words += [f"a pipeline of {parallel.stages} stages"] if parallel.pipeline > 1 else []
        return "".join(f", {each}" for each in words)

    @property
    def groups_of_rows(self) -> int:
        """How many groups of ranks have rows of their own."""
        return self.stage_ranks // self.ranks_of_row

    def group_of_rows(self, rank: int) -> int:
        """Return the number of the rows' group in which a rank is; in a pipeline, every stage has the same rows."""
        return rank % self.stage_ranks // self.ranks_of_row

    @property
    def tokens_of_row(self) -> int:
        """The tokens of a row that a rank computes."""
        return self.recipe.data.seq_len // self.ranks_of_row

    def part_of_row(self, rank: int) -> int:
        """Return the number of the part of a row that a rank computes, from 0."""
        return rank % self.ranks_of_row

    def state_bytes(self, weights: Collection[Weight]) -> int:
        """Return the bytes of the master weights and the optimizer state of these parameters, without frozen ones.

        All ranks of one copy hold them together, and so does a checkpoint.
        """
        master = self.recipe.model.dtype
        trained = [weight for weight in weights if weight.trained]
        parameters = sum(weight.numel for weight in trained)
        return BYTES[master] * parameters + int(self.recipe.optim.state_bytes(trained, master))

    def host_state_bytes(self, weights: Collection[Weight]) -> int:
        """Return the bytes of host memory that parameters, gradients and optimizer state of a rank take there.

        With `fsdp.cpu_offload` torch's allocator pins each shard of parameters and gradients, and rounds it up to a
        power of two (CachingHostAllocator.h: `allocate`).
        """
        recipe, on_cpu = self.recipe, self.topology.device == "cpu"
        if not (on_cpu or recipe.fsdp.cpu_offload):
            return 0
        master, trained = recipe.model.dtype, [weight for weight in weights if weight.trained]
        pieces = []
        for weight in weights:
            numbers = -(-weight.numel // self.shard_size)
            if weight.trained:
                pieces += [BYTES[master] * numbers] * 2
            elif weight.quantised:  # the numbers, and their scales
                pieces += [numbers // 2, round((NF4_BYTES - 1 / 2) * numbers)]
            else:
                pieces.append(BYTES[recipe.fsdp.mixed_precision.param_dtype] * numbers)
        held = sum(pieces if on_cpu else (1 << (size - 1).bit_length() for size in pieces))
        return held + int(recipe.optim.state_bytes(trained, master, self.shard_size))

    def gathered_bytes(self, counts: Counts) -> int:
        """Return the bytes of a number of parameters as FSDP gathers them: in the compute dtype, or quantised.

        Frozen parameters are sharded in the same form.
        """
        compute = BYTES[self.recipe.fsdp.mixed_precision.param_dtype]
        return compute * (counts.all - counts.quantised) + int(NF4_BYTES * counts.quantised)

    def hub_names(self) -> list[str]:
        """Return the names of model, tokenizer and data that are read from the Hub or its cache, not from a folder."""
        model = self.recipe.model
        found = (model.id, model.tokenizer, self.recipe.teacher.id)
        names = [name for name in found if isinstance(name, str) and not is_folder(name)]
        paths = [path for path in (*self.data_paths, self.eval_path) if path and is_hub_data(path)]
        return list(dict.fromkeys([*names, *paths]))

    @property
    def own_tokenizer(self) -> bool:
        """Whether the tokenizer is the model's own, so that both have the same special tokens."""
        model = self.recipe.model
        return model.id is not None and "model_type" not in model.config and model.tokenizer in (None, model.id)

    def on_nodes(self, nnodes: int) -> Plan:
        """Return the plan of the same run on another number of nodes, with as many workers on each."""
        topology = dataclasses.replace(self.topology, nnodes=nnodes)
        return dataclasses.replace(self, topology=topology, **divided_among_ranks(self.recipe, topology))

    def of_attempt(self, start: Mapping[str, Any] | None) -> Plan:
        """Return the plan of the attempt with this `start` event: another only if the number of nodes may change."""
        ranks = start.get("world_size", 0) if start else 0
        return next((each for each in self.on_each_number() if each.topology.world_size == ranks), self)

    def on_each_number(self) -> Iterator[Plan]:
        """Yield the plan for each number of nodes that the run may have: this one, then with fewer and fewer."""
        most = self.topology.nnodes
        yield from map(self.on_nodes, range(most, (self.topology.least_nnodes or most) - 1, -1))

    def total_steps(self, sequences: int) -> int:
        """Return the number of steps on this many sequences: `train.steps`, or enough for `train.epochs` passes."""
        train = self.recipe.train
        if train.steps is not None:
            return train.steps
        assert train.epochs is not None  # a recipe without both is refused
        return max(1, math.ceil(train.epochs * sequences / train.global_batch_size))

    def length_problem(self, sequences: int) -> Problem | None:
        """Return the problem with `train.epochs` passes over this many sequences; None if a step has no more of them.

        Such a step would read the same rows several times, at one learning rate, and call that an epoch. Or with
        `log.profile`, if the run has not as many steps.
        """
        train = self.recipe.train
        if self.recipe.log.profile and (problem := profile_problem(self.recipe, self.total_steps(sequences))):
            return problem
        if train.steps is not None or train.global_batch_size <= sequences:
            return None
        counts = {each.groups_of_rows for each in self.on_each_number()}
        unit = train.micro_batch_size * math.lcm(*counts)
        most = sequences // unit * unit
        way_out = f"use {most} or less"
        if not most:  # less than one micro-batch for every rank
            way_out = "use fewer ranks, a smaller train.micro_batch_size or data.seq_len, or more data"
        message = f"{counted(train.global_batch_size, 'sequence')}, but one epoch has {sequences:,}: {way_out}"
        return Problem(message, "train.global_batch_size")

    def length_notes(self, sequences: int) -> list[str]:
        """Return sentences on a run that reads rows several times a step, or has few steps or evaluations."""
        train, steps, every = self.recipe.train, self.total_steps(sequences), self.recipe.eval.every
        notes, evaluations = [], -(-steps // every) if every else 0
        if evaluations <= (patience := self.recipe.eval.patience or -1):
            notes = [f"eval.patience: {patience} ends no run that has only {counted(evaluations, 'evaluation')}"]
        size, times = train.global_batch_size, train.global_batch_size / sequences
        if train.steps is None and steps < FEW_STEPS:
            few = f"only {counted(steps, 'optimizer step')} in all"
            more = "a smaller train.global_batch_size makes" if size > self.groups_of_rows else "more train.epochs make"
            notes.append(f"{few}: {more} more of them")
        elif train.steps is not None and times > 1:
            notes.append(f"a step of {size} sequences reads the data ({sequences:,} sequences) {times:.1f} times")
        return notes

    def step_positions(self, step: int) -> range:
        """Return the positions in the endless data stream of the global batch of `step` (from 0)."""
        size = self.recipe.train.global_batch_size
        return range(step * size, (step + 1) * size)

    def micro_batches(self, step: int, rank: int) -> list[range]:
        """Return the positions that `rank` computes in `step`, for each micro-batch a range of `micro_batch_size`.

        Of each row it computes a part, if several ranks share it.
        """
        micro, groups = self.recipe.train.micro_batch_size, self.groups_of_rows
        first = step * self.recipe.train.global_batch_size + self.group_of_rows(rank) * micro
        return [range(first + i * groups * micro, first + i * groups * micro + micro) for i in range(self.accumulation)]

    def identity(self) -> dict[str, Any]:
        """Return what a resume must not change: dotted recipe path → value.

        data.revision and data.chat_template are not included: digests of data and tokenizer change with them.
        """
        recipe = flat(self.recipe)
        fixed = {
            path: value
            for path, value in recipe.items()
            if path.startswith(("model.", "adapter.", "data."))
            and path not in ("model.attn_implementation", "data.eval", "data.revision", "data.chat_template")
        }
        held_out = recipe["data.eval"] or {}
        fixed["data.sources"] = without_names(recipe["data.sources"])
        fixed["data.drop_duplicates"] = False  # a key of earlier versions, with which a run had fewer rows
        fixed["data.eval.fraction"] = held_out.get("fraction")  # held-out rows are taken from the training data
        same = {path: recipe[path] for path in ("seed", "train.global_batch_size", "optim.name")}
        if keeps_if := self.recipe.optim.name.traits.keeps_if:
            same[f"optim.{keeps_if}{HAS_MOMENTUM}"] = bool(recipe[f"optim.{keeps_if}"])
        return fixed | same | {LAYOUT_KEY: LAYOUT}

    def shared(self) -> Plan:
        """Return the plan with only what must be equal on all nodes: each has its own cores."""
        return dataclasses.replace(self, threads=0)

    def digest(self) -> str:
        """Return the SHA-256, in hex, of what must be equal on all nodes."""
        return hashlib.sha256(self.shared().to_json().encode()).hexdigest()

    @property
    def versions(self) -> dict[str, str]:
        """The versions that all nodes must share, as the plan has them."""
        return {"fsdptrain": self.version, **self.libraries}

    def to_json(self) -> str:
        """Return the plan as JSON text with sorted keys. Keys of the recipe are as in YAML (`async`)."""
        fields = dataclasses.asdict(self, dict_factory=lambda items: {name.rstrip("_"): value for name, value in items})
        return json.dumps(fields, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that `to_json` wrote.

        Any other text raises: JSON and dataclasses raise many types of errors (see `open_plan`).
        """
        if "${" in text:  # it has another origin: fsdptrain writes none
            raise ValueError("it contains a ${reference}")
        fields = json_object(text)
        plan: Plan = recipe_of(fields, cls)
        if problems := [*recipe_problems(plan.recipe), *plan.topology.problems()]:
            raise RecipeError(problems)
        return plan


def open_plan(path: Path) -> Plan:
    """Read the plan of a run folder from any origin.

    Raises Unreadable when it is not a plan of this version; else as `records.open_regular`.
    """
    try:
        return Plan.from_json(read_text(path))
    except (*NOTHING_THERE, StorageError):
        raise
    except Exception as error:  # see `from_json`
        why = first_line(error).removeprefix(f"{path}: ")
        raise Unreadable(
            f"{path} is not a plan of this version of fsdptrain: {why}; use the version that wrote it, "
            "or replace it with the newest file of plans/ beside it"
        ) from None


def read_plan(path: Path) -> Plan:
    """Read the plan of a run from its folder.

    Raises RecipeError when it is not the plan that the launcher wrote: its digest differs from PLAN_DIGEST.
    """
    plan = open_plan(path)
    wanted = os.environ.get(PLAN_DIGEST)
    if wanted is not None and plan.digest() != wanted:
        raise RecipeError(
            f"{path} is not the plan that this run was started with: another process changed it. Use a separate "
            "output_dir for every run, and run the same command again"
        )
    return plan


def make_plan(written: LoadedRecipe, topology: Topology, trust_remote_code: bool = False) -> Plan:
    """Derive the plan of a recipe on this machine.

    Raises RecipeError for a batch or a shard size that does not divide, or a model folder that does not exist, and
    NoData if data.path matches nothing.
    """
    plan, problems = draft_plan(written, topology, trust_remote_code=trust_remote_code)
    if problems:
        raise RecipeError(problems)
    return plan


def draft_plan(
    written: LoadedRecipe, topology: Topology, elsewhere: bool = False, trust_remote_code: bool = False
) -> tuple[Plan, list[Problem]]:
    """Return the plan and the problems with it, so that a dry run can continue and report all problems at once.

    `elsewhere`: the plan is for other machines, so files may be missing here. Raises NoData as `make_plan` does.
    """
    recipe, problems = with_adapter_of_folder(with_expanded_paths(written.recipe))
    recipe, faults = with_chat_template(recipe, written.folder)
    problems += faults
    problems += layout_problems(recipe, topology)
    problems += [] if elsewhere else model_name_problems(recipe)
    if trust_remote_code:
        if recipe.model.id is None:
            problems.append(Problem("has no effect without model.id", "--trust-remote-code"))
        for section, each in (("model", recipe.model), ("teacher", recipe.teacher)):
            if each.id and (fault := unpinned_code(each.id, each.revision)):
                problems.append(Problem(fault, f"{section}.revision"))
    # Data on the Hub is read at data.revision, as part of its path.
    held_out = (recipe.data.eval or {}).get("path")
    eval_path = find_data(held_out, written.folder, elsewhere, "data.eval.path") if held_out else None
    data_paths = []
    for source in sources_of(recipe.data):
        key, revision = f"data.sources: {source.name}" if recipe.data.sources else "data.path", source.data.revision
        path = find_all_data(source.data.path or "", written.folder, elsewhere, key)
        if revision is not None and is_hub_data(path):
            data = HubData.of(path)
            if eval_path and HubData.of(eval_path).name == data.name:  # another split of the same data set
                eval_path = str(HubData.of(eval_path).at(revision))
            path = str(data.at(revision))
        elif revision not in (None, recipe.data.revision):
            problems.append(Problem(f"{source.name}: revision has no effect: not a Hub data set", "data.sources"))
        data_paths.append(path)
    if recipe.data.revision is not None and not any(map(is_hub_data, data_paths)):
        problems.append(Problem("has no effect: data.path is not a Hub data set", "data.revision"))
    if recipe.data.window is not None and any(map(is_hub_data, data_paths)):
        message = "a Hub data set has no files to read in windows: name local files or URLs in data.path"
        problems.append(Problem(message, "data.window"))
    plan = Plan(
        version=__version__,
        recipe=recipe,
        run_dir=str(Path(recipe.output_dir).absolute()),
        data_paths=data_paths,
        eval_path=eval_path,
        topology=topology,
        **divided_among_ranks(recipe, topology),
        threads=threads_for(len(os.sched_getaffinity(0)) // topology.nproc_per_node),
        trust_remote_code=trust_remote_code,
        libraries={name: version(name) for name in TESTED},
    )
    return plan, [dataclasses.replace(p, where=written.where.get(p.field or "")) for p in problems]


def divided_among_ranks(recipe: Recipe, topology: Topology) -> dict[str, Any]:
    """Return how a step is divided among the ranks: the plan's `replicas`, `shard_size` and `accumulation`."""
    shard_size, world = _shard_size(recipe, topology), topology.world_size // recipe.parallel.pipeline
    return {
        "replicas": world // shard_size,
        "shard_size": shard_size,
        "accumulation": recipe.train.global_batch_size
        * recipe.parallel.ranks_of_row
        // (recipe.train.micro_batch_size * world),
    }


def varied(plan: Plan, overrides: Mapping[str, Any]) -> Plan:
    """Return the plan of the same job on the same ranks, with other values of these keys."""
    recipe = plan.recipe
    for path, value in overrides.items():
        section, name = path.split(".")
        part = dataclasses.replace(getattr(recipe, section), **{name: value})
        recipe = dataclasses.replace(recipe, **{section: part})
    return dataclasses.replace(plan, recipe=recipe, **divided_among_ranks(recipe, plan.topology))


def teacher_plan(plan: Plan) -> Plan:
    """Return the plan that loads the teacher of a run: by the same ranks, sharded alike, in the compute dtype.

    Nothing of it is trained. What the recipe says about the student's architecture is left out.
    """
    recipe = plan.recipe
    dtype: Any = recipe.fsdp.mixed_precision.param_dtype
    teacher = dataclasses.replace(
        recipe,
        model=Model(id=recipe.teacher.id, revision=recipe.teacher.revision, dtype=dtype),
        adapter=Adapter(),
        fsdp=dataclasses.replace(recipe.fsdp, wrap="auto", activation_checkpointing="none", bucket_cap_mb=None),
        parallel=dataclasses.replace(recipe.parallel, experts=1),
        train=dataclasses.replace(recipe.train, objective=DEFAULT_OBJECTIVE, float8=None, router_bias_rate=0.0),
    )
    return dataclasses.replace(plan, recipe=teacher)


MAX_STATE_FRACTION = 0.75  # of a GPU's memory, for weights, state and gradients; activations need the rest


def fastest_on_one_gpu(plan: Plan, weights: Collection[Weight], memory: int) -> Plan:
    """Return the plan that does the same as a FULL_SHARD plan on one GPU of `memory` bytes, in less time.

    One rank gathers from nobody, but FSDP copies weights into the compute dtype whenever it gathers a unit, and its
    gradients in several passes whenever it reduces them. So the weights stay gathered for the step and gradients are
    held, if the state with a copy of all weights in another dtype stays below MAX_STATE_FRACTION. Any other plan is
    returned as it is.
    """
    fsdp = plan.recipe.fsdp
    if plan.topology.device != "cuda" or plan.topology.world_size > 1 or fsdp.cpu_offload:
        return plan
    strategy = fsdp.strategy.fastest_alone
    counts = Counts.of(weights)
    dtypes, frozen = fsdp.mixed_precision, plan.gathered_bytes(counts.of_frozen())
    copied = BYTES[dtypes.param_dtype] * counts.trained if dtypes.param_dtype != plan.recipe.model.dtype else 0
    needed = plan.state_bytes(weights) + frozen + copied + BYTES[dtypes.reduce_dtype] * counts.trained
    if strategy is fsdp.strategy or needed > MAX_STATE_FRACTION * memory:
        return plan
    return varied(plan, {"fsdp.strategy": strategy, "fsdp.accumulation": "hold"})


def layout_problems(recipe: Recipe, topology: Topology) -> list[Problem]:
    """Check that rows, batches and copies of the model divide among the ranks, on every number of nodes of a range.

    `topology` may be that of an attempt, with fewer nodes.
    """
    if topology.least_nnodes is None:
        return _division_problems(recipe, topology)
    if not recipe.launch.max_restarts:
        message = "has no effect without launch.max_restarts: after a node is lost, the others go on by a restart"
        return [Problem(message, "launch.nnodes")]
    least, most = node_range(recipe.launch.nnodes)
    sizes = range(least, most + 1)
    for nnodes in reversed(sizes):
        problems = _division_problems(recipe, dataclasses.replace(topology, nnodes=nnodes))
        if not problems:
            continue
        reason, way_out = problems[0].message.split("; ")
        if problems[0].field == "train.global_batch_size":
            unit = _sequences(recipe, topology.nproc_per_node) * math.lcm(*sizes)
            way_out = f"use a multiple of {unit}, which divides over every number of nodes"
        message = f"{recipe.launch.nnodes}: on {counted(nnodes, 'node')}, {problems[0].field}: {reason}"
        return [Problem(f"{message}; {way_out}, or another range", "launch.nnodes")]
    return []


def _division_problems(recipe: Recipe, topology: Topology) -> list[Problem]:
    train, parallel, every, node = recipe.train, recipe.parallel, topology.world_size, topology.nproc_per_node
    # Each stage of a pipeline is on as many ranks: on whole nodes, or on an equal part of one.
    pipeline, of_every = parallel.pipeline, f"{every} ranks"
    even = [n for n in _divisors(every) if _are_whole(every // n, node)]
    if pipeline not in even:
        return [_refused("parallel.pipeline", pipeline, of_every, even)]
    world = every // pipeline
    node = min(node, world)  # the ranks of a node that have the same layers
    unit, shared, problems = _sequences(recipe, world), parallel.ranks_of_row, list[Problem]()
    if parallel.stages_of_rank > 1 and (batches := train.global_batch_size // (unit or 1)) % pipeline:
        message = (
            f"interleaved needs a multiple of {pipeline} micro-batches a step, as many as parallel.pipeline, "
            f"and there are {batches}; change train.global_batch_size, or use 1f1b"
        )
        return [Problem(message, "parallel.schedule")]
    # The ranks that share a row are on one node, or on several whole ones; those that divide layers are on one.
    of_node, of_world = f"the {node} ranks of a node", f"{world} ranks"
    if node % parallel.tensor:
        problems.append(_refused("parallel.tensor", parallel.tensor, of_node, _divisors(node)))
    elif world % shared or not _are_whole(shared, node):
        product = f"{parallel.context} × parallel.tensor {parallel.tensor}" if parallel.tensor > 1 else shared
        problems.append(_refused("parallel.context", product, of_node, _divisors(node)))
    elif train.global_batch_size % unit:
        below = train.global_batch_size // unit * unit
        near = " or ".join(str(size) for size in (below, below + unit) if size)
        divide = ("context", "tensor", "pipeline")
        keys = [f" / parallel.{key} {n}" for key in divide if (n := getattr(parallel, key)) > 1]
        message = (
            f"{train.global_batch_size} sequences do not divide over {''.join([of_every, *keys])} × micro-batches of "
            f"{train.micro_batch_size}; use {near}"
        )
        problems.append(Problem(message, "train.global_batch_size"))
    size, whole = _shard_size(recipe, topology), [n for n in _divisors(world) if _are_whole(n, node)]
    if world % size:
        problems.append(_refused("fsdp.shard_size", size, of_world, _divisors(world)))
    if parallel.experts not in whole:
        problems.append(_refused("parallel.experts", parallel.experts, of_world, whole))
    return problems


def _divisors(ranks: int) -> list[int]:
    return [n for n in range(1, ranks + 1) if ranks % n == 0]


def _are_whole(ranks: int, node: int) -> bool:
    """Return whether groups of so many consecutive ranks are equal parts of a node, or whole nodes."""
    return node % ranks == 0 or ranks % node == 0


def _refused(key: str, value: object, ranks: str, near: list[int]) -> Problem:
    return Problem(f"{value} does not divide {ranks}; use one of {', '.join(map(str, near))}", key)


def _sequences(recipe: Recipe, ranks: int) -> int:
    return recipe.train.micro_batch_size * ranks // recipe.parallel.ranks_of_row


def _shard_size(recipe: Recipe, topology: Topology) -> int:
    fsdp = recipe.fsdp
    ranks = topology.world_size // recipe.parallel.pipeline  # those that have the same layers
    return fsdp.strategy.ranks_per_copy(fsdp.shard_size, ranks, min(ranks, topology.nproc_per_node))


def model_name_problems(recipe: Recipe) -> list[Problem]:
    """Return a problem for a model or tokenizer that is neither a folder on this machine nor a Hub id."""
    names = {"model.id": recipe.model.id, "model.tokenizer": recipe.model.tokenizer}
    names["teacher.id"] = recipe.teacher.id
    return [
        Problem(fault, path)
        for path, name in names.items()
        if isinstance(name, str) and (fault := model_name_fault(name))
    ]


def unpinned_code(name: str, revision: str | None) -> str | None:
    """Return what is wrong if the code of a model is neither in a local folder nor at a fixed commit of the Hub."""
    if is_folder(name) or re.fullmatch(r"[0-9a-f]{40}", revision or ""):
        return None
    what = f"{shortened(revision)!r} is a branch or a tag, which can change" if revision else "is not set"
    return f"{what}: --trust-remote-code runs code of {shortened(name)}, so set the full commit (40 hex digits)"
