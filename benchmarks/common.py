"""Shared by the benchmarks: turns of contenders, ranks in fresh processes, memory, a description of the machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fsdptrain.plan.network import unused_port

ROOT = Path(__file__).parent.parent
RANKS = ROOT / "benchmarks/gpu_ranks.py"  # jobs, which run in ranks
LLAMA = {  # 23 million parameters with a vocabulary of 8,192
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
    "num_attention_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
WARM_UP = 2  # first steps of a contender that are not counted
LEAVE_S = 10.0  # in which ranks may end by themselves after one has failed
T = TypeVar("T")


def compute_dtype() -> str:
    """Return the dtype to compute in on this CPU: without units for bfloat16 a product takes 70 times as long in it."""
    import torch

    return "bfloat16" if torch.cpu.get_capabilities().get("avx512_bf16") else "float32"


def alternate(contenders: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return the results of each contender, one for every round. The order alternates, so that none is always first."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            found[name].append(contenders[name]())
    return found


def run_ranks(
    script: Path, world: int, *arguments: str, log: Path | None = None, timeout: float | None = None, **environment: str
) -> list[Any]:
    """Run `python script arguments` on every rank, each with its share of the cores; return what each rank passed on.

    A rank passes its result on with `exit_with_result`. The ranks write to the file `log`, by default to the screen.
    Exits if a rank fails, or if they take more than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        common = os.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)),
            "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
        } | environment  # fmt: skip
        output = opened.enter_context(log.open("a")) if log else None
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments], stdout=output or subprocess.DEVNULL, stderr=output,
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "RESULT_FILE": f"{folder}/{rank}.json"},
            )
            for rank in range(world)
        ]  # fmt: skip
        what, started, failed = f"{script.name} {' '.join(arguments)}", time.monotonic(), 0.0
        try:
            while None in (exit_codes := [process.poll() for process in processes]):
                if timeout and time.monotonic() > started + timeout:
                    sys.exit(f"{what}: more than {timeout:.0f} s")
                failed = failed or (time.monotonic() if any(exit_codes) else 0.0)
                if failed and time.monotonic() > failed + LEAVE_S:  # the others wait for the one that failed
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
        if any(exit_codes):
            last = f": {last_line(log)}" if log else ""
            sys.exit(f"{what}: the ranks exited with {exit_codes}{last}")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world)]


def last_line(log: Path) -> str:
    """Return the last line of a file that is not empty, or an empty text."""
    return next((line.strip() for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")


def exit_with_result(result: Any) -> NoReturn:
    """Pass the result of this rank to `run_ranks` and exit at once: the normal shutdown of gloo sometimes aborts."""
    Path(os.environ["RESULT_FILE"]).write_text(json.dumps(result))
    os._exit(0)


def run_fsdptrain(recipe: str, folder: Path, *overrides: str, **environment: str) -> list[dict[str, Any]]:
    """Run a recipe (YAML without `output_dir`) as a user does; return the events of its metrics. Exits on failure."""
    (folder / "recipe.yaml").write_text(recipe)
    output = Path(tempfile.mkdtemp(dir=folder)) / "run"
    arguments = ["-m", "fsdptrain", "run", str(folder / "recipe.yaml"), f"output_dir={output}", *overrides]
    settings = {"CUDA_VISIBLE_DEVICES": "", "FSDPTRAIN_CACHE": f"{folder}/cache", **environment}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=os.environ | settings)
    if done.returncode:
        sys.exit(f"fsdptrain {' '.join(arguments[2:])} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes."""
    return _process_memory("VmHWM")


def rss() -> int:
    """Return the resident memory of this process in bytes."""
    return _process_memory("VmRSS")


def _process_memory(name: str) -> int:
    line = next(line for line in _lines("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024


def describe_machine() -> str:
    """Return one line with the machine, the relevant versions, the commit and the date."""
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "CPU: unknown")
    memory = next((line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0 0 kB").split()[1]
    commit, versions = "", []
    with contextlib.suppress(OSError):  # not every image has git
        words = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
    for name in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return (
        f"{os.cpu_count()} cores of {cpu.partition(': ')[2]}, {int(memory) / 2**20:.0f} GiB, "
        f"Python {platform.python_version()}, {', '.join(versions)}, fsdptrain {commit.strip() or 'without git'}, "
        f"{time.strftime('%Y-%m-%d')}"
    )


def _lines(path: str) -> Iterator[str]:
    return iter(Path(path).read_text().splitlines()) if Path(path).exists() else iter(())
