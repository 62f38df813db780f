"""The log-probabilities of answers under the reference, which is the model as it starts: computed once, and kept.

No second model is held. A resume cannot compute them from trained weights, so the run folder has them, with checksums.
"""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdptrain.checkpoint.save import Checkpointer
from fsdptrain.data.cache import is_intact, seal
from fsdptrain.data.corpus import Corpus
from fsdptrain.errors import CheckpointError, NonFiniteError, Stopped
from fsdptrain.train.pace import StopPoll
from fsdptrain.train.setup import Inputs, Session
from fsdptrain.train.step import Engine

Sums = dict[str, np.ndarray[Any, np.dtype[np.float64]]]  # digest of rows → `Corpus.reference` of all of them


def with_reference(session: Session, inputs: Inputs, engine: Engine, checkpointer: Checkpointer) -> Inputs:
    """Return the inputs with the reference's log-probabilities, if the objective needs them; collective.

    They are computed with the weights of the engine, which are those of the start, or read by a resume. Raises
    CheckpointError if a resume does not find them, Stopped after a stop signal, and NonFiniteError.
    """
    if not inputs.plan.recipe.train.objective.needs_reference:
        return inputs
    stream, eval_corpus, folder = inputs.stream, inputs.eval_corpus, session.rundir.reference
    corpora = [*stream.corpus.parts, *(eval_corpus.parts if inputs.held_out else [])]
    if engine.steps_made > 0:
        digests = [corpus.digest for corpus in corpora]
        sums = checkpointer.from_rank_zero("read the reference", partial(_read, folder, digests))
    else:
        passes = 1 + inputs.plan.recipe.train.objective.estimates_kl
        # Of each row, whether it is held out or trained.
        sums = {corpus.digest: np.zeros((passes, len(corpus.ends) - 1)) for corpus in corpora}
        for corpus in corpora:
            _compute(session, engine, corpus, sums[corpus.digest])
        for each in sums.values():  # one rank has the number of a row, and the others 0
            dist.all_reduce(torch.from_numpy(each), group=engine.world.side)
        if not all(np.isfinite(each).all() for each in sums.values()):
            raise NonFiniteError("the reference: the model at the start gives an answer no finite log-probability")
        checkpointer.from_rank_zero("keep the reference", partial(_write, folder, sums))
    return inputs.with_each_corpus(lambda part: dataclasses.replace(part, reference=sums[part.digest]))


def _compute(session: Session, engine: Engine, corpus: Corpus, sums: np.ndarray[Any, Any]) -> None:
    """Write into `sums` those of this rank's share of a corpus; of ranks that share rows, the first does."""
    stops, done = StopPoll(engine.world, session.stop), 0
    for rows, found in engine.answer_log_probs(corpus, range(len(corpus))):
        if stops():
            raise Stopped("stopped while computing the reference; nothing was lost")
        if engine.plan.part_of_row(engine.world.rank) == 0:
            sums[:, rows] = found
        done += engine.plan.recipe.train.micro_batch_size * engine.plan.groups_of_rows
        session.reporter.progress("computing the reference", min(done, len(corpus)), len(corpus))


def _read(folder: Path, digests: list[str]) -> Sums:
    """Return the numbers in the run folder; raise CheckpointError unless it has those of all rows."""
    intact = is_intact(folder)
    if intact and all((folder / f"{digest}.npy").is_file() for digest in digests):
        return {digest: np.load(folder / f"{digest}.npy") for digest in digests}
    what = "is of other held-out data (data.eval)" if intact else "is missing or damaged"
    raise CheckpointError(
        f"{folder} {what}, and the log-probabilities under the reference cannot be computed from trained weights: "
        "restore it, or choose another output_dir"
    )


def _write(folder: Path, sums: Sums) -> None:
    """Write the numbers into the run folder. The checksums come last: what a full disk cut off is not intact."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for digest, each in sums.items():
        np.save(folder / f"{digest}.npy", each)
    seal(folder)
