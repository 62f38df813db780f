"""The command line: read a recipe, plan, launch, show. It imports torch only in a worker under torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.metadata import version  # reads one file per package; importing torch takes seconds
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args, get_type_hints

import typer

from fsdptrain.errors import (
    CheckpointError,
    FolderLost,
    FsdptrainError,
    OutOfMemory,
    RecipeError,
    Stopped,
    StorageError,
    disk_full_error,
    first_line,
    is_disk_full,
    is_panic,
)
from fsdptrain.processes import (
    PROGRAM,
    Interrupted,
    StopRequest,
    exit_after_printing,
    interrupt,
    open_safe_streams,
    threads_for,
    watch_parent,
)
from fsdptrain.run_folder.files import is_there, nearest_hint, shipped, system_reason, write_atomically, write_errors
from fsdptrain.run_folder.records import json_safe
from fsdptrain.run_folder.rundir import RunDir
from fsdptrain.run_folder.storage import EXISTS_ALREADY, LIKE_A_URL
from fsdptrain.text import wrapped_for

if TYPE_CHECKING:
    from fsdptrain.checkpoint.resume import EarlierAttempts
    from fsdptrain.config.reader import LoadedRecipe
    from fsdptrain.inference.opened import OpenedModel
    from fsdptrain.plan.plan import Plan
    from fsdptrain.terminal.screen import Screen
    from fsdptrain.validation.findings import Outcome
    from fsdptrain.validation.request import Request


COMMANDS = {  # as the help lists them
    "A first run": ("init", "validate", "run", "recipes"),
    "What a run made": ("status", "report", "eval", "chat", "export", "verify"),
    "Large data and clusters": ("prepare", "submit", "schema"),
}


class GroupedCommands(typer.core.TyperGroup):
    """The commands in groups, before the options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of commands and options."""
        for title, names in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit=80)) for name in names])
        super().format_options(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write no second list of the commands."""


class WithOverrides(typer.core.TyperCommand):
    """A command that takes keys of the recipe, which other tools take as options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; the error of an unknown option says how a key is written."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # of an unknown option
                error.message += "; a key of the recipe is written KEY=VALUE, such as train.steps=20"  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    cls=GroupedCommands,
    epilog="Pages for all of this: docs/index.md in the repository.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

recipes_app = typer.Typer(help="List, show or copy the shipped recipes.", invoke_without_command=True)
app.add_typer(recipes_app, name="recipes")


def option(metavar: str, says: str, *names: str, **limits: Any) -> Any:
    """Return an option with a value, which its help calls `metavar`."""
    return typer.Option(*names, metavar=metavar, help=says, **limits)


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")]

Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output")]
TRUST = "run Python code shipped with the model; a Hub id needs a full commit as model.revision"
Trust = Annotated[bool, typer.Option("--trust-remote-code", help=TRUST)]

RunDirArgument = Annotated[str, typer.Argument(metavar="RUN_DIR", help="a run folder")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="RUN_OR_FOLDER", help="a run (its export, or else its newest checkpoint), or a model")
]
StepOption = Annotated[int | None, option("N", "the checkpoint of this step of a run")]
SourceOption = Annotated[str | None, option("NAME", "of a run on several sources: the one as whose rows they are read")]
DATA = option("DATA", "file, glob, folder or URL, also several times; or a Hub data set")
DtypeOption = Annotated[str | None, option("DTYPE", "of the computation; default: float32 on a CPU, else the run's")]
CLUSTERS = "clusters"  # the folder of files for clusters and clouds, beside the shipped recipes
WATCH_S = 10  # between two pages of `report --watch`
WIDE = 111  # columns of a terminal on which names and what they are stand side by side
ShippedName = Annotated[str, typer.Argument(metavar="NAME", help="the name of a shipped recipe")]

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="recipe keys to override, such as optim.lr=1e-5")
]


def _print_version(requested: bool) -> None:
    if requested:
        parts = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        text = f"fsdptrain {version('fsdptrain')} ({parts}, Python {sys.version.split()[0]})"
        print(wrapped_for(text, sys.stdout))
        raise typer.Exit


@app.callback()
def options(
    versions: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the versions and exit")
    ] = False,
) -> None:
    """Train and fine-tune causal language models with FSDP2: one recipe, one command, a Hugging Face folder."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by `__main__`; from here on `main` handles Ctrl-C
        signal.signal(signal.SIGINT, interrupt)


