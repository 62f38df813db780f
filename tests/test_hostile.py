"""Hostile artefacts: where code in a model, a tokenizer or a template would leave a file behind, none is left.

Every test here builds a small, sound model folder, does something to it, and then takes the way a run takes: tokenizer,
data, configuration, skeleton, weights' headers, the folder's files written again.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import ROOT, TINY, environment, events, fsdptrain, write_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from fsdptrain.data import PLAIN_CHAT_TEMPLATE, prepare
from fsdptrain.errors import DataError, FsdptrainError, RecipeError
from fsdptrain.hub import checkpoint_files
from fsdptrain.model import LIMITS, load_config, position_limit, save_assets, skeleton
from fsdptrain.plan import Plan, find_topology, make_plan
from fsdptrain.recipe import load
from fsdptrain.tokenizer import _train_bpe, load_tokenizer

TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def quiet(stage: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, as any export is."""
    folder = tmp_path_factory.mktemp("sound") / "model"
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    tokenizer = _train_bpe(iter(["hello there"]), 300)
    tokenizer.chat_template = PLAIN_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """The file that appears when something has been run."""
    return tmp_path / "canary"


def plan_of(folder: Path, trust: bool = False, **changes: Any) -> Plan:
    """The plan of a run that fine-tunes the model in `folder`/model on one conversation."""
    (folder / "talk.jsonl").write_text(json.dumps(TALK) + "\n")
    wanted = {
        "model": {"id": str(folder / "model")}, "data__format": "chat", "data__path": str(folder / "talk.jsonl"),
        **changes,
    }  # fmt: skip
    written = load(write_recipe(folder, **wanted))
    return make_plan(written, find_topology(written.recipe, {}), trust_remote_code=trust)


def go(folder: Path, **changes: Any) -> None:
    """Everything that a run does with the model folder before it makes a process group, and the files it writes."""
    plan = plan_of(folder, **changes)
    tokenizer = load_tokenizer(plan, quiet)
    prepare(plan, tokenizer, quiet)
    config = load_config(plan, len(tokenizer))
    checkpoint_files(plan)
    save_assets(plan, config, skeleton(config, plan.recipe.model), tokenizer, folder / "written")


def refusal(folder: Path, **changes: Any) -> str:
    """What is said about it: one of our errors, in one line."""
    with pytest.raises(FsdptrainError) as caught:
        go(folder, **changes)
    said = str(caught.value)
    assert said.strip()
    assert len(said.splitlines()) == 1, said
    return said


def rewrite(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


class Payload:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def evil(canary: Path) -> str:
    """Python that makes a file when it is imported."""
    return f"import pathlib; pathlib.Path({str(canary)!r}).touch()\nclass Evil: pass\n"


def test_the_sound_folder_goes_all_the_way(model: Path, tmp_path: Path) -> None:
    go(tmp_path)
    assert (tmp_path / "written" / "config.json").is_file()


# --- pickles ---------------------------------------------------------------------------------------------------------


def test_a_model_that_has_only_pickled_weights_is_refused(model: Path, tmp_path: Path, canary: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(canary)))
    torch.save({"model.norm.weight": Payload(canary)}, model / "pytorch_model-00001-of-00001.bin")
    assert "has no safetensors weights" in refusal(tmp_path)
    assert not canary.exists()
    with pytest.raises(OSError, match="."):  # and the payload is a live one
        pickle.loads(pickle.dumps(Payload(tmp_path)))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "tokenizer.model", "training_args.bin", "optimizer.pt", "tokenizer.pkl", "vocab.pkl"]
)
def test_a_pickle_beside_sound_files_is_not_read(model: Path, tmp_path: Path, canary: Path, name: str) -> None:
    (model / name).write_bytes(pickle.dumps(Payload(canary)))
    go(tmp_path)
    assert not canary.exists()


def test_a_pickle_in_the_place_of_a_tokenizer_is_refused(model: Path, tmp_path: Path, canary: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "model.safetensors", "config.json"):
        before = (model / name).read_bytes() if (model / name).exists() else b""
        (model / name).write_bytes(pickle.dumps(Payload(canary)))
        if before:
            refusal(tmp_path)
            (model / name).write_bytes(before)
    (model / "tokenizer.json").unlink()  # only tokenizer.model is left, which sentencepiece wants
    refusal(tmp_path)
    assert not canary.exists()


