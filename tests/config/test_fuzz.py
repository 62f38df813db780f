"""Ten thousand broken recipes: each is read or refused with a message, quickly, and without any side effect.

Side effects are observed through the audit events of the interpreter, which no library can bypass: imports, files
opened or created, sockets, processes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support import ROOT

from fsdptrain.config.keys import KEYS, flat
from fsdptrain.config.names import replacements
from fsdptrain.config.reader import load
from fsdptrain.errors import FsdptrainError
from fsdptrain.plan.plan import Plan, draft_plan, make_plan
from fsdptrain.plan.topology import find_topology

# fsdptrain imports it only for recipes with references, and it imports the rest of itself for the first one.
OmegaConf.resolve(OmegaConf.create({"a": 1, "b": "${a}"}))

SECONDS = 2.0  # a longer time means that something grows without bound; a usual recipe takes 0.05
MAX_MESSAGE = 20_000  # characters: a page, not a copy of the recipe
SECRET = "canary-7f3a9c"  # the value of HF_TOKEN while recipes are read
DATA = ["data/tinyshakespeare.txt", "data/gsm8k-train.jsonl", "data/train.jsonl"]
SHIPPED = [
    "".join(line for line in path.read_text().splitlines(True) if not line.startswith("#"))
    for path in sorted((ROOT / "recipes").glob("*.yaml"))
]

# --- what a user might write -----------------------------------------------------------------------------------------

SCALARS = [
    "0", "-1", "1", "-0", "010", "0x1F", "1_000", "12:30:45", "2001-01-01", "9007199254740993", "2147483648", "1e400",
    "-1e400", "1e-400", "1e18", ".nan", "-.inf", "1" + "0" * 400, "1" + "0" * 5000, "9" * 20, "0.1", "true", "yes",
    "null", "~", "", "''", "'  '", "'010'", "???", "=", "<<", "-", "|", ">", "%", "@", "`", "!", "auto", "llama",
]  # fmt: skip
PATHS = [
    "/", "/**", "/**/*/..", "'**'", "'*/../*/../*/../*/../*/../*'", "'**/**/**/**/**/x'", "/proc/**/x", "/dev/zero",
    "/dev/stdin", "/proc/self/environ", "../../../../etc/passwd", "~root/x", "~nobody-here/x", "~", ".", "..",
    "'[a-'", "'[!]'", "'{a,b}'", "x" * 300, "a/" * 3000, "org/name:config:split", ":", "'a:b:c:d'", "file:///etc",
    "https://user:hf_abcdefghijklmnopqrstuvwxyzABCDEFGH@evil.example/x", "http://127.0.0.1:1/x", "'\\\\host\\x'",
]  # fmt: skip
TEXTS = [
    '"\\0"', '"a\\0b"', '"\\ud800"', '"\\u202e"', '"\\U0010ffff"', '"\\e[2J"', "naïve 東京 🙂", "'" + "é" * 5000 + "'",
    "'" + "a" * 30_000 + "'", "${name}", "${output_dir}", "${model}", "${model.config}", "${nope}", "${", "${name",
    "${${name}}", "${.name}", "${..seed}", "'\\${name}'", "'\\${nope}'", "'\\\\${name}'", "${oc.env:HF_TOKEN}",
    "${oc.env:NOPE,x}", "'x${oc.env:HF_TOKEN}'", "${oc.coerce:os.system}", "${oc.select:model}", "${oc.decode:'1'}",
    "'${oc.create:{a: 1}}'", "'\\${oc.env:HF_TOKEN}'", "${data.path}", "${seed}", "'${seed}${seed}'",
]  # fmt: skip
TREES = [
    "[]", "{}", "[1, [2, [3]]]", "{train: -5}", "{train: 1e3}", "{fraction: 2}", "{path: /}", "{min_params: 0}",
    "{every: 0}", "{every: null}", "[0.9, 0.95, 1]", "['']", "[null]", "{null: null}", "{1: 2}", "{true: x}",
    "{? [a] : b}", "{'': ''}", "{a.b: 1}", "{model_type: gpt2, model_type: llama}", "{<<: {a: 1}}", "{text: text}",
    "[" * 20 + "]" * 20, "[" * 40 + "]" * 40, "[" * 3000, "{a: " * 25 + "1" + "}" * 25, "{a: " * 3000 + "1",
    "[" + "1," * 8000 + "]", "{" + ",".join(f"k{i}: {i}" for i in range(4000)) + "}",
]  # fmt: skip
TAGS = [
    "!!python/object/apply:os.system ['touch pwned']", "!!python/name:os.system", "!!python/module:antigravity",
    "!!python/object/new:pathlib.Path ['pwned']", "!!binary aGk=", "!!set {a, b}", "!!timestamp 2001-01-01", "!!int 5",
    "!!float x", "!!null x", "!!bool x", "!!map [a]", "!custom x", "! 5", "!<tag:yaml.org,2002:str> 5", "!!str 5",
    "&a 5", "*a", "&a [*a, *a]", "{a: &a [x, x], b: &b [*a, *a, *a], c: &c [*b, *b, *b], d: [*c, *c, *c]}",
]  # fmt: skip
LINES = [
    "---\n", "...\n", "--- {}\n", "%YAML 1.2\n", "%TAG ! tag:x,2000:\n", "\t", "\r\n", "\ufeff", "\x00", "\x07", "\x1b",
    "\x85", "\u2028", "\ud7ff", "name: again\n", "model:\n", "? ", ": ", "- ", "{", "}", "[", "]", '"', "'", "#", "|\n",
    "seed: 1\n" * 50, "\n" * 5000, "model: {id: [}\n", "trust_remote_code: true\n", "!!python/name:os.system\n",
    "".join(f"key{i}: x\n" for i in range(3000)), "a: &a [x]\n" + "".join(f"b{i}: [*a, *a]\n" for i in range(200)),
]  # fmt: skip

sections = ["model", "data", "fsdp", "fsdp.mixed_precision", "optim", "train", "launch", "model.config", "data.columns"]
nope = [f"{section}.nope" for section in sections]
paths = st.sampled_from([*KEYS, *sections, *replacements(), *nope, "model.config.hidden_size", ""])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
fragments = st.sampled_from([*SCALARS, *PATHS, *TEXTS, *TREES, *TAGS]) | values.map(json.dumps)


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, and replace whatever is there."""
    *parents, last = path.split(".")
    for word in parents:
        inner = tree.get(word)
        tree[word] = tree = inner if isinstance(inner, dict) else {}
    tree[last] = value


