"""What training replaces in torch, and the private functions of torch that it relies on.

`RELIES_ON` names every original, and digests of its source with the versions in which it was read. A test fails when an
original has changed within a version, and warns when a version has another source: read it, adapt this package, add it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    # By pace, documented in spite of their names: `_record_memory_history` and `_dump_snapshot` of torch.cuda.memory.
}


@contextlib.contextmanager
def nonfinite_gradients(model: nn.Module) -> Iterator[list[str]]:
    """Collect the parameters whose gradients on this rank are not finite before reduction, in the order of backward.

    Replaces `foreach_reduce` where FSDP2 looks it up: no hook of FSDP2 or autograd sees a sharded parameter's gradient
    before the reduction.
    """
    bad_names: list[str] = []
    names = {id(param): name for name, param in model.named_parameters()}
    reduce = _fsdp_param_group.foreach_reduce

    def watched(params: Any, gradients: list[torch.Tensor], *rest: Any, **options: Any) -> Any:
        of_unit = [names[id(param.sharded_param)] for param in params]
        finite = [bool(gradient.isfinite().all()) for gradient in gradients]
        bad_names.extend(name for name, is_finite in reversed([*zip(of_unit, finite, strict=True)]) if not is_finite)
        return reduce(params, gradients, *rest, **options)

    with mock.patch.object(_fsdp_param_group, "foreach_reduce", watched):
        yield bad_names
