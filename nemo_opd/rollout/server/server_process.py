"""The interface of programs that serve a model, the process of a server, and the folder of its model."""

import json
import os
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from nemo_opd.config.rollout import RolloutBase, ServerRollout
from nemo_opd.config.secrets import is_secret_name, without_secrets
from nemo_opd.errors import RolloutError
from nemo_opd.files import open_unlinked
from nemo_opd.models.folder import safetensors_files
from nemo_opd.rollout.engine_interface import Completion, EngineSpec, Request, Sampling
from nemo_opd.rollout.server import guard
from nemo_opd.rollout.server.client import Answer, Http, RequestContext

Json = dict[str, Any]
HOST = "127.0.0.1"
NAME = "student"
"""The model's name on a server that is started here."""
OWN_SHARE, COMMON_SHARE = 0.9, 0.3
"""Memory shares of a server: on separate GPUs, and at least on the training's GPUs or on CPUs."""
_SEED_BITS = 31
"""Seed bits that all programs use; some programs' random generators drop higher ones."""
_INHERITED_VARIABLES = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("LIBRARY_PATH", "CPATH", "CC", "CXX", "VIRTUAL_ENV", "CONDA_PREFIX"),
}
_INHERITED_PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "CUDA", "NVIDIA_", "NCCL_", "GLOO_", "ROCM_", "HIP_", "UCX_", "MKL_", "KMP_"),
    *("HF_", "TRANSFORMERS_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "VLLM_", "SGLANG_", "FLASHINFER_"),
    "NEMO_OPD_",
)
"""Variables that a server gets from this process, unless launchers or secrets have such names."""
_CLOSE_S = guard.GRACE_S + 10.0
"""Time for all of a server's processes to end."""
_TAIL_LINES = 20
_CAUSE = re.compile(r"(?:^|\s)([\w.]+(?:Error|Exception): .+)")
_WARNING = re.compile(r"\bWARN(ING)?\b")
_CAUSE_LENGTH = 400
"""Characters of the cause in errors."""
Shapes = Mapping[str, tuple[int, ...]]
"""Tensor shapes by name."""


class Program(ABC):
    """A serving program: its command line, its requests and answers, and its way to load new weights."""

    command: ClassVar[tuple[str, ...]]
    """Default command that starts the program."""
    environment: ClassVar[Mapping[str, str]]
    path: ClassVar[str]
    """URL path of requests for completions."""
    sees_cuts: ClassVar[bool] = True
    """Whether its log-probabilities include top-k and top-p, and not only the temperature."""
    loads_files: ClassVar[bool] = False
    """Whether it implements `load_files`."""
    socket_option: ClassVar[str | None] = None
    """Option that names a Unix socket to listen at; None if the program only listens at ports, with `key_arguments`."""
    hint: ClassVar[str]
    """Options that a user-started server needs, for error messages."""

    @abstractmethod
    def arguments(self, model: str, spec: EngineSpec, memory_share: float) -> list[str]:
        """Return the arguments that follow the command, without the address.

        memory_share: share of each GPU's memory, or of the machine's memory on CPUs, that the server may use in total.
        """

    def key_arguments(self, key: str, folder: Path) -> list[str]:
        """Return the arguments by which the server asks for `Authorization: Bearer key`.

        The key stands in a file of `folder`, since all users see command lines.
        """
        raise NotImplementedError

    @abstractmethod
    def body(self, request: Request, sampling: Sampling, context: RequestContext) -> Json:
        """Return the body of a request for a completion."""

    @abstractmethod
    def answer(self, reply: Json) -> Answer:
        """Read the reply to `body`. Raises KeyError, TypeError or IndexError if it has another form."""

    @abstractmethod
    def raw_body(self, request: Request, completion: Completion, context: RequestContext) -> Json:
        """Return the body of a request for the raw log-probabilities of a completion.

        The model reads the sampled sequence once, without sampling it again.
        """

    @abstractmethod
    def raw_logprobs(self, reply: Json, completion: Completion) -> object:
        """Read the reply to `raw_body`. Raises KeyError, TypeError or IndexError if it has another form."""

    @abstractmethod
    def load(self, http: Http, folder: Path, version: int) -> None:
        """Load the weights in a folder, and drop all caches of the old weights. Raises RolloutError."""

    def load_files(self, http: Http, files: Sequence[str], version: int) -> bool:
        """Load weights from safetensors files, which may be in a process's memory (/proc/PID/fd/NUMBER).

        Returns False and keeps the old weights if the server cannot read the files. Raises RolloutError.
        """
        raise NotImplementedError

    def sleep(self, http: Http) -> None:
        """Release GPU memory: keep the weights in main memory, and drop the cache. Raises RolloutError."""
        raise NotImplementedError

    def wake(self, http: Http) -> None:
        """Undo `sleep`. Raises RolloutError."""
        raise NotImplementedError


