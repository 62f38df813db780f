"""The checks of a run are those of the dry run, and come before anything is tokenised, trained or read."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import small_config
from reference import most_allocated
from support import TINY, fsdptrain, planned, python_path, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from fsdptrain.config.reader import load
from fsdptrain.config.schema import Model
from fsdptrain.data.corpus import Corpus
from fsdptrain.errors import RecipeError
from fsdptrain.model import probe
from fsdptrain.model.attention import choose_attention
from fsdptrain.model.config import load_config, longrope_threshold
from fsdptrain.model.probe import Probe
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import model_flops
from fsdptrain.parallel import shard
from fsdptrain.plan.hardware import parse_hardware
from fsdptrain.plan.plan import Plan, draft_plan, varied
from fsdptrain.plan.topology import Topology, topology_of
from fsdptrain.processes import memory_limited_to
from fsdptrain.train.preflight import (
    balance_note,
    check_documents,
    prepare_model,
    prepare_tokenizer_and_model,
    slow_dtype_note,
)
from fsdptrain.train.setup import gpu_fault
from fsdptrain.validation.dry_run import dry_run
from fsdptrain.validation.findings import Findings
from fsdptrain.validation.model import check_model
from fsdptrain.validation.request import Request

PHI3 = {
    "model_type": "phi3", **TINY, "pad_token_id": None, "original_max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    },
}  # fmt: skip
GATED = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
LFM2 = {"model_type": "lfm2", **TINY, "layer_types": ["conv", "full_attention", "conv"], "pad_token_id": None}
BF16 = "fsdp.mixed_precision.param_dtype=bfloat16"


def written(kind: str, **own: Any) -> dict[str, Any]:
    """Return what a recipe has as `model.config`: keys that are infinite, refused or of the tokenizer are left out."""
    values = small_config(kind, **own).to_diff_dict()
    left_out = ("time_step_limit", "router_aux_loss_coef")
    return {name: each for name, each in values.items() if name not in left_out and not name.endswith("token_id")}


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY}, "phi3": PHI3,
    **{kind: written(kind) for kind in ("gemma2", "gptj", "bloom", "bert", "mamba", "opt", "mixtral", "gpt2")},
}  # fmt: skip
RECURRENT = {"mamba2": written("mamba2")} | {
    kind: written(kind, **GATED) for kind in ("granitemoehybrid", "kimi_linear")
}


def plan_of(tmp: Path, config: dict[str, Any], *overrides: str, **changes: Any) -> Plan:
    model = {"config": config, "tokenizer": {"train": 512}, "init": "random"}
    return planned(write_recipe(tmp, **{"model": model, **changes}), *overrides, ranks=2)


def test_a_run_and_a_dry_run_refuse_the_same_with_the_same_message(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **TINY)).save_pretrained(tmp_path / "model")
    pretrained = {"id": str(tmp_path / "model"), "tokenizer": {"train": 512}}
    plan = plan_of(
        tmp_path, {}, "model.config.num_hidden_layers=1", "fsdp.wrap=[Nothing]", model=pretrained
    )  # two problems at once
    stages: list[str] = []
    with pytest.raises(RecipeError) as caught:
        prepare_tokenizer_and_model(plan, lambda stage, done, total: stages.append(stage))
    assert stages == []  # no tokenizer was trained, and no row read
    messages = [str(problem) for problem in caught.value.problems]
    assert "fsdp.wrap: ['Nothing'] matches nothing" in messages[0] and "unknown: model.layers.1" in messages[1]
    dry_run(Request(plan), found := Findings())
    assert found.problems == messages


@pytest.mark.parametrize(("kind", "kernel"), [("llama", "sdpa"), ("gemma2", "eager"), ("bloom", "eager")])
def test_auto_is_the_best_kernel_that_the_architecture_has(kind: str, kernel: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, MODELS[kind], data__packing="none")
    assert plan.recipe.model.attn_implementation == "auto"
    ready = prepare_model(plan, 512)
    assert ready.plan.recipe.model.attn_implementation == kernel
    assert ready.bare.config._attn_implementation == kernel
    assert ready.plan.identity() == plan.identity()  # a run may be resumed with another


REFUSED = {  # (model, packing) → part of the message; None: it is accepted
    ("bloom", "bfd"): "BloomForCausalLM does not tell documents apart by their position ids: use data.packing=none",
    ("bloom", "none"): None,
    ("opt", "concat"): "data.packing: concat would let the documents of a sequence attend to one another",
    ("mamba", "bfd"): "MambaForCausalLM does not tell documents apart by their position ids: use data.packing=none",
    ("mamba2", "bfd"): "Mamba2ForCausalLM does not tell documents apart by their position ids: use data.packing=none",
    ("granitemoehybrid", "bfd"): "GraniteMoeHybridForCausalLM does not tell documents apart by their position ids",
    ("kimi_linear", "bfd"): None,
    ("bert", "none"): "BertLMHeadModel is not causal",
    ("phi3", "bfd"): "above 32 tokens the rotary frequencies of Phi3ForCausalLM depend on the longest position",
    ("phi3", "none"): None,
    ("mixtral", "bfd"): None,
    ("gpt2", "concat"): None,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_whether_documents_see_each_other_is_known_before_the_run(kind: tuple[str, str], tmp_path: Path) -> None:
    plan = plan_of(tmp_path, (MODELS | RECURRENT)[kind[0]], f"data.packing={kind[1]}", train__loss="plain")
    message = REFUSED[kind]
    if message is None:
        prepare_model(plan, 512)
        return
    with pytest.raises(RecipeError) as caught:
        prepare_model(plan, 512)
    assert message in str(caught.value)


PAIRS = ["data.format=preference", "train.objective=dpo", "data.packing=none"]
WITHOUT_PAIRS = {  # a model whose answers of a pair would see one another → part of the message
    "bloom": "BloomForCausalLM does not tell documents apart by their position ids: use another model, or learn the "
    "chosen answers alone",
    "mamba": "MambaForCausalLM does not tell documents apart by their position ids",
    "deepseek_v4": "DeepseekV4ForCausalLM does not tell documents apart",
    "phi3": "data.seq_len: above 32 tokens the rotary frequencies of Phi3ForCausalLM depend on the longest position",
}


@pytest.mark.parametrize("kind", WITHOUT_PAIRS)
def test_the_answers_of_a_pair_are_apart_or_the_model_is_refused(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**PHI3) if kind == "phi3" else small_config(kind)
    plan, bare = choose_attention(plan_of(tmp_path, MODELS["llama"], *PAIRS), config)
    with pytest.raises(RecipeError, match=re.escape(WITHOUT_PAIRS[kind])) as caught:
        check_documents(plan, config, bare)
    assert "data.packing" not in str(caught.value), "this is not the way out"


def test_rows_of_a_micro_batch_are_checked_too(tmp_path: Path) -> None:
    overrides = ["data.packing=none", "train.micro_batch_size=2"]
    with pytest.raises(RecipeError, match=r"use data.seq_len=32, or data.packing=none with train.micro_batch_size=1"):
        prepare_model(plan_of(tmp_path, PHI3, *overrides), 512)
    prepare_model(plan_of(tmp_path, PHI3, *overrides, "data.seq_len=32"), 512)


@pytest.mark.parametrize("kind", MODELS)
def test_cheap_products_give_the_same_answer_as_real_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dict(MODELS[kind])
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    rows = [([[0, 1, 2, 3, 60]], slice(0, 3)), ([[0, 1, 2, 0, 1, 2, 3, 60]], slice(3, 6)),
               ([[0, 1, 60, 0, 1, 2, 0, 0]], slice(3, 6))]  # fmt: skip
    verdicts = []
    for small in (2**60, 0):
        monkeypatch.setattr(probe, "SMALL", small)
        tested = Probe(skeleton(made, Model(attn_implementation="auto")))
        verdicts.append([tested.same(*row) for row in rows])
    assert verdicts[0] == verdicts[1]


def test_a_large_model_takes_no_memory() -> None:
    def ask() -> None:
        tested = Probe(skeleton(AutoConfig.for_model("mixtral", num_hidden_layers=4), Model()))
        assert tested.same([[0, 1, 2, 0, 1, 2, 3, 4]], slice(3, 6))

    assert most_allocated(ask) < 2**30, "its weights would take 24 GiB"


def test_kernels_that_need_a_gpu_are_not_called_on_a_cpu(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    (installed / "causal_conv1d").mkdir(parents=True)
    (installed / "causal_conv1d" / "__init__.py").write_text(
        "def causal_conv1d_fn(x, weight, bias=None, activation=None, **others):\n"
        "    raise RuntimeError('Expected x.is_cuda() to be true, but got false.')\n"
        "causal_conv1d_update = causal_conv1d_fn\n"
    )
    model = {"config": LFM2, "tokenizer": {"train": 512}, "init": "random"}
    recipe = write_recipe(
        tmp_path, model=model, data__packing="none", train__steps=1, train__global_batch_size=1,
        launch__nproc_per_node=1, export__at_end=False,
    )  # fmt: skip
    done = fsdptrain("run", recipe, PYTHONPATH=python_path(installed))
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_dtypes_in_a_unit_are_refused_if_torch_does_not_support_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_config("glm4_moe").save_pretrained(tmp_path / "glm4_moe")
    listed = {"id": str(tmp_path / "glm4_moe"), "tokenizer": {"train": 512}, "init": "random"}
    plan = plan_of(tmp_path, {}, BF16, model=listed, data__packing="none")
    if torch.__version__ >= (2, 13):
        prepare_model(plan, 512)
        monkeypatch.setattr(shard, "takes_two_dtypes", lambda: False)  # as in torch 2.11
    with pytest.raises(RecipeError, match=r"Glm4MoeForCausalLM keeps .* in float32.*use torch 2.13 or newer"):
        prepare_model(plan, 512)
    prepare_model(plan_of(tmp_path, {}, model=listed, data__packing="none"), 512)
    prepare_model(plan_of(tmp_path, MODELS["llama"], BF16), 512)


def test_an_error_while_weights_are_initialised_becomes_a_recipe_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any) -> None:
        raise KeyError("initializer_range")

    monkeypatch.setattr(LlamaForCausalLM, "initialize_weights", broken)
    config = AutoConfig.for_model("llama", **TINY)
    with pytest.raises(RecipeError, match=r"model.config: no model can be built from it: .*initializer_range"):
        skeleton(config, Model(), "bfloat16")


def test_a_dry_run_says_which_attention_needs_a_mask(tmp_path: Path) -> None:
    """It is Gemma 2's, because its scores are capped."""
    hardware = parse_hardware("8xh100")
    for name, notes in {"llama": 0, "gemma2": 1}.items():
        recipe = load(write_recipe(tmp_path, model={"config": MODELS[name], "tokenizer": {"train": 512}}), [BF16])
        plan = draft_plan(recipe, topology_of(recipe.recipe, 8, hardware.hardware), elsewhere=True)[0]
        for kernel in ("auto", "eager"):
            found = Findings(elsewhere=True)
            check_model(varied(plan, {"model.attn_implementation": kernel}), 512, 4, found)
            assert ["eager with a mask" in note for note in found.notes] == [True] * notes


