"""Adapters on tensors of experts: the curve of a plain loop, exports that peft opens and merges, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import small_config
from peft import PeftModel
from reference import batches_of, cosine_rates, largest_difference, mean_loss, stream_of, worst_gradient
from support import on_ranks, write_recipe
from transformers import AutoModelForCausalLM

from fsdptrain.config.reader import load
from fsdptrain.errors import RecipeError
from fsdptrain.model.units import base_name
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.train.preflight import prepare_model

KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")  # gpt_oss has [experts, in, out], and biases
EXPORTED = KINDS[1:]
STEPS, BATCH, RANK, SCALE, RATE = 3, 8, 3, 2.0, 1e-3
TARGETS = {"mixtral": "[experts]", "qwen3_moe": "[all-linear, experts]", "gpt_oss": "[q_proj, experts]",
           "deepseek_v3": "['*.experts.down_proj', q_b_proj]"}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("experts")
    for kind in KINDS:
        torch.manual_seed(1)
        own = {"first_k_dense_replace": 1} if kind == "deepseek_v3" else {}
        model = AutoModelForCausalLM.from_config(small_config(kind, num_hidden_layers=2, **own))
        model.save_pretrained(tmp / kind)
    adapter = {"kind": "lora", "r": RANK, "alpha": SCALE * RANK}
    return write_recipe(
        tmp, model={"id": str(tmp / "mixtral"), "tokenizer": {"train": 512}}, adapter=adapter, data__packing="none",
        optim__lr=RATE, train__steps=STEPS, train__global_batch_size=BATCH, train__micro_batch_size=2,
        export={"adapter": "both", "dtype": "float32", "compare": False},
    )  # fmt: skip


def variant(recipe: Path, kind: str, *words: str) -> list[str]:
    tmp = recipe.parent
    return [f"model.id={tmp / kind}", f"output_dir={tmp / 'runs' / kind}", f"adapter.target={TARGETS[kind]}", *words]


class Plain:
    """A plain loop over a model whose adapters are added to its weights; `start` are their first values by name."""

    def __init__(self, folder: Path, start: dict[str, torch.Tensor]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.factors = {name: value.clone().requires_grad_() for name, value in start.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.named_parameters())
        for name, a in self.factors.items():
            owner, is_a, _ = name.partition(".lora_A.")
            if not is_a:
                continue
            b, layer = self.factors[name.replace(".lora_A.", ".lora_B.")], base_name(f"{owner}.")[:-1]
            if f"{layer}.weight" in found:
                found[f"{layer}.weight"] = found[f"{layer}.weight"] + SCALE * (b @ a)
                continue
            # Of two tensors with adapters the first is inside; else it is the second, by `TARGETS`.
            weight = f"{layer}.{'gate_up_proj' if owner.endswith('.base_layer') else 'down_proj'}"
            count = len(found[weight])
            experts = [b[:, i::count] @ a[i * RANK : (i + 1) * RANK] for i in range(count)]
            delta = SCALE * torch.stack(experts)
            transposed = getattr(self.model.get_submodule(layer), "is_transposed", False)
            found[weight] = found[weight] + (delta.mT if transposed else delta)
        return found

    def loss(self, batch: Any) -> torch.Tensor:
        return mean_loss(self.model, self.weights(), batch, torch.float32)

    def curve(self, batches: list[Any], rates: list[float]) -> list[list[float]]:
        optimizer = torch.optim.AdamW(self.factors.values(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        found = []
        for batch, rate in zip(batches, rates, strict=True):
            loss = self.loss(batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.factors.values(), 1.0)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            found.append([loss.item(), norm.item()])
        return found


def test_curves_and_gradients_agree_with_a_plain_loop(recipe: Path, tmp_path: Path) -> None:
    more = {"mixtral": ["fsdp.activation_checkpointing=full"], "gpt_oss": [], "deepseek_v3": []}
    variants = {kind: variant(recipe, kind, *words) for kind, words in more.items()}
    arguments = {"recipe": str(recipe), "variants": variants, "steps": STEPS, "made": str(tmp_path)}
    found = on_ranks(2, "adapted", tmp_path, **arguments)[0]
    batches, rates = batches_of(stream_of(recipe)[0], BATCH, STEPS), cosine_rates(RATE, STEPS)
    for number, (kind, run) in enumerate(found.items()):
        made = torch.load(tmp_path / f"{number}.pt")
        assert sum(".experts.base_layer.lora_A" in name for name in made["start"]) == (
            0 if kind == "deepseek_v3" else 2
        )
        loop = Plain(recipe.parent / kind, made["start"])
        assert max(largest_difference(run["curve"], loop.curve(batches, rates))) < 1e-5, kind
        at_end = Plain(recipe.parent / kind, made["end"])
        at_end.loss(batches[0]).backward()
        gradients = {name: factor.grad for name, factor in at_end.factors.items()}
        assert worst_gradient(made["gradients"], gradients)[0] < 1e-5, kind
        assert run["unchanged"] and any(".lora_B." in n and made["end"][n].any() for n in made["end"] if "experts" in n)


@pytest.fixture(scope="module")
def exported(recipe: Path) -> dict[str, Path]:
    """Return the exports of two ranks: the merged model, with the adapter in a subfolder."""
    variants = {kind: variant(recipe, kind, "optim.lr=0.01") for kind in EXPORTED}
    arguments = {"recipe": str(recipe), "variants": variants, "steps": STEPS}
    assert on_ranks(2, "adapter_exports", recipe.parent / "out", **arguments) == [{}, {}]
    return {kind: recipe.parent / "runs" / kind / "original" for kind in EXPORTED}


@pytest.mark.parametrize("kind", EXPORTED)
def test_peft_opens_the_adapter_and_merges_it_to_the_same_weights(
    kind: str, recipe: Path, exported: dict[str, Path]
) -> None:
    rows, logits = torch.load(exported[kind].parent / "sample.pt", weights_only=False)
    base = AutoModelForCausalLM.from_pretrained(recipe.parent / kind, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(exported[kind], dtype=torch.float32)
    plain = base(torch.tensor(rows[0])[None]).logits[0]
    model = PeftModel.from_pretrained(base, exported[kind] / "adapter")
    for row, expected in zip(rows, logits, strict=True):
        for each in (model, merged):
            assert (each(torch.tensor(row)[None]).logits[0] - expected).abs().max() < 2e-5
    assert (plain - logits[0]).abs().max() > 1e-3
    state = merged.state_dict()
    for name, tensor in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-6, atol=1e-7)
    found = json.loads((exported[kind] / "adapter" / "adapter_config.json").read_text())
    assert any("experts" in name for name in found["target_parameters"])


def test_a_run_continues_from_an_adapter_on_experts(recipe: Path, exported: dict[str, Path], tmp_path: Path) -> None:
    out = exported["qwen3_moe"]
    start = [
        f"model.id={recipe.parent / 'qwen3_moe'}",
        f"adapter.from={out / 'adapter'}",
        f"output_dir={tmp_path / '1'}",
    ]
    both = {"from": start, "merged": variant(recipe, "qwen3_moe", f"model.id={out}", f"output_dir={tmp_path / '2'}")}
    other = write_recipe(
        tmp_path, model={"tokenizer": {"train": 512}}, adapter={"kind": "lora"}, train__micro_batch_size=2,
        data__packing="none", export={"adapter": "both", "compare": False},
    )  # fmt: skip
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
    plan = make_plan(load(recipe, variant(recipe, "mixtral", *words)), Topology("cpu", 1, 2))
    with pytest.raises(RecipeError, match=message):
        prepare_model(plan, 512)
