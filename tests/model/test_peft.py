"""Adapters and frozen weights: the curve of a plain peft loop, resume, exports, what is refused, FLOPs of a step."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import small_config
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from reference import batches_of, cosine_rates, largest_difference, peft_curve, stream_of, worst_gradient
from safetensors.torch import load_file, save_file
from support import TINY, on_ranks, planned, strategies, write_recipe
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OlmoConfig, Phi3Config

from fsdptrain.checkpoint.export import check_unchanged, export_checkpoint, with_options
from fsdptrain.checkpoint.manifest import survey
from fsdptrain.checkpoint.resume import BASE_KEY, EarlierAttempts
from fsdptrain.config.adapter import base_note, with_adapter_of_folder
from fsdptrain.config.keys import value_text
from fsdptrain.config.reader import load
from fsdptrain.config.schema import Adapter, Model, Recipe
from fsdptrain.data.hub import file_checksums, files_digest, safetensors_files, stamps_of
from fsdptrain.errors import RecipeError, Stopped
from fsdptrain.model.adapters import adapted_layers, freeze, save_config, saved_names, start_adapters
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import decoder_layers, is_adapter, model_flops, weights_of
from fsdptrain.model.weights import allocate, read_weights
from fsdptrain.plan.plan import Counts, Plan, varied
from fsdptrain.report.run_banner import heading
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.terminal.screen import Screen
from fsdptrain.train import setup
from fsdptrain.train.preflight import prepare_model
from fsdptrain.validation.findings import Findings
from fsdptrain.validation.model import check_model

STEPS, BATCH = 8, 8
WORLDS = (1, 2, 4)
SIZES = TINY | {"num_hidden_layers": 2}
# Widths are multiples of 64: bitsandbytes quantises all layers, and ours only those whose rows are whole blocks.
SMALL = SIZES | {"intermediate_size": 128}
SHARED_EXPERTS = ("deepseek_v3", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe")
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # the default ones are not in 512
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, **NO_DROPOUT, **NO_TOKENS),
    "phi3": Phi3Config(**SMALL, **NO_TOKENS),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "olmo": OlmoConfig(**SMALL, **NO_TOKENS, clip_qkv=0.1),  # clips what the projections return, in place
    **{kind: small_config(kind, num_hidden_layers=2) for kind in SHARED_EXPERTS},
}


@dataclass(frozen=True)
class Case:
    """What is trained, beside which model, and how far the curve may be from that of a plain peft loop.

    `whole` are parts of the names of what is trained besides adapters, `experts` of tensors of experts with adapters;
    `limit` is that of losses and gradient norms, `gradients` that of the gradient of every adapter, relative to its
    length.
    """

    words: list[str]
    whole: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    model: str = "model"
    limit: float = 1e-5
    gradients: float = 1e-5

    def overrides(self, recipe: Path) -> list[str]:
        return [*self.words, f"model.id={recipe.parent / self.model}"]


LORA = ["adapter.kind=lora", "adapter.r=3"]
QLORA = ["adapter.kind=qlora", "adapter.r=3"]
BF16 = "fsdp.mixed_precision.param_dtype=bfloat16"
FULL = "fsdp.activation_checkpointing=full"
EMBEDDED = ["adapter.target=[embed_tokens, q_proj, 'model.layers.*.mlp.up_proj']", "adapter.modules_to_save=[lm_head]"]
CASES = {
    "LoRA": Case(LORA),
    # At a high rate Adam's first steps, which are ±lr whatever the gradient is, amplify the rounding of bf16.
    "LoRA bf16, recomputed": Case([*LORA, BF16, FULL, "optim.lr=1e-4"], limit=2e-3, gradients=2e-2),
    "DoRA, head": Case([*LORA, "adapter.use_dora=true", "adapter.use_rslora=true", *EMBEDDED], ("lm_head.weight",)),
    "last layer": Case(["model.trainable=[layers.1, norm]"], ("model.layers.1.", "model.norm")),
}
MODELS = {  # fused projections, transposed weights, experts, clipping in place, tied embeddings, an adapter on the head
    f"{kind} {name}": Case([*words, *more], model=model)
    for kind, words in (("LoRA", LORA), ("QLoRA", QLORA))
    for name, (model, more) in {
        "phi3": ("phi3", []), "gpt2": ("gpt2", []), "mixtral": ("mixtral", []), "tied": ("tied", []),
        "olmo": ("olmo", [FULL]),
        "on the head": ("llama", ["adapter.target=[lm_head, k_proj]", "train.loss=plain"]),
    }.items()
}  # fmt: skip


def adapter_recipe(tmp: Path, **changes: Any) -> Path:
    if not (tmp / "model").exists():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=False)).save_pretrained(tmp / "model")
    changes = {
        "model": {"id": str(tmp / "model"), "tokenizer": {"train": 512}}, "adapter": {"kind": "lora", "r": 3},
        "optim__lr": 1e-3, "train__steps": STEPS, "train__global_batch_size": BATCH, "train__micro_batch_size": 2,
        "export": {"adapter": "both", "dtype": "float32", "compare": False},
    } | changes  # fmt: skip
    return write_recipe(tmp, **changes)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = adapter_recipe(tmp_path_factory.mktemp("adapter"), adapter={}, export={})
    for kind in {case.model for case in MODELS.values()} - {"model"}:
        AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(recipe.parent / kind)
    return recipe


def reference(recipe: Path, case: Case, start: dict[str, torch.Tensor], steps: int = STEPS) -> Any:
    """Return the curve of a plain peft loop that begins with these weights, and its gradients (see `peft_curve`)."""
    settings = load(recipe, case.overrides(recipe)).recipe
    batches = batches_of(stream_of(recipe)[0], BATCH, steps)
    rates = cosine_rates(settings.optim.lr, STEPS)[:steps]
    adapter, dtype = settings.adapter, settings.fsdp.mixed_precision.param_dtype
    every, own = adapter.target == "all-linear", [name for name in adapter.target if "experts" not in name]
    config = LoraConfig(
        r=adapter.r, lora_alpha=int(adapter.alpha), use_dora=adapter.use_dora, use_rslora=adapter.use_rslora,
        target_modules="all-linear" if every else [name.rpartition(".")[2] for name in own],
        target_parameters=[*case.experts] or None,
        fan_in_fan_out=case.model == "gpt2", task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.set_num_threads(1)
    return peft_curve(
        str(settings.model.id), config if adapter.kind else None, start, batches, rates, getattr(torch, dtype),
        case.whole, quantised=adapter.kind == "qlora",
    )  # fmt: skip


class Parity:
    """Compares curves and gradients of variants of cases with plain loops, which must be near.

    A plain loop is computed once for a case: every variant of it must begin with the same weights.
    """

    def __init__(self, recipe: Path, cases: dict[str, Case], steps: int = STEPS) -> None:
        self.recipe, self.cases, self.steps = recipe, cases, steps
        self._expected: dict[str, tuple[dict[str, torch.Tensor], Any]] = {}

    def train(self, world: int, variants: dict[str, list[str]], tmp: Path) -> dict[str, Any]:
        """Train variants on some ranks and compare them; return what `ranks.adapted` has found on the first.

        The name of a variant begins with that of its case, up to a `×`.
        """
        case_of = {name: self.cases[name.partition(" × ")[0]] for name in variants}
        words = {name: [*case_of[name].overrides(self.recipe), *more] for name, more in variants.items()}
        arguments = {"recipe": str(self.recipe), "variants": words, "steps": self.steps, "made": str(tmp)}
        ranks = on_ranks(world, "adapted", tmp, 3600, **arguments)
        curves = [[run["curve"] for run in found.values()] for found in ranks]
        assert all(other == curves[0] for other in curves), "ranks report different curves"
        wrong = {}
        for number, (name, run) in enumerate(ranks[0].items()):
            assert run["unchanged"], f"{name}: the base has changed"
            distances = self._distances(name, run["curve"], torch.load(tmp / f"{number}.pt"))
            print(f"{name:50} {world} ranks  {distances}", flush=True)
            case = case_of[name]
            if max(distances[:2]) > case.limit or distances[2] > case.gradients:
                wrong[name] = distances
        assert not wrong, "loss, gradient norm, gradient of the worst parameter"
        return dict(ranks[0])

    def _distances(self, name: str, curve: Any, made: dict[str, Any]) -> tuple[float, float, float]:
        kind, start = name.partition(" × ")[0], made["start"]
        if kind not in self._expected:
            self._expected[kind] = (start, reference(self.recipe, self.cases[kind], start, self.steps))
        first, (expected, gradients) = self._expected[kind]
        assert start.keys() == first.keys() and all(torch.equal(start[n], first[n]) for n in first), name
        return (*largest_difference(curve, expected), worst_gradient(made["gradients"], gradients(made["end"]))[0])


def test_curves_agree_with_a_plain_peft_loop(recipe: Path, tmp_path: Path) -> None:
    """On two ranks, over which rank 3 does not divide: loss, gradients, dtypes; and the base stays as it was."""
    cases = CASES | {name: MODELS[name] for name in ("LoRA gpt2", "LoRA on the head")}
    parity = Parity(recipe, cases, steps=2)
    small_units = {"LoRA × units inside adapted layers": ["fsdp.wrap={min_params: 2000}"]}
    copies = {"LoRA bf16, recomputed × copies": ["fsdp.strategy=NO_SHARD"]}
    found = parity.train(2, {name: [] for name in cases} | small_units | copies, tmp_path)
    # Where each rank has a whole copy, only the adapters, in float32, have other memory for compute.
    gathered = found["LoRA bf16, recomputed"]["copied"]
    assert found[next(iter(copies))]["copied"] == [name for name in gathered if is_adapter(name)] != gathered
    for name, run in found.items():
        assert max(largest_difference(run["curve"], found[name.partition(" × ")[0]]["curve"])) <= 1e-6
        assert run["as in the file"] and run["trained"] == ["torch.float32"], run
        assert run["base"] == ["torch.bfloat16" if "bf16" in name else "torch.float32"]


def test_a_hybrid_mesh_agrees_with_a_plain_peft_loop(recipe: Path, tmp_path: Path) -> None:
    """On two copies of two ranks: peft takes a rank's rows for the whole weight there, if it is sharded already."""
    parity = Parity(recipe, CASES, steps=2)
    parity.train(4, {"LoRA × HYBRID_SHARD": strategies(4)["HYBRID_SHARD"]}, tmp_path)


