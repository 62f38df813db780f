"""The recipe: its schema against the design, and a reader that refuses everything that cannot be honoured."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from fsdptrain.config import rules
from fsdptrain.config.keys import KEYS, SECTIONS, accepts, flat, json_schema, key_of, value_at
from fsdptrain.config.names import (
    FOREIGN_NAMES,
    FOREIGN_VALUES,
    REPLACEMENTS,
    leading_key,
    replacement_message,
    replacement_of,
)
from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.config.reader import MAX_PROBLEMS, MAX_RECIPE_BYTES, LoadedRecipe, load
from fsdptrain.config.schema import Recipe
from fsdptrain.errors import Problem, RecipeError
from fsdptrain.forecast.changes import micro_batches
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.plan.versions import TESTED, untested_versions

DOCUMENT = ROOT / "docs" / "from-fsdp1.md"
SETTINGS = [path.removeprefix("optim.") for path in KEYS if "optim.name" in KEYS[path].needs]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

# The smallest valid recipe. Flow style keeps it on two lines, so what a test adds starts on line 3.
BASE = "model: {id: org/name}\ndata: {path: rows.jsonl}\n"

# The block in the design document: every key with its default, or with an example value (EXAMPLES).
DESIGN = """\
name: llama3-8b-sft
seed: 42
output_dir: runs/${name}

model:
  id: meta-llama/Llama-3.1-8B
  revision: null
  tokenizer: null
  add_tokens: []
  config: {}
  ignore_weights: []
  init: pretrained
  dtype: float32
  trainable: []
  attn_implementation: auto

adapter:
  {kind: lora, r: 16, alpha: 32, dropout: 0.0, target: all-linear, modules_to_save: [], use_dora: false,
   use_rslora: false, from: null}

data:
  path: data/train.jsonl
  revision: null
  format: text
  columns: {}
  seq_len: 2048
  packing: bfd
  train_on: completion
  separator: ""
  long_rows: null
  turns: all
  chat_template: null
  chat_template_kwargs: {}
  drop_duplicates: false
  max_rows: null
  sources: []
  window: null
  eval: null

fsdp:
  strategy: FULL_SHARD
  shard_size: null
  wrap: auto
  mixed_precision: {param_dtype: bfloat16, reduce_dtype: float32, buffer_dtype: null}
  backward_prefetch: BACKWARD_PRE
  forward_prefetch: 0
  accumulation: reduce
  bucket_cap_mb: null
  cpu_offload: false
  activation_checkpointing: none
parallel:
  context: 1

optim:    {name: adamw, lr: 2e-5, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, max_grad_norm: 1.0}
schedule: {name: cosine, warmup: 0.03, min_lr: 0.1}
train:
  {epochs: 1, steps: null, global_batch_size: 64, micro_batch_size: 1, objective: next_token,
   dpo: {beta: 0.1, label_smoothing: 0.0, sft_weight: 0.0}, loss: chunked, compile: auto,
   float8: null, deterministic: false, on_nonfinite: skip, max_skipped: 3}
eval:     {every: null, patience: null, best_of: null, prompts: [], max_new_tokens: 64}
checkpoint: {every: 500, path: null, keep: 2, keep_best: null, async: true, verify: read-back, resume: auto}
export:   {at_end: true, which: last, dtype: bfloat16, adapter: merged, merge_base: original, compare: true}
log:
  {every: 1, trackers: [tensorboard], tensorboard: null, project: null, forecast: true, profile: null}
