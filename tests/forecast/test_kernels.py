"""CUDA's attention kernels in a simulation: which is chosen, its FLOPs, its workspace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Operators
from simulated import SMALL, config_of, plan_of
from support import in_process
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptrain.config.objectives import Objective
from fsdptrain.forecast.kernels import CUDA_ATTENTION, backward_workspace, computed_flops, cuda_attention, on_card
from fsdptrain.forecast.recorder import Recorder
from fsdptrain.forecast.server import estimate
from fsdptrain.forecast.simulation import simulate
from fsdptrain.forecast.trace import Kernel
from fsdptrain.model import varlen
from fsdptrain.model.attention import choose_attention, flash_recommendation
from fsdptrain.model.tiles import attention_flops
from fsdptrain.plan.hardware import KNOWN
from fsdptrain.plan.plan import Plan, varied

H100, A100 = KNOWN["h100-80gb"], KNOWN["a100-80gb"]
ROWS, HEADS, GROUPS, LENGTH, SIZE = 2, 8, 2, 256, 64
ALL = 2 * ROWS * HEADS * LENGTH**2 * SIZE * 2  # FLOPs of both products of forward, hidden pairs included


def inputs(groups: int, dtype: torch.dtype = torch.bfloat16, length: int = LENGTH) -> list[torch.Tensor]:
    return [torch.empty(ROWS, heads, length, SIZE, dtype=dtype) for heads in (HEADS, groups, groups)]


def called(*qkv: torch.Tensor, **options: Any) -> list[str]:
    """Return the attention operators that the choice for CUDA calls on a device, here of type `meta`."""
    with Operators() as operators:
        cuda_attention("meta", torch.nn.functional.scaled_dot_product_attention)(
            *(x.to("meta") for x in qkv), **options
        )
    names = [operator._overloadpacket.__name__ for operator in operators.called]
    return [name.removeprefix("_scaled_dot_product_").removesuffix("_attention") for name in names if "_dot_" in name]


def test_the_kernel_is_chosen_by_card_mask_dtype_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool, device="meta")
    assert called(*inputs(GROUPS), is_causal=True, enable_gqa=True) == ["flash"]
    with on_card(A100):
        assert called(*inputs(GROUPS), is_causal=True, enable_gqa=True) == ["flash"]
        assert called(*inputs(HEADS), attn_mask=mask) == ["efficient"]
    with on_card(H100):
        assert called(*inputs(GROUPS), is_causal=True, enable_gqa=True) == ["cudnn"]
        assert called(*inputs(HEADS), attn_mask=mask) == ["cudnn"]
        assert called(*inputs(HEADS, length=192), attn_mask=mask[..., :192, :192]) == ["efficient"]
        assert called(*inputs(HEADS, torch.float32), is_causal=True) == ["efficient"]
        for version, chosen in ((91002, "flash"), (91900, "cudnn")):
            monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
            assert called(*inputs(GROUPS), is_causal=True, enable_gqa=True) == [chosen]


@pytest.mark.parametrize("operator", [operator for operator in CUDA_ATTENTION if "backward" not in operator.__name__])
def test_only_a_causal_kernel_without_a_mask_skips_half(operator: Any) -> None:
    q, k, v = inputs(GROUPS)
    bias = {"attn_bias": torch.empty(1)}
    assert computed_flops(operator, q, k, v) == ALL
    assert computed_flops(operator, q, k, v, is_causal=True) == ALL // 2
    if "flash" not in operator.__name__:
        assert computed_flops(operator, q, k, v, is_causal=True, **bias) == ALL
        assert computed_flops(operator, q, k, v, bias["attn_bias"], True) == ALL


def test_backward_has_a_sum_in_float32_and_a_gradient_for_each_head() -> None:
    for operator in (operator for operator in CUDA_ATTENTION if "backward" in operator.__name__):
        for groups, heads in ((HEADS, 0), (GROUPS, HEADS)):
            q, k, v = inputs(groups, length=200)
            expanded = 2 * ROWS * heads * 200 * SIZE * 2
            found = backward_workspace(operator, q, q, k, v)
            assert found == 4 * ROWS * HEADS * 256 * (SIZE + 1) + expanded
            assert computed_flops(operator, q, q, k, v) == 5 * 2 * ROWS * HEADS * 200**2 * SIZE


def test_attention_on_a_cpu_counts_half_of_all_pairs_for_every_head() -> None:
    """torch 2.11 asserts in its own formula that queries and keys have the same number of heads."""
    q, k, v = (x.requires_grad_() for x in inputs(GROUPS, torch.float32))
    recorder = Recorder("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        torch.ops.fsdptrain.attention(q, k, v, None, 0.1)
        out.sum().backward()
    found = [event.flops for event in recorder.trace.events if isinstance(event, Kernel) and event.flops]
    shapes = q.shape, k.shape, v.shape
    forward, backward = (attention_flops(*shapes, backward=way) // 2 for way in (False, True))
    assert found == [forward, forward, backward] and forward == ALL // 2


def check_step_on_hopper(folder: str) -> None:
    one_layer = SMALL | {"num_hidden_layers": 1}
    changes = {
        "model__config": one_layer,
        "data__packing": "none",
        "fsdp__mixed_precision": {},
        "train__global_batch_size": 16,
    }
    plan = plan_of(Path(folder), 8, 1, "cuda", data__seq_len=128, model__attn_implementation="auto", **changes)
    config = config_of(plan)
    plan_of_a100, plan = (choose_attention(plan, config, card.prefers_cudnn)[0] for card in (A100, H100))
    assert plan_of_a100.recipe.model.attn_implementation == varlen.NAME
    trace = simulate(plan, config, pretend=True, card=H100)
    names = {event.name for event in trace.events if isinstance(event, Kernel) and "attention" in event.name}
    assert names == {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"}
    assert trace.before[-1].size == H100.cublas == 2 * 2**25
    assert estimate(plan, config, H100).attention == "cuDNN"
    pairs = varied(
        plan, {"data.format": "preference", "train.objective": Objective.dpo, "model.attn_implementation": "auto"}
    )
    for kernel in ("auto", "flash_attention_2"):  # which need no mask for the answers of a pair
        named = varied(pairs, {"model.attn_implementation": kernel})
        assert estimate(named, config, H100).attention == "FlashAttention 2"
    _check_rates(plan, config)


def _check_rates(plan: Plan, config: Any) -> None:
    """Each kernel that a recipe or an installed package chooses computes at its own rate."""
    packed = varied(plan, {"data.packing": "concat", "data.seq_len": 512})  # more arithmetic than memory
    found = {}
    slow = dataclasses.replace(H100, flops=H100.flops / 1000)  # so that a step takes as long as it computes
    for kernel, card in {
        "varlen": slow, "FA3": dataclasses.replace(slow, flash="FA3"), "flash_attention_2": slow,
        "flex_attention": slow,
    }.items():  # fmt: skip
        named = kernel if kernel in ("flash_attention_2", "flex_attention") else "auto"
        of = varied(packed, {"model.attn_implementation": named, "train.micro_batch_size": 1})
        found[kernel] = estimate(of, config, card)
    assert {name: each.attention for name, each in found.items()} == {
        "varlen": "FlashAttention 2", "FA3": "FlashAttention 3", "flash_attention_2": "FlashAttention 2",
        "flex_attention": "flex_attention",
    }  # fmt: skip
    [note] = found["varlen"].notes
    assert str(flash_recommendation("FA3")) in note and f"{found['FA3'].step_s:.3g} s a step instead of" in note
    assert not any(each.notes for name, each in found.items() if name != "varlen")
    assert found["FA3"].compute_s < found["varlen"].compute_s
    assert found["flex_attention"].compute_s < found["flash_attention_2"].compute_s


def test_a_step_on_hopper_uses_cudnn_and_has_the_workspaces_of_cublas(tmp_path: Path) -> None:
    in_process(check_step_on_hopper, str(tmp_path))