def openai_models(http: Http) -> dict[str, str]:
    """Return name → source of the models that `/v1/models` lists. Raises RolloutError."""
    try:
        cards = http.get("/v1/models").get("data", [])
        return {str(card["id"]): str(card.get("root") or card["id"]) for card in cards}
    except (AttributeError, KeyError, TypeError) as error:
        raise RolloutError(
            f"{http.url}/v1/models does not list models as OpenAI's does; set another rollout.url"
        ) from error


def short_seed(seed: int) -> int:
    """Hash all bits of a seed to 31 bits."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) >> (32 - _SEED_BITS)


class ServerProcess:
    """A command in its own session that logs to a file and ends with this process, however this process ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path) -> None:
        """Start the command. Raises RolloutError if the log cannot be written.

        folder: private folder for its temporary files, which is removed with the server.
        """
        self.command, self.log = tuple(command), log
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with open_unlinked(log, "w", permissions=0o600) as stream:
                os.fchmod(stream.fileno(), 0o600)  # SGLang logs its key, maybe to the file of an earlier run
                self._guard = subprocess.Popen(
                    # -P: modules in the guard's folder would shadow others.
                    [sys.executable, "-P", guard.__file__, str(folder), *self.command],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=_server_environment(environment),
                    start_new_session=True,
                )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise RolloutError(f"cannot start {self.command[0]}, which logs to {log}: {error}") from error

    def check(self) -> None:
        """Raise RolloutError if the server has died."""
        if self._guard.poll() is not None:
            raise self.error(
                f"the rollout server died (exit code {self._guard.returncode}; started with {' '.join(self.command)})"
            )

    def error(self, message: str) -> RolloutError:
        """Return an error with its cause from the log, and the log's last lines as a note.

        With several processes, the log ends with consequences of the error, so the first error counts as the cause.
        """
        lines = self.log.read_text(errors="replace").splitlines()
        error = RolloutError(f"{message}: {cause(lines)}; its log is {self.log}")
        error.add_note("\n".join(lines[-_TAIL_LINES:]))
        return error

    def close(self) -> None:
        """End all of the server's processes in bounded time; may be called twice."""
        stdin = self._guard.stdin
        if stdin is not None and not stdin.closed:
            stdin.close()
        try:
            self._guard.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._guard.pid, 9)
            self._guard.wait()


def _server_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that a server needs, updated with `overrides`.

    Launchers describe this process in others, and some of the rest are secrets.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if (name in _INHERITED_VARIABLES or name.startswith(_INHERITED_PREFIXES))
        and not name.startswith("TORCH_NCCL_")
        and not is_secret_name(name)
    }
    return inherited | dict(overrides)


def cause(log: Sequence[str]) -> str:
    """Return the first error in a log, such as `ValueError: …`, else its last line."""
    errors = (_CAUSE.search(line) for line in log if not _WARNING.search(line))
    first = next((match.group(1) for match in errors if match is not None), None)
    last = next((line.strip() for line in reversed(log) if line.strip()), "it logged nothing")
    return without_secrets(first or last)[:_CAUSE_LENGTH]


def default_share(settings: ServerRollout, spec: EngineSpec) -> float:
    """Return the memory share of a server that is started here without `rollout.memory_share`."""
    if torch.cuda.is_available() and (settings.has_own_gpus or not spec.is_training):
        return OWN_SHARE
    return COMMON_SHARE if spec.memory_share is None else spec.memory_share


def server_gpus(rollout: RolloutBase) -> tuple[str, ...]:
    """Return the names of the last `rollout.gpus` GPUs that this process sees."""
    if not isinstance(rollout, ServerRollout) or rollout.gpus is None:
        return ()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = names.split(",") if names else [str(i) for i in range(torch.cuda.device_count())]
    return tuple(visible[-rollout.gpus :])


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A complete model in Hugging Face format."""

    path: Path
    shapes: Shapes
    head_size: int
    """Head rows; 0 if the configuration does not say."""
    max_positions: int | None
    """Longest sequence in tokens; None if the configuration does not say."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a folder. Raises RolloutError unless it holds a complete model in Hugging Face format."""
        try:
            config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
            shapes = shapes_in(safetensors_files(path))
        except (OSError, ValueError, SafetensorError) as error:
            raise RolloutError(f"{path} does not hold a complete model to sample with: {error}") from error
        if not shapes:
            raise RolloutError(f"{path} has no weights to sample with (model.safetensors, or the files of its index)")
        text = config.get("text_config", config)
        return cls(path, shapes, int(text.get("vocab_size") or 0), text.get("max_position_embeddings"))

    def check_same_model(self, shapes: Shapes, where: object) -> None:
        """Raise RolloutError if a tensor is missing or has another shape."""
        for name, shape in self.shapes.items():
            if shapes.get(name) != shape:
                difference = f"{name} is {shapes[name]}, not {shape}" if name in shapes else f"it has no {name}"
                raise RolloutError(f"{where} has another model than {self.path}: {difference}")


def shapes_in(files: Iterable[Path]) -> Shapes:
    """Read the shapes of all tensors. Raises OSError, and SafetensorError for an incomplete file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="np") as tensors:
            # It has no __iter__.
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes
