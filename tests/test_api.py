"""The functions for Python programs do what the commands do, and raise what these report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
from support import events, write_recipe
from transformers import AutoModelForCausalLM

import fsdptrain
from fsdptrain import api
from fsdptrain.errors import DataError, RecipeError
from fsdptrain.processes import PROGRAM


def forked(*args: Any, env: dict[str, str], **options: Any) -> forks.Command:
    """Start a command as a child of the server of forks, which lives as long as it."""
    return forks.Command(*args, env={name: value for name, value in env.items() if name != PROGRAM}, **options)


@pytest.fixture(autouse=True)
def forked_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "subprocess", SimpleNamespace(Popen=forked, PIPE=subprocess.PIPE))


def test_a_program_trains_reads_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, launch__nproc_per_node=1)
    folder = fsdptrain.run(recipe, ["train.steps=2"])
    assert Path(folder) == tmp_path / "run" and "step" in capsys.readouterr().out
    steps = [event for event in fsdptrain.read_history(folder) if event["event"] == "step"]
    assert [event["loss"] for event in steps] == [event["loss"] for event in events(tmp_path / "run", "step")]
    exported = fsdptrain.export(folder, out=tmp_path / "model", step=2, dtype="bfloat16")
    assert str(AutoModelForCausalLM.from_pretrained(exported, dtype="auto").dtype) == "torch.bfloat16"


def test_what_a_command_refuses_is_raised(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, launch__nproc_per_node=1)
    for call in (fsdptrain.load_recipe, fsdptrain.validate, fsdptrain.run):
        with pytest.raises(RecipeError, match=r"optim\.lrr: unknown key; did you mean `optim\.lr`"):
            call(recipe, ["optim.lrr=1"])
        with pytest.raises(RecipeError, match=r"a list, here \['train\.steps=2'\]"):
            call(recipe, "train.steps=2")
    with pytest.raises(RecipeError, match="this plan has no GPUs"):
        fsdptrain.validate(recipe, price=2.5)
    with pytest.raises(RecipeError, match="-1 is negative"):
        fsdptrain.validate(recipe, hardware="8xh100", price=-1)
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        fsdptrain.run(recipe, [f"data.path={tmp_path / 'nothing.jsonl'}"])
    with pytest.raises(RecipeError, match="is not a run folder"):
        fsdptrain.read_history(tmp_path)
    with pytest.raises(RecipeError, match="is not a run folder"):
        fsdptrain.export(tmp_path)


SMALL = "memory=8e9,flops=1e14,intra_bw=1e11,inter_bw=1e10"


def test_a_dry_run_that_does_not_fit_is_an_outcome() -> None:
    outcome = fsdptrain.validate("llama3.1-8b-full-shard-8xh100", ["model.config.num_hidden_layers=2"], hardware=SMALL)
    assert outcome.exit_code == 3 and outcome.problems and outcome.report["problems"]
    assert outcome.report["step_s"] > 0 and 'report["step_s"]' in (api.__doc__ or "")  # the name that it shows


def test_importing_the_package_imports_no_function() -> None:
    code = "import sys, fsdptrain; assert 'fsdptrain.api' not in sys.modules and 'typer' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
