"""Learning from a teacher that is asked before step 1: the curve of a loop that holds both models, and the cache."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranks import build, curve, evaluated
from reference import batches_of, cosine_rates, documents_of, plain_distillation, plain_loss, stream_of
from safetensors.torch import load_file, save_file
from support import TINY, events, fsdptrain, on_ranks, planned, quiet, strategies, write_pretrained
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.data import teacher as outputs_module
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.errors import FsdptrainError
from fsdptrain.train import teacher as stage_module

STEPS, BATCH, LR = 4, 8, 1e-3
# In float32, relative to the larger of the value and 1. Rounding may decide which of two tokens that a teacher finds
# equally likely is the last to be kept: then gradients differ by their truncation.
LIMITS = np.array([1e-6, 1e-4, 1e-6, 1e-6])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe whose student learns from a larger random Llama, with several rows in every sequence."""
    tmp = tmp_path_factory.mktemp("distill")
    path = write_pretrained(
        tmp, LlamaConfig(**TINY), optim__lr=LR, data__eval={"fraction": 0.1},
        teacher={"id": str(tmp / "teacher"), "top_k": 16},
        train={"steps": STEPS, "global_batch_size": BATCH, "objective": "distill"},
    )  # fmt: skip
    torch.manual_seed(2)  # its embedding is padded, and its logits are far from equal
    larger = LlamaConfig(**TINY | {"vocab_size": 576, "hidden_size": 96, "num_hidden_layers": 4}, initializer_range=0.2)
    AutoModelForCausalLM.from_config(larger).save_pretrained(tmp / "teacher")
    load_tokenizer(planned(path), quiet).save_pretrained(tmp / "teacher")
    return path


