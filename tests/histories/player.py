"""A history: what a person, a machine and a cluster do to one run. Each method is one event, and checks what must hold.

The run folder is `runs/run` of the history's own folder, beside the user's inputs (`model/`, `data/`, `recipe.yaml`).
What the methods note is only what the invariants need (`histories.invariants`): which inputs differ now, what of the
run was lost to its owner, and which command may write where.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from histories import invariants
from histories.client import Ended, Server, Started
from histories.world import URL, recipe
from support import send_all, wait_until

from fsdptrain.run_folder.files import unused_name

AHEAD_S = 3600.0  # of a machine whose clock is wrong


class History:
    def __init__(self, server: Server, in_store: bool = False) -> None:
        self.server, self.root = server, server.root
        shutil.rmtree(self.root, ignore_errors=True)
        warm = server.folder / "warm"
        for name in ("model", "data"):
            shutil.copytree(warm / name, self.root / name)
        (self.root / "recipe.yaml").write_text(json.dumps(recipe(self.root)))  # YAML, too
        self.undisturbed = invariants.Undisturbed.of(warm / "runs" / "run", warm / "exports")
        self.in_store = in_store  # the checkpoints
        self.run_dir = self.root / "runs/run"
        self.inputs: dict[Path, bytes] = {}  # files of the user that were changed → as they were
        self.unreadable: dict[Path, int] = {}  # files and folders without rights → their rights
        self.planted: dict[str, bytes] = {}  # name of a file that a user has put somewhere → its content
        self.damaged = False  # files of the run are not as they were written, or gone: a refusal is right
        self.trained_with_change = False  # and it was said: the numbers may be others
        self.log: list[str] = []

    # what a person does with commands

    def run(
        self,
        *overrides: str,
        fault: dict[str, Any] | None = None,
        ahead: float = 0.0,
        name: str = "",
    ) -> Ended:
        folder = self.root / "runs" / name if name else self.run_dir
        words = ["run", self.root / "recipe.yaml", f"output_dir={folder}"] if name else self._run_words()
        before = invariants.Files.of(self.root, self._places_of_run(folder))
        # Without a checkpoint it does not continue: it is another run, to which nothing can be compared.
        self.trained_with_change |= bool((overrides or self.inputs) and not name and not self.steps())
        ended = self.server.run(*words, *overrides, fault=fault, ahead=ahead)
        self._shift_times(folder, ended, ahead)
        self._check(ended, before, folder)
        return ended

    def export(self, out: str = "", step: int | None = None, fault: dict[str, Any] | None = None) -> Ended:
        before = invariants.Files.of(self.root, self._places_of_export(out))
        ended = self.server.run(*self._export_words(out, step), fault=fault)
        self._check(ended, before, self.run_dir)
        if out and ended.code == 0:
            invariants.check_export(self, self.root / out, step)
        return ended

    def _export_words(self, out: str, step: int | None) -> list[object]:
        words: list[object] = ["export", self.run_dir, "--no-compare"]
        return [*words, *(["--out", self.root / out] if out else []), *(["--step", step] if step else [])]

    def _places_of_export(self, out: str) -> list[Path]:
        target = self.root / out if out else self.run_dir / "export"
        aside = [self.run_dir / name for name in ("logs", "export.json")] if not out else []
        return [target, *aside]

    def share(self) -> Ended:
        return self.run(f"checkpoint.path={self.run_dir / 'checkpoints'}", name="other")

    def look(self) -> None:
        """Use `status` and `verify` as commands; the invariants ask the same functions after every event."""
        before = invariants.Files.of(self.root, [])
        for words in (["status", self.run_dir, "--json"], ["status", self.run_dir], ["verify", self.run_dir]):
            self._check(self.server.run(*words), before, self.run_dir)

    # two commands at the same time

    def during(self, frozen: dict[str, Any], second: str, then: dict[str, Any] | None = None) -> None:
        """Freeze a process of a first command at a moment, start a second one, and thaw the first.

        The second one ends before that, unless it is frozen as well (`then`): then the first ends before it.
        """
        exports = frozen["role"] == "command"
        places = [
            *self._places_of_run(self.run_dir),
            *(self._places_of_export("copy") if exports or second == "export --out" else []),
        ]
        before = invariants.Files.of(self.root, places)
        first_step, second_step = (choose(self.steps(), default=None) for choose in (min, max))
        words = self._export_words("copy", first_step) if exports else self._run_words()
        first = self.server.start(*words, fault={**frozen, "do": "freeze"})
        order: list[tuple[Started, int | None]] = [(first, first_step)]
        if first.wait_for_fault():
            wait_until(first.frozen, "no first command is frozen", 10)
            of_second = {
                "run": self._run_words(), "export": self._export_words("", None),
                "export --out": self._export_words("copy", second_step), "status": ["status", self.run_dir, "--json"],
                "verify": ["verify", self.run_dir, "--json"],
            }[second]  # fmt: skip
            other = self.server.start(*of_second, fault={**then, "do": "freeze"} if then else None)
            both = bool(then) and other.wait_for_fault()
            if both:
                wait_until(other.frozen, "no second command is frozen", 10)
            order.insert(int(both), (other, second_step))
        ends = []
        for command, step in order:
            command.thaw()
            ends.append((command.wait(), step))
        wrote = [step for ended, step in ends if ended.code == 0 and "--out" in ended.words]
        assert len(wrote) < 2, "two exports to one folder ended with 0"
        if wrote:
            invariants.check_export(self, self.root / "copy", wrote[0])
        for ended, _ in ends:
            self._check(ended, before, self.run_dir)

    def _run_words(self) -> list[object]:
        place = [f"checkpoint.path={URL}"] if self.in_store else []
        return ["run", self.root / "recipe.yaml", f"output_dir={self.run_dir}", *place]

    def _places_of_run(self, folder: Path) -> list[Path]:
        return [folder, *([self.root / "store", self.root / "store.uploads"] if self.in_store else [])]

    # what happens to files

    def change(self, what: str) -> None:
        """Change an input of the user, which determines the model or the data, if there is a run to continue."""
        if not self.steps():  # here, because a precondition of Hypothesis must not depend on the moment of a kill
            return
        path = self.root / ("model" if what in CHANGED_IN_MODEL else "data") / FILE_OF[what]
        content = path.read_bytes()
        self.inputs.setdefault(path, content)
        path.write_bytes(changed_content(what, content))

    def restore(self) -> None:
        """Undo what can be undone: changed inputs, rights that were taken."""
        for path, content in self.inputs.items():
            path.write_bytes(content)
        self.inputs.clear()
        for path, mode in reversed(self.unreadable.items()):
            with contextlib.suppress(FileNotFoundError):
                path.chmod(mode)
        self.unreadable.clear()

    def take_rights(self, number: int, pattern: str = "**/*") -> None:
        if paths := self.own_files(folders=True, pattern=pattern):
            path = paths[number % len(paths)]
            self.unreadable.setdefault(path, path.stat().st_mode & 0o777)
            path.chmod(0)

    def damage(self, number: int, how: str, newest: bool = False) -> None:
        paths = self.own_files()
        if newest and (steps := self.steps()):
            paths = [path for path in paths if f"step-{max(steps):08d}" in path.parts]
        if not paths:
            return
        path = paths[number % len(paths)]
        content = path.read_bytes()
        self.damaged = True
        if how == "remove":
            path.unlink()
        elif how == "cut":
            os.truncate(path, len(content) // 2)
        elif how == "flip" and content:
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])

    def plant(self, number: int) -> None:
        """Put a file of a user into some folder of the run, but not into what a killed process has left unfinished."""
        inside = [path for path in sorted(self.run_dir.rglob("*")) if path.is_dir()]
        scratch = [path for path in inside if invariants.SCRATCH.fullmatch(path.name)]
        folders = [self.root, *(path for path in inside if not {path, *path.parents} & {*scratch})]
        name = f"mine-{len(self.planted)}.txt"
        self.planted[name] = f"written by a user: {name}\n".encode()
        (folders[number % len(folders)] / name).write_bytes(self.planted[name])

    def move(self, copy: bool = False) -> None:
        if not self.run_dir.is_dir():
            return
        target = unused_name(self.run_dir.with_name("moved"))
        if copy:
            shutil.copytree(self.run_dir, target)
        else:
            self.run_dir.rename(target)
        without_rights = [path for path in self.unreadable if path.is_relative_to(self.run_dir)]
        self.unreadable |= {target / path.relative_to(self.run_dir): self.unreadable[path] for path in without_rights}
        self.run_dir = target

    # what the invariants ask

    def own_files(self, folders: bool = False, pattern: str = "**/*") -> list[Path]:
        """Return the files of the run, in one order; those that a user has put there are left out."""
        places = [self.run_dir, *([self.checkpoints] if self.in_store else [])]
        paths = [path for place in places for path in sorted(place.glob(pattern))]
        found = [path for path in paths if path.name not in self.planted]
        return [path for path in found if path.is_file() or (folders and path.is_dir())]

    @property
    def checkpoints(self) -> Path:
        return self.root / "store/bucket/run" if self.in_store else self.run_dir / "checkpoints"

    def steps(self) -> list[int]:
        return sorted(
            int(path.name[5:]) for path in self.checkpoints.glob("step-????????") if (path / "manifest.json").exists()
        )

    def _shift_times(self, folder: Path, ended: Ended, ahead: float) -> None:
        for path in folder.rglob("*") if ahead else ():
            with contextlib.suppress(FileNotFoundError):
                if (written := path.lstat().st_mtime) >= ended.started - 0.1 and path.is_file():
                    os.utime(path, (written + ahead, written + ahead))

    def _check(self, ended: Ended, before: invariants.Files, folder: Path) -> None:
        self.log.append(f"{' '.join(map(str, ended.words))} → {ended.code}")
        invariants.check_command(ended)
        invariants.check_nothing_left(self, ended)
        before.check(self, ended)
        invariants.check_records(self)

    def settle(self) -> None:
        """Undo what can be undone, and run to the end: nothing may be lost that was not taken from the run."""
        self.restore()
        invariants.check_result(self, self.run())

    def kill_all(self) -> None:
        send_all(signal.SIGKILL, self.server.processes())


CHANGED_IN_MODEL = ("config", "template", "tokenizer")
FILE_OF = {
    "config": "config.json", "template": "chat_template.jinja", "tokenizer": "tokenizer.json",
    "train": "train.jsonl", "held-out": "held-out.jsonl",
}  # fmt: skip


def changed_content(what: str, content: bytes) -> bytes:
    if what == "config":
        fields = json.loads(content)
        return json.dumps({**fields, "rms_norm_eps": fields["rms_norm_eps"] * 1000}).encode()
    if what == "template":
        return content.replace(b"<|end|>", b"<|end|><|end|>")
    if what == "tokenizer":
        fields = json.loads(content)
        vocabulary = fields["model"]["vocab"]
        vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
        return json.dumps(fields).encode()
    *rows, last = content.splitlines()
    return b"\n".join([*rows, last.replace(b"the", b"not"), rows[0]]) + b"\n"
