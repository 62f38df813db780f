"""bf16 as in transformers: what it keeps in float32 is float32 in compute, in a bf16 master and in the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import KINDS, small_config
from safetensors.torch import load_file
from support import on_ranks, write_recipe
from transformers import AutoModelForCausalLM

from fsdptrain.config.schema import Model
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.weights import place_buffers
from fsdptrain.parallel.patches import takes_two_dtypes

LISTED = ["deepseek_v3", "ernie4_5_moe", "flint"]  # `_keep_in_fp32_modules_strict`
INPUTS = ["mpt", "olmo2", "mamba2"]  # inputs of their layers are float32, or must not be
ALIKE = ["glm4_moe", "dots1", "hy_v3", "olmo3", "xglm", "gptj"]  # as one of those
NOT_EQUAL = {  # kind → why it may differ from transformers' bf16
    "blt": "gradients of weights that are used several times are summed in another order",
    "inkling2_text": "gradients of weights that are used several times are summed in another order",
    "inkling2_loop_text": "as inkling2_text",
    "longcat_flash": "as minimax_m3_vl_text",
    "minimax_m3_vl_text": "its router's bias stays float32; transformers rounds it, and other experts are chosen",
}
NOT_HERE = {  # kind → why it cannot be compared
    "emu3": "transformers cannot open its files as a language model", "mllama": "as emu3",
    **dict.fromkeys(("marian", "pegasus", "roformer"), "opened by transformers, their fixed tables get gradients"),
    "minimax": "tables in float32 meet weights in bf16, without buffer_dtype",
    "prophetnet": "uses weights of a unit outside of its forward",
    "reformer": "transformers itself cannot compute it in bf16", "xlnet": "as reformer",
}  # fmt: skip


needs_groups = pytest.mark.skipif(not takes_two_dtypes(), reason="torch before 2.13 has one dtype for a unit")


def write_model(kind: str, folder: Path) -> None:
    """Return a model whose norms and router biases are not their initial constants."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(small_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.02)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)


def parities(kinds: list[str], world: int, tmp: Path) -> dict[str, Any]:
    for kind in kinds:
        write_model(kind, tmp / kind)
    recipe = write_recipe(tmp, model={"id": "unset", "tokenizer": {"train": 512}}, fsdp={}, train__loss="plain")
    ranks = on_ranks(world, "parities", tmp / "ranks", recipe=str(recipe), kinds=kinds)
    assert all(other == ranks[0] for other in ranks)
    return dict(ranks[0])


@needs_groups
@pytest.mark.parametrize(
    "kinds", [LISTED + INPUTS, pytest.param(ALIKE, marks=pytest.mark.soak)], ids=["listed and inputs", "alike"]
)
def test_logits_and_gradients_are_those_of_transformers_in_bf16(kinds: list[str], tmp_path: Path) -> None:
    found = parities(kinds, 2, tmp_path)
    assert {kind: values[:2] for kind, values in found.items()} == {kind: [0, 0] for kind in found}


@pytest.mark.soak
def test_every_architecture_computes_bf16_as_transformers_does(tmp_path: Path) -> None:
    found = parities([kind for kind in KINDS if kind not in NOT_HERE], 1, tmp_path)
    for kind, values in found.items():
        print(f"{kind:28} {values}")
    assert {kind for kind, values in found.items() if values[:2] != [0, 0]} <= set(NOT_EQUAL)


def test_buffers_are_cast_except_those_that_stay_in_float32() -> None:
    model = skeleton(small_config("deepseek_v3"), Model(attn_implementation="eager"), "bfloat16")
    place_buffers(model, torch.device("cpu"), "bfloat16")
    dtypes = {name.rpartition(".")[2]: buffer.dtype for name, buffer in model.named_buffers()}
    assert dtypes["e_score_correction_bias"] == torch.float32 and dtypes["inv_freq"] == torch.bfloat16


@needs_groups
def test_exports_in_bf16_keep_what_transformers_keeps(tmp_path: Path) -> None:
    kinds, variants = ["deepseek_v3", "ernie4_5_moe", "flint"], {}
    for kind in kinds:
        write_model(kind, tmp_path / kind)
        for master in ("float32", "bfloat16"):
            run = tmp_path / f"{kind}-{master}"
            variants[run.name] = [f"model.id={tmp_path / kind}", f"model.dtype={master}", f"output_dir={run}"]
    recipe = write_recipe(
        tmp_path, model={"id": "unset", "tokenizer": {"train": 512}, "attn_implementation": "eager"}, fsdp={},
        data__packing="none", export__dtype="bfloat16", optim__lr=0.0, train__global_batch_size=2,
    )  # fmt: skip
    wrong = on_ranks(2, "exports", tmp_path / "ranks", recipe=str(recipe), variants=variants, steps=1)[0]
    assert not wrong, "\n\n".join(f"{name}: {text}" for name, text in wrong.items())
    for kind in kinds:
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.bfloat16)
        expected.save_pretrained(tmp_path / f"{kind}-expected")
        theirs = load_file(tmp_path / f"{kind}-expected" / "model.safetensors")
        assert torch.float32 in {tensor.dtype for tensor in theirs.values()}
        for master in ("float32", "bfloat16"):
            ours = load_file(tmp_path / f"{kind}-{master}" / "export" / "model.safetensors")
            assert theirs.keys() == ours.keys()
            assert all(theirs[n].dtype == ours[n].dtype and torch.equal(theirs[n], ours[n]) for n in theirs), kind
