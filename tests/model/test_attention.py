"""Attention in tiles gives the results of torch's kernels, and does not compute what a mask hides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Operators, most_allocated
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fsdptrain.model import tiles as kernel
from fsdptrain.model.tiles import QUERIES, Tile, attend, tiles

Made = list[torch.Tensor]  # an output, and the gradients of q, k and v
op = torch.ops.fsdptrain.attention


# --- masks: bool [rows, 1, length, length], True where a query sees a key --------------------------------------------


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def documents(*rows: list[int]) -> torch.Tensor:
    apart = []
    for lengths in rows:
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        apart.append(number[:, None] == number)
    return (torch.stack(apart) & causal(sum(rows[0])))[:, None]


def window(length: int, width: int) -> torch.Tensor:
    return (causal(length) & causal(length).triu(1 - width)).expand(2, 1, length, length)


def scattered(length: int, share: float, seed: int, alike: bool = False) -> torch.Tensor:
    """Return a random mask, later keys included, in which every query sees itself."""
    chosen = torch.rand(1 if alike else 2, 1, length, length, generator=torch.Generator().manual_seed(seed)) < share
    return (chosen | torch.eye(length, dtype=torch.bool)).expand(2, 1, length, length)


MASKS: dict[str, tuple[int, torch.Tensor | None]] = {
    "one": (1, None),
    "causal 128": (128, None),
    "causal 300": (300, None),
    "rows alike": (300, documents([100, 7, 193], [100, 7, 193])),
    "rows that differ": (300, documents([100, 7, 193], [300])),
    "short documents": (200, documents([1] * 200, [3, 5] * 25)),
    "window 40": (300, window(300, 40)),
    "window 200": (300, window(300, 200)),
    "both ways": (200, scattered(200, 0.5, 1)),
}


# --- the operator ----------------------------------------------------------------------------------------------------


def inputs(length: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> Made:
    """Return q, k, v as a model computes them, with heads after positions in memory, and a gradient of the output."""
    made = torch.Generator().manual_seed(length + heads + groups + size)
    q, k, v, grad = (
        torch.randn(2, length, count, size, generator=made).to(dtype) for count in (heads, groups, groups, heads)
    )
    return [q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), grad]


def differentiated(function: Callable[..., torch.Tensor], qkv: Made, grad: torch.Tensor) -> Made:
    leaves = [tensor.detach().requires_grad_() for tensor in qkv]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def in_tiles(mask: torch.Tensor | None, scale: float) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: op(q, k, v, mask, scale)


def of_torch(mask: torch.Tensor | None, scale: float) -> Callable[..., torch.Tensor]:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale).transpose(1, 2)

    return function


def errors(found: Made, exact: Made) -> list[float]:
    """Return the error relative to the exact result, or the absolute one if that is zero."""
    differences = ((a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True) if b.norm() > 1e-9)
    return [float(difference) for difference in differences]


def compared(
    function: Callable[..., torch.Tensor], mask: torch.Tensor | None, qkv: Made, grad: torch.Tensor, scale: float = 0.3
) -> tuple[list[float], list[float]]:
    """Return the errors of a function that computes attention, and those of torch's kernel in the same dtype."""
    exact = differentiated(of_torch(mask, scale), [x.double() for x in qkv], grad.double())
    found = differentiated(function, qkv, grad)
    assert [x.dtype for x in found] == [grad.dtype] * 4
    assert [x.shape for x in found] == [grad.shape, *(x.shape for x in qkv)]
    return errors(found, exact), errors(differentiated(of_torch(mask, scale), qkv, grad), exact)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 16), (4, 2, 64), (6, 1, 80)])
def test_results_and_gradients_are_those_of_attention(name: str, heads: int, groups: int, size: int) -> None:
    (length, mask), scale = MASKS[name], 0.8 * size**-0.5
    *qkv, grad = inputs(length, heads, groups, size, torch.float32)
    assert max(compared(in_tiles(mask, scale), mask, qkv, grad, scale)[0]) < 1e-5
    *qkv, grad = inputs(length, heads, groups, size, torch.bfloat16)
    ours, others = compared(in_tiles(mask, scale), mask, qkv, grad, scale)
    assert all(a <= 2 * b for a, b in zip(ours, others, strict=True)), (ours, others)


@given(st.integers(1, 2 * QUERIES + 5), st.floats(0, 1), st.integers(0, 99), st.booleans())
@settings(max_examples=40)
def test_results_and_gradients_are_those_of_attention_with_any_mask(
    length: int, share: float, seed: int, alike: bool
) -> None:
    mask = scattered(length, share, seed, alike)
    *qkv, grad = inputs(length, 4, 2, 16, torch.float32)
    assert max(compared(in_tiles(mask, 0.3), mask, qkv, grad)[0]) < 1e-5


@pytest.mark.parametrize("deviation", [1.0, 3.0, 10.0, 50.0])
def test_bf16_is_about_as_near_as_torch_however_large_the_scores(deviation: float) -> None:
    """Without a correction, scores with a deviation of 50 would give twenty times the error of torch's kernel."""
    *qkv, grad = inputs(300, 4, 4, 64, torch.bfloat16)
    qkv[0] = qkv[0] * deviation
    ours, others = compared(in_tiles(None, 0.125), None, qkv, grad, 0.125)
    assert all(a < 2.5 * b for a, b in zip(ours, others, strict=True)), (ours, others)


def check_operator(operator: Any, args: tuple[Any, ...], **limits: float) -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    found = torch.library.opcheck(operator, args, test_utils=tests, **limits)
    assert found == dict.fromkeys(tests, "SUCCESS")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, documents([9, 4], [6, 7])])
