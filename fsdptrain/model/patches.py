"""What this package replaces in torch and transformers, and the private functions of both that it relies on.

`RELIES_ON` names every original, and digests of its source with the versions in which it was read. A test fails when an
original has changed within a version, and warns when a version has another source: read it, adapt this package, add it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.varlen  # noqa: F401  (registers two operators)
from torch.distributed.tensor import DTensor
from transformers import core_model_loading, masking_utils
from transformers.integrations import hub_kernels

RELIES_ON = {
    # Replaced below.
    "transformers.core_model_loading._dtensor_from_local_like": {"9eb29ea0e054": "5.23.0"},
    "transformers.integrations.hub_kernels.is_torchdynamo_exporting": {"906fc60c30b3": "5.23.0"},
    "transformers.masking_utils.find_packed_sequence_indices": {"ebd2ac7ca795": "5.23.0"},
    # Used as they are: by skeleton and weights,
    "transformers.PreTrainedModel._initialize_weights": {"f61be38943fe": "5.23.0"},  # the flag `_is_hf_initialized`
    "transformers.PreTrainedModel._get_dtype_plan": {"9ef80238ec5a": "5.23.0"},
    "transformers.PreTrainedModel._adjust_missing_and_unexpected_keys": {"82ffcc857800": "5.24.0"},
    "transformers.PreTrainedConfig._attn_implementation": {"0ecad559168e": "5.23.0"},
    "transformers.PreTrainedModel._supports_flash_attn": {"60a33e6cf515": "5.23.0"},
    # by units and init,
    "transformers.PreTrainedModel._no_split_modules": {"dc937b598926": "5.23.0"},
    "transformers.PreTrainedModel._init_weights": {"a315e7d7cb00": "5.23.0", "2f3d605374c4": "5.24.0"},
    # by tiles.
    "torch.ops.aten._softmax_backward_data.default": {"2827cddc7f79": "2.11.0 2.13.0 2.15.0"},
    # by varlen: torch calls these operators by position, and there are kernels for them on a CPU here,
    "torch.ops.torch_attn._varlen_attn.default": {
        "9a02c9f457e9": "2.11.0",
        "b21b9f9d7174": "2.13.0",
        "0552340bc519": "2.15.0",
    },
    "torch.ops.torch_attn._varlen_attn_backward.default": {"e39279965701": "2.11.0 2.13.0", "3aa89126d8b1": "2.15.0"},
    # which transformers calls without a mask, because it has no mask function.
    "transformers.masking_utils._preprocess_mask_arguments": {"df23eb733c6e": "5.23.0", "606823244fa4": "5.24.0"},
}


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor of this rank's part, sharded as `like` is; the part may be on another device than the mesh."""
    return DTensor(local.contiguous(), like._spec, requires_grad=False)


@contextlib.contextmanager
def dtensors_stay_on_their_device() -> Iterator[None]:
    """Let transformers build DTensors from local tensors without moving them.

    Replaces `transformers.core_model_loading._dtensor_from_local_like`, which calls `DTensor.from_local`: that moves
    a tensor to the device of the mesh, but the weights of `fsdp.cpu_offload` must stay in host memory.
    """

    with mock.patch.object(core_model_loading, "_dtensor_from_local_like", dtensor_like):
        yield


def import_quietly(name: str) -> Any:
    """Return the module bitsandbytes, or peft, which imports it; raises ImportError if it is not installed.

    On a CPU with bfloat16 instructions the import of bitsandbytes downloads a faster kernel for inference with the
    package `kernels`, and warns if that fails. The import must not run downloaded code, so `kernels` is hidden from it.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    hidden = {"kernels": sys.modules["kernels"]} if "kernels" in sys.modules else {}
    sys.modules["kernels"] = None  # type: ignore[assignment]  # the documented way to make `import kernels` fail
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["kernels"]
        sys.modules.update(hidden)


def use_torch_operators() -> None:
    """Let state space models and linear attention run transformers' own torch code from now on, in this process.

    Replaces `transformers.integrations.hub_kernels.is_torchdynamo_exporting`. Where causal_conv1d, fla and mamba_ssm
    are installed, transformers calls them on any device, although they need a GPU; only while a model is exported does
    it call its own code.
    """
    hub_kernels.is_torchdynamo_exporting = lambda: True


@contextlib.contextmanager
def torch_operators() -> Iterator[None]:
    """Apply `use_torch_operators` inside the context only."""
    with mock.patch.object(hub_kernels, "is_torchdynamo_exporting", lambda: True):
        yield


def find_documents_without_waiting(packed: bool) -> None:
    """Build masks without waiting for the device from now on, in this process; `packed` as in `documents_of`.

    Replaces `transformers.masking_utils.find_packed_sequence_indices`. The original reads the position ids of every
    micro-batch to find out whether any row has several documents.
    """
    masking_utils.find_packed_sequence_indices = functools.partial(documents_of, packed=packed)


def documents_of(position_ids: torch.Tensor, packed: bool) -> torch.Tensor | None:
    """Return the number of the document of each token [B, S], from 0 in each row; None if rows are one document each.

    `packed` is whether rows may have several documents. `position_ids` is [B, S]: each document begins again at 0.
    """
    if not packed:
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


VARLEN_FORWARD, VARLEN_BACKWARD = (
    torch.ops.torch_attn._varlen_attn.default, torch.ops.torch_attn._varlen_attn_backward.default
)  # fmt: skip
