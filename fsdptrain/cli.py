"""The command line. It reads, plans, launches and shows; it never imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptrain.errors import CheckpointError, FsdptrainError, RecipeError, first_line, is_disk_full
from fsdptrain.processes import exit_after_printing, open_safe_streams, watch_parent
from fsdptrain.text import wrapped_for

if TYPE_CHECKING:
    from fsdptrain.config.reader import LoadedRecipe
    from fsdptrain.rundir import RunDir


app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


shipped = typer.Typer(help="The shipped recipes.", no_args_is_help=True)


app.add_typer(shipped, name="recipes")


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe file, or the name of a shipped recipe")]


Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="run the model's own code: that of a local folder, or of a Hub id at model.revision, a full commit",
    ),
]


Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="optim.lr=1e-5 and the like")]


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # reads a file each; torch itself takes seconds

        parts = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        print(f"fsdptrain {version('fsdptrain')} ({parts}, Python {sys.version.split()[0]})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the versions, and exit")
    ] = False,
) -> None:
    """Train and fine-tune causal language models with FSDP2: one recipe, one command, a Hugging Face folder."""


def main() -> None:
    """The `fsdptrain` command: every error of ours ends in one message and its exit code, never in a traceback."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a worker under somebody else's torchrun
        watch_parent(os.getppid())
    open_safe_streams()
    try:
        with _errors_of_the_system():
            app()
    except FsdptrainError as error:
        message = f"fsdptrain: {error}" if not isinstance(error, RecipeError) else _problems_text(error.problems)
        print(wrapped_for(message, sys.stderr, extra_indent=2), file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code or sys.argv[1:2] == ["run"]:  # what a run prints is not its result
            raise
        exit_after_printing(0)


@contextlib.contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """Raise what the system refuses as an error with its way out, where one is known."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise CheckpointError(f"no space: {error}") from None
        raise FsdptrainError(f"{error.filename}: {error.strerror}" if error.filename else first_line(error)) from error
    except UnicodeEncodeError as error:
        raise RecipeError(
            f"{error.object[:200]!r} cannot be the name of a file in this locale ({error.encoding}): set LC_ALL=C.UTF-8"
        ) from None


def _problems_text(problems: Sequence[object]) -> str:
    if len(problems) == 1:
        return f"fsdptrain: {problems[0]}"
    return f"fsdptrain: {len(problems)} problems\n" + "\n".join(f"  {problem}" for problem in problems)


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="never resume: ask for an empty folder")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Train; goes on where the run in output_dir stopped, if there is one."""
    written = _load(recipe, overrides)  # before anything else is imported: a refusal should come at once
    from fsdptrain.config.plan import make_plan
    from fsdptrain.config.topology import find_topology, writes_run_dir
    from fsdptrain.events import cut_partial_lines
    from fsdptrain.forecast.compare import ForecastComparison
    from fsdptrain.launch.claim import claim_run_dir
    from fsdptrain.launch.heading import heading
    from fsdptrain.launch.launcher import launch
    from fsdptrain.rundir import RunDir
    from fsdptrain.screen import Screen

    topology = find_topology(written.recipe, dict(os.environ))
    plan = make_plan(written, topology, trust_remote_code=trust_remote_code)
    rundir = RunDir(Path(plan.run_dir))
    started = time.monotonic()
    with claim_run_dir(plan, written.text, fresh) as before, contextlib.ExitStack() as stack:
        if before.finished:
            if writes_run_dir(topology):
                _tell_finished(rundir, before.step)
            return
        if topology.joined:
            from fsdptrain.train.worker import work

            if writes_run_dir(topology):
                cut_partial_lines(rundir)
                Screen().say(heading(plan, rundir, before))
            work(plan)
        screen = stack.enter_context(Screen())
        comparison = None
        if plan.recipe.log.forecast and topology.device != "cpu":
            comparison = stack.enter_context(contextlib.closing(ForecastComparison(plan, rundir)))
        try:
            launch(plan, screen, before)
        except FsdptrainError:
            raise
        except Exception as error:
            (rundir.logs / "defect.txt").write_text(traceback.format_exc(), encoding="utf-8")
            raise FsdptrainError(
                f"internal error: {error!r} (please report it; traceback: {rundir.logs / 'defect.txt'})"
            ) from error
        if comparison:
            comparison.report(screen)
        screen.summary(time.monotonic() - started)


@app.command()
def validate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    hardware: Annotated[str | None, typer.Option(help="plan for other machines: 8xh100-80gb, memory=…,flops=…")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the memory of one step to this .svg or .png")] = None,
    advise: Annotated[bool, typer.Option("--advise", help="search for plans that fit, ranked by time")] = False,
    price: Annotated[
        float | None,
        typer.Option("--price-per-gpu-hour", min=0, help="price in dollars per GPU-hour; adds the cost of the run"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="also say why something was not checked here")] = False,
    no_build: Annotated[bool, typer.Option("--no-build", help="stop before the model is built")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Know before the launch: keys, plan, machine, data, model, memory, communication, time; nothing is started."""
    try:
        written = _load(recipe, overrides)
        from rich.console import Console

        from fsdptrain.forecast.plot import check_plot_path
        from fsdptrain.page import Page
        from fsdptrain.screen import Screen
        from fsdptrain.validate.client import make_request, run_dry_run
        from fsdptrain.validate.summary import show_outcome

        if plot is not None:
            plot = _path(plot)
            check_plot_path(plot)
        request = make_request(written, hardware, trust_remote_code)
        if price is not None and request.plan.topology.device == "cpu":
            raise RecipeError("--price-per-gpu-hour: this plan has no GPUs; name some with --hardware")
        drawing = str(plot) if plot else None
        request = dataclasses.replace(request, plot=drawing, price=price, advise=advise, build=not no_build)
        console = Console(stderr=True, highlight=False, soft_wrap=True, force_terminal=sys.stderr.isatty())
        with Screen(console) as screen:  # standard output is for what was found
            outcome = run_dry_run(request, screen)
    except FsdptrainError as error:
        if as_json:
            print(json.dumps({"notes": [], "problems": str(error).splitlines()}, indent=2))
            sys.exit(error.exit_code)
        raise
    if as_json:
        print(json.dumps(outcome.facts, indent=2))
    else:
        show_outcome(outcome, Page(), verbose)
    if outcome.problems:
        apart = "\n" if sys.stderr.isatty() else ""
        print(apart + wrapped_for(_problems_text(outcome.problems), sys.stderr, extra_indent=2), file=sys.stderr)
    if outcome.exit_code:
        sys.exit(outcome.exit_code)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="a run folder")],
    step: Annotated[int | None, typer.Option(help="the checkpoint of this step; default: the newest valid one")] = None,
    out: Annotated[Path | None, typer.Option(help="where to; default: RUN_DIR/export")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the recipe's")] = None,
) -> None:
    """Turn a sharded checkpoint into a Hugging Face folder, in one process, without GPUs."""
    from fsdptrain.rundir import RunDir

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise RecipeError(f"--dtype: {dtype!r} is not one of float32, bfloat16, float16")
    run_dir = _path(run_dir)
    rundir = RunDir(run_dir.absolute())
    if not rundir.plan.is_file():
        raise RecipeError(f"{run_dir} is not a run folder: there is no plan.json in it")
    target = rundir.export if out is None else _new_folder(_path(out), rundir)
    if not rundir.checkpoint_steps():
        raise CheckpointError(f"{run_dir} holds no complete checkpoint")
    from fsdptrain.checkpoint.export import export_checkpoint
    from fsdptrain.launch.claim import lock_for_export
    from fsdptrain.screen import Screen

    with Screen() as screen, lock_for_export(rundir) if out is None else contextlib.nullcontext():
        export_checkpoint(rundir, step, target, dtype, screen)


def _new_folder(out: Path, rundir: RunDir) -> Path:
    """Where `--out` leads; raises RecipeError when something is there, or when a run writes there."""
    target = Path(os.path.realpath(out))
    if os.path.lexists(target) and not target.is_dir():
        raise RecipeError(f"--out: {out} is a file; name a new folder")
    if target.is_dir() and any(target.iterdir()):
        raise RecipeError(f"--out: {out} is not empty, and nothing of yours is overwritten; name a new folder")
    parts = [Path(os.path.realpath(part)) for part in rundir.written_paths()]
    if inside := next((part for part in parts if target.is_relative_to(part)), None):
        raise RecipeError(f"--out: {out} lies in {inside}, which the run itself writes; name a new folder")
    return target


@app.command()
def verify(
    run_dir: Annotated[Path, typer.Argument(help="a run folder")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Read every checkpoint of a run and compare it with its checksums; look into the export; change nothing."""
    from fsdptrain.checkpoint.verify import show_survey, survey
    from fsdptrain.rundir import RunDir
    from fsdptrain.screen import Screen

    run_dir = _path(run_dir)
    if not run_dir.is_dir():
        raise RecipeError(f"{run_dir} is not a run folder")
    with Screen() as screen:
        with screen.busy("verify"):
            found = survey(RunDir(run_dir.absolute()))
        if not as_json:
            show_survey(found, screen)
    if as_json:
        print(json.dumps(found, indent=2))
    if not found["good"]:
        raise CheckpointError(f"{run_dir}: " + ("something is damaged" if found["checkpoints"] else "no checkpoint"))


@app.command()
def schema() -> None:
    """Print the recipe's JSON Schema, for completion in editors."""
    from fsdptrain.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


@app.command()
def init(
    data: Annotated[str, typer.Option(help="file, glob, folder, or a Hub data set")],
    model: Annotated[str, typer.Option(help="Hub id or local folder")],
    dest: Annotated[Path, typer.Argument(help="where to write the recipe")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe for your data, with comments; the format is that of its first rows."""
    from fsdptrain.data.starter import starter_recipe

    dest = _path(dest)
    dest = dest / "recipe.yaml" if dest.is_dir() else dest
    if dest.exists():
        raise RecipeError(f"{dest} exists already, and is not overwritten")
    text = starter_recipe(data, model, dest)
    with _written(dest):
        dest.parent.mkdir(parents=True, exist_ok=True)
        with dest.open("x", encoding="utf-8") as stream:
            stream.write(text)
    print(f"{dest}\nnext: fsdptrain validate {dest}")


@shipped.command("list")
def list_recipes() -> None:
    """Name every shipped recipe, with its first line."""
    for path in _shipped_recipes():
        first = next(
            (line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")), ""
        )
        print(f"{path.stem:36} {first}")


@shipped.command("show")
def show_recipe(name: str) -> None:
    """Print a shipped recipe."""
    print(_find_shipped(name).read_text(encoding="utf-8"), end="")


@shipped.command("copy")
def copy_recipe(name: str, dest: Path) -> None:
    """Copy a shipped recipe, and the example data it reads, to a file or folder of yours."""
    source, dest = _find_shipped(name), _path(dest)
    dest = dest / source.name if dest.is_dir() or not dest.suffix else dest
    copies = {source: dest}
    data = source.parent / "data"
    for path in data.iterdir() if data.is_dir() else ():
        if f"data/{path.name}" in source.read_text(encoding="utf-8"):
            copies[path] = dest.parent / "data" / path.name
    taken = [str(path) for path in copies.values() if path.exists()]
    if taken:
        raise RecipeError(f"exists already, and is not overwritten: {', '.join(taken)}")
    for path, target in copies.items():
        with _written(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        print(target)


@contextlib.contextmanager
def _written(dest: Path) -> Iterator[None]:
    """Raise RecipeError when a file that the command line names cannot be written; a full disk is `main`'s."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise
        raise RecipeError(f"cannot write {dest}: {error.strerror}") from None


def _load(recipe: str, overrides: list[str] | None) -> LoadedRecipe:
    from fsdptrain.config.paths import data_kind
    from fsdptrain.config.reader import load

    path = _path(Path(recipe))
    if os.path.isdir(path):  # noqa: PTH112  (Path's raises for a name that is too long)
        inside = path / "recipe.yaml"
        raise RecipeError(f"{recipe} is a folder" + (f"; its recipe is {inside}" if inside.is_file() else ""))
    if data_kind(recipe) not in (None, ".json"):
        raise RecipeError(
            f"{recipe} is data, not a recipe: fsdptrain init --data {recipe} --model ID writes one for it"
        )
    return load(path if os.path.isfile(path) else _find_shipped(recipe), overrides)  # noqa: PTH113


def _shipped_recipes() -> list[Path]:
    """The shipped recipes: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    folder = next(f for f in (package / "recipes", package.parent / "recipes") if f.is_dir())
    return sorted(folder.glob("*.yaml"))


def _find_shipped(name: str) -> Path:
    from difflib import get_close_matches

    recipes = {path.stem: path for path in _shipped_recipes()}
    if name in recipes:
        return recipes[name]
    here = [str(path) for path in Path(os.path.dirname(name) or ".").glob("*.y*ml")]  # noqa: PTH120
    near = get_close_matches(name, [*here, *recipes], n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; the shipped recipes: {', '.join(recipes)}"
    raise RecipeError(f"{name}: no such file, and no shipped recipe of that name{hint}")


def _tell_finished(rundir: RunDir, step: int) -> None:
    """Say that there is nothing to train, and where the model is."""
    from fsdptrain.screen import Screen

    screen = Screen()
    screen.say(f"the run in {rundir.root} is finished ({step} steps): nothing was trained")
    if rundir.export.is_dir():
        screen.last["export"] = {"path": str(rundir.export)}
        screen.summary(0.0)


def _path(written: Path) -> Path:
    """Return a path of the command line with `~` expanded; raise RecipeError for one that cannot be meant."""
    from fsdptrain.config.paths import expanded, path_message

    if message := path_message(str(written)):
        raise RecipeError(message)
    return Path(expanded(str(written)))