@pytest.mark.soak
def test_other_architectures_agree_with_a_plain_peft_loop(recipe: Path, tmp_path: Path) -> None:
    parity = Parity(recipe, MODELS)
    for world in WORLDS:
        parity.train(world, {name: [] for name in MODELS}, tmp_path / str(world))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train with dropout and recomputation on two ranks, save between, and resume on two ranks and on one."""
    tmp = tmp_path_factory.mktemp("resume")
    recipe = adapter_recipe(tmp, adapter={"kind": "lora", "r": 3, "dropout": 0.3})
    words = ["fsdp.activation_checkpointing=full"]
    whole = on_ranks(2, "save_between", tmp / "a", recipe=str(recipe), overrides=words, at=2, steps=4)[0]
    (tmp / "run" / "plan.json").write_text(planned(recipe, *words, ranks=2).to_json())
    again = on_ranks(2, "resume", tmp / "b", recipe=str(recipe), overrides=words, steps=4)[0]
    return {"recipe": recipe, "run": RunDir(tmp / "run"), "whole": whole, "again": again, "words": words, "tmp": tmp}


def test_a_resume_with_dropout_and_recomputation_is_bitwise_equal(trained: dict[str, Any]) -> None:
    assert trained["again"]["first"] == 2
    assert trained["again"]["curve"] == trained["whole"]["curve"][2:]
    size = sum(path.stat().st_size for path in trained["run"].checkpoint(2).glob("*.safetensors"))
    assert size < 200_000, "the whole model has 127,296 parameters: with moments, 1.5 MB"


def test_a_resume_on_another_base_or_world_size(trained: dict[str, Any]) -> None:
    """Another world size continues; another base is refused, also where its files have the same sizes."""
    weights = trained["tmp"] / "model" / "model.safetensors"
    kept = weights.with_suffix(".before")
    shutil.copyfile(weights, kept)
    recipe, words = str(trained["recipe"]), [*trained["words"], "adapter.dropout=0.3"]
    alone = on_ranks(1, "resume", trained["tmp"] / "c", recipe=recipe, overrides=words, steps=4)[0]
    assert alone["first"] == 2 and len(alone["curve"]) == 2
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][7, 7] += 1
    save_file(tensors, weights, {"format": "pt"})
    try:
        with pytest.raises(RecipeError, match="the files of the model differ from those that the run to resume has"):
            export_checkpoint(trained["run"], None, trained["tmp"] / "other", None, Screen())
        plan = trained["run"].plan.read_text()
        trained["run"].plan.write_text(varied(Plan.from_json(plan), {"export.adapter": "separate"}).to_json())
        export_checkpoint(trained["run"], None, trained["tmp"] / "other", None, Screen())  # reads no base
        trained["run"].plan.write_text(plan)
        [kind, message] = on_ranks(1, "trains", trained["tmp"] / "d", recipe=recipe, variants={"": words})[0][""]
    finally:
        kept.rename(weights)
    assert kind == "RecipeError" and "model.id: the files of the model differ" in message, message


def test_peft_opens_the_adapter_and_merges_it_to_the_same_weights(trained: dict[str, Any]) -> None:
    out, base = trained["tmp"] / "out", trained["tmp"] / "model"
    export_checkpoint(trained["run"], None, out, None, Screen())
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.arange(40)[None]
    adapted = model(ids).logits
    assert (adapted - merged(ids).logits).abs().max() < 1e-5
    assert (adapted - AutoModelForCausalLM.from_pretrained(base)(ids).logits).abs().max() > 1e-3
    ours = merged.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in model.merge_and_unload().state_dict().items())
    found = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert found["base_model_name_or_path"] == str(base)
    cards = {
        library: ModelCard.load(out / place / "README.md")
        for library, place in (("transformers", "."), ("peft", "adapter"))
    }
    assert all(card.data.library_name == library and card.data.tags[1] == "lora" for library, card in cards.items())
    assert "AutoPeftModelForCausalLM" in cards["peft"].text and "A LoRA adapter (rank" in cards["peft"].text
    shutil.copytree(out, trained["run"].export)
    [problem] = survey(trained["run"])["export"]["problems"]
    assert problem == "export.json is missing, so contents were not compared"  # the copy has no record


def test_a_rank_that_leaves_before_the_first_step_does_not_wait_in_a_collective(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop signal reached another rank while it read weights; with DoRA, starting the adapters is collective."""
    plan = planned(trained["recipe"], "adapter.use_dora=true", ranks=2)
    for name in ("read_weights", "allocate"):
        monkeypatch.setattr(setup, name, lambda *_: None)
    monkeypatch.setattr(setup, "start_adapters", lambda *_: pytest.fail("this rank waits for the one that has left"))
    world = SimpleNamespace(device=torch.device("cpu"), any=lambda _: True)
    session = SimpleNamespace(stop=SimpleNamespace(count=0), progress=None)
    checkpointer = SimpleNamespace(world=world, newest_step=lambda: 0)
    inputs = SimpleNamespace(plan=plan, prepared=SimpleNamespace(bare=None))
    with pytest.raises(Stopped):
        setup.load_state(None, session, inputs, checkpointer, 0)  # type: ignore[arg-type]