# --- code of its own -------------------------------------------------------------------------------------------------


def with_code(model: Path, canary: Path, **config: Any) -> None:
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "custom_generate/generate.py"):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(evil(canary))
    named = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    rewrite(model / "config.json", **{"auto_map": named, **config})
    rewrite(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_evil.Evil"]})


@pytest.mark.parametrize("change", [{"model_type": "evil"}, {"architectures": ["EvilForCausalLM"]}])
def test_code_of_its_own_is_refused_in_a_sentence_that_names_the_flag(
    model: Path, tmp_path: Path, canary: Path, change: dict[str, Any]
) -> None:
    with_code(model, canary, **change)
    said = refusal(tmp_path)
    assert "has code of its own" in said
    assert "--trust-remote-code" in said
    assert not canary.exists()


def test_code_for_an_architecture_that_is_known_is_never_run(model: Path, tmp_path: Path, canary: Path) -> None:
    with_code(model, canary)
    go(tmp_path)
    assert not canary.exists()


def test_a_tokenizer_class_of_its_own_is_refused(model: Path, tmp_path: Path, canary: Path) -> None:
    with_code(model, canary)
    rewrite(model / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    (model / "tokenizer.json").unlink()
    refusal(tmp_path)
    assert not canary.exists()


def test_code_of_another_repository_is_refused_even_with_the_flag(model: Path, tmp_path: Path, canary: Path) -> None:
    with_code(model, canary, model_type="evil", auto_map={"AutoConfig": "evil/repo--configuration_evil.Evil"})
    plan = plan_of(tmp_path, trust=True)
    with pytest.raises(RecipeError, match="another repository"):
        load_config(plan, None)
    assert not canary.exists()


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "abc1234", "A" * 40, "f" * 39, "f" * 41])
def test_the_flag_wants_a_full_commit(tmp_path: Path, revision: str | None) -> None:
    changes: dict[str, Any] = {"model": {"id": "org/name", "revision": revision}}
    with pytest.raises(RecipeError, match=r"model\.revision.*full commit"):
        plan_of(tmp_path, trust=True, **changes)
    assert not plan_of(tmp_path, **changes).trust_remote_code


def test_the_flag_takes_a_commit_or_a_folder_and_travels_in_the_plan(model: Path, tmp_path: Path) -> None:
    pinned = {"model": {"id": "org/name", "revision": "0123456789abcdef" * 2 + "01234567"}}
    for plan in (plan_of(tmp_path, trust=True, **pinned), plan_of(tmp_path, trust=True)):
        assert Plan.from_json(plan.to_json()).trust_remote_code


# --- chat templates --------------------------------------------------------------------------------------------------

WALK = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
OUT = "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir('CANARY') }}"


@pytest.mark.parametrize(
    "template",
    [
        WALK, OUT, OUT.replace("self", "cycler"), OUT.replace("self", "lipsum"), OUT.replace("self", "raise_exception"),
        "{{ ('%s' | attr('__class__')).__base__.__subclasses__() }}", "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}",
        "{{ undefined.call() }}", "{% for", "{{ 1 / 0 }}", "{{ messages[0].content.__class__.__base__ ~ 1 }}{{ 1/0 }}",
        "{{ '{0.__class__.__mro__[1].__subclasses__}'.format('') }}{{ raise_exception('end') }}",
    ],
)  # fmt: skip
def test_a_template_cannot_leave_its_sandbox(model: Path, tmp_path: Path, canary: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template.replace("CANARY", str(canary)))
    said = refusal(tmp_path)
    assert "chat template" in said
    assert not canary.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'a' * 10**11 }}",
        "{% set x = namespace(t='a') %}{% for a in range(60) %}{% set x.t = x.t ~ x.t %}{% endfor %}{{ x.t }}",
        "{{ 'a'.center(10**11) }}",
        "{{ 10 ** 10 ** 10 }}",
    ],
    ids=["loops", "recursion", "product", "doubling", "method", "power"],
)
def test_a_template_without_an_end_is_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr("fsdptrain.data.TEMPLATE_S", 1)
    (model / "chat_template.jinja").write_text(template)
    started = time.perf_counter()
    assert "chat template" in refusal(tmp_path)
    assert time.perf_counter() - started < 20
