"""Check on a GPU everything that a CPU cannot know, and print a table with a verdict a line: `make gpu`.

    python benchmarks/gpu.py [--only NAME …] [--tiny] [--device cpu] [--table FILE] [--folder FOLDER] [--list]

It should take about 33 minutes on one H100: checks that measure something run alone, the others `--lanes` at a time.
Several GPUs add the checks that need them, 3 minutes. The table goes to the screen while the checks run, and after each
line into docs/gpu.md, and the figures for the card's row in plan/hardware.py as well. A check that raises, or that
takes longer than its limit, becomes a line "failed: …". Recipes, runs and the output of everything that is started are
in `--folder`; at the end logs, figures, profiles and what is known of the machine are in one archive beside it.

On a CPU the models are tiny. That shows that the script works, no more: what only a GPU can show is "needs a GPU", and
the table goes to `--folder` unless `--table` is given. The verdicts:

    ok               as it should be
    WRONG            not as it should be
    measured         a figure without a limit
    needs a GPU      a CPU ran it; its figure says nothing about a GPU
    needs 2 GPUs     not run
    failed: …        an error of the check, of fsdptrain, or of the machine
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import gpu_checks as checks
import gpu_shipped as shipped
import psutil
from common import RANKS, ROOT, describe_machine, run_ranks
from gpu_archive import archive, collect
from gpu_checks import MEASURED, OK, WRONG, Row, Setting

from fsdptrain.plan.gpus import visible_gpus, why_unseen

TABLE = ROOT / "docs/gpu.md"
HEADING = "## The last run"
NEEDS_GPU = "needs a GPU"
CPU_PATIENCE = 3  # times the limit of a check


@dataclass(frozen=True)
class Check:
    """A check: its function, the seconds that it may take, and the GPUs without which it cannot be made.

    `alone`: no other check may use the machine meanwhile, because of its time or its memory.
    """

    run: Callable[[Setting], list[Row]]
    limit_s: int
    gpus: int = 1
    alone: bool = True


CHECKS = {  # those alone run in this order: `forecast` uses the run of `speed`
    **{f"first-{what}": Check(functools.partial(shipped.check_smoke, what), 90) for what in shipped.FIRST},
    "versions": Check(checks.check_versions, 60),
    "rates": Check(checks.check_rates, 90),
    "attention": Check(checks.check_attention, 120),
    "kernels": Check(checks.check_kernels, 120, alone=False),
    "gradients": Check(checks.check_gradients, 120, alone=False),
    "curves": Check(checks.check_curves, 240, alone=False),
    "compile": Check(checks.check_compile, 180, alone=False),
    "syncs": Check(checks.check_syncs, 180, alone=False),
    "speed-1B": Check(functools.partial(checks.check_speed, "1B"), 400),
    "forecast-1B": Check(functools.partial(checks.check_forecast, "1B"), 180),
    "speed-3B": Check(functools.partial(checks.check_speed, "3B"), 500),
    "forecast-3B": Check(functools.partial(checks.check_forecast, "3B"), 180),
    **{
        name: Check(functools.partial(shipped.check_shipped, variants), 420 * len(variants))
        for name, variants in shipped.VARIANTS.items()
    },
    "8B-saves": Check(shipped.check_shipped_saves, 600),
    "8B-qlora": Check(shipped.check_shipped_qlora, 420),
    "8B-profile": Check(shipped.check_profile, 300),
    "checkpoint": Check(checks.check_checkpoint, 180),
    "repeated": Check(checks.check_repeated, 240, alone=False),
    "memory": Check(checks.check_out_of_memory, 240),
    "hang": Check(checks.check_hang, 240),
    "strategies": Check(checks.check_strategies, 240, gpus=2),
    "bandwidths": Check(checks.check_bandwidths, 120, gpus=2),
    "tests": Check(checks.check_tests, 400, alone=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help="run only these checks")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    parser.add_argument(
        "--lanes", type=int, help="checks at a time, of those that measure nothing (default: 3 on a GPU)"
    )
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, on a GPU too")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--table", type=Path, help="Markdown file whose last section becomes the table")
    parser.add_argument("--folder", type=Path, help="folder for recipes, runs and logs (default: a new one)")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:12} {function_doc(check.run)}" for name, check in CHECKS.items()))
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fsdptrain-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    signal.signal(signal.SIGTERM, end_of_job)
    print(f"{describe_machine()}\n{folder}: recipes, runs and logs\n", flush=True)
    try:
        collect(folder)
        wrong = make_table(options, folder)
    finally:  # also after an error, Ctrl-C or SIGTERM
        archive(folder)  # at once: a job that ends may have seconds left
        collect(folder)  # again: what the driver has reported meanwhile
        print(f"logs, figures, profiles and the machine: {archive(folder)}", flush=True)
    if wrong:
        sys.exit(f"not as it should be: {', '.join(wrong)}")


def end_of_job(*_: object) -> NoReturn:
    """Kill what the checks have started, and leave as at Ctrl-C: for SIGTERM, which only this process may get."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    raise KeyboardInterrupt