@pytest.mark.parametrize("seq_len", [24, 32, 48])
def test_padding_does_not_move_longrope_positions(seq_len: int) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**PHI3)
    model = AutoModelForCausalLM.from_config(config).eval()
    length, count_padding = 20, longrope_threshold(config, seq_len) is None
    assert count_padding == (seq_len <= 32)
    corpus = Corpus(
        tokens=np.arange(1, length + 1, dtype=np.uint32), trained=np.ones(length, np.bool_),
        pieces=np.array([[0, length, length]]), offsets=np.array([0, 1]), labels=np.array([length - 1]), notes={},
        seq_len=seq_len, pad=0, fingerprint="", name="", digest="", lengths=np.array([length]),
        ends=np.array([0, length]),
        count_padding=count_padding,
    )  # fmt: skip
    batch = corpus.batch([0])
    with torch.no_grad():
        alone = model(input_ids=batch["input_ids"][:, :length], use_cache=False).logits
        padded = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    assert torch.allclose(padded[:, :length], alone, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "key", "inner"), [("aria_text", "moe_topk", 96), ("qwen3_moe", "num_experts_per_tok", 32)]
)
def test_flops_count_the_experts_that_a_token_uses(kind: str, key: str, inner: int) -> None:
    configs = [small_config(kind, **{key: used}) for used in (1, 4)]
    few, more = (model_flops(skeleton(config, Model()), 1, 1) for config in configs)
    assert more - few == 6 * 3 * configs[0].num_hidden_layers * 3 * configs[0].hidden_size * inner