LOSSES: dict[str, dict[str, Any]] = {
    "forward": {"weight": 0.5, "kl": "forward", "temperature": 1.0},
    "reverse": {"weight": 0.5, "kl": "reverse", "temperature": 2.0},
}
BOTH, ADAPTED = [*LOSSES], ["adapter.kind=lora", "export.adapter=merged", "train.micro_batch_size=4"]
# Ranks → layouts: losses, `top_k` and overrides. With the same `top_k` one reads what another has cached.
Layouts = dict[str, tuple[list[str], int, list[str]]]
SOME: Layouts = {
    "accumulated": (BOTH, 16, []),
    "context": (["forward"], 12, ["parallel.context=2", "train.micro_batch_size=4"]),
    "lora": (["reverse"], 16, ADAPTED),
}
EVERY: Layouts = {
    **{name: (BOTH, 20 + i, own) for i, (name, own) in enumerate(strategies(4).items())},
    "lora": (BOTH, 16, [*ADAPTED[:-1], "train.micro_batch_size=2"]),
    "tensor": (BOTH, 30, ["parallel.tensor=2", "train.micro_batch_size=2"]),
    "context": (BOTH, 12, ["parallel.context=2", "train.micro_batch_size=4"]),
    "context × tensor": (BOTH, 31, ["parallel.tensor=2", "parallel.context=2", "train.micro_batch_size=4"]),
    "offload": (BOTH, 32, ["fsdp.cpu_offload=true"]),
}
PLAIN: Layouts = {"plain": (BOTH, 600, ["train.loss=plain", "train.micro_batch_size=2"])}  # more than there are tokens


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [(2, SOME), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((4, EVERY), (1, PLAIN)))],
)
def test_curves_agree_with_the_plain_loop_that_holds_both(
    ranks: int, layouts: Layouts, recipe: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    batches = batches_of(stream_of(recipe)[0], BATCH, STEPS)
    folders = [str(recipe.parent / name) for name in ("model", "teacher")]
    variants, chosen = dict[str, list[str]](), dict[str, tuple[str, int]]()
    for layout, (losses, top_k, own) in layouts.items():
        for loss in losses:
            keys, name = LOSSES[loss], f"{loss}, {layout}"
            variants[name] = [f"teacher.temperature={keys['temperature']}", f"teacher.top_k={top_k}", *own]
            variants[name] += [f"train.distill.{key}={keys[key]}" for key in ("weight", "kl")]
            chosen[name] = loss, top_k
    expected = {
        (loss, top_k): plain_distillation(*folders, batches, cosine_rates(LR, STEPS), LOSSES[loss] | {"top_k": top_k})
        for loss, top_k in {*chosen.values()}
    }
    first, *others = on_ranks(ranks, "curves", tmp_path, recipe=str(recipe), variants=variants, steps=STEPS)
    assert all(other == first for other in others), "ranks report different curves"
    for name, found in first.items():
        wanted = np.array(expected[chosen[name]])
        assert wanted[0, 0] - wanted[-1, 0] > 0.01, "nothing is learned"
        worst = np.abs(np.subtract(found, wanted)) / np.maximum(1, np.abs(wanted))
        print(f"{name:40} loss, norm, KL, cross-entropy: {worst.max(axis=0)}")
        worst = worst[:1, [0, 2, 3]] if "lora" in name else worst  # at first an adapter changes nothing
        assert (worst <= (LIMITS if worst.shape[1] == 4 else LIMITS[[0, 2, 3]])).all(), name
        assert found[-1][0] != found[0][0], name


def test_what_is_cached_is_computed_once_and_again_when_it_is_gone(recipe: Path, tmp_path: Path) -> None:
    (found,) = on_ranks(1, history, tmp_path / "rank", recipe=str(recipe), home=str(tmp_path / "home"))
    total = found["parts"]
    assert "no space" in found["no space"][0] and "lower teacher.top_k" in found["no space"][0]
    assert found["no space"][1] == 0, "the teacher is asked before the disk is looked at"
    assert "what was finished is kept" in found["interrupted"][0] and found["interrupted"][1] == 2
    assert found["continued"] == total - 2 > 2
    assert found["resumed"] == [found["curve"][2:], 0]
    assert found["cache gone"] == [found["curve"][2:], total]
    assert found["damaged"] == [found["curve"][2:], 1]
    assert found["another teacher"][1] == total
    (loss, norm, kl, _), *_ = found["another teacher"][0]
    assert abs(loss) < 1e-6 and abs(kl) < 1e-6 and norm < 1e-5, "the student is its own teacher"
    assert found["held"] == 0, "the teacher is in memory beside the student"
    held_out = found["held out"]
    assert held_out["loss"] == pytest.approx(0.5 * held_out["kl"] + 0.5 * held_out["cross_entropy"], rel=1e-6)
    assert held_out["cross_entropy"] == pytest.approx(found["plain"], rel=1e-6)


def test_a_teacher_that_cannot_be_learned_from_is_refused(recipe: Path, tmp_path: Path) -> None:
    other = shutil.copytree(recipe.parent / "teacher", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    bare = shutil.copytree(recipe.parent / "teacher", tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    broken = shutil.copytree(recipe.parent / "teacher", tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    variants = {
        "broken": [f"teacher.id={broken}", f"output_dir={tmp_path / 'run'}"],
        "tokenizer": [f"teacher.id={other}"], "weights": [f"teacher.id={bare}"],
        "pipeline": ["parallel.pipeline=2", "launch.nproc_per_node=2"],
        "window": ["data.window=1", "data.eval=null"], "missing": ["teacher.id=null", "teacher.top_k=8"],
        "nothing": [f"teacher.id={tmp_path}/none"], "unused": ["train.objective=next_token"],
    }  # fmt: skip
    (found,) = on_ranks(1, "refusals", tmp_path / "rank", recipe=str(recipe), variants=variants)
    code, text = found.pop("broken")
    assert code == 7 and text.startswith("teacher.id: ") and text.endswith("gives probabilities that are nan")
    del variants["broken"]
    texts = {name: text for name, (code, text) in found.items() if code == 2}
    assert texts.keys() == variants.keys(), found
    assert re.search(
        r"teacher.id: .*other has another tokenizer .*: '[AB]' is id \d+ there and id \d+ here", texts["tokenizer"]
    )
    assert "teacher.id: " in texts["weights"] and "no safetensors weights" in texts["weights"]
    assert "train.objective: distill" in texts["pipeline"] and "parallel.pipeline" in texts["pipeline"]
    assert "data.window: train.objective: distill needs all data" in texts["window"]
    assert "teacher.id: is not set" in texts["missing"]
    assert "teacher.id: " in texts["nothing"] and "does not exist" in texts["nothing"]
    assert "has no effect with train.objective: next_token, only with distill" in texts["unused"]


def test_the_teacher_is_asked_ahead_by_a_command_and_a_run_needs_it_no_more(recipe: Path, tmp_path: Path) -> None:
    """The folder of the cache is what another machine gets; the run checks only the files of the teacher."""
    words, env = [recipe, f"output_dir={tmp_path / 'run'}"], {"FSDPTRAIN_CACHE": str(tmp_path / "cache")}
    words.append("launch.nproc_per_node=1")
    shown = fsdptrain("validate", *words, "--json", **env)
    teacher = json.loads(shown.stdout)["teacher"]
    assert shown.returncode == 0 and teacher["parameters"] > 3 * 10**5 and 0 < teacher["rank_bytes"] < 4 * 10**6
    asked = fsdptrain("prepare", *words, "--teacher", **env)
    assert asked.returncode == 0 and "asking the teacher" in asked.stderr and not (tmp_path / "run").exists()
    kept = sum(file.stat().st_size for file in tmp_path.glob("cache/teacher/*/*.npy"))
    assert teacher["cache_bytes"] == pytest.approx(kept, abs=1000), "validate says another size"
    folders = {folder: folder.stat().st_mtime_ns for folder in tmp_path.glob("cache/teacher/*/")}
    trained = fsdptrain("run", *words, "eval.every=2", **env)
    assert trained.returncode == 0 and "asking the teacher" not in trained.stdout
    assert folders == {folder: folder.stat().st_mtime_ns for folder in tmp_path.glob("cache/teacher/*/")}
    first, *_, last = events(tmp_path / "run", "eval")
    assert last["loss"] == last["kl"] < first["kl"] and last["cross_entropy"] > 0
    scored = fsdptrain("eval", tmp_path / "run", "--data", recipe.parent / "text.jsonl", "--json", **env)
    assert {"loss", "perplexity"} <= json.loads(scored.stdout)["all"].keys() and "kl" not in scored.stdout
    needless = fsdptrain("prepare", "shakespeare", "--teacher", **env)
    assert needless.returncode == 2 and "--teacher: has no effect" in needless.stderr


# --- on every rank -------------------------------------------------------------------------------------------------


def history(recipe: str, home: str) -> dict[str, Any]:
    """Return what happens to runs of a recipe, and the number of parts that each computes; the cache is in `home`."""
    os.environ["FSDPTRAIN_CACHE"] = f"{home}/cache"
    overrides = [f"output_dir={home}/run", "train.distill.weight=0.5", "train.micro_batch_size=2"]
    found, keep, polls = dict[str, Any](), outputs_module.TeacherOutputs.keep, itertools.count(1)

    def made(other: Sequence[str] = ()) -> tuple[Any, int]:
        """Return the trainer, or the error that refused it, and how many parts were computed."""
        with patch.object(outputs_module.TeacherOutputs, "keep", autospec=True, side_effect=keep) as kept:
            try:
                return build(recipe, [*overrides, *other]), kept.call_count
            except FsdptrainError as error:
                return str(error), kept.call_count

    def resumed() -> list[Any]:
        run, computed = made()
        return [curve(run, STEPS, run.engine.steps_made), computed]

    with patch.object(outputs_module, "PART", 16):
        with patch.object(stage_module, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=10))):
            found["no space"] = made()
        with patch.object(stage_module.StopPoll, "__call__", lambda _: next(polls) > 20):  # 8 micro-batches each
            found["interrupted"] = made()
        run, found["continued"] = made()
        found["parts"] = sum(len(each.parts[0].teacher.parts) for each in (run.stream.corpus, run.inputs.eval_corpus))
        tables = [each for each in gc.get_objects() if isinstance(each, nn.Embedding) and each.embedding_dim == 96]
        found["held"] = sum(not table.weight.is_meta for table in tables)
        found["held out"] = evaluated(run)
        corpus = run.inputs.eval_corpus.parts[0]
        found["plain"] = plain_loss(str(Path(recipe).parent / "model"), documents_of(corpus, range(len(corpus))))
        found["curve"] = curve(run, 2)
        run.checkpointer.save(2, run.engine.model, run.engine.optimizer, wait=True)
        found["curve"] += curve(run, STEPS, 2)
        found["resumed"] = resumed()
        shutil.rmtree(f"{home}/cache/teacher")
        found["cache gone"] = resumed()
        next(Path(f"{home}/cache/teacher").glob("*/log_probs.npy")).write_bytes(b"x")
        found["damaged"] = resumed()
        own = Path(recipe).parent / "model"
        for file in (own.parent / "teacher").glob("tokenizer*"):
            shutil.copy(file, own)
        run, computed = made([f"teacher.id={own}", f"output_dir={home}/other", "train.distill.weight=1"])
        found["another teacher"] = [curve(run, 1), computed]
    return found
