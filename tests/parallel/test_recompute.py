"""What layers keep for backward waits in host memory, and attention is not repeated; the numbers stay the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Operators, largest_difference
from support import TINY, on_ranks, write_pretrained
from torch import nn
from transformers import AttentionInterface, Qwen3Config

from fsdptrain.config.schema import Fsdp, Recomputation
from fsdptrain.data.corpus import document_bounds
from fsdptrain.errors import RecipeError
from fsdptrain.model.patches import VARLEN_FORWARD
from fsdptrain.model.tiles import attention
from fsdptrain.model.varlen import attend_within_documents
from fsdptrain.parallel import recompute as module
from fsdptrain.parallel.recompute import Kept, Offload, keep_choices, recompute

CPU = torch.device("cpu")
FORMS = {
    "full": "full",
    "offload": {"kind": "full", "offload": True},
    "keep_attention": {"kind": "full", "keep_attention": True},
    "both": {"kind": "full", "offload": True, "keep_attention": True},
}
WITH = {  # of two ranks
    "accumulated": ["fsdp.accumulation=hold"],
    "shared rows": ["parallel.context=2", "adapter.kind=lora", "adapter.r=3"],
}
MORE = {
    "bf16": ["fsdp.mixed_precision.param_dtype=bfloat16"],
    "QLoRA": ["adapter.kind=qlora", "adapter.r=3"],
    "SHARD_GRAD_OP": ["fsdp.strategy=SHARD_GRAD_OP"],
    "HYBRID_SHARD": ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=1"],
    "NO_SHARD": ["fsdp.strategy=NO_SHARD"],
    "weights offloaded": ["fsdp.cpu_offload=true"],
    "by inner class": ["fsdp.wrap=[Qwen3MLP, Qwen3Attention]"],
    "not packed": ["data.packing=none"],
}


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Undo what `keep_attention` registers in this process: the graphs of compiled layers would break."""
    registered: Any = AttentionInterface()
    before = {name: registered[name] for name in module.KERNELS}
    yield
    for name, attention_function in before.items():
        AttentionInterface.register(name, attention_function)
    module._keeping.clear()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("recomputed")
    config = Qwen3Config(**TINY, head_dim=16)
    return write_pretrained(tmp, config, data__eval={"fraction": 0.1}, train__global_batch_size=8)


def curves(recipe: Path, options: dict[str, list[str]], tmp: Path, **how: Any) -> dict[str, dict[str, Any]]:
    variants = {
        f"{option}/{form}": [*words, f"fsdp.activation_checkpointing={value}".replace("'", "").lower()]
        for option, words in options.items()
        for form, value in FORMS.items()
    }
    found = on_ranks(2, "shared_rows", tmp, recipe=str(recipe), variants=variants, steps=2, **how)[0]
    return {option: {form: found[f"{option}/{form}"] for form in FORMS} for option in options}


@pytest.mark.parametrize("options", [WITH, pytest.param(MORE, marks=pytest.mark.soak)], ids=["some", "more"])
def test_the_curve_is_bitwise_the_same(options: dict[str, list[str]], recipe: Path, tmp_path: Path) -> None:
    for option, forms in curves(recipe, options, tmp_path).items():
        assert all(found == forms["full"] for found in forms.values()), option


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_compute_the_same(backend: str, recipe: Path, tmp_path: Path) -> None:
    options = {"compiled": ["train.compile=true"], "shared rows": ["train.compile=true", "parallel.context=2"]}
    for option, forms in curves(recipe, options, tmp_path, compiled=backend, timeout=900).items():
        for form, found in forms.items():
            assert max(largest_difference(found["curve"], forms["full"]["curve"])) < 1e-6, (option, form)


def in_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, None, 0.5)


def in_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    bounds, longest = document_bounds([[5], [2, 3]])
    return attend_within_documents(nn.Module(), q, k, v, None, documents=bounds, longest_document=longest)[0]


class Block(nn.Module):
    """A layer with an attention operator between two products."""

    def __init__(self, kernel: Callable[..., torch.Tensor] = in_tiles) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(8, 8) for _ in range(2))
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).unflatten(-1, (2, 4)).transpose(1, 2)
        out, _ = module._entering_kept(lambda *qkv, **_: (self.kernel(*qkv), None))(heads, heads, heads)
        result: torch.Tensor = x + self.last(out.flatten(2))
        return result


