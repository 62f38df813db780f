"""Ask for a dry run, which a child process makes (`main`), or for a look at the nodes (`check_here`); show progress.

This module imports no torch, so that progress is shown while the child imports it. The child gets the request, and
answers with records of progress and the outcome last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptrain.config.reader import COMMAND_LINE, LoadedRecipe
from fsdptrain.errors import FsdptrainError, Problem, RecipeError, Stopped, WorkerError
from fsdptrain.forecast.forecaster import Forecaster
from fsdptrain.launch.launcher import Attempt
from fsdptrain.plan.gpus import untested_versions
from fsdptrain.plan.hardware import Hardware, parse_hardware
from fsdptrain.plan.network import address_of, is_loopback
from fsdptrain.plan.plan import ONLY_TEACHER, Plan, draft_plan
from fsdptrain.plan.topology import check_endpoint, find_topology, host_of, topology_of
from fsdptrain.processes import Child, StopRequest, answer_parent, import_and_freeze, records_of_parent
from fsdptrain.report.run_banner import nodes_allowed
from fsdptrain.terminal.screen import Screen
from fsdptrain.validation.findings import Outcome

MOST_FORECASTERS, CORES_OF_FORECASTER = 4, 2  # of a search; there are two at least


@dataclass(frozen=True)
class Request:
    """The plan and the options of a `validate` command. With `problems`, the plan is only a draft.

    `hardware` is None for this machine; `price` is in dollars per GPU and hour.
    """

    plan: Plan
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hardware: Hardware | None = None
    price: float | None = None
    plot: str | None = None
    advise: bool = False
    build: bool = True
    choose: bool = False  # sizes of a first recipe, from its data

    def to_record(self) -> dict[str, Any]:
        """Return the request as JSON values."""
        hardware = dataclasses.asdict(self.hardware) if self.hardware else None
        return vars(self) | {"plan": self.plan.to_json(), "hardware": hardware}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Request:
        """Return the request that `to_record` described."""
        hardware = Hardware(**record["hardware"]) if record["hardware"] else None
        return cls(**record | {"plan": Plan.from_json(record["plan"]), "hardware": hardware})


def make_request(
    loaded: LoadedRecipe,
    hardware: str | None,
    trust_remote_code: bool = False,
    price: float | None = None,
    **options: Any,
) -> Request:
    """Return the request to validate a recipe, on this machine or on the given `hardware`, with fields of Request.

    Raise RecipeError for hardware that is unknown, if the GPUs do not fill the nodes, or for a price without GPUs.
    """
    target = parse_hardware(hardware) if hardware is not None else None
    if target:
        overridden = {path for path, where in loaded.where.items() if where == COMMAND_LINE}
        topology = topology_of(loaded.recipe, target.cards, target.hardware, overridden)
    else:  # `elsewhere`, because the levels report everything that this machine lacks
        topology = find_topology(loaded.recipe, os.environ, elsewhere=True, explicit=loaded.where)
    if price is not None and topology.device == "cpu":
        raise RecipeError("--price-per-gpu-hour: this plan has no GPUs; choose some with --hardware")
    if price is not None and price < 0:
        raise RecipeError(f"--price-per-gpu-hour: {price:g} is negative")
    plan, problems = draft_plan(loaded, topology, elsewhere=True, trust_remote_code=trust_remote_code)
    notes = untested_versions()
    of_file = loaded.where.get("model.config") not in (None, COMMAND_LINE)
    if loaded.where.get("model.id") == COMMAND_LINE and of_file and "model_type" in loaded.recipe.model.config:
        notes.insert(0, "model.config is that of the recipe's own model: for another model.id, add model.config={}")
    if target and target.note:
        notes.insert(0, target.note)
    return Request(plan, [*map(str, problems)], notes, target.hardware if target else None, price, **options)


def run_dry_run(request: Request, screen: Screen) -> Outcome:
    """Run a dry run in a child process and show its progress. Raise FsdptrainError if it ends without an outcome."""
    with Child(__name__) as child:
        with contextlib.ExitStack() as stage:
            stage.enter_context(_busy(screen, "starting"))
            child.send(request.to_record())
            for record in child.records():
                match record.pop("event"):
                    case "outcome":
                        return Outcome(**record)
                    case "busy":
                        stage.close()
                        stage.enter_context(_busy(screen, record["what"]))
                    case kind if screen.live:
                        stage.close()
                        screen.show({"event": kind, **record})
        if child.killed:
            raise WorkerError(f"the dry run was {child.killed}")
        raise FsdptrainError(f"the dry run ended with exit code {child.code} and no result; see its output above")


def main() -> None:
    """Answer the request of the parent with records of progress, and the outcome last.

    The processes that forecast start to import before this one imports torch: each takes seconds.
    """
    send = answer_parent()
    request = Request.from_record(next(records_of_parent()))
    of_search = max(2, min(MOST_FORECASTERS, (os.cpu_count() or 1) // CORES_OF_FORECASTER))
    count = 0 if not request.build else of_search if request.advise else 1
    with contextlib.ExitStack() as stack:
        forecasters = [stack.enter_context(Forecaster()) for _ in range(count)]
        import_and_freeze("fsdptrain.validation.dry_run").answer(request, forecasters, send)


REQUEST, OUTCOME = "request.json", "outcome.json"  # what `check_here` gives to the workers and gets from them


def check_here(request: Request, screen: Screen) -> Outcome:
    """Start the workers as a run does, and return what they found out about the nodes. The run folder is not touched.

    Raises RecipeError if the nodes cannot meet, Stopped after a stop signal, and WorkerError if the workers fail.
    """
    topology = request.plan.topology
    check_endpoint(topology)
    if topology.endpoint:
        # A name of another machine that leads to this one would let them wait for each other.
        host, own = host_of(topology.endpoint), {"localhost", socket.gethostname().partition(".")[0]}
        address = address_of(host)
        if address and is_loopback(address) and host != address and host.partition(".")[0] not in own:
            raise RecipeError(
                f"launch.rdzv_endpoint: {host} resolves to {address} on {socket.gethostname()}, which is this machine "
                f"itself: give {host} its own address in /etc/hosts, or use the address instead of the name"
            )
    if topology.nnodes == 1 and request.problems:  # no other node waits for this one
        raise RecipeError([Problem(problem) for problem in request.problems])
    # torchrun's agents meet under the name of the recipe, which may differ between the nodes.
    recipe = dataclasses.replace(request.plan.recipe, name="fsdptrain-validate")
    with _in_scratch_folder(dataclasses.replace(request.plan, recipe=recipe)) as plan, StopRequest() as stop:
        scratch, log = plan.rundir.root, plan.rundir.launcher_log
        (scratch / REQUEST).write_text(json.dumps(request.to_record()), encoding="utf-8")
        try:
            Attempt(plan, screen, stop, worker="check").run()
        except WorkerError:
            if log.exists() and "elastic.rendezvous.api.Rendezvous" in log.read_text(encoding="utf-8"):
                raise WorkerError(
                    f"the {nodes_allowed(plan)} nodes did not meet at {topology.meeting_place}: start the same command "
                    "on each, and check that the address leads to the first from all others (name, firewall); log: "
                    f"{log}"
                ) from None
            raise
        if stop.count:
            raise Stopped(f"stopped by {stop.by}; nothing was changed")
        return Outcome(**json.loads((scratch / OUTCOME).read_text(encoding="utf-8")))


@contextlib.contextmanager
def _in_scratch_folder(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with a run folder that is removed afterwards, except where an error names a log in it."""
    folder, named = Path(tempfile.mkdtemp(prefix="fsdptrain-")), False
    plan = dataclasses.replace(plan, run_dir=str(folder))
    plan.rundir.logs.mkdir()
    plan.rundir.plan.write_text(plan.to_json(), encoding="utf-8")
    try:
        yield plan
    except BaseException as error:
        named = str(folder) in str(error)
        raise
    finally:
        if not named:
            shutil.rmtree(folder, ignore_errors=True)


def ask_teacher(plan: Plan, screen: Screen) -> None:
    """Start workers that fill the cache with the outputs of the teacher, with a scratch folder as their run folder."""
    with _in_scratch_folder(plan) as plan, StopRequest() as stop:
        Attempt(plan, screen, stop, settings={ONLY_TEACHER: "1"}).run()


def _busy(screen: Screen, what: str) -> contextlib.AbstractContextManager[None]:
    """Show what the dry run does: a spinner, or a line on a terminal that cannot show one."""
    if screen.console.is_terminal and not screen.live:
        screen.say(f"{what} …")
    return screen.busy(what)
