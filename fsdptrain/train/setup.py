"""The stages of setting up one rank, in the order in which `Trainer.set_up` calls them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers

from fsdptrain.checkpoint.nodes import (
    DATA,
    FOLDER,
    MODEL,
    PLAN,
    disk_problems,
    disk_space,
    file_to_see,
    host_problems,
    host_space,
    sees,
    shared_folder,
)
from fsdptrain.checkpoint.resume import (
    BASE_KEY,
    CODE_KEY,
    DATA_KEY,
    HELD_OUT_KEY,
    RESOLVED,
    TOKENIZER_KEY,
    TOKENS_KEY,
    changes_since,
    recipe_key,
    too_few_steps,
)
from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.config.optimizers import Weight
from fsdptrain.data.corpus import Corpus, Mixture, Stream, with_each
from fsdptrain.data.encode import evaluated_prompts
from fsdptrain.data.hub import file_checksums, files_digest, go_offline_if_unreachable, safetensors_files, stamps_of
from fsdptrain.data.prepare import open_stream, reading_notes, row_notes
from fsdptrain.data.tokenizer import own_code_note, tokenizer_digest, vocabulary_size
from fsdptrain.data.windows import WindowStream, date_note, pin_commits, pin_date, windows_note
from fsdptrain.errors import FsdptrainError, RecipeError, Stopped, WorkerLost, listed
from fsdptrain.failures.translate import exit_from_thread
from fsdptrain.failures.watchdog import Heartbeat, Watchdog
from fsdptrain.model import attention, varlen
from fsdptrain.model.adapters import start_adapters
from fsdptrain.model.config import longrope_threshold, own_code, resolved_values, save_assets
from fsdptrain.model.nf4 import RowQuantizer
from fsdptrain.model.skeleton import draw_weights
from fsdptrain.model.units import bytes_in_host, model_flops
from fsdptrain.model.weights import allocate, read_weights
from fsdptrain.parallel.world import World
from fsdptrain.plan.gpus import why_unseen
from fsdptrain.plan.hardware import BF16_CAPABILITY, FLOAT8_CAPABILITY, dtype_fault
from fsdptrain.plan.plan import Counts, Plan
from fsdptrain.plan.topology import Topology
from fsdptrain.processes import StopRequest
from fsdptrain.run_folder.events import Reporter
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.text import counted, ranks_text
from fsdptrain.train.optim import length_note, make_optimizer, set_step, start_state, warmup_note
from fsdptrain.train.preflight import (
    PreparedModel,
    check_vocabulary,
    errors_of_teacher,
    model_notes,
    prepare_model,
    prepare_teacher,
    prepare_tokenizer_and_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fsdptrain.parallel.shard import ShardedModel

KEPT_ATTEMPTS = 2  # of which the folder is kept: this one, and the one before, which may have hung


@dataclass(frozen=True)
class Session:
    """What the process of a rank starts with: plan, reporter, requests to stop, and watchdog.

    `initial_plan` is the plan as the launcher wrote it. `Inputs` complete it: after them it is used only for the
    identity and the digest in checkpoints.
    """

    initial_plan: Plan
    reporter: Reporter
    stop: StopRequest
    watchdog: Watchdog
    join: StopRequest = field(default_factory=StopRequest)  # another node waits to join

    @property
    def rundir(self) -> RunDir:
        """The run folder."""
        return self.initial_plan.rundir

    def progress(self, stage: str, done: int, total: int) -> None:
        """Report how far a stage of the set-up is. Raises Stopped after a stop signal."""
        if dist.is_initialized():
            self.watchdog.reset()
        if self.stop.count:
            raise Stopped(f"stopped by {self.stop.by} before the first step; nothing was lost")
        self.reporter.progress(stage, done, total)


@dataclass(frozen=True)
class Inputs:
    """The checked model without weights, its tokenizer, and the data: `held_out` are sequence numbers of `eval_corpus`.

    `stamps` are those of the files of weights, if some weights are frozen; `day` is what the chat template renders;
    `prompts` are the tokens of `eval.prompts`; `cores` are those that this process had before it was bound to a GPU;
    `teacher` is the model that is learned from, if there is one.
    """

    prepared: PreparedModel
    tokenizer: PreTrainedTokenizerBase
    stream: Stream
    held_out: list[int]
    eval_corpus: Corpus | Mixture
    stamps: list[tuple[str, int, int]] | None = None
    day: date | None = None
    prompts: list[list[int]] = field(default_factory=list)
    cores: list[int] = field(default_factory=list)
    teacher: PreparedModel | None = None

    def with_each_corpus(self, change: Callable[[Corpus], Corpus]) -> Inputs:
        """Return the inputs with each corpus changed, those that are trained and those that are held out."""
        stream = dataclasses.replace(self.stream, corpus=with_each(self.stream.corpus, change))
        held_out = with_each(self.eval_corpus, change) if self.held_out else stream.corpus
        return dataclasses.replace(self, stream=stream, eval_corpus=held_out)

    @property
    def plan(self) -> Plan:
        """The plan that is carried out: with the commits of the data and an attention kernel, suited to one GPU."""
        return self.prepared.plan

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        """What the recipe's names stand for: all ranks must find the same, and so must a resume (see `manifest`)."""
        prepared, corpus = self.prepared, self.stream.corpus
        content = {
            DATA_KEY: corpus.fingerprint, TOKENS_KEY: corpus.digest, TOKENIZER_KEY: tokenizer_digest(self.tokenizer),
            CODE_KEY: own_code(prepared.bare),
            **{f"{RESOLVED}{name}": value for name, value in resolved_values(prepared.config).items()},
        }  # fmt: skip
        return content | ({HELD_OUT_KEY: self.eval_corpus.fingerprint} if self.plan.eval_path else {})


