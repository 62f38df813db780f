"""The comments of the shipped recipes: their counts, products and forecasts are those of the tool."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from shipped import COMMANDS, RECIPES, stored
from support import ROOT

from fsdptrain.config.optimizers import NF4_BYTES
from fsdptrain.config.reader import load
from fsdptrain.data.prepare import prepare
from fsdptrain.data.tokenizer import load_tokenizer
from fsdptrain.model.adapters import freeze, quantised_ids
from fsdptrain.model.config import load_config
from fsdptrain.model.skeleton import skeleton
from fsdptrain.model.units import weights_of
from fsdptrain.plan.hardware import parse_hardware
from fsdptrain.plan.plan import Counts, Plan, draft_plan
from fsdptrain.plan.topology import topology_of
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
        r"of ({}) layers": config.num_hidden_layers,
        r"({}) of them in NF4": counts.quantised,
        r"0.516 B × [\d.]+e9 / 8 = ({}) GiB": round(NF4_BYTES * counts.quantised / 8 / GIB, 1),
        r"other ([\d.]+)e9": round((base - counts.quantised) / 1e9, 2),
    }
    for words, value in others.items():
        assert [float(found.replace(",", "")) for found in re.findall(words.format(NUMBER), text)] in ([], [value])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_stated_figures_are_those_of_the_stored_forecast(command: str) -> None:
    found, text = stored()[command], comment(RECIPES / f"{command.split()[0]}.yaml")
    if "cpu_offload" in command:  # of qlora on two small cards
        assert stated(text, "cards of 24 GB: ", " GiB at the peak") == round(found["peak_bytes"] / GIB, 1)
        assert stated(text, "peak, ", " reserved") == round(found["reserved_bytes"] / GIB, 1)
        assert stated(text, "reserved, ", " GiB of host") == round(found["host_bytes"] / GIB, 1)
        assert stated(text, "a rank, ", " s a step") == float(f"{found['step_s']:.3g}")
        return
    assert stated(text, "Peak: ", " GiB allocated") == round(found["peak_bytes"] / GIB, 1)
    assert stated(text, "allocated, ", "(?: wanted)? with") == round(found["reserved_bytes"] / GIB, 1)
    assert stated(text, "tokens takes ", " s") == float(f"{found['step_s']:.3g}")
    low, high = re.search(r" s \(([\d.]+) to ([\d.]+)\)", text).groups()  # type: ignore[union-attr]
    assert [float(low), float(high)] == [float(f"{each:.3g}") for each in found["step_s_range"]]


def test_the_figures_of_the_small_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    toy = ROOT / "recipes" / "toy-200m.yaml"
    made = skeleton(load_config(planned(toy), None), planned(toy).recipe.model)
    assert stated(comment(toy), "", " parameters") == sum(p.numel() for p in made.parameters())

    tokenizer.save_pretrained(tmp_path)
    text, everything = comment(maths), [f"model.id={tmp_path}", "data.max_rows=null"]
    lengths = prepare(planned(maths, *everything), tokenizer, quiet)[0].corpus.lengths
    assert round(float(lengths.mean())) == stated(text, "answer is ", " tokens on average")
    assert round(100 * float((lengths > 256).mean())) == stated(text, "average and ", "% of them")
    assert round(100 * float((lengths > 512).mean()), 1) == stated(text, "only ", "% are cut")
    sequences = len(prepare(planned(maths, *everything[:1]), tokenizer, quiet)[0])
    assert math.isclose(stated(text, "fill about ", " sequences"), sequences, rel_tol=0.01)
    assert math.isclose(stated(text, "some ", " steps of 16"), sequences / 16, rel_tol=0.05)