launch:   {nproc_per_node: auto, nnodes: 1, rdzv_endpoint: null, max_restarts: 0, timeout_s: 300, grace_s: null}
"""
EXAMPLES = {"name", "output_dir", "model.id", "data.path", "train.on_nonfinite", "adapter.kind", "export.adapter"}


def read(tmp_path: Path, text: str, *overrides: str) -> LoadedRecipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path, list(overrides))


def refused(tmp_path: Path, text: str, *overrides: str) -> list[Problem]:
    """Return the problems for which a recipe is refused."""
    with pytest.raises(RecipeError) as error:
        read(tmp_path, text, *overrides)
    return error.value.problems


def with_key(path: str, value: str) -> str:
    """Return the smallest valid recipe in block style, with one more key (or with this one changed)."""
    section, _, rest = path.partition(".")
    if not rest:
        return BASE + f"{section}: {value}\n"
    head, _, tail = rest.partition(".")
    lines = {"model": {"id": "org/name"}, "data": {"path": "rows.jsonl"}}
    if section == "adapter":
        lines[section] = {"kind": "lora"}
    lines.setdefault(section, {})[head] = f"{{{tail}: {value}}}" if tail else value
    return "".join(f"{name}:\n" + "".join(f"  {k}: {v}\n" for k, v in keys.items()) for name, keys in lines.items())


def places(problems: list[Problem]) -> list[tuple[str | None, str | None]]:
    return [(p.where, p.field) for p in problems]


def test_flash_attention_takes_packed_documents_a_row_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    flash = "model.attn_implementation=flash_attention_2"
    [problem] = refused(tmp_path, BASE, flash, "train.micro_batch_size=2")
    assert problem.field == "model.attn_implementation" and "set train.micro_batch_size=1" in problem.message
    pairs = ["data.format=preference", "train.objective=dpo", "data.packing=none"]
    [problem] = refused(tmp_path, BASE, flash, "train.micro_batch_size=2", *pairs)
    assert "set train.micro_batch_size=1 or model" in problem.message, "data.packing=none would not be a way out"
    for allowed in (["train.micro_batch_size=1"], ["train.micro_batch_size=2", "data.packing=none"]):
        plan = make_plan(read(tmp_path, BASE, flash, *allowed), Topology("cuda", 1, 2))
        assert micro_batches(plan) == ([1] if plan.recipe.documents_share_sequences else [1, 2, 4, 8, 16, 32])


def test_an_empty_list_and_null_have_ways_out(tmp_path: Path) -> None:
    messages = [
        refused(tmp_path, BASE, "adapter.kind=lora", word)[0].message
        for word in ("adapter.target=[]", "adapter.modules_to_save=null")
    ]
    assert messages == [
        "[] is empty: name at least one, or use all-linear", "null is not a list of strings; use [] for none",
    ]  # fmt: skip


def test_a_text_that_ends_with_a_colon_is_proposed_in_quotes(tmp_path: Path) -> None:
    said = [
        refused(tmp_path, BASE, "data.eval={fraction: 0.1}", f"eval.prompts=[{word}]")[0].message
        for word in ("ROMEO:", "ROMEO: a")
    ]
    assert said[0] == "[{'ROMEO': None}] is not a list of strings; did you mean ['ROMEO:']?"
    assert said[1] == "[{'ROMEO': 'a'}] is not a list of strings"


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "transformers", "warned"),
    [
        ("2.11.0", "5.17.0", []),
        ("2.13.0+cu130", "5.23.1", []),
        ("2.15.1+cu132", "5.17.0", []),
        ("2.10.1", "5.17.0", ["torch 2.10.1"]),
        ("2.14.0", "5.17.0", ["torch 2.14.0"]),  # between two whose private functions were read
        ("2.16.0.dev20261101+cu132", "6.0.0rc1", ["torch 2.16.0.dev", "transformers 6.0.0rc1"]),
    ],
)
def test_untested_versions_are_named(torch: str, transformers: str, warned: list[str]) -> None:
    found = untested_versions({"torch": torch, "transformers": transformers})
    assert len(found) == len(warned) and all(a.startswith(b) for a, b in zip(found, warned, strict=True))


def test_the_tested_versions_are_those_that_are_installed() -> None:
    assert untested_versions() == []
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, (first, end) in TESTED.items():
        assert f"{name}>={first},<{end.removesuffix('.0')}" in wanted


# --- defaults --------------------------------------------------------------------------------------------------------


def test_the_schema_has_the_designs_keys_and_defaults(tmp_path: Path) -> None:
    # Keys of DPO, and `train_on: completion` with `format: text`, have no effect: those two are checked below.
    designed = read(tmp_path, DESIGN, "data.format=preference", "train.objective=dpo")
    others = {f"optim.{name}" for name in SETTINGS if name not in designed.recipe.optim.name.traits.settings}
    assert set(designed.where) == set(KEYS) - others
    values, defaults = flat(designed.recipe), flat(Recipe())
    for path in set(KEYS) - EXAMPLES - {"data.format", "train.objective"}:
        assert values[path] == defaults[path], path
    assert yaml.safe_load(DESIGN)["data"]["format"] == defaults["data.format"]
    assert yaml.safe_load(DESIGN)["train"]["objective"] == defaults["train.objective"]
    assert (defaults["model.id"], defaults["data.path"], defaults["output_dir"]) == (None, None, "runs/${name}")
    assert designed.recipe.output_dir == "runs/llama3-8b-sft"


def test_a_sparse_recipe_is_the_defaults(tmp_path: Path) -> None:
    sparse = read(tmp_path, BASE)
    assert sparse.recipe == dataclasses.replace(
        Recipe(),
        output_dir="runs/run",
        model=dataclasses.replace(Recipe().model, id="org/name"),
        data=dataclasses.replace(Recipe().data, path="rows.jsonl"),
    )
    assert sparse.where == {"model.id": "recipe.yaml:1", "data.path": "recipe.yaml:2"}
    assert (sparse.text, sparse.folder) == (BASE, tmp_path.resolve())


def test_defaults_are_not_shared_between_recipes() -> None:
    first = Recipe()
    first.model.config["vocab_size"] = 1
    first.optim.betas.append(0.5)
    assert Recipe().model.config == {} and Recipe().optim.betas == [0.9, 0.95]


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, BASE + "optim:\nfsdp: {}\n").recipe == read(tmp_path, BASE).recipe


def test_async_is_a_key(tmp_path: Path) -> None:
    written = read(tmp_path, BASE + "checkpoint: {async: false}\n")
    assert written.recipe.checkpoint.async_ is False
    assert "checkpoint.async" in written.where
    assert read(tmp_path, BASE, "checkpoint.async=false").recipe.checkpoint.async_ is False
    [problem] = refused(tmp_path, BASE + "checkpoint: {async_: false}\n")
    assert problem.field == "checkpoint.async_" and "`checkpoint.async`" in problem.message


# --- unknown keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "where", "field", "says"),
    [
        ("sead: 1\n", 3, "sead", "did you mean `seed`"),
        ("optimiser: {lr: 1}\n", 3, "optimiser", "did you mean `optimizer`? It is called optim here"),
        (
            "optim:\n  learning_rat: 1\n",
            4,
            "optim.learning_rat",
            "did you mean `learning_rate`? It is called optim.lr here",
        ),
        ("train:\n  max_step: 1\n", 4, "train.max_step", "did you mean `max_steps`? It is called train.steps here"),
        (
            "fsdp:\n  use_orig_param: true\n",
            4,
            "fsdp.use_orig_param",
            "did you mean `use_orig_params`? It is always on",
        ),
        ("optim:\n  weight_decai: 0.1\n", 4, "optim.weight_decai", "did you mean `optim.weight_decay`"),
        ("mixed_precision: bf16\n", 3, "mixed_precision", "did you mean `fsdp.mixed_precision`"),
        ("train:\n  lr: 1e-5\n", 4, "train.lr", "did you mean `optim.lr`"),
        (
            "fsdp:\n  mixed_precision:\n    param_dtyp: float32\n",
            5,
            "fsdp.mixed_precision.param_dtyp",
            "did you mean `fsdp.mixed_precision.param_dtype`",
        ),
        ("log:\n  qqqq: 1\n", 4, "log.qqqq", "here are: every, trackers, tensorboard"),
        ("qqqqqqqq: 1\n", 3, "qqqqqqqq", "here are: name, seed,"),
        ("5: 1\n", 3, "5", "unknown key"),
        ("optim.lr: 1e-5\n", 3, "optim.lr", "unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(
    tmp_path: Path, added: str, where: int, field: str, says: str
) -> None:
    [problem] = refused(tmp_path, BASE + added)
    assert (problem.where, problem.field) == (f"recipe.yaml:{where}", field)
    assert says in problem.message


@pytest.mark.parametrize("section", ["", "fsdp", "fsdp.mixed_precision", "train"])
def test_a_name_of_another_tool_gets_its_name_here(tmp_path: Path, section: str) -> None:
    names = list(REPLACEMENTS)
    head = "".join(f"{'  ' * i}{word}:\n" for i, word in enumerate(section.split(".") if section else []))
    for start in range(0, len(names), MAX_PROBLEMS):
        some = names[start : start + MAX_PROBLEMS]
        text = BASE + head + "".join(f"{'  ' * (bool(section) + section.count('.'))}{name}: true\n" for name in some)
        problems = refused(tmp_path, text)
        assert [p.message for p in problems] == [replacement_message(REPLACEMENTS[name]) for name in some]
        assert [p.field for p in problems] == [f"{section}.{name}".lstrip(".") for name in some]
        first = 3 + head.count("\n")
        assert [p.where for p in problems] == [f"recipe.yaml:{first + i}" for i in range(len(some))]


def test_a_document_that_a_message_names_is_installed_with_the_package(tmp_path: Path) -> None:
    [problem] = refused(tmp_path, BASE + "fsdp_config: {}\n")
    named = [Path(word) for word in problem.message.split() if word.endswith(".md")]
    assert named == [DOCUMENT] and DOCUMENT.is_file()
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"][str(DOCUMENT.relative_to(ROOT))] == f"fsdptrain/{DOCUMENT.relative_to(ROOT)}"


def test_every_foreign_name_leads_to_a_recipe_key_or_to_a_reason() -> None:
    known = {*KEYS, *(path.partition(".")[0] for path in KEYS)}
    for text in FOREIGN_NAMES:
        assert leading_key(text) in known or text.startswith(("not ", "always ", "derived ")), text
    assert len(REPLACEMENTS) == sum(len(names.split()) for names in FOREIGN_NAMES.values()), "a name occurs twice"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("neftune_noise_alpha", "noise"),
        ("cast_forward_inputs", "always off"),
        ("fsdp_use_orig_params", "always on"),
        ("ddp_broadcast_buffers", "DistributedDataParallel"),
        ("ddp_bucket_cap_mb", "fsdp.bucket_cap_mb: with fsdp.strategy: NO_SHARD"),
        ("gradient_as_bucket_view", "always on"),
        ("static_graph", "not needed"),
        ("liger_rope", "train.compile"),
        ("group_by_length", "by length"),
        ("mask_history", "data.turns"),
        ("save_only_model", "optimizer's state"),
    ],
)
def test_the_reason_of_a_foreign_name_is_its_own(name: str, says: str) -> None:
    assert says in (replacement_of(name) or "")


def test_the_tables_of_the_documents_are_made_from_the_code() -> None:
    ends = runpy.run_path(str(ROOT / "docs" / "tables.py"))["ENDS"]
    stale = [name for name, end in ends.items() if not (ROOT / "docs" / name).read_text().endswith("\n" + end())]
    assert stale == [], "run python docs/tables.py"
    tables = ends[DOCUMENT.name]()
    quoted = re.findall("`([^`]+)`", tables)
    assert [name for name in REPLACEMENTS if name not in quoted] == []
    assert [key for key in FOREIGN_VALUES if key not in quoted] == []


def test_the_switches_of_fsdp1_that_are_always_on_say_so(tmp_path: Path) -> None:
    switches = ("use_orig_params", "sync_module_states", "limit_all_gathers")
    text = BASE + "fsdp:\n" + "".join(f"  {name}: true\n" for name in switches)
    assert ["always on" in p.message for p in refused(tmp_path, text)] == [True] * 3


def test_a_foreign_name_is_never_a_recipe_key() -> None:
    assert not set(REPLACEMENTS) & {path.rpartition(".")[2] for path in KEYS}


# --- every problem, in order -----------------------------------------------------------------------------------------


def test_every_problem_is_reported_at_once_in_line_order(tmp_path: Path) -> None:
    text = """\
train: {steps: "5"}
optim:
  lr: -1
  betas: [0.9]
sead: 1
fsdp:
  strategy: FULL
  use_orig_params: true
