"""The shipped recipes that are planned for cards, and what was forecast for them: `forecast/shipped.json`.

`python tests/shipped.py` forecasts all of them again, in some ten minutes, and writes the file: run it after a change
that is meant to change forecasts, and read the difference. The comments of the recipes state the same figures.
"""

from __future__ import annotations

import json
import re
from typing import Any

from support import ROOT, TESTS

from fsdptrain.config.reader import load
from fsdptrain.forecast.forecaster import Forecaster
from fsdptrain.plan.hardware import Hardware, parse_hardware
from fsdptrain.plan.plan import Plan, draft_plan
from fsdptrain.plan.topology import topology_of

RECIPES = ROOT / "recipes"
FILE = TESTS / "forecast" / "shipped.json"
KEPT = (
    "peak_bytes",
    "reserved_bytes",
    "host_bytes",
    "moment",
    "breakdown",
    "flops",
    "step_s",
    "step_s_range",
    "method",
)

COMMANDS = [  # in the comments of the recipes
    found[1]
    for path in sorted(RECIPES.glob("*.yaml"))
    for found in re.finditer(r"^# +fsdptrain validate (\S+ --hardware .*)$", path.read_text(), re.MULTILINE)
]
TWO_LAYERS = " model.config.num_hidden_layers=2"
# Of every strategy one, and quantised and offloaded weights: a few seconds each.
SHALLOW = [
    command + TWO_LAYERS
    for command in COMMANDS
    if re.search("llama3.1-8b-(full|128k)|13b-shard-grad-op|7b-no-shard|hybrid|cpu_offload", command)
]


def planned(command: str) -> tuple[Plan, Hardware]:
    """Return the plan of a command, and the card that it names."""
    name, _, card, *overrides = command.split()
    recipe, target = load(RECIPES / f"{name}.yaml", overrides), parse_hardware(card)
    topology = topology_of(recipe.recipe, target.count, target.hardware)
    return draft_plan(recipe, topology, elsewhere=True)[0], target.hardware


def forecast(command: str, forecaster: Forecaster) -> dict[str, Any]:
    found = forecaster.forecast(*planned(command))
    sent = {f"{each['kind']} over {each['ranks']}": each["wire"] for each in found.collectives}
    return {name: getattr(found, name) for name in KEPT} | {"sent": sent}


def stored() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def main() -> None:
    with Forecaster() as forecaster:
        found = [
            f"{json.dumps(command)}: {json.dumps(forecast(command, forecaster))}" for command in COMMANDS + SHALLOW
        ]
    FILE.write_text("{\n" + ",\n".join(found) + "\n}\n")


if __name__ == "__main__":
    main()
