"""Weights in and out: each rank reads its own slices, random weights do not depend on the world size."""

from __future__ import annotations

import json
import os
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_saves import when_synced
from safetensors.torch import load_file, save_file
from support import TINY, on_ranks, write_recipe
from test_architectures import random_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fsdptrain.checkpoint import writer as writers
from fsdptrain.checkpoint.exported import names_by_decoder_layer
from fsdptrain.checkpoint.verify import INDEX
from fsdptrain.checkpoint.writer import SafetensorsWriter, check_export, write_folder
from fsdptrain.config.schema import Model
from fsdptrain.errors import CheckpointError, RecipeError
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import saved_state
from fsdptrain.parallel.patches import keeps_integers

LLAMA = {"model_type": "llama", **TINY, "tie_word_embeddings": False}


def test_the_ranks_of_a_copy_read_each_byte_once(tmp_path: Path) -> None:
    halves = ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"]
    quantised = ["adapter.kind=qlora", "fsdp.mixed_precision.param_dtype=bfloat16", "export.adapter=merged"]
    cases = {  # name → model, ranks of a copy, overrides
        "sharded": ("llama tied", 4, []),
        "in halves": ("mixtral", 2, halves),  # the files have a tensor for each expert
    }
    if keeps_integers():
        cases["quantised"] = ("gpt2", 2, [*quantised, *halves])  # and transposed
    variants = {}
    for name, (kind, _, words) in cases.items():
        random_model(kind, tmp_path / name / "model")
        variants[name] = [f"model.id={tmp_path / name}/model", f"output_dir={tmp_path / name}/run", *words]
    recipe = write_recipe(tmp_path, model={"id": "unset", "tokenizer": {"train": 512}})
    resumed = ["in halves"]
    ranks = on_ranks(4, "bytes_read", tmp_path / "ranks", recipe=str(recipe), variants=variants, resumed=resumed)
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
    """Return the bytes of all tensors in the safetensors files below a folder."""
    return sum(tensor.nbytes for path in folder.rglob("*.safetensors") for tensor in load_file(path).values())


def test_random_weights_are_the_same_for_every_world_size(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, model__config=LLAMA, train__global_batch_size=6)
    variants = {"full": [], "replicated": ["fsdp.strategy=NO_SHARD"], "by class": ["fsdp.wrap=[LlamaMLP]"]}
    found = [
        on_ranks(world, "digests", tmp_path / str(world), recipe=str(recipe), variants=variants | {"seed": ["seed=1"]})[
            0
        ]
        for world in (1, 3)  # an uneven split, too
    ]
    assert found[0] == found[1]
    assert len({found[0][name] for name in variants}) == 1
    assert found[0]["seed"] != found[0]["full"]


def test_copies_that_differ_at_the_start_are_rejected(tmp_path: Path) -> None:
    random_model("llama", tmp_path / "model")
    recipe = write_recipe(tmp_path, model={"id": str(tmp_path / "model"), "tokenizer": {"train": 512}})
    none, half = ["fsdp.strategy=NO_SHARD"], ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2"]
    variants = {"sound": half, "read weight": half, "drawn weight": [*none, "model.init=random"], "buffer": []}
    found = on_ranks(4, "split_copies", tmp_path / "ranks", recipe=str(recipe), variants=variants)
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
    tokenizer_of(tmp).save_pretrained(assets)
    monkeypatch.setattr(writers, "MAX_FILE_BYTES", limit)
    groups = names_by_decoder_layer(bare)
    tensors = ({name: state[name].detach() for name in group} for group in groups)
    write_folder(bare, groups, tensors, assets, tmp / "out", "float32", lambda *_: None)
    return bare, tmp / "out"


def tokenizer_of(tmp: Path) -> Any:
    from fsdptrain.data.tokenizer import train_bpe

    train_bpe(iter(["some text to train on"] * 3), 300).save_pretrained(tmp / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp / "tokenizer")


