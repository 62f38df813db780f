"""Shared by the tests: tiny random models, small recipes, real rank processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml
from forks import Command

from fsdptrain.config.reader import load
from fsdptrain.plan.network import unused_port
from fsdptrain.plan.plan import Plan, make_plan
from fsdptrain.plan.topology import Topology, find_topology
from fsdptrain.run_folder.records import EVENTS
from fsdptrain.run_folder.rundir import RunDir

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
DATA = ROOT / "recipes" / "data"
SHAKESPEARE = DATA / "tinyshakespeare.txt"
GSM8K = DATA / "gsm8k-train.jsonl"

TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip

# What begins the names of the variables from which a launcher is recognised.
LAUNCHERS = (
    "TORCHELASTIC", "RANK", "WORLD_", "LOCAL_", "MASTER_", "SLURM_STEP", "OMPI_COMM", "MPI_LOCAL", "PET_", "PMI",
    "PALS_", "PBS_NODENUM", "JSM_", "MV2_COMM", "FLUX_", "AZUREML_", "SKYPILOT_", "NODE_RANK", "NUM_NODES", "SM_",
    "TRAINING_JOB", "CLUSTER_SPEC",
)  # fmt: skip

STRATEGIES: dict[str, tuple[int, list[str]]] = {  # name → (ranks it needs, overrides)
    "FULL_SHARD": (1, []),
    "SHARD_GRAD_OP": (1, []),
    "NO_SHARD": (1, []),
    "HYBRID_SHARD": (2, ["fsdp.shard_size=2"]),
    "HYBRID_SHARD_ZERO2": (2, ["fsdp.shard_size=2"]),
}


def strategies(world: int) -> dict[str, list[str]]:
    return {s: [f"fsdp.strategy={s}", *words] for s, (ranks, words) in STRATEGIES.items() if world >= ranks}


def write_recipe(tmp: Path, **changes: Any) -> Path:
    """Write a recipe that trains a tiny Llama on CPU in float32; `changes` are keys with `__` instead of dots."""
    recipe: dict[str, Any] = {
        "output_dir": str(tmp / "run"),
        "model": {"config": {"model_type": "llama", **TINY}, "tokenizer": {"train": 512}, "init": "random"},
        "data": {"path": str(tmp / "text.jsonl"), "seq_len": 64, "packing": "bfd"},
        "fsdp": {"mixed_precision": {"param_dtype": "float32"}},
        "optim": {"lr": 3e-4},
        "train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 1},
        "checkpoint": {"every": 2, "keep": 10},
        "export": {"dtype": "float32", "compare": False},
        "log": {"trackers": [], "forecast": False},
        "launch": {"nproc_per_node": 2, "timeout_s": 60},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = recipe
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    text = tmp / "text.jsonl"
    if not text.exists():
        paragraphs = SHAKESPEARE.read_text().split("\n\n")[:300]
        text.write_text("".join(json.dumps({"text": paragraph}) + "\n" for paragraph in paragraphs))
    (tmp / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp / "recipe.yaml"


def write_pretrained(tmp: Path, config: Any, **changes: Any) -> Path:
    """Write a recipe that starts from a random model of this configuration, whose folder is `model`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp / "model")
    return write_recipe(tmp, model={"id": str(tmp / "model"), "tokenizer": {"train": 512}}, **changes)


def planned(recipe: Path, *overrides: str, ranks: int = 1) -> Plan:
    """Return the plan of a recipe for ranks on the CPU of one node."""
    return make_plan(load(recipe, [*overrides]), Topology("cpu", 1, ranks))


def plan_here(recipe: Path, *overrides: str, **env: str) -> Plan:
    """Return the plan of a recipe as a command makes it here, without GPUs, with `env` as its environment."""
    written = load(recipe, [*overrides])
    return make_plan(written, find_topology(written.recipe, {"CUDA_VISIBLE_DEVICES": "", **env}))


def quiet(*_: object) -> None:
    """Show no progress."""


def run_folder(plan: Plan) -> RunDir:
    """Make the run folder of a plan, with a folder for logs; return it."""
    plan.rundir.logs.mkdir(parents=True, exist_ok=True)
    plan.rundir.plan.write_text(plan.to_json())
    return plan.rundir


def write_pairs(path: Path, count: int = 150) -> None:
    """Write pairs of very different lengths: the next lines of a speech, and the words of other lines."""
    speeches = [each.split("\n") for each in SHAKESPEARE.read_text().split("\n\n")]
    speeches = [lines for lines in speeches if len(lines) > 2][: 2 * count]
    with path.open("w") as file:
        for (name, first, *rest), (_, other, *_) in zip(speeches[::2], speeches[1::2], strict=True):
            wrong = " ".join(reversed(other.split()))
            file.write(json.dumps({"prompt": f"{name}\n{first}\n", "chosen": rest[0], "rejected": wrong}) + "\n")


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of this process without launchers, with one thread per process and the Hub offline."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    threads = {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1", "TOKENIZERS_PARALLELISM": "false"}
    return clean | threads | {"HF_HUB_OFFLINE": "1", **extra}


