"""The dry run: every level is checked as far as possible, all problems are reported, and sizes are transformers'."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections import namedtuple
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from pseudo_terminal import Terminal
from rich.console import Console
from support import ROOT, TINY, fsdptrain, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain.checkpoint import nodes
from fsdptrain.config.objectives import Objective
from fsdptrain.config.optimizers import Weight
from fsdptrain.config.reader import load
from fsdptrain.data import hub
from fsdptrain.errors import CheckpointError, DataError, DoesNotFit, FsdptrainError, RecipeError
from fsdptrain.forecast.forecaster import Forecast
from fsdptrain.forecast.render import verdict
from fsdptrain.model.config import load_config
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import units_of
from fsdptrain.plan.plan import Plan, draft_plan, varied
from fsdptrain.plan.topology import Topology, find_topology
from fsdptrain.terminal.page import Page
from fsdptrain.validation import dry_run as levels
from fsdptrain.validation import model
from fsdptrain.validation.data import describe_lengths
from fsdptrain.validation.dry_run import dry_run, times_beside_steps
from fsdptrain.validation.findings import Findings, show_outcome, show_section
from fsdptrain.validation.model import describe_model, parameters_by_unit
from fsdptrain.validation.request import Request, make_request

LLAMA = {"model_type": "llama", **TINY}


def draft(recipe: Path, *overrides: str, gpus: str = "") -> tuple[Plan, list[str]]:
    written = load(recipe, list(overrides))
    topology = find_topology(written.recipe, {"CUDA_VISIBLE_DEVICES": gpus}, elsewhere=True)
    plan, problems = draft_plan(written, topology, elsewhere=True)
    return plan, [str(problem) for problem in problems]


def validate(recipe: Path, *overrides: str, elsewhere: bool = False, gpus: str = "") -> tuple[Findings, str]:
    """Run a dry run in this process. Return what it found and what it showed."""
    plan, problems = draft(recipe, *overrides, gpus=gpus)
    found = Findings(elsewhere=elsewhere)
    dry_run(Request(plan, problems), found)
    return found, shown(found)


def shown(found: Findings, verbose: bool = False) -> str:
    """Return what is shown in a pipe."""
    page = page_of(None)
    show_outcome(found.outcome(), page, verbose)
    return "\n".join(printed(page)) + "\n"


def page_of(width: int | None) -> Page:
    """Return a page on a terminal of this width; in a pipe if it is None."""
    return Page(Console(file=io.StringIO(), force_terminal=width is not None, width=width, color_system=None))


def printed(page: Page) -> list[str]:
    return page.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def free_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free, 0, free))


EVERYTHING_WRONG = (
    "data.path=nope.jsonl", "train.global_batch_size=7", "model.attn_implementation=flash_attention_2",
    "launch.nproc_per_node=64", "launch.nnodes=2", "launch.rdzv_endpoint=here:there",
)  # fmt: skip


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has no flash attention and a full disk."""
    monkeypatch.setattr(model, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(model, "is_kernels_available", lambda: False)
    free_disk(monkeypatch, 1000)


@pytest.mark.usefixtures("nothing_here")
def test_all_problems_come_at_once(tmp_path: Path) -> None:
    found, output = validate(write_recipe(tmp_path), *EVERYTHING_WRONG, gpus=",".join(map(str, range(64))))
    wanted = [
        "train.global_batch_size: 7 sequences", "64 workers, but", "flash_attention_2 is not available",
        "launch.rdzv_endpoint: ", "data.path: ", "output_dir:",
    ]  # fmt: skip
    assert len(found.problems) == len(wanted), found.problems
    assert all(text in problem for text, problem in zip(wanted, found.problems, strict=True))
    assert found.exit_code == RecipeError.exit_code
    assert found.levels.keys() == {"machine", "model"}  # no arithmetic of a batch that does not divide
    assert "LlamaForCausalLM" in output and "torch" in output
    assert output.startswith(f"{len(found.problems)} problems (listed at the end)\n")


@pytest.mark.usefixtures("nothing_here")
def test_for_another_machine_what_is_missing_here_is_a_note(tmp_path: Path) -> None:
    overrides = [word for word in EVERYTHING_WRONG if "batch" not in word]
    overrides += ["train.global_batch_size=128", "data.eval={path: nope-either.jsonl}", "model.tokenizer=org/name"]
    recipe = write_recipe(tmp_path)
    found, output = validate(recipe, *overrides, elsewhere=True, gpus=",".join(map(str, range(64))))
    assert (found.problems, found.exit_code) == ([], 0)
    missing = [note for note in found.notes if note.startswith("not checked here: ")]
    for text in ("64 workers", "flash_attention_2", "rdzv_endpoint", "data.path", "eval.path", "org/name", "output_"):
        assert any(text in note for note in missing), text
    names = "number of GPUs, attention kernel, rendezvous, evaluation data, data, tokenizer (no Hub)"
    summary = next(line for line in output.splitlines() if "not checked here" in line)
    assert [name for name in names.split(", ") if name not in summary] == [], summary
    assert not any(note in output for note in missing), "one line for all of them"
    assert all(note in shown(found, verbose=True) for note in missing)
    assert found.levels["model"]["architecture"] == "LlamaForCausalLM"
    plan = draft_plan(load(recipe, ["data.path=nope.jsonl"]), find_topology(load(recipe).recipe, {}), elsewhere=True)[0]
    assert plan.data_path == str(Path.cwd() / "nope.jsonl")


def test_the_exit_code_is_that_of_the_most_basic_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"txt": "a"}\n')
    free_disk(monkeypatch, 1000)
    found, _ = validate(recipe)
    assert found.exit_code == CheckpointError.exit_code
    space = found.levels["model"]["disk"]
    assert space["checkpoint_bytes"] == 12 * found.levels["model"]["parameters"]
    assert space["checkpoints"] == 2 and space["free_bytes"] == 1000  # four steps, one checkpoint every two
    found, _ = validate(recipe, f"data.path={bad}")
    assert found.exit_code == DataError.exit_code and "no column 'text'" in found.problems[0]
    found, _ = validate(recipe, f"data.path={bad}", "model.config.hiden_size=64")
    assert found.exit_code == RecipeError.exit_code and len(found.problems) == 2


