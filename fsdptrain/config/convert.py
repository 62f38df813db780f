"""Convert configuration files of other training tools to a recipe: `fsdptrain init --from`.

What a name and its value mean is data (`config.names`, `config.tools`), and nothing that a file names is imported.
Every name of the files is converted, or it is reported with the reason why it has no counterpart; only empty values are
skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdptrain.config.formats import Format
from fsdptrain.config.reader import parse, read_recipe_text, root_node, value_of_node
from fsdptrain.config.reflection import all_paths, value_at
from fsdptrain.config.schema import Recipe
from fsdptrain.config.strategy import DEFAULT_STRATEGY, IN_COPIES, Strategy
from fsdptrain.config.syntax import yaml_text
from fsdptrain.config.tools import ASSUMED_RANKS, NOTE, TOOLS, Settings, Tool
from fsdptrain.config.translate import Entry, hub_path, is_empty, is_section, reason_for, settings_of
from fsdptrain.config.values import accepts, value_text
from fsdptrain.errors import Problem, RecipeError, listed
from fsdptrain.text import one_line


@dataclass
class Conversion:
    """A recipe that is made from files of other tools, and what there is to say about it."""

    tool: Tool | None = None
    values: Settings = field(default_factory=dict)  # recipe keys, and parts that start with `_`
    comments: dict[str, str] = field(default_factory=dict)  # recipe key → why it has this value
    converted: list[str] = field(default_factory=list)  # foreign names
    missing: dict[str, str] = field(default_factory=dict)  # foreign name → why it has no counterpart
    notes: list[str] = field(default_factory=list)  # changed meanings and assumptions
    problems: list[Problem] = field(default_factory=list)  # what keeps the recipe from being valid
    text: str = ""  # of the recipe

    def set(self, settings: Settings) -> None:
        """Add settings. Mappings and lists grow; of two other values the first one stays, unless it is a weaker one."""
        for path, value in settings.items():
            before = self.values.get(path)
            if path == NOTE:
                self.notes += [value] if value not in self.notes else []
            elif isinstance(before, dict) and isinstance(value, dict):
                self.values[path] = before | value
            elif path == "adapter.target" and isinstance(before, list) and isinstance(value, list):
                self.values[path] = [*before, *(name for name in value if name not in before)]
            elif path not in self.values or before in _WEAK or value is None or value == "all-linear":
                self.values[path] = value
            elif before != value and value not in _WEAK:
                self.notes.append(
                    f"{path}: the files have {value_text(before)} and {value_text(value)}; the first is used"
                )

    def report(self) -> list[str]:
        """Return what the screen says of the conversion, in lines of any length."""
        lines = [f"converted ({len(self.converted)} keys): {listed(self.converted, limit=100)}"]
        if self.missing:
            by_reason: dict[str, list[str]] = {}
            for name, reason in self.missing.items():
                by_reason.setdefault(reason, []).append(name)
            lines += ["", f"without counterpart ({len(self.missing)}):"]
            lines += [f"  {listed(names)}: {reason}" for reason, names in by_reason.items()]
        if self.notes:
            lines += ["", "changed or assumed:", *(f"  {note}" for note in self.notes)]
        if self.problems:
            lines += ["", "to correct in the recipe:", *(f"  {problem}" for problem in self.problems)]
        return lines


_WEAK = (0, "lora", "float32")  # a switch that is off, and what a more specific name refines


def convert(paths: Sequence[Path], dest: Path) -> Conversion:
    """Return the recipe, to be written to `dest`, with the values of these files, which are read as one.

    Raise RecipeError for a file that is not a mapping in the YAML of a recipe: a safe subset without tags and anchors.
    """
    files = [_mapping(path) for path in paths]
    plain = [{word: str(item) for word, item in f.items() if isinstance(item, (str, int, float))} for f in files]
    entries = [entry for mapping, known in zip(files, plain, strict=True) for entry in _entries(mapping, known)]
    words = {word for entry in entries for word in (entry.word, entry.parent)} | {word for f in files for word in f}
    done = Conversion(tool=next((tool for tool in TOOLS if tool.known_by & words), None))
    for entry in entries:
        _convert_entry(done, entry)
    _join_parts(done)
    _add_defaults(done)
    _choose_batch(done)
    _choose_name(done)
    _write(done, ", ".join(path.name for path in paths), dest)
    return done


def _mapping(path: Path) -> dict[str, Any]:
    """Return the values of a file. Raise RecipeError if it is not a mapping of plain YAML."""
    problems: list[Problem] = []
    name = path.name
    node = root_node(read_recipe_text(path), name, problems)
    value = value_of_node(node, "", f"{name}:1", problems) if node is not None else None
    if problems:
        raise RecipeError(problems[:1])
    if not isinstance(value, dict):
        raise RecipeError([Problem("is not a mapping of keys, as a configuration file of a training tool", where=name)])
    return {str(word): item for word, item in value.items()}


def _entries(mapping: dict[str, Any], known: dict[str, str], parent: str = "") -> Iterator[Entry]:
    """Yield the values of a mapping and of those in it, with references such as `${output_dir}` replaced.

    `known` has the texts and numbers at the top of the file.
    """
    for key, value in mapping.items():
        word = str(key)
        if isinstance(value, dict) and is_section(word):
            yield from _entries(value, known, word)
            continue
        if isinstance(value, str):
            value = re.sub(r"\$\{(\w+)\}", lambda found: known.get(found[1], found[0]), value)
        yield Entry(parent, word, value)


def _convert_entry(done: Conversion, entry: Entry) -> None:
    """Convert one value, or note why it has no counterpart. An empty one says nothing."""
    if is_empty(entry):
        return
    settings = settings_of(entry)
    if settings is None or not all(accepts(path, value) for path, value in settings.items() if path in all_paths()):
        done.missing[entry.name] = reason_for(entry)
    else:
        done.set(settings)
        done.converted.append(entry.name)


def _join_parts(done: Conversion) -> None:
    """Replace the parts of values that several names give by the values."""
    values = done.values
    part = {path: values.pop(path) for path in list(values) if path.startswith("_")}
    if "_beta1" in part or "_beta2" in part:
        values["optim.betas"] = [part.get("_beta1", 0.9), part.get("_beta2", 0.999)]
    if "_test_split" in part and "data.path" in values:
        done.set({"data.eval": {"path": hub_path(str(values["data.path"]), part.get("_config"), part["_test_split"])}})
    if "data.path" in values:
        values["data.path"] = hub_path(str(values["data.path"]), part.get("_config"), part.get("_split"))
    _join_columns(done, {name: part[f"_{name}"] for form in Format for name in form.fields if f"_{name}" in part})
    if part.get("_copies", 1) > 1:
        strategy = Strategy[values.get("fsdp.strategy", DEFAULT_STRATEGY.value)]
        values["fsdp.strategy"] = IN_COPIES.get(strategy, strategy).value
        values |= {"fsdp.shard_size": part["_shard_size"]} if "_shard_size" in part else {}
    if values.get("launch.nnodes", 1) != 1 and "_host" in part:
        values["launch.rdzv_endpoint"] = f"{part['_host']}:{part.get('_port', 29500)}"
    if "_copies" in part and "_shard_size" in part:
        part.setdefault("_ranks", part["_copies"] * part["_shard_size"])
    values |= {name: part[name] for name in ("_accumulation", "_ranks") if name in part}


def _join_columns(done: Conversion, columns: dict[str, str]) -> None:
    """Add the columns of fields to `data.columns`, and choose the format that has the fields if none is known."""
    if not columns:
        return
    form = next(form for form in Format if set(columns) & set(form.fields))
    form = Format[done.values.setdefault("data.format", form.value)]
    renamed = {name: column for name, column in columns.items() if name in form.fields}
    merged = done.values.pop("data.columns", {}) | renamed
    if merged := {name: column for name, column in merged.items() if name != column}:
        done.values["data.columns"] = merged


def _add_defaults(done: Conversion) -> None:
    """Add the tool's own defaults where a recipe has others, so that the recipe trains as the files say."""
    values, tool = done.values, done.tool
    if values.get("train.steps") is not None and values.pop("train.epochs", None) is not None:
        done.notes.append("train.steps: the files have a number of epochs too, which the number of steps overrides")
    if "data.format" not in values and tool and tool.name in ("TRL", "LLaMA-Factory"):
        values["data.format"] = "chat"
        done.notes.append("data.format: assumed, because the files do not say what a row contains")
    if tool is None:
        return
    defaults = dict(tool.defaults)
    if tool.name == "TRL" and values.get("data.format") == "chat":
        defaults["data.train_on"] = "all"
    if tool.name == "torchtune" and "schedule.name" in values:
        del defaults["schedule.name"]
    if tool.name == "torchtune":
        defaults["fsdp.mixed_precision.param_dtype"] = values.get("model.dtype", "bfloat16")
    if tool.name == "LLaMA-Factory":
        defaults["adapter.alpha"] = 2 * values.get("adapter.r", defaults["adapter.r"])
        if re.fullmatch(r"\w+", values.get("data.path", "")):
            done.notes.append(
                f"data.path: {values['data.path']} is a name in LLaMA-Factory's dataset_info.json: write the file or "
                "the Hub data set that it stands for"
            )
    if "train.steps" in values:
        defaults.pop("train.epochs", None)
    for path, value in defaults.items():
        skipped = path.startswith("adapter.") and "adapter.kind" not in values
        if path not in values and not skipped and value_at(Recipe(), path) != value:
            values[path] = value
            done.comments[path] = f"default of {tool.name}"