def test_large_exports_are_split_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out = tiny_export(tmp_path, monkeypatch, limit=200_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and all(f.stat().st_size < 210_000 for f in files)
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"].values()) == {f.name for f in files}
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(out)


def test_an_incomplete_folder_is_never_reported_as_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare, out = tiny_export(tmp_path, monkeypatch, limit=10**9)
    tensors = load_file(out / "model.safetensors")
    name = next(iter(tensors))
    for broken in ({n: t for n, t in tensors.items() if n != name}, {**tensors, name: tensors[name][:-1].clone()}):
        save_file(broken, out / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            check_export(out, bare)


def test_files_hold_what_was_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of any shape and width, in any order, on several files; nothing else, and nothing less."""
    monkeypatch.setattr(writers, "MAX_FILE_BYTES", 100)
    tensors = {
        "odd": torch.arange(7, dtype=torch.bfloat16), "wide": torch.randn(3, 5), "scalar": torch.tensor(3),
        "none": torch.zeros(0, 4), "transposed": torch.randn(4, 6).T, "flag": torch.tensor([True]),
    }  # fmt: skip
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    writer = SafetensorsWriter(tmp_path, meta)
    for name in reversed(tensors):
        with pytest.raises(CheckpointError, match="tensors are missing: "):
            writer.finish()
        writer.add({name: tensors[name]})
    writer.finish()
    files = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [sorted(file) for file in files] == [["none", "odd", "scalar", "wide"], ["flag", "transposed"]]
    found = files[0] | files[1]
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    for other in ({"wide": torch.randn(5, 3)}, {"wide": torch.randn(3, 5).double()}, {"other": torch.ones(1)}):
        with pytest.raises(CheckpointError, match=f"{next(iter(other))}: expected .*, found "):
            writer.add(other)


def test_each_file_is_synced_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks would seem to hang while one of them waits for the disk to take a whole model."""
    monkeypatch.setattr(writers, "MAX_FILE_BYTES", 100)
    tensors = {name: torch.zeros(20) for name in "abc"}
    writer = SafetensorsWriter(tmp_path, {name: tensor.to("meta") for name, tensor in tensors.items()})
    synced: list[str] = []
    with when_synced(lambda path: synced.append(path.name)):
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            writer.add({name: tensor})
            assert synced[number - 1 :] == [f"model-{number:05}-of-00003.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_every_file_of_an_export_has_the_permissions_that_the_umask_leaves(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(umask)
    try:
        _, out = tiny_export(tmp_path, monkeypatch, limit=10**5)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask) and out.stat().st_mode & 0o777 == 0o777 & ~umask
    assert sum(name.endswith(".safetensors") for name in modes) > 1


def test_a_full_disk_leaves_the_old_export_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare, out = tiny_export(tmp_path, monkeypatch, limit=10**9)
    before = (out / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SafetensorsWriter, "add", full)
    tensors = iter([{name: torch.zeros(tuple(t.shape))} for name, t in saved_state(bare).items()])
    with pytest.raises(CheckpointError, match="no space: needs"):
        write_folder(bare, [[]], tensors, tmp_path / "assets", out, "float32", lambda *_: None)
    assert (out / "model.safetensors").read_bytes() == before
    assert not out.with_name("out.tmp").exists()


def test_an_export_that_the_disk_has_damaged_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare, out = tiny_export(tmp_path, monkeypatch, limit=10**9)
    before = (out / "model.safetensors").read_bytes()
    tensors = iter([{name: torch.zeros(tuple(t.shape))} for name, t in saved_state(bare).items()])
    with (
        when_synced(lambda path: os.truncate(path, path.stat().st_size - 1) if path.suffix == ".safetensors" else None),
        pytest.raises(CheckpointError, match=r"cannot write .*out: "),
    ):
        write_folder(bare, [[]], tensors, tmp_path / "assets", out, "float32", lambda *_: None)
    assert (out / "model.safetensors").read_bytes() == before


BLOOM = "model.config={model_type:\\ bloom,hidden_size:\\ 64,n_layer:\\ 2,n_head:\\ 4,vocab_size:\\ 512}"
REJECTED = {  # overrides → text of the message
    "model.config.hidden_size=32": "of another shape: lm_head.weight",
    "model.config.num_hidden_layers=4": "missing: model.layers.3",
    "model.config.num_hidden_layers=2": "unknown: model.layers.2",
    "model.config.hiden_size=64": "did you mean `hidden_size`",
    "model.config.vocab_size=100": "the tokenizer has 512 tokens",
    "data.seq_len=4096": "beyond the model's 256 positions",
    "model.attn_implementation=flash_attention_2": "flash_attention_2 is not available",
    "model.config.model_type=lama": "no architecture 'lama'",
    "model.id=recipes": "cannot read the configuration of 'recipes'",
    f"model.id=null {BLOOM} model.attn_implementation=eager": "would let the documents of a sequence attend to",
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    tmp = tmp_path_factory.mktemp("refusals")
    random_model("llama", tmp / "model")
    recipe = write_recipe(tmp, model={"id": str(tmp / "model"), "tokenizer": {"train": 512}})
    variants = {overrides: shlex.split(overrides) for overrides in REJECTED}
    return dict(on_ranks(1, "refusals", tmp / "ranks", recipe=str(recipe), variants=variants)[0])


@pytest.mark.parametrize("override", REJECTED)
def test_weights_that_do_not_fit_are_rejected(override: str, refusals: dict[str, tuple[int, str]]) -> None:
    code, message = refusals[override]
    assert code == RecipeError.exit_code and REJECTED[override] in message