def main() -> None:
    """Run the `fsdptrain` command; print an FsdptrainError as one message and exit with its code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # this process is a worker that torchrun started
        watch_parent(os.getppid())
    if program := os.environ.pop(PROGRAM, ""):
        watch_parent(int(program), signal.SIGTERM)  # a run saves a checkpoint first
    if "OMP_THREAD_LIMIT" in os.environ:  # torch, which is not imported yet, would start a thread for each core
        os.environ["OMP_NUM_THREADS"] = str(threads_for(len(os.sched_getaffinity(0))))
    open_safe_streams()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would cross those of this command
    try:
        with _os_errors_as_fsdptrain_errors():
            app()
    except (FsdptrainError, Interrupted) as error:
        stopped = Stopped("stopped by Ctrl-C; run the same command again")
        failure = error if isinstance(error, FsdptrainError) else stopped
        _print_error(failure)
        sys.exit(failure.exit_code)
    except SystemExit as stop:
        if stop.code or sys.argv[1:2] == ["run"]:  # the result of a run is its folder, not what it prints
            raise
        exit_after_printing(0)


def _print_error(error: FsdptrainError) -> None:
    problems = error.problems if isinstance(error, RecipeError) else [error]
    _print_problems(problems, getattr(error, "__notes__", []))


def _print_problems(problems: Sequence[object], notes: Sequence[str] = ()) -> None:
    """Print problems on standard error: one behind the name of the command, several below it."""
    lines = [f"{_own_name()}: {len(problems)} problems", *(f"  {problem}" for problem in problems)]
    lines = lines if len(problems) > 1 else [f"{_own_name()}: {problems[0]}"]
    print(wrapped_for("\n".join([*lines, *notes]), sys.stderr), file=sys.stderr)


def _next_command(*words: object) -> str:
    """Return the line that names the next command, as a shell reads it."""
    return f"next: {shlex.join(['fsdptrain', *map(str, words)])}"


def _print_json(value: object) -> None:
    print(json.dumps(json_safe(value), indent=2).replace("\x7f", "\\u007f"))  # the only control character in it


def _own_name() -> str:
    """Return `fsdptrain`; `fsdptrain on HOST` if a launcher has started the command on several, with one output."""
    from fsdptrain.plan.launchers import find_launcher

    with contextlib.suppress(RecipeError):  # of variables that contradict each other
        launched = find_launcher(os.environ)
        if launched and launched.nnodes > 1:
            return f"fsdptrain on {socket.gethostname()}"
    return "fsdptrain"


@contextlib.contextmanager
def _os_errors_as_fsdptrain_errors() -> Iterator[None]:
    """Convert errors of the operating system to FsdptrainErrors with a way out."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise RecipeError(
            f"{error.object[:200]!r} cannot be a file name in this locale ({error.encoding}): set LC_ALL=C.UTF-8"
        ) from None
    except BaseException as error:
        if is_disk_full(error):  # of the system, or of a library in Rust
            raise disk_full_error(error) from None
        if is_panic(error):
            raise FsdptrainError(f"internal error: a library failed: {first_line(error)} (please report it)") from error
        if not isinstance(error, OSError):
            raise
        if error.errno is None:  # of a library
            raise FsdptrainError(first_line(error)) from error
        reason = system_reason(error)
        raise StorageError(f"{error.filename}: {reason}" if error.filename else reason) from error


@contextlib.contextmanager
def _errors_recorded(rundir: RunDir) -> Iterator[None]:
    """Write an error as an event, and the traceback of an unexpected one, which is raised as an FsdptrainError."""
    from fsdptrain.run_folder.events import record_error

    try:
        with _os_errors_as_fsdptrain_errors():
            yield
    except FsdptrainError as error:
        if not isinstance(error, (Stopped, FolderLost)):  # the workers have written that they stopped
            with contextlib.suppress(OSError):
                record_error(rundir, error)
        raise
    except Exception as error:
        record = rundir.logs / "defect.txt"
        write_atomically(record, traceback.format_exc())
        raise FsdptrainError(f"internal error: {error!r} (please report it; traceback: {record})") from error


