"""A first recipe: its sizes chosen from the data in a dry run, and on GPUs its plan by a search.

This module imports no torch: the dry run is a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdptrain.config.reader import LoadedRecipe, parse
from fsdptrain.terminal.page import Page
from fsdptrain.terminal.screen import Screen
from fsdptrain.text import counted, duration, seconds, size
from fsdptrain.validation.findings import Outcome, show_notes, show_section
from fsdptrain.validation.request import make_request, run_dry_run

if TYPE_CHECKING:
    from fsdptrain.validation.init_recipe import Starter


@dataclass(frozen=True)
class Proposal:
    """The text of a recipe, None if the data or the model cannot be used, and the dry run that it comes from."""

    text: str | None
    forecast: list[str]
    outcome: Outcome


def propose(starter: Starter, hardware: str | None, screen: Screen) -> Proposal:
    """Return a recipe for all rows of the data, and for the GPUs of this machine or `hardware` the fastest plan.

    Raises RecipeError for unknown hardware.
    """
    topology = make_request(_parsed(starter, starter.text({})), hardware).plan.topology
    on_gpus, written = topology.device == "cuda", starter.text({"train.global_batch_size": topology.world_size})
    request = make_request(_parsed(starter, written), hardware, choose=True, build=on_gpus, advise=on_gpus)
    outcome = run_dry_run(request, screen)
    chosen = outcome.report.get("chosen")
    if chosen is None:
        return Proposal(None, [], outcome)
    found = outcome.report.get("advice", {}).get("options", [])
    best = next((option for option in found if option["fits"]), None)
    if best is None:
        text = starter.text(chosen)
        return Proposal(_parsed(starter, text).text, [], outcome)
    forecast = _forecast_lines(best, outcome, hardware or "the GPUs of this machine")
    text = starter.text(chosen | best["overrides"], forecast)
    return Proposal(_parsed(starter, text).text, forecast, outcome)


def _parsed(starter: Starter, text: str) -> LoadedRecipe:
    return parse(text, starter.dest.name, starter.dest.parent.absolute(), [])


def _forecast_lines(best: dict[str, Any], outcome: Outcome, hardware: str) -> list[str]:
    """Return what the search found, for a comment and for the screen."""
    tried = counted(outcome.report["advice"]["tried"] + 1, "plan")
    lines = [
        f"the fastest of {tried} for {hardware}, by forecast: {size(best['needed_bytes'])} of "
        f"{size(best['memory_bytes'])} a GPU, {seconds(best['step_s'])} s a step, MFU {best['mfu']:.0%}"
    ]
    rows = outcome.report.get("data", {})
    if "steps" in rows and rows["rows"] == rows["available"]:  # else the steps are those of a part of the data
        lines.append(f"{counted(rows['steps'], 'step')} take about {duration(rows['steps'] * best['step_s'])}")
    return lines


def show_proposal(proposal: Proposal, page: Page) -> None:
    """Print what the data is, how the plan was chosen, and notes."""
    outcome = proposal.outcome
    for heading, items in outcome.sections:
        if heading == "Data":
            show_section(heading, items, page)
    if proposal.forecast:
        show_section("Plan", [{"kind": "text", "text": line} for line in proposal.forecast], page)
    show_notes([*(note for note in outcome.notes if not note.startswith("not checked here")), *outcome.problems], page)