def _choose_batch(done: Conversion) -> None:
    """Multiply the sequences of a rank to those of a step, unless the files have their number."""
    values = done.values
    accumulation, ranks = values.pop("_accumulation", 1), values.pop("_ranks", None)
    micro = values.get("train.micro_batch_size", 1)
    factors = (micro, accumulation, ranks or ASSUMED_RANKS)
    if "train.global_batch_size" in values or not all(isinstance(n, int) and 0 < n < 2**20 for n in factors):
        return
    values["train.global_batch_size"] = math.prod(factors)
    count = f"{factors[2]} ranks" + ("" if ranks else ", an assumption")
    done.comments["train.global_batch_size"] = f"{micro} × {accumulation} accumulated × {count}"
    if not ranks:
        done.notes.append(
            f"train.global_batch_size: {micro} × {accumulation} accumulated × {ASSUMED_RANKS} ranks; the files do not "
            "have the number of ranks, so it is assumed"
        )


def _choose_name(done: Conversion) -> None:
    """Name the run as its folder if the files have no name."""
    name = str(done.values.get("output_dir", "")).rstrip("/").rpartition("/")[2]
    if "name" not in done.values and re.fullmatch(r"[\w.-]*\w[\w.-]*", name):
        done.values = {"name": name, **done.values}