def adapter_folder(tmp_path: Path, **changes: Any) -> Recipe:
    """Return a recipe that continues from a folder with peft's configuration, changed."""
    LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (tmp_path / "adapter_model.safetensors").touch()
    return Recipe(adapter=Adapter(kind="lora", from_=str(tmp_path)))


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "pissa"}, {"rank_pattern": {"q_proj": 8}}, {"bias": "all"}, {"peft_type": "LOHA"},
        {"a_key_of_a_later_peft": 1}, {"r": 0}, {"r": "8"}, {"target_modules": None}, {"modules_to_save": "lm_head"},
        {"target_modules": ["${name}"]}, {"modules_to_save": ["${oc.env:HOME}"]}, {"target_parameters": [5]},
    ],
)  # fmt: skip
def test_an_adapter_that_would_be_computed_otherwise_is_not_continued(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe, problems = with_adapter_of_folder(adapter_folder(tmp_path, **changes))
    [(name, value)] = changes.items()
    [problem] = problems
    assert problem.field == "adapter.from"
    found = f"{name}: {value_text(value)} in adapter_config.json"
    assert f"{tmp_path} has {found}, which is not supported" in problem.message
    assert recipe.adapter.from_ is None, "a dry run would read the folder again"


HOW: dict[str, dict[str, Any]] = {  # what peft's configuration has
    "an expression": {"target_modules": r".*[.]self_attn[.](q|v)_proj"},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "all but": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "all but an expression": {"target_modules": ["q_proj"], "exclude_modules": ".*layers.1.*"},
    "embedding by an expression": {"target_modules": ".*(embed_tokens|q_proj)"},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", HOW)
def test_adapters_of_peft_are_continued_however_their_layers_were_chosen(how: str, tmp_path: Path) -> None:
    base, folder, ids = tmp_path / "base", tmp_path / "adapter", torch.arange(40)[None]
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(base)
    settings = HOW[how] | {"task_type": "CAUSAL_LM", "init_lora_weights": False}  # all its matrices are random
    expected = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **settings))
    expected.save_pretrained(folder, save_embedding_layers=False)
    model = {"id": str(base), "tokenizer": {"train": 512}}
    recipe = write_recipe(tmp_path, model=model, adapter={"kind": "lora", "from": str(folder)}, export={})
    plan = planned(recipe)
    ready = prepare_model(plan, 512)
    found = ready.trained
    read_weights(found, ready.bare, plan, torch.device("cpu"), lambda *_: None)
    allocate(found, torch.device("cpu"))
    start_adapters(found, plan)
    with torch.no_grad():
        assert torch.allclose(found.eval()(ids).logits, expected.eval()(ids).logits, atol=1e-5)
    expected.save_pretrained(folder, save_embedding_layers=True)
    with pytest.raises(RecipeError, match=r"weight is \(512, 64\), the model needs no such tensor; .*merge both with"):
        prepare_model(plan, 512)


