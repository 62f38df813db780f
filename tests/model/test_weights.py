"""Weights in and out: each rank reads its own slices, random weights do not depend on the world size."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from architectures import small_config
from broken_saves import when_synced
from huggingface_hub.constants import SAFETENSORS_INDEX_FILE
from ranks import build, local
from reference import assert_same_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import on_ranks, planned, write_recipe
from test_architectures import random_model
from test_assets import tokenizer_in
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain.checkpoint import export_tensors
from fsdptrain.checkpoint import shards as loading
from fsdptrain.checkpoint.export_tensors import (
    SafetensorsWriter,
    check_export,
    names_by_decoder_layer,
    publish,
    tensors_in_files,
    write_folder,
)
from fsdptrain.config.schema import Model
from fsdptrain.data.hub import safetensors_files
from fsdptrain.errors import CheckpointError, FsdptrainError, RecipeError
from fsdptrain.model import weights
from fsdptrain.model.config import announced_mtp, load_config
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import saved_state
from fsdptrain.model.weights import check_weights, fit_config, read_weights
from fsdptrain.parallel.patches import takes_two_dtypes
from fsdptrain.plan.plan import Plan
from fsdptrain.train import trainer
from fsdptrain.train.preflight import prepare_tokenizer_and_model


def test_the_ranks_of_a_copy_read_each_byte_once(tmp_path: Path) -> None:
    halves = ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"]
    quantised = ["adapter.kind=qlora", "fsdp.mixed_precision.param_dtype=bfloat16", "export.adapter=merged"]
    cases = {  # name → model, ranks of a copy, overrides
        "sharded": ("llama tied", 4, []),
        "in halves": ("mixtral", 2, halves),  # the files have a tensor for each expert
    }
    if takes_two_dtypes():
        cases["quantised"] = ("gpt2", 2, [*quantised, *halves])  # and transposed
    variants = {}
    for name, (kind, _, words) in cases.items():
        random_model(kind, tmp_path / name / "model")
        variants[name] = [f"model.id={tmp_path / name}/model", f"output_dir={tmp_path / name}/run", *words]
    recipe = write_recipe(tmp_path, model={"id": "unset", "tokenizer": {"train": 512}})
    resumed = ["in halves"]
    ranks = on_ranks(4, bytes_read, tmp_path / "ranks", recipe=str(recipe), variants=variants, resumed=resumed)
    for name, (_, of_copy, _) in cases.items():
        model = stored_bytes(tmp_path / name / "model")
        expected = {name: {"model": model, "checkpoint": 0}}
        if name in resumed:
            checkpoint = stored_bytes(tmp_path / name / "run" / "checkpoints")
            expected[f"{name}, resumed"] = {"model": 0, "checkpoint": checkpoint}
        for start, kinds in expected.items():
            for kind, whole in kinds.items():
                read = [rank[start][kind] for rank in ranks]
                copies = [sum(read[first : first + of_copy]) for first in range(0, 4, of_copy)]
                assert copies == [whole] * (4 // of_copy), (start, kind)
        assert name == "quantised" or all(rank[name]["model"] == rank[name]["held"] for rank in ranks)


def stored_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for path in folder.rglob("*.safetensors") for tensor in load_file(path).values())


def test_copies_that_differ_at_the_start_are_rejected(tmp_path: Path) -> None:
    random_model("llama", tmp_path / "model")
    recipe = write_recipe(tmp_path, model={"id": str(tmp_path / "model"), "tokenizer": {"train": 512}})
    none, half = ["fsdp.strategy=NO_SHARD"], ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"]
    variants = {"sound": half, "read weight": half, "drawn weight": [*none, "model.init=random"], "buffer": []}
    found = on_ranks(4, split_copies, tmp_path / "ranks", recipe=str(recipe), variants=variants)
    assert all(other == found[0] for other in found) and found[0].pop("sound") is None
    for name, message in found[0].items():
        what = "model.rotary_emb.original_inv_freq" if "buffer" in name else "lm_head.weight"
        first, host = (1 if name == "read weight" else 0), f"({socket.gethostname()})"
        assert message.startswith(
            f"internal error: before the first step {what} is not the same on ranks {first} {host} and 3 {host},"
        )


def tiny_export(tmp: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> tuple[Any, Path]:
    """Write a real model's state into a folder, in files of at most `limit` bytes."""
    random_model("mixtral", tmp / "model")
    recipe_model = Model(id=str(tmp / "model"))
    bare = skeleton(AutoConfig.from_pretrained(tmp / "model"), recipe_model)
    state = saved_state(AutoModelForCausalLM.from_pretrained(tmp / "model", dtype=torch.float32))
    assets = tmp / "assets"
    bare.config.pad_token_id = bare.generation_config.pad_token_id = 0  # the tokenizer's
    bare.config.save_pretrained(assets)
    bare.generation_config.save_pretrained(assets)
    tokenizer_in(tmp / "tokenizer").save_pretrained(assets)
    monkeypatch.setattr(export_tensors, "MAX_FILE_BYTES", limit)
    groups = names_by_decoder_layer(bare)
    tensors = ({name: state[name].detach() for name in group} for group in groups)
    write_to(tmp / "out", bare, groups, tensors, assets)
    return bare, tmp / "out"


