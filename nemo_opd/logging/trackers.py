"""Trackers, which keep many runs for comparison: MLflow, TensorBoard, Trackio, and Weights & Biases."""

import re
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from nemo_opd.config.run_fields import Logging, Mlflow, Trackio, Wandb
from nemo_opd.config.secrets import leaves
from nemo_opd.errors import ConfigError
from nemo_opd.files import write_atomically, write_obstacle
from nemo_opd.logging.interface import ClosingTable, Logger, RunSummary, score
from nemo_opd.logging.records import read_config
from nemo_opd.progress import working

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_ARTEFACTS = {"model": "final", "best_model": "best", "report": "report/report.html", "config": "config.yaml"}
"""Paths in the run's directory, by name."""
_PARAMETERS_A_CALL, _LONGEST_PARAMETER = 100, 6000
"""Limits of MLflow's servers."""
_SQLITE = "sqlite:///"


class _Tracker(Logger):
    """A logger with one tracked run per output directory, which a continued run reports to again."""

    name: ClassVar[str]
    """Key below `logging`, and folder in the run's directory with the id of the tracked run."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._is_open = self._ended_well = False

    def start(self, run: RunSummary, step: int) -> None:
        path = self._output_dir / self.name / "run_id"
        previous = path.read_text(encoding="utf-8") if step and path.exists() else None
        identity = self._open(run, previous)
        self._is_open = True
        if identity != previous:
            write_atomically(path, identity.encode())

    def summary(self, closing: ClosingTable) -> None:
        self._conclude(results(closing), artefacts(self._output_dir))
        self._ended_well = True

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._finish(ended_well=self._ended_well)

    @abstractmethod
    def _open(self, run: RunSummary, previous: str | None) -> str:
        """Start a run with its configuration, or continue the one with the id `previous`; return the id.

        Raises ConfigError if the settings or the network prevent it.
        """

    @abstractmethod
    def _conclude(self, figures: dict[str, float], paths: dict[str, str]) -> None:
        """Record the results of the run and the paths of its files."""

    @abstractmethod
    def _finish(self, *, ended_well: bool) -> None:
        """Send unsent data, and end the run."""


def results(closing: ClosingTable) -> dict[str, float]:
    """Return the figures of a closing table by name: bits per byte, scores, and the best checkpoint."""
    figures = {f"bits_per_byte/{row.name}": row.bits_per_byte for row in closing.rows if row.bits_per_byte is not None}
    figures |= {
        f"shared_bits_per_byte/{row.name}": row.shared_bits_per_byte
        for row in closing.rows
        if row.shared_bits_per_byte is not None
    }
    figures |= {
        f"score/{row.measure}/{model}": score.value for row in closing.scores for model, score in row.by_model.items()
    }
    if closing.best is not None:
        figures |= {f"best/{closing.best.metric}": closing.best.value, "best/step": closing.best.step}
    return figures


def artefacts(output_dir: Path) -> dict[str, str]:
    """Return the absolute paths of a run's existing outputs by name; the student's averages by their folders' names."""
    paths = {name: output_dir / path for name, path in _ARTEFACTS.items()}
    paths |= {folder.name: folder for folder in sorted(output_dir.glob("final_*"))}
    return {name: str(path.absolute()) for name, path in paths.items() if path.exists()}


