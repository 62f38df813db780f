"""With a learning rate of 0 the exported weights equal the input weights, bit for bit, for every architecture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import KINDS, small_config
from ranks import build
from reference import assert_same_tensors, plain_log_probs, stream_of
from safetensors.torch import load_file
from support import on_ranks, write_pairs, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain.config.schema import Model
from fsdptrain.errors import RecipeError
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import units_of
from fsdptrain.parallel.patches import takes_two_dtypes

ARCHITECTURES = (
    "llama", "llama tied", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "olmo2",
    "granite", "qwen3_moe", "mixtral", "aria_text", "llama4_text", "mamba", "falcon_mamba",
)  # fmt: skip
NAMED = r"[A-Z]\w+(LM|Model|Decoder|Generation|LMHead)\b|vocab_size|xlnet"  # an architecture's class
NEEDED = {  # overrides that their error messages name
    "llama4_text": ["train.loss=plain"], "mamba": ["data.packing=none"], "falcon_mamba": ["data.packing=none"],
}  # fmt: skip


def config_of(kind: str, **own: Any) -> Any:
    name, tied, _ = kind.partition(" tied")
    ids = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0, "num_hidden_layers": 3}
    return small_config(name, **ids, **({"tie_word_embeddings": True} if tied else {}), **own)


def random_model(kind: str, folder: Path, config: Any = None) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config or config_of(kind), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():  # zero biases and unit norms would agree by accident
            param.add_(torch.randn_like(param) * 0.01)
        for name, buffer in model.named_buffers():  # of routers
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)


# Kinds that are read, gathered and written as another one of these is.
ALIKE = ("qwen2", "mistral", "gemma2", "olmo2", "granite", "qwen3_moe", "falcon_mamba")


@pytest.fixture(
    scope="module",
    params=[[kind for kind in ARCHITECTURES if kind not in ALIKE], pytest.param(ALIKE, marks=pytest.mark.soak)],
    ids=["most", "alike"],
)
def exported(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Sequence[str]]:
    """Read some architectures, train each for a step at learning rate 0 on two ranks, and export it."""
    tmp, variants = tmp_path_factory.mktemp("architectures"), {}
    for kind in request.param:
        random_model(kind, tmp / kind)
        variants[kind] = [f"model.id={tmp / kind}", f"output_dir={tmp / kind}-run", *NEEDED.get(kind, [])]
    recipe = write_recipe(
        tmp, model={"id": "unset", "tokenizer": {"train": 512}}, optim__lr=0.0, train__global_batch_size=2
    )
    on_ranks(2, "exports", tmp / "ranks", recipe=str(recipe), variants=variants, steps=1)
    return tmp, request.param


def test_exported_weights_are_the_input_weights(exported: tuple[Path, Sequence[str]]) -> None:
    root, kinds = exported
    for kind in kinds:
        before = load_file(root / kind / "model.safetensors")
        after = load_file(root / f"{kind}-run" / "export" / "model.safetensors")
        assert_same_tensors(after, before, kind)
        config, exported_config = (AutoConfig.from_pretrained(root / name) for name in (kind, f"{kind}-run/export"))
        assert config.to_diff_dict().keys() == exported_config.to_diff_dict().keys(), kind


def errors_of(ways: dict[str, list[str]], tmp: Path) -> dict[str, list[str]]:
    """Return [class, message] of the error of architectures in bf16, [] if they train.

    A way is an architecture, or one and a word, → overrides.
    """
    variants = {}
    for way, overrides in ways.items():
        kind = way.split()[0]
        small_config(kind).save_pretrained(tmp / kind)
        common = [f"model.id={tmp / kind}", "fsdp.mixed_precision.param_dtype=bfloat16"]
        variants[way] = [*common, *overrides, f"output_dir={tmp / way}-run"]
    recipe = write_recipe(
        tmp, model={"id": "unset", "tokenizer": {"train": 512}, "init": "random"}, train__loss="plain",
        data__packing="none", data__max_rows=40, train__global_batch_size=2,
    )  # fmt: skip
    found = on_ranks(2, "trains", tmp / "ranks", timeout=3600, recipe=str(recipe), variants=variants)
    assert found[0] == found[1]
    return dict(found[0])


def test_other_architectures_train_or_are_rejected_by_name(tmp_path: Path) -> None:
    ways: dict[str, list[str]] = {kind: [] for kind in ("zamba", "minimax", "gemma4_text", "got_ocr2", "cwm", "xlstm")}
    ways["minimax cast"] = ["fsdp.mixed_precision.buffer_dtype=bfloat16"]
    ways["mamba inner"] = ["fsdp.wrap=[Conv1d]"]
    refused = {way: error for way, error in errors_of(ways, tmp_path).items() if error}
    wide = set() if takes_two_dtypes() else {"zamba"}  # keeps some weights in float32
    assert refused.keys() == {"minimax", "mamba inner", "xlstm", "got_ocr2"} | wide, refused
    assert {error[0] for error in refused.values()} == {"RecipeError"}
    assert "buffers of MiniMaxForCausalLM cannot be used with bfloat16 weights" in refused["minimax"][1]
    assert "set buffer_dtype to bfloat16" in refused["minimax"][1]
    assert "param_dtype: xLSTMForCausalLM cannot be computed in bfloat16" in refused["xlstm"][1]
    assert "MambaForCausalLM uses weights of a unit outside of that unit's forward" in refused["mamba inner"][1]


def test_layers_that_share_weights_are_in_no_unit() -> None:
    model = skeleton(small_config("zamba"), Model())
    held = [{id(param) for module in unit.modules for param in module.parameters()} for unit in units_of(model, "auto")]
    assert held and sum(map(len, held)) == len(set().union(*held))
    with pytest.raises(RecipeError, match=r"fsdp.wrap: model.layers.1 of ZambaForCausalLM shares weights"):
        units_of(model, ["ZambaHybridLayer"])


@pytest.mark.soak
def test_every_architecture_trains_or_is_rejected_by_name(tmp_path: Path) -> None:
    recomputed = ["fsdp.activation_checkpointing=full"]
    ways = {way: words for kind in KINDS for way, words in ((kind, []), (f"{kind} recomputed", recomputed))}
    refused = {way: error for way, error in errors_of(ways, tmp_path).items() if error}
    for way, error in refused.items():
        print(f"{way:40} {error}")
    assert not {way: error for way, error in refused.items() if error[0] != "RecipeError"}
    assert not {way: error for way, error in refused.items() if not re.search(NAMED, error[1])}


APART = ("llama", "gemma2", "lfm2", "falcon_h1", "qwen3_next", "phi3")  # of the refused, see `test_preflight`


@pytest.mark.parametrize("kinds", [APART, pytest.param(KINDS, marks=pytest.mark.soak)], ids=["some", "all"])
def test_each_answer_of_a_pair_is_computed_as_if_it_were_alone(kinds: Sequence[str], tmp_path: Path) -> None:
    """Without packing both are in one sequence. Architectures in which they would see each other are refused."""
    variants = {}
    for kind in kinds:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(small_config(kind), dtype=torch.float32).save_pretrained(tmp_path / kind)
        variants[kind] = [f"model.id={tmp_path / kind}", f"output_dir={tmp_path / kind}-run"]
    write_pairs(tmp_path / "pairs.jsonl", 8)
    recipe = write_recipe(
        tmp_path, model={"id": str(tmp_path / kinds[0]), "tokenizer": {"train": 512}},
        data={"path": str(tmp_path / "pairs.jsonl"), "format": "preference", "seq_len": 192, "packing": "none"},
        train={"objective": "dpo", "global_batch_size": 4, "micro_batch_size": 2, "loss": "plain"},
    )  # fmt: skip
    [found] = on_ranks(1, pairs_alone, tmp_path / "rank", 1800, recipe=str(recipe), variants=variants)
    refused = {kind: message for kind, message in found.items() if isinstance(message, str)}
    corpus, worst = stream_of(recipe)[0].corpus, dict[str, float]()
    for kind in kinds:
        if kind not in refused:
            expected = plain_log_probs(str(tmp_path / kind), corpus)
            worst[kind] = ((torch.tensor(found[kind]) - expected) / expected).abs().max().item()
        print(f"{kind:24} {refused.get(kind) or f'{worst[kind]:.0e}'}", flush=True)
    assert not {kind: value for kind, value in worst.items() if value > 1e-5}
    assert not refused.keys() & {*APART} and not [text for text in refused.values() if "packing=none" in text]


# --- on every rank -------------------------------------------------------------------------------------------------


def pairs_alone(recipe: str, variants: dict[str, list[str]]) -> dict[str, Any]:
    """Return of each variant the log-probability of every answer at the start; of a refused variant the message."""
    found: dict[str, Any] = {}
    for name, overrides in variants.items():
        try:
            found[name] = build(recipe, overrides).stream.corpus.parts[0].reference.tolist()
        except RecipeError as error:
            found[name] = str(error)
    return found