@pytest.mark.parametrize("without", ["", "checkpoint.async=false", "checkpoint.every=4", "checkpoint.every=null"])
def test_the_copy_of_a_checkpoint_must_fit_into_host_memory(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "available_memory", lambda: 1000)
    found, _ = validate(write_recipe(tmp_path), *without.split())
    space, parameters = found.levels["model"]["host"], found.levels["model"]["parameters"]
    assert space == {
        "state_bytes": 16 * parameters, "copy_bytes": 0 if without else 12 * parameters, "activation_bytes": 0,
        "available_bytes": 1000,
    }  # fmt: skip
    assert found.exit_code == CheckpointError.exit_code and "no space in the memory of this node" in found.problems[0]


def test_on_gpus_a_node_holds_a_copy_of_its_share_of_a_checkpoint(tmp_path: Path) -> None:
    plan, _ = draft(write_recipe(tmp_path))
    gpus = dataclasses.replace(plan.topology, device="cuda", nnodes=4, nproc_per_node=8)
    plan = dataclasses.replace(plan, topology=gpus, shard_size=32)
    space = nodes.host_space(plan, [Weight((1000, 64))], None)
    assert (space["state_bytes"], space["copy_bytes"]) == (0, 12 * 64000 // 4)
    plan.recipe.fsdp.cpu_offload, plan.recipe.checkpoint.async_ = True, False
    space = nodes.host_space(plan, [Weight((1000, 64)), Weight((900, 64), trained=False, quantised=True)], None)
    pinned = 8192 + 8192 + 1024 + 32  # a weight and its gradient of 8,000 bytes each, 900 of NF4 and 29 of scales
    assert (space["state_bytes"], space["copy_bytes"]) == (8 * (pinned + 8 * 2000), 0)


def test_an_internal_error_does_not_end_the_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdptrain.validation.data.prepare", lambda *_, **__: 1 / 0)
    found, _ = validate(write_recipe(tmp_path))
    assert found.exit_code == FsdptrainError.exit_code and "ZeroDivisionError" in found.problems[0]
    assert "model" in found.levels


def test_an_earlier_runs_checkpoints_make_room_for_new_ones(tmp_path: Path) -> None:
    plan, _ = draft(write_recipe(tmp_path))
    before = nodes.disk_space(plan, [Weight((10, 100))], None)
    assert before["checkpoints"] == 11 and before["needed_bytes"] == 11 * 12000 + 4000
    best = varied(plan, {"checkpoint.keep_best": 3, "eval.every": 4})  # and checkpoint.every: 2
    counts = [nodes.disk_space(best, [Weight((10, 100))], steps)["checkpoints"] for steps in (None, 8, 9)]
    assert counts == [14, 5, 7], "at most those of all saves: 2, 4, 6, 8, and 4, 8, and the last"
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(b"x" * 12000)
    assert nodes.disk_space(plan, [Weight((10, 100))], None)["needed_bytes"] == 10 * 12000 + 4000


def test_a_folder_that_a_run_would_refuse_is_a_problem_and_for_another_machine_a_note(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.md").write_text("mine")
    problem = f"output_dir: {tmp_path / 'run'} holds files that fsdptrain did not write (notes.md); choose another"
    found, _ = validate(recipe, f"data.path={tmp_path}/*.jsonl")
    assert (found.problems, found.exit_code) == ([problem], RecipeError.exit_code)
    found, _ = validate(recipe, elsewhere=True)
    assert found.exit_code == 0 and any(problem in note for note in found.notes)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.md"]


@pytest.mark.parametrize(
    ("hardware", "nodes", "ranks"),
    [
        ("8xh100", 1, 8), ("16xh100", 2, 8), ("16x8xh100", 16, 8), ("2 × 4 × H100 80GB", 2, 4), ("1x2xh100", 1, 2),
        ("4x2xgh200", 4, 2), ("3x4xcpu", 3, 4),
    ],
)  # fmt: skip
def test_numbers_of_cards_replace_what_the_file_says_and_not_the_command_line(
    hardware: str, nodes: int, ranks: int, tmp_path: Path
) -> None:
    launch = {"nnodes": 5, "nproc_per_node": 3, "rdzv_endpoint": "a:1"}
    written = write_recipe(tmp_path, train__global_batch_size=384, launch=launch)
    for words in ([], ["launch.nnodes=1:16", "launch.max_restarts=1"]):  # a range that does not contradict
        topology = make_request(load(written, words), hardware, False).plan.topology
        assert (topology.nnodes, topology.nproc_per_node) == (nodes, ranks)
    assert make_request(load(written), hardware, False).problems == []
    for key, number in {"nnodes": nodes, "nproc_per_node": ranks}.items():
        override = f"launch.{key}={launch[key]}"
        with pytest.raises(RecipeError, match=rf"launch\.{key}: . contradicts --hardware .*, which has {number}: set"):
            make_request(load(written, [override]), hardware, False)


def test_several_nodes_need_a_rendezvous(tmp_path: Path) -> None:
    plan, _ = draft(write_recipe(tmp_path), "launch.nnodes=2")
    problems = map(str, levels.machine_problems(plan, levels.describe_machine(plan)))
    assert any("launch.nnodes: several nodes need a rendezvous" in problem for problem in problems)


def test_the_histogram_holds_every_row_once() -> None:
    rng = np.random.default_rng(0)
    for lengths in (rng.integers(0, 5000, 999), np.array([1]), np.array([0]), np.array([300000]), np.array([64, 64])):
        found = describe_lengths(lengths, 300)
        counted = [((lengths >= bin["from"]) & (lengths <= bin["to"])).sum() for bin in found["bins"]]
        assert [bin["rows"] for bin in found["bins"]] == counted and sum(counted) == len(lengths)
        longer = sum(bin["rows"] for bin in found["bins"] if bin["from"] > 300)
        assert longer == found["over_seq_len"] == (lengths > 300).sum()
        page = page_of(40)
        show_section("Data", [{"kind": "lengths", "bins": found["bins"], "seq_len": 300, "beyond": "cut"}], page)
        lines = printed(page)
        assert any("cut" in line for line in lines) == bool(longer) and all(len(line) <= 40 for line in lines)


def test_the_data_level_counts_what_the_run_will_read(tmp_path: Path) -> None:
    found, output = validate(write_recipe(tmp_path, train={"global_batch_size": 8, "epochs": 2}))
    data = found.levels["data"]
    assert sum(bin["rows"] for bin in data["lengths"]["bins"]) == data["rows"] == 300
    assert data["tokens"] == round(data["lengths"]["mean"] * data["rows"])  # texts are split, and lose nothing
    assert data["split"] == data["lengths"]["over_seq_len"] > 0
    assert data["steps"] == -(-2 * data["sequences"] // 8) and data["steps_per_epoch"] == data["sequences"] / 8
    assert data["columns"] == ["text"] and data["needed"] == {"text": "text"}
    assert 0 < data["document"] < 64 and f"{data['rows_per_sequence']:.1f} rows per sequence" in output
    assert "█" in output and "⟦First Citizen" in output
    assert re.search(r"longer than seq_len 64: \d+ of 300 rows \(\d+%\), split", output)


def problems(folder: Path, short: int, long: int, cut: int) -> Path:
    """Write rows: of the `long` ones the prompt alone is too long for 64 tokens, of the `cut` ones the answer."""
    rows = [*short * [("How many?", "Four.")], *long * [("many " * 200, "Four.")], *cut * [("How?", "four " * 200)]]
    path = folder / f"problems-{short}.jsonl"
    path.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in rows))
    return path


def test_rows_that_are_not_used_are_in_the_verdict_and_the_notes_with_their_share(tmp_path: Path) -> None:
    data = {"format": "prompt_completion", "seq_len": 64, "separator": "\n"}
    data |= {"path": str(problems(tmp_path, 27, 31, 2)), "eval": {"path": str(problems(tmp_path, 5, 0, 3))}}
    found, output = validate(write_recipe(tmp_path, data=data))
    dropped = "31 of 60 rows (52%) dropped: no trained token in the first 64 tokens"
    assert not found.problems and "no problems found" not in output
    for text in (dropped, "33 of 60 rows (55%) cut at 64 tokens", "data.eval: 3 of 8 rows (38%) cut at 64 tokens"):
        assert text in found.verdict and any(note.startswith(text) for note in found.notes)
    assert "60 rows, " in output and "31 of 60 rows (52%) dropped: no trained token\n" in output
    data = found.levels["data"]
    assert (data["rows"], data["dropped"], data["cut"]) == (60, 31, 33)


THINKS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize(("turns", "rows"), [("all", 40), ("split", 80), ("last", 40)])
def test_a_template_that_drops_thoughts_of_earlier_turns_is_said(turns: str, rows: int, tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": f"<think>It adds up to {i}.</think>{i}"} for i in range(4)]
    talk = [message for answer in answers[2:] for message in ({"role": "user", "content": "How many?"}, answer)]
    path = tmp_path / "talks.jsonl"
    path.write_text(40 * (json.dumps({"messages": talk}) + "\n"))
    data = {"path": str(path), "format": "chat", "turns": turns, "chat_template": THINKS, "seq_len": 128}
    found, output = validate(write_recipe(tmp_path, data=data))
    noted = any("renders earlier turns of the assistant otherwise" in note for note in found.notes)
    assert noted == (turns == "all") and not found.problems
    assert found.levels["data"]["template"] == "the recipe's" and found.levels["data"]["rows"] == rows
    assert ("80 rows of 40 conversations, " in output) == (turns == "split")


def test_evaluations_and_prompts_take_time_beside_the_steps(tmp_path: Path) -> None:
    """A step of 30 s is 4 micro-batches on each of 2 ranks, and a third of it is the forward pass."""
    recipe = write_recipe(
        tmp_path, data__eval={"fraction": 0.1}, eval__every=4, eval__max_new_tokens=20, eval__prompts=["a", "b", "c"]
    )
    plan, data = draft(recipe)[0], {"sequences": 160, "eval_sequences": 16, "steps": 10}
    (line,) = times_beside_steps(30, varied(plan, {"eval.prompts": []}), data)
    assert line == "beside the steps, 4 evaluations: about 0:20 each"
    (line,) = times_beside_steps(30, plan, data)  # 3 micro-batches of 1 sequence for each of 20 tokens
    assert line == "beside the steps, 4 evaluations: about 0:20 each, and up to 2:30 more for eval.prompts"
    preferences = varied(plan, {"train.objective": Objective.dpo, "eval.every": None, "eval.prompts": []})
    assert [*times_beside_steps(30, preferences, data)] == [
        "before step 1, the reference reads all pairs: about 3:40",
        "beside the steps, 2 evaluations: about 0:20 each",
    ]
    assert [*times_beside_steps(30, varied(preferences, {"train.objective": Objective.kto}), data)] == [
        "before step 1, the reference reads all rows: about 5:30",  # a forward pass more: half of a step are two
        "beside the steps, 2 evaluations: about 0:30 each",
    ]
    assert [*times_beside_steps(30, plan, data | {"eval_sequences": 0})] == []


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("strategy", "ranks"), [("FULL_SHARD", 3), ("NO_SHARD", 2)])
def test_units_hold_every_parameter_once(tied: bool, strategy: str, ranks: int, tmp_path: Path) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied}
    plan, _ = draft(
        write_recipe(tmp_path, model__config=config, fsdp__strategy=strategy),
        f"launch.nproc_per_node={ranks}", "train.global_batch_size=6", "fsdp.mixed_precision.param_dtype=bfloat16",
        "fsdp.activation_checkpointing={every: 2}",
    )  # fmt: skip
    model = skeleton(load_config(plan, None), plan.recipe.model)
    units = units_of(model, "auto")
    found = describe_model(plan, model, units)
    real = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert found["parameters"] == real.num_parameters()
    assert sum(unit["parameters"] * unit["count"] for unit in found["units"]) == real.num_parameters()
    assert sum(unit["gathered_bytes"] * unit["count"] for unit in found["units"]) == 2 * real.num_parameters()
    sharded = ranks if strategy == "FULL_SHARD" else 1
    rank_0 = sum(param.chunk(sharded)[0].nbytes for param in real.parameters())
    assert found["shard_bytes"] == sum(unit["shard_bytes"] * unit["count"] for unit in found["units"]) == rank_0
    names = [unit["unit"] for unit in found["units"]]
    assert names == (["model.layers.0-2", "root"] if tied else ["embedding", "model.layers.0-2", "head", "root"])
    kept = [unit["unit"] for unit in found["units"] if unit["stays_gathered"]]
    assert kept == ([name for name in names if name in ("head", "root")] if strategy == "FULL_SHARD" else names)
    tie = {"tied": True, "weights": ["lm_head.weight = model.embed_tokens.weight"], "unit": "root"}
    assert found["tied"] == (tie if tied else {"tied": False, "weights": [], "unit": None})
    assert (found["blocks"], found["recomputed_blocks"]) == (3, 2)


