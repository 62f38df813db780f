"""Every architecture starts from the weights that `AutoModelForCausalLM.from_config` draws: the same distributions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import KINDS, VOCABULARY, small_config
from ranks import build
from support import on_ranks, write_recipe
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from fsdptrain.config.schema import Model, Recipe
from fsdptrain.errors import RecipeError
from fsdptrain.model.skeleton import init_groups, initial_weights, skeleton

RECIPE = Recipe(model=Model(attn_implementation="eager"))
Tensors = dict[str, torch.Tensor]
ALIKE = (  # `_init_weights` is that of another kind, but for the names of its classes
    "arcee axk2 big_bird bigbird_pegasus biogpt bitnet blenderbot blenderbot-small bloom camembert cohere cohere2 "
    "cwm deepseek_v32 dots1 electra emu3 ernie ernie4_5 exaone4 exaone_moe flex_olmo fuyu gemma2 gemma3_text "
    "gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gptj granite granitemoe "
    "granitemoeshared helium hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 kolibri1 lfm2 llama4_text "
    "mbart megatron-bert ministral ministral3 mistral mixtral moss_transcribe_diarize mpt mvp olmo olmo2 opt "
    "pegasus persimmon phi phi3 phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text "
    "qwen3_moe qwen3_next roberta roberta-prelayernorm roc_bert seed_oss smollm3 solar_open stablelm starcoder2 "
    "trocr vaultgemma xlm-roberta xlm-roberta-xl xmod"
)


def as_transformers_draws(config: Any, seed: int) -> tuple[Tensors, Tensors]:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return {name: param.detach() for name, param in model.named_parameters()}, dict(model.named_buffers())


def as_we_draw(config: Any) -> tuple[Tensors, Tensors]:
    mirror = skeleton(config, RECIPE.model)
    drawn: Tensors = {}
    for weights in initial_weights(mirror, init_groups(mirror), RECIPE):
        assert not drawn.keys() & weights.keys()
        drawn |= weights
    assert all(param.is_meta for param in mirror.parameters())  # the mirror is unchanged
    return drawn, dict(mirror.named_buffers())


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.soak) if kind in ALIKE.split() else kind for kind in KINDS),
        *(f"{kind} tied" for kind in ("apertus", "youtu", "openai-gpt")),  # to a head with another spread
    ],
)
def test_weights_are_drawn_as_transformers_draws_them(kind: str) -> None:
    torch.set_num_threads(1)  # more would only wait for one another
    tied = {"tie_word_embeddings": True} if kind.endswith(" tied") else {}
    config = small_config(kind.removesuffix(" tied"), **tied)
    (first, first_buffers), (second, _) = (as_transformers_draws(config, seed) for seed in (1, 2))
    found, buffers = as_we_draw(config)
    assert found.keys() == first.keys() and buffers.keys() == first_buffers.keys()
    assert all(torch.equal(buffers[name], first_buffers[name]) for name in buffers)
    for name in first:
        assert_of_one_distribution(name, found[name], first[name], second[name])
    random = [name for name in first if not torch.equal(first[name], second[name])]
    ends = {name: tuple(found[name].flatten()[-8:].tolist()) for name in random if found[name].numel() >= 8}
    assert len(set(ends.values())) == len(ends), "two weights are drawn from the same random numbers"


def assert_of_one_distribution(name: str, found: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Compare with `first` and `second`, two draws by transformers: what is equal in both is not random."""
    assert found.shape == first.shape and found.isfinite().all(), name
    if torch.equal(first, second):
        assert torch.equal(found, first), name
        return
    assert torch.equal(zero_rows(found), zero_rows(first)), name  # the row of the padding token
    if (count := first.numel()) >= 32:  # smaller tensors vary too much
        mean, spread = first.mean().item(), first.std(correction=0).item()
        assert found.std(correction=0).item() == pytest.approx(spread, rel=6 * count**-0.5), name
        assert found.mean().item() == pytest.approx(mean, abs=6 * spread * (2 / count) ** 0.5), name


def zero_rows(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor == 0).flatten(1).all(dim=1) if tensor.ndim > 1 else torch.zeros(0)


def test_every_rank_holds_what_was_drawn(tmp_path: Path) -> None:
    """Also values and random numbers of constructors."""
    kinds = {"gpt2": [], "apertus": [], "youtu": [], "openai-gpt": ["fsdp.wrap=[Block]", "data.packing=none"]}
    variants = {}
    for kind, others in kinds.items():
        config = small_config(kind).to_diff_dict() | {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
        config = {key: value for key, value in config.items() if not key.endswith("token_id")}  # the tokenizer decides
        variants[kind] = [f"model.config={json.dumps(config)}", "model.attn_implementation=eager", *others]
    gpt2 = variants["gpt2"]
    variants |= {"copies": [*gpt2, "fsdp.strategy=NO_SHARD"], "seed": [*gpt2, "seed=1"]}
    model = {"tokenizer": {"train": VOCABULARY}, "init": "random"}
    recipe = write_recipe(tmp_path, model=model, train__global_batch_size=6)
    found = on_ranks(3, sums_as_drawn, tmp_path / "ranks", recipe=str(recipe), variants=variants)[0]  # uneven parts
    assert found["copies"] == found["gpt2"] != found["seed"]


class ForgetfulMLP(modeling_llama.LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.empty(3))


def test_a_parameter_that_nothing_initialises_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaMLP", ForgetfulMLP)
    with pytest.raises(RecipeError, match=r"does not initialise model.layers.0.mlp.scale \(ForgetfulMLP\)"):
        as_we_draw(small_config("llama"))


# --- on every rank -------------------------------------------------------------------------------------------------


def sums_as_drawn(recipe: str, variants: dict[str, list[str]]) -> dict[str, list[float]]:
    """Return the sums of the first weights, in memory that was NaN: they must be those that are drawn, bit for bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN
    found = {}
    for name, overrides in variants.items():
        run = build(recipe, overrides)
        weights = {n: p.detach().full_tensor() for n, p in run.engine.model.named_parameters()}
        mirror, drawn = run.inputs.prepared.bare, {}
        for group in initial_weights(mirror, init_groups(mirror), run.plan.recipe):
            drawn |= group
        assert all(torch.equal(weight, drawn[n]) for n, weight in weights.items()), name
        found[name] = [weight.double().sum().item() for weight in weights.values()]
    return found
