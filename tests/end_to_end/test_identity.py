"""What a resume compares beside the recipe: the model's files, the clock of a template, and the held-out data."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import TINY, events, fsdptrain, on_ranks, python_path, write_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from fsdptrain.data.chat import PLAIN_CHAT_TEMPLATE
from fsdptrain.data.tokenizer import train_bpe

# What a person may have in PYTHONPATH: a clock that is a day ahead.
TOMORROW = """
import datetime
class Tomorrow(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(days=1)
datetime.datetime = Tomorrow
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps of a model in a folder whose template renders the date; return the recipe."""
    tmp = tmp_path_factory.mktemp("identity")
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp / "model")
    tokenizer = train_bpe(iter(["Today is the day: hello there, how are you?"]), 300)
    tokenizer.chat_template = "Today is {{ strftime_now('%d %b %Y') }}.\n" + PLAIN_CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp / "model")
    for name in ("talks", "held-out"):
        (tmp / f"{name}.jsonl").write_text("".join(talk(f"hello {number}") for number in range(8)))
    recipe = write_recipe(
        tmp, model={"id": str(tmp / "model")}, data__path=str(tmp / "talks.jsonl"), data__format="chat",
        data__eval={"path": str(tmp / "held-out.jsonl")}, train__steps=2, train__global_batch_size=2,
        launch__nproc_per_node=1,
    )  # fmt: skip
    done = fsdptrain("run", recipe, FSDPTRAIN_CACHE=str(tmp / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    return recipe


def talk(text: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]}) + "\n"


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(dict(sorted((json.loads(path.read_text()) | changes).items(), reverse=True))))


def test_another_architecture_in_the_files_of_the_model_is_refused(recipe: Path) -> None:
    config = recipe.parent / "model" / "config.json"
    before = config.read_bytes()
    rewrite(config, rms_norm_eps=1e-2, hidden_act="gelu")
    done = fsdptrain("run", recipe, "train.steps=3")
    config.write_bytes(before)
    assert done.returncode == 2, done.stdout
    assert "model.config.rms_norm_eps: was 1e-06 in the run to resume, is 0.01 now: restore it" in done.stderr
    assert "model.config.hidden_act: was 'silu' in the run to resume, is 'gelu' now: restore it" in done.stderr
    assert "name" in done.stderr and len(events(recipe.parent / "run", "start")) == 1


def test_a_finished_run_says_that_the_held_out_data_is_another(recipe: Path) -> None:
    held_out = recipe.parent / "held-out.jsonl"
    before = held_out.read_text()
    assert fsdptrain("run", recipe).returncode == 0
    held_out.write_text(before + talk("one more"))
    done = fsdptrain("run", recipe)
    held_out.write_text(before)
    assert done.returncode == 2 and "is finished (2 steps): nothing was trained or changed" in done.stderr, done.stderr
    assert "data.eval.content: " in done.stderr


def test_a_resume_on_another_day_trains_the_same_tokens_and_says_what_else_is_measured(
    recipe: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(recipe.parent / "run", tmp_path / "run"))
    rewrite(recipe.parent / "model" / "config.json", transformers_version="4.0", _name_or_path="moved", use_cache=False)
    (recipe.parent / "held-out.jsonl").write_text(talk("hello") * 6)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(TOMORROW)
    done = fsdptrain(
        "run", recipe, "train.steps=3", f"output_dir={folder}", FSDPTRAIN_CACHE=str(tmp_path / "cache"),
        PYTHONPATH=python_path(tmp_path / "clock"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    log = (folder / "logs" / "rank-0.log").read_text()
    today = datetime.datetime.fromtimestamp(events(folder, "start")[0]["at"])
    assert log.count(f"Today is {today:%d %b %Y}.") == 2, log
    (resume,) = events(folder, "resume")
    assert {*resume["changed"]} == {"output_dir", "train.steps", "data.eval.content"}
    assert "  data.eval.content: " in done.stdout and "the chat template renders today's date" in done.stdout


def test_a_rank_that_reads_another_file_is_named_with_the_key_of_the_file(tmp_path: Path) -> None:
    """As on two hosts with files of their own under one name: the tokenizer that is trained on them differs, too."""
    recipe = write_recipe(tmp_path, data__path="/proc/self/cwd/text.jsonl")
    rows = (tmp_path / "text.jsonl").read_text().splitlines(keepends=True)
    folders = []
    for rank in range(2):
        folders.append(str(tmp_path / f"host-{rank}"))
        Path(folders[-1]).mkdir()
        (Path(folders[-1]) / "text.jsonl").write_text("".join(rows[rank:]))
    (tmp_path / "run").mkdir()
    for found in on_ranks(2, "refusals", tmp_path / "ranks", recipe=str(recipe), variants={"": []}, folders=folders):
        assert found[""][0] == 4, found
        assert found[""][1].startswith("data.path: rank 1 read other data than rank 0 on "), found
