"""Linear layers with frozen 4-bit weights (QLoRA): NF4 with double quantisation, bit for bit as bitsandbytes makes it.

bitsandbytes keeps the scales of a weight outside of its parameter, where `fully_shard` cannot see them. Here both are
plain parameters that are sharded by rows: what FSDP2 gathers is the quantised bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from fsdptrain.model.patches import dtensor_like, import_quietly, one_thread

BLOCK = 64  # weights of a row that share one scale
GROUP = 256  # scales that share one scale of their own
CHUNK = 2**24  # weights that are quantised at a time: bitsandbytes needs some 15 bytes for each on a CPU

# `weight`, `absmax`, `scales`, `offset` and `code` of an NF4Linear.
Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class NF4Linear(nn.Linear):
    """A linear layer whose frozen weight is in NF4: a bit more than half a byte for each number.

    Parameters: `weight` is uint8 [out, in / 2], two numbers in a byte; `absmax` is uint8 [out, in / 64], the largest
    magnitude of each 64 numbers. Buffers, which are not saved: absmax is code[absmax] · scales + offset, with `scales`
    float32 [ceil(out · in / 64 / 256)], `offset` float32 [] and `code` float32 [256].
    """

    absmax: nn.Parameter
    scales: torch.Tensor
    offset: torch.Tensor
    code: torch.Tensor

    def __init__(
        self, rows: int, columns: int, bias: nn.Parameter | None, dtype: torch.dtype, transposed: bool = False
    ) -> None:
        """`dtype` is that of the weight before its quantisation; `transposed`: the files hold [in, out] (Conv1D)."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = columns, rows
        self.base_dtype, self.transposed = dtype, transposed

        def frozen(width: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, width, dtype=torch.uint8, device="meta"), requires_grad=False)

        self.weight, self.absmax = frozen(columns // 2), frozen(columns // BLOCK)
        self.register_parameter("bias", bias)
        groups = -(-rows * columns // BLOCK // GROUP)
        self.register_buffer("scales", torch.zeros(groups), persistent=False)
        self.register_buffer("offset", torch.zeros(()), persistent=False)
        self.register_buffer("code", torch.zeros(256), persistent=False)

    @property
    def quantised(self) -> Quantised:
        """What `dequantise` needs. The parameters are whole only where FSDP2 has gathered them."""
        return self.weight, self.absmax, self.scales, self.offset, self.code

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input · weightᵀ + bias; the dequantised weight is freed at once, and made again in backward."""
        result: torch.Tensor = _Product.apply(input, self.bias, *self.quantised)
        return result


class _Product(torch.autograd.Function):
    """input · weightᵀ + bias with a quantised weight, which gets no gradient."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, bias: torch.Tensor | None, *quantised: Any) -> torch.Tensor:
        ctx.save_for_backward(*quantised)  # FSDP2 frees what it has gathered, and gathers it again for backward
        return functional.linear(input, dequantise(quantised, input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs_input, needs_bias, *_ = ctx.needs_input_grad
        of_input = grad @ dequantise(ctx.saved_tensors, grad.dtype) if needs_input else None
        of_bias = grad.flatten(0, -2).sum(0) if needs_bias else None
        return of_input, of_bias, None, None, None, None, None


def dequantise(quantised: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [out, in] of an NF4Linear from what its `quantised` has, whole."""
    packed, absmax, scales, offset, code = quantised
    bnb = torch.ops.bitsandbytes
    levels = bnb.dequantize_blockwise(absmax.flatten(), scales, code, GROUP, torch.float32) + offset
    shape = [packed.shape[0], packed.shape[1] * 2]
    return bnb.dequantize_4bit(packed.view(-1, 1), levels, BLOCK, "nf4", shape, dtype)


def linear_layers(model: Any) -> dict[str, nn.Module]:
    """Return the layers of a skeleton that transformers would hand to bitsandbytes, by name.

    They are all linear layers except the head, those that are tied to the embedding or kept in float32, and experts.
    The model may have adapters.
    """
    head = model.get_output_embeddings()
    last = [*model.named_parameters()][-1][0]  # of some architectures it is another head
    tied = model.all_tied_weights_keys
    keys = {name.removesuffix(".weight") for name in (*tied.keys(), *tied.values(), last)}
    skipped = keys | {name for name, module in model.named_modules() if module is head}
    return {
        name: layer
        for name, layer in model.named_modules()
        if (type(layer) is nn.Linear or isinstance(layer, Conv1D))
        and not any(name.endswith(key) or f"{name}.".startswith(f"{key}.") for key in skipped)
        and not name.rpartition(".")[0].endswith((".lora_A", ".lora_B"))
        and model.float32_names.isdisjoint({f"{name}.weight", f"{name}.base_layer.weight"})
    }


def is_quantisable(layer: nn.Module) -> bool:
    """Return whether the inputs of a linear layer are in whole blocks, so that its rows can be quantised one by one."""
    return _shape(layer)[1] % BLOCK == 0


def quantise_layers(model: Any, layers: dict[str, nn.Module], dtype: torch.dtype) -> None:
    """Replace layers of a skeleton by NF4Linear, in place. `dtype` is what the files are cast to before."""
    if layers:
        import_quietly("bitsandbytes")  # registers its operators
    for name, layer in layers.items():
        transposed = isinstance(layer, Conv1D)
        model.set_submodule(name, NF4Linear(*_shape(layer), layer.bias, dtype, transposed))  # type: ignore[arg-type]
        model.float32_names |= {f"{name}.{key}" for key in ("scales", "offset", "code")}  # see `place_buffers`


def _shape(layer: nn.Module) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear layer."""
    shape = layer.get_parameter("weight").shape
    return (shape[1], shape[0]) if isinstance(layer, Conv1D) else (shape[0], shape[1])


def round_trip(weight: torch.Tensor, layer: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight that an NF4Linear in the place of a plain layer computes with, in the shape of that layer's.

    `weight` is the whole one, which is cast to `dtype` before it is quantised.
    """
    transposed = isinstance(layer, Conv1D)
    code = dynamic_code().to(weight.device)  # before anything is quantised: it registers the operators
    packed, absmax = quantise_rows((weight.T if transposed else weight).to(dtype))
    coded, scales, offset = quantise_scales(absmax, code)
    found = dequantise((packed, coded, scales, offset, code), dtype)
    return found.T.contiguous() if transposed else found


def dynamic_code() -> torch.Tensor:
    """Return the 256 numbers that bitsandbytes quantises scales to, float32 [256]."""
    code: torch.Tensor = import_quietly("bitsandbytes").functional.create_dynamic_map()
    return code


class RowQuantizer:
    """Quantises the rows that this rank reads, as transformers reads them: it has the interface of an `HfQuantizer`.

    What depends on all rows, the second quantisation, is left to `finish`, which is collective.
    """

    pre_quantized = False

    def __init__(self, device: torch.device) -> None:
        """`device` quantises: with `fsdp.cpu_offload` it is not the one that keeps the result."""
        self._device = device
        self._absmax: dict[NF4Linear, torch.Tensor] = {}  # float32 [this rank's rows, in / 64]

    def param_needs_quantization(self, model: nn.Module, name: str) -> bool:
        """Return whether a parameter of the model is the weight of an NF4Linear."""
        owner, _, key = name.rpartition(".")
        return key == "weight" and isinstance(model.get_submodule(owner), NF4Linear)

    def get_quantize_ops(self) -> RowQuantizer:
        """Return the object whose `convert` transformers calls with what it has read."""
        return self

    def convert(
        self, tensors: dict[str, Any], model: nn.Module, missing_keys: set[str], **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the packed rows of weights by the same names, and keep their scales until `finish`."""
        quantised = {}
        for name, rows in tensors.items():
            rows, owner = rows[0] if isinstance(rows, list) else rows, name.rpartition(".")[0]
            layer: Any = model.get_submodule(owner)
            if not self.param_needs_quantization(model, name):  # another result of the same conversion
                quantised[name] = rows
                continue
            packed, self._absmax[layer] = quantise_rows(rows.to(self._device, layer.base_dtype))
            quantised[name] = packed.to(rows.device)
            missing_keys.discard(f"{owner}.absmax")
        return quantised

    @torch.no_grad()
    def finish(self) -> None:
        """Quantise the scales of all layers, which are gathered for one layer at a time; collective."""
        code = dynamic_code()
        for layer, absmax in self._absmax.items():
            layer.code.copy_(code)
            sharded: Any = layer.absmax
            coded, scales, offset = quantise_scales(dtensor_like(absmax, sharded).full_tensor(), layer.code)
            own = distribute_tensor(coded, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()
            coded = dtensor_like(own.to(layer.weight.device), sharded)
            layer.absmax = nn.Parameter(coded, requires_grad=False)
            layer.scales.copy_(scales)
            layer.offset.copy_(offset)
        self._absmax.clear()


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [n, in] of a weight in NF4: packed, uint8 [n, in / 2], and their scales, float32 [n, in / 64]."""
    packed = rows.new_empty(len(rows), rows.shape[1] // 2, dtype=torch.uint8)
    absmax = rows.new_empty(len(rows), rows.shape[1] // BLOCK, dtype=torch.float32)
    if not rows.numel():  # a rank may have no row: a kernel cannot be launched for that
        return packed, absmax
    size = max(1, CHUNK // rows.shape[1])  # rows
    for part, *results in zip(rows.split(size), packed.split(size), absmax.split(size), strict=True):
        quantised = torch.ops.bitsandbytes.quantize_4bit(part.contiguous(), BLOCK, "nf4", torch.uint8)
        for result, values in zip(results, quantised, strict=True):
            result.copy_(values.view_as(result))
    return packed, absmax


def quantise_scales(absmax: torch.Tensor, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the scales float32 [out, in / 64] of a whole weight as uint8 of the same shape, `scales` and `offset`."""
    with one_thread():  # the sum of several depends on their number
        offset = absmax.flatten().mean()
    coded, scales = torch.ops.bitsandbytes.quantize_blockwise(absmax.flatten() - offset, code, GROUP)
    return coded.view_as(absmax), scales, offset
