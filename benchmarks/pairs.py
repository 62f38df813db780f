"""Steps of fsdptrain and of a plain loop in turns of a few seconds, for machines whose speed drifts.

    python benchmarks/pairs.py [--shape lora] [--dtype DTYPE] [--turns 12]

Both do the work of a shape of benchmarks/throughput.py (`ours` and `plain` there) on two ranks. Both run all the time,
but one is suspended while the other makes two steps. A turn gives the seconds of a step and the CPU seconds that all
processes of a contender have used for it, in which others that use the machine hardly count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from common import compute_dtype, describe_machine, run_ranks
from throughput import WORLD, fsdptrain_job, prepare, workload

STEP = '"step_s"'  # in every line that tells of a step
STEPS = 2  # in a turn
WARM_UP = 2  # turns that are not counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("small", "vocabulary", "lora"), default="lora")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=compute_dtype())
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    options.steps = STEPS * (options.turns + WARM_UP + 2)  # more than are made
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        prepare(options.shape, Path(folder), options)
        starts = {"ours": start_fsdptrain, "plain": start_plain}
        contenders = {name: start(options.shape, Path(folder)) for name, start in starts.items()}
        try:
            compare(contenders, options.turns)
        finally:
            for contender in contenders.values():
                contender.end()


class Contender:
    """Processes that train, and add a line with STEP to the file `steps` at the end of every step."""

    def __init__(self, process: subprocess.Popen[bytes], steps: Path) -> None:
        self.process, self.steps = psutil.Process(process.pid), steps

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def turn(self, steps: int = STEPS) -> tuple[float, float]:
        """Make steps, from the end of one to the end of another; return the wall seconds and CPU seconds of one."""
        for process in self.processes():
            process.resume()
        started, used, goal = time.perf_counter(), self.used(), self.done() + steps
        while self.done() < goal:
            if self.process.status() == psutil.STATUS_ZOMBIE:
                sys.exit(f"{self.steps} has {self.done()} steps, and its processes have ended")
            time.sleep(0.01)
        wall, processor = time.perf_counter() - started, self.used() - used
        for process in self.processes():
            process.suspend()
        return wall / steps, processor / steps

    def done(self) -> int:
        return self.steps.read_text().count(STEP) if self.steps.exists() else 0

    def used(self) -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in self.processes()))

    def end(self) -> None:
        for process in self.processes():
            process.kill()


def start_fsdptrain(shape: str, place: Path) -> Contender:
    """Start `fsdptrain run` with its defaults."""
    recipe, overrides = fsdptrain_job(shape, place)
    (place / "recipe.yaml").write_text(recipe)
    words = [str(place / "recipe.yaml"), f"output_dir={place}/run", "launch.timeout_s=3600", *overrides]
    settings = {"CUDA_VISIBLE_DEVICES": "", "FSDPTRAIN_CACHE": f"{place}/cache"}
    command = [sys.executable, "-m", "fsdptrain", "run", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | settings)
    return Contender(process, place / "run" / "metrics.jsonl")


def start_plain(shape: str, place: Path) -> Contender:
    """Start the plain loop on all ranks."""
    process = subprocess.Popen([sys.executable, __file__, "ranks", shape, str(place)], stderr=subprocess.DEVNULL)
    return Contender(process, place / "ends")


def train_rank(shape: str, place: Path) -> None:
    """Train on this rank with the plain loop; rank 0 writes a line at the end of every step."""
    from peers import train_plain
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if os.environ["RANK"] == "0":
        ends = (place / "ends").open("w", buffering=1)
        register_optimizer_step_post_hook(lambda *_: print(STEP, file=ends))
    train_plain(workload(shape, place))


def compare(contenders: dict[str, Contender], turns: int) -> None:
    """Let the contenders make their steps in turns; print the ratios, plain to ours."""
    for contender in contenders.values():
        contender.turn()  # starts, while the others wait
    ratios = []
    print("turn  ours: wall s, CPU s a step   plain: wall s, CPU s a step   plain to ours: wall, CPU")
    for number in range(turns + WARM_UP):
        names = list(contenders)[:: 1 if number % 2 == 0 else -1]
        found = {name: contenders[name].turn() for name in names}
        (wall, cpu), (plain_wall, plain_cpu) = found["ours"], found["plain"]
        ratio = (plain_wall / wall, plain_cpu / cpu)
        if number >= WARM_UP:
            ratios.append(ratio)
            print(f"{number - WARM_UP + 1:4}{wall:14.2f}{cpu:8.2f}{plain_wall:24.2f}{plain_cpu:8.2f}"
                  f"{ratio[0]:24.2f}{ratio[1]:8.2f}", flush=True)  # fmt: skip
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median of plain to ours: wall {wall:.2f}, CPU {cpu:.2f}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train_rank(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] == ["ranks"]:
        run_ranks(Path(__file__), WORLD, *sys.argv[1:])
    else:
        main()