model: 3
"""
    problems = refused(tmp_path, text, "log.every=0", "nonsense")
    assert places(problems) == [
        ("recipe.yaml:1", "train.steps"),
        ("recipe.yaml:3", "optim.lr"),
        ("recipe.yaml:4", "optim.betas"),
        ("recipe.yaml:5", "sead"),
        ("recipe.yaml:7", "fsdp.strategy"),
        ("recipe.yaml:8", "fsdp.use_orig_params"),
        ("recipe.yaml:9", "model"),
        ("command line", None),
        ("command line", "log.every"),
    ]


def test_the_message_has_a_line_for_each_problem_and_exit_code_2(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        read(tmp_path, BASE + "sead: 1\nlog: {every: 0}\n")
    assert error.value.exit_code == 2
    assert str(error.value).splitlines() == [
        "recipe.yaml:3: sead: unknown key; did you mean `seed`?",
        "recipe.yaml:4: log.every: 0 is too small: must be at least 1",
    ]


# --- types and limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.steps", '"5"'),
        ("train.steps", "010"),
        ("train.steps", "0x10"),
        ("train.steps", "12:30"),
        ("train.steps", "5.0"),
        ("train.steps", "true"),
        ("train.steps", "[5]"),
        ("train.steps", "{a: 5}"),
        ("train.global_batch_size", "null"),
        ("train.global_batch_size", ""),
        ("optim.lr", '"1e-5"'),
        ("optim.lr", "fast"),
        ("optim.lr", "null"),
        ("optim.lr", "true"),
        ("optim.betas", "0.9"),
        ("optim.betas", "null"),
        ("optim.betas", "[0.9, x]"),
        ("optim.betas", "[0.9, null]"),
        ("optim.betas", "[true, false]"),
        ("optim.betas", "{a: 1}"),
        ("train.compile", "yes"),
        ("train.compile", "no"),
        ("train.compile", "on"),
        ("train.compile", "1"),
        ("train.compile", '"true"'),
        ("train.compile", "null"),
        ("name", "null"),
        ("name", "true"),
        ("name", "[a]"),
        ("name", "???"),
        ("seed", "1.5"),
        ("fsdp.strategy", "1"),
        ("fsdp.strategy", "null"),
        ("fsdp.strategy", "full"),
        ("fsdp.mixed_precision.param_dtype", "float64"),
        ("fsdp.mixed_precision.param_dtype", "null"),
        ("data.packing", "false"),
        ("model.config", "[1]"),
        ("model.config", "llama"),
        ("model.config", "null"),
        ("model.config", "{1: 2}"),
        ("data.columns", "{text: [a, 1]}"),
        ("data.columns", "{text: []}"),
        ("data.columns", "{text: 17}"),
        ("data.columns", "{text: null}"),
        ("data.columns", "[text]"),
        ("model.tokenizer", "5"),
        ("model.tokenizer", "{train: many}"),
        ("model.tokenizer", "{train: 4096, on: data}"),
        ("model.tokenizer", "[a]"),
        ("data.eval", "0.1"),
        ("data.eval", "{}"),
        ("data.eval", "{max_rows: 5}"),
        ("data.eval", "{path: a, max_rows: null}"),
        ("data.eval", "{path: a, fraction: 0.1}"),
        ("data.eval", "{fraction: true}"),
        ("fsdp.wrap", "LlamaDecoderLayer"),
        ("fsdp.wrap", "[]"),
        ("fsdp.wrap", "[1]"),
        ("fsdp.wrap", "{min_num_params: 5}"),
        ("fsdp.activation_checkpointing", "true"),
        ("fsdp.activation_checkpointing", "{every: 2.5}"),
        ("fsdp.activation_checkpointing", "{offload: true}"),
        ("fsdp.activation_checkpointing", "{kind: all, offload: true}"),
        ("fsdp.activation_checkpointing", "{kind: full, offload: 1}"),
        ("launch.nproc_per_node", '"8"'),
        ("launch.nproc_per_node", "gpu"),
        ("launch.nproc_per_node", "true"),
    ],
)
def test_a_wrong_type_is_refused(tmp_path: Path, path: str, value: str) -> None:
    for problems in (refused(tmp_path, with_key(path, value)), refused(tmp_path, BASE, f"{path}={value}")):
        assert [p.field for p in problems] == [path]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", "-1"),
        ("seed", "2147483648"),
        ("name", '""'),
        ("name", '"  "'),
        ("output_dir", '""'),
        ("model.id", '""'),
        ("data.path", '" "'),
        ("data.seq_len", "7"),
        ("data.max_rows", "0"),
        ("data.eval", "{fraction: 0}"),
        ("data.eval", "{fraction: 1.0}"),
        ("data.eval", "{fraction: .nan}"),
        ("data.eval", "{path: held-out.jsonl, max_rows: 0}"),
        ("model.tokenizer", "{train: 256}"),
        ("fsdp.shard_size", "0"),
        ("fsdp.forward_prefetch", "-1"),
        ("fsdp.forward_prefetch", "17"),
        ("fsdp.wrap", "{min_params: 0}"),
        ("fsdp.activation_checkpointing", "{every: 0}"),
        ("optim.lr", "-1e-5"),
        ("optim.lr", ".inf"),
        ("optim.lr", ".nan"),
        ("optim.lr", "1e999"),
        ("optim.eps", "0"),
        ("optim.betas", "[]"),
        ("optim.betas", "[0.9]"),
        ("optim.betas", "[0.9, 1.0]"),
        ("optim.betas", "[-0.1, 0.9]"),
        ("optim.betas", "[.nan, 0.9]"),
        ("optim.betas", "[0.9, 0.95, 0.99]"),
        ("optim.momentum", "-0.1"),
        ("optim.momentum", "1"),
        ("optim.weight_decay", "-0.1"),
        ("optim.max_grad_norm", "0"),
        ("schedule.warmup", "-1"),
        ("schedule.min_lr", "1.01"),
        ("train.epochs", "0"),
        ("train.steps", "0"),
        ("train.steps", "99999999999999999999"),
        ("train.global_batch_size", "0"),
        ("train.micro_batch_size", "0"),
        ("eval.every", "0"),
        ("checkpoint.every", "0"),
        ("checkpoint.keep", "0"),
        ("log.every", "0"),
        ("launch.nproc_per_node", "0"),
        ("launch.nproc_per_node", "99999999999999999999"),
        ("launch.nnodes", "0"),
        ("launch.nnodes", "0:4"),
        ("launch.nnodes", "4:4"),
        ("launch.nnodes", "4:1"),
        ("launch.nnodes", "1-4"),
        ("launch.max_restarts", "-1"),
        ("launch.timeout_s", "0"),
    ],
)
def test_a_value_out_of_range_is_refused(tmp_path: Path, path: str, value: str) -> None:
    for problems in (refused(tmp_path, with_key(path, value)), refused(tmp_path, BASE, f"{path}={value}")):
        assert [p.field for p in problems] == [path]


def test_every_limit_of_the_schema_is_held(tmp_path: Path) -> None:
    """One step outside each limit is refused, the limit itself (where it belongs to the range) is not."""
    limits = {"at_least": -1, "above": 0, "at_most": 1}
    checked = 0
    for path, key in KEYS.items():
        spec = key.spec
        for limit, step in limits.items():
            if limit in spec.metadata:
                outside = spec.metadata[limit] + step
                assert [p.field for p in refused(tmp_path, with_key(path, str(outside)))] == [path]
                checked += 1
            if limit in spec.metadata and limit != "above":
                read(tmp_path, with_key(path, str(spec.metadata[limit])), *needed(path))
    assert checked > 20


def needed(path: str) -> list[str]:
    """Return overrides that give a key all that it needs to have an effect."""
    any_set = {
        "data.eval": "{fraction: 0.1}", "adapter.kind": "lora", "model.id": "org/name", "eval.prompts": "[text]",
    }  # fmt: skip
    needs = KEYS[path].needs
    own = [f"{other}={values[0] if values else any_set.get(other, '5')}" for other, values in needs.items()]
    own += ["data.format=preference"] * ("train.objective=dpo" in own)
    return [*own, *(word for other in needs for word in needed(other))]


@pytest.mark.parametrize("path", [path for path in KEYS if KEYS[path].needs])
def test_a_misspelt_key_that_another_needs_is_the_only_problem(tmp_path: Path, path: str) -> None:
    values = [value_at(Recipe(), path), True, 1, 2, 0.5, "dequantized", "cut", "x", ["x"]]
    value = next(value for value in values if value not in (None, "", [], 0) and accepts(path, value))
    for other in KEYS[path].needs:
        [problem] = refused(tmp_path, BASE, f"{path}={json.dumps(value)}", f"{other}x=1")
        assert problem.field == f"{other}x"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("optim.lr", "1e-5", 1e-5),
        ("optim.lr", "1", 1.0),
        ("optim.lr", ".5", 0.5),
        ("optim.lr", "1_000.5", 1000.5),
        ("schedule.warmup", "100", 100.0),
        ("train.steps", "1_000", 1000),
        ("train.steps", "~", None),
        ("train.compile", "True", True),
        ("optim.max_grad_norm", "null", None),
        ("optim.betas", "[0, 0.5]", [0.0, 0.5]),
        ("checkpoint.every", "null", None),
        ("name", "yes", "yes"),
        ("name", "010", "010"),
        ("name", "12:30:45", "12:30:45"),
        ("name", '"5"', "5"),
        ("name", "2024-01-01", "2024-01-01"),
        ("model.tokenizer", "{train: 257}", {"train": 257}),
        ("model.tokenizer", "org/name", "org/name"),
        ("model.config", "{a: {b: [1, 2.5, x, null]}}", {"a": {"b": [1, 2.5, "x", None]}}),
        ("data.columns", "{text: content}", {"text": "content"}),
        ("data.columns", "{text: [title, body]}", {"text": ["title", "body"]}),
        ("data.eval", "{path: held-out.jsonl}", {"path": "held-out.jsonl"}),
        ("data.eval", "{path: held-out.jsonl, max_rows: 10}", {"path": "held-out.jsonl", "max_rows": 10}),
        ("data.eval", "{fraction: 0.01}", {"fraction": 0.01}),
        ("fsdp.wrap", "[LlamaDecoderLayer, LlamaMLP]", ["LlamaDecoderLayer", "LlamaMLP"]),
        ("fsdp.wrap", "{min_params: 100_000_000}", {"min_params": 100_000_000}),
        ("fsdp.activation_checkpointing", "{every: 2}", {"every": 2}),
        ("fsdp.activation_checkpointing", "{kind: full, offload: true}", {"kind": "full", "offload": True}),
        ("launch.nproc_per_node", "8", 8),
    ],
)
def test_a_value_is_read_as_what_it_looks_like(tmp_path: Path, path: str, value: str, expected: Any) -> None:
    for written in (read(tmp_path, with_key(path, value)), read(tmp_path, BASE, f"{path}={value}")):
        found = flat(written.recipe)[path]
        assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("fsdp.strategy", "full_shard", "FULL_SHARD"),
        ("fsdp.strategy", "hybrid-shard", "HYBRID_SHARD"),
        ("fsdp.strategy", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2"),
        ("fsdp.backward_prefetch", "backward_post", "BACKWARD_POST"),
        ("fsdp.mixed_precision.param_dtype", "bf16", "bfloat16"),
        ("fsdp.mixed_precision.reduce_dtype", "torch.float32", "float32"),
        ("fsdp.mixed_precision.buffer_dtype", "fp32", "float32"),
        ("fsdp.activation_checkpointing", "Full", "full"),
        ("fsdp.wrap", "AUTO", "auto"),
        ("model.dtype", "BF16", "bfloat16"),
        ("export.dtype", "fp16", "float16"),
        ("optim.name", "AdamW", "adamw"),
    ],
)
def test_a_word_in_another_spelling_is_accepted(tmp_path: Path, path: str, value: str, expected: str) -> None:
    for written in (read(tmp_path, with_key(path, value)), read(tmp_path, BASE, f"{path}={value}")):
        assert flat(written.recipe)[path] == expected


def test_free_text_keeps_its_spelling(tmp_path: Path) -> None:
    recipe = read(tmp_path, "name: BF16\nmodel: {id: fp32, config: {dtype: bf16}}\ndata: {path: Auto}\n").recipe
    assert (recipe.name, recipe.model.id, recipe.data.path) == ("BF16", "fp32", "Auto")
    assert recipe.model.config == {"dtype": "bf16"}


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("optim.lr", '"2e-5"', "2e-5, a number without quotes"),
        ("train.steps", '"5"', "5, a number without quotes"),
        ("data.seq_len", '"4,096"', "4096, a number without quotes"),
        ("data.seq_len", "4096.0", "4096"),
        ("launch.nproc_per_node", '"8"', "8, a number without quotes"),
        ("train.compile", "yes", "true"),
        ("train.compile", '"off"', "false"),
        ("train.compile", "1", "true"),
        ("data.packing", "true", "bfd"),
        ("data.packing", "false", "none"),
        ("fsdp.activation_checkpointing", "true", "full"),
        ("fsdp.activation_checkpointing", "2", "{every: 2}"),
        ("fsdp.backward_prefetch", "null", "NONE"),
        ("fsdp.strategy", "FULL_SHRAD", "FULL_SHARD"),
        ("fsdp.strategy", "zero2", "SHARD_GRAD_OP"),
        ("fsdp.strategy", "ZeRO-1", "SHARD_GRAD_OP, with fsdp.accumulation: hold"),
        ("fsdp.mixed_precision.param_dtype", "mixed", "bfloat16"),
        ("fsdp.wrap", "LlamaDecoderLayer", "[LlamaDecoderLayer]"),
        ("fsdp.wrap", "100000000", "{min_params: 100000000}"),
        ("model.tokenizer", "4096", "{train: 4096}"),
        ("data.eval", "0.1", "{fraction: 0.1}"),
        ("data.eval", "held-out.jsonl", "{path: held-out.jsonl}"),
        ("schedule.name", "cosine_with_warmup", "cosine"),
    ],
)
def test_a_wrong_value_gets_the_likely_one(tmp_path: Path, path: str, value: str, hint: str) -> None:
    for problems in (refused(tmp_path, with_key(path, value)), refused(tmp_path, BASE, f"{path}={value}")):
        assert [p.field for p in problems] == [path]
        assert problems[0].message.endswith(f"; did you mean {hint}?")


def test_an_optimizer_has_its_own_defaults_and_refuses_the_keys_that_it_does_not_read(tmp_path: Path) -> None:
    for kind in OptimizerKind:
        optim = read(tmp_path, BASE, f"optim.name={kind}").recipe.optim
        assert {key: getattr(optim, key) for key in kind.traits.settings} == kind.traits.settings
        for name in SETTINGS:
            value = {"betas": "[0.8,0.9]"}.get(name, "0.5")
            if name in kind.traits.settings:
                written = read(tmp_path, BASE, f"optim.name={kind}", f"optim.{name}={value}").recipe.optim
                assert str(getattr(written, name)).replace(" ", "").lower() == value
            else:
                problems = refused(tmp_path, BASE, f"optim.name={kind}", f"optim.{name}={value}")
                assert [p.field for p in problems] == [f"optim.{name}"]
                assert f"has no effect with optim.name: {kind}, only with " in problems[0].message
    assert read(tmp_path, BASE, "optim.name=lion").recipe.optim.betas == [0.9, 0.99]
    assert Recipe().optim.betas == [0.9, 0.95]


def test_moments_in_bfloat16_are_refused_where_their_decay_would_be_rounded_away(tmp_path: Path) -> None:
    kind = "optim.name=adamw_bf16"
    [problem] = refused(tmp_path, BASE, kind, "optim.betas=[0.9,0.999]")
    assert problem.field == "optim.betas" and "0.999 is above 0.995" in problem.message
    assert "use optim.name: adamw" in problem.message
    assert read(tmp_path, BASE, kind, "optim.betas=[0.9,0.995]").recipe.optim.betas == [0.9, 0.995]
    assert read(tmp_path, BASE, "optim.betas=[0.9,0.999]").recipe.optim.name == "adamw"


def test_what_needs_a_missing_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for kind in ("adamw_8bit", "lion"):
        problems = refused(tmp_path, BASE, f"optim.name={kind}")
        assert [p.field for p in problems] == ["optim.name"]
        assert problems[0].message.endswith("not installed: pip install 'fsdptrain[bitsandbytes]'")
    assert read(tmp_path, BASE, "optim.name=muon").recipe.optim.momentum == 0.95
    for kind, libraries in {"lora": ["peft"], "qlora": ["peft", "bitsandbytes"]}.items():
        assert [(p.field, p.message) for p in refused(tmp_path, BASE, f"adapter.kind={kind}")] == [
            ("adapter.kind", f"{kind} needs {library}, which is not installed: pip install 'fsdptrain[{kind}]'")
            for library in libraries
        ]
    assert [p.message for p in refused(tmp_path, BASE, "log.trackers=[mlflow, tensorboard]")] == [
        "mlflow is not installed: pip install 'fsdptrain[mlflow]'"
    ]


def test_every_suggested_value_is_one_that_is_taken() -> None:
    for path, meanings in FOREIGN_VALUES.items():
        node = json_schema()
        for word in path.split("."):
            node = node["properties"][word]
        for written, meant in meanings.items():
            assert violations(node, meant) == [] != violations(node, written), (path, written)


def test_a_section_set_to_a_value_gets_its_first_key(tmp_path: Path) -> None:
    text = "model: org/name\ndata: rows.jsonl\nfsdp: hybrid_shard\neval: 100\noptim: [adamw]\n"
    hints = [p.message.partition("; did you mean ")[2] for p in refused(tmp_path, text)]
    assert hints == ["{id: org/name}?", "{path: rows.jsonl}?", "{strategy: HYBRID_SHARD}?", "{every: 100}?", ""]


def way_out(node: dict[str, Any]) -> list[str]:
    """Return what a message must name of the values that a JSON Schema accepts."""
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a string",
             "array": "a list", "object": "a mapping", "null": "null"}  # fmt: skip
    if "anyOf" in node:
        return [word for option in node["anyOf"] for word in way_out(option)]
    if "enum" in node or "const" in node:
        return [str(word) if word is not None else "null" for word in node.get("enum", [node.get("const")])]
    return list(node["properties"]) if "properties" in node else [words[node["type"]]]


@pytest.mark.parametrize("path", KEYS)
def test_a_wrong_value_of_any_key_is_one_problem_with_field_value_and_way_out(tmp_path: Path, path: str) -> None:
    node = json_schema()
    for word in path.split("."):
        node = node["properties"][word]
    for value, shown in (("[[17]]", "[[17]]"), ("{nonsense: 17}", "nonsense"), ("nonsense", "'nonsense'")):
        if violations(node, yaml.safe_load(value)) == []:
            continue
        for problems in (refused(tmp_path, with_key(path, value)), refused(tmp_path, BASE, f"{path}={value}")):
            assert len(problems) == 1, problems
            assert problems[0].field == path and shown in problems[0].message
            named = ["a string", "a list"] if path == "data.columns" and value.startswith("{") else way_out(node)
            assert all(word in problems[0].message for word in named), problems[0].message


AXOLOTL = """\
base_model: org/name
model_type: LlamaForCausalLM
load_in_8bit: true
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
adapter: lora
lora_r: 32
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
learning_rate: 0.0002
bf16: auto
flash_attention: true
fsdp:
  - full_shard