def _write(done: Conversion, source: str, dest: Path) -> None:
    """Write the text of the recipe, without keys that have no effect in it, and collect the other problems with it."""
    while True:
        done.text = _recipe_text(done, source)
        try:
            parse(done.text, dest.name, dest.resolve().parent, [])
            done.problems = []
            return
        except RecipeError as error:
            done.problems = [replace(problem, where=None) for problem in error.problems]
        idle = {p.field: p.message for p in done.problems if p.field and p.message.startswith("has no effect")}
        idle = {path: message for path, message in idle.items() if path in done.values}
        for path, message in idle.items():
            if done.values.pop(path) and path not in done.comments:
                done.notes.append(f"{path}: left out, because it {message}")
        if not idle:
            todo = [f"# to correct: {problem}\n" for problem in done.problems]
            done.text = _recipe_text(done, source, "".join(todo))
            return


def _recipe_text(done: Conversion, source: str, todo: str = "") -> str:
    """Return the recipe as YAML, in the order of the schema."""
    lines = [f"# Converted from {one_line(source)}; fsdptrain schema lists all keys.", *todo.splitlines(), ""]
    section = ""
    for path in all_paths():
        if path not in done.values:
            continue
        above, _, key = path.rpartition(".")
        if above != section and above:
            known = section.split(".")
            words = above.split(".")
            new = [(depth, word) for depth, word in enumerate(words) if known[: depth + 1] != words[: depth + 1]]
            lines += [*([""] if words[0] != known[0] else []), *(f"{'  ' * depth}{word}:" for depth, word in new)]
        section = above
        comment = f"  # {done.comments[path]}" if path in done.comments else ""
        lines.append(f"{'  ' * (path.count('.'))}{key}: {yaml_text(done.values[path])}{comment}")
    return "\n".join(lines) + "\n"
