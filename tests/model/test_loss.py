"""The chunked loss equals the plain one in value and gradients for every architecture, without a large tensor."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Operators
from test_architectures import ARCHITECTURES, NEEDED, config_of
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig

from fsdptrain.errors import RecipeError
from fsdptrain.model import loss

LOGITS = {"gemma2": {"final_logit_softcapping": 0.05}, "granite": {"logits_scaling": 30.0}}


def plain(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    logits = functional.linear(hidden, weight, bias).float()
    return functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def gradients(function: Any, inputs: list[torch.Tensor | None], scale: float) -> tuple[torch.Tensor, list[Any]]:
    leaves = [x if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs]
    value = function(*leaves)
    (value * scale).backward()
    return value.detach(), [x if x is None else x.grad for x in leaves]


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 20), vocab=st.integers(2, 9), hidden=st.integers(1, 5), chunk=st.integers(1, 25),
    biased=st.booleans(), frozen=st.sampled_from(["nothing", "hidden", "weight"]),
    masked=st.sampled_from(["none", "some", "all"]), divisor=st.integers(1, 50),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_any_split_into_chunks_gives_the_plain_loss_and_gradients(
    tokens: int,
    vocab: int,
    hidden: int,
    chunk: int,
    biased: bool,
    frozen: str,
    masked: str,
    divisor: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(tokens * 100 + vocab)
    states = torch.randn(tokens, hidden).to(dtype).requires_grad_(frozen != "hidden")
    weight = torch.randn(vocab, hidden).to(dtype).requires_grad_(frozen != "weight")
    bias = torch.randn(vocab).to(dtype).requires_grad_() if biased else None
    labels = torch.randint(0, vocab, (tokens,))
    labels[{"none": slice(0), "some": slice(None, None, 2), "all": slice(None)}[masked]] = -100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "loss_chunks", lambda tokens, *_: -(-tokens // chunk))

        def chunked(*inputs: Any) -> torch.Tensor:
            return loss.chunked_loss(*inputs, (labels,), divisor, lambda logits: logits * 1)

        expected, wanted = gradients(lambda *inputs: plain(*inputs, labels) / divisor, [states, weight, bias], 1 / 3)
        found, got = gradients(chunked, [states, weight, bias], 1 / 3)
        with torch.no_grad():
            torch.testing.assert_close(chunked(states, weight, bias), expected)
    torch.testing.assert_close(found, expected)
    # a bf16 gradient sums bf16 products: where they cancel, the tolerance depends on their size
    near: dict[str, float] = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    assert [g is None for g in got] == [w is None for w in wanted]
    for grad, other in zip(got, wanted, strict=True):
        if grad is not None:
            assert grad.dtype == dtype
            torch.testing.assert_close(grad, other, **near)
    assert masked != "all" or (found == 0 and all(g is None or not g.any() for g in got))


def test_the_gradients_of_chunks_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 products are rounded, and their sum is rounded once: the weight's gradient is that, bit for bit."""
    torch.manual_seed(0)
    states, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((64, 8), (20, 8), (20,)))
    inputs: list[torch.Tensor | None] = [states, weight.requires_grad_(), bias.requires_grad_()]
    labels = torch.randint(0, 20, (64,))

    def of(rows: slice) -> list[torch.Tensor]:
        def chunked(states: torch.Tensor, *head: torch.Tensor) -> torch.Tensor:
            return loss.chunked_loss(states[rows], *head, (labels[rows],), 49, lambda logits: logits * 1)

        found: list[torch.Tensor] = gradients(chunked, inputs, 1.0)[1][1:]
        return found

    whole, parts = of(slice(None)), [of(slice(start, start + 4))[0] for start in range(0, 64, 4)]
    monkeypatch.setattr(loss, "loss_chunks", lambda *_: len(parts))
    in_chunks = of(slice(None))
    assert torch.equal(in_chunks[0], torch.stack(parts).float().sum(0).bfloat16())
    torch.testing.assert_close(in_chunks[1], whole[1], rtol=2**-8, atol=0.0)


