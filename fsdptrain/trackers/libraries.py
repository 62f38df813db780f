"""One interface over the libraries of trackers: a run begins or continues, gets numbers, texts and a state, and ends.

Names are those of the events: `step/loss`, `eval/loss`. Each library is configured by its own environment variables.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = "fsdptrain"  # unless the recipe or the library's own variable names another
MAX_PARAM = 500  # characters of a param; older servers of MLflow refuse more


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker begins or continues."""

    id: str  # as the tracker returned it; of a run that it does not know yet, a new one
    is_new: bool
    name: str
    project: str | None
    folder: Path  # the run folder
    config: dict[str, Any]  # `recipe`, `plan`


class Tracker:
    """One tracker. Every method may raise or hang: only `trackers.follower` calls them, in a process of its own."""

    continues = True  # `start` has what an earlier process logged about the run; else all is handed over again
    folder: Path | None = None  # where `start` has the library write files, if it does not raise what it cannot write

    def start(self, run: TrackedRun) -> tuple[str, list[str]]:
        """Begin a run or continue it. Return its id, and the URL, or the words of a command, that shows it."""
        raise NotImplementedError

    def log(self, step: int, at: float, numbers: dict[str, float], texts: dict[str, str]) -> None:
        """Record what was measured after a step, at a time in seconds since 1970."""
        raise NotImplementedError

    def configure(self, config: dict[str, Any]) -> None:
        """Add to the configuration of the run what became known since its start."""
        raise NotImplementedError

    def rewind(self, last: int) -> bool:
        """Drop what was logged about steps after `last`. Return whether the tracker can do that."""
        return False

    def finish(self, state: str, message: str) -> None:
        """Send what is left, and mark the run: `finished`, `stopped` or `failed`, with the reason."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """TensorBoard's event files in the run folder."""

    def start(self, run: TrackedRun) -> tuple[str, list[str]]:
        """Begin a file; one of a version without ids is dropped by TensorBoard, since all is written again."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard"
        self._writer = EventFileWriter(str(folder), flush_secs=5)
        if run.is_new:
            self.rewind(-1)
        self.configure(run.config)
        return run.id, ["tensorboard", "--logdir", str(folder)]

    def log(self, step: int, at: float, numbers: dict[str, float], texts: dict[str, str]) -> None:
        """Write one event with all values."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        values += [_text_value(tag, text) for tag, text in texts.items()]
        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._writer.flush()  # a thread writes; `close` does not raise what failed there

    def configure(self, config: dict[str, Any]) -> None:
        """Write each part as a text."""
        self.log(0, time.time(), {}, _texts_of(config))

    def rewind(self, last: int) -> bool:
        """Make TensorBoard drop later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer.add_event(Event(step=last + 1, session_log=SessionLog(status=SessionLog.START)))
        return True

    def finish(self, state: str, message: str) -> None:
        """Close the file; TensorBoard knows no state of a run."""
        self._writer.close()


def _texts_of(config: dict[str, Any]) -> dict[str, str]:
    return {f"config/{part}": json.dumps(value, indent=2) for part, value in config.items()}


def _as_block(text: str) -> str:
    """Return a text as Markdown that shows it as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _text_value(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(
        tag=tag,
        metadata=metadata,
        tensor=TensorProto(dtype=DT_STRING, string_val=[_as_block(text).encode()], tensor_shape={}),
    )


class WeightsAndBiases(Tracker):
    """Weights & Biases, online or, with WANDB_MODE=offline, as files in the run folder."""

    def start(self, run: TrackedRun) -> tuple[str, list[str]]:
        """Begin or continue the run of this id."""
        import wandb

        self._run = wandb.init(
            id=run.id, resume="allow", name=run.name,
            project=run.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            dir=os.environ.get("WANDB_DIR") or str(run.folder / "trackers"),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # W&B's own step cannot go back to one that is made again
        # Of several offline folders with one id, the last to be uploaded replaces the others (wandb#3841).
        self.continues = not self._run.offline
        self.configure(run.config)
        self.folder = Path(self._run.dir).parent
        return run.id, ["wandb", "sync", str(self.folder)] if self._run.offline else [*filter(None, [self._run.url])]

    def log(self, step: int, at: float, numbers: dict[str, float], texts: dict[str, str]) -> None:
        """Log a row of the history; texts are its panels of HTML."""
        import wandb

        shown = {name: wandb.Html(_html(text)) for name, text in texts.items()}
        self._run.log({"step": step, "_timestamp": at, **numbers, **shown})

    def configure(self, config: dict[str, Any]) -> None:
        """Update the config; a resume may have changed it."""
        self._run.config.update(config, allow_val_change=True)

    def finish(self, state: str, message: str) -> None:
        """Mark the run in its summary; W&B itself knows finished and failed."""
        self._run.summary.update({"state": state, "message": message})
        self._run.finish(exit_code=int(state == "failed"))


def _html(text: str) -> str:
    import html

    return f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"


class MLflow(Tracker):
    """MLflow: the store that MLFLOW_TRACKING_URI names, else the one that the library has in the working folder."""

    STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # noqa: RUF012

    def start(self, run: TrackedRun) -> tuple[str, list[str]]:
        """Create a run, or set the one of this id running again."""
        import mlflow

        mlflow.set_experiment(run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        self._client = mlflow.MlflowClient()
        self._run = mlflow.start_run(run_id=None if run.is_new else run.id, run_name=run.name, log_system_metrics=False)
        self.configure(run.config)
        uri = re.sub(r"//[^/@]*@", "//", mlflow.get_tracking_uri())
        info = self._run.info
        page = f"{uri}/#/experiments/{info.experiment_id}/runs/{info.run_id}"
        return info.run_id, [page] if uri.startswith("http") else ["mlflow", "ui", "--backend-store-uri", uri]

    def log(self, step: int, at: float, numbers: dict[str, float], texts: dict[str, str]) -> None:
        """Log all values in one request; texts are artifacts."""
        from mlflow.entities import Metric

        metrics = [Metric(_mlflow_name(name), value, int(1000 * at), step) for name, value in numbers.items()]
        self._client.log_batch(self._run.info.run_id, metrics)
        for name, text in texts.items():
            self._client.log_text(self._run.info.run_id, text, f"step-{step:08}/{_mlflow_name(name)}.txt")

    def configure(self, config: dict[str, Any]) -> None:
        """Log params, `recipe.optim.lr`; what a resume has changed is a tag, since a param keeps its first value."""
        import mlflow

        known = self._client.get_run(self._run.info.run_id).data.params
        params = {_mlflow_name(name): str(value)[:MAX_PARAM] for name, value in _flat(config)}
        mlflow.log_params({name: value for name, value in params.items() if name not in known})
        mlflow.set_tags({name: value for name, value in params.items() if known.get(name, value) != value})

    def finish(self, state: str, message: str) -> None:
        """Set the status, and the reason as a tag."""
        import mlflow

        mlflow.set_tag("message", message)
        mlflow.end_run(self.STATES[state])


def _mlflow_name(name: str) -> str:
    """Return a name in the characters that MLflow allows."""
    return re.sub(r"[^\w\-./ ]", "_", name)


def _flat(config: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


class Trackio(Tracker):
    """Trackio: a local database, or the Space or server that TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names."""

    def start(self, run: TrackedRun) -> tuple[str, list[str]]:
        """Begin or continue the run, whose name has the id, since Trackio looks for runs by name."""
        import trackio

        self._step, project = 0, run.project or PROJECT
        trackio.init(project, name=f"{run.name}-{run.id}", config=run.config, resume="allow", embed=False)
        self.folder = Path(trackio.TRACKIO_DIR)
        return run.id, ["trackio", "show", "--project", project]

    def log(self, step: int, at: float, numbers: dict[str, float], texts: dict[str, str]) -> None:
        """Log a row of numbers, and a panel for each text."""
        import trackio

        self._step = step
        trackio.log({**numbers, **{name: trackio.Markdown(_as_block(text)) for name, text in texts.items()}}, step=step)

    def configure(self, config: dict[str, Any]) -> None:
        """Log each part as a text, since Trackio has the config of a run's start only."""
        self.log(self._step, 0, {}, _texts_of(config))

    def finish(self, state: str, message: str) -> None:
        """Say in an alert that the run was stopped or has failed; Trackio knows no state of a run."""
        import trackio

        if state != "finished":
            trackio.alert(title=state, text=message)
        trackio.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip
