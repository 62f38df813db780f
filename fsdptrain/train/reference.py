"""The log-probabilities of preferences under the reference, which is the model as it starts: computed once, and kept.

No second model is held. A resume cannot compute them from trained weights, so the run folder has them, with checksums.
The cache has them too, for other runs that start from the same files with the same rows in the same sequences. In the
first step the model is the reference: `check_first_step` compares the two.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from fsdptrain import __version__
from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.config.keys import flat
from fsdptrain.data.cache import cache_dir, cached_folder, intact_folder, is_intact, scratch_beside, seal
from fsdptrain.data.corpus import Corpus, Mixture
from fsdptrain.errors import CheckpointError, NonFiniteError, Stopped
from fsdptrain.model.attention import active_flash
from fsdptrain.model.config import own_code
from fsdptrain.parallel.world import World
from fsdptrain.plan.plan import Plan
from fsdptrain.train.setup import Inputs, Session, frozen_digest
from fsdptrain.train.step import Engine, StepStats
from fsdptrain.train.stops import StopPoll

Sums = dict[str, np.ndarray[Any, np.dtype[np.float64]]]  # digest of rows → for each row, the log-probability


def with_reference(session: Session, inputs: Inputs, engine: Engine, checkpointer: Checkpointer) -> Inputs:
    """Return the inputs with the reference's log-probabilities, if the run learns from preferences; collective.

    They are computed with the weights of the engine, which are those of the start, or read if they are known. Raises
    CheckpointError if a resume does not find them, Stopped after a stop signal, and NonFiniteError.
    """
    if inputs.plan.recipe.train.objective != "dpo":
        return inputs
    stream, eval_corpus = inputs.stream, inputs.eval_corpus
    corpora = [*stream.corpus.parts, *(eval_corpus.parts if inputs.held_out else [])]
    sums: Sums = {corpus.digest: np.zeros(len(corpus.ends) - 1) for corpus in corpora}
    resumed = engine.steps_made > 0
    key = None if resumed else _cache_key(inputs, engine.world, corpora)  # the files may have changed since the start
    read = functools.partial(_kept, session.rundir.reference) if resumed else functools.partial(_cached, key)
    found = checkpointer.from_rank_zero("read the reference", functools.partial(read, [*sums]))
    if not found:
        for corpus in corpora:
            _compute(session, engine, corpus, sums[corpus.digest])
    for digest, each in sums.items():
        each[:] = found[digest] if found else _summed(each, engine)
        if not np.isfinite(each).all():
            raise NonFiniteError("the reference: the model at the start gives an answer no finite log-probability")
    if not resumed:
        checkpointer.from_rank_zero("keep the reference", functools.partial(_write, session, key, sums))
    stream = dataclasses.replace(stream, corpus=_with_sums(stream.corpus, sums))
    return dataclasses.replace(inputs, stream=stream, eval_corpus=_with_sums(eval_corpus, sums))


def _with_sums(corpus: Corpus | Mixture, sums: Sums) -> Corpus | Mixture:
    parts = [dataclasses.replace(part, reference=sums[part.digest]) for part in corpus.parts]
    return dataclasses.replace(corpus, parts=parts) if isinstance(corpus, Mixture) else parts[0]


def _compute(session: Session, engine: Engine, corpus: Corpus, sums: np.ndarray[Any, Any]) -> None:
    """Write into `sums` those of this rank's share of a corpus; of ranks that share rows, the first does."""
    stops = StopPoll(engine.world, session.stop)

    def on_batch(done: int, total: int) -> None:
        if stops():
            raise Stopped("stopped while computing the reference; nothing was lost")
        session.reporter.progress("computing the reference", done, total)

    rows, found = engine.answer_log_probs(corpus, range(len(corpus)), on_batch)
    if engine.plan.part_of_row(engine.world.rank) == 0:
        sums[rows] = found


def _summed(sums: np.ndarray[Any, Any], engine: Engine) -> np.ndarray[Any, Any]:
    """Return the sum over ranks, of which one has the number of a row, and the others 0."""
    tensor = torch.from_numpy(sums)
    dist.all_reduce(tensor, group=engine.world.side)
    return sums