def test_an_adapter_of_peft_determines_the_other_keys(tmp_path: Path) -> None:
    changes = {"init_lora_weights": "gaussian", "lora_dropout": 0.5, "base_model_name_or_path": "org/other"}
    found, problems = with_adapter_of_folder(adapter_folder(tmp_path, **changes))
    assert not problems and found.adapter.target == ["q_proj", "v_proj"]
    assert (found.adapter.r, found.adapter.alpha, found.adapter.dropout) == (4, 8, 0.0)
    section = {"kind": "lora", "from": str(tmp_path)}
    model = {"id": "org/name", "tokenizer": {"train": 512}}
    plan = planned(write_recipe(tmp_path, model=model, adapter=section, export={}), ranks=2)
    assert Plan.from_json(plan.to_json()).digest() == plan.digest(), "the workers would refuse the plan"
    head = heading(plan, plan.rundir, EarlierAttempts())
    assert "\nnote   the adapter of adapter.from was trained on 'org/other', and" in head
    dora = adapter_folder(tmp_path, use_dora=True)
    found, problems = with_adapter_of_folder(dora)
    assert not problems and found.adapter.use_dora
    dora.adapter.kind = "qlora"
    _, [problem] = with_adapter_of_folder(dora)
    assert problem.field == "adapter.from" and "has DoRA, which needs the norms of" in problem.message