@app.command(cls=WithOverrides, epilog="Example: fsdptrain run shakespeare train.steps=20")
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="never resume; refuse a folder that holds a run")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Train a model, or resume its run. The run folder is output_dir."""
    written = None
    with contextlib.ExitStack() as stack:
        try:
            with _os_errors_as_fsdptrain_errors():
                written = find_recipe(recipe, overrides)  # before the imports: a wrong recipe is refused at once
                from fsdptrain.launch.run_lock import claim_run_dir

                plan = _plan_here(written, trust_remote_code)
                earlier = stack.enter_context(claim_run_dir(plan, written.text, fresh))
        except FsdptrainError as error:
            _print_error(error)
            from fsdptrain.failures.notify_nodes import tell_other_nodes

            tell_other_nodes(error, written.recipe if written else None)
            sys.exit(error.exit_code)
        from fsdptrain.forecast.forecaster import Forecaster, compare_with_measured
        from fsdptrain.forecast.search import relief_lines
        from fsdptrain.launch.launcher import launch, worker_settings
        from fsdptrain.plan.gpus import untested_versions, unused_cards_note
        from fsdptrain.plan.launchers import find_launcher, is_first
        from fsdptrain.plan.limits import risky_limits, uncompiled_note
        from fsdptrain.report.run_banner import heading, next_steps
        from fsdptrain.report.trackers import tracked
        from fsdptrain.run_folder.events import cut_partial_lines
        from fsdptrain.run_folder.records import Tail
        from fsdptrain.terminal.page import Page
        from fsdptrain.terminal.screen import Screen

        started, launched = time.monotonic(), find_launcher(os.environ)
        rundir, topology = plan.rundir, plan.topology
        # A finished run is not trained again, so its second start only shows where the model is.
        if earlier.finished:
            if is_first(launched):
                _show_finished(plan, earlier)
            return
        # Started by torchrun or as one of several tasks on a node, this process is a worker and does not launch any.
        if topology.joined:
            os.environ.update(worker_settings(plan, os.environ))
            from fsdptrain.train.worker import work

            if is_first(launched):
                cut_partial_lines(rundir)
                Screen().say(heading(plan, rundir, earlier))
            work(plan)
        screen = stack.enter_context(Screen(quiet=not is_first(launched)))
        plan_before_compile_fallback = dataclasses.replace(plan, recipe=written.recipe)
        notes = uncompiled_note(plan_before_compile_fallback), unused_cards_note(os.environ)
        for warning in (*untested_versions(), *risky_limits(plan), *notes):
            if warning:
                screen.say(warning)
        records = Tail(rundir.metrics)
        with tracked(plan, screen.say) as trackers, _errors_recorded(rundir):
            try:
                launch(plan, screen, earlier, trackers.poll)
            except OutOfMemory as error:
                with screen.busy("forecasting what would fit"), Forecaster() as forecaster:
                    start, config = screen.last.get("start"), str(rundir.model)
                    lines = relief_lines(plan, start, forecaster.forecast, config_dir=config)
                raise OutOfMemory("\n".join([str(error), *lines])) from None
        screen.summary(time.monotonic() - started)
        if plan.recipe.log.forecast and topology.device != "cpu" and is_first(launched):
            compare_with_measured(plan, records.read(), screen)
        next_steps(plan, sys.argv[1:], Page(screen.console))


def _plan_here(written: LoadedRecipe, trust_remote_code: bool) -> Plan:
    """Make the plan of the workers of this machine, whose limits are raised. Raises whatever refuses it."""
    from fsdptrain.plan.launchers import find_launcher, worker_variables
    from fsdptrain.plan.limits import raise_limits, uncompiled_note
    from fsdptrain.plan.plan import make_plan, varied
    from fsdptrain.plan.topology import check_name, find_topology

    topology = find_topology(written.recipe, os.environ, explicit=written.where)
    os.environ.update(worker_variables(find_launcher(os.environ)))
    plan = make_plan(written, topology, trust_remote_code=trust_remote_code)
    check_name(topology, os.environ)
    raise_limits(plan)
    return varied(plan, {"train.compile": False}) if uncompiled_note(plan) else plan


@app.command(cls=WithOverrides, epilog="Example: fsdptrain validate gsm8k-sft --hardware 8xh100")
def validate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    hardware: Annotated[
        str | None, option("CARDS", "plan for other machines: 8xh100, 16x8xh100 (16 nodes of 8), memory=…,flops=…")
    ] = None,
    plot: Annotated[Path | None, option("FILE", "plot the memory of one step to this .svg or .png")] = None,
    advise: Annotated[bool, typer.Option("--advise", help="search for plans that fit, ranked by time")] = False,
    price: Annotated[
        float | None, option("DOLLARS", "dollars per GPU-hour; adds the cost of the run", "--price-per-gpu-hour", min=0)
    ] = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="also explain what could not be checked here")] = False,
    no_build: Annotated[bool, typer.Option("--no-build", help="stop before building the model")] = False,
    here: Annotated[
        bool, typer.Option("--here", help="start the workers as `run` does, and only compare and measure the nodes")
    ] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Check a recipe without training. Covers plan, machine, data, model, memory, communication and time."""
    try:
        written = find_recipe(recipe, overrides)
        of_dry_run = {
            "--hardware": hardware, "--plot": plot, "--advise": advise, "--price-per-gpu-hour": price,
            "--verbose": verbose, "--no-build": no_build,
        }  # fmt: skip
        if here and (given := [name for name, value in of_dry_run.items() if value is not None and value is not False]):
            raise RecipeError(
                f"--here: cannot be combined with {', '.join(given)}, which the dry run uses: leave out one or the "
                "other"
            )
        from fsdptrain.forecast.plot import check_plot_path
        from fsdptrain.terminal.page import Page
        from fsdptrain.validation.findings import show_outcome
        from fsdptrain.validation.request import make_request, run_dry_run

        # Check every option before the dry run starts, because that takes a while.
        if plot is not None:
            plot = _expanded_path(plot)
            check_plot_path(plot)
        picture = str(plot) if plot else None
        request = make_request(
            written, hardware, trust_remote_code, price, plot=picture, advise=advise, build=not no_build
        )
        if here:
            outcome = _check_here(request)
        else:
            with _screen_beside_result() as screen:
                outcome = run_dry_run(request, screen)
    except FsdptrainError as error:
        if as_json:  # a program that reads the JSON gets the problems there
            _print_json({"notes": [], "problems": str(error).splitlines()})
            sys.exit(error.exit_code)
        raise
    if as_json:
        _print_json(outcome.report)
    else:
        show_outcome(outcome, Page(), verbose)
    if outcome.problems:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        _print_problems(outcome.problems)
        if request.plan.topology.device == "cpu" and hardware is None and not outcome.report.get("fits", True):
            _print_plan_for_gpus(written)
    if here:
        _exit_at_once(outcome.exit_code)
    sys.exit(outcome.exit_code)


