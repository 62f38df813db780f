"""What the simulation replaces in torch and transformers, and the private functions of both that it relies on.

`RELIES_ON` names every original, the versions in which its source was read, and a digest of that source. A test fails
when an original has changed or its version was not read: read the new source, adapt this package, add the digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from transformers import masking_utils

from fsdptrain.model.patches import documents_of, torch_operators

FSDP = "torch.distributed.fsdp._fully_shard"


RELIES_ON = {
    # Replaced below.
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached": {
        "2.13.0": "3f825e430de4"
    },
    f"{FSDP}._fsdp_param._chunk_with_empty": {"2.13.0": "62bed30ba222"},
    f"{FSDP}._fsdp_param.FSDPParam._init_sharded_param": {"2.13.0": "a88ffe8f21b4"},  # takes chunk 0
    "torch.Tensor.is_pinned": {"2.13.0": "f02d809a3545"},
    "torch.Tensor.pin_memory": {"2.13.0": "9e2f6a284150"},
    "torch.UntypedStorage.resize_": {"2.13.0": "b82b8609ba58"},
    "torch.nn.functional.scaled_dot_product_attention": {"2.13.0": "6bc2ebda2ba8"},
    "torch._C._nn.scaled_dot_product_attention": {"2.13.0": "6bc2ebda2ba8"},
    "torch.accelerator.current_stream": {"2.13.0": "5a4654faef04"},
    # Used as they are: by `register_accelerator` and `fake_store`,
    "torch.utils.backend_registration._DummyBackendModule": {"2.13.0": "380819b1617d"},
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": {"2.13.0": "a0401fb0033e"},
    "torch.testing._internal.distributed.fake_pg.FakeStore": {"2.13.0": "71e9bd5f489b"},
    # by step,
    "torch._subclasses.fake_tensor.FakeTensorMode.__init__": {"2.13.0": "e7923d9063ac"},
    "torch.utils._pytree.tree_iter": {"2.13.0": "f22b2006bf62"},
    # by recorder.
    "torch.utils._python_dispatch.TorchDispatchMode.__init__": {"2.13.0": "e4e86ae0e079"},
    "torch.distributed._tools.fake_collectives.CollectiveOp.get_process_group": {"2.13.0": "dc8cecd1cf2f"},
    "torch.distributed._tools.fake_collectives.collective_ops": {"2.13.0": "cb0bd99ab6d8"},
    "torch.distributed._tools.fake_collectives.sync_ops": {"2.13.0": "a9268f10e093"},
    "torch._C._current_graph_task_id": {"2.13.0": "dc937b598926"},  # -1 outside of a backward pass
    "torch.ops.aten._fused_sgd_.default": {"2.13.0": "83be3b57b859"},
    "torch._ops.OpOverload.__init__": {"2.13.0": "21636d4724aa"},  # `_schema`, `_overloadpacket`
}


@contextlib.contextmanager
def fake_tensor_patches(packed: bool, unrecorded: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let torch and transformers do the same on fake tensors as on real ones.

    `packed`: whether micro-batches have several documents in a row. `unrecorded` hides what a recorder must not see.

    - `ShardingPropagator._propagate_tensor_meta_non_cached` runs operators at *global* shape, to learn the shapes of
      results: this is not part of the step.
    - `find_packed_sequence_indices` cannot read fake position ids, and reports all of them as packed.
    - Fake memory of the host cannot be pinned: it counts as pinned.
    - `_chunk_with_empty` splits a parameter for all ranks, of which only rank 0's part is used: 512 fake chunks take
      a while.
    """
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_unrecorded(self: Any, schema: Any) -> Any:
        with unrecorded():
            return propagate(self, schema)

    def first_chunk(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
        return [tensor.narrow(dim, 0, min(tensor.size(dim), -(-tensor.size(dim) // count)))]

    with (
        _replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unrecorded),
        _replaced(masking_utils, "find_packed_sequence_indices", partial(documents_of, packed=packed)),
        _replaced(_fsdp_param, "_chunk_with_empty", first_chunk),
        _replaced(torch.Tensor, "is_pinned", lambda tensor, *_: True),
        _replaced(torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        torch_operators(),
    ):
        yield


@contextlib.contextmanager
def resizes_watched(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` after every resize of a storage: FSDP2 frees gathered parameters so, and no dispatch mode sees it.

    Replaces `torch.UntypedStorage.resize_`.
    """
    resize = torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> None:
        resize(storage, size)
        resized(storage)

    with _replaced(torch.UntypedStorage, "resize_", watched):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


KERNELS = torch.library.Library("aten", "IMPL")
# What fake tensors need of an operator that changes its arguments: nothing. torch has this for `_fused_adamw_` only.
KERNELS.impl("_fused_sgd_", lambda *args, **kwargs: None, "Meta")


Attention = Callable[..., Any]


DummyBackend = _DummyBackendModule  # a device's Python module, with nothing but the functions that every one must have


def register_accelerator(
    name: str, backend: Any, current_stream: Callable[..., Any], attention: Callable[[Attention], Attention]
) -> None:
    """Give torch a device type `name` (PrivateUse1) whose streams and events are Python's; for good.

    Replaces `scaled_dot_product_attention`, in both of its places, by `attention(original)`, and
    `torch.accelerator.current_stream`. A device without kernels of its own would get attention and some backward
    operators in pieces.
    """
    _setup_privateuseone_for_python_backend(name, backend_module=backend)
    replaced = attention(torch.nn.functional.scaled_dot_product_attention)
    torch.nn.functional.scaled_dot_product_attention = replaced
    torch._C._nn.scaled_dot_product_attention = replaced
    for operator in ("silu_backward", "mish_backward"):
        KERNELS.impl(operator, _never_called, "PrivateUse1")
    torch.accelerator.current_stream = current_stream


def _never_called(*args: Any, **kwargs: Any) -> Any:
    """Stand in for a kernel that never runs: fake tensors need only the shape of its result."""
    raise NotImplementedError


def fake_store() -> dist.Store:
    """Return the store of torch's fake process group; the import registers the backend `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
