"""What the simulation replaces in torch and transformers, and the private functions of both that it relies on.

`RELIES_ON` names every original, and digests of its source with the versions in which it was read. A test fails when an
original has changed within a version, and warns when a version has another source: read it, adapt this package, add it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend `fake`)
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from transformers import masking_utils

from fsdptrain.model import expert_parallel
from fsdptrain.model import patches as of_model
from fsdptrain.model.patches import documents_of, torch_operators

RELIES_ON = {
    # Replaced below, beside public functions.
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached": {
        "5e2bc08815c6": "2.11.0",
        "3f825e430de4": "2.13.0 2.15.0",
    },
    "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty": {"62bed30ba222": "2.11.0 2.13.0 2.15.0"},
    # Used as they are: by `pretend_accelerator` and `pretend_world`,
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": {
        "a0401fb0033e": "2.11.0 2.13.0",
        "de8e1d28eae9": "2.15.0",
    },
    "torch.testing._internal.distributed.fake_pg._create_fake_pg": {
        "d9f25be8ef84": "2.11.0 2.13.0",
        "9356912a356d": "2.15.0",
    },
    # by step,
    "torch._subclasses.fake_tensor.FakeTensorMode.__init__": {
        "05fa578f43c0": "2.11.0",
        "e7923d9063ac": "2.13.0 2.15.0",
    },
    # by recorder.
    "torch._C._current_graph_task_id": {"dc937b598926": "2.11.0 2.13.0 2.15.0"},  # -1 outside of a backward pass
    "torch._ops.OpOverload.__init__": {
        "21636d4724aa": "2.11.0 2.13.0",
        "d1da26740c8a": "2.15.0",
    },  # `_schema`, `_overloadpacket`
}


@contextlib.contextmanager
def fake_tensor_patches(packed: bool, unrecorded: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Let torch and transformers do the same on fake tensors as on real ones.

    `packed`: whether micro-batches have several documents in a row. `unrecorded` hides what a recorder must not see.

    - `ShardingPropagator._propagate_tensor_meta_non_cached` runs operators at *global* shape, to learn the shapes of
      results: this is not part of the step.
    - `find_packed_sequence_indices` cannot read fake position ids, and reports all of them as packed.
    - `model.patches.within_documents` cannot read fake bounds: each row is one document, as in attention.
    - `expert_parallel.rows_exchanged` cannot read fake counts: all experts get as many tokens.
    - Fake memory of the host cannot be pinned: it counts as pinned.
    - `_chunk_with_empty` splits a parameter for all ranks, of which only rank 0's part is used: 512 fake chunks take
      a while. A list of one chunk fails if another is used.
    """
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_unrecorded(self: Any, schema: Any) -> Any:
        with unrecorded():
            return propagate(self, schema)

    def first_chunk(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
        return [tensor.narrow(dim, 0, min(tensor.size(dim), -(-tensor.size(dim) // count)))]

    def within_rows(function: Any, _name: str, _bounds: Any, *args: Any, **options: Any) -> Any:
        return function(*args, **options)

    def evenly(sizes: torch.Tensor, copies: int) -> list[list[int]]:
        ranks = sizes.shape[1]
        return [[(n + 1) * copies // ranks - n * copies // ranks for n in range(ranks)]] * 2

    with (
        mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unrecorded),
        mock.patch.object(masking_utils, "find_packed_sequence_indices", partial(documents_of, packed=packed)),
        mock.patch.object(of_model, "within_documents", within_rows),
        mock.patch.object(expert_parallel, "rows_exchanged", evenly),
        mock.patch.object(_fsdp_param, "_chunk_with_empty", first_chunk),
        mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, *_: True),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        torch_operators(),
    ):
        yield


KERNELS = torch.library.Library("aten", "IMPL")
# What fake tensors need of an operator that changes its arguments: nothing. torch has this for `_fused_adamw_` only.
KERNELS.impl("_fused_sgd_", lambda *args, **kwargs: None, "Meta")


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the products of experts without values; raise RuntimeError for what the kernels refuse.

    Rows have a multiple of 16 bytes. Before 2.15, torch's own function takes bfloat16 only, the kernels do not.
    """
    if wrong := [mat.shape for mat in (a, b) if max(mat.stride()[-2:]) * mat.itemsize % 16]:
        raise RuntimeError(f"rows of the weights or inputs of experts are no multiple of 16 bytes: {[*wrong[0]]}")
    groups = (len(offs),) if a.dim() == b.dim() == 2 else (len(a),) if a.dim() == b.dim() else ()
    dtype, columns = out_dtype or a.dtype, b.shape[-1]
    unit = 16 // dtype.itemsize
    return a.new_empty(*groups, a.shape[-2], -(-columns // unit) * unit, dtype=dtype)[..., :columns]


KERNELS.impl("_grouped_mm", grouped_mm, "Meta", allow_override=True)