def _print_plan_for_gpus(written: LoadedRecipe) -> None:
    """Print the command that plans for the GPUs which the recipe names: it was most probably written for them."""
    from fsdptrain.plan.hardware import cards_named_in

    cards = cards_named_in(f"{written.text}\n{written.recipe.name}")
    text = f"this machine has no GPU: to plan for GPUs,\n{_next_command(*sys.argv[1:], '--hardware', cards)}"
    print(wrapped_for(text, sys.stderr), file=sys.stderr)


def _check_here(request: Request) -> Outcome:
    """Check the nodes of a run, as their command or as one of their workers. All but the first of them exit here."""
    from fsdptrain.plan.launchers import find_launcher, is_first, worker_variables
    from fsdptrain.plan.topology import check_name

    launched = find_launcher(os.environ)
    os.environ.update(worker_variables(launched))
    check_name(request.plan.topology, os.environ)
    if request.plan.topology.joined:
        from fsdptrain.validation.node_check import check_ranks

        with contextlib.redirect_stdout(sys.stderr):
            outcome = check_ranks(request)
    else:
        from fsdptrain.validation.request import check_here

        with _screen_beside_result() as screen:
            outcome = check_here(request, screen)
    if not is_first(launched):
        _exit_at_once(outcome.exit_code)
    return outcome


def _exit_at_once(code: int) -> NoReturn:
    """Exit without shutting down the interpreter, which may abort in a worker that has used gloo (pytorch#179291)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _screen_beside_result() -> Screen:
    """Return a screen on standard error, because standard output is for the result."""
    from fsdptrain.terminal.page import Terminal
    from fsdptrain.terminal.screen import Screen

    return Screen(Terminal(sys.stderr))


@app.command(cls=WithOverrides, epilog="Example: fsdptrain prepare recipe.yaml data.path=corpus/")
def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    teacher: Annotated[
        bool, typer.Option("--teacher", help="then ask the teacher of a distillation, with the workers of the run")
    ] = False,
    as_json: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Tokenise the data ahead of a run. With all cores; interrupted, it continues where it was."""
    written = find_recipe(recipe, overrides)
    from fsdptrain.run_folder.events import progress_record
    from fsdptrain.validation.request import ask_teacher, make_request

    plan = make_request(written, None, trust_remote_code).plan  # also where there are no GPUs
    if teacher and not plan.recipe.train.objective.needs_teacher:
        raise RecipeError(f"--teacher: has no effect with train.objective: {plan.recipe.train.objective}")
    outcome = "before all was prepared; what was finished is kept; run the same command again"
    with StopRequest() as stop, stop.obeyed_at_once(outcome), _screen_beside_result() as screen:
        with screen.busy("starting"):
            from fsdptrain.data.prepare import prepare_ahead, prepared_lines
        made = prepare_ahead(plan, lambda *stage: screen.show(progress_record(*stage)))
    if teacher:
        with _screen_beside_result() as screen:
            ask_teacher(_plan_here(written, trust_remote_code), screen)
    if as_json:
        _print_json(made)
    else:
        words = [recipe, *(overrides or []), *["--trust-remote-code"] * trust_remote_code]
        lines = [*prepared_lines(made, plan.recipe.data.seq_len), _next_command("run", *words)]
        print(wrapped_for("\n".join(lines), sys.stdout))


