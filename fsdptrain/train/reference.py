"""The log-probabilities of preferences under the reference, which is the model as it starts: computed once, and kept.

No second model is held. A resume cannot compute them from trained weights, so the run folder has them, with checksums.
The cache has them too, for other runs that start from the same files with the same rows.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdptrain import __version__
from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.config.reflection import flat
from fsdptrain.data.cache import cached_folder, intact_folder, is_intact, scratch_beside, seal
from fsdptrain.data.corpus import Corpus, Mixture
from fsdptrain.errors import CheckpointError, NonFiniteError, Stopped
from fsdptrain.train.setup import Inputs, Session, frozen_digest
from fsdptrain.train.step import Engine
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
    key = None if resumed else _cache_key(inputs, engine, [*sums])  # the files may have changed since the start
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


def _cache_key(inputs: Inputs, engine: Engine, rows: list[str]) -> Any:
    """Return what the numbers are made from; None if the weights come from no files of a model alone; collective."""
    plan = inputs.plan
    if not plan.pretrained or plan.recipe.adapter.from_ is not None:
        return None
    keys = {name: value for name, value in flat(plan.recipe).items() if name.startswith(NUMBERS_DEPEND_ON)}
    return [__version__, frozen_digest(plan, engine.world), keys, sorted(rows)]


NUMBERS_DEPEND_ON = ("model.", "adapter.kind", "fsdp.mixed_precision.", "train.float8")  # and on the rows as tokens


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
