"""What the benchmarks share: who is compared takes turns, each in fresh processes; the machine and its versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

ROOT = Path(__file__).parent.parent
LLAMA = {  # 23 million parameters with a vocabulary of 8,192
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
    "num_attention_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
T = TypeVar("T")


def alternate(contenders: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each contender gave in every round; rounds alternate in direction, so that none is always the first."""
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            found[name].append(contenders[name]())
    return found


def ranks(script: Path, world: int, *words: str, **environment: str) -> list[Any]:
    """Run `python script words` once for each rank, with the cores divided; what each rank left by `tell`."""
    with tempfile.TemporaryDirectory() as folder:
        common = os.environ | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)),
            "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
        } | environment  # fmt: skip
        started = [
            subprocess.Popen(
                [sys.executable, str(script), *words], stdout=subprocess.DEVNULL,
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "TOLD": f"{folder}/{rank}.json"},
            )
            for rank in range(world)
        ]  # fmt: skip
        codes = [process.wait() for process in started]
        if any(codes):
            sys.exit(f"{script.name} {' '.join(words)}: the ranks ended with {codes}")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world)]


def tell(what: Any) -> NoReturn:
    """Leave what this rank measured for `ranks`, and end it (an interpreter shutting down gloo aborts now and then)."""
    Path(os.environ["TOLD"]).write_text(json.dumps(what))
    os._exit(0)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def train(recipe: str, folder: Path, *overrides: str, **environment: str) -> list[dict[str, Any]]:
    """`fsdptrain run` of a recipe (YAML) without `output_dir`, as a user runs it; the events of its metrics."""
    (folder / "recipe.yaml").write_text(recipe)
    output = Path(tempfile.mkdtemp(dir=folder)) / "run"
    words = ["-m", "fsdptrain", "run", str(folder / "recipe.yaml"), f"output_dir={output}", *overrides]
    settings = {"CUDA_VISIBLE_DEVICES": "", "FSDPTRAIN_CACHE": f"{folder}/cache", **environment}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=os.environ | settings)
    if done.returncode:
        sys.exit(f"fsdptrain {' '.join(words[2:])} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def peak_rss() -> int:
    """The most memory this process ever had resident, in bytes."""
    return status("VmHWM")


def rss() -> int:
    """The memory this process has resident, in bytes."""
    return status("VmRSS")


def status(name: str, process: str = "self") -> int:
    """One of the kernel's figures of a process's memory (VmRSS, RssAnon …), in bytes."""
    line = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def machine() -> str:
    """The machine, the versions that matter, and the commit."""
    cpu = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "CPU: unknown")
    memory = next((line for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0 0 kB").split()[1]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    return (
        f"{os.cpu_count()} cores of {cpu.partition(': ')[2]}, {int(memory) / 2**20:.0f} GiB, "
        f"Python {platform.python_version()}, {', '.join(versions)}, fsdptrain {commit.strip() or 'without git'}, "
        f"{time.strftime('%Y-%m-%d')}"
    )


def _lines(path: str) -> Iterator[str]:
    return iter(Path(path).read_text().splitlines()) if Path(path).exists() else iter(())