@app.command(epilog="Example: fsdptrain export runs/shakespeare --out model")
def export(
    run_dir: RunDirArgument,
    step: Annotated[int | None, option("N", "the checkpoint of this step; default: as export.which")] = None,
    best: Annotated[bool, typer.Option("--best", help="the valid checkpoint with the lowest held-out loss")] = False,
    out: Annotated[Path | None, option("DIR", "folder to write; default: RUN_DIR/export")] = None,
    dtype: Annotated[str | None, option("DTYPE", "float32, bfloat16 or float16; default: the recipe's")] = None,
    adapter: Annotated[str | None, option("FORM", "separate, merged or both; default: the recipe's")] = None,
    merge_base: Annotated[str | None, option("BASE", "original or dequantized; default: the recipe's")] = None,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="do not open the folder in a fresh process")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder. Needs one process and no GPU."""
    from fsdptrain.config.schema import Export

    for name, value in (("dtype", dtype), ("adapter", adapter), ("merge_base", merge_base)):
        choices = get_args(get_type_hints(Export)[name])
        if value not in (None, *choices):
            raise RecipeError(f"--{name.replace('_', '-')}: {value!r} is not one of {', '.join(choices)}")
    if best and step is not None:
        raise RecipeError("--best and --step name two checkpoints: leave one out")
    outcome = "before the export was complete; nothing was written; run the same command again"
    with StopRequest() as stop, stop.obeyed_at_once(outcome):
        rundir = _opened_run(run_dir)
        if not rundir.plan.is_file():
            raise RecipeError(f"{run_dir} is not a run folder: it has no plan.json")
        target = rundir.export if out is None else _output_folder(_expanded_path(out), rundir)
        if not rundir.checkpoint_steps():
            raise CheckpointError(f"{run_dir} has no complete checkpoint")
        from fsdptrain.launch.run_lock import lock_for_export
        from fsdptrain.run_folder.ownership import output_lock, parents_made
        from fsdptrain.terminal.screen import Screen

        with (
            Screen() as screen,
            lock_for_export(rundir) if out is None else parents_made(target),
            output_lock(target),
        ):
            from fsdptrain.checkpoint.export import export_checkpoint  # takes seconds, so it comes after the locks

            compare = not no_compare
            export_checkpoint(
                rundir, step, target, dtype, screen, adapter, merge_base, compare, best, trust_remote_code
            )


def _opened_run(run_dir: str) -> RunDir:
    path = _expanded_path(Path(run_dir)).absolute()
    if not is_there(path):
        raise RecipeError(f"{run_dir}: there is no such folder{nearest_hint(path)}")
    return RunDir.open(path)


def _output_folder(out: Path, rundir: RunDir) -> Path:
    """Return the folder of `--out`; raise RecipeError if it is not empty or the run writes into it."""
    target = Path(os.path.realpath(out))
    if os.path.lexists(target) and not target.is_dir():
        raise RecipeError(f"--out: {out} is a file; name a new folder")
    with write_errors(f"cannot write {out}"):
        if target.is_dir() and any(target.iterdir()):
            raise RecipeError(f"--out: {out} is not empty, and its files are not overwritten; name a new folder")
    if os.path.ismount(target):
        raise RecipeError(f"--out: {out} is a mount point, which an export cannot replace; name a new folder in it")
    parts = [Path(os.path.realpath(part)) for part in rundir.written_paths()]
    if inside := next((part for part in parts if target.is_relative_to(part)), None):
        raise RecipeError(f"--out: {out} is inside {inside}, which the run itself writes; name a new folder")
    return target


@app.command(cls=WithOverrides, epilog="Example: fsdptrain submit recipe.yaml --time 24:00:00")
def submit(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    nodes: Annotated[int | None, option("N", "default: launch.nnodes, of a range the most", min=1)] = None,
    gpus_per_node: Annotated[int | None, option("N", "GPUs of a node; 0: train on the CPU", min=0)] = None,
    hardware: Annotated[
        str | None,
        option("CARDS", "the GPUs of a node, or of nodes: 8xh100-80gb, 16x8xh100: refuse a run that does not fit"),
    ] = None,
    sbatch: Annotated[list[str] | None, option("OPTION", "another option of sbatch, such as --constraint=ib")] = None,
    time_limit: Annotated[
        str | None, option("TIME", "time limit such as 24:00:00, after which it resumes", "--time")
    ] = None,
    partition: Annotated[str | None, option("NAME", "partition")] = None,
    account: Annotated[str | None, option("NAME", "account")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the script, submit nothing")] = False,
) -> None:
    """Run a recipe as a job of Slurm. For other clusters: fsdptrain recipes list."""
    written = find_recipe(recipe, overrides)
    from fsdptrain.launch import submit as jobs
    from fsdptrain.plan.hardware import parse_hardware

    # Check every option before the dry run starts, because that takes a while.
    target = parse_hardware(hardware) if hardware is not None else None
    gpus, named = jobs.gpus_of_node(target, gpus_per_node), target.nodes if target else None
    if nodes and named and nodes != named:
        raise RecipeError(
            f"--nodes: {nodes} contradicts --hardware {hardware}, which has {named}: remove one of the two"
        )
    job = jobs.prepare_job(recipe, written, overrides or [], nodes or named, gpus)
    own = {"--time": time_limit, "--partition": partition, "--account": account}
    text = jobs.slurm_script(job, sbatch or [], own)
    if target and target.note:
        print(target.note, file=sys.stderr)
    if hardware and target:
        card = hardware if "=" in hardware else target.hardware.name
        size = {"launch.nnodes": job.plan.topology.nnodes, "launch.nproc_per_node": job.plan.topology.nproc_per_node}
        _check_fit(find_recipe(recipe, [*(overrides or []), *(f"{key}={value}" for key, value in size.items())]), card)
    else:
        print(
            f"memory was not checked: give --hardware, such as {f'{gpus}xh100-80gb' if gpus else 'cpu'}",
            file=sys.stderr,
        )
    if not dry_run:
        number, rundir = jobs.submit_to_slurm(job, text), job.plan.rundir
        log, then = f"{rundir.logs}/slurm-{number}.log", _next_command("status", rundir.root)
        text = f"Slurm job {number}; its log: {log}\n{then}\n"
    print(text, end="")


def _check_fit(written: LoadedRecipe, hardware: str) -> None:
    """Say on standard error whether a plan fits the hardware; with problems, show everything and exit."""
    from fsdptrain.terminal.page import Page
    from fsdptrain.validation.findings import show_outcome
    from fsdptrain.validation.request import make_request, run_dry_run

    with _screen_beside_result() as screen:
        outcome = run_dry_run(make_request(written, hardware), screen)
    if outcome.exit_code:
        show_outcome(outcome, Page())
        _print_problems(outcome.problems)
        sys.exit(outcome.exit_code)
    print(outcome.verdict, file=sys.stderr)


@app.command(epilog="Example: fsdptrain status runs")
def status(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="a run folder, or a folder of runs")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object, or a list of them")] = False,
) -> None:
    """Show the state of a run, or of several. Works on any machine that sees the folder; changes nothing.

    On a terminal it follows a run until that ends, or until Ctrl-C, which ends `status` alone.
    """
    from fsdptrain.report.status import Observer, is_run_folder, list_runs, show_runs, status_lines, watch
    from fsdptrain.terminal.page import Page

    rundir = _opened_run(run_dir)
    page = Page()
    if not is_run_folder(rundir.root):
        runs = list_runs(rundir.root)
        if as_json:
            _print_json(runs)
        else:
            show_runs(runs, rundir.root, page)
    elif as_json:
        _print_json(Observer(rundir).status())
    elif page.console.is_terminal and not page.console.is_dumb_terminal:
        watch(rundir, page.console)
    else:
        page.say("\n".join(status_lines(Observer(rundir).status())))


@app.command(epilog="Example: fsdptrain report runs/shakespeare")
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN_DIR", help="a run folder, or a folder of runs; several are compared")
    ],
    out: Annotated[Path, option("FILE", "the file to write; a report there is replaced")] = Path("report.html"),
    over: Annotated[str, option("AXIS", "draw curves over steps, tokens (those trained) or hours")] = "steps",
    log: Annotated[bool, typer.Option("--log", help="give losses a logarithmic axis")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="write the page again while a run goes on; browsers renew it")
    ] = False,
) -> None:
    """Write runs as one HTML page. It has their curves, faults and recipe."""
    from fsdptrain.report.document import Drawing, check_report, write_report
    from fsdptrain.report.history import AXES

    out = _expanded_path(out)
    check_report(out)
    if over not in AXES:
        raise RecipeError(f"--over: {over!r} is not one of {', '.join(AXES)}")
    drawing = Drawing(over, log, WATCH_S if watch else 0)
    with _screen_beside_result() as screen, screen.busy("report"), write_errors(f"cannot write {out}"):
        opened = [_opened_run(run) for run in dict.fromkeys(runs)]
        notes, goes_on = write_report(opened, out, drawing)
    if watch and goes_on:
        screen.say(f"{out} is written again every {WATCH_S} s until the run ends, or you press Ctrl-C")
        with contextlib.suppress(Interrupted), write_errors(f"cannot write {out}"):
            while goes_on:
                time.sleep(WATCH_S)
                notes, goes_on = write_report(opened, out, drawing)
        write_report(opened, out, Drawing(over, log))
    for note in notes:
        print(wrapped_for(f"note: {note}", sys.stderr), file=sys.stderr)
    print(out)


@app.command(epilog="Example: fsdptrain verify runs/shakespeare")
def verify(
    run_dir: RunDirArgument,
    as_json: Json = False,
) -> None:
    """Check the checkpoints and export of a run. Compare them with their checksums; change nothing."""
    from fsdptrain.checkpoint.manifest import show_survey, survey
    from fsdptrain.terminal.screen import Screen

    rundir = _opened_run(run_dir)
    with Screen() as screen:
        if not rundir.root.is_dir():
            raise RecipeError(f"{run_dir} is not a folder")
        with screen.busy("verify"):
            found = survey(rundir)
        if not as_json:
            show_survey(found, screen)
    if as_json:
        _print_json(found)
    if any(part["unreadable"] for part in [*found["checkpoints"], *([found["export"]] if found["export"] else [])]):
        raise StorageError(f"{run_dir}: files cannot be read, and may be intact")
    if not found["good"]:
        raise CheckpointError(
            f"{run_dir}: " + ("files are damaged or missing" if found["checkpoints"] else "no checkpoint")
        )


@app.command("eval", epilog="Example: fsdptrain eval runs/shakespeare --data new.txt")
def evaluate(
    model: ModelArgument,
    data: Annotated[list[str], DATA],
    step: StepOption = None,
    form: Annotated[
        str | None, option("FORMAT", "default: the run's, else guessed from the columns", "--format")
    ] = None,
    column: Annotated[list[str] | None, option("FIELD=COLUMN", "where they differ, also several times")] = None,
    seq_len: Annotated[int | None, option("N", "tokens at which rows are divided; default: the run's", min=8)] = None,
    source: SourceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Compute the loss of a model on files. After DPO and the like also margin and rewards; in one process."""
    from fsdptrain.config.formats import Format
    from fsdptrain.terminal.page import Page

    if form not in (None, *Format):
        raise RecipeError(f"--format: {form!r} is not one of {', '.join(Format)}")
    if form is not None and source is not None:
        raise RecipeError("--source says how rows are read: leave out --format")
    pairs = [pair.partition("=") for pair in column or []]
    if wrong := [name for name, _, value in pairs if not name or not value]:
        raise RecipeError(f"--column: {wrong[0]!r} is not FIELD=COLUMN, such as text=body")
    with _screen_beside_result() as screen, _opened_model(model, step, dtype, trust_remote_code, screen) as opened:
        from fsdptrain.inference.scores import ReadAs, score_files, show_scores

        read_as = ReadAs(form, {name: value for name, _, value in pairs}, seq_len, source)
        found = score_files(opened, data, read_as, screen)
    if as_json:
        _print_json(found)
    else:
        show_scores(found, Page())


