"""What each parameter of a model is: whether weight decay applies, and whether it is a matrix inside the model."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from fsdptrain.config.optimizers import Weight
from fsdptrain.model.peft import is_adapter, is_adapter_matrix

# The last three: parameters of state space models, and scales of norms whose class is not called a norm.
UNDECAYED_NAMES = re.compile(r"bias|norm|^(A_log|D|scale)$")


def weights_of(model: Any, quantised: Collection[int] = ()) -> dict[str, Weight]:
    """Return what each parameter of a model is, by name, tied ones once. The model may be sharded.

    `quantised` are the ids of the parameters of a skeleton that will be stored in NF4.
    """
    undecayed = undecayed_ids(model)
    find_head = getattr(model, "get_output_embeddings", None)
    head = {id(param) for param in find_head().parameters()} if find_head and find_head() is not None else set()
    outer = undecayed | head
    return {
        name: Weight(
            tuple(param.shape),
            decays=id(param) not in undecayed,
            matrix=id(param) not in outer,
            trained=param.requires_grad,
            adapter=is_adapter(name),
            quantised=id(param) in quantised,
        )
        for name, param in model.named_parameters()
    }


def undecayed_ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters without weight decay: norms, biases, scales and embeddings.

    What a parameter is depends on class and name, not on its number of dimensions: biases of experts and norms of heads
    have two dimensions, and some vectors have dimensions of size 1. A head that is tied to an embedding counts as one.
    The matrices of adapters decay.
    """
    return {
        id(param)
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if isinstance(module, nn.Embedding)
        or any("Norm" in cls.__name__ for cls in type(module).__mro__)
        or UNDECAYED_NAMES.search(name)
        or sum(size > 1 for size in param.shape) < 2
    } - {id(param) for name, param in model.named_parameters() if is_adapter_matrix(name)}  # also those of rank 1