def test_the_base_is_compared_again_before_the_adapter_is_merged(recipe: Path, tmp_path: Path) -> None:
    shutil.copytree(recipe.parent / "model", tmp_path / "model")
    plan = planned(recipe, *LORA, f"model.id={tmp_path / 'model'}")
    identity = plan.identity() | {BASE_KEY: files_digest(file_checksums(safetensors_files(plan)))}
    stamps, weights = stamps_of(safetensors_files(plan)), tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors, weights, {"format": "pt"})
    assert stamps_of(safetensors_files(plan)) != stamps
    check_unchanged(plan, stamps, identity)  # the same content
    tensors["model.embed_tokens.weight"][7, 7] += 1
    stamps = stamps_of(safetensors_files(plan))
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(RecipeError, match=r"model.id: the files of .* changed during the run.* --adapter separate"):
        check_unchanged(plan, stamps, identity)


def test_options_of_an_export_replace_keys_of_the_recipe_or_are_refused(recipe: Path) -> None:
    def chosen(kind: str | None, *options: str | None) -> tuple[str, str]:
        plan = planned(recipe, f"adapter.kind={kind or 'null'}")
        export = with_options(plan, *options).recipe.export
        return export.adapter, export.merge_base

    assert chosen("lora", "merged", None) == ("merged", "original")
    assert chosen("qlora", "both", "dequantized") == ("both", "dequantized")
    assert chosen("qlora", None, None) == ("separate", "original")
    with pytest.raises(RecipeError, match=r"export\.adapter: has no effect without adapter\.kind"):
        chosen(None, "merged", None)
    with pytest.raises(RecipeError, match=r"export\.merge_base: has no effect .*only with qlora"):
        chosen("lora", "merged", "dequantized")
    with pytest.raises(RecipeError, match=r"export\.merge_base: has no effect .*only with merged or both"):
        chosen("qlora", None, "dequantized")


