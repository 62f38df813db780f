"""The recipe: its schema against the design, and a reader that refuses everything that cannot be honoured."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
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
from hypothesis import example, given
from hypothesis import strategies as st
from support import ROOT

from fsdptrain.config import rules
from fsdptrain.config.keys import KEYS, SECTIONS, RecipeLoader, accepts, flat, json_schema, key_of, value_at, yaml_text
from fsdptrain.config.names import foreign_values, leading_key, replacement_message, replacement_of, replacements
from fsdptrain.config.objectives import Objective
from fsdptrain.config.optimizers import OptimizerKind
from fsdptrain.config.reader import MAX_PROBLEMS, MAX_RECIPE_BYTES, LoadedRecipe, load
from fsdptrain.config.schema import Data, Model, Recipe
from fsdptrain.config.strategy import Strategy
from fsdptrain.errors import Problem, RecipeError, install_line
from fsdptrain.forecast.search import Choice, micro_batches
from fsdptrain.plan.gpus import TESTED, untested_versions
from fsdptrain.plan.plan import make_plan
from fsdptrain.plan.topology import Topology

DOCUMENT = ROOT / "docs" / "from-fsdp1.md"
SETTINGS = [path.removeprefix("optim.") for path in KEYS if "optim.name" in KEYS[path].needs]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

# The smallest valid recipe. Flow style keeps it on two lines, so what a test adds starts on line 3.
BASE = "model: {id: org/name}\ndata: {path: rows.jsonl}\n"

# Every key with its default. A change of one changes the runs of others: change it here, too, and in the changelog.
DEFAULTS = json.loads((Path(__file__).parent / "defaults.json").read_text())


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


def both(tmp_path: Path, path: str, value: str) -> list[list[Problem]]:
    """Return the problems with a value in the file, and on the command line."""
    return [refused(tmp_path, with_key(path, value)), refused(tmp_path, BASE, f"{path}={value}")]


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


def test_the_defaults_are_those_that_were_agreed() -> None:
    assert json.dumps(flat(Recipe())) == json.dumps(DEFAULTS)


@pytest.mark.parametrize("path", [path for path, value in DEFAULTS.items() if value is not None])
def test_a_default_can_be_written_out(tmp_path: Path, path: str) -> None:
    expected = "runs/run" if path == "output_dir" else DEFAULTS[path]
    written = read(tmp_path, with_key(path, yaml_text(DEFAULTS[path])), *needed(path))
    assert flat(written.recipe)[path] == expected and written.where[path].startswith("recipe.yaml:")


def test_a_sparse_recipe_is_the_defaults(tmp_path: Path) -> None:
    sparse = read(tmp_path, BASE)
    expected = Recipe(output_dir="runs/run", model=Model(id="org/name"), data=Data(path="rows.jsonl"))
    assert sparse.recipe == read(tmp_path, BASE + "optim:\nfsdp: {}\n").recipe == expected
    assert sparse.where == {"model.id": "recipe.yaml:1", "data.path": "recipe.yaml:2"}
    assert (sparse.text, sparse.folder) == (BASE, tmp_path.resolve())


# --- unknown keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "where", "field", "says"),
    [
        ("sead: 1\n", 3, "sead", "did you mean `seed`"),
        ("optimiser: {lr: 1}\n", 3, "optimiser", "did you mean `optimizer`? It is called optim here"),
        ("train:\n  max_step: 1\n", 4, "train.max_step", "did you mean `max_steps`? It is called train.steps here"),
        ("fsdp:\n  use_orig_param: 1\n", 4, "fsdp.use_orig_param", "did you mean `use_orig_params`? It is always on"),
        ("train:\n  lr: 1e-5\n", 4, "train.lr", "did you mean `optim.lr`"),
        ("log:\n  qqqq: 1\n", 4, "log.qqqq", "here are: every, trackers, tensorboard"),
        ("qqqqqqqq: 1\n", 3, "qqqqqqqq", "here are: name, seed,"),
        ("optim.lr: 1e-5\n", 3, "optim.lr", "unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(
    tmp_path: Path, added: str, where: int, field: str, says: str
) -> None:
    [problem] = refused(tmp_path, BASE + added)
    assert (problem.where, problem.field) == (f"recipe.yaml:{where}", field)
    assert says in problem.message


def test_a_misspelt_key_is_refused_with_its_line_and_its_name(tmp_path: Path) -> None:
    for path in KEYS:
        [problem] = [p for p in refused(tmp_path, with_key(f"{path}x", "1")) if p.field == f"{path}x"]
        assert re.fullmatch(r"recipe\.yaml:\d+", problem.where or "") and f"`{path}`" in problem.message
        [problem] = refused(tmp_path, BASE, f"{path}x=1")
        assert (problem.where, problem.field) == ("command line", f"{path}x") and f"`{path}`" in problem.message


@pytest.mark.parametrize("section", ["", "fsdp.mixed_precision"])
def test_a_name_of_another_tool_gets_its_name_here(tmp_path: Path, section: str) -> None:
    names = list(replacements())
    head = "".join(f"{'  ' * i}{word}:\n" for i, word in enumerate(section.split(".") if section else []))
    for start in range(0, len(names), MAX_PROBLEMS):
        some = names[start : start + MAX_PROBLEMS]
        text = BASE + head + "".join(f"{'  ' * (bool(section) + section.count('.'))}{name}: true\n" for name in some)
        problems = refused(tmp_path, text)
        assert [p.message for p in problems] == [replacement_message(replacements()[name]) for name in some]
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
    tables = DOCUMENT.read_text().partition("## Names\n")[2].partition("## Values")[0]
    cells = re.findall(r"^\| (`.+?) \|", tables, re.MULTILINE)
    names = [name for cell in cells for name in re.findall("`(.+?)`", cell)]
    assert sorted(names) == sorted(replacements()) and len(names) > 150, "each is read, and listed once"
    known = {*KEYS, *(path.partition(".")[0] for path in KEYS)}
    for text in replacements().values():
        assert leading_key(text) in known or text.startswith(("not ", "always ", "derived ")), text
    assert not {*names} & {path.rpartition(".")[2] for path in KEYS}, "a key of a recipe is not foreign"


def test_patterns_and_prefixes_of_other_tools_are_known() -> None:
    for name, says in {
        "fsdp_use_orig_params": "always on", "ddp_broadcast_buffers": "DistributedDataParallel",
        "ddp_bucket_cap_mb": "fsdp.bucket_cap_mb: with fsdp.strategy: NO_SHARD", "liger_rope": "train.compile",
    }.items():  # fmt: skip
        assert says in (replacement_of(name) or "")


def test_the_table_of_the_events_is_made_from_the_code() -> None:
    ends = runpy.run_path(str(ROOT / "docs" / "tables.py"))["ENDS"]
    stale = [name for name, end in ends.items() if not (ROOT / "docs" / name).read_text().endswith("\n" + end())]
    assert stale == [], "run python docs/tables.py"


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


def test_the_valid_keys_are_listed_once_for_a_file_of_another_tool(tmp_path: Path) -> None:
    text = "base_model: org/name\nsequence_len: 4096\nadapter: lora\nfsdp:\n  - full_shard\nunheard_of: 1\nanother: 2\n"
    problems = refused(tmp_path, text, "third=1")
    names = ["base_model", "sequence_len", "adapter", "fsdp", "unheard_of", "another", "third"]
    assert [p.field for p in problems] == names
    assert sum("launch" in p.message for p in problems) == 1, "the sections are listed once"


# --- types and limits ------------------------------------------------------------------------------------------------


def way_out(node: dict[str, Any]) -> list[str]:
    """Return what a message must name of the values that a JSON Schema accepts."""
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a string",
             "array": "a list", "object": "a mapping", "null": "null"}  # fmt: skip
    if "anyOf" in node:
        return [word for option in node["anyOf"] for word in way_out(option)]
    if "enum" in node or "const" in node:
        return [str(word) if word is not None else "null" for word in node.get("enum", [node.get("const")])]
    return list(node["properties"]) if "properties" in node else [words[node["type"]]]


WRONG = ['"5"', "true", "null", "5", "2.5", "[]", "[[17]]", "{nonsense: 17}", "nonsense"]


@pytest.mark.parametrize("path", KEYS)
def test_a_value_that_the_json_schema_refuses_is_one_problem_with_field_and_way_out(tmp_path: Path, path: str) -> None:
    node, seen = node_of(path), 0
    for text in WRONG:
        value = yaml.load(text, RecipeLoader)
        if is_valid(node, value) or (isinstance(value, (int, float)) and is_valid(node, str(value))):
            continue  # a number is a text
        for problems in both(tmp_path, path, text):
            assert [p.field for p in problems] == [path], problems
            within = path == "data.columns" and value.__class__ is dict
            named = ["a string", "a list"] if within else way_out(node)
            out_of_range = re.search("is too|is not a pair|is empty|use ", problems[0].message)
            assert out_of_range or all(word in problems[0].message for word in named), problems[0].message
        seen += 1
    assert seen > 1


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.steps", "010"), ("train.steps", "0x10"), ("train.steps", "12:30"), ("optim.betas", "[0.9, x]"),
        ("optim.betas", "[true, false]"), ("name", "???"), ("model.config", "{1: 2}"),
        ("data.columns", "{text: [a, 1]}"), ("data.columns", "{text: []}"), ("data.columns", "{text: null}"),
        ("model.tokenizer", "{train: 4096, on: data}"),
        ("data.eval", "{max_rows: 5}"), ("data.eval", "{path: a, max_rows: null}"), ("data.eval", "{fraction: true}"),
        ("data.eval", "{path: a, fraction: 0.1}"), ("fsdp.wrap", "[1]"), ("launch.nproc_per_node", "true"),
        ("fsdp.activation_checkpointing", "{every: 2.5}"), ("fsdp.activation_checkpointing", "{offload: true}"),
        ("fsdp.activation_checkpointing", "{kind: all, offload: true}"),
        # out of range
        ("name", '"  "'), ("model.id", '""'), ("data.path", '" "'), ("data.eval", "{fraction: 0}"),
        ("data.eval", "{fraction: 1.0}"), ("data.eval", "{fraction: .nan}"), ("data.eval", "{path: a, max_rows: 0}"),
        ("model.tokenizer", "{train: 256}"), ("fsdp.wrap", "{min_params: 0}"),
        ("fsdp.activation_checkpointing", "{every: 0}"), ("optim.lr", ".inf"), ("optim.lr", ".nan"),
        ("optim.lr", "1e999"), ("optim.betas", "[0.9]"), ("optim.betas", "[0.9, 1.0]"), ("optim.betas", "[-0.1, 0.9]"),
        ("optim.betas", "[.nan, 0.9]"), ("train.steps", "99999999999999999999"), ("launch.nnodes", "0:4"),
        ("launch.nnodes", "4:4"), ("launch.nnodes", "1-4"),
        # each of these once crashed the reader or was accepted
        ("optim.lr", "1" + "0" * 400), ("seed", "1" + "0" * 5000), ("model.tokenizer", "{train: 1" + "0" * 40 + "}"),
        ("model.tokenizer", "{train: 4096, train: 8192}"), ("model.config", "{a: 64, a: 32}"),
        ("data.columns", "{fraction: x}"), ("model.config", "{a: " * 100 + "1" + "}" * 100),
        ("fsdp.wrap", "[" * 120 + "1" + "]" * 120),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_the_file_and_on_the_command_line(
    tmp_path: Path, path: str, value: str
) -> None:
    for problems in both(tmp_path, path, value):
        assert len(problems) == 1 and problems[0].field in (path, None)


def test_every_limit_of_the_schema_is_held(tmp_path: Path) -> None:
    """One step outside each limit is refused, the limit itself (where it belongs to the range) is not."""
    limits = {"at_least": -1, "above": 0, "at_most": 1}
    checked = 0
    for path, key in KEYS.items():
        for limit, step in limits.items():
            if limit in key.limits:
                outside = key.limits[limit] + step
                assert [p.field for p in refused(tmp_path, with_key(path, str(outside)))] == [path]
                checked += 1
            if limit in key.limits and limit != "above":
                read(tmp_path, with_key(path, str(key.limits[limit])), *needed(path))
    assert checked > 20


def needed(path: str) -> list[str]:
    """Return overrides that give a key all that it needs to have an effect."""
    any_set = {
        "data.eval": "{fraction: 0.1}", "adapter.kind": "lora", "model.id": "org/name", "eval.prompts": "[text]",
    }  # fmt: skip
    needs = KEYS[path].needs
    own = [f"{other}={values[0] if values else any_set.get(other, '5')}" for other, values in needs.items()]
    if "train.objective" in needs:
        own += [f"data.format={Objective(needs['train.objective'][0]).formats[0]}"]
    own += ["teacher.id=org/name"] * ("train.objective=distill" in own and path != "teacher.id")
    own += ["parallel.pipeline=2"] * ("parallel.schedule=interleaved" in own)
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
        ("optim.lr", "1e-5", 1e-5), ("optim.lr", "1", 1.0), ("optim.lr", ".5", 0.5), ("optim.lr", "1_000.5", 1000.5),
        ("train.steps", "1_000", 1000), ("train.steps", "~", None), ("train.compile", "True", True),
        ("optim.betas", "[0, 0.5]", [0.0, 0.5]), ("checkpoint.every", "null", None), ("name", "yes", "yes"),
        ("name", "010", "010"), ("name", "12:30:45", "12:30:45"), ("name", '"5"', "5"), ("name", "BF16", "BF16"),
        ("data.path", "a=b.jsonl", "a=b.jsonl"), ("model.tokenizer", "{train: 257}", {"train": 257}),
        ("model.config", "{a: {b: [1, 2.5, bf16, null]}}", {"a": {"b": [1, 2.5, "bf16", None]}}),
        ("data.columns", "{text: [title, body]}", {"text": ["title", "body"]}),
        ("data.eval", "{path: held-out.jsonl, max_rows: 10}", {"path": "held-out.jsonl", "max_rows": 10}),
        ("data.eval", "{fraction: 0.01}", {"fraction": 0.01}), ("fsdp.wrap", "[A, B]", ["A", "B"]),
        ("fsdp.wrap", "{min_params: 100_000_000}", {"min_params": 100_000_000}),
        ("fsdp.activation_checkpointing", "{kind: full, offload: true}", {"kind": "full", "offload": True}),
        ("launch.nproc_per_node", "8", 8),
        # words in other spellings
        ("fsdp.strategy", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2"), ("fsdp.strategy", "no-shard", "NO_SHARD"),
        ("fsdp.mixed_precision.param_dtype", "bf16", "bfloat16"), ("model.dtype", "torch.float32", "float32"),
        ("fsdp.activation_checkpointing", "Full", "full"), ("export.dtype", "fp16", "float16"),
    ],
)  # fmt: skip
def test_a_value_is_read_as_what_it_looks_like(tmp_path: Path, path: str, value: str, expected: Any) -> None:
    for written in (read(tmp_path, with_key(path, value)), read(tmp_path, BASE, f"{path}={value}")):
        found = flat(written.recipe)[path]
        assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("data.seq_len", '"4,096"', "did you mean 4096, a number without quotes?"),
        ("data.seq_len", "4096.0", "did you mean 4096?"),
        ("train.compile", "yes", "did you mean true?"),
        ("train.compile", '"off"', "did you mean false?"),
        ("train.compile", "1", "did you mean true?"),
        ("data.packing", "false", "did you mean none?"),
        ("fsdp.activation_checkpointing", "2", "did you mean {every: 2}?"),
        ("fsdp.strategy", "FULL_SHRAD", "did you mean FULL_SHARD?"),
        ("fsdp.strategy", "ZeRO-2", "did you mean SHARD_GRAD_OP?"),
        ("fsdp.wrap", "LlamaDecoderLayer", "did you mean [LlamaDecoderLayer]?"),
        ("model.tokenizer", "4096", "did you mean {train: 4096}?"),
        ("data.eval", "0.1", "did you mean {fraction: 0.1}?"),
        ("data.eval", "held-out.jsonl", "did you mean {path: held-out.jsonl}?"),
        ("adapter.target", "[]", "[] is empty: name at least one, or use all-linear"),
        ("adapter.modules_to_save", "null", "null is not a list of strings; use [] for none"),
        ("eval.prompts", "['a', b: ]", "did you mean [a, 'b:']?"),
    ],
)
def test_a_wrong_value_gets_the_likely_one(tmp_path: Path, path: str, value: str, hint: str) -> None:
    for problems in both(tmp_path, path, value):
        assert [p.field for p in problems] == [path] and problems[0].message.endswith(hint)


def test_every_suggested_value_is_one_that_is_taken(tmp_path: Path) -> None:
    assert len(foreign_values()) > 10
    for path, meanings in foreign_values().items():
        for written, meant in meanings.items():
            assert is_valid(node_of(path), meant) and not is_valid(node_of(path), written), (path, written)
            assert not accepts(path, written) and accepts(path, meant)


def test_a_section_set_to_a_value_gets_its_first_key(tmp_path: Path) -> None:
    text = "model: org/name\ndata: rows.jsonl\nfsdp: hybrid_shard\neval: 100\noptim: [adamw]\n"
    hints = [p.message.partition("; did you mean ")[2] for p in refused(tmp_path, text)]
    assert hints == ["{id: org/name}?", "{path: rows.jsonl}?", "{strategy: HYBRID_SHARD}?", "{every: 100}?", ""]


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


def test_what_needs_a_missing_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for kind in ("adamw_8bit", "lion"):
        problems = refused(tmp_path, BASE, f"optim.name={kind}")
        assert [p.field for p in problems] == ["optim.name"]
        assert problems[0].message.endswith("not installed: pip install 'bitsandbytes>=0.50'")
    assert read(tmp_path, BASE, "optim.name=muon").recipe.optim.momentum == 0.95
    for kind, libraries in {"lora": ["peft"], "qlora": ["peft", "bitsandbytes"]}.items():
        assert [(p.field, p.message) for p in refused(tmp_path, BASE, f"adapter.kind={kind}")] == [
            ("adapter.kind", f"{library} is not installed: {install_line(kind)}") for library in libraries
        ]
    assert [p.message for p in refused(tmp_path, BASE, "log.trackers=[mlflow, tensorboard]")] == [
        "mlflow is not installed: pip install 'mlflow>=3.0'"
    ]


# --- combinations ----------------------------------------------------------------------------------------------------


FLASH = "model.attn_implementation=flash_attention_2"
SCRATCH = ["model.id=null", "model.tokenizer=t", "model.config.model_type=llama"]
FULL = "fsdp.activation_checkpointing={kind: full, "


@pytest.mark.parametrize(
    ("keys", "field", "says"),
    [
        (["model.id=null", "model.tokenizer=t"], "model.id", "whole model.config with `model_type`"),
        (["model.id=null", "model.config.model_type=llama"], "model.tokenizer", "for a model from scratch give"),
        ([*SCRATCH, "model.init=pretrained"], "model.init", "init: random"),
        ([*SCRATCH, "model.revision=main"], "model.revision", "no effect"),
        (["model.id=.", "model.revision=main"], "model.revision", "local folder"),
        (["data.path=null"], "data.path", "is not set"),
        (["data.columns={prompt: question}"], "data.columns", "not a field of format text; its fields: text"),
        (["data.format=chat", "data.columns.prompt=x"], "data.columns", "its fields: messages, tools"),
        (["data.train_on=completion"], "data.train_on", "only with prompt_completion or chat"),
        (["data.format=chat", "data.separator=x"], "data.separator", "data.format: chat, only with prompt_completion"),
        (["fsdp.shard_size=8"], "fsdp.shard_size", "FULL_SHARD, only with HYBRID_SHARD or HYBRID_SHARD_ZERO2"),
        (["model.init=random", "model.ignore_weights=[mtp]"], "model.ignore_weights", "random, only with pretrained"),
        (["fsdp.bucket_cap_mb=25"], "fsdp.bucket_cap_mb", "FULL_SHARD, only with NO_SHARD"),
        (["fsdp.accumulation=hold_shards"], "fsdp.accumulation", "FULL_SHARD without fsdp.cpu_offload"),
        (["fsdp.strategy=NO_SHARD", "fsdp.forward_prefetch=1"], "fsdp.forward_prefetch", "only with FULL_SHARD or"),
        (["fsdp.strategy=HYBRID_SHARD_ZERO2", "fsdp.backward_prefetch=BACKWARD_POST"], "fsdp.backward_prefetch",
         "only with FULL_SHARD or HYBRID_SHARD"),
        (["fsdp.activation_checkpointing={kind: none, offload: true}"], "fsdp.activation_checkpointing", "kind: none"),
        (["fsdp.activation_checkpointing={kind: selective, keep_attention: true}"], "fsdp.activation_checkpointing",
         "keep_attention has no effect with kind: selective"),
        ([FULL + "keep_attention: true}", "model.attn_implementation=eager"], "fsdp.activation_checkpointing",
         "keep_attention is not possible with model.attn_implementation: eager: use auto or sdpa"),
        (["fsdp.mixed_precision.param_dtype=fp16", "model.dtype=bfloat16"], "fsdp.mixed_precision.param_dtype",
         "float16 needs model.dtype: float32"),
        ([FLASH, "train.micro_batch_size=2"], "model.attn_implementation",
         "set train.micro_batch_size=1, data.packing=none or model.attn_implementation=sdpa"),
        (["train.max_skipped=2"], "train.max_skipped", "train.on_nonfinite: stop, only with skip"),
        (["optim.name=adamw_bf16", "optim.betas=[0.9,0.999]"], "optim.betas",
         "0.999 is above 0.995, where adamw_bf16 rounds decay away: set less, or use optim.name: adamw"),
        (["train.float8=rowwise", "adapter.kind=lora"], "train.float8", "rowwise trains all weights, and adapter.kind"),
        (["train.float8=rowwise", "model.trainable=[lm_head]"], "train.float8", "model.trainable freezes some"),
        (["train.float8=rowwise", "fsdp.mixed_precision.param_dtype=float32"], "train.float8", "param_dtype: bfloat16"),
        (["train.float8=rowwise", "data.seq_len=24", "train.micro_batch_size=3"], "train.float8",
         "a multiple of 16 tokens on each rank, and these have 72 (micro_batch_size × data.seq_len / parallel"),
        (["train.float8=rowwise", "fsdp.wrap=[Linear]"], "train.float8", "name decoder layers"),
        (["train.steps=10", "train.epochs=2"], "train.epochs", "no effect if train.steps is set"),
        (["train.epochs=null"], "train.epochs", "set one of the two"),
        (["eval.every=10"], "eval.every", "set data.eval"),
        (["checkpoint.every=null", "checkpoint.async=true"], "checkpoint.async", "no effect without checkpoint.every"),
        (["log.profile={steps: [9, 12]}", "train.steps=10"], "log.profile", "but the last step of the run is 10"),
        (["log.profile={steps: [12]}"], "log.profile", "[12] is not a range of steps, which count from 1: give"),
        (["log.profile={steps: [0, 2]}"], "log.profile", "[0, 2] is not a range of steps"),
        (["log.profile={steps: [1, 51]}"], "log.profile", "[1, 51] are more than 50 steps"),
        (["launch.rdzv_endpoint=node:29500"], "launch.rdzv_endpoint", "no effect with launch.nnodes: 1"),
        (["name=../../evil"], "name", "cannot name a folder"),
        (["name=.."], "name", "cannot name a folder"),
    ],
)  # fmt: skip
def test_a_combination_that_cannot_be_honoured_is_refused(
    tmp_path: Path, keys: list[str], field: str, says: str
) -> None:
    [problem] = refused(tmp_path, BASE, *keys)
    assert problem.field == field and says in problem.message
    read_too = {key.partition("=")[0].partition(".")[0] for key in keys} - {field.partition(".")[0]}
    for section in read_too:  # with the default in place of an invalid value, a rule would mislead
        assert [p.field for p in refused(tmp_path, BASE, *keys, f"{section}.x=1")] == [f"{section}.x"]


PAIRS = ["data.format=preference", "train.objective=dpo"]
JUDGED = ["data.format=feedback", "train.objective=kto"]
WINDOWS = ["data.window=2", "train.steps=9"]


@pytest.mark.parametrize(
    ("keys", "field", "says"),
    [
        ([*PAIRS, "train.objective=next_token"], "data.format",
         "preference cannot be trained with train.objective: next_token: use train.objective: dpo or ipo or simpo or"),
        ([*PAIRS, "data.format=text"], "data.format", "use train.objective: next_token or distill, or data."),
        ([*PAIRS, "data.packing=concat"], "data.packing", "concat divides pairs"),
        ([*PAIRS, "data.train_on=all"], "data.train_on", "all judges prompts"),
        ([*PAIRS, "data.long_rows=split"], "data.long_rows", "split divides pairs"),
        ([*PAIRS, "data.path=null", "data.sources=[{path: a}, {path: b, format: text}]"], "data.sources",
         "b: format: text cannot be trained with train.objective: dpo"),
        ([*PAIRS, "data.path=null", "data.sources=[{path: a}, {path: b, long_rows: split}]"], "data.sources",
         "b: long_rows: split divides"),
        ([*PAIRS, "data.columns={chosen: [a, b]}"], "data.columns", "`chosen` must be a single column"),
        (["train.dpo.beta=0.2"], "train.dpo.beta", "has no effect with train.objective: next_token, only with dpo"),
        ([*JUDGED, "train.objective=dpo"], "data.format", "use train.objective: kto, or data.format: preference"),
        ([*JUDGED, "data.format=preference"], "data.format", "or data.format: feedback (prompt, completion, label)"),
        ([*JUDGED, "data.packing=concat"], "data.packing", "concat divides rows"),
        ([*JUDGED, "parallel.pipeline=2"], "parallel.pipeline", "is not supported with train.objective: kto"),
        ([*JUDGED, *WINDOWS], "data.window", "train.objective: kto needs all data before the first step"),
        ([*WINDOWS, "data.path=null", "data.sources=[{path: a}]"], "data.window", "data.sources needs all data"),
        ([*WINDOWS, "data.eval={fraction: 0.1}"], "data.window", "data.eval: {fraction} needs all data"),
        ([*WINDOWS, "data.max_rows=9"], "data.window", "data.max_rows needs all data"),
        ([*WINDOWS, "model.tokenizer={train: 300}"], "data.window", "model.tokenizer: {train} needs all data"),
        (["data.window=2"], "data.window", "has no effect without train.steps"),
    ],
)  # fmt: skip
def test_what_an_objective_or_windows_cannot_train_on_is_refused(
    tmp_path: Path, keys: list[str], field: str, says: str
) -> None:
    [problem] = refused(tmp_path, BASE, *keys)
    assert problem.field == field and says in problem.message


def test_flash_attention_takes_packed_documents_a_row_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    [problem] = refused(tmp_path, BASE, FLASH, *PAIRS, "data.packing=none", "train.micro_batch_size=2")
    assert "set train.micro_batch_size=1 or model" in problem.message, "data.packing=none would not be a way out"
    for packing, choices in {"bfd": [1], "none": [1, 2, 4, 8, 16, 32]}.items():
        plan = make_plan(read(tmp_path, BASE, FLASH, f"data.packing={packing}"), Topology("cuda", 1, 2))
        assert micro_batches(plan, Choice(plan.recipe.fsdp.strategy, 2, False)) == choices


@pytest.mark.parametrize(("found", "says"), [(None, "and none is installed"), ("0.17.0", "0.18 or newer, and 0.17.0")])
def test_float8_needs_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None, says: str) -> None:
    def version(library: str) -> str:
        if found is None:
            raise PackageNotFoundError(library)
        return found

    monkeypatch.setattr(rules, "version", version)
    [problem] = refused(tmp_path, BASE, "train.float8=rowwise")
    assert problem.field == "train.float8" and says in problem.message and "torchao>=0.18" in problem.message


@pytest.mark.parametrize(
    "keys",
    [
        ["model.id=null", "model.tokenizer={train: 4096}", "model.config.model_type=llama"],
        [*SCRATCH, "model.init=random"], ["model.revision=main"], ["data.train_on=all"],
        ["data.format=chat", "data.train_on=completion", "data.columns={messages: talk, tools: functions}"],
        ["data.format=prompt_completion", "data.columns={prompt: q, completion: a}"],
        ["fsdp.strategy=HYBRID_SHARD", "fsdp.shard_size=8", "fsdp.backward_prefetch=BACKWARD_POST"],
        ["fsdp.strategy=NO_SHARD", "fsdp.backward_prefetch=NONE", "fsdp.forward_prefetch=0"],
        ["train.epochs=0.5", "train.steps=null"], ["train.epochs=null", "train.steps=10"], ["schedule.name=constant"],
        ["eval.every=10", "data.eval={fraction: 0.1}"], ["checkpoint.every=null", "checkpoint.async=false"],
        ["launch.nnodes=2", "launch.rdzv_endpoint=node:29500"], ["optim.name=adamw_bf16", "optim.betas=[0.9,0.995]"],
        ["optim.betas=[0.9,0.999]"], [FLASH, "train.micro_batch_size=2", "data.packing=none"],
    ],
)  # fmt: skip
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


def test_an_override_reaches_below_the_open_mappings(tmp_path: Path) -> None:
    text = with_key("model.config", "{hidden_size: 64, rope_parameters: {factor: 8.0}}")
    recipe = read(tmp_path, text, "model.config.hidden_size=32", "model.config.rope_parameters.factor=2.0").recipe
    assert recipe.model.config == {"hidden_size": 32, "rope_parameters": {"factor": 2.0}}
    assert read(tmp_path, BASE, "data.columns.text=content").recipe.data.columns == {"text": "content"}


@pytest.mark.parametrize(
    ("word", "field", "says"),
    [
        ("--fresh", None, "write key=value"),
        ("optim.lr", None, "write key=value"),
        ("=5", None, "write key=value"),
        ("lr=5", "lr", "did you mean `optim.lr`"),
        ("optim.lr.x=5", "optim.lr.x", "`optim.lr` can only be set as a whole: use a number"),
        ("optim={lr: 1}", "optim", "is a section: set one of its keys (name, lr"),
        ("fsdp.sharding_strategy=FULL_SHARD", "fsdp.sharding_strategy", "is called fsdp.strategy here"),
        ("checkpoint.async_=false", "checkpoint.async_", "`checkpoint.async`"),
        ("model.id=!!python/name:os.system", "model.id", "cannot name Python objects"),
        ("model.id=&a b", "model.id", "anchors and aliases"),
        ("model.id=${oc.env:HOME}", "model.id", "resolvers are refused"),
        ("optim.lr=[", "optim.lr", "is not a number"),
        ("model.config.=3", "model.config.", "a key has letters"),
        ("model.config.a[0]=3", "model.config.a[0]", "a key has letters"),
        ("model.config.a=" + "[" * 2000 + "1" + "]" * 2000, "model.config.a", "nested more than"),
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
        "x-${oc.env:HOME}-${name}",
        "${name",
        "${}",
        "${.name}",
        "${name}${",
        "${${name}}",
        "${a:${name}}",
    ],
)
@pytest.mark.parametrize("key", ["data.path", "model.config", "data.columns"])
def test_a_resolver_is_refused_wherever_it_is(tmp_path: Path, value: str, key: str) -> None:
    quoted = f'"{value}"'
    inside = {"data.path": quoted, "model.config": f"{{a: [1, {{b: {quoted}}}]}}", "data.columns": f"{{{quoted}: x}}"}
    for problems in both(tmp_path, key, inside[key]):
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
        ("name: a\nname: b\n", "recipe.yaml:2", "set twice (first on line 1)"),
        ("optim: {lr: 1}\nseed: 1\noptim: {eps: 1}\n", "recipe.yaml:3", "set twice (first on line 1)"),
        ("a: 1\n---\nb: 2\n", "recipe.yaml:2", "another document"),
        ("model:\n\tid: x\n", "recipe.yaml:2", "indent with spaces"),
        ("seed: 1\nname:x\ndata: 2\n", "recipe.yaml:3", "a colon and a space"),
        ("model:\n  id: x\n   dtype: y\n", "recipe.yaml:3", "check the indentation"),
        ("name: @x\n", "recipe.yaml:1", "put quotes around the value"),
        ('name: "C:\\x"\n', "recipe.yaml:1", "use single quotes"),
        ("model: {id: x\n", "recipe.yaml:2", "is not valid YAML"),
        ('name: "a\n', "recipe.yaml:2", "is not valid YAML"),
        ("seed: 1\nname: &a x\n", "recipe.yaml:2", "anchors and aliases"),
        ("name: !!python/object/apply:os.system [id]\n", "recipe.yaml:1", "cannot name Python objects"),
        ("name: !custom x\n", "recipe.yaml:1", "cannot name Python objects"),
        ("? [a]\n: b\n", "recipe.yaml:1", "a key must be a plain word"),
        ("seed: 1\nmodel: org/name\n", "recipe.yaml:2", "is a section with the keys id, revision"),
    ],
)
def test_yaml_that_is_not_a_recipe_is_refused_with_its_line(tmp_path: Path, text: str, where: str, says: str) -> None:
    assert any(p.where == where and says in p.message for p in refused(tmp_path, text))


def test_an_empty_file_says_what_a_recipe_needs(tmp_path: Path) -> None:
    problems = refused(tmp_path, "# nothing\n")
    assert [p.field for p in problems] == ["model.id", "model.tokenizer", "data.path"]
    assert {p.where for p in problems} == {"recipe.yaml"}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"name: \xff\xfe\n", "is not UTF-8 text"), ("name: a\n".encode("utf-16"), "is not UTF-8 text"),
        (b"name: a\0b\n", "is not valid YAML"), (b"name: \x07\n", "is not valid YAML"),
        (BASE.encode() + b"#" * MAX_RECIPE_BYTES, "a page of YAML"),
        (b"name: " + b"[" * 1_000, "nested"), (BASE.encode() + b"name: " + b"[" * 1_000 + b"]" * 1_000, "nested"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(raw)
    with pytest.raises(RecipeError, match=says):
        load(path)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load(path).recipe.model.id == "org/name"


def test_a_path_that_is_not_a_readable_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")  # reading it would wait for a writer; a device may never end
    names = (tmp_path, tmp_path / "missing.yaml", tmp_path / ("x" * 300), tmp_path / "pipe.yaml", Path("/dev/zero"))
    for path in names:
        with pytest.raises(RecipeError, match="cannot be read"):
            load(path)


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("model: {id: x, config: {fraction: x, every: 0, async: 3}}\ndata: {path: d}\n", "model.config",
         {"fraction": "x", "every": 0, "async": 3}),
        ("data: {path: d, seq_len: '${model.config.n}'}\nmodel: {id: x, config: {n: 128}}\n", "data.seq_len", 128),
        (BASE + "fsdp: {cpu_offload: '${log.forecast}'}\n", "fsdp.cpu_offload", True),
        (f"model: {{id: {'x' * 5000}, revision: main}}\ndata: {{path: d}}\n", "model.revision", "main"),
    ],
)  # fmt: skip
def test_what_can_be_honoured_is_read(tmp_path: Path, text: str, path: str, expected: Any) -> None:
    assert flat(read(tmp_path, text).recipe)[path] == expected


# --- the JSON Schema -------------------------------------------------------------------------------------------------


KINDS = {"object": dict, "array": list, "string": str, "null": type(None), "boolean": bool, "integer": int}


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    """Return whether a JSON Schema, of the keywords that the recipe's has, accepts a value."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if "anyOf" in schema and not any(is_valid(option, value) for option in schema["anyOf"]):
        return False
    if (kind := schema.get("type")) == "number" and not number:
        return False
    if kind in KINDS and (not isinstance(value, KINDS[kind]) or (kind == "integer" and not number)):
        return False
    if value not in schema.get("enum", [value]):
        return False
    if number and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return False
    if number and "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        return all(is_valid(schema.get("items", {}), item) for item in value)
    if isinstance(value, dict) and "type" in schema:
        known, other = schema.get("properties", {}), schema.get("additionalProperties", {})
        found = [(known.get(name, other), item) for name, item in value.items()]
        needed = {*schema.get("required", [])} <= value.keys()
        return needed and all(inner is not False and is_valid(inner, item) for inner, item in found)
    return True


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