def test_units_of_different_sizes_are_not_grouped(tmp_path: Path) -> None:
    plan, _ = draft(write_recipe(tmp_path), "fsdp.wrap=[LlamaMLP]")
    model = skeleton(load_config(plan, None), plan.recipe.model)
    counts = {
        name: sum(p.numel() for p in params) for name, _, params in parameters_by_unit(model, units_of(model, "auto"))
    }
    assert counts["model.layers.0"] == sum(p.numel() for p in model.model.layers[0].parameters())
    found = describe_model(plan, model, units_of(model, ["LlamaMLP"]))
    assert [unit["unit"] for unit in found["units"]] == ["model.layers.0-2.mlp", "root"]
    assert {*found["dtypes"].values()} == {"float32", None}
    with pytest.raises(RecipeError, match="LlamaMLP is inside LlamaDecoderLayer"):
        units_of(model, ["LlamaDecoderLayer", "LlamaMLP"])


def test_an_id_on_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    model = {"id": "org/model", "init": "random"}
    found, _ = validate(write_recipe(tmp_path, model=model))
    assert len(found.problems) == 1 and found.exit_code == RecipeError.exit_code
    for word in ("org/model", "the Hub cannot be reached", "local folder", "model_type", "vocab_size", "model.config"):
        assert word in found.problems[0]
    assert "rows" not in found.levels["data"] and "model" not in found.levels
    found, _ = validate(write_recipe(tmp_path, model=model | {"config": LLAMA}, data__path="org/data"))
    assert found.levels["model"]["blocks"] == 3  # planned without the Hub
    assert [problem.split(":")[0] for problem in found.problems] == ["data.path", "model.id"]
    assert "local file" in found.problems[0]


