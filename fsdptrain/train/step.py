"""One optimizer step: accumulate, normalise, reduce, clip, check, update; the same on every strategy and world size.

The host does not wait for the device in a step: it queues the work, and the device itself computes how much to clip and
whether to update (an optimizer without `found_inf` makes the host wait for that). `Engine.read` waits for the numbers
of a step. On an accelerator this is done after the next step was queued. So the next step does not change
anything either if a step was not finite.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from fsdptrain.checkpoint.shards import named_parts
from fsdptrain.data.corpus import IGNORED, Batch, Corpus, part_of_rows
from fsdptrain.errors import NonFiniteError, RecipeError, error_summary
from fsdptrain.model import varlen
from fsdptrain.model.distillation import token_loss_of
from fsdptrain.model.expert_parallel import ExpertLoads
from fsdptrain.model.float8 import unrounded
from fsdptrain.model.loss import Divisor
from fsdptrain.model.objectives import answers_loss, sum_answers
from fsdptrain.model.patches import accept_documents
from fsdptrain.model.router_loss import RouterLoss
from fsdptrain.model.skeleton import seed_of
from fsdptrain.model.tensor_parallel import divides_attention
from fsdptrain.model.units import part_of
from fsdptrain.parallel.shard import begin_backward, sum_parts, sum_tied_ends, use_whole_shards
from fsdptrain.parallel.world import HostCopy, World, send, to_device
from fsdptrain.plan.pipeline import Pass
from fsdptrain.plan.plan import Plan
from fsdptrain.train.optim import LossScale, assert_dtypes
from fsdptrain.train.pace import LayerClock
from fsdptrain.train.pipeline import Stages

if TYPE_CHECKING:
    from fsdptrain.parallel.shard import ShardedModel


@dataclass(frozen=True)
class QueuedStep:
    """An optimizer step that the device may not have finished: its number, when it began, and the numbers of all ranks.

    `began` is in seconds of `time.perf_counter`, before a wait for data that counts. `numbers` is float64 [ranks, 10],
    or more with measures or experts.
    """

    step: int
    began: float
    numbers: HostCopy


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step measured. All fields but `step_s` are equal on every rank.

    In float16 `loss_scale` is that of the step, else 1. If the gradient overflowed with it, `grad_norm` is not
    finite, and the step has changed only the scale. `reserved_memory` is the largest of all ranks, in bytes.
    `step_s` are this rank's seconds, its wait for data included, from the later of the beginning of this step and
    the end of the one before; steps that are read together share their mean. `usual_step_s` is that of the slowest
    rank when it last read, 0 before. One number for each rank: `peak_memory` in bytes; `alloc_retries`, of the
    allocator since the process began; `data_s` (the wait for data, 0 if the device had work left from the step
    before) and `compute_s` (the forward passes of the decoder layers) in seconds. `expert_load` is that of
    `ExpertLoads`. `measures` are the means of `Objective.measures` over its units.
    """

    loss: float
    grad_norm: float
    loss_scale: float
    stop: bool
    reserved_memory: int
    step_s: float
    usual_step_s: float
    peak_memory: list[int]
    alloc_retries: list[int]
    data_s: list[float]
    compute_s: list[float]
    expert_load: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)