@app.command(epilog="Example: fsdptrain chat runs/shakespeare --prompt ROMEO:")
def chat(
    model: ModelArgument,
    prompt: Annotated[str | None, option("TEXT", "print one answer and exit")] = None,
    max_tokens: Annotated[int, option("N", "tokens of an answer, at most", min=1)] = 256,
    temperature: Annotated[float, option("T", "0: always the most likely token; 1: as the model says", min=0)] = 0.7,
    seed: Annotated[int, option("N", "the same seed and inputs get the same answers", min=0)] = 0,
    step: StepOption = None,
    source: SourceOption = None,
    dtype: DtypeOption = None,
    trust_remote_code: Trust = False,
) -> None:
    """Talk to a model at a terminal. One that has learned no conversations continues texts. Ctrl-C ends an answer."""
    with contextlib.ExitStack() as stack:
        with _screen_beside_result() as screen:  # its live line would be in the way of the answers
            opened = stack.enter_context(_opened_model(model, step, dtype, trust_remote_code, screen))
        from fsdptrain.inference.opened import Dialogue, talk

        dialogue = Dialogue(opened, max_tokens, temperature, seed, source)
        if prompt is not None:
            dialogue.answer(prompt)
        else:
            screen.say(f"{opened.name}: {dialogue.usage}")
            talk(dialogue)