@pytest.mark.parametrize(
    ("device", "workers", "gpus", "words"),
    [
        ("cpu", 2, 0, None), ("cuda", 1, 1, None), ("cuda", 2, 8, None),
        ("cpu", 2, 1, r"torch sees 1 GPU.* set CUDA_VISIBLE_DEVICES=0 to train on it"),
        ("cpu", 2, 2, "set CUDA_VISIBLE_DEVICES=0,1 to train on them"),
        ("cuda", 4, 1, r"launch.nproc_per_node: 4 workers, but torch \S+ .*sees 1 GPU"),
        ("cuda", 1, 0, r"1 worker, but torch .*sees 0 GPUs.* train on the CPU with CUDA_VISIBLE_DEVICES="),
    ],
)  # fmt: skip
def test_the_gpus_of_torch_are_those_of_the_plan(device: Any, workers: int, gpus: int, words: str | None) -> None:
    fault = gpu_fault(Topology(device, 1, workers), gpus, {})
    assert bool(fault) == bool(words)
    if fault and words:
        assert re.search(words, fault)
        again = gpu_fault(Topology(device, 1, workers), gpus, {"CUDA_VISIBLE_DEVICES": "9"})
        assert again and "with CUDA_VISIBLE_DEVICES=9" in again


def test_gpus_of_amd_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    assert gpu_fault(Topology("cpu", 1, 2), 0, {}) is None
    assert "AMD GPUs (ROCm)" in str(gpu_fault(Topology("cuda", 1, 2), 2, {}))