unheard_of: 1
another: 2
"""


def test_a_file_of_another_tool_is_reported_key_by_key_with_the_sections_once(tmp_path: Path) -> None:
    problems = refused(tmp_path, AXOLOTL, "third=1")
    top = [line.partition(":")[0] for line in AXOLOTL.splitlines() if not line.startswith(" ")]
    assert [p.field for p in problems] == [
        *top,
        "third",
    ]  # and no key is missing that has a foreign name there
    assert sum("launch" in p.message for p in problems) == 1, "the sections are listed once"


def allows_null(path: str) -> bool:
    node = json_schema()
    for word in path.split("."):
        node = node["properties"][word]
    return violations(node, None) == []


@pytest.mark.parametrize("path", KEYS)
def test_null_is_read_exactly_where_the_schema_allows_it(tmp_path: Path, path: str) -> None:
    if path in ("model.id", "data.path", "train.epochs"):
        assert allows_null(path)
        assert path in [p.field for p in refused(tmp_path, BASE, f"{path}=null")]  # by a cross-field check
    elif allows_null(path):
        assert flat(read(tmp_path, with_key(path, "null")).recipe)[path] is None
    else:
        assert [p.field for p in refused(tmp_path, with_key(path, "null"))] == [path]


# --- combinations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "field", "says"),
    [
        (["model.id=null", "model.tokenizer=t"], "model.id", "whole model.config with `model_type`"),
        (["model.id=null", "model.tokenizer=t", "model.config={hidden_size: 64}"], "model.id", "`model_type`"),
        (["model.id=null", "model.config.model_type=llama"], "model.tokenizer", "for a model from scratch give"),
        (
            ["model.id=null", "model.tokenizer=t", "model.config.model_type=llama", "model.init=pretrained"],
            "model.init",
            "init: random",
        ),
        (
            ["model.id=null", "model.tokenizer=t", "model.config.model_type=llama", "model.revision=main"],
            "model.revision",
            "no effect",
        ),
        (["model.id=.", "model.revision=main"], "model.revision", "local folder"),
        (["data.path=null"], "data.path", "is not set"),
        (["data.columns={prompt: question}"], "data.columns", "not a field of format text; its fields: text"),
        (
            ["data.format=prompt_completion", "data.columns={text: question}"],
            "data.columns",
            "not a field of format prompt_completion; its fields: prompt, completion",
        ),
        (
            ["data.format=chat", "data.columns.prompt=x"],
            None,
            "not a field of format chat; its fields: messages, tools",
        ),
        (["data.train_on=completion"], "data.train_on", "only with prompt_completion or chat"),
        (["data.separator=x"], "data.separator", "data.format: text, only with prompt_completion"),
        (["data.format=chat", "data.separator=x"], "data.separator", "data.format: chat, only with prompt_completion"),
        (["fsdp.shard_size=8"], "fsdp.shard_size", "FULL_SHARD, only with HYBRID_SHARD or HYBRID_SHARD_ZERO2"),
        (
            ["fsdp.shard_size=8", "fsdp.strategy=SHARD_GRAD_OP"],
            "fsdp.shard_size",
            "SHARD_GRAD_OP, only with HYBRID_SHARD or",
        ),
        (["fsdp.shard_size=8", "fsdp.strategy=NO_SHARD"], "fsdp.shard_size", "NO_SHARD, only with HYBRID_SHARD or"),
        (["model.init=random", "model.ignore_weights=[mtp]"], "model.ignore_weights", "random, only with pretrained"),
        (["fsdp.bucket_cap_mb=25"], "fsdp.bucket_cap_mb", "FULL_SHARD, only with NO_SHARD"),
        (["fsdp.accumulation=hold_shards"], "fsdp.accumulation", "no effect with FULL_SHARD without fsdp.cpu_offload"),
        (
            ["fsdp.strategy=NO_SHARD", "fsdp.forward_prefetch=1"],
            "fsdp.forward_prefetch",
            "NO_SHARD, only with FULL_SHARD or",
        ),
        (
            ["fsdp.strategy=NO_SHARD", "fsdp.backward_prefetch=BACKWARD_PRE"],
            "fsdp.backward_prefetch",
            "only with FULL_SHARD or HYBRID_SHARD",
        ),
        (
            ["fsdp.strategy=SHARD_GRAD_OP", "fsdp.backward_prefetch=BACKWARD_POST"],
            "fsdp.backward_prefetch",
            "only with FULL_SHARD or HYBRID_SHARD",
        ),
        (
            ["fsdp.strategy=HYBRID_SHARD_ZERO2", "fsdp.backward_prefetch=BACKWARD_PRE"],
            "fsdp.backward_prefetch",
            "only with FULL_SHARD or HYBRID_SHARD",
        ),
        (
            ["fsdp.activation_checkpointing={kind: none, offload: true}"],
            "fsdp.activation_checkpointing",
            "offload has no effect with kind: none",
        ),
        (
            ["fsdp.activation_checkpointing={kind: none, keep_attention: true}"],
            "fsdp.activation_checkpointing",
            "keep_attention has no effect with kind: none",
        ),
        (
            ["fsdp.activation_checkpointing={kind: selective, keep_attention: true}"],
            "fsdp.activation_checkpointing",
            "keep_attention has no effect with kind: selective, which keeps attention anyway",
        ),
        (
            ["fsdp.activation_checkpointing={kind: selective, offload: true}"],
            "fsdp.activation_checkpointing",
            "offload is not possible with kind: selective",
        ),
        (
            ["fsdp.activation_checkpointing={kind: full, keep_attention: true}", "model.attn_implementation=eager"],
            "fsdp.activation_checkpointing",
            "keep_attention is not possible with eager attention: use auto or sdpa",
        ),
        (
            ["fsdp.mixed_precision.param_dtype=fp16", "model.dtype=bfloat16"],
            "fsdp.mixed_precision.param_dtype",
            "float16 needs model.dtype: float32",
        ),
        (["train.max_skipped=2"], "train.max_skipped", "train.on_nonfinite: stop, only with skip"),
        (
            ["train.float8=rowwise", "adapter.kind=lora"],
            "train.float8",
            "rowwise trains all weights, and adapter.kind: lora freezes some: remove one of the two",
        ),
        (["train.float8=tensorwise", "adapter.kind=qlora"], "train.float8", "adapter.kind: qlora freezes some"),
        (["train.float8=rowwise", "model.trainable=[lm_head]"], "train.float8", "model.trainable freezes some"),
        (
            ["train.float8=rowwise", "fsdp.mixed_precision.param_dtype=float32"],
            "train.float8",
            "needs fsdp.mixed_precision.param_dtype: bfloat16",
        ),
        (
            ["train.float8=rowwise", "data.seq_len=24", "train.micro_batch_size=3"],
            "train.float8",
            "a multiple of 16 tokens, and these have 72: change data.seq_len",
        ),
        (["train.float8=rowwise", "fsdp.wrap=[Linear]"], "train.float8", "name decoder layers"),
        (["train.steps=10", "train.epochs=2"], "train.epochs", "no effect if train.steps is set"),
        (["train.epochs=null"], "train.epochs", "set one of the two"),
        (
            ["schedule.name=constant", "schedule.min_lr=0"],
            "schedule.min_lr",
            "schedule.name: constant, only with linear or cosine or wsd",
        ),
        (["eval.every=10"], "eval.every", "set data.eval"),
        (["checkpoint.every=null", "checkpoint.async=true"], "checkpoint.async", "no effect without checkpoint.every"),
        (
            ["log.profile={steps: [9, 12]}", "train.steps=10"],
            "log.profile",
            "[9, 12], but the last step of the run is 10",
        ),
        (
            ["log.profile={steps: [12]}"],
            "log.profile",
            "[12] is not a range of steps, which count from 1: give the first",
        ),
        (["log.profile={steps: [3, 2]}"], "log.profile", "[3, 2] is not a range of steps"),
        (["log.profile={steps: [0, 2]}"], "log.profile", "[0, 2] is not a range of steps"),
        (["log.profile={steps: [true, 2]}"], "log.profile", "is not null or {steps: …}"),
        (["log.profile={steps: [1, 51]}"], "log.profile", "[1, 51] are more than 50 steps"),
        (["launch.rdzv_endpoint=node:29500"], "launch.rdzv_endpoint", "no effect with launch.nnodes: 1"),
    ],
)
def test_a_combination_that_cannot_be_honoured_is_refused(
    tmp_path: Path, keys: list[str], field: str | None, says: str
) -> None:
    problems = refused(tmp_path, BASE, *keys)
    assert len(problems) == 1 and says in problems[0].message
    assert problems[0].field == field or field is None


@pytest.mark.parametrize(("found", "says"), [(None, "which is not installed"), ("0.17.0", "0.18 or newer, and 0.17.0")])
def test_float8_needs_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, says: str) -> None:
    def version(library: str) -> str:
        if found is None:
            raise PackageNotFoundError(library)
        return found

    monkeypatch.setattr(rules, "version", version)
    [problem] = refused(tmp_path, BASE, "train.float8=rowwise")
    assert problem.field == "train.float8" and says in problem.message and "fsdptrain[float8]" in problem.message


@pytest.mark.parametrize(
    "keys",
    [
        ["model.id=null", "model.tokenizer={train: 4096}", "model.config.model_type=llama"],
        ["model.id=null", "model.tokenizer=t", "model.config.model_type=llama", "model.init=random"],
        ["model.revision=main"],
        ["data.train_on=all"],
        ["data.format=chat", "data.train_on=completion"],
        ["data.format=chat", "data.columns={messages: talk, tools: functions}"],
        ["data.format=prompt_completion", "data.columns={prompt: q, completion: a}"],
        ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=8", "fsdp.backward_prefetch=BACKWARD_POST"],
        ["fsdp.strategy=HYBRID_SHARD_ZERO2", "fsdp.shard_size=8"],
        ["fsdp.strategy=NO_SHARD", "fsdp.backward_prefetch=NONE", "fsdp.forward_prefetch=0"],
        ["fsdp.strategy=SHARD_GRAD_OP", "fsdp.forward_prefetch=2"],
        ["train.steps=10"],
        ["train.epochs=0.5", "train.steps=null"],
        ["train.epochs=null", "train.steps=10"],
        ["schedule.name=constant"],
        ["eval.every=10", "data.eval={fraction: 0.1}"],
        ["checkpoint.every=null"],
        ["checkpoint.every=null", "checkpoint.async=false"],
        ["launch.nnodes=2", "launch.rdzv_endpoint=node:29500"],
        ["launch.nnodes=2"],
    ],
)
def test_a_combination_that_can_be_honoured_is_not(tmp_path: Path, keys: list[str]) -> None:
    assert read(tmp_path, BASE, *keys).where.keys() >= {key.partition("=")[0] for key in keys}


def test_a_key_without_effect_is_named_with_its_line(tmp_path: Path) -> None:
    problems = refused(tmp_path, BASE + "schedule:\n  name: constant\n  min_lr: 0.1\nfsdp:\n  shard_size: 8\n")
    assert places(problems) == [("recipe.yaml:5", "schedule.min_lr"), ("recipe.yaml:7", "fsdp.shard_size")]


# --- overrides -------------------------------------------------------------------------------------------------------


def test_an_override_wins_over_the_file_and_the_last_over_the_first(tmp_path: Path) -> None:
    written = read(tmp_path, BASE + "optim: {lr: 1e-3}\n", "optim.lr=1e-4", "optim.lr=1e-5")
    assert written.recipe.optim.lr == 1e-5
    assert written.where["optim.lr"] == "command line"


@pytest.mark.parametrize(("given", "other", "value"), [("epochs", "steps", 5), ("steps", "epochs", 2)])
def test_an_override_replaces_the_alternative_that_the_file_sets(
    tmp_path: Path, given: str, other: str, value: int
) -> None:
    text = BASE + f"train: {{{given}: 3}}\n"
    written = read(tmp_path, text, f"train.{other}={value}")
    assert getattr(written.recipe.train, other) == value and f"train.{given}" not in written.where
    assert flat(written.recipe)[f"train.{given}"] == flat(Recipe())[f"train.{given}"]
    assert refused(tmp_path, BASE + f"train: {{{given}: 3, {other}: {value}}}\n")[0].field == "train.epochs"


def test_an_override_reverses_a_switch_of_the_file(tmp_path: Path) -> None:
    written = read(tmp_path, with_key("fsdp.cpu_offload", "true"), "fsdp.cpu_offload=false")
    assert written.recipe.fsdp.cpu_offload is False


def test_an_override_reaches_below_the_open_mappings(tmp_path: Path) -> None:
    text = with_key("model.config", "{hidden_size: 64, rope_parameters: {factor: 8.0}}")
    recipe = read(tmp_path, text, "model.config.hidden_size=32", "model.config.rope_parameters.factor=2.0").recipe
    assert recipe.model.config == {"hidden_size": 32, "rope_parameters": {"factor": 2.0}}
    assert read(tmp_path, BASE, "data.columns.text=content").recipe.data.columns == {"text": "content"}


def test_an_override_may_hold_an_equals_sign_and_null(tmp_path: Path) -> None:
    recipe = read(tmp_path, BASE + "train: {steps: 5}\n", "data.path=a=b.jsonl", "train.steps=null").recipe
    assert (recipe.data.path, recipe.train.steps) == ("a=b.jsonl", None)


def test_an_override_can_complete_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, "data: {path: rows.jsonl}\n", "model.id=org/name").recipe.model.id == "org/name"


@pytest.mark.parametrize(
    ("word", "field", "says"),
    [
        ("--fresh", None, "write key=value"),
        ("optim.lr", None, "write key=value"),
        ("=5", None, "write key=value"),
        ("", None, "write key=value"),
        ("optim.lrr=5", "optim.lrr", "did you mean `optim.lr`"),
        ("lr=5", "lr", "did you mean `optim.lr`"),
        ("optim.lr.x=5", "optim.lr.x", "has no keys below it"),
        ("fsdp.sharding_strategy=FULL_SHARD", "fsdp.sharding_strategy", "is called fsdp.strategy here"),
        ("checkpoint.async_=false", "checkpoint.async_", "`checkpoint.async`"),
        ("model.id=!!python/name:os.system", "model.id", "cannot name Python objects"),
        ("model.id=&a b", "model.id", "anchors and aliases"),
        ("model.id=${oc.env:HOME}", "model.id", "resolvers are refused"),
        ("optim.lr=[", "optim.lr", "is not a number"),
    ],
)
def test_a_bad_override_is_refused(tmp_path: Path, word: str, field: str | None, says: str) -> None:
    [problem] = refused(tmp_path, BASE, word)
    assert (problem.where, problem.field) == ("command line", field)
    assert says in problem.message


# --- references ------------------------------------------------------------------------------------------------------


def test_plain_references_are_resolved(tmp_path: Path) -> None:
    text = "name: a\nseed: 7\noutput_dir: out/${name}-${seed}-${model.id}\n" + BASE + "eval: {every: '${log.every}'}\n"
    recipe = read(tmp_path, text, "name=b", "data.eval={fraction: 0.1}").recipe
    assert (recipe.output_dir, recipe.eval.every) == ("out/b-7-org/name", 1)


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:HOME}",
        "${oc.env:HOME,x}",
        "${oc.decode:5}",
        "${oc.coerce:5,os.system}",
        "${oc.create:{}}",
        "${oc.select:name}",
        "${env:HOME}",
        "x-${oc.env:HOME}-${name}",
        "${name",
        "${}",
        "${.name}",
        "${..name}",
        "${name}${",
        "${${name}}",
        "${model[id]}",
        "${a:${name}}",
    ],
)
@pytest.mark.parametrize("key", ["data.path", "model.config", "data.columns"])
def test_a_resolver_is_refused_wherever_it_is(tmp_path: Path, value: str, key: str) -> None:
    quoted = f'"{value}"'
    inside = {"data.path": quoted, "model.config": f"{{a: [1, {{b: {quoted}}}]}}", "data.columns": f"{{{quoted}: x}}"}
    for problems in (
        refused(tmp_path, with_key(key, inside[key])),
        refused(tmp_path, BASE, f"{key}={inside[key]}"),
    ):
        assert [p.field for p in problems] == [key]
        assert "resolvers are refused" in problems[0].message


@pytest.mark.parametrize("value", ["${name}", "${output_dir}", "${nope}", "${model}", "${model.nope}", "${data.eval}"])
def test_a_reference_to_nothing_or_to_itself_is_refused(tmp_path: Path, value: str) -> None:
    assert {p.field for p in refused(tmp_path, BASE + f'name: "{value}"\n')} == {"name"}


# --- YAML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("- model\n", "recipe.yaml:1", "a recipe must be a mapping"),
        ("hello\n", "recipe.yaml:1", "a recipe must be a mapping"),
        ("---\n", "recipe.yaml:1", "a recipe must be a mapping"),
        ("null\n", "recipe.yaml:1", "a recipe must be a mapping"),
        ("name: a\nname: b\n", "recipe.yaml:2", "set twice (first on line 1)"),
        ("optim: {lr: 1}\nseed: 1\noptim: {eps: 1}\n", "recipe.yaml:3", "set twice (first on line 1)"),
        ("optim:\n  lr: 1\n  lr: 2\n", "recipe.yaml:3", "set twice (first on line 2)"),
        ("a: 1\n---\nb: 2\n", "recipe.yaml:2", "another document"),
        ("model:\n\tid: x\n", "recipe.yaml:2", "indent with spaces"),
        ("seed: 1\nname:x\ndata: 2\n", "recipe.yaml:3", "a colon and a space"),
        ("model:\n  id: x\n   dtype: y\n", "recipe.yaml:3", "check the indentation"),
        ("name: @x\n", "recipe.yaml:1", "put quotes around the value"),
        ('name: "C:\\x"\n', "recipe.yaml:1", "use single quotes"),
        ("model: {id: x\n", "recipe.yaml:2", "is not valid YAML"),
        ("model: [\n", "recipe.yaml:2", "is not valid YAML"),
        ('name: "a\n', "recipe.yaml:2", "is not valid YAML"),
        ("seed: 1\nname: &a x\n", "recipe.yaml:2", "anchors and aliases"),
        ("seed: 1\nname: *a\n", "recipe.yaml:2", "anchors and aliases"),
        ("a: &a [x]\nb: [*a, *a]\n", "recipe.yaml:1", "anchors and aliases"),
        ("name: !!python/object/apply:os.system [id]\n", "recipe.yaml:1", "cannot name Python objects"),
        ("name: !!python/name:os.system\n", "recipe.yaml:1", "cannot name Python objects"),
        ("name: !custom x\n", "recipe.yaml:1", "cannot name Python objects"),
        ("name: !!binary aGk=\n", "recipe.yaml:1", "cannot name Python objects"),
        ("seed: !!int 5\n", "recipe.yaml:1", "cannot name Python objects"),
        ("? [a]\n: b\n", "recipe.yaml:1", "a key must be a plain word"),
        ("? {a: b}\n: c\n", "recipe.yaml:1", "a key must be a plain word"),
        ("seed: 1\nmodel: org/name\n", "recipe.yaml:2", "is a section with the keys id, revision"),
        ("seed: 1\nfsdp: [FULL_SHARD]\n", "recipe.yaml:2", "is a section with the keys strategy"),
        ("fsdp:\n  mixed_precision: bf16\n", "recipe.yaml:2", "is a section with the keys param_dtype"),
    ],
)
def test_yaml_that_is_not_a_recipe_is_refused_with_its_line(tmp_path: Path, text: str, where: str, says: str) -> None:
    assert any(p.where == where and says in p.message for p in refused(tmp_path, text))


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_an_empty_file_says_what_a_recipe_needs(tmp_path: Path, text: str) -> None:
    problems = refused(tmp_path, text)
    assert [p.field for p in problems] == ["model.id", "model.tokenizer", "data.path"]
    assert {p.where for p in problems} == {"recipe.yaml"}


def test_a_python_tag_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    tag = f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{target}']]"
    refused(tmp_path, BASE + f"name: {tag}\n", f"name={tag}")
    assert not target.exists()


@pytest.mark.parametrize("raw", [b"name: \xff\xfe\n", "name: a\n".encode("utf-16"), b"\x80"])
def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(raw)
    with pytest.raises(RecipeError, match="is not UTF-8 text"):
        load(path)


@pytest.mark.parametrize("raw", [b"name: a\0b\n", b"name: \x07\n"])
def test_a_file_with_control_characters_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(raw)
    with pytest.raises(RecipeError, match="is not valid YAML"):
        load(path)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load(path).recipe.model.id == "org/name"


def test_a_path_that_is_not_a_readable_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.yaml", tmp_path / ("x" * 300)):
        with pytest.raises(RecipeError, match="cannot be read"):
            load(path)


def test_an_overlong_file_is_refused(tmp_path: Path) -> None:
    [problem] = refused(tmp_path, BASE + "#" * MAX_RECIPE_BYTES)
    assert "a page of YAML" in problem.message


@pytest.mark.parametrize("opening", ["[", "{a: "])
def test_a_file_nested_too_deeply_is_refused(tmp_path: Path, opening: str) -> None:
    refused(tmp_path, "name: " + opening * 1_000)
    refused(tmp_path, BASE + "name: " + opening * 1_000 + {"[": "]", "{a: ": "}"}[opening] * 1_000)


def test_a_number_of_5000_digits_is_refused(tmp_path: Path) -> None:
    problems = refused(tmp_path, BASE + f"seed: 1{'0' * 5000}\n")
    assert {p.field for p in problems} == {"seed"}


# --- recipes that once were accepted wrongly or crashed the reader ---------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param("optim.lr", "1" + "0" * 400, id="OverflowError for a whole number too large for a float"),
        pytest.param("optim.betas", "['0.9', '0.95']", id="quoted numbers inside a list are converted"),
        pytest.param("model.tokenizer", "{train: 1" + "0" * 40 + "}", id="huge counts in small mappings pass"),
        pytest.param("model.tokenizer", "{train: 4096, train: 8192}", id="a key written twice inside a leaf passes"),
        pytest.param(
            "model.config", "{hidden_size: 64, hidden_size: 32}", id="a key written twice in model.config passes"
        ),
        pytest.param("data.columns", "{fraction: x}", id="TypeError for a column called fraction"),
        pytest.param("model.config", "{a: " * 100 + "1" + "}" * 100, id="RecursionError for mappings 100 deep"),
        pytest.param("model.config", "{a: " * 300 + "1" + "}" * 300, id="RecursionError for mappings 300 deep"),
        pytest.param("fsdp.wrap", "[" * 120 + "1" + "]" * 120, id="RecursionError for lists 120 deep"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_the_file_and_on_the_command_line(
    tmp_path: Path, path: str, value: str
) -> None:
    for problems in (refused(tmp_path, with_key(path, value)), refused(tmp_path, BASE, f"{path}={value}")):
        assert {p.field for p in problems} <= {path, None}


@pytest.mark.parametrize(
    "word",
    [
        pytest.param("model.config.=3", id="an override with an empty last word passes"),
        pytest.param("model.config..a=3", id="an override with an empty word passes"),
        pytest.param("model.config.a[0]=3", id="brackets of an override make keys"),
        pytest.param(
            "model.config.a=" + "[" * 2000 + "1" + "]" * 2000, id="an override nested too deeply becomes a text"
        ),
    ],
)
def test_a_malformed_override_of_an_open_mapping_is_refused(tmp_path: Path, word: str) -> None:
    refused(tmp_path, BASE, word)


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        pytest.param(
            "model: {id: x, config: {fraction: x}}\ndata: {path: d}\n",
            "model.config",
            {"fraction": "x"},
            id="TypeError for model.config with a key called fraction",
        ),
        pytest.param(
            "model: {id: x, config: {every: 0}}\ndata: {path: d}\n",
            "model.config",
            {"every": 0},
            id="limits of small mappings are held against model.config",
        ),
        pytest.param(
            "data: {path: d, seq_len: '${model.config.n}'}\nmodel: {id: x, config: {n: 128}}\n",
            "data.seq_len",
            128,
            id="a reference to a value further down is refused",
        ),
        pytest.param(
            BASE + "fsdp: {cpu_offload: '${log.forecast}'}\n",
            "fsdp.cpu_offload",
            True,
            id="a reference to a boolean is refused",
        ),
        pytest.param(
            f"model: {{id: {'x' * 5000}, revision: main}}\ndata: {{path: d}}\n",
            "model.revision",
            "main",
            id="OSError for a model.id longer than a file name",
        ),
    ],
)
def test_what_can_be_honoured_is_read(tmp_path: Path, text: str, path: str, expected: Any) -> None:
    assert flat(read(tmp_path, text).recipe)[path] == expected


def test_a_key_of_the_architecture_keeps_its_name(tmp_path: Path) -> None:
    assert read(tmp_path, BASE, "model.config.async=3").recipe.model.config == {"async": 3}


def test_an_override_of_a_section_says_that_it_is_one(tmp_path: Path) -> None:
    [problem] = refused(tmp_path, BASE, "optim={lr: 1}")
    assert problem.field == "optim" and "did you mean" not in problem.message


def test_what_cannot_be_read_is_reported_once(tmp_path: Path) -> None:
    assert len(refused(tmp_path, BASE + f"seed: 1{'0' * 5000}\n")) == 1


def test_a_bad_reference_has_its_line(tmp_path: Path) -> None:
    problems = refused(tmp_path, BASE + "optim: {betas: '${name}'}\n")
    assert places(problems) == [("recipe.yaml:3", "optim.betas")]


# --- the JSON Schema -------------------------------------------------------------------------------------------------


def violations(schema: dict[str, Any], value: Any, at: str = "") -> list[str]:
    """Return where a value violates a JSON Schema. Only the keywords of the recipe's schema are known; others raise."""
    unknown = schema.keys() - {
        *(
            "$schema",
            "$id",
            "title",
            "description",
            "default",
            "type",
            "properties",
            "required",
            "additionalProperties",
        ),
        *("items", "enum", "const", "anyOf", "minimum", "exclusiveMinimum", "maximum", "pattern"),
    }
    assert not unknown, unknown
    found = []
    if "anyOf" in schema and all(violations(option, value, at) for option in schema["anyOf"]):
        found.append(f"{at}: none of {len(schema['anyOf'])}")
    if "type" in schema and not _is(schema["type"], value):
        return [f"{at}: not {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at}: not one of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{at}: not {schema['const']}")
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        found.append(f"{at}: not {schema['pattern']}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found += [f"{at}: below minimum"] * (value < schema.get("minimum", value))
        found += [f"{at}: not above minimum"] * ("exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"])
        found += [f"{at}: above maximum"] * (value > schema.get("maximum", value))
    if isinstance(value, list):
        found += [v for i, item in enumerate(value) for v in violations(schema.get("items", {}), item, f"{at}[{i}]")]
    if isinstance(value, dict):
        found += [f"{at}.{name}: missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            found += [f"{at}.{name}: unknown"] if inner is False else violations(inner, item, f"{at}.{name}")
    return found


def _is(kind: str, value: Any) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}[kind])