def test_an_adapter_of_another_model_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    adapter_folder(tmp_path)
    section = {"kind": "lora", "from": str(tmp_path)}
    plan = planned(adapter_recipe(tmp_path, adapter=section))
    with pytest.raises(RecipeError, match=r"adapter.from: cannot read .*_model.safetensors.*; copy the file again"):
        prepare_model(plan, 512)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(4, 128)}, weights)
    with pytest.raises(RecipeError) as error:
        prepare_model(plan, 512)
    with pytest.raises(RecipeError, match=r"has an adapter .*: name its model here, and the adapter in adapter\.from"):
        load(tmp_path / "recipe.yaml", ["adapter.from=null", f"model.id={tmp_path}"])
    (tmp_path / "config.json").touch()
    with pytest.raises(RecipeError, match=r"has an adapter \(adapter_config.json\): name its model here"):
        load(tmp_path / "recipe.yaml", ["adapter.from=null", f"model.id={tmp_path}"])
    assert f"does not fit LlamaForCausalLM: {name} is (4, 128), the model needs (4, 64)" in str(error.value)
    names = [name.replace(".0.", f".{i}.").replace("q_proj", layer) for i in range(2) for layer in ("q_proj", "v_proj")]
    sizes = {name: 32 if "v_proj" in name else 64 for name in names}
    tensors = {name: torch.zeros(4, 64) for name in names}
    tensors |= {name.replace("_A.", "_B."): torch.full((size, 4), torch.nan) for name, size in sizes.items()}
    save_file(tensors, weights)
    not_finite = r"adapter.from: .*lora_B.weight in .* has values that are not finite"
    with pytest.raises(RecipeError, match=not_finite):
        start_adapters(prepare_model(plan, 512).trained, plan)
    check_model(plan, 512, 1, findings := Findings())
    assert re.match(not_finite, findings.problems[0]) and len(findings.problems) == 1, findings.problems


def test_the_base_of_an_adapter_is_compared_with_the_model(tmp_path: Path) -> None:
    """Only the merged export that contains the adapter is refused: other folders may hold the same weights."""
    base, merged, moved = tmp_path / "base", tmp_path / "merged", tmp_path / "moved"
    base.mkdir()
    recipe = adapter_folder(merged / "adapter", base_model_name_or_path=str(base))
    shutil.copytree(merged / "adapter", moved)

    def found(model: str, folder: Path) -> tuple[list[str], str | None]:
        section = dataclasses.replace(recipe.adapter, from_=str(folder))
        other, problems = with_adapter_of_folder(Recipe(model=Model(id=model), adapter=section))
        return [problem.message for problem in problems], base_note(other)

    for folder in (merged / "adapter", moved):
        [message], _ = found(str(merged), folder)
        assert f"model.id ({merged}) is the export that this adapter is merged into" in message
        assert f"set model.id to the adapter's base ('{base}'), or remove adapter.from" in message
        assert found(str(base), folder) == ([], None)
        assert found(f"{merged}/../base/", folder) == ([], None)
        problems, note = found("org/name", folder)
        assert not problems and note
        assert f"was trained on '{base}', and model.id is 'org/name': they must have the same weights" in note
    (moved / "adapter_model.safetensors").write_bytes(b"another adapter")
    problems, note = found(str(merged), moved)
    assert not problems and note
    adapter_folder(moved, base_model_name_or_path=None)
    assert found("org/name", moved) == ([], None)
    adapter_folder(base / "adapter", base_model_name_or_path=str(base))  # a base with its own adapter inside
    assert found(str(base), base / "adapter") == ([], None)


def test_a_separate_adapter_of_a_changed_model_is_refused(tmp_path: Path) -> None:
    recipe, family = adapter_recipe(tmp_path), {"model_type": "llama", "vocab_size": 512}

    def refused(config: dict[str, Any], *words: str) -> str:
        plan = planned(recipe, f"model.config={json.dumps(config)}", *words)
        try:
            prepare_model(plan, 512)
        except RecipeError as error:
            return str(error)
        return ""

    message = refused({"rms_norm_eps": 0.5})
    assert "model.config.rms_norm_eps: 0.5, but 1e-06 in " in message and "use export.adapter: merged" in message
    assert "model.config.num_attention_heads: 2, but 4 in " in refused(family | SIZES | {"num_attention_heads": 2})
    assert not refused({"rms_norm_eps": 0.5}, "export.adapter=merged")
    assert not refused({"max_position_embeddings": 512}, "data.seq_len=512")
    assert not refused({"attention_dropout": 0.1, "use_cache": False, "num_hidden_layers": 2})
    assert not refused(family | SIZES | {"tie_word_embeddings": False})