def write_to(out: Path, bare: Any, groups: list[list[str]], tensors: Any, assets: Path) -> None:
    publish(lambda folder: write_folder(bare, groups, tensors, assets, folder, "float32", lambda *_: None), out, 0, {})


def test_an_incomplete_folder_is_never_reported_as_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare, out = tiny_export(tmp_path, monkeypatch, limit=10**9)
    tensors = load_file(out / "model.safetensors")
    name = next(iter(tensors))
    for broken in ({n: t for n, t in tensors.items() if n != name}, {**tensors, name: tensors[name][:-1].clone()}):
        save_file(broken, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            check_export(out, tensors_in_files(bare))


def test_files_hold_what_was_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any shape and width, in any order, on several files, each synced when it is complete.

    The ranks would seem to hang while one of them waits for the disk to take a whole model.
    """
    monkeypatch.setattr(export_tensors, "MAX_FILE_BYTES", 100)
    tensors = {
        "odd": torch.arange(7, dtype=torch.bfloat16), "wide": torch.randn(3, 5), "scalar": torch.tensor(3),
        "none": torch.zeros(0, 4), "transposed": torch.randn(4, 6).T, "flag": torch.tensor([True]),
    }  # fmt: skip
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    writer = SafetensorsWriter(tmp_path, meta)
    synced: list[str] = []
    with when_synced(lambda path: synced.append(path.name)):
        for name in reversed(tensors):
            with pytest.raises(CheckpointError, match="tensors are missing: "):
                writer.finish()
            writer.add({name: tensors[name]})
        assert sorted(synced) == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        writer.finish()
    files = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [sorted(file) for file in files] == [["none", "odd", "scalar", "wide"], ["flag", "transposed"]]
    assert_same_tensors(files[0] | files[1], tensors)
    for other in ({"wide": torch.randn(5, 3)}, {"wide": torch.randn(3, 5).double()}, {"other": torch.ones(1)}):
        with pytest.raises(CheckpointError, match=f"{next(iter(other))}: expected .*, found "):
            writer.add(other)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_large_exports_are_split_with_an_index_and_have_the_permissions_that_the_umask_leaves(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(umask)
    try:
        _, out = tiny_export(tmp_path, monkeypatch, limit=200_000)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask) and out.stat().st_mode & 0o777 == 0o777 & ~umask
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and all(f.stat().st_size < 210_000 for f in files)
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((out / SAFETENSORS_INDEX_FILE).read_text())
    assert set(index["weight_map"].values()) == {f.name for f in files}
    stored = load_file(tmp_path / "model" / "model.safetensors")
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert_same_tensors(after, stored)
    AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize(
    ("fault", "message"), [("a full disk", "no space: needs"), ("damage", r"cannot write .*out: ")]
)
def test_an_export_that_the_disk_refuses_or_damages_replaces_none(
    fault: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare, out = tiny_export(tmp_path, monkeypatch, limit=10**9)
    before = (out / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def damage(path: Path) -> None:
        if fault == "damage" and path.suffix == ".safetensors":
            os.truncate(path, path.stat().st_size - 1)

    if fault == "a full disk":
        monkeypatch.setattr(SafetensorsWriter, "add", full)
    tensors = iter([{name: torch.zeros(tuple(t.shape))} for name, t in saved_state(bare).items()])
    with when_synced(damage), pytest.raises(CheckpointError, match=message):
        write_to(out, bare, [[]], tensors, tmp_path / "assets")
    assert (out / "model.safetensors").read_bytes() == before
    assert not out.with_name("out.tmp").exists()


BLOOM = "model.config={model_type:\\ bloom,hidden_size:\\ 64,n_layer:\\ 2,n_head:\\ 4,vocab_size:\\ 512}"
REJECTED = {  # overrides → text of the message
    "model.config.hidden_size=32": "of another shape: lm_head.weight",
    "model.config.num_hidden_layers=4": "missing: model.layers.3",
    "model.config.num_hidden_layers=2": "unknown: model.layers.2",
    "model.attn_implementation=flash_attention_2": "flash_attention_2 is not available",
    "model.config.model_type=lama": "no architecture 'lama'",
    "model.id=recipes": "'recipes' has no config.json: it is not the folder of a model",
    f"model.id=null {BLOOM} model.attn_implementation=eager": "would let the documents of a sequence attend to",
}


@pytest.mark.parametrize("overrides", REJECTED)
def test_weights_that_do_not_fit_are_rejected(overrides: str, tmp_path: Path) -> None:
    random_model("llama", tmp_path / "model")
    with pytest.raises(RecipeError, match=REJECTED[overrides]):
        prepare_tokenizer_and_model(plan_of(tmp_path, *shlex.split(overrides)), lambda *_: None)


Stored = dict[str, torch.Tensor]


def plus(*names: str, size: tuple[int, ...] = (3, 5)) -> Callable[[Stored], Stored]:
    return lambda stored: stored | {name: torch.randn(size) for name in names}


def with_head(stored: Stored, copied: bool = False) -> Stored:
    embedding = next(tensor for name, tensor in stored.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
    return stored | {"lm_head.weight": embedding.clone() if copied else torch.randn_like(embedding)}


def with_nan_in_both(stored: Stored) -> Stored:
    stored["model.embed_tokens.weight"][3, 1] = math.nan
    return with_head(stored, copied=True)


def with_mtp(stored: Stored) -> Stored:
    """Add a layer for multi-token prediction behind the four decoder layers, with a block like the last of them."""
    block = {name.replace(".3.", ".4.", 1): tensor.clone() for name, tensor in stored.items() if ".layers.3." in name}
    return stored | block | {"model.layers.4.eh_proj.weight": torch.randn(64, 128)}


def renamed(before: str, after: str) -> Callable[[Stored], Stored]:
    return lambda stored: {re.sub(before, after, name): tensor for name, tensor in stored.items()}


TIED = {"tie_word_embeddings": True}
NOT_READ, AS_THEY_ARE = "that transformers has no place for are not read", "are exported as they are"
TWO = "have different values in the files, so they are trained and exported as two weights"
UNKNOWN = "does not fit the architecture: unknown: "
ODD: dict[str, tuple[str, dict[str, Any], Callable[[Stored], Stored], str]] = {
    # name → architecture, its configuration, the change of its file, and what is said of it
    "a head of its own": ("llama", TIED, with_head, TWO),
    "gpt2's own head": ("gpt2", {}, with_head, TWO),
    "a copy of the embedding with its NaN": ("llama", TIED, with_nan_in_both, ""),
    "the head for both": ("llama", TIED, renamed("^model.embed_tokens", "lm_head"), ""),
    "no prefix": ("llama", {}, renamed("^model[.]", ""), ""),
    "gpt2's mask, no prefix": ("gpt2", {}, lambda s: plus("h.0.attn.bias")(renamed("^transformer.", "")(s)), NOT_READ),
    "gpt2's masks": ("gpt2", {}, plus("transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias"), NOT_READ),
    "gpt_neo's mask": ("gpt_neo", {}, plus("transformer.h.1.attn.attention.bias"), NOT_READ),
    "rotary frequencies": ("llama", {}, plus("model.layers.0.self_attn.rotary_emb.inv_freq"), NOT_READ),
    "qwen3_next's mtp": (
        "qwen3_next", {}, plus("mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"), AS_THEY_ARE,
    ),
    "qwen3.5's mtp": ("qwen3_5_text", {"mtp_num_hidden_layers": 1}, plus("mtp.fc.weight"), AS_THEY_ARE),
    "mtp that is switched off": ("qwen3_5_text", {"mtp_num_hidden_layers": 0}, plus("mtp.fc.weight"), NOT_READ),
    "deepseek's mtp": ("deepseek_v3", {}, with_mtp, AS_THEY_ARE),
    "glm's mtp": ("glm4_moe", {}, with_mtp, AS_THEY_ARE),
    "mtp that is not there": ("glm4_moe", {}, lambda stored: stored, "the export announces none"),
    "another layer": ("llama", {}, with_mtp, f"{UNKNOWN}model.layers.4.eh_proj.weight, "),
    "a stray weight": ("llama", {}, plus("model.layers.0.foo.weight"), f"{UNKNOWN}model.layers.0.foo.weight; to train"),
    "one tie of several": ("zamba", {}, with_head, "ZambaForCausalLM would also untie model.layers.3"),
}  # fmt: skip


def odd_checkpoint(folder: Path, kind: str, own: dict[str, Any], change: Callable[[Stored], Stored]) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(small_config(kind, **own), dtype=torch.float32).save_pretrained(folder)
    stored = change(load_file(folder / "model.safetensors"))
    save_file({n: t.clone() for n, t in stored.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def plan_of(tmp: Path, *overrides: str) -> Plan:
    return planned(write_recipe(tmp, model={"id": str(tmp / "model"), "tokenizer": {"train": 512}}), *overrides)


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_read_as_transformers_reads_them_or_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, own, change, said = ODD[name]
    odd_checkpoint(tmp_path / "model", kind, own, change)
    expected: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    plan = plan_of(tmp_path)
    config, files = load_config(plan, None), safetensors_files(plan)
    try:
        notes = fit_config(config, skeleton(config, plan.recipe.model), plan, files)
        model = skeleton(config, plan.recipe.model)
        notes += check_weights(model, plan, files).notes
    except RecipeError as error:
        assert said in str(error) and (UNKNOWN not in said or "model.ignore_weights" in str(error))
        return
    assert (said in notes[0] if said else not notes) and len(notes) <= 1
    read_weights(model, skeleton(config, plan.recipe.model), plan, torch.device("cpu"), lambda *_: None)
    params = dict(expected.named_parameters(remove_duplicate=False))
    for key, param in model.named_parameters(remove_duplicate=False):
        assert torch.equal(param.nan_to_num(7.5), params.pop(key).nan_to_num(7.5)), key
    assert not params
    pairs = [(each.get_input_embeddings().weight, each.get_output_embeddings().weight) for each in (model, expected)]
    assert len({embedding is head for embedding, head in pairs}) == 1
    assert bool(announced_mtp(config)) == (said == AS_THEY_ARE and kind != "qwen3_next")


def checked(plan: Plan, vocab_size: int | None = None) -> list[str]:
    """Read the configuration of `model.id`, then the headers of its weights; return the notes."""
    config, files = load_config(plan, vocab_size), safetensors_files(plan)
    notes = fit_config(config, skeleton(config, plan.recipe.model), plan, files)
    return notes + check_weights(skeleton(config, plan.recipe.model), plan, files).notes


def with_embedding(stored: Stored) -> Stored:
    return {**with_mtp(stored), "model.layers.4.embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}


NEXT = "model.config.num_nextn_predict_layers=1"
NEVER = "num_nextn_predict_layers: layers for multi-token prediction are never trained"
CHANGED: dict[str, tuple[str, Callable[[Stored], Stored], dict[str, str]]] = {
    # name → architecture, the change of its file, and overrides with what is said of each
    "tensors that nothing knows": (
        "llama", plus("model.layers.0.foo.weight", "bar"),
        {
            "model.ignore_weights=[bar]": "unknown: model.layers.0.foo.weight",
            "model.ignore_weights=[bar,'*.foo.*']": "",
            "model.ignore_weights=['*']": "",
            "model.ignore_weights=[bar,'*.foo.*',lm_head.weight]":
                "model.ignore_weights: 'lm_head.weight' matches no tensor that Llama",
        },
    ),
    "layers that were cut": (
        "glm4_moe", lambda stored: stored,
        {
            "model.config.num_hidden_layers=3": "unknown: model.layers.3.",
            f"model.config.num_hidden_layers=3 {NEXT}": NEVER,
            f"model.init=random {NEXT}": NEVER,
        },
    ),
    "a copied layer without rows for added tokens": (
        "glm4_moe", with_embedding,
        {
            "model.add_tokens=[<new>]": "layers.4.embed_tokens",
            "model.add_tokens=[<new>] model.ignore_weights=[model.layers.4.*]": "the export announces none",
        },
    ),
    "a tie that the files contradict": (
        "llama", lambda stored: stored,
        {"model.config.tie_word_embeddings=true": "tie_word_embeddings: true, but lm_head.weight and model.embed"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_recipe_changes_fits_the_files_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, change, cases = CHANGED[name]
    odd_checkpoint(tmp_path / "model", kind, {}, change)
    rows = load_config(plan_of(tmp_path), None).vocab_size
    for overrides, said in cases.items():
        try:
            notes = checked(plan_of(tmp_path, *overrides.split()), rows + overrides.count("<new>"))
        except RecipeError as error:
            assert said and said in str(error), overrides
        else:
            assert [said in note for note in notes] == [True] * bool(said), overrides


def test_a_model_that_is_drawn_announces_no_multi_token_prediction(tmp_path: Path) -> None:
    odd_checkpoint(tmp_path / "model", "glm4_moe", {}, lambda stored: stored)
    assert announced_mtp(load_config(plan_of(tmp_path, "model.init=random"), None)) == 0


def test_a_file_and_an_index_beside_it_must_name_the_same_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    odd_checkpoint(model, "llama", {}, lambda stored: stored)
    plan, whole = plan_of(tmp_path), load_file(model / "model.safetensors")
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(model, max_shard_size="100KB")
    (model / "model.safetensors").unlink()
    shards = safetensors_files(plan)
    assert len(shards) > 2
    save_file(whole, model / "model.safetensors", {"format": "pt"})
    assert safetensors_files(plan) == [str(model / "model.safetensors")], "what transformers reads"
    (model / "pytorch_model.bin").touch()
    assert safetensors_files(plan) == [str(model / "model.safetensors")], "what transformers reads"
    refused = (
        r"has model.safetensors, which transformers reads, and model.safetensors.index.json, which names files with"
    )
    whole["model.norm.weight"][0] += 1
    save_file(whole, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=refused):
        safetensors_files(plan)
    Path(shards[0]).unlink()
    with pytest.raises(RecipeError, match=refused):
        safetensors_files(plan)
    (model / SAFETENSORS_INDEX_FILE).unlink()
    config = json.loads((model / "config.json").read_text())
    Path(model / "model.safetensors").rename(model / "other.safetensors")
    for name in ("other.safetensors", "../model/other.safetensors"):
        (model / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
        if name.startswith("other"):
            assert safetensors_files(plan) == [str(model / name)]
        else:
            with pytest.raises(RecipeError, match="names a file outside its folder"):
                safetensors_files(plan)


def test_the_export_has_what_transformers_and_servers_read_of_the_files(tmp_path: Path) -> None:
    cases: dict[str, tuple[str, list[str]]] = {
        "a head of its own": ("a head of its own", []),
        "the head for both": ("the head for both", []),
        "glm's mtp": ("glm's mtp", []),
        "an adapter": ("glm's mtp", ["adapter.kind=lora", "export.adapter=merged"]),
    }
    variants = {}
    for name, (odd, words) in cases.items():
        kind, own, change, _ = ODD[odd]
        odd_checkpoint(tmp_path / name, kind, own, change)
        variants[name] = [f"model.id={tmp_path / name}", f"output_dir={tmp_path / name}-run", *words]
    recipe = write_recipe(
        tmp_path, model={"id": "unset", "tokenizer": {"train": 512}}, optim__lr=0.0, train__global_batch_size=2,
        data__packing="none", data__max_rows=8, data__seq_len=16,
    )  # fmt: skip
    on_ranks(2, "exports", tmp_path / "ranks", recipe=str(recipe), variants=variants, steps=1)
    for name in cases:
        export = tmp_path / f"{name}-run" / "export"
        before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / name, export))
        if name == "the head for both":
            before["model.embed_tokens.weight"] = before.pop("lm_head.weight")
        assert_same_tensors(after, before, name)
        config = AutoConfig.from_pretrained(export)
        has_mtp = any("mtp." in key or ".layers.4." in key for key in after)
        assert bool(announced_mtp(config)) == has_mtp, "vLLM looks for what is announced"
        assert config.tie_word_embeddings == (name == "the head for both"), "vLLM drops a head that is tied"


# --- on every rank -------------------------------------------------------------------------------------------------


def bytes_read(recipe: str, variants: dict[str, list[str]], resumed: list[str]) -> dict[str, dict[str, int]]:
    """Return the bytes of tensors that this rank reads, of the model's files and of a checkpoint's, when it starts.

    Each variant is started; then those in `resumed` save a checkpoint and are started again. `held` is this rank's part
    of the parameters.
    """
    read: dict[str, int] = {}

    class CountingRows(weights._Slice):
        def __init__(self, rows: Any, kind: str) -> None:
            super().__init__(rows)
            self._kind = kind

        def __getitem__(self, key: Any) -> Any:
            tensor = self._rows[key]
            read[self._kind] += tensor.nbytes
            return tensor

    @contextlib.contextmanager
    def counting(path: Any, framework: str) -> Iterator[Any]:
        with safe_open(path, framework) as file:
            kind = "checkpoint" if "checkpoints" in str(path) else "model"
            slices = {"get_slice": lambda name: CountingRows(file.get_slice(name), kind)}
            yield SimpleNamespace(keys=file.keys, metadata=file.metadata, **slices)

    weights.safe_open = loading.safe_open = counting
    found = {}
    for name, overrides in variants.items():
        read = {"model": 0, "checkpoint": 0}
        run = build(recipe, overrides)
        found[name] = read | {"held": sum(local(param).nbytes for param in run.engine.model.parameters())}
        if name in resumed:
            run.checkpointer.save(1, run.engine.model, run.engine.optimizer, wait=True)
            read = {"model": 0, "checkpoint": 0}
            build(recipe, overrides)
            found[f"{name}, resumed"] = read
    return found


def split_copies(recipe: str, variants: dict[str, list[str]]) -> dict[str, str | None]:
    """Flip a bit in a weight or a buffer of the last rank; return the error that each variant raises, or None."""
    load_state, found = trainer.load_state, {}
    for name, overrides in variants.items():

        def spoilt(model: Any, *others: Any, what: str = name.split()[-1]) -> Any:
            loaded = load_state(model, *others)
            tensors = {"weight": model.parameters, "buffer": model.buffers}
            if dist.get_rank() == dist.get_world_size() - 1 and what in tensors:
                local(list(tensors[what]())[-1].detach()).view(torch.int32).view(-1)[:1] ^= 1
            return loaded

        with patch.object(trainer, "load_state", spoilt):
            try:
                build(recipe, overrides)
                found[name] = None
            except FsdptrainError as error:
                found[name] = str(error)
    return found
