"""The linear layers of decoder layers in float8, through torchao: what a product multiplies is rounded just before.

Parameters stay what they are, with their names, and FSDP2 gathers them in bf16: checkpoints and exports do not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdptrain.config.rules import FLOAT8_MULTIPLE
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import RecipeError, listed
from fsdptrain.model.units import decoder_layers

# Names of layers that stay in bf16: routers, whose choice of experts would depend on the rounding, and experts, which
# get any number of tokens.
ROUTED = re.compile(r"(^|\.)(gate|experts|\w*router\w*)(\.|$)")


def layers_in_float8(model: Any, recipe: Recipe) -> dict[str, nn.Linear]:
    """Return the layers that the recipe computes in float8 by name; raises RecipeError if it should, but finds none.

    They are plain linear layers of decoder layers that compute in bf16, without `ROUTED`, whose weights the kernels can
    multiply. The model may be sharded: FSDP gives a module a class that is derived from its own.
    """
    if recipe.train.float8 is None:
        return {}
    found = {name: layer for name, layer in _linear_layers(model).items() if _fits(layer)}
    if not found:
        raise RecipeError(
            f"train.float8: the decoder layers of {type(model).__name__} have no linear layer with inputs and outputs "
            f"that are multiples of {FLOAT8_MULTIPLE}: remove it"
        )
    return found


def _linear_layers(model: Any) -> dict[str, nn.Linear]:
    return {
        f"{layer}.{name}": module
        for layer, decoder in decoder_layers(model)
        for name, module in decoder.named_modules()
        if nn.Linear in (type(module), *type(module).__bases__[1:])
        and not ROUTED.search(name)
        and f"{layer}.{name}.weight" not in model.float32_names
    }


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % FLOAT8_MULTIPLE == layer.out_features % FLOAT8_MULTIPLE == 0


def float8_notes(model: Any, recipe: Recipe, on_cpu: bool, compiles: bool) -> Iterator[str]:
    """Yield which layers of a skeleton the recipe leaves in bfloat16, and why its float8 may be slower than that."""
    kind = recipe.train.float8
    if kind is None:
        return
    layers = _linear_layers(model)
    if left := [name for name, layer in layers.items() if not _fits(layer)]:
        yield (
            f"train.float8: {len(left)} of {len(layers)} linear layers stay in bfloat16, because their inputs or "
            f"outputs are not a multiple of {FLOAT8_MULTIPLE}: {listed(left, 2)}"
        )
    if on_cpu:
        yield (
            f"train.float8: {kind} is emulated on a CPU: it rounds as a GPU does, but is slower than bfloat16, which "
            "forecasts do not count"
        )
    elif not compiles:
        yield "train.float8 is slower than bfloat16 without train.compile, because each cast is a kernel of its own"


def convert_to_float8(model: Any, recipe: Recipe, emulate: bool) -> None:
    """Replace the recipe's layers of a skeleton by torchao's, in place: they hold the same parameters.

    `emulate`: round as the kernels do, and multiply in float32. Sets `float8_names`, the names of the layers.
    """
    model.float8_names = frozenset(layers_in_float8(model, recipe))
    if not model.float8_names:
        return
    torchao = _torchao()
    config = torchao.Float8LinearConfig.from_recipe_name(recipe.train.float8)
    torchao.convert_to_float8_training(
        model,
        config=dataclasses.replace(config, emulate=emulate),
        module_filter_fn=lambda _, name: name in model.float8_names,
    )


def _torchao() -> Any:
    """Return `torchao.float8`, which is hidden from other libraries, without warnings of kernels that nothing uses."""
    if sys.modules.get("torchao", True) is None:
        del sys.modules["torchao"]
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module("torchao.float8")
    finally:
        logging.disable(before)


@contextlib.contextmanager
def unrounded(model: Any) -> Iterator[None]:
    """Compute in bf16 inside this context, uncompiled: as a user of the export does."""
    layers = [model.get_submodule(name) for name in model.float8_names]
    with torch.compiler.set_stance("force_eager") if layers else contextlib.nullcontext():
        for layer in layers:
            layer.forward = functools.partial(nn.Linear.forward, layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward
