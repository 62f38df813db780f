"""Adapters on tensors of experts: the curve of a plain loop, exports that peft opens and merges, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from architectures import small_config
from peft import PeftModel
from support import on_ranks, planned
from test_peft import FULL, Case, Parity, adapter_recipe
from transformers import AutoModelForCausalLM

from fsdptrain.errors import RecipeError
from fsdptrain.train.preflight import prepare_model

KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")  # gpt_oss has [experts, in, out], and biases
EXPORTED = KINDS[1:]
STEPS = 3
TARGETS = {"mixtral": "[experts]", "qwen3_moe": "[all-linear, experts]", "gpt_oss": "[q_proj, experts]",
           "deepseek_v3": "['*.experts.down_proj', q_b_proj]"}  # fmt: skip
BOTH = ("experts.gate_up_proj", "experts.down_proj")
CASES = {
    kind: Case([f"adapter.target={TARGETS[kind]}", *words], experts=experts, model=kind)
    for kind, experts, words in (
        ("mixtral", BOTH, [FULL]), ("gpt_oss", BOTH, []), ("deepseek_v3", ("experts.down_proj",), []),
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("experts")
    for kind in KINDS:
        torch.manual_seed(1)
        own = {"first_k_dense_replace": 1} if kind == "deepseek_v3" else {}
        model = AutoModelForCausalLM.from_config(small_config(kind, num_hidden_layers=2, **own))
        model.save_pretrained(tmp / kind)
    return adapter_recipe(tmp, data__packing="none")


def variant(recipe: Path, kind: str, *words: str) -> list[str]:
    tmp = recipe.parent
    return [f"model.id={tmp / kind}", f"output_dir={tmp / 'runs' / kind}", f"adapter.target={TARGETS[kind]}", *words]


def test_curves_and_gradients_agree_with_a_plain_peft_loop(recipe: Path, tmp_path: Path) -> None:
    Parity(recipe, CASES, steps=STEPS).train(2, {kind: [] for kind in CASES}, tmp_path)


@pytest.fixture(scope="module")
def exported(recipe: Path) -> dict[str, Path]:
    """Return the exports of two ranks: the merged model, with the adapter in a subfolder."""
    variants = {kind: variant(recipe, kind, "optim.lr=0.01") for kind in EXPORTED}
    on_ranks(2, "exports", recipe.parent / "out", recipe=str(recipe), variants=variants, steps=STEPS)
    return {kind: recipe.parent / "runs" / kind / "export" for kind in EXPORTED}


@pytest.mark.parametrize("kind", EXPORTED)
def test_peft_opens_the_adapter_and_merges_it_to_the_same_weights(
    kind: str, recipe: Path, exported: dict[str, Path]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(recipe.parent / kind, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(exported[kind], dtype=torch.float32)
    ids = torch.arange(40)[None]
    plain = base(ids).logits
    model = PeftModel.from_pretrained(base, exported[kind] / "adapter")
    adapted = model(ids).logits
    assert (adapted - merged(ids).logits).abs().max() < 2e-5 < 1e-3 < (adapted - plain).abs().max()
    state = merged.state_dict()
    for name, tensor in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-6, atol=1e-7)
    found = json.loads((exported[kind] / "adapter" / "adapter_config.json").read_text())
    assert any("experts" in name for name in found["target_parameters"])


def test_a_run_continues_from_an_adapter_on_experts(recipe: Path, exported: dict[str, Path], tmp_path: Path) -> None:
    out = exported["qwen3_moe"]
    start = [f"model.id={recipe.parent / 'qwen3_moe'}", f"adapter.from={out / 'adapter'}"]
    both = {
        "from": start,
        "merged": variant(recipe, "qwen3_moe", f"model.id={out}", f"output_dir={tmp_path / 'merged'}"),
    }
    other = adapter_recipe(tmp_path, adapter={"kind": "lora"}, data__packing="none")
    curves = on_ranks(1, "curves", tmp_path, recipe=str(other), variants=both, steps=1)[0]
    assert curves["from"][0][0] == pytest.approx(curves["merged"][0][0], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["adapter.dropout=0.1"],
            r"adapter\.dropout: 0\.1 is not possible for experts \(model\.layers\.0\.mlp\.experts\.",
        ),
        (["adapter.use_dora=true"], "adapter.use_dora: True is not possible for experts"),
        (["fsdp.wrap={min_params: 2000}"], "fsdp.wrap: .*experts.* would be a unit apart from its adapters"),
    ],
)
def test_what_would_not_work_is_refused(words: list[str], message: str, recipe: Path) -> None:
    plan = planned(recipe, *variant(recipe, "mixtral", *words), ranks=2)
    with pytest.raises(RecipeError, match=message):
        prepare_model(plan, 512)