@pytest.mark.parametrize("form", [*FORMS, "selective"])
@pytest.mark.parametrize(
    ("kernel", "operator"), [(in_tiles, torch.ops.fsdptrain.attention.default), (in_varlen, VARLEN_FORWARD)]
)
def test_backward_repeats_attention_unless_it_is_kept_and_the_gradients_are_equal(
    form: str, kernel: Callable[..., torch.Tensor], operator: Any
) -> None:
    torch.manual_seed(0)
    layers = [Block(kernel) for _ in range(3)]
    x, grads = torch.randn(2, 5, 8), []
    for how in (Recomputation("none"), Fsdp(activation_checkpointing=FORMS.get(form, form)).recomputation):
        recompute([*layers], how, CPU)
        out = x
        with Operators() as operators:
            for layer in layers:
                out = layer(out)
            out.square().sum().backward()
        grads.append([p.grad.clone() for layer in layers for p in layer.parameters() if p.grad is not None])
        for layer in layers:
            layer.zero_grad()
    assert operators.called.count(operator) == 3 * (2 if form in ("full", "offload") else 1)
    assert all(map(torch.equal, *grads)) and len(grads[0]) == 12


@pytest.mark.parametrize("attention", [False, True])
def test_the_backward_of_each_layer_fetches_what_the_layer_before_has_kept(
    attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, order = [Block() for _ in range(3)], list[str]()
    recompute([*layers], Recomputation("full", offload=True, keep_attention=attention), CPU)
    for number, layer in enumerate(layers):
        layer.first.weight.register_hook(lambda grad, number=number: order.append(f"backward {number}"))
    monkeypatch.setattr(Kept, "fetch_before", lambda *_: order.append("fetch"))
    out = torch.randn(2, 5, 8)
    for layer in layers:
        out = layer(out)
    out.sum().backward()
    assert order == ["fetch", "backward 2", "fetch", "backward 1", "fetch", "backward 0"]


def test_nothing_but_the_copy_in_host_memory_is_held_until_backward() -> None:
    layers, inputs = [Block() for _ in range(3)], list[Any]()
    recompute([*layers], Recomputation("full", offload=True, keep_attention=True), CPU)
    out = torch.randn(2, 5, 8)
    for layer in layers:
        inputs.append(weakref.ref(out))
        out = layer(out)
    gc.collect()
    assert [each() for each in inputs] == [None] * 3
    out.sum().backward()


def test_host_memory_is_used_again_in_the_next_step() -> None:
    offload, sizes = Offload(CPU), list[int]()
    for _ in range(3):
        kept = [Kept([], offload) for _ in range(4)]
        waiting = [each.send(torch.full((100,), float(n))) for n, each in enumerate(kept)]
        for n, each in reversed([*enumerate(kept)]):
            assert torch.equal(each.fetch_input(waiting[n]), torch.full((100,), float(n)))
        del kept, waiting, each
        sizes.append(sum(len(pieces) for pieces in offload._free.values()))
    assert sizes == [4, 4, 4]


def test_a_change_in_place_of_what_is_kept_is_found() -> None:
    offload = Offload(CPU)
    offload._free_sent = lambda: None  # type: ignore[method-assign]  # as on a GPU, which copies later
    tensor = torch.zeros(100)
    waiting = Kept([], offload).send(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="what a layer keeps was changed in place"):
        offload.fetch(waiting, [])


def test_dropout_in_attention_is_refused() -> None:
    kept = Kept(module.ATTENTION)
    with kept.contexts()[0], pytest.raises(RecipeError, match="cannot repeat the random numbers of dropout"):
        module._entering_kept(lambda *_, **__: None)(dropout=0.1)


def test_a_layer_that_names_its_input_is_refused() -> None:
    layer = Block()
    recompute([layer], Recomputation("full", offload=True), CPU)
    with pytest.raises(RecipeError, match="needs layers that take their input as the first argument"):
        layer(x=torch.randn(2, 5, 8))


class Routed(nn.Module):
    """A layer whose router chooses otherwise each time it is asked, and changes what `topk` has returned in place."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.asked = nn.Parameter(torch.randn(6, 8)), list[list[int]]()
        self.noise = torch.Generator().manual_seed(0)  # recomputation sets back only the state of torch's own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, chosen = (x @ self.experts.T + torch.randn(6, generator=self.noise)).softmax(-1).topk(2, dim=-1)
        values /= values.sum(-1, keepdim=True)
        self.asked.append(chosen.flatten().tolist())
        return (values[..., None] * self.experts[chosen]).sum(-2) * x


@pytest.mark.parametrize("form", [*FORMS, "selective"])
def test_a_router_that_is_recomputed_chooses_what_it_has_chosen(form: str) -> None:
    torch.manual_seed(0)
    layers = [Routed(), Routed()]
    for layer in layers:
        keep_choices(layer)
    how = Fsdp(activation_checkpointing=FORMS.get(form, form)).recomputation
    recompute([*layers], how, CPU, sends_tokens=True)
    x = torch.randn(5, 8, requires_grad=True)
    layers[1](layers[0](x)).sum().backward()
    for layer in layers:
        first, again = layer.asked
        assert first == again and len({*first}) > 2
    assert x.grad is not None and layers[0].experts.grad is not None