class Engine:
    """Steps and evaluates a sharded model."""

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        world: World,
        plan: Plan,
        steps_made: int = 0,
        on_progress: Callable[[], None] = lambda: None,
        loss_scale: Sequence[float] | None = None,
    ) -> None:
        """`steps_made` are steps of earlier processes; `on_progress` is called for every micro-batch.

        `loss_scale` is the state of the loss scale in their last checkpoint, if they computed in float16.
        """
        self.model, self.optimizer, self.world, self.plan = model, optimizer, world, plan
        self.steps_made, self.on_progress = steps_made, on_progress
        use_whole_shards(model, plan)
        self.stages = Stages(plan, world, model.config.get_text_config().hidden_size)
        self._clock = LayerClock(model, world.device, plan.recipe.parallel.pipeline)
        self._loads = ExpertLoads(model, world.device, world.sum_over_stage)
        self._router_loss = RouterLoss(model, world.device)
        parts = named_parts(optimizer)
        trained = [(name, param) for name, param in model.named_parameters() if name in parts]
        self._params = [(param, parts[name]) for name, param in trained]
        self._shard_device = self._params[0][1].device  # of the shards: the host with fsdp.cpu_offload
        self._found_inf = plan.recipe.optim.name.traits.found_inf
        # 1.0 as long as a step that was not finite has not been read: until then no step changes weights or moments.
        self._skip_updates = torch.zeros((), device=self._shard_device)
        half = plan.recipe.fsdp.mixed_precision.param_dtype == "float16"
        self.loss_scale = LossScale(self._shard_device, loss_scale) if half else None
        self._no_scale = torch.ones(1, dtype=torch.float64, device=self._shard_device)
        self._read_at = 0.0  # when a step was last read
        self._step_s = 0.0  # of the steps that were read then, on average
        self._checked = False
        # What ranks that divide layers have in common counts once in the norm, as the copies of the model do.
        divided: Any = model.parts
        repeated: Any = model.repeated
        copies = [len(world.holders(param, divided.get(name))) for name, param in trained]
        counts = [0.0 if name in repeated else 1.0 for name, _ in trained]
        shares = world.replicas * torch.tensor(counts, dtype=torch.float64) / torch.tensor(copies)
        self._norm_shares = send(shares, self._shard_device)
        self._token_loss = token_loss_of(plan.recipe)
        self._objective = plan.recipe.train.objective
        # Of the measures of the objective, sums over units, and over how many.
        measures = len(self._objective.averaged)
        self._measures = torch.zeros(2, measures, dtype=torch.float64, device=world.device)
        self._kl = torch.zeros((), dtype=torch.float64, device=world.device)
        # Ranks with heads of their own have them for all tokens of their group.
        whole = world.tensor is not None and not divides_attention(model) and world.sharers is not None
        self._exchange = varlen.Exchange(world.sharers) if whole and world.sharers else world.context
        self._bounds_recurrences = bool(accept_documents(model)) and plan.recipe.documents_share_sequences

    def step(
        self, step: int, batches: Sequence[Batch], divisor: int, lr: float, stop: bool = False, data_s: float = 0.0
    ) -> QueuedStep:
        """Queue optimizer step number `step` (from 0) on this rank's micro-batches; `read` returns its numbers.

        `divisor` counts the units of the global batch (`Objective.unit`); the loss is the sum over all of them divided
        by it. `stop` (a stop request) and `data_s` are this rank's own. Nothing is updated if loss or gradient of any
        rank is not finite, in this step or in an earlier one that was not read yet.
        """
        began = time.perf_counter() - data_s
        loss = self.accumulate(step, batches, divisor)
        # FSDP has reduced the gradients to shards: the squares of their norms add up, every copy of the model once.
        sum_parts(self.model, self.world)
        sum_tied_ends(self.model, self.world)
        grads = self.local_grads()
        norms = torch._foreach_norm(grads, 2, torch.float32)  # in float32, whatever the master dtype
        square = (torch.stack(norms).double().square() * self._shares_of_norm()).sum()
        scale = self.loss_scale.value.double()[None] if self.loss_scale else self._no_scale
        # One collective for all numbers. Every rank sums them in the same order, so all get equal results.
        memory = (self.world.peak_memory(), *self.world.allocator_counts())
        measured = [stop, *memory, data_s, self._clock.seconds(), self._step_s]
        unscaled = square / scale.square() if self.loss_scale else square[None]
        numbers = [loss.double()[None], unscaled, scale, torch.tensor(measured, dtype=torch.float64)]
        numbers += [self._measures.flatten(), self._loads.largest_over_mean()]
        ranks = self.world.all_gather(torch.cat([send(part, self.world.device) for part in numbers]))
        # With shards in host memory the host updates them: it waits for the numbers here.
        ranks = ranks.to(self._shard_device)
        skipped = self.update(grads, ranks, lr)
        self._loads.balance(self.plan.recipe.train.router_bias_rate, skipped)
        return QueuedStep(step, began, self.world.host_copy(ranks))

    def read(self, queued: Sequence[QueuedStep]) -> Iterator[StepStats]:
        """Wait for some steps and yield what each measured; steps are read in the order in which they were queued.

        The host waits once, for the last of them. Raises NonFiniteError on every rank at a step in which loss or
        gradient of any rank was not finite. Neither this step nor any step that was queued since then has changed
        anything: those must be queued again.
        """
        queued[-1].numbers.wait()  # the device makes steps in order: the others are complete too
        began, self._read_at = max(queued[0].began, self._read_at), time.perf_counter()
        self._step_s = (self._read_at - began) / len(queued)
        yield from map(self._stats, queued)

    def _stats(self, queued: QueuedStep) -> StepStats:
        """Return what a step measured. Raises NonFiniteError as `read` does."""
        losses, squares, scales, stops, peaks, *others = queued.numbers.read().T
        reserved, retries, data_seconds, compute_seconds, usual, *rest = others
        measures, loads = rest[: self._measures.numel()], rest[self._measures.numel() :]
        mean, norm = float(losses.sum()), math.sqrt(squares.sum() / self.world.replicas)
        overflows = math.isfinite(mean) and not math.isfinite(norm) and scales[0] > 1  # as `LossScale.overflows`
        if not (overflows or (math.isfinite(mean) and math.isfinite(norm))):
            self._skip_updates = torch.zeros_like(self._skip_updates)
            raise NonFiniteError(f"step {queued.step + 1}: the loss is {mean:g}, the gradient norm {norm:g}")
        return StepStats(
            loss=mean,
            grad_norm=norm,
            loss_scale=float(scales[0]),
            stop=bool(stops.any()),
            reserved_memory=int(reserved.max()),
            step_s=self._step_s,
            usual_step_s=float(usual.max()),
            peak_memory=[*map(int, peaks)],
            alloc_retries=[*map(int, retries)],
            data_s=data_seconds.tolist(),
            compute_s=compute_seconds.tolist(),
            expert_load=float(loads[0].max()) if loads else 0.0,
            measures=self._objective.means(
                *np.reshape([each.sum() for each in measures], self._measures.shape).tolist()
            ),
        )

    def accumulate(self, step: int, batches: Sequence[Batch], divisor: int) -> torch.Tensor:
        """Run forward and backward on the micro-batches. Return this rank's part of the mean loss (float32, scalar)."""
        self.estimate_kl(batches, divisor)
        self.seed(step)
        if self._router_loss.wanted:
            self._router_loss.begin_step()
        total = torch.zeros((), device=self.world.device)
        self._measures.zero_()
        self.model.train()
        routed = self._pass_routers(step, batches) if self._router_loss.wanted and len(batches) > 1 else None
        count: Divisor = divisor or 1  # a global batch without labels has loss 0, not 0/0
        scale = self.loss_scale.value.to(self.world.device) if self.loss_scale else None

        def forward(chunk: int, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
            # Divided, not multiplied by the scale: the chunked loss computes gradients as it is computed.
            loss = self.loss(batches[number], count if scale is None else count / scale, chunk, hidden)
            if self.stages.is_last(chunk):
                total.add_(loss.detach() if scale is None else loss.detach() / scale)
            if self._router_loss.wanted and number == 0:  # the same on all ranks: counted on one
                auxiliary = self._router_loss.finish_forward() if routed is None else routed
                total.add_(auxiliary if self.world.rank == 0 else 0.0)
            return loss

        def before(each: Pass) -> None:
            self.on_progress()
            if not each.forward:
                begin_backward(self.model, self.plan.recipe.fsdp, last=each.micro_batch == len(batches) - 1)

        self.stages.train(len(batches), batches[0]["input_ids"].shape, forward, before)
        return total

    def _pass_routers(self, step: int, batches: Sequence[Batch]) -> torch.Tensor:
        """Let all micro-batches pass the routers, with the dropout that they will have; return the auxiliary loss."""
        with self.forward_only():
            self.model.train()
            for batch in batches:
                self.loss(batch, 1)
                self.on_progress()
        self._measures.zero_()
        self.seed(step)
        return self._router_loss.finish_forward()

    def estimate_kl(self, batches: Iterable[Batch], rows: int) -> None:
        """Estimate the KL divergence from the reference for the losses of `batches`, if the objective needs it.

        As published, it is the mean over mismatched rows, of all `rows` of all ranks, without dropout; collective.
        """
        if not self._objective.estimates_kl:
            return
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        with self.forward_only():
            for batch in batches:
                other = to_device(batch["mismatched"], self.world.device)
                total += sum_answers(self._log_probs(other), other, self.world.sharers).ratios.sum()
                self.on_progress()
        sharers = self.world.sharers.size() if self.world.sharers else 1  # each has the whole of their sum
        self._kl = (self.world.all_gather(total[None]).sum() / sharers / max(1, rows)).clamp(min=0)

    def seed(self, step: int) -> None:
        """Seed dropout by (seed, step, rank), so that a checkpoint need not save the state of a generator."""
        torch.manual_seed(seed_of(self.plan.recipe.seed, "step", step, self.world.rank))

    def loss(self, batch: Batch, divisor: Divisor, chunk: int = 0, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss summed over the units of a micro-batch, divided by `divisor`, in float32.

        Sums over its units are added to those of the measures. It is 0 if all labels are masked. Of a pipeline, `chunk`
        is the rank's stage and `hidden` its input; stages but the last return hidden states. Raises RecipeError if the
        architecture cannot be computed with these units or dtypes.
        """
        try:
            return self._loss(to_device(batch, self.world.device), divisor, chunk, hidden)
        except RuntimeError as error:
            name = next(cls.__name__ for cls in type(self.model).__mro__ if not issubclass(cls, FSDPModule))
            dtype = self.plan.recipe.fsdp.mixed_precision.param_dtype
            if "mixed torch.Tensor and DTensor" in str(error):
                raise RecipeError(
                    f"fsdp.wrap: {name} uses weights of a unit outside of that unit's forward: wrap its layers "
                    "instead, by class name"
                ) from None
            if dtype != "float32" and re.search("same dtype|scalar type|mixed dtype", str(error)):
                raise RecipeError(
                    f"fsdp.mixed_precision.param_dtype: {name} cannot be computed in {dtype} ({error_summary(error)}): "
                    "use float32"
                ) from None
            raise

    def _inputs(self, batch: Batch, chunk: int = 0, hidden: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the model's arguments for a micro-batch on the device."""
        given = {"input_ids": batch["input_ids"]} if hidden is None else {"inputs_embeds": hidden}
        inputs: dict[str, Any] = {**given, "position_ids": batch["position_ids"], "use_cache": False}
        if self.world.messages:
            inputs["chunk"] = chunk
        if self._router_loss.wanted:
            self._router_loss.begin_micro_batch(batch["is_token"])
            inputs["output_router_logits"] = False  # what transformers would compute with them is of a micro-batch
        if varlen.used_by(self.model):
            inputs |= {"documents": batch["documents"], "longest_document": batch["longest"]}
        if self._bounds_recurrences:
            inputs["packed_documents"] = batch["documents"]
        if self._exchange is not None:
            inputs["context"] = self._exchange
        return inputs

    def _loss(self, batch: Batch, divisor: Divisor, chunk: int, hidden: torch.Tensor | None) -> torch.Tensor:
        train = self.plan.recipe.train
        if not self.stages.is_last(chunk):
            states: torch.Tensor = self.model(**self._inputs(batch, chunk, hidden))
            return states
        if self._objective.answers:
            batch = {**batch, "kl": self._kl}
            loss, measures = answers_loss(train, self._log_probs(batch), batch, divisor, self.world.sharers)
            self._measures += measures
            return loss
        inputs = self._inputs(batch, chunk, hidden)
        teacher = (batch["teacher_ids"], batch["teacher_log_probs"]) if "teacher_ids" in batch else ()
        if train.loss == "chunked":
            total = self.model(**inputs, labels=batch["labels"], divisor=divisor, teacher=teacher)  # see model.loss
        else:
            targets = tuple(each.flatten(0, 1) for each in (batch["labels"], *teacher))
            total = self._token_loss.summed(self.model(**inputs).logits.flatten(0, 1).float(), targets) / divisor
        if teacher:  # the others are measures
            sums = total[1:].detach().double() * divisor
            self._measures += torch.stack([sums, (batch["labels"] != IGNORED).sum().expand_as(sums)])
            total = total[0]
        loss_of_batch: torch.Tensor = total
        return loss_of_batch

    def _log_probs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each label of a micro-batch on the device, float32 [T], 0 without a label."""
        inputs, labels = self._inputs(batch), batch["labels"]
        if self.plan.recipe.train.loss == "chunked":
            found: torch.Tensor = self.model(**inputs, labels=labels, divisor=None)
            return found
        logits = self.model(**inputs).logits.flatten(0, 1).float()
        return -functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")

    def _shares_of_norm(self) -> torch.Tensor:
        """Return the weight of each gradient's square in the norm, times the number of copies of the model."""
        own = [number for number, (param, _) in enumerate(self._params) if param.grad is not None]
        return self._norm_shares if len(own) == len(self._params) else self._norm_shares[own]

    def local_grads(self) -> list[torch.Tensor]:
        """Return this rank's shard of every gradient."""
        return [part_of(param.grad) for param, _ in self._params if param.grad is not None]

    def update(self, grads: list[torch.Tensor], ranks: torch.Tensor, lr: float) -> torch.Tensor:
        """Clip the gradients, and update the weights with learning rate `lr`, if all numbers are finite.

        Return whether they were not, and nothing was updated: 0.0 or more than 0, scalar.

        `ranks` is float64 [ranks, 2 or more]: losses and squared norms of the gradients. All of it happens where the
        shards are: the host does not wait for the numbers.
        """
        loss, norm = ranks[:, 0].sum(), (ranks[:, 1].sum() / self.world.replicas).sqrt()
        finite = loss.isfinite() & norm.isfinite()
        if self.loss_scale:
            overflow = self.loss_scale.overflows(loss, norm)
            finite |= overflow
        self._skip_updates = found_inf = torch.where(finite, self._skip_updates, 1.0)
        limit, factor = self.plan.recipe.optim.max_grad_norm, None
        if limit is not None:  # as torch.nn.utils.clip_grad_norm_ does
            factor = torch.where(norm > limit, limit / (norm + 1e-6), 1.0)
        if self.loss_scale:
            factor = (1.0 if factor is None else factor) / self.loss_scale.value
            found_inf = torch.where(overflow, 1.0, self._skip_updates)
            self.loss_scale.update(overflow, self._skip_updates)
        if factor is not None:
            for dtype in dict.fromkeys(grad.dtype for grad in grads):  # one kernel needs one dtype
                torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], factor.to(dtype))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for param, part in self._params:
            part.grad = None if param.grad is None else part_of(param.grad)
        if self._found_inf:
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            self.optimizer.step()
        elif self.world.host_copy(1 - found_inf).read() > 0:  # the host waits for the numbers of this step
            self.optimizer.step()
        self.drop_gradients()
        if not self._checked:
            assert_dtypes(self.model, self.optimizer, self.plan.recipe)
            if any(part_of(p).untyped_storage() is not part.untyped_storage() for p, part in self._params):
                raise RuntimeError(
                    "internal error: FSDP2 has moved shards that the optimizer updates (please report it)"
                )
            self._checked = True
        return found_inf

    def drop_gradients(self) -> None:
        """Free all gradients."""
        for param, part in self._params:
            param.grad = part.grad = None

    def evaluate(
        self, corpus: Corpus, numbers: Sequence[int], stops: Callable[[], bool] = lambda: False
    ) -> tuple[float, int, Any] | None:
        """Return mean loss, label tokens, and [2, measures] (sums, counts) over the sequences `numbers` of `corpus`.

        Returns None if `stops` returned True. Every rank computes a share of them, padded to equal counts. `stops` is
        called before every micro-batch, or as many as a pipeline has at once, and must return the same on every rank.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        self._measures.zero_()

        def forward(batches: list[Batch], chunk: int, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
            loss = self.loss(batches[number], 1, chunk, hidden)
            if self.stages.is_last(chunk):
                total.add_(loss.double())
            self.on_progress()
            return loss

        shares, at_once = [*self._shares(numbers)], self.stages.at_once
        every = (self._batch(corpus, rows) for rows in shares)
        self.estimate_kl(itertools.takewhile(lambda _: not stops(), every), corpus.divisor(numbers))
        with self.forward_only():
            for first in range(0, len(shares), at_once):
                if stops():
                    return None
                mine = shares[first : first + at_once]
                batches = [self._batch(corpus, rows) for rows in mine]
                self.stages.evaluate(len(mine), batches[0]["input_ids"].shape, functools.partial(forward, batches))
        tokens, divisor = int(corpus.labels[list(numbers)].sum()), corpus.divisor(numbers)
        loss_sum, *sums = self.world.gather(torch.cat([total[None], self._measures.flatten()])).sum(axis=0).tolist()
        return loss_sum / divisor, tokens, np.reshape(sums, self._measures.shape)

    def _shares(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield this rank's micro-batches of the sequences `numbers`: as many on each rank, of which some are empty."""
        size, groups = self.plan.recipe.train.micro_batch_size, self.plan.groups_of_rows
        mine = [*numbers[self.plan.group_of_rows(self.world.rank) :: groups]]
        for first in range(0, -(-len(numbers) // groups), size):
            yield mine[first : first + size]

    def _batch(self, corpus: Corpus, numbers: list[int]) -> Batch:
        """Return this rank's part of sequences, on its device, as a micro-batch that is filled up with padding."""
        missing = self.plan.recipe.train.micro_batch_size - len(numbers)
        whole = corpus.batch([*numbers, *([-1] * missing)])
        part = part_of_rows(whole, self.plan.part_of_row(self.world.rank), self.plan.ranks_of_row)
        return to_device(part, self.world.device)

    def answer_log_probs(self, corpus: Corpus, numbers: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """Yield, of each micro-batch, the rows of the answers in it and the log-probability of each; collective.

        Float64 [1, answers], or [2, answers] with those of mismatched rows. Every rank yields as often.
        """
        with self.forward_only():
            for mine in self._shares(numbers):
                batch = self._batch(corpus, mine)
                passes = [batch, batch["mismatched"]] if self._objective.estimates_kl else [batch]
                sums = [sum_answers(self._log_probs(each), each, self.world.sharers).sums for each in passes]
                self.on_progress()
                yield corpus.rows_of(mine), torch.stack(sums).cpu().numpy()

    def read_labels(
        self, corpus: Corpus, numbers: Sequence[int], read: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> Iterator[tuple[list[int], list[int], tuple[torch.Tensor, ...]]]:
        """Yield what `read` returns for the logits [L, V] at the label tokens of this rank's share of sequences.

        Of each micro-batch: the numbers of its sequences, how many label tokens each has in this rank's part (0 for
        padding behind them), and the tensors [L, …] of all. Every rank yields as often; collective.
        """
        with self.forward_only():
            for mine in self._shares(numbers):
                batch = self._batch(corpus, mine)
                inputs, labels = self._inputs(batch), batch["labels"]
                if self.plan.recipe.train.loss == "chunked":
                    found = self.model(**inputs, labels=labels, read=read)
                else:
                    found = read(self.model(**inputs).logits[labels != IGNORED])
                self.on_progress()
                yield mine, (labels != IGNORED).sum(1).tolist(), found

    def logits(self, beginnings: Corpus) -> list[torch.Tensor]:
        """Return the logits of `Corpus.with_rows`, for each sequence float32 [tokens, vocabulary] on the CPU.

        Every rank computes all of them; collective. Micro-batches have the shape of training, for which kernels and
        graphs exist, but the head computes only the requested tokens. Nothing is rounded to float8. Of ranks that share
        rows only the first of each group has them: all are in the first part of a row. Of a pipeline, rank 0 gets them.
        """
        lengths, found = beginnings.pieces[:, 1].tolist(), []
        longest = max(lengths)
        with self.forward_only(), unrounded(self.model):
            for numbers in self._micro_batches(beginnings):
                logits = self._logits(beginnings, numbers, lambda hidden: hidden[:, :longest])
                found += [row[: lengths[n]].float().cpu() for n, row in zip(numbers, logits, strict=False)]
        return self.world.list_on_rank_zero(found, self.world.size - self.plan.stage_ranks)

    def next_tokens(self, rows: Corpus) -> list[int]:
        """Return the most likely token behind the only piece of each sequence, -1 if a logit there is not a number.

        Every rank computes all of them, and gets those of the first one that has the end of a row; collective.
        """
        part = rows.seq_len // self.plan.ranks_of_row
        lasts = (rows.pieces[:, 1] - 1 - part * self.plan.part_of_row(self.world.rank)).tolist()
        found: list[int] = []
        with self.forward_only():
            for numbers in self._micro_batches(rows):

                def at_end(hidden: torch.Tensor, numbers: list[int] = numbers) -> torch.Tensor:
                    places = [min(max(0, lasts[n]), part - 1) for n in numbers]
                    return hidden[torch.arange(len(places)), places, None]

                logits = self._logits(rows, numbers, at_end)[:, 0].float()
                best = torch.where(logits.isnan().any(-1), -1, logits.argmax(-1)).tolist()
                found += [token if 0 <= lasts[n] < part else -1 for n, token in zip(numbers, best, strict=False)]
        found += [-1] * (len(rows) - len(found))  # without the head, of a pipeline
        ranks = self.world.gather(torch.tensor(found, dtype=torch.float64))[-self.plan.stage_ranks :]  # with the head
        return [int(token) for token in ranks[: self.plan.ranks_of_row].max(axis=0)]

    def _micro_batches(self, rows: Corpus) -> Iterator[list[int]]:
        """Yield the numbers of all sequences, as many at a time as a micro-batch has; report progress after each."""
        size = self.plan.recipe.train.micro_batch_size
        for i in range(0, len(rows), size):
            yield [*range(i, min(i + size, len(rows)))]
            self.on_progress()

    def _logits(self, rows: Corpus, numbers: list[int], select: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the logits of sequences as one micro-batch, of the places that `select` takes from [rows, length, …].

        The head computes no others. Ranks of a pipeline that do not have it return those of no sequence.
        """
        head, batch, found = self.model.get_output_embeddings(), self._batch(rows, numbers), []

        def forward(chunk: int, _: int, hidden: torch.Tensor | None) -> torch.Tensor:
            result = self.model(**self._inputs(batch, chunk, hidden))
            if self.stages.is_last(chunk):
                found.append(result.logits if head else select(result.logits))
            return result

        hook = head.register_forward_pre_hook(lambda _, args: (select(args[0]), *args[1:])) if head else None
        try:
            self.stages.evaluate(1, batch["input_ids"].shape, forward)
        finally:
            if hook:
                hook.remove()
        return found[0] if found else torch.empty(0, 1, 1)

    @contextlib.contextmanager
    def forward_only(self) -> Iterator[None]:
        """Switch to evaluation mode without gradients inside this context, and shard every unit again at its end.

        FSDP frees some units in backward only. Without a backward they would stay gathered, and a checkpoint would save
        their plain tensors in the compute dtype, which the optimizer does not know.
        """
        self.model.eval()
        with torch.no_grad(), self._clock.stopped():
            yield
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
