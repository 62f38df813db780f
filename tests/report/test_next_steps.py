"""What the end of a run says to do next: commands and a program that run as they are pasted, at any width."""

from __future__ import annotations

import io
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import TINY, write_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from fsdptrain.config.reader import load
from fsdptrain.data.tokenizer import train_bpe
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology
from fsdptrain.report.run_banner import next_steps
from fsdptrain.report.trackers import TrackerState
from fsdptrain.terminal.page import Page

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def planned(tmp: Path, **changes: Any) -> Plan:
    """Return the plan of a run whose base is a tiny random Llama with a tokenizer of bytes."""
    base = tmp / "base"
    if not base.exists():
        tokenizer = train_bpe(iter(["hello there"]), 300)
        tokenizer.chat_template = TEMPLATE
        AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY)).save_pretrained(base)
        tokenizer.save_pretrained(base)
    model = {"id": str(base), "init": "pretrained"}
    changes |= {"export": {"compare": False}}  # without a dtype, which a separate adapter does not have
    return make_plan(
        load(write_recipe(tmp, model=model, log__trackers=["tensorboard"], **changes)), Topology("cpu", 1, 1)
    )


def exported(plan: Plan, adapter: bool = False) -> None:
    """Write what a run exports: the base, or an adapter for it."""
    from peft import LoraConfig, get_peft_model

    base = str(plan.recipe.model.id)
    shutil.copytree(base, plan.rundir.export)
    if adapter:
        model = AutoModelForCausalLM.from_pretrained(base)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.save_pretrained(plan.rundir.export)


def shown(plan: Plan, words: list[str], width: int | None = None) -> str:
    """Return what is printed on a terminal of this width, or into a pipe."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=width is not None, color_system=None)
    next_steps(plan, words, Page(console))
    return out.getvalue()


PAIRS = {"data__format": "prompt_completion", "data__separator": "\nAnswer: ", "adapter": {"kind": "lora"}}


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({"data__format": "text"}, "Once upon a time"),
        ({"data__format": "chat"}, "What is 7 times 6?"),
        (PAIRS, "What is 7 times 6?\nAnswer: "),
    ],
)
def test_the_program_generates_from_the_export(
    changes: dict[str, Any], prompt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(tmp_path, **changes)
    exported(plan, "adapter" in changes)
    program = shown(plan, ["run", "recipe.yaml"], 60).partition("try it in Python:\n")[2]
    capsys.readouterr()
    exec(program, {})
    assert capsys.readouterr().out.startswith(prompt)
    assert all(len(line) <= 60 for line in program.splitlines() if "folder = " not in line)


def test_the_commands_can_be_pasted_at_any_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = planned(tmp_path, output_dir=str(tmp_path / "runs" / "a run"), name="mine")
    for folder in (plan.rundir.export, plan.rundir.trackers):
        folder.mkdir(parents=True)
    shown_by = ["tensorboard", "--logdir", str(plan.rundir.tensorboard)]
    TrackerState(shown_by=shown_by).write(plan.rundir, "tensorboard")
    words = ["run", "recipe.yaml", "train.steps=4", "optim.lr=1e-5", "--fresh"]
    lines = shown(plan, words, 60).partition("try it")[0].replace(" \\\n", " ").splitlines()
    commands = {line[:8].strip(): shlex.split(line[8:]) for line in lines[1:]}
    assert all(len(line) <= 60 for line in shown(plan, words, 60).partition("try it")[0].splitlines())
    same = ["fsdptrain", "run", "recipe.yaml"]
    assert commands == {
        "curves": ["tensorboard", "--logdir", "runs/a run/tensorboard"],
        "report": ["fsdptrain", "report", "runs/a run"],
        "chat": ["fsdptrain", "chat", "runs/a run"],
        "eval": ["fsdptrain", "eval", "runs/a run", "--data", "FILE"],
        "serve": ["vllm", "serve", "runs/a run/export"],
        "share": ["hf", "upload", "ORG/NAME", "runs/a run/export"],
        "longer": [*same, "optim.lr=1e-5", "train.steps=8"],
        "more": [
            *same, "train.steps=4", "optim.lr=1e-5", "model.id=runs/a run/export", "data.path=MORE_DATA",
            "output_dir=runs/a run-2",
        ],
    }  # fmt: skip
    (tmp_path / "MORE_DATA").write_text("more")
    for name in ("longer", "more"):  # the command accepts them
        written = load(tmp_path / "recipe.yaml", [word for word in commands[name][3:] if word != "--fresh"])
        assert written.recipe.optim.lr == 1e-5 and written.recipe.train.steps == (8 if name == "longer" else 4)


def test_an_adapter_is_served_beside_its_base_and_without_an_export_there_is_a_command(tmp_path: Path) -> None:
    plan = planned(tmp_path, adapter={"kind": "lora", "r": 32}, train__steps=None, train__epochs=3, name="mine")
    text = shown(plan, ["run", "r"])
    assert "vllm" not in text and "Python" not in text and f"export  fsdptrain export {plan.rundir.root}" in text
    assert "longer  fsdptrain run r train.epochs=6\n" in text
    plan.rundir.export.mkdir(parents=True)
    (plan.rundir.export / "adapter_config.json").touch()
    text, folder = shown(plan, ["run", "r"]), plan.rundir.export
    base = plan.recipe.model.id
    assert f"serve   vllm serve {base} --enable-lora --lora-modules mine={folder} --max-lora-rank 32\n" in text
    assert f"run r adapter.from={folder} data.path=MORE_DATA" in text