def node_of(path: str) -> dict[str, Any]:
    """Return the JSON Schema of a key or a section."""
    node = json_schema()
    for word in path.split("."):
        node = node["properties"][word]
    return node


def as_yaml(section: Any) -> dict[str, Any]:
    """Return a recipe, or a section of one, as the mapping that its YAML would give."""
    pairs = [(key_of(spec), getattr(section, spec.name)) for spec in dataclasses.fields(section)]
    return {name: as_yaml(item) if dataclasses.is_dataclass(item) else item for name, item in pairs}


def test_a_key_accepts_null_if_it_may_be_null_and_always_its_default() -> None:
    for path, key in KEYS.items():
        nullable = None in key.forms
        assert accepts(path, None) == nullable and accepts(path, value_at(Recipe(), path)), path


def test_the_json_schema_accepts_the_default_recipe_and_survives_json() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert violations(schema, as_yaml(Recipe())) == []


def test_the_json_schema_has_the_dataclasses_keys_and_defaults() -> None:
    for section, names in SECTIONS.items():
        schema = node_of(section) if section else json_schema()
        assert list(schema["properties"]) == names
        assert schema["additionalProperties"] is False and schema["description"]
    for path, key in KEYS.items():
        assert node_of(path)["description"] == key.limits["doc"]
        assert violations(node_of(path), node_of(path)["default"]) == []