@dataclass(frozen=True)
class Broken:
    """The bytes of a recipe file, and the overrides."""

    raw: bytes
    overrides: list[str]

    def __repr__(self) -> str:
        text = f"{self.raw!r}, {self.overrides!r}"
        return text if len(text) < 3000 else f"{text[:2000]} … {text[-1000:]}"


@st.composite
def recipes(draw: st.DrawFn) -> Broken:
    """Draw a shipped recipe with changed values, then changed text, then changed bytes, and some overrides."""
    tree = yaml.safe_load(draw(st.sampled_from(SHIPPED)))
    chosen = draw(st.lists(fragments, max_size=3))
    for number, _ in enumerate(chosen):
        put(tree, draw(paths), f"@{number}@")
    text = yaml.safe_dump(tree, sort_keys=False, default_flow_style=draw(st.booleans()))
    for number, fragment in enumerate(chosen):
        text = text.replace(f"'@{number}@'", fragment)
    for line in draw(st.lists(st.sampled_from(LINES) | fragments, max_size=2)):
        start, length = draw(st.integers(0, len(text))), draw(st.sampled_from([0, 0, 1, 20]))
        text = text[:start] + line + text[start + length :]
    raw = text.encode("utf-8", "surrogatepass")
    for junk in draw(st.lists(st.binary(max_size=4), max_size=draw(st.sampled_from([0, 0, 0, 3])))):
        start = draw(st.integers(0, len(raw)))
        raw = raw[:start] + junk + raw[start + draw(st.integers(0, 3)) :]
    words = st.tuples(paths, fragments).map("=".join) | st.text(max_size=20) | fragments
    return Broken(raw, draw(st.lists(words, max_size=2)))


# --- what happens when it is read ------------------------------------------------------------------------------------

FILES = sorted(["recipe.yaml", *(Path(name).name for name in DATA)])
HARMLESS = {"os.scandir", "os.listdir", "glob.glob", "glob.glob/2", "compile", "exec", "object.__getattr__"}
WATCHED_EVENTS = (
    "import", "open", "os.", "socket.", "subprocess.", "shutil.", "pickle.", "ctypes.", "tempfile.", "urllib.",
)  # fmt: skip
_recorded: list[str] | None = None


