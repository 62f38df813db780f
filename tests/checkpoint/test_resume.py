"""A resumed run is equal to one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import build, digest_of, watch
from reference import OPTIMIZERS, largest_difference
from support import TINY, on_ranks, planned, write_recipe
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdptrain.checkpoint.manifest import read_manifest
from fsdptrain.checkpoint.resume import (
    CODE_KEY,
    DATA_KEY,
    HELD_OUT_KEY,
    RESOLVED,
    TOKENIZER_KEY,
    TOKENS_KEY,
    measured_changes,
    resume_problems,
)

AT, STEPS, BATCH = 2, 4, 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Return runs over two ranks that saved in the middle: name → (recipe, curve and samples)."""
    made = {}
    dropout = {"model_type": "llama", **TINY, "attention_dropout": 0.2, "tie_word_embeddings": False}
    for name, config in {"plain": {}, "dropout": dropout}.items():
        tmp = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(tmp / "model")
        model = {"config": config, "init": "random"} if config else {"id": str(tmp / "model")}
        recipe = write_recipe(
            tmp, model={**model, "tokenizer": {"train": 512}}, train__steps=STEPS,
            train__global_batch_size=BATCH, train__micro_batch_size=2,
            fsdp__activation_checkpointing="full" if config else "none",
            fsdp__mixed_precision={"param_dtype": "bfloat16" if config else "float32"},
        )  # fmt: skip
        made[name] = (
            recipe,
            on_ranks(2, "save_between", tmp / "ranks", recipe=str(recipe), overrides=[], at=AT, steps=STEPS)[0],
        )
    return made


@pytest.mark.parametrize("name", ["plain", "dropout"])
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(name: str, saved: Any, tmp_path: Path) -> None:
    recipe, whole = saved[name]
    rest = on_ranks(2, "resume", tmp_path, recipe=str(recipe), overrides=[], steps=STEPS)[0]
    assert rest["first"] == AT
    assert rest["curve"] == whole["curve"][AT:]
    assert rest["samples"] == whole["samples"][AT:] == saved["plain"][1]["samples"][AT:], "dropout changes no sample"


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, []),
        (3, ["fsdp.strategy=SHARD_GRAD_OP"]),
        (4, ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=2", "train.micro_batch_size=1"]),
    ],
)
def test_another_world_size_continues_with_the_same_samples(
    world: int, overrides: list[str], saved: Any, tmp_path: Path
) -> None:
    recipe, whole = saved["plain"]
    rest = on_ranks(world, "resume", tmp_path, recipe=str(recipe), overrides=overrides, steps=STEPS)[0]
    assert rest["samples"] == whole["samples"][AT:]
    assert max(largest_difference(rest["curve"], whole["curve"][AT:])) < 1e-5