@contextlib.contextmanager
def _opened_model(
    model: str, step: int | None, dtype: str | None, trust_remote_code: bool, screen: Screen
) -> Iterator[OpenedModel]:
    from fsdptrain.config.optimizers import ComputeDtype

    if dtype not in (None, *get_args(ComputeDtype)):
        raise RecipeError(f"--dtype: {dtype!r} is not one of {', '.join(get_args(ComputeDtype))}")
    from fsdptrain.checkpoint.manifest import is_model

    rundir = _opened_run(model)
    if not (is_model(rundir.root) or rundir.plan.is_file()):
        what = "has neither plan.json nor config.json" if rundir.root.is_dir() else "is not a folder"
        raise RecipeError(f"{model} {what}: name a run folder, or a folder of transformers or peft")
    with screen.busy("importing transformers"):
        from fsdptrain.inference.opened import opened_model
    with opened_model(rundir, step, dtype, trust_remote_code, screen) as opened:
        yield opened


@app.command(epilog="Example: fsdptrain schema > recipe.schema.json")
def schema() -> None:
    """Print the JSON Schema of a recipe. Editors use it for completion."""
    from fsdptrain.config.keys import json_schema

    _print_json(json_schema())


@app.command(epilog="Example: fsdptrain init --data a.jsonl --model org/name")
def init(
    data: Annotated[list[str] | None, DATA] = None,
    model: Annotated[str | None, option("MODEL", "Hub id or local folder")] = None,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="where to write the recipe")] = Path("recipe.yaml"),
    hardware: Annotated[
        str | None, option("CARDS", "the GPUs to train on, such as 8xh100-80gb; default: those of this machine")
    ] = None,
) -> None:
    """Write a commented recipe for your data. All rows are read to choose its sizes; on GPUs, the fastest plan."""
    dest = _expanded_path(dest)
    dest = dest / "recipe.yaml" if dest.is_dir() else dest
    if os.path.lexists(dest):
        raise RecipeError(f"{EXISTS_ALREADY.format(dest)}, or name another file")
    if not data or model is None:
        raise RecipeError("give --data and --model")
    from fsdptrain.terminal.page import Page
    from fsdptrain.validation.init_recipe import propose, read_starter, show_proposal

    starter = read_starter(data, model, dest)
    with _screen_beside_result() as screen:
        text, forecast, outcome = propose(starter, hardware, screen)
    if text is None:
        _print_problems(outcome.problems)
        sys.exit(outcome.exit_code)
    _write_new(dest, text)
    show_proposal(forecast, outcome, Page())
    print(f"\n{dest}\n{_next_command('validate', dest, *(['--hardware', hardware] if hardware else []))}")


def _write_new(dest: Path, text: str) -> None:
    with write_errors(f"cannot write {dest}"):
        dest.parent.mkdir(parents=True, exist_ok=True)
        with dest.open("x", encoding="utf-8") as stream:
            stream.write(text)