def _record_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _recorded is not None and event.startswith(WATCHED_EVENTS) and event not in HARMLESS:
        _recorded.append(f"{event} {arguments[0] if arguments else ''}")


@contextmanager
def recorded_effects() -> Iterator[list[str]]:
    """Record everything that this process does inside the block that has an effect outside it or loads code."""
    global _recorded
    _recorded = effects = []
    try:
        yield effects
    finally:
        _recorded = None


def read_and_plan(path: Path, overrides: list[str]) -> None:
    """Do what a command does with a recipe before it starts anything, for this and for another machine."""
    written = load(path, overrides)
    assert [*flat(written.recipe)] == [*KEYS]
    draft, _ = draft_plan(written, find_topology(written.recipe, {}, elsewhere=True), elsewhere=True)
    assert Plan.from_json(draft.to_json()) == draft  # what the workers read
    make_plan(written, find_topology(written.recipe, {}))


def check(folder: Path, recipe: Broken, again: bool = False) -> None:
    """Read one recipe in `folder`, and check everything that must be true of any recipe."""
    path = folder / "recipe.yaml"
    path.write_bytes(recipe.raw)
    message = ""
    with recorded_effects() as effects:
        started = time.perf_counter()
        try:
            read_and_plan(path, recipe.overrides)
        except FsdptrainError as error:
            message = str(error)
            assert message.strip()
        seconds = time.perf_counter() - started
    # A plan has the versions of the libraries, which are looked up in the metadata of their packages.
    effects = [each for each in effects if not re.search(r"(\.dist-info/METADATA|/python\d+\.zip)$", each)]
    assert set(effects) <= {f"open {path}"}, effects
    assert sorted(name for *_, names in os.walk(folder) for name in names) == FILES
    assert SECRET not in message
    assert len(message) < MAX_MESSAGE
    if seconds > SECONDS and not again:  # other processes may have slowed this one down, but not twice
        check(folder, recipe, again=True)
    else:
        assert seconds < SECONDS, f"{seconds:.1f} s"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import everything that is imported to read a valid recipe and to refuse an invalid one."""
    sys.addaudithook(_record_event)  # hooks cannot be removed
    path = tmp_path_factory.mktemp("warm") / "recipe.yaml"
    path.write_text(SHIPPED[-1])
    for overrides in ([], ["data.path=*"], ["seed=x", "nope=1", "name=[", "data.path='*'"]):
        with suppress(FsdptrainError):
            read_and_plan(path, overrides)


@pytest.fixture
def folder(warm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder that contains only the files that the shipped recipes name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    for name in DATA:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("planning reads no data")
    return tmp_path


def fuzz(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test to run on this many recipes, always the same ones."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        fixed = settings(
            max_examples=examples, derandomize=True, database=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        )  # fmt: skip
        return fixed(given(recipes())(test))

    return decorate


@fuzz(60)
def test_a_broken_recipe_is_read_or_refused_and_nothing_else_happens(folder: Path, recipe: Broken) -> None:
    check(folder, recipe)


@pytest.mark.soak
@fuzz(10_000)
def test_ten_thousand_broken_recipes_are_read_or_refused(folder: Path, recipe: Broken) -> None:
    check(folder, recipe)


@pytest.mark.parametrize(
    "override",
    [
        "model.id=" + "x" * 300,
        "model.tokenizer=" + "a/" * 3000,
        "model.config.a={1: 2}",
        "model.config.a=.nan",
        "model.config.a=[" + "1," * 8000 + "]",
        "model.config={" + ",".join(f"k{i}: {i}" for i in range(4000)) + "}",
        "data.columns={" + ",".join(f"k{i}: {i}" for i in range(900)) + "}",
        "optim.betas=[" + "1," * 1500 + "]",
        "data.path=~nobody-here/x",
        "data.path=/**",
        "data.path=*/../*/../*/../*/../*/../*/../*/../*/../*/../*/../*/../*/../nothing",
        "data.path=" + "../" * 1200 + "x",
        "a" * 30_000,
        "name='\\${nope}'",
        'name="\\ud800"',
    ],
    ids=lambda word: word[:30],
)
def test_recipes_that_once_crashed_or_hung_the_reader(folder: Path, override: str) -> None:
    check(folder, Broken(SHIPPED[-1].encode(), [override]))