class MlflowLogger(_Tracker):
    """Reports to MLflow."""

    name = "mlflow"

    def __init__(self, settings: Mlflow, output_dir: Path) -> None:
        super().__init__(output_dir)
        self._settings = settings
        self._client: Any = None
        self._run_id = ""

    def _open(self, run: RunSummary, previous: str | None) -> str:
        from mlflow import MlflowClient

        with _mlflow_errors("the run could not be started"):
            self._client = MlflowClient(tracking_uri=self._settings.tracking_uri)
            self._run_id = previous or self._new_run(run)
            self._client.update_run(self._run_id, status="RUNNING")
        return self._run_id

    def _new_run(self, run: RunSummary) -> str:
        from mlflow.entities import Param

        name = self._settings.experiment
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        identity: str = self._client.create_run(number, run_name=run.name).info.run_id
        # Parameters of a run cannot be changed, so a continued run does not write them.
        config = [Param(key, value) for key, value in parameters(read_config(self._output_dir)).items()]
        for start in range(0, len(config), _PARAMETERS_A_CALL):
            self._client.log_batch(identity, params=config[start : start + _PARAMETERS_A_CALL])
        return identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(allowed_name(name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _conclude(self, figures: dict[str, float], paths: dict[str, str]) -> None:
        self.log(0, figures)
        for name, path in paths.items():
            self._client.set_tag(self._run_id, f"path.{name}", path)

    def _finish(self, *, ended_well: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if ended_well else "FAILED")


@contextmanager
def _mlflow_errors(problem: str) -> Iterator[None]:
    """Turn errors in the block into ConfigError: MLflow's own, and those of databases."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"logging.mlflow: {problem} ({reason}); check logging.mlflow.tracking_uri (or MLFLOW_TRACKING_URI, if it "
            "is not set) and the network, or write logging.mlflow.enabled=false"
        ) from error


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in MLflow's form: texts by dotted key."""
    return {
        allowed_name(".".join(map(str, path))): str(value)[:_LONGEST_PARAMETER] for path, value in leaves(dict(config))
    }


def allowed_name(name: str) -> str:
    """Replace the characters that MLflow rejects: pass@1 becomes pass_at_1."""
    return re.sub(r"[^\w/.\- :]", "_", name.replace("@", "_at_"))


class TensorBoardLogger(Logger):
    """Event files in the run's folder `tensorboard`; a continued run hides the events after its checkpoint."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._writer: SummaryWriter | None = None
        self._step = 0

    def start(self, run: RunSummary, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._step = step
        folder = self._output_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
        if config := read_config(self._output_dir):
            # Markdown shows indented text verbatim.
            self._writer.add_text("config", indent(yaml.safe_dump(config, sort_keys=False), "    "), step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None, "log before start"
        self._step = step
        for name, value in values.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def summary(self, closing: ClosingTable) -> None:
        assert self._writer is not None, "summary before start"
        lines = ["| model | bits per byte | over shared bytes | note |", "|---|---|---|---|"]
        for model in closing.rows:
            bits = model.bits_per_byte, model.shared_bits_per_byte
            values = " | ".join("" if value is None else f"{value:.4f}" for value in bits)
            lines.append(f"| {model.name} | {values} | {model.note} |")
        if closing.scores:
            lines += ["", "| measure | model | score |", "|---|---|---|"]
        for row in closing.scores:
            for name, estimate in row.by_model.items():
                lines.append(f"| {row.measure} | {name} | {score(*estimate, is_share=row.is_share)} |")
        lines += ["", *(f"- {name}: `{path}`" for name, path in artefacts(self._output_dir).items())]
        self._writer.add_text("result", "\n".join(lines), self._step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class TrackioLogger(_Tracker):
    """Reports to trackio. It identifies runs by name, so names get a few random digits."""

    name = "trackio"

    def __init__(self, settings: Trackio, output_dir: Path) -> None:
        super().__init__(output_dir)
        self._settings = settings
        self._run: Any = None
        self._step = 0

    def _open(self, run: RunSummary, previous: str | None) -> str:
        import trackio

        name = previous or f"{run.name}-{uuid.uuid4().hex[:8]}"
        try:
            with redirect_stdout(StringIO()):  # hides its advice about the dashboard
                self._run = trackio.init(
                    project=self._settings.project,
                    name=name,
                    space_id=self._settings.space,
                    resume="allow" if previous else "never",
                    config=read_config(self._output_dir),
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:
            raise ConfigError(
                f"logging.trackio: the run could not be started ({error}); check logging.trackio.space and the "
                "token of the hub (HF_TOKEN), or write logging.trackio.space=null"
            ) from error
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(values), step=step)

    def _conclude(self, figures: dict[str, float], paths: dict[str, str]) -> None:
        import trackio

        written = trackio.Markdown("\n".join(f"- {name}: `{path}`" for name, path in paths.items()))
        self._run.log({**figures, "artefacts": written}, step=self._step)

    def _finish(self, *, ended_well: bool) -> None:
        import trackio

        with redirect_stdout(StringIO()):
            trackio.finish()


def check_trackers(settings: Logging) -> None:
    """Raise ConfigError for a tracker that the run could not report to. Writes nothing."""
    check_credentials(settings.wandb)
    if settings.mlflow.enabled:
        _check_mlflow(settings.mlflow)
    if settings.trackio.enabled:
        _check_trackio(settings.trackio)


def check_credentials(settings: Wandb) -> None:
    """Raise ConfigError if mode=online has no usable API key, instead of letting wandb prompt for one."""
    if not settings.enabled or settings.mode != "online":
        return
    import wandb

    remedy = "set WANDB_API_KEY, run `wandb login`, or use logging.wandb.mode=offline and `wandb sync` later"
    try:
        logged_in = wandb.login(prompt=False)
    except wandb.errors.Error as error:
        raise ConfigError(f"logging.wandb.mode=online: the API key is not usable ({error}); {remedy}") from error
    if not logged_in:
        raise ConfigError(f"logging.wandb.mode=online needs an API key and none is configured; {remedy}")


def _check_mlflow(settings: Mlflow) -> None:
    """Ask the server for the experiment; of a SQLite file, which asking would create, check the folder."""
    import mlflow

    with working("asking MLflow for the experiment"), _mlflow_errors("its store cannot be used"):
        uri = settings.tracking_uri or mlflow.get_tracking_uri()
        if not uri.startswith(_SQLITE):
            mlflow.MlflowClient(tracking_uri=uri).get_experiment_by_name(settings.experiment)
        elif (obstacle := write_obstacle(Path(uri.removeprefix(_SQLITE)).parent)) is not None:
            raise PermissionError(obstacle)


def _check_trackio(settings: Trackio) -> None:
    if settings.space is not None:
        from huggingface_hub import get_token

        if get_token() is None:
            raise ConfigError(
                f"logging.trackio.space={settings.space}: no token for the hub; set HF_TOKEN, run `hf auth login`, or "
                "write logging.trackio.space=null"
            )
        return
    from trackio.utils import TRACKIO_DIR

    if (obstacle := write_obstacle(TRACKIO_DIR)) is not None:
        raise ConfigError(
            f"logging.trackio: {obstacle}; set TRACKIO_DIR to another folder, or write logging.trackio.enabled=false"
        )


class WandbLogger(_Tracker):
    """Reports to wandb."""

    name = "wandb"

    def __init__(self, settings: Wandb, output_dir: Path) -> None:
        super().__init__(output_dir)
        self._settings = settings
        self._run: Any = None

    def _open(self, run: RunSummary, previous: str | None) -> str:
        import wandb

        online = self._settings.mode == "online"
        identity = previous or uuid.uuid4().hex[:16]
        try:
            self._run = wandb.init(
                project=self._settings.project,
                entity=self._settings.entity,
                mode=self._settings.mode,
                name=run.name,
                id=identity,
                resume="allow" if online else None,
                dir=str(self._output_dir),
                config=read_config(self._output_dir),
                settings=wandb.Settings(console="off", silent=not online, quiet=True),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"logging.wandb: the run could not be started ({error}); check the key and the network, "
                "or use logging.wandb.mode=offline and `wandb sync` later"
            ) from error
        # wandb's own counter only increases, so it would drop steps that a continued run repeats
        self._run.define_metric("*", step_metric="step")
        return identity

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def _conclude(self, figures: dict[str, float], paths: dict[str, str]) -> None:
        self._run.summary.update({**figures, **{f"path/{name}": path for name, path in paths.items()}})

    def _finish(self, *, ended_well: bool) -> None:
        self._run.finish(exit_code=0 if ended_well else 1)