@recipes_app.callback()
def recipes(ctx: typer.Context) -> None:
    """List, show or copy the shipped recipes."""
    if ctx.invoked_subcommand is None:
        list_recipes()


@recipes_app.command("list", epilog="Example: fsdptrain recipes list")
def list_recipes() -> None:
    """List the shipped recipes. Also lists the files for clusters and clouds."""
    is_narrow = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns < WIDE
    for name, path in _shipped_files().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        what = next(line for line in lines if not line.startswith("#!")).strip("# :")
        print(wrapped_for(f"{name}\n  {what}" if is_narrow else f"{name:36} {what}", sys.stdout))


@recipes_app.command("show", epilog="Example: fsdptrain recipes show gsm8k-lora")
def show_recipe(name: ShippedName) -> None:
    """Print a shipped recipe."""
    print(_find_shipped(name, _shipped_files()).read_text(encoding="utf-8"), end="")


@recipes_app.command("copy", epilog="Example: fsdptrain recipes copy gsm8k-lora mine.yaml")
def copy_recipe(
    name: ShippedName, dest: Annotated[Path, typer.Argument(metavar="DEST", help="a file or folder")]
) -> None:
    """Copy a shipped recipe and its example data. DEST is a file or folder."""
    source, dest = _find_shipped(name, _shipped_files()), _expanded_path(dest)
    dest = dest / source.name if dest.is_dir() or not dest.suffix else dest
    copies = {source: dest}
    data = source.parent / "data"
    for path in data.iterdir() if data.is_dir() else ():
        if f"data/{path.name}" in source.read_text(encoding="utf-8"):
            copies[path] = dest.parent / "data" / path.name
    existing = [str(path) for path in copies.values() if os.path.lexists(path)]
    if existing:
        raise RecipeError(EXISTS_ALREADY.format(", ".join(existing)))
    for path, target in copies.items():
        _write_new(target, path.read_text(encoding="utf-8"))
        print(target)


def find_recipe(recipe: str, overrides: list[str] | None) -> LoadedRecipe:
    """Return the recipe at a path, or the shipped one of this name. Raise RecipeError with every problem found."""
    from fsdptrain.config.paths import data_kind
    from fsdptrain.config.reader import load

    path = _expanded_path(Path(recipe))
    if os.path.isdir(path):  # noqa: PTH112  (Path.is_dir raises if the name is too long)
        inside = path / "recipe.yaml"
        raise RecipeError(f"{recipe} is a folder" + (f"; its recipe is {inside}" if inside.is_file() else ""))
    if data_kind(recipe) not in (None, ".json"):
        raise RecipeError(
            f"{recipe} is data, not a recipe; to write one for it: fsdptrain init --data {recipe} --model ID"
        )
    return load(path if os.path.isfile(path) else _find_shipped(recipe, _shipped_recipes()), overrides)  # noqa: PTH113


def _shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(shipped("recipes").glob("*.yaml"))}


def _shipped_files() -> dict[str, Path]:
    """Return name → path of the shipped recipes, and of the files for clusters, as `clusters/trainjob.yaml`."""
    inside = sorted(shipped("recipes", CLUSTERS).iterdir())  # pip adds a folder with the bytecode of a program
    return _shipped_recipes() | {f"{CLUSTERS}/{path.name}": path for path in inside if path.is_file()}


def _find_shipped(name: str, files: dict[str, Path]) -> Path:
    if name in files:
        return files[name]
    nearby = [str(path) for path in Path(os.path.dirname(name) or ".").glob("*.y*ml")]  # noqa: PTH120
    matches = get_close_matches(name, [*nearby, *files], n=1)
    hint = f"; did you mean {matches[0]}?" if matches else f"; the shipped recipes: {', '.join(files)}"
    raise RecipeError(f"{name}: no such file or shipped recipe{hint}")


def _show_finished(plan: Plan, earlier: EarlierAttempts) -> None:
    from fsdptrain.report.run_banner import next_steps
    from fsdptrain.terminal.page import Page
    from fsdptrain.terminal.screen import Screen

    rundir = plan.rundir
    with Screen() as screen:
        for fault in earlier.faults:
            screen.say(f"note: {fault}")
        screen.say(f"the run in {rundir.root} is finished ({earlier.step} steps): nothing was trained")
    next_steps(plan, sys.argv[1:], Page(screen.console))


def _expanded_path(written: Path) -> Path:
    """Return a path from the command line with `~` expanded; raise RecipeError if it cannot be a path."""
    from fsdptrain.config.paths import expanded, path_fault

    if fault := path_fault(str(written)):
        raise RecipeError(fault)
    if LIKE_A_URL.match(str(written)):  # Path made `s3:/` of `s3://`
        raise RecipeError(
            f"{str(written).replace(':/', '://', 1)!r} is not a path: checkpoint.path and data.path can be in an "
            "object store; recipes, run folders and the folder of --out are on a disk"
        )
    return Path(expanded(str(written)))
