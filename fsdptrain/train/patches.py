"""What training replaces in torch, and the private functions of torch that it relies on.

`RELIES_ON` names every original, the versions in which its source was read, and a digest of that source. A test fails
when an original has changed or its version was not read: read the new source, adapt this package, add the digest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

FSDP = "torch.distributed.fsdp._fully_shard"


RELIES_ON = {
    # Replaced below.
    f"{FSDP}._fsdp_collectives.foreach_reduce": {"2.13.0": "cc2a17ca7325"},
    # Used as they are: by `collective_of`,
    f"{FSDP}._fsdp_state.FSDPState._init_fqns": {"2.13.0": "a8cb77d29082"},  # `_module_fqn`
    f"{FSDP}._fsdp_param_group.FSDPParamGroup.post_backward": {"2.13.0": "3c8bf9dee0f5"},
    # by `recorded_collectives`,
    "torch._C._distributed_c10d._dump_fr_trace_json": {"2.13.0": "eaafe7d69bd1"},
    # by preflight,
    "torch.ops.mkldnn._is_mkldnn_bf16_supported.default": {"2.13.0": "05801fadec7e"},
    # by step,
    "torch.ops.aten._foreach_norm.Scalar": {"2.13.0": "ff49023321db"},
    "torch.optim.adam._fused_adam": {"2.13.0": "dd842506bfd8"},  # what it does with `found_inf`
    "torch.ops.aten._foreach_mul_.Tensor": {"2.13.0": "818f5da5f297"},
    "torch.optim.sgd._fused_sgd": {"2.13.0": "a3b1ca925fe7"},  # the same
    # by orthogonal,
    "torch.optim._muon._zeropower_via_newtonschulz": {"2.13.0": "99e2359a95e1"},
    "torch.optim._muon._adjust_lr": {"2.13.0": "20fecc26382e"},
    "torch.optim._muon._single_tensor_muon": {"2.13.0": "44fba01f0798"},  # what `ShardedMuon` does instead, on rows
    # by factored: what it calls where, and in which order.
    "transformers.optimization.Adafactor.step": {"5.23.0": "b30d8fbb8972"},
    "transformers.optimization.Adafactor._approx_sq_grad": {"5.23.0": "f116ba7cb74e"},
    "transformers.optimization.Adafactor._rms": {"5.23.0": "285047b9f0d7"},
    # by blockwise: public methods, but what they do with each other.
    "bitsandbytes.optim.optimizer.Optimizer8bit.step": {"0.50.2": "1ff73e315716"},
    "bitsandbytes.optim.optimizer.Optimizer2State.init_state": {"0.50.2": "5e0ba3874f96"},
    "bitsandbytes.optim.optimizer.Optimizer2State.update_step": {"0.50.2": "8ac7975db6c0"},
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


def collective_of(frame: FrameType) -> str | None:
    """Return the collective that FSDP2 is at in a frame, and of which unit; None for a frame that is not FSDP2's."""
    unit = frame.f_locals.get("self")
    if not isinstance(unit, FSDPParamGroup):
        return None
    collective = "reduce-scatter" if "post_backward" in frame.f_code.co_name else "all-gather"
    return f"{collective} of {getattr(unit, '_module_fqn', None) or 'the outermost unit'}"


def recorded_collectives() -> dict[str, dict[str, Any]]:
    """Return backend → what torch's flight recorder has of this rank's collectives.

    Each backend has a recorder of its own; that of NCCL is only in builds with CUDA.
    """
    dumps = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    found = {backend: getattr(_distributed_c10d, name, None) for backend, name in dumps.items()}
    return {backend: json.loads(dump()) for backend, dump in found.items() if dump}