def test_the_operator_passes_the_checks_of_torch(mask: torch.Tensor | None, dtype: torch.dtype) -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs(13, 4, 2, 16, dtype))
    check_operator(op.default, (q, k, v, mask, 0.25), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size"), [(12, 4, 16), (6, 6, 64)])
def test_its_workspace_is_predicted(dtype: torch.dtype, heads: int, groups: int, size: int) -> None:
    q, k, v, grad = inputs(512, heads, groups, size, dtype)
    mask = documents([300, 212], [512])
    for operator, args, results in [
        (op.default, (q, k, v), [q]),
        (torch.ops.fsdptrain.attention_backward.default, (grad, q, k, v), [q, k, v]),
    ]:
        foreseen = kernel.WORKSPACE[operator](*args) + sum(x.nbytes for x in results)
        assert foreseen == pytest.approx(most_allocated(operator, *args, None, 0.25), rel=0.05)
        assert tiles(q, mask) is tiles(q, mask), "made once for a model"
        assert most_allocated(operator, *args, mask, 0.25) < foreseen


# --- tiles -----------------------------------------------------------------------------------------------------------


def pairs(found: list[Tile]) -> int:
    return sum(
        (t.rows.stop - t.rows.start) * (t.queries.stop - t.queries.start) * (t.keys.stop - t.keys.start) for t in found
    )


def tiles_of(mask: torch.Tensor | None, length: int) -> list[Tile]:
    return tiles(torch.empty(2, 4, length, 16), mask)


def test_masked_pairs_are_not_computed() -> None:
    every = 2 * 1024**2
    assert pairs(tiles_of(None, 1024)) == every * 17 // 32  # half of it, and half of the squares on the diagonal
    packed = pairs(tiles_of(documents([256] * 4, [256] * 4), 1024))
    assert packed == 2 * 4 * 64 * (64 + 128 + 192 + 256)
    uneven = documents([300, 100, 400, 224], [50, 450, 324, 200])
    assert int(uneven.sum()) < pairs(tiles_of(uneven, 1024)) < every // 3
    assert pairs(tiles_of(window(1024, 128), 1024)) < every // 4


# --- in a model ------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 40},
    "gpt_neox": {"num_key_value_heads": 4},
}
PACKED = torch.cat([torch.arange(90), torch.arange(110)]), torch.cat([torch.arange(150), torch.arange(50)])


@pytest.fixture
def installed() -> Any:
    kernel.install()
    yield
    AttentionInterface.register("sdpa", sdpa_attention_forward)


def model_of(kind: str, kernel: str = "sdpa", dtype: torch.dtype = torch.float32, **own: Any) -> Any:
    config = AutoConfig.for_model(kind, **SIZES | (own or MODELS.get(kind, {})))
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=kernel)


def trained(model: Any, rows: Sequence[torch.Tensor] = PACKED, **passed: Any) -> dict[str, torch.Tensor]:
    """Return the logits of rows with these position ids, and every gradient."""
    positions = torch.stack([*rows])
    ids = torch.randint(128, positions.shape, generator=torch.Generator().manual_seed(2))
    logits = model(input_ids=ids, position_ids=positions, **passed, use_cache=False).logits
    model.zero_grad()
    logits.float().logsumexp(-1).square().mean().backward()
    return {"logits": logits.detach()} | {name: param.grad for name, param in model.named_parameters()}


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest distance of logits or of a gradient from the expected ones, relative to their length."""
    assert found.keys() == expected.keys()
    return max(errors([*found.values()], [tensor.double() for tensor in expected.values()]))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rows", [PACKED, PACKED[:1] * 2], ids=["differ", "alike"])
def test_a_model_computes_the_same_as_with_eager_attention(
    kind: str, rows: tuple[torch.Tensor, ...], installed: None
) -> None:
    with Operators() as operators:
        found = trained(model_of(kind), rows)
    assert operators.called.count(op.default) == SIZES["num_hidden_layers"]
    assert worst(found, trained(model_of(kind, "eager"), rows)) < 1e-5


class Module(torch.nn.Module):
    num_key_value_groups = 2
    is_causal = True


def fell_back(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, mask: torch.Tensor | None, length: int = 8, **options: Any
) -> bool:
    q, k, v, _ = inputs(length, 4, 2, 16, dtype)
    asked = []
    monkeypatch.setattr(kernel, "sdpa_attention_forward", lambda *a, **o: asked.append(1) or (q, None))
    attend(Module(), q, k, v, mask, **options)
    return bool(asked)


def test_transformers_computes_what_tiles_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, bf16, wide = documents([3, 5], [8]), torch.bfloat16, torch.float32
    bias = torch.zeros(2, 1, 8, 8, dtype=bf16)
    for dtype, seen, options in [
        (bf16, None, {"dropout": 0.1}),
        (bf16, mask, {"softcap": 30.0}),
        (bf16, mask, {"position_bias": bias}),
        (bf16, None, {"is_causal": False}),
        (bf16, bias, {}),  # a mask that is added to scores
        (bf16, mask.expand(2, 4, 8, 8), {}),  # one for each head
        (bf16, mask[:1], {}),
    ]:
        assert fell_back(monkeypatch, dtype, seen, **options), options
    for dtype, seen in [(bf16, None), (bf16, mask), (wide, mask)]:
        assert not fell_back(monkeypatch, dtype, seen)
    for avx512, length, faster in [(False, 8, False), (False, kernel.SHORT + 1, True), (True, 8, True)]:
        monkeypatch.setattr(kernel, "AVX512", avx512)
        assert fell_back(monkeypatch, wide, None, length) == faster
