"""What a teacher finds likely at every label token: computed by all ranks before the student is built, and cached.

So no second model is in memory while the student learns, and a resume, or another student of the same data, reads what
is there. What the cache lacks is computed, also in a resume: the teacher is frozen, and would say the same again.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import itertools
import shutil
import socket
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers

from fsdptrain.config.paths import cache_root
from fsdptrain.data.cache import MORE_SPACE, cache_dir
from fsdptrain.data.corpus import Corpus
from fsdptrain.data.hub import read_json
from fsdptrain.data.teacher import KIND, TeacherOutputs
from fsdptrain.errors import CheckpointError, FsdptrainError, NonFiniteError, Stopped
from fsdptrain.failures.translate import as_fsdptrain_error
from fsdptrain.model.distillation import top_log_probs
from fsdptrain.model.weights import allocate, read_weights
from fsdptrain.parallel.shard import build
from fsdptrain.parallel.world import World
from fsdptrain.plan.plan import LAYOUT
from fsdptrain.text import size
from fsdptrain.train.pace import StopPoll
from fsdptrain.train.preflight import PreparedModel, errors_of_teacher
from fsdptrain.train.setup import Inputs, Session, frozen_digest, leave_if_stopped
from fsdptrain.train.step import Engine

VERSION = 1  # of what a part of the cache has: raise it when that changes


Part = tuple[TeacherOutputs, Corpus, int]  # of the outputs for a corpus, the one of this number


def with_teacher(session: Session, inputs: Inputs, world: World) -> Inputs:
    """Return the inputs with the outputs of the teacher, if the objective needs them; collective.

    Raises CheckpointError if a node has no space for them, before any is computed, and Stopped after a stop signal.
    """
    teacher = inputs.teacher
    if teacher is None:
        return inputs
    # Logits of padding, which the embedding of one of the two may have, are left out.
    vocab = min(each.config.get_text_config().vocab_size for each in (inputs.prepared, teacher))
    top_k = min(inputs.plan.recipe.teacher.top_k, vocab - 1)
    session.reporter.progress("comparing the files of the teacher", 0, 0)
    key, parts = [*_identity(teacher, world), vocab, top_k], list[Part]()

    def with_outputs(corpus: Corpus) -> Corpus:
        outputs = TeacherOutputs([*key, *_packed(corpus)], corpus.labels, top_k)
        parts.extend((outputs, corpus, number) for number in outputs.parts)
        return dataclasses.replace(corpus, teacher=outputs)

    inputs = inputs.with_each_corpus(with_outputs)
    # What any node lacks is computed by all ranks: the first rank of each looks, and writes.
    session.watchdog.reset(disk_bytes=_nbytes(parts))
    looks = world.local_rank == 0
    lacking = [i for i, (outputs, _, number) in enumerate(parts) if looks and not outputs.is_kept(number)]
    if missing := [parts[i] for i in sorted({*itertools.chain(*world.gather_objects(lacking))})]:
        _raise_on_every_rank(world, _space_problem(missing) if looks else None)
        _compute(session, teacher, world, missing, vocab)
    return inputs


def _nbytes(parts: list[Part]) -> int:
    return sum(outputs.nbytes(number) for outputs, _, number in parts)


def _packed(corpus: Corpus) -> list[Any]:
    """Return (JSON) what identifies the label tokens of a corpus, and what is before each."""
    packed = hashlib.sha256(corpus.pieces.tobytes() + corpus.offsets.tobytes())
    return [corpus.digest, packed.hexdigest(), corpus.seq_len]


def _identity(teacher: PreparedModel, world: World) -> list[Any]:
    """Return (JSON) what decides the outputs beside the data. Another torch rounds otherwise, which does not count."""
    recipe, model = teacher.plan.recipe, teacher.plan.recipe.model
    with errors_of_teacher():
        files = frozen_digest(teacher.plan, world)
        config = read_json(str(model.id), model.revision, "config.json", "model.id")
    return [VERSION, LAYOUT, transformers.__version__, files, config, model.dtype, recipe.teacher.temperature]


def _space_problem(missing: list[Part]) -> CheckpointError | None:
    needed, free = _nbytes(missing), shutil.disk_usage(cache_dir(KIND)).free
    if needed <= free:
        return None
    return CheckpointError(
        f"teacher.top_k: no space: the outputs of the teacher take {size(needed)}, and the disk of {cache_root()} on "
        f"{socket.gethostname()} has {size(free)}: lower teacher.top_k, or {MORE_SPACE}"
    )


def _compute(session: Session, teacher: PreparedModel, world: World, missing: list[Part], vocab: int) -> None:
    """Load the teacher, let it compute these parts, and free it."""
    engine = _load(session, teacher, world)
    stops, done = StopPoll(world, session.stop), 0
    total = sum(len(outputs.sequences(number)) for outputs, _, number in missing)
    stage = f"asking the teacher ({size(_nbytes(missing))} in the cache)"
    for outputs, corpus, number in missing:
        found: list[Any] = []
        for of_batch in _outputs(engine, corpus, outputs.sequences(number), outputs.top_k, vocab):
            if stops():
                raise Stopped("stopped while asking the teacher; what was finished is kept")
            session.reporter.progress(stage, done, total)
            found += of_batch
        failure, ranks = None, _on_first_ranks(found, world, teacher.plan.topology.nproc_per_node)
        if ranks:
            # Of ranks that share rows, the tokens follow one another in the order of the ranks.
            joined = sorted(itertools.chain(*ranks), key=lambda each: each[:2])
            ids, log_probs = (torch.cat([each[n] for each in joined]) for n in (2, 3))
            try:
                if not log_probs.isfinite().all():
                    raise NonFiniteError(f"teacher.id: {teacher.plan.recipe.model.id} gives probabilities that are nan")
                outputs.keep(number, ids.numpy(), log_probs.numpy())
            except Exception as error:  # the other ranks wait
                failure = as_fsdptrain_error(error)
        _raise_on_every_rank(world, failure)
        done += len(outputs.sequences(number))
        session.reporter.progress(stage, done, total)
    del engine
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # the student's peak is what events report


def _on_first_ranks(value: Any, world: World, workers: int) -> list[Any]:
    """Return the values of all ranks on the first rank of each node, which has the cache, else []; collective."""
    found: list[Any] = []
    for first in range(0, world.size, workers):
        ranks = [None] * world.size if world.rank == first else None
        dist.gather_object(value, ranks, dst=first, group=world.side)
        found = ranks or found
    return found


def _load(session: Session, teacher: PreparedModel, world: World) -> Engine:
    """Return an engine with the teacher, which the student's ranks share as they will share the student."""
    plan = teacher.plan
    world = dataclasses.replace(world, experts=None)
    model, _ = build(plan, teacher.config, world)
    device = torch.device("cpu") if plan.recipe.fsdp.cpu_offload else world.device
    try:
        with errors_of_teacher():
            read_weights(model, teacher.bare, plan, device, session.progress)
        allocate(model, device)
    except Exception:  # libraries wrap the Stopped of `session.progress` in errors of their own
        if not session.stop.count:
            raise
    leave_if_stopped(world, session.stop)
    # The engine knows the parameters by their optimizer. This one keeps no state, and makes no step.
    optimizer = torch.optim.SGD(model.named_parameters())
    return Engine(model, optimizer, world, plan, on_progress=session.watchdog.reset)


def _outputs(engine: Engine, corpus: Corpus, numbers: range, top_k: int, vocab: int) -> Iterator[list[Any]]:
    """Yield, of each micro-batch of this rank, for each sequence (number, part of the row, [L, k], [L, k + 1])."""
    of_row, temperature = engine.plan.part_of_row(engine.world.rank), engine.plan.recipe.teacher.temperature

    def read(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return top_log_probs(logits[:, :vocab], top_k, temperature)

    for mine, counts, found in engine.read_labels(corpus, numbers, read):
        ids, log_probs = (tensor.cpu().split(counts) for tensor in found)
        yield [(n, of_row, i.clone(), p.clone()) for n, i, p in zip(mine, ids, log_probs, strict=False)]


def _raise_on_every_rank(world: World, failure: FsdptrainError | None) -> None:
    """Raise the error of any rank on all; collective."""
    if error := next(filter(None, world.gather_objects(failure)), None):
        raise error