def _cache_key(inputs: Inputs, world: World, corpora: list[Corpus]) -> Any:
    """Return all that decides the numbers; None if the weights come from no files of a model alone; collective."""
    plan, prepared = inputs.plan, inputs.prepared
    if not plan.pretrained or plan.recipe.adapter.from_ is not None:
        return None
    gpu = world.device.type == "cuda"
    device = torch.cuda.get_device_name() if gpu else torch.backends.cpu.get_cpu_capability()
    return [
        __version__, torch.__version__, transformers.__version__, device, active_flash(),
        {name: value for name, value in flat(plan.recipe).items() if name.startswith(NUMBERS_DEPEND_ON)},
        prepared.config.to_json_string(), own_code(prepared.bare), frozen_digest(plan, world),
        [[each.digest, each.seq_len, each.count_padding, _sequences(each)] for each in corpora],
    ]  # fmt: skip


NUMBERS_DEPEND_ON = (
    "seed", "model.", "adapter.", "data.packing", "fsdp.mixed_precision.", "parallel.", "train.compile",
    "train.deterministic", "train.float8", "train.loss", "train.micro_batch_size",
)  # fmt: skip


def _sequences(corpus: Corpus) -> str:
    """Return a digest of which tokens each sequence has."""
    digest = hashlib.sha256(corpus.pieces.tobytes())
    digest.update(corpus.offsets.tobytes())
    return digest.hexdigest()


def _cached(key: Any, rows: list[str]) -> Sums | None:
    """Return the numbers in the cache, None if it has none."""
    folder = None if key is None else intact_folder("reference", key)
    return None if folder is None else {digest: np.load(folder / f"{digest}.npy") for digest in rows}


def _kept(folder: Path, rows: list[str]) -> Sums:
    """Return the numbers in the run folder; raise CheckpointError unless it has those of all rows."""
    intact = is_intact(folder)
    if intact and all((folder / f"{digest}.npy").is_file() for digest in rows):
        return {digest: np.load(folder / f"{digest}.npy") for digest in rows}
    what = "is of other held-out data (data.eval)" if intact else "is missing or damaged"
    raise CheckpointError(
        f"{folder} {what}, and the log-probabilities under the reference cannot be computed from trained weights: "
        "restore it, or choose another output_dir"
    )


def _write(session: Session, key: Any, sums: Sums) -> None:
    """Write the numbers into the cache and into the run folder."""

    def write(folder: Path) -> None:
        for digest, each in sums.items():
            np.save(folder / f"{digest}.npy", each)

    if key is not None:
        cached_folder("reference", key, write)
    own = session.rundir.reference
    scratch = scratch_beside(own)
    scratch.mkdir()
    try:
        write(scratch)
        seal(scratch)
        shutil.rmtree(own, ignore_errors=True)
        scratch.rename(own)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # of a full disk: a run on another host would not know its name


# More than rounding changes the log-probability of a token, where other kernels or other neighbours in a micro-batch
# compute it. In float8 a scale may be that of the whole micro-batch.
NOISE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
NOISE_OF_FLOAT8 = 1.0


def check_first_step(plan: Plan, stats: StepStats, tokens: float) -> None:
    """Raise CheckpointError if the first step of preferences finds another model than the reference.

    `tokens` are those that are trained of an answer, on average. Roundings of tokens are independent of one another.
    """
    recipe = plan.recipe
    noise = NOISE_OF_FLOAT8 if recipe.train.float8 else NOISE[recipe.fsdp.mixed_precision.param_dtype]
    chosen, rejected = (stats.measures[f"rewards_{kind}"] / recipe.train.dpo.beta for kind in ("chosen", "rejected"))
    if max(abs(chosen), abs(rejected)) > noise * math.sqrt(max(1, tokens)):
        raise CheckpointError(
            "train.objective: in step 1 the model is the reference, but it gives an answer another log-probability "
            f"than in {plan.rundir.reference}: {chosen:+.3g} on average if chosen, {rejected:+.3g} if rejected. Remove "
            f"{cache_dir('reference')} and run again; if it is the same then, please report it"
        )