def test_the_json_schema_has_every_section_and_key_with_its_default() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema and is_valid(schema, as_yaml(Recipe()))
    for section, names in SECTIONS.items():
        node = node_of(section) if section else schema
        assert list(node["properties"]) == names
        assert node["additionalProperties"] is False and node["description"]
    for path, key in KEYS.items():
        assert accepts(path, None) == (None in key.forms) and accepts(path, value_at(Recipe(), path)), path
        assert node_of(path)["description"] == key.doc != ""
        assert is_valid(node_of(path), node_of(path)["default"])


# --- imports and shipped recipes -------------------------------------------------------------------------------------


def test_reading_a_recipe_imports_nothing_heavy() -> None:
    code = (
        "import sys, pathlib, fsdptrain.config.reader, fsdptrain.config.schema\n"
        f"fsdptrain.config.reader.load(pathlib.Path({str(ROOT / 'recipes' / 'shakespeare.yaml')!r}))\n"
        "print(*sorted({'torch', 'transformers', 'datasets', 'numpy', 'tokenizers', 'omegaconf'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_shipped_recipes_are_valid_sparse_and_have_run_folders_of_their_own() -> None:
    """A recipe repeats a default only where the reader needs to see it."""
    shown = {"fsdp.strategy", "data.format", "data.packing", "data.train_on", "schedule.name", "train.epochs"}
    shown |= {"optim.lr", "optim.weight_decay", "train.global_batch_size", "train.micro_batch_size"}
    defaults = flat(Recipe())
    for path in RECIPES:
        written = load(path)
        assert is_valid(json_schema(), as_yaml(written.recipe))
        values = flat(written.recipe)
        repeated = {key for key in written.where if values[key] == defaults[key]}
        assert repeated <= shown, path.name
    assert len({load(path).recipe.output_dir for path in RECIPES}) == len(RECIPES)


# --- strategies ------------------------------------------------------------------------------------------------------

RANKS = {  # strategy → ranks per copy on 2 nodes × 4 ranks, without and with shard_size: 2
    "FULL_SHARD": (8, 8), "SHARD_GRAD_OP": (8, 8), "HYBRID_SHARD": (4, 2), "HYBRID_SHARD_ZERO2": (4, 2),
    "NO_SHARD": (1, 1),
}  # fmt: skip
RESHARDING = {"FULL_SHARD", "HYBRID_SHARD"}


@pytest.mark.parametrize("strategy", Strategy)
def test_ranks_per_copy_and_the_sizes_to_try(strategy: Strategy) -> None:
    assert (strategy.ranks_per_copy(None, 8, 4), strategy.ranks_per_copy(2, 8, 4)) == RANKS[strategy]
    assert strategy.reshards == (strategy in RESHARDING)
    assert strategy.replicates == (RANKS[strategy][0] < 8)
    assert strategy.in_groups == (RANKS[strategy][0] != RANKS[strategy][1])
    assert strategy.sizes_to_try(2, 4) == [RANKS[strategy][0]]


def test_groups_to_try_divide_the_nodes_and_are_neither_one_rank_nor_all() -> None:
    assert Strategy.HYBRID_SHARD.sizes_to_try(12, 1) == [2, 3, 4, 6]
    assert Strategy.HYBRID_SHARD.sizes_to_try(1, 8) == []
    assert Strategy.SHARD_GRAD_OP.sizes_to_try(1, 1) == []  # the same as NO_SHARD
    assert Strategy.FULL_SHARD.sizes_to_try(1, 1) == [1]


def test_the_document_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert [name for name in rows if name in RANKS] == [*RANKS]


# --- values as YAML, for recipes, messages and manifests -------------------------------------------------------------

# What one of the readers takes for something else if it is written without quotes.
AMBIGUOUS = st.sampled_from(["1e-5", "010", "12:30:45", "yes", "Null", "~", "", "1_0", "0x1f", "=", "<<", "2026-11-23"])
ANY_TEXTS = (
    AMBIGUOUS | st.text(st.characters(codec="utf-8")) | st.text("a b\n\t\r\x85\u2028\u2029\ufeff:#-\"'|>%@`,[]{}\x1c")
)
ANY_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(ANY_TEXTS, values, max_size=3),
    max_leaves=8,
)


@given(ANY_VALUES)
@example("\x85")
@example({"a\nb\x85c\n": ["\u2028"]})
def test_a_value_is_read_as_it_was(value: Any) -> None:
    line = yaml_text(value)
    assert "\n" not in line
    for written in (line, f"{{key: {line}}}", f"key: {line} # a comment"):
        for loader in (RecipeLoader, yaml.SafeLoader):
            read = yaml.load(written, Loader=loader)
            found = read if written == line else read["key"]
            assert json.dumps(found) == json.dumps(value), (written, loader)  # 1.0 is not 1
