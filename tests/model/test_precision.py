"""bf16 as in transformers: what it keeps in float32 is float32 in compute, in a bf16 master and in the export."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import KINDS, small_config
from reference import assert_same_tensors
from safetensors.torch import load_file
from support import on_ranks, write_recipe
from test_architectures import random_model
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain.config.reader import load
from fsdptrain.config.schema import Model
from fsdptrain.model import weights
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import decoder_layers
from fsdptrain.model.weights import place_buffers
from fsdptrain.parallel import shard
from fsdptrain.parallel.patches import takes_two_dtypes
from fsdptrain.parallel.world import World
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import find_topology
from fsdptrain.processes import StopRequest

SOAK = pytest.mark.soak
LISTED = ["deepseek_v3", "ernie4_5_moe", "flint"]  # `_keep_in_fp32_modules_strict`
INPUTS = ["mpt", "olmo2", "mamba2"]  # inputs of their layers are float32, or must not be
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


def parities(kinds: list[str], world: int, tmp: Path) -> dict[str, Any]:
    for kind in kinds:
        random_model(kind, tmp / kind, small_config(kind))
    recipe = write_recipe(tmp, model={"id": "unset", "tokenizer": {"train": 512}}, fsdp={}, train__loss="plain")
    ranks = on_ranks(world, compare_architectures, tmp / "ranks", recipe=str(recipe), kinds=kinds)
    assert all(other == ranks[0] for other in ranks)
    return dict(ranks[0])


@needs_groups
def test_logits_and_gradients_are_those_of_transformers_in_bf16(tmp_path: Path) -> None:
    found = parities(LISTED + INPUTS, 2, tmp_path)
    assert {kind: values[:2] for kind, values in found.items()} == {kind: [0, 0] for kind in found}


@SOAK
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
@pytest.mark.parametrize("masters", [("float32", "bfloat16", "float32"), pytest.param(("bfloat16",) * 3, marks=SOAK)])
def test_exports_in_bf16_keep_what_transformers_keeps(masters: tuple[str, ...], tmp_path: Path) -> None:
    variants = {}
    for kind, master in zip(LISTED, masters, strict=True):
        random_model(kind, tmp_path / kind, small_config(kind))
        words = [f"model.id={tmp_path / kind}", f"model.dtype={master}", f"output_dir={tmp_path / kind}-run"]
        variants[kind] = words
    recipe = write_recipe(
        tmp_path, model={"id": "unset", "tokenizer": {"train": 512}, "attn_implementation": "eager"}, fsdp={},
        data__packing="none", export__dtype="bfloat16", optim__lr=0.0, train__global_batch_size=2,
    )  # fmt: skip
    on_ranks(2, "exports", tmp_path / "ranks", recipe=str(recipe), variants=variants, steps=1)
    for kind in LISTED:
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.bfloat16)
        expected.save_pretrained(tmp_path / f"{kind}-expected")
        theirs = load_file(tmp_path / f"{kind}-expected" / "model.safetensors")
        assert torch.float32 in {tensor.dtype for tensor in theirs.values()}
        assert_same_tensors(load_file(tmp_path / f"{kind}-run" / "export" / "model.safetensors"), theirs, kind)


# --- on every rank -------------------------------------------------------------------------------------------------


def compare_architectures(recipe: str, kinds: list[str]) -> dict[str, Any]:
    """How far logits and gradients of every architecture are from those of transformers' own bf16 model.

    By architecture: the largest difference of logits over the largest logit, the largest difference of a gradient over
    its norm, and whose; or, as a text, what was raised. All ranks have the same tokens, so that gradients are doubled.
    """
    written = load(Path(recipe))
    plan = make_plan(written, find_topology(written.recipe, dict(os.environ)))
    world = World.start(plan, StopRequest())
    found: dict[str, Any] = {}
    for kind in kinds:
        try:
            found[kind] = parity(kind, plan, world, Path(recipe).parent / kind)
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {error}"[:300]
    return found


def parity(kind: str, plan: Any, world: World, folder: Path) -> list[Any]:
    """See `compare_architectures`; through the files in `folder`."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    if torch.__version__ >= (2, 15):  # FSDP does not round a gradient that a product with float32 gives a bf16 weight
        for param in reference.parameters():
            param.grad_dtype = None
    config = AutoConfig.from_pretrained(folder)
    plan.recipe.model.id, plan.recipe.model.attn_implementation = str(folder), "eager"
    bare = skeleton(config, plan.recipe.model)
    plan.recipe.fsdp.wrap = "auto" if decoder_layers(bare) else {"min_params": 20_000}
    model, _ = shard.build(plan, config, world)
    weights.read_weights(model, bare, plan, world.device, lambda *_: None)
    ids = torch.arange(3, 35)[None]
    logits = []
    for one in (reference, model):
        out = one.eval()(input_ids=ids, position_ids=torch.arange(32)[None], use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(out.flatten(0, 1), ids.flatten().roll(-1)).backward()
        logits.append(out.detach())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    expected = dict(reference.named_parameters())
    off = [(0.0, "")]
    for name, param in model.named_parameters():
        ours, theirs = param.grad, expected[name].grad
        assert (ours is None) == (theirs is None), f"gradient of {name}"
        if ours is not None and theirs is not None:
            wanted = theirs.float() * world.size
            difference = (ours.full_tensor().float() - wanted).norm()
            if difference:
                off.append(((difference / wanted.norm()).item(), name))
    return [((logits[1] - logits[0]).abs().max() / logits[0].abs().max()).item(), *max(off)]
