"""`model.config`: keys pasted from a config.json mean the same as in transformers, or are rejected by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TINY, planned, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain.data.hub import hub_arguments
from fsdptrain.errors import RecipeError
from fsdptrain.model.config import load_config, resolved_values

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LAYERS: dict[str, dict[str, Any]] = {  # models of twelve layers whose lists differ from the defaults
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 32},
    "gemma3_text": {"head_dim": 16, "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 10},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16},
    "qwen3_next": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 16},
}


def config_of(tmp: Path, model: dict[str, Any], *overrides: str, vocab_size: int = 512) -> Any:
    """Return the configuration of a model whose tokenizer is trained by the run."""
    recipe = write_recipe(tmp, model={"tokenizer": {"train": 512}, **model})
    return load_config(planned(recipe, *overrides), vocab_size)


@pytest.mark.parametrize(("tokenizer", "revision"), [(None, "v1"), ("org/name", "v1"), ("org/other", "main")])
def test_the_revision_is_that_of_the_model_and_of_its_own_tokenizer(
    tokenizer: str | None, revision: str, tmp_path: Path
) -> None:
    plan = planned(write_recipe(tmp_path, model={"id": "org/name", "tokenizer": tokenizer, "revision": "v1"}))
    assert hub_arguments(plan, plan.recipe.model.tokenizer)["revision"] == revision


def saved(folder: Path, kind: str, **config: Any) -> str:
    AutoConfig.for_model(kind, **{**TINY, **config}).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "old", [{"rope_theta": 7.0}, {"rope_scaling": YARN}, {"rope_theta": 7.0, "rope_scaling": YARN}]
)
def test_rope_keys_of_older_files_mean_the_same_as_in_transformers(old: dict[str, Any], tmp_path: Path) -> None:
    config = {**TINY, "max_position_embeddings": 1024, **old}
    wanted = AutoConfig.for_model("llama", **copy.deepcopy(config)).rope_parameters  # which writes into it
    assert wanted["rope_theta"] == old.get("rope_theta", 10000.0)
    scratch = {"config": {"model_type": "llama", **config}}
    assert config_of(tmp_path, scratch).rope_parameters == wanted
    plain = saved(tmp_path / "model", "llama", max_position_embeddings=1024)
    assert config_of(tmp_path, {"id": plain, "config": old}).rope_parameters == wanted


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2", "granite", "olmo2"])
def test_only_a_head_size_that_the_model_reads_is_accepted(kind: str, tmp_path: Path) -> None:
    """Qwen3-30B-A3B, for one, has heads of another size than hidden_size / heads, in a key that is not declared."""
    folder = saved(tmp_path / "model", kind)
    assert not hasattr(AutoConfig.for_model(kind), "head_dim")
    config = config_of(tmp_path, {"id": folder, "config": {"head_dim": 24}})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.model.layers[0].self_attn.q_proj.out_features == TINY["num_attention_heads"] * 24
    config.save_pretrained(folder)
    assert json.loads((Path(folder) / "config.json").read_text())["head_dim"] == 24
    with pytest.raises(RecipeError, match=r"model.config.head_dim: gpt2 has no such key"):
        config_of(tmp_path, {"id": saved(tmp_path / "gpt2", "gpt2"), "config": {"head_dim": 24}})


def test_rope_keys_change_only_what_they_name(tmp_path: Path) -> None:
    stretched = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    folder = saved(tmp_path / "model", "llama", rope_parameters=stretched)
    model: dict[str, Any] = {"id": folder}
    assert config_of(tmp_path, model | {"config": {"rope_theta": 7.0}}).rope_parameters == stretched | {
        "rope_theta": 7.0
    }
    linear = config_of(tmp_path, model | {"config": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}})
    assert linear.rope_parameters == stretched | {"factor": 3.0}
    plain = config_of(tmp_path, model | {"config": {"rope_scaling": None}}).rope_parameters
    assert plain["rope_theta"] == 5e5 and plain["rope_type"] == "default"


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("layers", [1, 5, 14])
def test_another_number_of_layers_adapts_the_lists(kind: str, layers: int, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", kind, num_hidden_layers=12, **LAYERS[kind])
    before = AutoConfig.from_pretrained(folder).layer_types
    model = {"id": folder, "init": "random", "config": {"num_hidden_layers": layers}}
    config = config_of(tmp_path, model)
    default = AutoConfig.for_model(kind, **TINY | LAYERS[kind] | {"num_hidden_layers": layers, "layer_types": None})
    assert config.layer_types == (before[:layers] if layers < 12 else default.layer_types)
    AutoModelForCausalLM.from_config(config)


def test_an_inner_configuration_keeps_what_is_not_named(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", **TINY, "head_dim": 16, "num_hidden_layers": 12, "sliding_window": 32}
    AutoConfig.for_model("gemma3", text_config=text).save_pretrained(tmp_path / "model")
    model = {"id": str(tmp_path / "model")}
    inner = {"num_hidden_layers": 7, "vocab_size": 600}
    config = config_of(tmp_path, model | {"config": {"text_config": inner}}).text_config
    assert (config.num_hidden_layers, len(config.layer_types), config.vocab_size) == (7, 7, 600)
    assert (config.hidden_size, config.sliding_window) == (64, 32)
    with pytest.raises(RecipeError, match=r"model.config.text_config.hiden_size: gemma3_text has no such key; did you"):
        config_of(tmp_path, model | {"config": {"text_config": {"hiden_size": 64}}})


WAYS_OUT: dict[str, dict[str, Any]] = {  # what is said below → keys that are accepted
    "model.config.sliding_window: .*use_sliding_window: true": {"use_sliding_window": True, "max_window_layers": 1},
    "model.config.router_aux_loss_coef: no effect": {"output_router_logits": True},
}
REFUSED: dict[str, dict[str, Any]] = {  # what is said → keys
    "model.config.dtype: use model.dtype": {"dtype": "bfloat16"},
    "model.config.attn_implementation: use model.attn_implementation": {"attn_implementation": "eager"},
    "model.config.sliding_window: .*use_sliding_window: true": {"model_type": "qwen2", "sliding_window": 32},
    "model.config.router_aux_loss_coef: no effect": {"model_type": "mixtral", "router_aux_loss_coef": 0.1},
    "model.config.num_labels: .*remove the key": {"num_labels": 3},
    "model.config.rope_theta: remove it, and set all in rope_parameters": {
        "rope_theta": 7.0, "rope_parameters": {"rope_type": "default"},
    },
    "model.config.rope_theta: remove it, and set all in rope_parameters: {'sliding": {
        "model_type": "gemma3_text", "rope_theta": 7.0,
    },
    "num_hidden_layers: 0 is not a whole number from 1": {"num_hidden_layers": 0},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_keys_without_effect_are_rejected_with_the_way_out(message: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", **TINY, **REFUSED[message]}
    with pytest.raises(RecipeError, match=message):
        config_of(tmp_path, {"config": config})
    if changes := WAYS_OUT.get(message):
        found = config_of(tmp_path, {"config": config | changes})
        assert [getattr(found, name) for name in changes] == [*changes.values()]


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    with pytest.raises(RecipeError) as caught:
        config_of(tmp_path, {"id": folder}, "data.seq_len=4096", vocab_size=1000)
    assert "the tokenizer has 1000 tokens" in str(caught.value) and "the model's 256 positions" in str(caught.value)


def test_a_whole_config_json_of_the_hub_can_be_pasted(tmp_path: Path) -> None:
    written = AutoConfig.for_model("llama", **TINY, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    pasted = json.loads(written.to_json_string()) | {"rope_theta": 5e5, "rope_scaling": None, "vocab_size": 512}
    for name in ("rope_parameters", "transformers_version", "dtype", "architectures"):
        pasted.pop(name, None)
    config = config_of(tmp_path, {"config": pasted})
    assert config.rope_parameters["rope_theta"] == 5e5


# --- what a resume compares -----------------------------------------------------------------------------------------

SAME = {"transformers_version": "4.1", "architectures": ["Other"], "dtype": "float16", "use_cache": False,
        "_name_or_path": "/moved", "eos_token_id": 7, "initializer_range": 0.5, "id2label": {"0": "a"}}  # fmt: skip


@pytest.mark.parametrize("change", [{name: value} for name, value in SAME.items()] + [{"max_position_embeddings": 512}])
def test_a_key_that_decides_nothing_about_training_is_not_compared(change: dict[str, Any], tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **TINY)
    assert resolved_values(AutoConfig.for_model("llama", **{**TINY, **change})) == resolved_values(config)


@pytest.mark.parametrize(
    ("kind", "change", "key"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_theta": 5.0}, "rope_parameters"),
        ("llama", {"attention_dropout": 0.5}, "attention_dropout"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
        ("gpt2", {"n_positions": 512}, "n_positions"),
        ("opt", {"max_position_embeddings": 512}, "max_position_embeddings"),  # learned, not rotary
        ("gemma3", {"text_config": {**TINY, "rms_norm_eps": 0.5}}, "text_config.rms_norm_eps"),
    ],
)
def test_a_key_that_decides_what_is_trained_is_compared(
    kind: str, change: dict[str, Any], key: str, tmp_path: Path
) -> None:
    inner = {"text_config": TINY} if kind == "gemma3" else TINY if kind == "llama" else {}
    AutoConfig.for_model(kind, **{**inner, **change}).save_pretrained(tmp_path)
    before, now = (
        resolved_values(each) for each in (AutoConfig.for_model(kind, **inner), AutoConfig.from_pretrained(tmp_path))
    )
    assert key in {name for name in before if before[name] != now[name]}
    assert json.loads(json.dumps(now)) == now