def frozen(kind: str, adapter: dict[str, Any] | None, trainable: tuple[str, ...] = (), loss: str = "chunked") -> Any:
    """Return a skeleton with this adapter, or with none and these trainable parameters."""
    recipe = Recipe(model=Model(id="org/name", trainable=list(trainable)))
    if adapter is not None:
        recipe.adapter = Adapter(**{"kind": "lora"} | adapter)
    recipe.train.loss = loss  # type: ignore[assignment]
    return freeze(skeleton(CONFIGS[kind], recipe.model, "bfloat16"), recipe)


@pytest.mark.parametrize(
    ("kind", "adapter", "message"),
    [
        ("llama", {"target": ["q_porj"]}, r"adapter.target: 'q_porj' matches no .*; did you mean q_proj"),
        ("llama", {"target": ["layers.*.q_proj"]}, "matches no .*: a pattern must match the whole name"),
        ("llama", {"target": ["norm"]}, "adapter.target: 'norm' matches no linear layer, embedding or experts"),
        ("llama", {"target": ["*"]}, "adapter.target: .* includes the head"),
        ("llama", {"target": ["q_proj"], "modules_to_save": ["self_attn"]}, "adapter.target: .* leaves no layer"),
        ("tied", {"target": ["embed_tokens"]}, "adapter.target: model.embed_tokens shares its weight with lm_head"),
        ("tied", {"modules_to_save": ["lm_head"]}, "adapter.modules_to_save: lm_head shares its weight with"),
        ("llama", {"modules_to_save": ["head"]}, "'head' is no module of LlamaForCausalLM; did you mean lm_head"),
        ("llama", {"modules_to_save": ["foo"]}, "'foo' is no module of LlamaForCausalLM; there are act_fn, down_proj"),
        ("llama", {"modules_to_save": ["rotary_emb"]}, "adapter.modules_to_save: model.rotary_emb has no parameters"),
        ("llama", {"modules_to_save": ["layers"]}, "adapter.modules_to_save: model.layers .*is a list of modules"),
        ("llama", {"kind": "qlora", "modules_to_save": ["layers.1"]}, "adapter.modules_to_save: .* in 4 bits"),
        ("deepseek_v3", {"use_dora": True}, "adapter.use_dora: .* on model.layers.0.mlp.gate_proj"),
        ("llama", None, "model.trainable: 'layer.1' matches no parameter; there are"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(kind: str, adapter: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        frozen(kind, adapter, trainable=("layer.1",) if adapter is None else ())


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("deepseek_v3", "all-linear"), ("glm4_moe", ["gate_proj", "down_proj"]),
        *(pytest.param(kind, "all-linear", marks=pytest.mark.soak) for kind in SHARED_EXPERTS[1:]),
    ],
)  # fmt: skip
def test_peft_opens_adapters_on_dense_and_shared_experts(kind: str, target: Any, tmp_path: Path) -> None:
    """peft would take the names of these layers for those of the other experts, which stay frozen."""
    torch.manual_seed(2)
    base, ids = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval(), torch.arange(1, 33)[None]
    model = copy.deepcopy(base)
    model.float32_names = set()
    recipe = Recipe(adapter=Adapter(kind="lora", r=3, dropout=0.1, target=target))
    recipe.fsdp.mixed_precision.param_dtype = "float32"
    freeze(model, recipe).eval()
    layers = {name for name, layer in base.named_modules() if type(layer) is nn.Linear and name != "lm_head"}
    expected = {n for n in layers if target == "all-linear" or n.endswith(tuple(target))}
    assert adapted_layers(model).keys() == expected
    params = {name: 0.1 * torch.randn(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    save_config(model, tmp_path)
    save_file({key: params[name] for name, key in saved_names(model).items()}, tmp_path / "adapter_model.safetensors")
    with torch.no_grad():
        trained, plain = functional_call(model, params, ids).logits, base(ids).logits
        opened = PeftModel.from_pretrained(base, tmp_path)(ids).logits
    assert (opened - trained).abs().max() < 1e-5 * (plain - trained).abs().max()
    found, problems = with_adapter_of_folder(Recipe(adapter=Adapter(kind="lora", from_=str(tmp_path))))
    assert not problems and set(found.adapter.target) == expected


def adapted_words(model: Any) -> str:
    names = [name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name]
    return " ".join(sorted({name.rpartition(".")[2] for name in names}))


def test_what_gets_an_adapter() -> None:
    """Fused projections, transposed weights and experts; the head with the plain loss; dtypes."""
    assert adapted_words(frozen("gpt2", {})) == "c_attn c_fc c_proj"
    assert adapted_words(frozen("phi3", {})) == "down_proj gate_up_proj o_proj qkv_proj"
    assert adapted_words(frozen("mixtral", {})) == "k_proj o_proj q_proj v_proj"
    assert adapted_words(frozen("tied", {})) == "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    assert adapted_words(frozen("llama", {"target": ["lm_head"]}, loss="plain")) == "lm_head"
    assert frozen("llama", {"modules_to_save": ["lm_head"]}).peft_config["default"].modules_to_save == ["lm_head"]
    model = frozen("llama", {"target": ["model.layers.0.*"], "modules_to_save": ["norm"]})
    opened = get_peft_model(AutoModelForCausalLM.from_config(CONFIGS["llama"]), model.peft_config["default"])
    trained = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (model, opened)]
    assert trained[0] == trained[1], "peft takes `norm` for every layer norm"
    params = dict(model.named_parameters())
    assert {(p.requires_grad, p.dtype) for p in params.values()} == {(True, torch.float32), (False, torch.bfloat16)}
    trained = {name for name, param in params.items() if param.requires_grad and "lora" not in name}
    assert trained == {"model.norm.weight"} and all("layers.0." in name for name in params if "lora" in name)
    count = Counts.of(weights_of(frozen("llama", None, trainable=("lm_head", "model.layers.1.*norm.weight"))).values())
    assert (count.trained, count.adapters) == (512 * 64 + 2 * 64, 0)


# --- FLOPs of a step ------------------------------------------------------------------------------------------------

LLAMA = LlamaConfig(**TINY | {"num_hidden_layers": 4}, tie_word_embeddings=False)
TRAINED: dict[str, tuple[Any, dict[str, Any]]] = {
    "all": (LLAMA, {}),
    "LoRA": (LLAMA, {"adapter": Adapter(kind="lora", r=8)}),
    "LoRA in a few layers": (LLAMA, {"adapter": Adapter(kind="lora", r=8, target=["2.self_attn.q_proj", "down_proj"])}),
    "last layer, norm and head": (LLAMA, {"trainable": ["layers.3", "norm", "lm_head"]}),
    "layers without the embedding": (LLAMA, {"trainable": ["layers"]}),
    "MLP of a layer": (LLAMA, {"trainable": ["layers.1.mlp"]}),
    "head": (LLAMA, {"trainable": ["lm_head"]}),
    "tied": (LlamaConfig(**TINY, tie_word_embeddings=True), {"trainable": ["layers.1"]}),
    "tied, LoRA": (LlamaConfig(**TINY, tie_word_embeddings=True), {"adapter": Adapter(kind="lora", r=8)}),
    "gpt2, LoRA": (GPT2Config(vocab_size=512, n_embd=64, n_layer=3, n_head=4), {"adapter": Adapter(kind="lora", r=8)}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_flops_are_those_that_torch_counts_and_at_most_a_layer_of_gradients_more(name: str) -> None:
    config, trained = TRAINED[name]
    model = Model(id="base", attn_implementation="eager", trainable=trained.get("trainable", []))
    recipe = Recipe(model=model, adapter=trained.get("adapter", Adapter()))
    bare = freeze(skeleton(config, model), recipe)
    rows, length = 2, 96
    counted = model_flops(bare, rows * length, length)
    matrices = sum(param.numel() for _, layer in decoder_layers(bare)[:1] for param in layer.parameters())
    of_a_layer = (2 * matrices + 8 * config.hidden_size * length) * rows * length
    real = bare.to_empty(device="cpu").float().train()
    ids = torch.zeros(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        real(input_ids=ids, labels=ids).loss.backward()
    more = counted - counter.get_total_flops()
    assert 0 <= more <= (0 if name == "all" else of_a_layer)