def test_the_json_schemas_defaults_are_the_recipes() -> None:
    defaults = flat(Recipe())
    for path in KEYS:
        node = json_schema()
        for word in path.split("."):
            node = node["properties"][word]
        assert node["default"] == defaults[path]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sead", 1),
        ("seed", "1"),
        ("seed", -1),
        ("optim.lr", -1.0),
        ("optim.eps", 0),
        ("schedule.min_lr", 2),
        ("fsdp.strategy", "FULL"),
        ("fsdp.wrap", "all"),
        ("fsdp.wrap", [1]),
        ("fsdp.activation_checkpointing", True),
        ("data.eval", {"path": "a", "fraction": 0.1}),
        ("data.eval", {}),
        ("data.columns", {"text": ["a", 1]}),
        ("model.tokenizer", {"train": "many"}),
        ("checkpoint.async_", True),
        ("train.compile", "yes"),
        ("launch.nproc_per_node", "8"),
    ],
)
def test_the_json_schema_refuses_what_the_reader_refuses(tmp_path: Path, path: str, value: Any) -> None:
    refused(tmp_path, BASE, f"{path}={json.dumps(value)}")
    tree = as_yaml(Recipe())
    *parents, last = path.split(".")
    place = tree
    for word in parents:
        place = place[word]
    place[last] = value
    assert violations(json_schema(), tree) != []


