"""One optimizer step: accumulate, normalise, reduce, clip, check, update; the same on every strategy and world size."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fsdptrain.config.plan import Plan, seed_of
from fsdptrain.data.corpus import IGNORED, Batch, Corpus
from fsdptrain.data.hub import error_summary
from fsdptrain.errors import NonFiniteError, RecipeError
from fsdptrain.parallel.world import World
from fsdptrain.train.optim import assert_dtypes, set_step
from fsdptrain.train.stragglers import BlockClock

if TYPE_CHECKING:
    from fsdptrain.parallel.shard import ShardedModel


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step was like: equal on every rank but for `step_s`, this rank's own seconds with its data.

    `peak_memory` is in bytes, of the rank that needed most; `data_s` and `compute_s` are seconds, one for each rank:
    the wait for data, and the forward passes of the blocks alone.
    """

    loss: float
    grad_norm: float
    stop: bool
    peak_memory: int
    step_s: float
    data_s: list[float]
    compute_s: list[float]


class Engine:
    """Steps and evaluates a sharded model."""

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        world: World,
        plan: Plan,
        steps_made: int = 0,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`beat` is called whenever a micro-batch is done."""
        self.model, self.optimizer, self.world, self.plan = model, optimizer, world, plan
        self.steps_made, self.beat = steps_made, beat  # steps made before this process started
        self._clock = BlockClock(model, world.device)
        self._checked_dtypes = False

    def step(
        self, step: int, batches: Sequence[Batch], label_tokens: int, lr: float, stop: bool = False, data_s: float = 0.0
    ) -> StepStats:
        """Make optimizer step number `step` (from 0) on this rank's micro-batches.

        `label_tokens` counts the global batch; the loss is the sum over all its label tokens divided by it. `stop` and
        `data_s` are this rank's: all ranks learn whether any wants to stop, and the longest wait for data. Raises
        NonFiniteError on every rank, before anything is updated, when loss or gradient is not finite on any.
        """
        started = time.perf_counter()
        loss = self.accumulate(step, batches, label_tokens)
        grads = self.local_grads()
        norms = torch._foreach_norm(grads, 2, torch.float32)  # in float32, whatever the master dtype
        square = torch.stack(norms).to(self.world.device, torch.float64).square().sum()
        told = [stop, self.world.peak_memory(), data_s, self._clock.seconds()]
        numbers = torch.tensor(told, dtype=torch.float64).to(self.world.device)
        ranks = self.world.gather(torch.cat([torch.stack([loss.double(), square]), numbers]))
        mean, norm = float(ranks[:, 0].sum()), math.sqrt(ranks[:, 1].sum() / self.world.replicas)
        if not (math.isfinite(mean) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            set_step(self.optimizer, step + 1)  # should the run go on: as a resumed one, which knows the step alone
            raise NonFiniteError(f"step {step + 1}: the loss is {mean:g}, the gradient norm {norm:g}")
        self.update(grads, norm, lr)
        seconds = time.perf_counter() - started + data_s
        return StepStats(
            mean,
            norm,
            bool(ranks[:, 2].any()),
            int(ranks[:, 3].max()),
            seconds,
            ranks[:, 4].tolist(),
            ranks[:, 5].tolist(),
        )

    def accumulate(self, step: int, batches: Sequence[Batch], label_tokens: int) -> torch.Tensor:
        """Forward and backward over the micro-batches; this rank's part of the mean loss, a float32 scalar."""
        self.seed(step)
        hold = self.plan.recipe.fsdp.accumulation == "hold"
        total = torch.zeros((), device=self.world.device)
        self.model.train()
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            self.model.set_requires_gradient_sync(last or not hold)
            loss = self.loss(batch, label_tokens or 1)  # a window without labels has loss 0, not 0/0
            loss.backward()
            total += loss.detach()
            self.beat()
        return total

    def seed(self, step: int) -> None:
        """Dropout is a function of (seed, step, rank), so that there is no state of it to save."""
        torch.manual_seed(seed_of(self.plan.recipe.seed, "step", step, self.world.rank))

    def loss(self, batch: Batch, divisor: int) -> torch.Tensor:
        """The cross-entropy summed over a micro-batch's label tokens, over `divisor`: float32, 0 if all are masked.

        Raises RecipeError for an architecture whose code does not work with these units or dtypes.
        """
        batch = {name: tensor.to(self.world.device, non_blocking=True) for name, tensor in batch.items()}
        try:
            return self._loss(batch, divisor)
        except RuntimeError as error:
            name = next(cls.__name__ for cls in type(self.model).__mro__ if not issubclass(cls, FSDPModule))
            dtype = self.plan.recipe.fsdp.mixed_precision.param_dtype
            if "mixed torch.Tensor and DTensor" in str(error):
                raise RecipeError(
                    f"fsdp.wrap: {name} uses weights of a unit outside of that unit's forward: wrap its blocks, by "
                    "class name"
                ) from None
            if dtype != "float32" and re.search("same dtype|scalar type|mixed dtype", str(error)):
                raise RecipeError(
                    f"fsdp.mixed_precision.param_dtype: {name} cannot be computed in {dtype} ({error_summary(error)}): "
                    "set float32"
                ) from None
            raise

    def _loss(self, batch: Batch, divisor: int) -> torch.Tensor:
        inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
        if self.plan.recipe.train.loss == "chunked":
            loss: torch.Tensor = self.model(**inputs, labels=batch["labels"], divisor=divisor)  # see model.loss
            return loss
        logits = self.model(**inputs).logits
        total = functional.cross_entropy(
            logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total / divisor

    def local_grads(self) -> list[torch.Tensor]:
        """This rank's shard of every gradient."""
        grads = [param.grad for param in self.model.parameters() if param.grad is not None]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]

    def update(self, grads: list[torch.Tensor], norm: float, lr: float) -> None:
        """Clip by the global norm, and let the optimizer step with this learning rate."""
        limit = self.plan.recipe.optim.max_grad_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_(grads, limit / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not self._checked_dtypes:
            assert_dtypes(self.model, self.optimizer, self.plan.recipe.model.dtype)
            self._checked_dtypes = True

    def evaluate(
        self, corpus: Corpus, numbers: Sequence[int], stops: Callable[[], bool] = lambda: False
    ) -> tuple[float, int] | None:
        """(mean loss, label tokens) over all of these blocks: every rank takes its share, padded to equal counts.

        `stops` is asked before every round, and must answer the same on every rank; None when it says so.
        """
        world, size = self.world, self.plan.recipe.train.micro_batch_size
        rounds = -(-len(numbers) // (world.size * size))
        mine = [*numbers[world.rank :: world.size]]
        mine += [-1] * (rounds * size - len(mine))
        total = torch.zeros((), dtype=torch.float64, device=world.device)
        with self.forward_only():
            for i in range(0, len(mine), size):
                if stops():
                    return None
                total += self.loss(corpus.batch(mine[i : i + size]), divisor=1).double()
                self.beat()
        tokens = int(corpus.labels[list(numbers)].sum())
        return float(world.gather(total[None]).sum()) / tokens, tokens

    @contextlib.contextmanager
    def forward_only(self) -> Iterator[None]:
        """Evaluation mode without gradients, and every unit sharded again at the end.

        FSDP frees some units only in backward. Without one they would stay gathered: whoever then looked at the
        parameters (a checkpoint) would see plain tensors in the compute dtype, unknown to the optimizer.
        """
        self.model.eval()
        with torch.no_grad(), self._clock.stopped():
            yield
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
