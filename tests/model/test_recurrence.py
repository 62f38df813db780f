"""Hybrid models on packed documents: every document as if it were alone, in transformers' own code."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import small_config
from reference import batches_of, cosine_rates, largest_difference, plain_curve, stream_of
from support import on_ranks, write_recipe
from transformers import AutoModelForCausalLM

from fsdptrain.config.objectives import Objective
from fsdptrain.config.reader import load
from fsdptrain.data.corpus import document_bounds
from fsdptrain.model.patches import BOUNDS, accept_documents, in_kernel
from fsdptrain.plan.plan import make_plan, varied
from fsdptrain.plan.topology import Topology
from fsdptrain.train.preflight import missing_kernels

GATED = ["linear_attention", "full_attention"]
HYBRIDS: dict[str, dict[str, Any]] = {  # two layers each, if possible one of each kind
    "qwen3_5_text": {"layer_types": GATED}, "qwen3_next": {"layer_types": GATED},
    "olmo_hybrid": {"layer_types": GATED}, "kimi_linear": {"layer_types": GATED},
    "bamba": {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 16},
    "falcon_h1": {}, "nemotron_h": {"mamba_num_heads": 8, "chunk_size": 16}, "zamba2": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
PACKED = [[70, 1, 2, 27], [3, 97]]


def model_of(kind: str) -> Any:
    torch.manual_seed(1)
    own = HYBRIDS[kind]
    layers = {"num_hidden_layers": len(own["layer_types"])} if "layer_types" in own else {}
    config = small_config(kind, **own, **layers)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def trained(model: Any, ids: torch.Tensor, positions: torch.Tensor, **passed: Any) -> torch.Tensor:
    """Return the logits, and add to every gradient what they give."""
    logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, **passed).logits
    logits.logsumexp(-1).square().sum().backward()
    return logits.detach()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_document_has_the_logits_and_gradients_it_has_alone(kind: str) -> None:
    model = model_of(kind)
    ids = torch.randint(400, (2, 100), generator=torch.Generator().manual_seed(2))
    alone = torch.cat([
        trained(model, part, torch.arange(part.shape[1])[None])[0]
        for row, lengths in zip(ids, PACKED, strict=True) for part in row[None].split(lengths, dim=1)
    ])  # fmt: skip
    expected = gradients(model)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in PACKED])
    assert accept_documents(model)
    together = trained(model, ids, positions).flatten(0, 1)
    gradients(model)
    found = trained(model, ids, positions, packed_documents=document_bounds(PACKED)[0]).flatten(0, 1)
    difference = float((found - alone).norm() / alone.norm())
    assert difference < 1e-5 < 1e-4 < float((together - alone).norm() / alone.norm())
    worst = max(
        float((gradient - expected[name]).norm() / expected[name].norm())
        for name, gradient in gradients(model).items() if expected[name].norm() > 1e-6
    )  # fmt: skip
    assert worst < 1e-4


@pytest.mark.parametrize("name", BOUNDS)
def test_a_kernel_gets_the_documents_of_all_rows_in_one(name: str) -> None:
    """On a GPU: `seq_idx` numbers the documents of tokens, `cu_seqlens` are their bounds. Empty ones come last."""
    dim, argument = BOUNDS[name]
    bounds, _ = document_bounds(PACKED)

    def kernel(tokens: torch.Tensor, *, seq_idx: Any = None, cu_seqlens: Any = None) -> torch.Tensor:
        assert len(tokens) == 1 and (seq_idx is None) == (argument == "cu_seqlens") != (cu_seqlens is None)
        return seq_idx if cu_seqlens is None else cu_seqlens

    lengths = [*itertools.chain(*PACKED)]
    row = torch.zeros(1, 200, 1) if dim == 1 else torch.zeros(1, 1, 200)
    found = in_kernel(kernel, name, bounds, (row,), {})
    numbers = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    assert found.dtype == torch.int32 and torch.equal(found, numbers[None] if argument == "seq_idx" else bounds)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("recurrence")
    for kind in ("qwen3_5_text", "bamba"):
        model_of(kind).save_pretrained(tmp / kind)
    return write_recipe(
        tmp, model={"id": str(tmp / "qwen3_5_text"), "tokenizer": {"train": 400}}, train__steps=3,
        train__global_batch_size=4, train__micro_batch_size=2,
    )  # fmt: skip


def test_curves_of_packed_hybrids_agree_with_a_plain_loop(recipe: Path, tmp_path: Path) -> None:
    folders = {kind: str(recipe.parent / kind) for kind in ("qwen3_5_text", "bamba")}
    variants = {kind: [f"model.id={folder}"] for kind, folder in folders.items()}
    variants["qwen3_5_text"] += ["fsdp.activation_checkpointing=full", "train.loss=plain"]
    found = on_ranks(2, "curves", tmp_path, recipe=str(recipe), variants=variants, steps=3)[0]
    batches = batches_of(stream_of(recipe)[0], 4, 3)
    assert all(len(labels) > 4 for _, _, labels in batches), "no sequence has several documents"
    for kind, folder in folders.items():
        expected = plain_curve(folder, batches, cosine_rates(3e-4, 3), torch.float32)
        worst = largest_difference(found[kind], expected)
        assert max(worst) < 1e-5, kind


def test_a_gpu_needs_the_kernels_that_take_bounds(recipe: Path) -> None:
    """They are not installed here: this is a note without a GPU here, else it is refused."""
    needed = {}
    for kind in ("qwen3_5_text", "bamba", "lfm2"):
        plan = make_plan(load(recipe), Topology("cuda", 1, 2))
        needed[kind] = str(missing_kernels(plan, model_of(kind))).partition(" needs the kernels of ")[2]
        alone = varied(plan, {"data.packing": "none"})
        assert missing_kernels(alone, model_of(kind)) is None
        pairs = missing_kernels(varied(alone, {"train.objective": Objective.dpo}), model_of(kind))
        assert str(pairs).startswith("train.objective: dpo with ")
    assert needed == {
        "qwen3_5_text": "causal-conv1d and flash-linear-attention on a GPU",
        "bamba": "causal-conv1d and mamba-ssm on a GPU",
        "lfm2": "causal-conv1d on a GPU",
    }