def test_a_mixture_from_scratch_and_a_warmup_longer_than_the_run_are_noted(tmp_path: Path) -> None:
    notes = {}
    for name in ("llama", "mixtral"):
        findings = Findings()
        dry_run(Request(plan_of(tmp_path, MODELS[name], schedule__warmup=100 if name == "mixtral" else 2)), findings)
        notes[name] = findings.notes
        assert ("schedule.warmup: the warm-up has 100 steps and the run 4" in findings.verdict) == (name == "mixtral")
    balance = "model: a mixture of 8 experts from scratch, which nothing balances"
    assert [any(balance in note for note in found) for found in notes.values()] == [False, True]
    plan = plan_of(tmp_path, MODELS["mixtral"])
    config = load_config(plan, 512)
    model = dataclasses.replace(plan.recipe.model, id="org/mixture", init="pretrained")
    pretrained = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, model=model))
    assert balance_note(plan, config) and balance_note(pretrained, config) is None
    config.output_router_logits = True  # with the auxiliary loss
    assert balance_note(plan, config) is None


@pytest.mark.parametrize("has_units", [True, False])
def test_bfloat16_on_a_cpu_without_instructions_for_it_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_units: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if has_units else "AVX2")
    plan = plan_of(tmp_path, MODELS["llama"])
    bfloat16 = plan_of(tmp_path, MODELS["llama"], BF16)
    on_gpus = dataclasses.replace(bfloat16, topology=dataclasses.replace(plan.topology, device="cuda"))
    assert slow_dtype_note(plan) is slow_dtype_note(on_gpus) is None
    assert (slow_dtype_note(bfloat16) is None) == has_units
    findings = Findings()
    check_model(bfloat16, 512, None, findings)
    assert any("param_dtype=float32" in note for note in findings.notes) != has_units


def test_a_size_that_takes_all_memory_is_refused_at_once(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {**MODELS["gptj"], "n_positions": 2**28})
    with (
        memory_limited_to(2**30),
        pytest.raises(RecipeError, match=r"^model\.config: this machine has too little memory"),
    ):
        prepare_model(plan, 512)