@pytest.mark.parametrize(
    ("names", "worlds"),
    [
        (["adamw_bf16", "adamw_8bit", "sgd optim.momentum=0"], [3]),
        pytest.param(list(OPTIMIZERS), [1, 3, 4], marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_every_optimizer_resumes_and_skips_a_step_that_is_not_finite(
    names: list[str], worlds: list[int], tmp_path: Path
) -> None:
    sizes = TINY | {"hidden_size": 256, "intermediate_size": 300, "num_hidden_layers": 1}
    recipe = write_recipe(  # rows of 256 and 300 values: some are whole blocks of 8-bit values
        tmp_path, model__config={"model_type": "llama", **sizes}, data__seq_len=32,
        optim__lr=1e-3, train__steps=4, train__global_batch_size=12, train__micro_batch_size=2,
    )  # fmt: skip
    variants = {name: [*f"optim.name={name}".split(), f"output_dir={tmp_path / name}"] for name in names}
    words = {"recipe": str(recipe), "steps": 4}
    saved = on_ranks(2, "saved_optimizers", tmp_path / "2", 1800, at=2, variants=variants, **words)[0]
    words["variants"] = {name: [*each, "train.micro_batch_size=1"] for name, each in variants.items()}
    others = {world: on_ranks(world, "curves", tmp_path / str(world), 1800, **words)[0] for world in worlds}
    for name, found in saved.items():
        assert found["first"] == 2 and found["resumed"] == found["curve"][2:], name
        assert found["unchanged"], name
        assert found["stored"] == found["planned"], name
        for world, resumed in others.items():
            difference = max(largest_difference(resumed[name], found["curve"][2:]))
            assert difference < 1e-5, (name, world, difference)
    assert len({str(found["curve"]) for found in saved.values()}) == len(names)


def test_skipped_steps_are_none_for_adam_also_after_a_resume(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, optim__lr=1e-3, train__steps=6)
    (tmp_path / "run").mkdir()
    for rank in on_ranks(2, skips, tmp_path / "ranks", recipe=str(recipe), overrides=[], at=4, steps=6):
        assert rank == {"skipped": [2, 4], "updates": 4, "plain": True, "resumed": True}
    assert read_manifest(tmp_path / "run" / "checkpoints" / "step-00000004").skipped == 2


def test_a_resume_cannot_change_which_state_is_kept(tmp_path: Path) -> None:
    identities = []
    for words in ([], ["optim.momentum=0"], ["optim.momentum=0.95", "optim.lr=1"]):
        identities.append(planned(write_recipe(tmp_path), "optim.name=sgd", *words).identity())
    [problem] = resume_problems(identities[0], identities[1])
    assert problem.field == "optim.momentum" and problem.message.startswith("was not 0 in the run to resume")
    [problem] = resume_problems(identities[1], identities[0])
    assert problem.field == "optim.momentum" and problem.message.startswith("was 0 in the run to resume")
    earlier = {key: value for key, value in identities[0].items() if not key.startswith("optim.momentum")}
    assert not resume_problems(identities[0], identities[2]) and not resume_problems(earlier, identities[2])


CONTENT: dict[str, Any] = {
    DATA_KEY: "a" * 64, TOKENS_KEY: "b" * 64, TOKENIZER_KEY: "c" * 64, CODE_KEY: {"own.py": "d" * 64},
    HELD_OUT_KEY: "e" * 64, f"{RESOLVED}rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ({}, []),
        ({DATA_KEY: "f" * 64, TOKENS_KEY: "f" * 64}, ["data.path"]),
        ({TOKENIZER_KEY: "f" * 64, TOKENS_KEY: "f" * 64}, ["model.tokenizer"]),
        ({TOKENS_KEY: "f" * 64}, ["data.path"]),
        ({CODE_KEY: {"own.py": "f" * 64}}, ["model.id"]),
        ({f"{RESOLVED}rms_norm_eps": 1e-5}, ["model.config.rms_norm_eps"]),
        ({f"{RESOLVED}new_in_this_version": 1}, []),
        ({HELD_OUT_KEY: "f" * 64}, []),
    ],
)
def test_a_resume_refuses_other_content_and_says_what_is_only_measured(
    changed: dict[str, Any], fields: list[str], tmp_path: Path
) -> None:
    plan = planned(write_recipe(tmp_path)).identity()
    before, now = plan | CONTENT, plan | CONTENT | changed
    problems = resume_problems(before, now)
    assert [problem.field for problem in problems] == fields
    assert all("choose another `name`" in problem.message for problem in problems)
    assert not resume_problems(plan, now) and not measured_changes(plan, now)  # an earlier version did not compare it
    says = {HELD_OUT_KEY: ["e" * 12, "f" * 12]} if HELD_OUT_KEY in changed else {}
    assert measured_changes(before, now) == says


def test_all_copies_of_a_model_write_a_checkpoint_from_which_each_resumes(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train__steps=STEPS, train__global_batch_size=12, fsdp__strategy="NO_SHARD")
    whole = on_ranks(2, "save_between", tmp_path / "a", recipe=str(recipe), overrides=[], at=AT, steps=STEPS)[0]
    sizes = [path.stat().st_size for path in (tmp_path / "run").glob(f"checkpoints/step-{AT:08}/*.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)
    rest = on_ranks(2, "resume", tmp_path / "b", recipe=str(recipe), overrides=[], steps=STEPS)[0]
    assert (rest["first"], rest["curve"]) == (AT, whole["curve"][AT:])


# --- on every rank -------------------------------------------------------------------------------------------------


def skips(recipe: str, overrides: list[str], at: int, steps: int) -> dict[str, Any]:
    """Skip steps 2 and 4, whose losses are NaN; save after step `at`, go on, and resume from there.

    Returns the steps that were skipped, and whether this rank's part of the weights is in the end, bit for bit, that of
    torch's AdamW that is given the gradients and rates of the other steps only (`plain`), and whether weights and state
    are those of the resumed run (`resumed`).
    """
    overrides, events = [*overrides, "train.on_nonfinite=skip", "train.max_skipped=1"], []  # in a row
    run = build(recipe, overrides)
    watch(run, events, late=False, bad=(1, 3))
    optimizer = run.engine.optimizer
    groups = [{**group, "params": [part.clone() for part in group["params"]]} for group in optimizer.param_groups]
    update, updates = optimizer.step, []

    def recorded() -> None:
        if not optimizer.found_inf:  # type: ignore[attr-defined]
            gradients = [[part.grad.clone() for part in group["params"]] for group in optimizer.param_groups]
            updates.append((optimizer.param_groups[0]["lr"], gradients))
        update()

    optimizer.step = recorded  # type: ignore[method-assign, assignment]
    for step in range(steps):
        run.step(step)
        if step + 1 == at:
            run.checkpointer.save(at, run.engine.model, optimizer, wait=True)
    run.prefetch.close()
    resumed = build(recipe, overrides)
    for step in range(resumed.engine.steps_made, steps):
        resumed.step(step)
    resumed.prefetch.close()
    plain = torch.optim.AdamW(groups)
    for lr, gradients in updates:
        for group, grads in zip(plain.param_groups, gradients, strict=True):
            group["lr"] = lr
            for part, grad in zip(group["params"], grads, strict=True):
                part.grad = grad
        plain.step()
    pairs = zip(plain.param_groups, optimizer.param_groups, strict=True)
    return {
        "skipped": [event[1] for event in events if event[0] == "skip"],
        "updates": len(updates),
        "plain": all(all(map(torch.equal, own["params"], found["params"])) for own, found in pairs),
        "resumed": resumed.engine.steps_made == at and digest_of(resumed) == digest_of(run),
    }
