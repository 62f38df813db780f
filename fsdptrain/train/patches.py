"""What training replaces in torch, and the private functions of torch that it relies on.

`RELIES_ON` names every original, and digests of its source with the versions in which it was read. A test fails when an
original has changed within a version, and warns when a version has another source: read it, adapt this package, add it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

RELIES_ON = {
    # Replaced below. `parallel.patches.NamedComm` relies on it too: it allocates twice, then all-reduces over copies.
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce": {
        "46bcdaa0df40": "2.11.0",
        "cc2a17ca7325": "2.13.0",
        "9bf759c3863e": "2.15.0",
    },
    # Used as they are: by step,
    "torch.ops.aten._foreach_norm.Scalar": {"ff49023321db": "2.11.0 2.13.0 2.15.0"},
    "torch.ops.aten._foreach_mul_.Tensor": {"818f5da5f297": "2.11.0 2.13.0 2.15.0"},
    "torch.optim.adam._fused_adam": {"dd842506bfd8": "2.11.0 2.13.0 2.15.0"},  # what it does with `found_inf`
    "torch.optim.sgd._fused_sgd": {"a3b1ca925fe7": "2.11.0 2.13.0", "ca039dfeac93": "2.15.0"},  # the same
    # by sharded_optimizers: what it calls where, and in which order.
    "transformers.optimization.Adafactor.step": {"b30d8fbb8972": "5.23.0"},
    "transformers.optimization.Adafactor._approx_sq_grad": {"f116ba7cb74e": "5.23.0"},
    "transformers.optimization.Adafactor._rms": {"285047b9f0d7": "5.23.0"},
    # by blockwise: public methods, but what they do with each other.
    "bitsandbytes.optim.optimizer.Optimizer8bit.step": {"1ff73e315716": "0.50.2"},
    "bitsandbytes.optim.optimizer.Optimizer2State.init_state": {"5e0ba3874f96": "0.50.2"},
    "bitsandbytes.optim.optimizer.Optimizer2State.update_step": {"8ac7975db6c0": "0.50.2"},
}

Watcher = Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor]], None]


@contextlib.contextmanager
def reductions_watched(watcher: Watcher) -> Iterator[None]:
    """Show `watcher` the parameters of each unit and their gradients on this rank, before these are reduced.

    Replaces `foreach_reduce` where FSDP2 looks it up: no hook of FSDP2 or autograd sees a sharded parameter's gradient
    before the reduction.
    """
    reduce = _fsdp_param_group.foreach_reduce

    def watched(params: Any, gradients: list[torch.Tensor], *rest: Any, **options: Any) -> Any:
        watcher([param.sharded_param for param in params], gradients)
        return reduce(params, gradients, *rest, **options)

    with mock.patch.object(_fsdp_param_group, "foreach_reduce", watched):
        yield


def record_allocations() -> None:
    """Let CUDA's allocator keep its events from now on, with the Python frames that caused them."""
    torch.cuda.memory._record_memory_history(stacks="python")  # documented, in spite of its name, as is the next one


def write_allocations(path: Path) -> None:
    """Write the events that `record_allocations` kept, and what is allocated now, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
