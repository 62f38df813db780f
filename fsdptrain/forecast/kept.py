"""Forecasts on disk: one of the same plan, model, hardware and versions is not made again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdptrain
from fsdptrain.config.schema import Recipe
from fsdptrain.data.cache import cache_dir, key_digest
from fsdptrain.errors import RecipeError
from fsdptrain.forecast.forecaster import Forecast
from fsdptrain.plan.hardware import Hardware
from fsdptrain.plan.plan import Plan
from fsdptrain.run_folder.files import write_atomically


def kept_or_made(plan: Plan, model: dict[str, Any], hardware: Hardware, make: Callable[[Plan], Forecast]) -> Forecast:
    """Return the forecast that is kept for a plan, a model's configuration and the hardware, else what `make` returns.

    `make` gets only what the forecast is kept by. On a CPU, whose rates are measured, and for a model with code of its
    own, each forecast is made.
    """
    if hardware.is_cpu or plan.trust_remote_code:
        return make(plan)
    plan = part_that_costs(plan)
    key = [plan.to_json(), model, dataclasses.asdict(hardware), _own_code()]
    try:
        file = cache_dir("forecasts") / f"{key_digest(key)}.json"
    except RecipeError:  # not writable: a forecast needs no cache
        return make(plan)
    with contextlib.suppress(OSError, ValueError, TypeError):  # missing, or damaged
        forecast = Forecast(**json.loads(file.read_bytes()))
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))
        forecast.notes.append(f"the forecast is one of {made}, kept in the cache: same plan, hardware and versions")
        return forecast
    forecast = make(plan)
    with contextlib.suppress(OSError):
        write_atomically(file, json.dumps(dataclasses.asdict(forecast)))
    return forecast


def part_that_costs(plan: Plan) -> Plan:
    """Return a plan without all that changes neither the memory nor the time of a step."""
    default, recipe = Recipe(), plan.recipe
    data = dataclasses.replace(
        default.data, format=recipe.data.format, packing=recipe.data.packing, seq_len=recipe.data.seq_len
    )
    recipe = dataclasses.replace(  # what is not named here counts, new sections included
        recipe, name=default.name, seed=default.seed, output_dir=default.output_dir, data=data,
        schedule=default.schedule, eval=default.eval, checkpoint=default.checkpoint, log=default.log,
        launch=default.launch, optim=dataclasses.replace(recipe.optim, lr=default.optim.lr),
        train=dataclasses.replace(recipe.train, epochs=default.train.epochs, steps=default.train.steps),
    )  # fmt: skip
    return dataclasses.replace(plan, recipe=recipe, run_dir="", data_paths=[], eval_path=None)


def _own_code() -> str:
    """Return a digest of this package's code: a forecast of other code may be another."""
    files = sorted(Path(fsdptrain.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
