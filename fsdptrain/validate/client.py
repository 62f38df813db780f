"""A dry run, asked of a process of its own: `validate` is the other side.

No torch here: the person sees at once what is being done while that process imports it. A request goes there as one
JSON object; records of progress come back, a line each, and the outcome last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
from dataclasses import dataclass

from fsdptrain.config.hardware import Hardware, parse
from fsdptrain.config.plan import Plan, draft_plan
from fsdptrain.config.reader import LoadedRecipe
from fsdptrain.config.topology import find_topology, topology_of
from fsdptrain.errors import FsdptrainError, WorkerError, killed_by
from fsdptrain.processes import child_command, child_environment
from fsdptrain.screen import Screen
from fsdptrain.validate.findings import Outcome


@dataclass(frozen=True)
class Request:
    """What `validate` was asked on the command line. `problems` are those of the plan, which then is only a draft.

    `hardware` is None for the machine here; `price` is in dollars for one GPU and hour.
    """

    plan: Plan
    problems: list[str]
    notes: list[str]
    hardware: Hardware | None = None
    price: float | None = None
    plot: str | None = None
    advise: bool = False
    build: bool = True

    def to_json(self) -> str:
        """The request as JSON text."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        hardware = dataclasses.asdict(self.hardware) if self.hardware else None
        return json.dumps(fields | {"plan": self.plan.to_json(), "hardware": hardware})

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The request that `to_json` wrote."""
        fields = json.loads(text)
        if fields["hardware"]:
            fields["hardware"]["attention_share"] = tuple(fields["hardware"]["attention_share"])
            fields["hardware"] = Hardware(**fields["hardware"])
        return cls(**fields | {"plan": Plan.from_json(fields["plan"])})


def request(written: LoadedRecipe, hardware: str | None, trust_remote_code: bool) -> Request:
    """What there is to ask about a recipe, on the machine here or on the `hardware` named.

    Raises RecipeError for hardware that is not known or does not fill its nodes.
    """
    asked = parse(hardware) if hardware is not None else None
    if asked:
        topology = topology_of(written.recipe, asked.count, asked.hardware)
    else:  # the levels themselves say what is not here, all of it at once
        topology = find_topology(written.recipe, dict(os.environ), elsewhere=True)
    plan, problems = draft_plan(written, topology, elsewhere=True, trust_remote_code=trust_remote_code)
    notes = [asked.note] if asked and asked.note else []
    return Request(plan, [str(problem) for problem in problems], notes, asked.hardware if asked else None)


def ask(request: Request, screen: Screen) -> Outcome:
    """Make a dry run and show what is being done. Raises FsdptrainError when its process ends without an outcome."""
    process = subprocess.Popen(
        child_command("fsdptrain.validate.dry_run"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
        env=child_environment(), start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends it
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        with contextlib.ExitStack() as stage, contextlib.suppress(BrokenPipeError):
            stage.enter_context(_busy(screen, "starting"))
            with process.stdin:
                process.stdin.write(request.to_json())
            for record in map(json.loads, process.stdout):
                match record.pop("event"):
                    case "outcome":
                        return Outcome(**record)
                    case "busy":
                        stage.close()
                        stage.enter_context(_busy(screen, record["what"]))
                    case kind if screen.live:
                        stage.close()
                        screen.show({"event": kind, **record})
        process.wait()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if process.returncode < 0:
        raise WorkerError(f"the dry run was {killed_by(signal.Signals(-process.returncode).name)}")
    raise FsdptrainError(f"the dry run ended with exit code {process.returncode} and no result; its output is above")


def _busy(screen: Screen, what: str) -> contextlib.AbstractContextManager[None]:
    """Show what is being done; as a line on a terminal that can show no spinner."""
    if screen.console.is_terminal and not screen.live:
        screen.say(f"{what} …")
    return screen.busy(what)