@dataclass(frozen=True)
class Sizes:
    """Sizes that depend on plan, model and data together."""

    weights: list[Weight]
    counts: Counts
    total_steps: int
    state_bytes: int  # of this rank's part of a checkpoint
    flops_per_step: float
    bytes_in_host: int = 0  # in which the layers of this rank keep what they need for backward

    @classmethod
    def of(cls, inputs: Inputs) -> Sizes:
        """Compute the sizes of a run."""
        plan, recipe, prepared = inputs.plan, inputs.plan.recipe, inputs.prepared
        positions = recipe.train.global_batch_size * recipe.data.seq_len
        weights = prepared.weights
        return cls(
            weights=weights,
            counts=Counts.of(weights),
            total_steps=plan.total_steps(len(inputs.stream)),
            state_bytes=plan.state_bytes(weights) // (plan.shard_size * recipe.parallel.pipeline),
            flops_per_step=model_flops(prepared.trained, positions, inputs.stream.corpus.document()),
            bytes_in_host=bytes_in_host(plan, prepared.trained),
        )


def prepare_process(session: Session) -> None:
    """Check the devices, choose deterministic kernels if the recipe asks, and go offline if the Hub does not answer.

    Raises RecipeError if torch sees other GPUs than the plan.
    """
    if fault := gpu_fault(session.initial_plan.topology, torch.cuda.device_count(), os.environ):
        raise RecipeError(fault)
    if session.initial_plan.recipe.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    go_offline_if_unreachable(session.initial_plan, session.progress)


