"""The skeleton of a model: parameters on the meta device, buffers on the CPU; and the choice of the attention kernel.

Buffers are real, as the constructor makes them: non-persistent ones (rotary frequencies) are in no file.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import is_flash_attn_2_available

from fsdptrain.config.dtypes import HALF
from fsdptrain.config.rules import one_row_if_packed
from fsdptrain.config.schema import Model
from fsdptrain.errors import Problem, RecipeError, error_summary
from fsdptrain.model import context, cudnn, varlen
from fsdptrain.model.units import saved_state
from fsdptrain.plan.plan import Plan, varied

LARGEST_BUFFER = 2**28  # elements
TOO_LARGE = "this machine has too little memory for the modules and buffers of the model, without its weights"


def set_special_token(config: Any, name: str, value: int | None) -> None:
    """Set a special token; None changes nothing where the architecture requires a number."""
    with contextlib.suppress(StrictDataclassFieldValidationError):
        setattr(config, name, value)


def config_parts(config: Any) -> list[Any]:
    """Return the configuration, and the language model's inside it if there is one: both name special tokens."""
    text = config.get_text_config()
    return [text] if text is config else [config, text]


def layer_values(config: Any, name: str) -> list[Any]:
    """Return the values of a configuration's key: a list of one, or of one for each layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # a key that differs between layers
        value = [getattr(layer, name) for layer in config.per_layer_config]
    return list(value) if isinstance(value, (list, tuple)) else [value]


@contextlib.contextmanager
def parameters_on_meta(keep_real: type[nn.Module] | None = None) -> Iterator[None]:
    """Send every parameter that a module registers to the meta device; buffers stay as they are.

    `torch.device("meta")` would take the buffers too. The parameters of modules of the class `keep_real` stay real.
    """

    def to_meta(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
        if param.is_meta or type(module) is keep_real:
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # typed to return None
    try:
        yield
    finally:
        hook.remove()


def auto_class(config: Any) -> Any:
    """Return the class of transformers that builds the model of a configuration.

    A vision-language model, by the class that its files name, is built whole, so that it is exported whole.
    """
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    return AutoModelForImageTextToText if whole in (config.architectures or ()) else AutoModelForCausalLM


def skeleton(config: Any, model: Model, compute: str | None = None) -> Any:
    """Return the model with parameters on the meta device in the master dtype, and real buffers on the CPU.

    `compute` is the dtype that parameters are cast to for compute, by default the master dtype: buffers that are in no
    file are those of a model of that dtype. The attribute `float32_names` of the result names the tensors that
    transformers keeps in float32 in such a model, by the architecture's lists or its constructors; their master dtype
    is float32, too. Raises RecipeError if no model can be built from the configuration.
    """
    # Let transformers build the model in the compute dtype: this decides its buffers, and what stays in float32.
    master, computed = getattr(torch, model.dtype), getattr(torch, compute or model.dtype)
    kernel = model.attn_implementation
    with _building_errors(kernel), parameters_on_meta(), _LargeOnMeta():
        # Weights that are drawn need no other parts than the language model.
        made = (auto_class(config) if model.init == "pretrained" else AutoModelForCausalLM).from_config(
            copy.deepcopy(config),  # `from_config` writes the dtype into it
            dtype=computed,
            attn_implementation=None if kernel == "auto" else kernel,  # None: sdpa if the class has it, else eager
            trust_remote_code=False,  # `load_config` has registered the classes that are trusted
        )
        if computed != torch.float32:  # as `from_pretrained` does: compute buffers in float32, then cast them
            for module in made.modules():
                module._is_hf_initialized = False
            made.initialize_weights()
    # Then give the state that is saved its master dtype.
    state = {name: tensor for name, tensor in saved_state(made).items() if tensor.is_floating_point()}
    explicit = {name for name, tensor in state.items() if tensor.dtype == torch.float32 != computed}
    made.float32_names = explicit | _kept_in_float32(made, computed)
    made.frozen_names = set()  # of parameters, by the recipe: see `model.freeze.freeze`
    wide = made.float32_names | _kept_in_float32(made, master)
    cast = {
        id(tensor): _cast(tensor, torch.float32 if name in wide else master)
        for name, tensor in state.items()
        if tensor.dtype != (torch.float32 if name in wide else master)
    }
    for module in made.modules():
        own = {"recurse": False, "remove_duplicate": False}
        for key, tensor in [*module.named_parameters(**own), *module.named_buffers(**own)]:
            if id(tensor) in cast:
                setattr(module, key, cast[id(tensor)])
    made.tie_weights()
    return made


def skeleton_in_dtype(model: Any, dtype: str, compute: str | None = None) -> Any:
    """Return a skeleton of the same architecture in `dtype`, except for what transformers keeps in float32.

    `compute` is as in `skeleton`.
    """
    kernel = model.config._attn_implementation
    return skeleton(model.config, Model(dtype=dtype, attn_implementation=kernel), compute)  # type: ignore[arg-type]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    cast = tensor.detach().to(dtype)
    return nn.Parameter(cast, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cast


def _kept_in_float32(model: Any, dtype: torch.dtype) -> set[str]:
    """Return the names of the state that `from_pretrained(dtype=dtype)` loads in float32."""
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    return {name for name in saved_state(model) if any(pattern.search(name) for pattern in patterns)}


def choose_attention(
    plan: Plan, config: Any, prefers_cudnn: bool | None = None, has_flash: bool = True
) -> tuple[Plan, Any]:
    """Return the plan with the attention kernel that its model is built with, and the skeleton that has it.

    sdpa becomes varlen where that applies; auto becomes the best kernel that the architecture, this machine and the
    recipe's batches allow: varlen, flash_attention_2, sdpa, eager. Instead of varlen it is sdpa where torch's sdpa is
    cuDNN; `prefers_cudnn` is whether torch prefers that on the card, by default on those of this process. `has_flash`
    is whether a card that is not in this process has FlashAttention: those before Ampere do not.
    """
    model = plan.recipe.model
    if model.attn_implementation not in ("auto", "sdpa"):
        return plan, skeleton(config, model)
    bare = skeleton(config, model)
    if plan.context > 1:
        check_context(plan, bare, has_flash)
    kernels = {part._attn_implementation for part in config_parts(bare.config)}
    # A model of several parts may support sdpa in some of them only.
    kernel = kernels.pop() if len(kernels) == 1 else "eager"
    if kernel == "sdpa" and has_flash and varlen.obstacle(plan, bare) is None:
        bare.set_attn_implementation(kernel := varlen.NAME)
        if (cudnn.is_preferred_here() if prefers_cudnn is None else prefers_cudnn) and cudnn.computes(plan, bare):
            bare.set_attn_implementation(kernel := "sdpa")
    elif model.attn_implementation == "sdpa":
        return plan, bare
    elif _flash_is_possible(plan):
        flash = varied(plan, {"model.attn_implementation": "flash_attention_2"})
        with contextlib.suppress(RecipeError):  # the architecture does not support it
            return flash, skeleton(config, flash.recipe.model)
    return varied(plan, {"model.attn_implementation": kernel}), bare


def check_context(plan: Plan, bare: Any, has_flash: bool = True) -> None:
    """Raise RecipeError if ranks cannot share the rows of a skeleton's model."""
    parts = {part._attn_implementation for part in config_parts(bare.config)}
    reason = f"its attention is {', '.join(sorted(parts))}" if parts != {"sdpa"} else varlen.obstacle(plan, bare)
    reason = reason or (None if has_flash else "this card has no FlashAttention")
    reason = reason or context.sharing_obstacle(bare, plan.context, plan.recipe.data.seq_len)
    if reason:
        raise RecipeError([Problem(f"{plan.context} ranks cannot share a row: {reason}", "parallel.context")])