def python_path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


def fsdptrain(
    *words: object, timeout: float = 180, cwd: Path | None = None, executed: bool = False, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, but for its imports (see `forks`) unless it is `executed`."""
    return python("-m", "fsdptrain", *words, timeout=timeout, cwd=cwd, executed=executed, **extra)


def python(
    *words: object,
    input: str | None = None,
    timeout: float = 180,
    cwd: Path | None = None,
    executed: bool = False,
    **extra: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command of Python to its end, with `extra` in its environment.

    It is a fork of a process that has imported everything unless it is `executed`; a fork takes `-m MODULE …` or
    `-c CODE …`.
    """
    start = subprocess.Popen if executed else how_to_start(extra)
    command, pipe = [sys.executable, *map(str, words)], subprocess.PIPE
    streams = {"stdin": None if input is None else pipe, "stdout": pipe, "stderr": pipe}
    with start(command, **streams, text=True, cwd=cwd, env=environment(**extra)) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def how_to_start(variables: Iterable[str]) -> type[subprocess.Popen[Any]]:
    """Return what starts a process with these variables: a fork has imported what reads those of the Hub."""
    return subprocess.Popen if any(name.startswith("HF_") for name in variables) else Command


def on_ranks(world: int, job: str | Callable[..., Any], out: Path, timeout: float = 300, **arguments: Any) -> list[Any]:
    """Run a function on `world` gloo processes; return its results, which are JSON, in rank order.

    `job` is a function of a test's module, or the name of one in `tests/ranks.py`, which several modules use.
    """
    home = TESTS / "ranks.py" if isinstance(job, str) else Path(job.__code__.co_filename)
    name = job if isinstance(job, str) else job.__name__
    out.mkdir(parents=True, exist_ok=True)
    port, logs = unused_port(), [out / f"rank-{rank}.log" for rank in range(world)]
    words = [sys.executable, "-m", "ranks", str(home), name, str(out), json.dumps(arguments)]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, log in enumerate(logs):
            env = environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
                PYTHONPATH=python_path(ROOT, TESTS),
            )  # fmt: skip
            with log.open("wb") as output:
                ranks.append(Command(words, env=env, stdout=output, stderr=output))
            stack.callback(ranks[-1].kill)
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in ranks:
                process.wait(timeout)
    codes = [process.wait() for process in ranks]
    written = "\n".join(log.read_text()[-2000:] for log in logs)
    assert codes == [0] * world, f"exit codes {codes}\n{written}"
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]


def in_process(job: Callable[..., Any], *arguments: Any, timeout: float = 600) -> Any:
    """Call a function of a test's module in a process of its own; arguments and result are JSON.

    A pretended accelerator cannot be removed again.
    """
    module = ".".join(Path(job.__code__.co_filename).relative_to(TESTS).with_suffix("").parts)
    code = (
        f"import json, sys; from {module} import {job.__name__} as job; print(json.dumps(job(*json.load(sys.stdin))))"
    )
    done = python("-c", code, input=json.dumps(arguments), timeout=timeout, PYTHONPATH=python_path(TESTS))
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


NOBODY = 65534


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Let this thread and those that it starts open files as the user nobody: root may open those without any rights.

    Without root it does nothing. Modules that are imported inside may be out of reach.
    """
    libc, user = ctypes.CDLL(None), os.geteuid()
    if user == 0:
        libc.setfsuid(NOBODY)  # of the thread, and without an error: asked again, it returns what is set
        assert libc.setfsuid(NOBODY) == NOBODY, "this root may not be another user"
    try:
        yield
    finally:
        libc.setfsuid(user)


def make_searchable(folder: Path) -> None:
    """Let every user look for files below a folder: pytest's folders are for their user only."""
    for above in (folder, *folder.parents):
        above.chmod(above.stat().st_mode | 0o711)


def events(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the events of a run folder, of one kind or all; an empty list if there are none yet."""
    if not (run / "metrics.jsonl").exists():
        return []
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind is None or line["event"] == kind]


def sample(kind: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of an event of this kind: these, and some value for each other one that it must have."""
    values: dict[str, Any] = {
        "a whole number from 0": 1, "a number": 1.0, "a number of seconds": 1.0, "a string": "x",
        "a list of strings": [],
    }  # fmt: skip
    return {name: values[kind.words] for name, kind in EVENTS[kind].fields.items()} | fields


class Payload:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def processes_using(run: Path, also: str = "") -> list[int]:
    """Return the processes whose command line contains this run folder, and another text."""
    lines = {each.pid: " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if str(run) in line and also in line and pid != os.getpid()]


def send_all(number: signal.Signals, processes: Iterable[int]) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until(happened: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait until something has happened; fail with what did not after so many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"{what} within {seconds:g} s"
        time.sleep(0.02)


def wait_for_step(run: Path, step: int, timeout: float = 120) -> None:
    wait_until(lambda: any(e["step"] >= step for e in events(run, "step")), f"no step {step}", timeout)