def gpu_fault(topology: Topology, gpus: int, env: Mapping[str, str]) -> str | None:
    """Return why a plan cannot run with the GPUs that torch sees: fewer than workers, or any if it is for the CPU."""
    if torch.version.hip and gpus:
        return (
            f"torch {torch.__version__} is a build for AMD GPUs (ROCm), which fsdptrain does not support: train on "
            "NVIDIA GPUs with torch's build for CUDA, or on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
        )
    workers = topology.nproc_per_node
    if topology.joined and gpus == 1:  # Slurm and MPI may show each worker its own GPU only
        workers = 1
    value = env.get("CUDA_VISIBLE_DEVICES")
    setting = "" if value is None else f" with CUDA_VISIBLE_DEVICES={value}"
    if topology.device == "cpu" and gpus:
        return (
            f"this plan is for the CPU, because no GPU was found in /dev, /proc or by nvidia-smi, but torch sees "
            f"{counted(gpus, 'GPU')}{setting}: set CUDA_VISIBLE_DEVICES={','.join(map(str, range(gpus)))} to train on "
            f"{'it' if gpus == 1 else 'them'}, or CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    if topology.device == "cuda" and gpus < workers:
        way_out = "set CUDA_VISIBLE_DEVICES to the GPUs of nvidia-smi -L"
        return (
            f"launch.nproc_per_node: {counted(workers, 'worker')}, but torch {torch.__version__} sees "
            f"{counted(gpus, 'GPU')}{setting}: {way_out if gpus else why_unseen(torch.version.cuda, env)}; or "
            "train on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
        )
    return None


def join_ranks(session: Session) -> tuple[Inputs, World]:
    """Return what `prepare_inputs` returns, and the process group; from now on the watchdog watches."""
    prepare_process(session)
    # Data comes before the process group: tokenising may take longer than a collective is allowed to. Until all
    # ranks have joined it, only the heartbeat notices that another node is lost.
    session.progress("checking the model", 0, 0)
    with Heartbeat(session.initial_plan, lambda reason: exit_from_thread(session.initial_plan, WorkerLost(reason))):
        inputs = prepare_inputs(session)
        session.progress("building the model", 0, 0)
        world = World.start(inputs.plan, session.stop)
    session.watchdog.begin(world.attempt)
    return inputs, world


def prepare_inputs(session: Session) -> Inputs:
    """Check the model, tokenise and pack the data, and download the weights.

    Raises RecipeError or DataError where the model or the data is wrong.
    """
    progress = session.progress
    # All ranks, and all attempts of a run, read the same commit of a data set on the Hub.
    plan = pin_commits(session.initial_plan, session.rundir)
    # The model is checked before the data: this takes seconds, tokenising may take hours.
    with session.stop.obeyed_at_once():  # the constructors of a model report no progress
        tokenizer, prepared = prepare_tokenizer_and_model(plan, progress)
        check_vocabulary(plan, tokenizer)
        teacher = prepare_teacher(plan, vocabulary_size(tokenizer))
    plan, configs = prepared.plan, [each.config for each in (prepared, teacher) if each]
    count_padding = all(longrope_threshold(config, plan.recipe.data.seq_len) is None for config in configs)
    day = pin_date(plan, tokenizer, session.rundir)
    prompts = evaluated_prompts(plan.recipe, tokenizer, day)
    stream, held_out, eval_corpus = open_stream(plan, tokenizer, progress, count_padding, day)
    if problem := plan.length_problem(len(stream)):
        raise RecipeError([problem])
    if plan.pretrained:
        progress(f"looking for the weights of {plan.recipe.model.id}", 0, 0)
        files = safetensors_files(plan)  # downloads them now: later the other ranks would wait in a collective
        if not Path(str(plan.recipe.model.id)).is_dir():  # they were not there before
            prepared = prepare_model(plan, vocabulary_size(tokenizer), files=files)
    if teacher:
        progress(f"looking for the weights of {plan.recipe.teacher.id}", 0, 0)
        with errors_of_teacher():
            safetensors_files(teacher.plan)
    stamps = stamps_of(safetensors_files(plan)) if plan.freezes or prepared.carried else None
    return Inputs(
        prepared, tokenizer, stream, held_out, eval_corpus, stamps, day, prompts, sorted(os.sched_getaffinity(0)),
        teacher,
    )  # fmt: skip


def use_best_flash(session: Session, inputs: Inputs, world: World) -> str | None:
    """Use the fastest FlashAttention that is installed and computes the model's attention. Return a note on it.

    Ranks with different kernels would round differently and wait for the slowest: unless all have found the same one,
    all use FlashAttention 2. Collective.
    """
    bare = inputs.prepared.bare
    if world.device.type != "cuda" or not varlen.used_by(bare):
        return None
    session.watchdog.reset()
    session.reporter.progress("trying the attention kernels", 0, 0)
    note = attention.activate_best_flash(bare, world.device, torch.cuda.get_device_capability(world.device)[0])
    found = world.gather_objects(attention.active_flash())
    if len(set(found)) > 1:
        attention.restore_flash()
        names = ", ".join(
            f"rank {rank}: {attention.FLASH_NAMES.get(name, 'FlashAttention 2')}" for rank, name in enumerate(found)
        )
        note = (
            f"attention is computed by FlashAttention 2, because not every rank can use the same ({names}; see logs/)"
        )
    if note:
        print(note, flush=True)
    return note


def check_cards(plan: Plan, world: World) -> None:
    """Raise RecipeError on every rank if a card cannot compute in the recipe's dtypes; collective."""
    if world.device.type != "cuda":
        return
    capability, name = torch.cuda.get_device_capability(world.device), torch.cuda.get_device_name(world.device)
    fault = dtype_fault(plan.recipe, name, capability >= BF16_CAPABILITY, capability >= FLOAT8_CAPABILITY)
    faults = world.gather_objects(fault)
    if wrong := [rank for rank, fault in enumerate(faults) if fault]:
        raise RecipeError(f"{ranks_text(wrong, world.hosts)}: {faults[wrong[0]]}")


def check_same_inputs(inputs: Inputs, world: World) -> None:
    """Raise on every rank if ranks have different plans or models (RecipeError) or data (DataError); collective.

    They would train on without an error: hosts may have files of their own under the same names.
    """
    found = inputs.content | ({"data.eval": inputs.eval_corpus.digest} if inputs.plan.eval_path else {})
    plans, every = zip(*world.gather_objects((inputs.plan.digest(), found)), strict=True)
    if others := [rank for rank in range(world.size) if plans[rank] != plans[0]]:
        raise PLAN.error(f"{ranks_text(others, world.hosts)} made another plan than rank 0: {PLAN.way_out}")
    if others := [rank for rank in range(world.size) if every[rank] != every[0]]:
        keys = {key for each in every for key in {*each, *every[0]} if each.get(key) != every[0].get(key)}
        if isinstance(inputs.plan.recipe.model.tokenizer, dict) and DATA_KEY in keys:
            keys.discard(TOKENIZER_KEY)  # it is trained on the data
        is_data = all(key.startswith("data.") for key in keys)
        wrong, what = (DATA, "data") if is_data else (MODEL, "files of the model")
        raise wrong.error(
            f"{listed(dict.fromkeys(map(recipe_key, sorted(keys))), 4)}: {ranks_text(others, world.hosts)} read other "
            f"{what} than rank 0 on {world.hosts[0]}: {wrong.way_out}"
        )


def open_run_folder(session: Session, inputs: Inputs, world: World) -> Checkpointer:
    """Remove leftovers of earlier attempts, write configuration and tokenizer, and return the run's Checkpointer.

    Raises RecipeError if the hosts do not share it, or if the checkpoints there are of another model, other data or
    another tokenizer.
    """
    plan, rundir, content = inputs.plan, session.rundir, dict(inputs.content)
    check_shared(plan, world)
    if plan.freezes or inputs.prepared.carried:
        session.watchdog.reset(disk_bytes=sum(map(os.path.getsize, safetensors_files(plan))))
        session.reporter.progress("comparing the files of the frozen weights", 0, 0)
        content[BASE_KEY] = frozen_digest(plan, world)
    checkpointer = Checkpointer(rundir, session.initial_plan, world, content, session.reporter.event)
    checkpointer.remove_leftovers()
    checkpointer.reject_another_run()
    if world.rank == 0:
        for number in rundir.attempt_numbers()[:-KEPT_ATTEMPTS]:
            rundir.remove_attempt(number)
        save_assets(plan, inputs.prepared.config, inputs.prepared.bare, inputs.tokenizer, rundir.model)
    return checkpointer


def check_shared(plan: Plan, world: World) -> None:
    """Raise RecipeError on every rank if the folder of the checkpoints is not the same on all hosts; collective."""
    shared = shared_folder(plan)
    if shared is None:
        return
    key, folder = shared
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(file_to_see(folder)) if world.rank == 0 else ""
        found = world.gather_objects(sees(world.gather_objects(name)[0]))
    if apart := [host for host, seen in zip(world.hosts, found, strict=True) if not seen]:
        raise FOLDER.error(
            f"{key}: {folder} on {listed(dict.fromkeys(apart), 4)} is not the folder of that name on "
            f"{world.hosts[0]}: {FOLDER.way_out}"
        )


def frozen_digest(plan: Plan, world: World) -> str:
    """Return the digest of the files of the pretrained model, which checkpoints of a run with frozen weights refer to.

    The ranks of a node read a part of its files each. Raises RecipeError if the files differ between nodes; collective.
    """
    workers, files = plan.topology.nproc_per_node, sorted(safetensors_files(plan))
    own = (world.rank // workers, file_checksums(files[world.local_rank :: workers]))
    nodes: dict[int, list[tuple[str, int, str]]] = {}
    for node, checksums in world.gather_objects(own):
        nodes.setdefault(node, []).extend(checksums)
    found = {files_digest(checksums) for checksums in nodes.values()}
    if len(found) > 1:
        raise MODEL.error(
            f"model.id: the files of {plan.recipe.model.id} are not the same on all nodes: {MODEL.way_out}"
        )
    return found.pop()


def check_remaining_steps(plan: Plan, checkpointer: Checkpointer, sizes: Sizes) -> None:
    """Raise, on every rank and before any training, what would otherwise end the run hours later.

    RecipeError if more steps are made than the recipe asks for, CheckpointError if the disk or the memory of a node is
    too small for the rest.
    """
    newest = checkpointer.newest_step()
    if newest > sizes.total_steps:
        raise RecipeError(too_few_steps(newest, sizes.total_steps))
    if newest < sizes.total_steps:
        problems: list[FsdptrainError] = []
        if checkpointer.world.rank == 0:  # free space changes: only one measurement counts
            problems += disk_problems(plan, disk_space(plan, sizes.weights, sizes.total_steps))
        if checkpointer.world.local_rank == 0:  # of each node
            problems += host_problems(host_space(plan, sizes.weights, sizes.total_steps, sizes.bytes_in_host))
        checkpointer.raise_on_every_rank(next(iter(problems), None))


def load_state(
    model: ShardedModel, session: Session, inputs: Inputs, checkpointer: Checkpointer, state_bytes: int
) -> tuple[torch.optim.Optimizer, int]:
    """Load weights and optimizer state: from the newest checkpoint, else the pretrained files, else from the seed.

    Frozen weights are always read from the pretrained files: no checkpoint holds them. `state_bytes` is the size of
    this rank's part of a checkpoint.

    Returns the optimizer and the number of steps already made. Raises Stopped on every rank after a stop signal on any.
    """
    plan, world, bare = inputs.plan, checkpointer.world, inputs.prepared.bare
    device = torch.device("cpu") if plan.recipe.fsdp.cpu_offload else world.device
    quantizer = RowQuantizer(world.device) if plan.recipe.adapter.kind == "qlora" else None
    resuming = bool(checkpointer.newest_step())
    if resuming:
        session.reporter.progress("reading the checkpoint", 0, 0)
    try:
        if plan.pretrained and (plan.freezes or not resuming):
            ids = inputs.tokenizer.get_vocab() if plan.recipe.model.add_tokens else {}
            added = [ids[token] for token in plan.recipe.model.add_tokens]
            read_weights(model, bare, plan, device, session.progress, quantizer, added)
        allocate(model, device)  # what was not read
        if not resuming and not plan.pretrained:
            draw_weights(model, bare, plan.recipe, session.progress)
    except Exception:  # libraries wrap the Stopped of `session.progress` in errors of their own
        if not session.stop.count:
            raise
    # A signal may have reached only some ranks. They leave together, here or after the checkpoint is read.
    leave_if_stopped(world, session.stop)
    if quantizer:
        quantizer.finish()
    if not resuming and plan.recipe.adapter.kind:
        start_adapters(model, plan)
    optimizer = make_optimizer(model, plan.recipe.optim)
    start_state(optimizer)
    steps_made = 0
    if resuming:
        session.watchdog.reset(disk_bytes=2 * state_bytes)  # it is verified, then read
        steps_made = checkpointer.load_newest(model, optimizer)
    set_step(optimizer, steps_made - checkpointer.skipped)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has cached is of other sizes than a step needs
    leave_if_stopped(world, session.stop)
    return optimizer, steps_made


def leave_if_stopped(world: World, stop: StopRequest) -> None:
    """Raise Stopped on every rank if any rank got a stop signal; collective."""
    if world.any(stop.count):
        raise Stopped("stopped before the first step; nothing was lost")


def report_start(
    session: Session, inputs: Inputs, checkpointer: Checkpointer, sizes: Sizes, steps_made: int, units: int,
    baseline_memory: int, flash_note: str | None,
) -> None:  # fmt: skip
    """Write the events `start` and `resume`, and print the first row to the log.

    `units` counts those of FSDP2; `baseline_memory` is in bytes, before the model was built.
    """
    world = checkpointer.world
    plan, recipe, stream = inputs.plan, inputs.plan.recipe, inputs.stream
    notes = [
        *itertools.chain(*row_notes(plan, stream.corpus, inputs.eval_corpus)),
        *reading_notes(plan, stream),
        windows_note(stream.windows, stream.known[0]["sequences"]) if isinstance(stream, WindowStream) else None,
        date_note(inputs.day) if inputs.day else None,
        own_code_note(inputs.tokenizer),
        *model_notes(inputs.prepared),
        flash_note,
        *plan.length_notes(len(stream)),
        warmup_note(sizes.total_steps, recipe.optim, recipe.schedule),
    ]
    data: dict[str, Any] = dict(stream.corpus.notes)
    if recipe.data.sources:
        data["shares"] = {s.name: share for s, share in zip(plan.sources, stream.token_shares(), strict=True)}
    session.reporter.event(
        "start",
        parameters=sizes.counts.all,
        **({"trainable": sizes.counts.trained} if plan.freezes else {}),
        units=units,
        strategy=recipe.fsdp.strategy,
        attention=recipe.model.attn_implementation,
        **({"flash": used} if (used := attention.active_flash()) else {}),
        world_size=world.size,
        host=socket.gethostname(),
        **({"hosts": world.hosts} if len(set(world.hosts)) > 1 else {}),
        device=torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
        device_memory_bytes=world.device_memory(),
        total_steps=sizes.total_steps,
        blocks=len(stream),
        seq_len=recipe.data.seq_len,
        fill=stream.corpus.fill(),
        data=data,
        notes=[note for note in notes if note],
        torch=torch.__version__,
        transformers=transformers.__version__,
        baseline_memory_bytes=baseline_memory,
    )
    if world.rank == 0:
        changed = changes_since(session.rundir, steps_made, session.initial_plan, checkpointer.identity)
        resumed: list[str | None] = []
        if before := session.reporter.trained_by(steps_made):
            had, has = before["total_steps"], sizes.total_steps
            resumed.append(length_note(steps_made, had, has, recipe.optim, recipe.schedule))
        if recipe.log.profile and recipe.log.profile["steps"][1] <= steps_made:
            resumed.append("log.profile: its steps are made already, and not recorded again")
        session.reporter.resume(steps_made, changed, [note for note in resumed if note])
    for source, corpus in zip(plan.sources, stream.corpus.parts, strict=True):
        of = f" of {source.name}" if recipe.data.sources else ""
        print(f"the first row{of}, trained parts in ⟦ ⟧:\n{corpus.show(inputs.tokenizer)}\n", flush=True)