def _flash_is_possible(plan: Plan) -> bool:
    """Return whether flash_attention_2 is installed and supports this GPU, this recipe's dtype and packed documents."""
    kept = plan.recipe.fsdp.recomputation.keep_attention  # of operators of torch alone
    return flash_fits(plan) and bool(is_flash_attn_2_available()) and not kept and not varlen.card_obstacle()


def flash_fits(plan: Plan) -> bool:
    """Return whether flash_attention_2 supports this recipe's device, dtype and packed documents, installed or not."""
    half = plan.recipe.fsdp.mixed_precision.param_dtype in HALF
    return plan.topology.device == "cuda" and half and one_row_if_packed(plan.recipe)


def supports_flash(model: Any) -> bool:
    """Return whether a model's architecture supports flash_attention_2."""
    return bool(model._supports_flash_attn)


@contextlib.contextmanager
def _building_errors(kernel: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # sizes that do not match, unknown activation functions, a kernel that is not there
        words = error_summary(error)
        if isinstance(error, MemoryError) or "can't allocate memory" in words:
            raise RecipeError(f"model.config: {TOO_LARGE}: {words}") from None
        if kernel != "auto" and re.search("attention|flash|flex|sdpa", words, re.IGNORECASE):
            reason = words.split(". ")[0]
            raise RecipeError(f"model.attn_implementation: {kernel} is not available: {reason}; use auto") from None
        raise RecipeError(f"model.config: no model can be built from it: {words}") from None


# Methods of tensors, and functions of `torch.nn.init`, for which transformers puts its own of the same names.
DRAWS = {"normal_", "uniform_", "kaiming_uniform_"}


class _LargeOnMeta(TorchFunctionMode):
    """Creates tensors that are too large for a buffer on the meta device: all experts of a layer may be 30 GB.

    Nothing is drawn for tensors that are there: torch would compute the shapes of it in Python.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; if it creates a large tensor, create it on the meta device."""
        kwargs = kwargs or {}
        if func.__name__ in DRAWS and (drawn := args[0] if args else kwargs["tensor"]).is_meta:
            return drawn
        if func in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn):
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() > LARGEST_BUFFER:
                return made
        return func(*args, **kwargs)
