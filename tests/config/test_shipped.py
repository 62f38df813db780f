"""The comments of the shipped recipes: their counts, products and forecasts are those of the tool."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from support import ROOT, fsdptrain

from fsdptrain.config.dtypes import NF4_BYTES
from fsdptrain.config.hardware import parse_hardware
from fsdptrain.config.plan import Counts, Plan, draft_plan
from fsdptrain.config.reader import load
from fsdptrain.config.topology import topology_of
from fsdptrain.data.corpus import prepare
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.forecast import closed_form
from fsdptrain.model.adapter import freeze, quantised_ids
from fsdptrain.model.config import load_config
from fsdptrain.model.parameters import weights_of
from fsdptrain.model.skeleton import skeleton
from fsdptrain.text import size

GIB = 2**30
LARGE = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if "--hardware" in path.read_text())
NUMBER = r"[0-9][0-9,.]*[0-9]|[0-9]"


def comment(path: Path) -> str:
    """Return the comment at the head of a recipe, as one line."""
    lines = path.read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in lines[: next(i for i, line in enumerate(lines) if not line)])


def stated(text: str, before: str, behind: str) -> float:
    """Return the only number between these words."""
    [found] = re.findall(f"{before}({NUMBER}){behind}", text)
    return float(found.replace(",", ""))


def planned(path: Path, *overrides: str) -> Plan:
    recipe = load(path, list(overrides))
    hardware = "cpu" if path not in LARGE else re.search(r"--hardware (\S+)", path.read_text())[1]  # type: ignore[index]
    return draft_plan(recipe, topology_of(recipe.recipe, None, parse_hardware(hardware).hardware), elsewhere=True)[0]


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_counts_and_products(path: Path) -> None:
    text, plan = comment(path), planned(path)
    model = skeleton(load_config(plan, None), plan.recipe.model)
    parameters = sum(p.numel() for p in model.parameters())
    assert stated(text, "Parameters: ", ",? counted") == parameters
    for width, billions, ranks, gib in re.findall(r"\b(?<!\.)(\d+) B × ([\d.]+)e9 / (\d+) = ([\d.]+) GiB", text):
        assert float(billions) == round(parameters / 1e9, len(billions.partition(".")[2]))
        assert float(gib) == round(int(width) * parameters / int(ranks) / GIB, 1)


# It is for Llama's architecture, with all weights trained.
CLOSED = [path for path in LARGE if "qwen" not in path.stem and "lora" not in path.stem]


@pytest.mark.parametrize("path", CLOSED, ids=lambda path: path.stem)
def test_the_stated_peak_is_that_of_the_closed_form(path: Path) -> None:
    plan = planned(path)
    peak = closed_form.peak_by_arithmetic(plan, load_config(plan, None)).allocated / GIB
    assert math.isclose(stated(comment(path), "Peak: ", " GiB allocated"), peak, rel_tol=0.05)


@pytest.mark.parametrize("path", [path for path in LARGE if "lora" in path.stem], ids=lambda path: path.stem)
def test_the_figures_of_adapters(path: Path) -> None:
    text, plan = comment(path), planned(path)
    config = load_config(plan, None)
    recipe = plan.recipe
    model = freeze(skeleton(config, recipe.model, recipe.fsdp.mixed_precision.param_dtype), recipe)
    weights = weights_of(model, quantised_ids(model, recipe)).values()
    counts = Counts.of(weights)
    assert stated(text, "and ", " of the adapters") == counts.adapters == counts.trained
    assert f"of rank {recipe.adapter.r} on all linear layers" in text and recipe.adapter.target == "all-linear"
    assert f"A step of {recipe.train.global_batch_size} × {recipe.data.seq_len:,} tokens" in text
    assert f"only: {size(plan.state_bytes(weights))}".replace(".0 ", " ") in text, "a checkpoint"
    card = parse_hardware(re.search(r"--hardware (\S+)", text)[1]).hardware  # type: ignore[index]
    assert stated(text, r"\(about ", " GiB") == pytest.approx(card.memory / GIB, abs=0.11)
    base = counts.all - counts.adapters
    others = {  # of the words that not every recipe has
        r"for them is ({}) GiB": round(16 * counts.adapters / GIB, 1),
        r"instead of ({})": round(12 * base / GIB),
        r"of ({}) blocks": config.num_hidden_layers,
        r"({}) of them in NF4": counts.quantised,
        r"0.516 B × [\d.]+e9 / 8 = ({}) GiB": round(NF4_BYTES * counts.quantised / 8 / GIB, 1),
        r"other ([\d.]+)e9": round((base - counts.quantised) / 1e9, 2),
    }
    for words, value in others.items():
        assert [float(found.replace(",", "")) for found in re.findall(words.format(NUMBER), text)] in ([], [value])


@pytest.mark.soak
def test_the_stated_forecast_of_qlora_on_two_small_cards() -> None:
    path = ROOT / "recipes" / "llama3.3-70b-qlora.yaml"
    words = re.search(r"--hardware (2x.*)", path.read_text())[1].split()  # type: ignore[index]
    found = json.loads(fsdptrain("validate", path, "--hardware", *words, "--json", timeout=600).stdout)
    text = comment(path)
    assert math.isclose(stated(text, "cards of 24 GB: ", " GiB at the peak"), found["peak_bytes"] / GIB, rel_tol=0.01)
    assert math.isclose(stated(text, "peak, ", " reserved"), found["reserved_bytes"] / GIB, rel_tol=0.02)
    assert math.isclose(stated(text, "reserved, ", " GiB of host"), found["host_bytes"] / GIB, rel_tol=0.01)
    assert math.isclose(stated(text, "a rank, ", " s a step"), found["step_s"], rel_tol=0.03)


@pytest.mark.soak
@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_the_stated_forecast_is_that_of_validate(path: Path) -> None:
    text = comment(path)
    hardware = re.search(r"--hardware (\S+)", text)[1]  # type: ignore[index]
    found = json.loads(fsdptrain("validate", path, "--hardware", hardware, "--json", timeout=600).stdout)
    # The varlen kernel of torch 2.11 takes keys and values for every head: it saves more.
    memory = 0.01 if torch.__version__ >= (2, 13) else 0.06
    assert math.isclose(stated(text, "Peak: ", " GiB allocated"), found["peak_bytes"] / GIB, rel_tol=memory)
    assert math.isclose(stated(text, "allocated, ", "(?: wanted)? with"), found["reserved_bytes"] / GIB, rel_tol=memory)
    assert math.isclose(stated(text, "tokens takes ", " s"), found["step_s"], rel_tol=0.01)
    low, high = map(float, re.search(r" s \(([\d.]+) to ([\d.]+)\)", text).groups())  # type: ignore[union-attr]
    assert [low, high] == pytest.approx(found["step_s_range"], rel=0.02)  # of two digits


def test_the_figures_of_the_two_small_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "recipes")
    quiet = lambda *_: None  # noqa: E731
    small, maths = ROOT / "recipes" / "shakespeare.yaml", ROOT / "recipes" / "gsm8k-sft.yaml"
    text, plan = comment(small), planned(small)
    tokenizer = load_tokenizer(plan, quiet)
    model = skeleton(load_config(plan, len(tokenizer)), plan.recipe.model)
    assert stated(text, "", " parameters") == sum(p.numel() for p in model.parameters())
    stream, _, corpus = prepare(plan, tokenizer, quiet)
    assert math.isclose(stated(text, "about ", " tokens, so"), len(corpus.tokens), rel_tol=0.005)
    assert round(plan.recipe.train.steps / (len(stream) / 4)) == 2, "some two passes"  # type: ignore[operator]

    tokenizer.save_pretrained(tmp_path)
    text, everything = comment(maths), [f"model.id={tmp_path}", "data.max_rows=null"]
    lengths = prepare(planned(maths, *everything), tokenizer, quiet)[0].corpus.lengths
    assert round(float(lengths.mean())) == stated(text, "answer is ", " tokens on average")
    assert round(100 * float((lengths > 256).mean())) == stated(text, "average and ", "% of them")
    assert round(100 * float((lengths > 512).mean()), 1) == stated(text, "only ", "% are cut")
    sequences = len(prepare(planned(maths, *everything[:1]), tokenizer, quiet)[0])
    assert math.isclose(stated(text, "fill about ", " sequences"), sequences, rel_tol=0.01)
    assert math.isclose(stated(text, "some ", " steps of 16"), sequences / 16, rel_tol=0.05)