def make_table(options: argparse.Namespace, folder: Path) -> list[str]:
    """Run the checks, and write the table after each line; return what is not as it should be."""
    setting = find_setting(options.device, folder, options.tiny)
    table = options.table or (TABLE if setting.on_gpu and not options.tiny else folder / "gpu.md")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    started, rows = time.monotonic(), []
    chosen = {name: CHECKS[name] for name in CHECKS if name in (options.only or CHECKS)}
    for row in run_checks(chosen, setting, options.lanes or (3 if setting.on_gpu else 1)):
        rows.append(row)
        print(shown(row, width), flush=True)
        minutes = (time.monotonic() - started) / 60
        heading = f"{describe_machine()}, {minutes:.1f} minutes{', tiny shapes' if setting.tiny else ''}"
        write_table(table, rows, heading, remarks(setting))
        figures = {name: getattr(setting, name) for name in ("machine", "figures", "seconds", "forecasts")}
        write_whole(folder / "figures.json", json.dumps(figures | {"rows": [*map(dataclasses.asdict, rows)]}, indent=1))
    print("", *remarks(setting), f"{len(rows)} lines in {minutes:.1f} minutes: {table}", sep="\n")
    if table.parent != folder:
        shutil.copy(table, folder / "gpu.md")
    return [row.what for row in rows if row.verdict == WRONG or row.verdict.startswith("failed")]


def shown(row: Row, width: int) -> str:
    """Return a row for a terminal: the verdict, and beside it the rest in lines of at most `width` characters."""
    verdict, _, error = row.verdict.partition(": ")
    text = f"{row.what}: {error or row.figure}{f'  ({row.note})' if row.note else ''}"
    indents = {"initial_indent": f"{verdict:13} ", "subsequent_indent": " " * 14}
    return textwrap.fill(text, width, break_on_hyphens=False, **indents)


def remarks(setting: Setting) -> list[str]:
    """Return what follows the table: how long each check took, and the measured fields of `Hardware`."""
    found = ["Seconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in setting.seconds.items()) + "."]
    if setting.figures:
        name = setting.card.name if setting.card else "this card"
        fields = ", ".join(f"{name}={value}" for name, value in setting.figures.items())
        found.append(f"For the row of `{name}` in `plan/hardware.py`: `{fields}`")
    return found


def function_doc(run: Callable[..., object]) -> str:
    """Return the first line that describes a check."""
    return ((run.func if isinstance(run, functools.partial) else run).__doc__ or "").splitlines()[0]


def find_setting(device: str, folder: Path, tiny: bool) -> Setting:
    """Return the setting for a device; `auto` is the GPU if there is one. Exits if torch does not see the GPUs."""
    everything = {} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": visible_devices()}
    words = "versions", json.dumps({"device": device})
    try:
        machine = run_ranks(RANKS, 1, *words, log=folder / "versions.log", timeout=120, **everything)[0]
    except (Exception, SystemExit) as error:  # the other checks may say more
        gpus = 0 if device == "cpu" else visible_gpus(os.environ)
        at = "cuda" if gpus else "cpu"
        machine = {"device": at, "gpus": gpus, "name": "unknown", "memory": 0, "fault": one_line(error)}
        return Setting(folder, machine, tiny or not gpus)
    if device != "cpu" and machine["device"] == "cpu" and visible_gpus(os.environ):
        sys.exit(f"torch {machine['torch']} sees no GPU: {why_unseen(machine['cuda'], os.environ)}")
    return Setting(folder, machine, tiny or machine["device"] == "cpu")


def visible_devices() -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that shows every GPU that this process may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(64))))


def run_checks(chosen: dict[str, Check], setting: Setting, lanes: int = 1) -> Iterator[Row]:
    """Run checks, and yield their rows: one after another those that run alone, then the others, `lanes` at a time."""
    for name, check in chosen.items():
        if check.alone:
            yield from run_check(name, check, setting)
    shared = [name for name in chosen if not chosen[name].alone]
    shared.sort(key=lambda name: -chosen[name].limit_s)  # the longest must not begin last
    pool = ThreadPoolExecutor(lanes)
    try:
        futures = [pool.submit(run_check, name, chosen[name], setting, lanes) for name in shared]
        for future in as_completed(futures):
            yield from future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C the next check must not begin


def run_check(name: str, check: Check, setting: Setting, lanes: int = 1) -> list[Row]:
    """Run a check beside `lanes` - 1 others; return its rows, with the verdicts that this machine allows."""
    started, limit_s = time.monotonic(), check.limit_s * lanes * (1 if setting.on_gpu else CPU_PATIENCE)
    setting = dataclasses.replace(setting, check=name, deadline=started + limit_s)
    if setting.on_gpu and setting.many < check.gpus:
        return [Row(name, "not run", f"needs {check.gpus} GPUs")]
    try:
        rows = check.run(setting)
    except (Exception, SystemExit) as error:
        with setting.log.open("a") as log:
            traceback.print_exc(file=log)
        rows = [Row(name, "", f"failed: {one_line(error)}", str(setting.log))]
    setting.seconds[name] = time.monotonic() - started
    return [as_known(row, setting) for row in rows]


def as_known(row: Row, setting: Setting) -> Row:
    """Return a row with the verdict that this device can give: a CPU cannot say that a GPU is right."""
    if setting.on_gpu or row.verdict not in (OK, MEASURED):
        return row
    return dataclasses.replace(row, verdict=NEEDS_GPU)


def one_line(error: BaseException) -> str:
    """Return an error in one line without the separator of the table's columns."""
    return f"{type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")[:300]


def write_table(path: Path, rows: list[Row], heading: str, after: list[str]) -> None:
    """Write the table as the last section of a Markdown file, and keep what is before that section."""
    before = path.read_text().partition(HEADING)[0] if path.exists() else ""
    lines = [f"| {row.what} | {row.figure} | {row.verdict} | {row.note} |" for row in rows]
    table = "\n".join(["| what | found | verdict | remark |", "| --- | --- | --- | --- |", *lines])
    write_whole(path, "\n\n".join([f"{before}{HEADING}", heading, table, *after]) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is never there in part."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    main()