# --- imports and shipped recipes -------------------------------------------------------------------------------------


def test_reading_a_recipe_imports_nothing_heavy() -> None:
    code = (
        "import sys, pathlib, fsdptrain.config.reader, fsdptrain.config.schema\n"
        f"fsdptrain.config.reader.load(pathlib.Path({str(ROOT / 'recipes' / 'shakespeare.yaml')!r}))\n"
        "print(*sorted({'torch', 'transformers', 'datasets', 'numpy', 'tokenizers', 'omegaconf'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_recipes_are_shipped() -> None:
    assert {path.stem for path in RECIPES} >= {
        *("shakespeare", "gsm8k-sft", "llama2-7b-no-shard-4x80gb", "llama2-13b-shard-grad-op-8x80gb"),
        *("llama3.1-8b-full-shard-8xh100", "llama3.3-70b-full-shard-8xh100", "llama3.3-70b-hybrid-shard-8x8"),
        *("speakers", "speakers-lora", "toy-200m"),
        *("qwen3-8b-full-shard-8xh100", "gsm8k-lora", "llama3.1-8b-lora", "llama3.3-70b-lora", "llama3.3-70b-qlora"),
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads(path: Path) -> None:
    recipe = load(path).recipe
    assert violations(json_schema(), as_yaml(recipe)) == []
    workers = recipe.launch.nproc_per_node
    ranks = recipe.launch.nnodes * (2 if workers == "auto" else workers)  # those of the small recipes on a CPU
    assert recipe.train.global_batch_size % (recipe.train.micro_batch_size * ranks) == 0
    assert ranks % (recipe.fsdp.shard_size or ranks) == 0
    assert recipe.model.id or recipe.model.init == "random"


def test_shipped_recipes_do_not_share_a_run_folder() -> None:
    folders = [load(path).recipe.output_dir for path in RECIPES]
    assert len(set(folders)) == len(folders)


def test_shipped_recipes_write_no_default_twice() -> None:
    """A recipe is sparse: it repeats a default only where the reader needs to see it."""
    shown = {"fsdp.strategy", "data.format", "data.packing", "data.train_on", "schedule.name", "train.epochs"}
    shown |= {"optim.lr", "optim.weight_decay", "train.global_batch_size", "train.micro_batch_size"}
    defaults = flat(Recipe())
    for path in RECIPES:
        written = load(path)
        values = flat(written.recipe)
        repeated = {key for key in written.where if values[key] == defaults[key]}
        assert repeated <= shown, path.name


@pytest.mark.parametrize("name", ["../../evil", "a/b", ".."])
def test_a_name_leads_to_no_other_folder(tmp_path: Path, name: str) -> None:
    [problem] = refused(tmp_path, BASE + f"name: {name}\n")
    assert places([problem]) == [("recipe.yaml:3", "name")] and "cannot name a folder" in problem.message