def tiny(kind: str) -> Any:
    config = config_of(kind, **LOGITS.get(kind, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.eval()  # gpt2 has dropout


PLAIN_ONLY = [kind for kind, overrides in NEEDED.items() if "train.loss=plain" in overrides]


@pytest.mark.parametrize("kind", PLAIN_ONLY)
def test_architectures_that_cannot_be_chunked_are_rejected_with_the_way_out(kind: str) -> None:
    with pytest.raises(RecipeError, match=r"train.loss: chunked cannot be computed: .*; use plain"):
        loss.compute_in_chunks(tiny(kind))


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind not in PLAIN_ONLY])
def test_every_architecture_gives_its_plain_loss(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "loss_chunks", lambda tokens, *_: -(-tokens // 13))
    model = tiny(kind)
    ids, labels = torch.randint(0, 512, (2, 2, 20))
    labels[:, ::3] = -100
    inputs = {"input_ids": ids, "position_ids": torch.arange(10).repeat(2, 2), "use_cache": False}
    logits = model(**inputs).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    loss.compute_in_chunks(model)
    assert torch.equal(model(**inputs).logits, logits)
    found = model(**inputs, labels=labels)
    got = torch.autograd.grad(found, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(found, expected)
    for grad, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)
    # To be compiled, an architecture's code after its head is traced: run what was traced.
    monkeypatch.setattr(torch, "compile", lambda graph, dynamic: graph)
    compiled = tiny(kind)
    loss.compute_in_chunks(compiled, compiled=True)
    again = compiled(**inputs, labels=labels)
    torch.testing.assert_close(again, found)
    for grad, other in zip(
        torch.autograd.grad(again, list(compiled.parameters()), allow_unused=True), got, strict=True
    ):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-6)
    if kind in LOGITS:
        changed = functional.cross_entropy(
            functional.linear(model.get_decoder()(**inputs)[0], model.lm_head.weight).flatten(0, 1), labels.flatten(),
            reduction="sum",
        )  # fmt: skip
        assert abs(changed - expected) > 1e-4 * expected, "this test would not notice"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_it_is_one_graph_for_each_length_of_chunks(
    dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five chunks of two lengths: steps with other divisors compile nothing, and the values are those without."""
    monkeypatch.setattr(loss, "loss_chunks", lambda *_: 5)
    monkeypatch.setattr(torch.nn.Module, "__init__", torch.nn.Module.__init__)  # dynamo replaces it for good
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.manual_seed(1)
    states, weight = torch.randn(64, 32).to(dtype), (torch.randn(700, 32) * 0.3).to(dtype)
    labels = torch.randint(0, 700, (64,))
    labels[::3] = -100
    inputs: list[torch.Tensor | None] = [states.requires_grad_(), weight.requires_grad_(), None]
    counters.clear()
    compiled, found = loss.compiled_gradients(capped), []
    for divisor in (64, 41, 2**24 + 1, 3):
        made, expected = (
            gradients(lambda *x, g=g, n=divisor: loss.chunked_loss(*x, (labels,), n, capped, g), inputs, 1.0)
            for g in (compiled, None)
        )
        found.append(counters["stats"]["unique_graphs"])
        pairs = zip([made[0], *made[1][:2]], [expected[0], *expected[1][:2]], strict=True)
        worst = [float((a - b).float().norm() / b.float().norm()) for a, b in pairs]
        assert worst[0] < (1e-6 if dtype == torch.float32 else 1e-3)
        assert max(worst) < (1e-6 if dtype == torch.float32 else 1e-2)  # inductor does not round between operators
    assert found == [2] * 4 and not counters["graph_break"]


def capped(logits: torch.Tensor) -> torch.Tensor:
    return 2 * torch.tanh(logits / 2)


@pytest.mark.soak
def test_a_compiler_keeps_no_float32_tensor_of_all_logits() -> None:
    logits, labels = torch.randn(16, 3000).bfloat16(), torch.arange(16)
    _, [code] = run_and_get_code(
        lambda: loss.compiled_gradients(lambda x: x * 1)(logits, (labels,), torch.full([16], 7.0))
    )
    assert "(16, 1)" in code
    assert not re.search(r"empty_strided\w*\(\(16, 3000\), \(3000, 1\), torch.float32", code)


def test_logits_of_all_tokens_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunk = tiny("llama tied"), 12
    monkeypatch.setattr(loss, "loss_chunks", lambda tokens, *_: -(-tokens // chunk))
    ids = torch.zeros(3, 33, dtype=torch.long)
    largest = []
    for taught in (False, True):
        if taught:
            loss.compute_in_chunks(model)
        with Operators() as operators:
            found = model(input_ids=ids, use_cache=False, **({"labels": ids} if taught else {}))
            (found if taught else found.logits.sum()).backward()
        largest.append(operators.largest)
    assert largest == [512 * ids.numel(), 512 * max(64, chunk)]  # now the head's own gradient


class Turned(nn.Module):
    def __init__(self, between: bool) -> None:
        super().__init__()
        self.config = PreTrainedConfig()
        self.decoder, self.lm_head, self.between = nn.Linear(4, 4), nn.Linear(4, 9), between

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, inputs_embeds: torch.Tensor) -> Any:
        hidden = self.decoder(inputs_embeds=inputs_embeds)[0]
        return SimpleNamespace(logits=self.lm_head(hidden.tanh() if self.between else hidden + self.nothing))


def test_computing_between_decoder_and_head_is_rejected_with_the_way_out() -> None:
    with pytest.raises(RecipeError, match=r"Turned computes something between .* use plain"):
        loss.compute_in_chunks(Turned(between=True))
    with pytest.raises(RecipeError, match=r"Turned does not run with stand-ins .*\(AttributeError.* use plain"):
        loss.compute_in_chunks(Turned(between=False))
    model = tiny("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(RecipeError, match="is not a decoder and a linear head; use plain"):
        loss.compute_in_chunks(model)