def names_in(value: Any) -> set[str]:
    if isinstance(value, list):
        return {name for item in value for name in names_in(item)}
    return {n for k, v in value.items() for n in {k} | names_in(v)} if isinstance(value, dict) else set()


def test_the_command_prints_one_object_with_documented_names(tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    done = fsdptrain("validate", write_recipe(tmp_path), "--json", *ELSEWHERE[:4], f"--plot={picture}")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    of_costs = {"needed_bytes", "run_s", "gpu_hours", "price_per_gpu_hour", "dollars"}
    of_levels = {"plan", "machine", "data", "model", "notes", "problems", "plot", "verdict"}
    assert found.keys() == of_costs | of_levels | {field.name for field in fields(Forecast)}
    assert found["problems"] == [] and found["plot"] == str(picture)
    assert found["dollars"] == pytest.approx(found["gpu_hours"] * 2.5)
    assert found["gpu_hours"] == pytest.approx(4 * found["step_s"] * 8 / 3600)
    assert found["fits"] and found["peak_bytes"] == sum(found["breakdown"].values())
    assert picture.read_text().startswith("<?xml")
    # Their names are columns, categories and moments.
    found["data"]["needed"] = found["breakdown"] = found["peaks"] = {}
    documented = (ROOT / "docs" / "validate.md").read_text()
    assert [name for name in names_in(found) if f"`{name}`" not in documented] == []


def test_the_command_prints_one_object_even_for_a_bad_recipe(tmp_path: Path) -> None:
    done = fsdptrain("validate", write_recipe(tmp_path), "--json", "train.stepz=1", "seed=x")
    found = json.loads(done.stdout)
    assert done.returncode == 2 and found.keys() == {"notes", "problems"}
    assert len(found["problems"]) == 2 and "train.stepz" in " ".join(found["problems"])


def test_the_command_lists_problems_at_the_end_and_with_no_build_builds_no_model(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, data__path="nope.jsonl", train__global_batch_size=7)
    done = fsdptrain("validate", recipe, "--no-build")
    assert done.returncode == 2
    assert done.stdout.startswith("2 problems (listed at the end)\n")
    assert "This machine" in done.stdout and "LlamaForCausalLM" not in done.stdout
    first, *problems = done.stderr.splitlines()
    assert first == "fsdptrain: 2 problems" and len(problems) == 2
    assert "recipe.yaml:" in problems[0] and "nope.jsonl" in problems[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPUs of this machine")
def test_gpus_that_torch_does_not_see_are_a_problem_and_no_internal_error(tmp_path: Path) -> None:
    done = fsdptrain("validate", write_recipe(tmp_path, launch__nproc_per_node=1), CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2 and "internal error" not in done.stdout + done.stderr
    assert "sees 0 GPUs with CUDA_VISIBLE_DEVICES=0: this machine has no NVIDIA GPU; or train on" in done.stderr


WIDTHS = [60, 80, 120]
GIB = 2**30


# --- lines -----------------------------------------------------------------------------------------------------------


def test_a_number_and_its_unit_stay_together() -> None:
    page = page_of(16)
    page.say("it takes 10.5 GiB, or 3 s")
    assert printed(page) == ["it takes", "  10.5 GiB, or", "  3 s"]


@pytest.mark.parametrize("width", [None, *WIDTHS])
def test_overrides_can_be_pasted_into_a_shell_however_they_are_broken(width: int | None) -> None:
    words = ["fsdp.strategy=HYBRID_SHARD", "fsdp.activation_checkpointing={every: 2}", "a.b='$x'", "c=" + "y" * 130]
    words += [f"train.micro_batch_size={number}" for number in range(9)]
    page = page_of(width)
    page.command(words, 4)
    pasted = page.console.file.getvalue()  # type: ignore[attr-defined]
    parsed = subprocess.run(["sh", "-c", f"printf '%s\\0' {pasted}"], capture_output=True, text=True, check=True).stdout
    assert parsed.split("\0")[:-1] == words
    lines = pasted.splitlines()
    assert len(lines) == 1 if width is None else all(len(line) <= width or "yyy" in line for line in lines)


# --- the verdict -----------------------------------------------------------------------------------------------------

STEP = {
    "fits": True, "tight": False, "hardware": "h100-80gb", "needed_bytes": int(52.4 * GIB),
    "memory_bytes": int(79.1 * GIB), "step_s": 4.05, "run_s": 30555.0, "gpu_hours": 67.9, "dollars": 169.75,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "fits 8×H100-80GB: 52.4 of 79.1 GiB a GPU; 4.05 s a step; 67.9 GPU-hours; $169.75"),
        ({"tight": True, "dollars": None}, "fits 8×H100-80GB, but only just: 52.4 of 79.1 GiB a GPU; 4.05 s a step; "
         "67.9 GPU-hours"),
        ({"fits": False, "needed_bytes": 90 * GIB}, "does not fit 8×H100-80GB: 90.0 of 79.1 GiB a GPU"),
        ({"needed_bytes": GIB // 2, "step_s": None, "run_s": None, "dollars": None},
         "fits 8×H100-80GB: 512.0 MiB of 79.1 GiB a GPU"),
        ({"host_bytes": 131 * GIB, "run_s": None, "dollars": None},
         "fits 8×H100-80GB: 52.4 of 79.1 GiB a GPU, and 131.0 GiB of host memory each; 4.05 s a step"),
    ],
)  # fmt: skip
def test_the_verdict_is_one_line(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    step = {name: value for name, value in (STEP | changes).items() if value is not None}
    plan = draft_plan(load(write_recipe(tmp_path)), Topology("cuda", 1, 8), elsewhere=True)[0]
    assert verdict(step, varied(plan, {"fsdp.cpu_offload": "host_bytes" in changes})) == expected


def test_the_first_line_says_how_many_problems_there_are() -> None:
    found = Findings()
    assert found.verdict == "no problems found; memory and time were not forecast"
    found.forecast = "does not fit 8×H100-80GB: 90.0 of 79.1 GiB a GPU"
    found.add_problem(DoesNotFit(f"{found.forecast}; …"))
    assert found.verdict == found.forecast
    found.add_problem(RecipeError("a"))
    assert found.verdict.startswith("2 problems (listed at the end); memory forecast: does not fit")
    page = page_of(60)
    show_outcome(found.outcome(), page)
    assert printed(page)[0].startswith("2 problems (listed at the end)")


def test_a_request_survives_its_json(tmp_path: Path) -> None:
    asked = make_request(load(write_recipe(tmp_path, train__global_batch_size=64)), "8xA100", trust_remote_code=False)
    assert asked.notes == ["--hardware 8xA100: taken as a100-80gb, not a100-40gb"] and asked.hardware
    for price, plot, problems in ((None, None, []), (2.5, "step.svg", ["recipe.yaml:3: x", "y"])):
        changed = dataclasses.replace(asked, price=price, plot=plot, problems=problems, advise=True, build=False)
        assert Request.from_record(json.loads(json.dumps(changed.to_record()))) == changed
    here = dataclasses.replace(asked, hardware=None)
    assert Request.from_record(json.loads(json.dumps(here.to_record()))) == here


# --- the command -----------------------------------------------------------------------------------------------------

ELSEWHERE = ("--hardware", "8xh100", "--price-per-gpu-hour", "2.5", "train.steps=100000")
HEADINGS = [
    "Plan", "Data", "Model", "Disk", "Host memory of a node", "Peak memory (highest rank)", "Communication per step",
    "Time",
]  # fmt: skip


def test_on_a_terminal_lines_fit_and_progress_is_shown(tmp_path: Path) -> None:
    picture = tmp_path / "step.png"
    words = ("validate", write_recipe(tmp_path), *ELSEWHERE, f"--plot={picture}", "--advise")
    with Terminal(*words, columns=60, rows=40) as terminal:
        terminal.wait_for("simulating a step")
        assert "fits" not in terminal.text()
        assert terminal.wait() == 0, terminal.text()
        lines = terminal.lines()
        assert "comparing plans" in terminal.raw.decode()
    shown = [line for line in lines if line.strip()]
    assert shown[0].startswith("fits 8×H100-80GB: ") and "$" in " ".join(shown[:3])
    assert [line for line in shown if line in HEADINGS] == HEADINGS
    verdict = "".join(shown[: shown.index("Plan")])
    assert "".join(shown).endswith(verdict), "it comes again last, in sight"
    assert f"plotted over the step in {picture}".replace(" ", "") in "".join(lines).replace(" ", "")
    # The terminal breaks a line that is too long, without the indent of a wrapped line.
    start, headings = shown.index("Model"), [*HEADINGS, "Other plans for the same job", "Notes"]
    body = shown[start : -shown.index("Plan")]
    broken = [line for line in body if line not in headings and not line.startswith("  ")]
    assert [line for line in broken if not str(picture).endswith(line)] == []
    at = shown.index("  model.layers.0-2")
    assert " ".join(line.strip() for line in shown[at + 1 : at + 4]) == (
        "class LlamaDecoderLayer, × 3, parameters 30,848, a rank's shard 15.1 KiB, gathered 120.5 KiB, after use freed"
    ), "a row of a table that is too wide is a paragraph, and nothing of it is cut"


def test_in_a_pipe_lines_are_whole_and_progress_is_silent(tmp_path: Path) -> None:
    done = fsdptrain("validate", write_recipe(tmp_path), *ELSEWHERE, FORCE_COLOR="1", COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fits 8×H100-80GB: ") and "\x1b" not in done.stdout
    assert [line for line in lines if line in HEADINGS] == HEADINGS
    assert max(map(len, lines)) > 120
    assert "  model.layers.0-2  LlamaDecoderLayer      3      30,848        15.1 KiB  120.5 KiB  freed" in lines
    assert sum("not checked here" in line for line in lines) == 1 and "--verbose" in lines[-1]
    assert sum(line == lines[0] for line in lines) == 1


# --- the Hub ---------------------------------------------------------------------------------------------------------


def test_a_hub_that_answers_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = load(write_recipe(tmp_path, model={"id": "org/model", "tokenizer": "org/other"}))
    plan, stages = draft_plan(written, Topology("cpu", 1, 2), elsewhere=True)[0], list[str]()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # so that monkeypatch restores it
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 60)
        threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 200 OK\r\n\r\n"), daemon=True).start()
        hub.go_offline_if_unreachable(plan, lambda stage, *_: stages.append(stage))
    assert len(stages) == 1 and "org/model and org/other" in stages[0]
    assert not constants.HF_HUB_OFFLINE and "HF_HUB_OFFLINE" not in os.environ
