"""An engine that samples over HTTP."""

import fcntl
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.errors import RolloutError
from nemo_opd.files import open_unlinked, storage_errors
from nemo_opd.handoff.shared_memory import FileDescriptor
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.rollout.engine_interface import (
    Completion,
    Engine,
    EngineSpec,
    Generator,
    Request,
    Sampling,
    StudentModel,
    check_lengths,
)
from nemo_opd.rollout.server.client import ROUNDING, Client, Http, RequestContext, checked_logprobs
from nemo_opd.rollout.server.server_process import (
    HOST,
    NAME,
    ModelFolder,
    Program,
    ServerProcess,
    Shapes,
    default_share,
    openai_models,
    shapes_in,
)
from nemo_opd.rollout.server.sglang import SGLang
from nemo_opd.rollout.server.vllm import VLLM
from nemo_opd.types import Closing

PROGRAMS: dict[str, type[Program]] = {"vllm": VLLM, "sglang": SGLang}
"""`rollout.program` → program. A test checks that none is missing."""
_POLL_S = 0.2
_WEIGHTS, _LOCK = "rollout_weights_", ".lock"
"""Beginning of the name of a folder for weights, and its lock."""


class ServerEngine(Closing, Generator):
    """An engine on a server that is started here or runs at `rollout.url`.

    A server started here has its own session, an environment without launcher variables, and a log in
    `workdir/server.log`. Its processes and temporary files are removed by `close`, and also if this process is killed.
    A server at `rollout.url` needs the program's options (`Program.hint`); `close` leaves it running with the last
    weights.

    Calls from several threads are serialized. No request is in flight while weights change, so a completion's `version`
    is exact.
    """

    def __init__(self, settings: ServerRollout, spec: EngineSpec, model: str | Path, version: int = 0) -> None:
        """Start or find the server, and return once it has answered a request.

        model: folder or hub name of the first weights. Raises RolloutError, after cleaning up, if the server does not
        answer within `rollout.start_timeout_s`.
        """
        self._settings, self._version = settings, version
        self._program = PROGRAMS[settings.program]()
        self._sleeps, self._is_asleep = spec.sleeps, False
        self._lock = threading.Lock()
        self._process: ServerProcess | None = None
        self._failure: str | None = None
        with ExitStack() as undo:
            undo.callback(self.close)
            model = str(model.resolve()) if isinstance(model, Path) else model
            self._first = ModelFolder.read(Path(model)) if Path(model).is_dir() else None
            self._max_length = spec.max_length or (self._first.max_positions if self._first else None)
            self._socket: Path | None = None
            self._headers: dict[str, str] = {}
            url = (settings.url or self._start(model, spec)).rstrip("/")
            is_foreign = self._process is None
            hint = self._program.hint if is_foreign else ""
            self._http = Http(
                url,
                settings.start_timeout_s,
                trust_env=is_foreign,
                hint=hint,
                headers=self._headers,
                socket=self._socket,
            )
            self._client: Client[Completion] = Client(
                urls=[url + self._program.path],
                concurrency=settings.concurrency,
                timeout_s=settings.request_timeout_s,
                retries=settings.retries,
                trust_env=is_foreign,
                headers=self._headers,
                socket=self._socket,
            )
            name = self._first_name(model)
            head_size = max(spec.vocab_size, self._first.head_size if self._first else 0)
            self._context = RequestContext(name, spec.end_ids, spec.vocab_size, head_size)
            self._probe()
            undo.pop_all()

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._version

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._http.url

    @property
    def retried(self) -> int:
        """Number of requests sent again, so far."""
        return self._client.retried

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return one completion per request, in order.

        If sampling is warped, a second request asks for the raw log-probabilities of the sampled tokens.
        Raises RolloutError if the server rejects a request, all tries of a request fail, or the server dies.
        """
        check_lengths(requests, self._max_length)
        with self._lock:
            self._check_usable()
            self._wake()
            completions = self._client.complete(
                [self._program.body(request, sampling, self._context) for request in requests],
                lambda i, reply: self._context.completion(requests[i], self._program.answer(reply), self._version),
                self._check_process,
            )
            if sampling.is_warped and sampling.needs_raw:
                return self._add_raw_logprobs(requests, completions)
            return completions

    def _add_raw_logprobs(self, requests: Sequence[Request], completions: list[Completion]) -> list[Completion]:
        pairs = zip(requests, completions, strict=True)
        bodies = [self._program.raw_body(*pair, self._context) for pair in pairs]

        def read(i: int, reply: Any) -> Completion:
            raw = self._program.raw_logprobs(reply, completions[i])
            return replace(completions[i], logprobs=checked_logprobs(raw, len(completions[i].ids)))

        return self._client.complete(bodies, read, self._check_process)

    def update_weights(self, folder: Path, version: int) -> None:
        """Load the weights in a Hugging Face folder, which the server must see under the same path.

        Waits for requests in flight. Raises RolloutError if the folder does not hold this complete model, which keeps
        the old weights, or if the server fails to load it, which makes the engine unusable.
        """
        folder = folder.resolve()
        # Some servers crash on a folder that they cannot read.
        self._check_same_model(ModelFolder.read(folder).shapes, folder)
        with self._lock:
            self._load(folder, version)
            self._version = version

    @property
    def takes_memory(self) -> bool:
        """Whether the server can load weights from the memory of another process on this machine."""
        return self._process is not None and self._program.loads_files

    def update_from_memory(self, file: FileDescriptor, version: int) -> bool:
        """Load the weights in a safetensors file that a process holds in memory.

        Returns False and keeps the old weights if the process is on another machine, or the server cannot access it, as
        in a container. Raises RolloutError as `update_weights` does.
        """
        try:
            file.check()
            shapes = shapes_in([Path(file.path)])
        except (OSError, SafetensorError):
            return False
        self._check_same_model(shapes, "the student's process")
        with self._lock, self._weight_update(version):
            is_loaded = self._program.load_files(self._http, [file.path], version)
            if is_loaded:
                self._version = version
        return is_loaded

    def rest(self) -> None:
        """Let the server release its GPU memory until the next call, if it is set to sleep. Raises RolloutError."""
        if not self._sleeps:
            return
        with self._lock:
            if not self._is_asleep:
                self._check_usable()
                try:
                    self._program.sleep(self._http)
                except RolloutError as error:
                    raise RolloutError(
                        f"the rollout server cannot release its memory: {error}; set rollout.sleep=false"
                    ) from error
                self._is_asleep = True

    def _wake(self) -> None:
        if not self._is_asleep:
            return
        try:
            self._program.wake(self._http)
        except RolloutError as error:
            raise RolloutError(
                f"the rollout server cannot get its memory back: {error}; lower rollout.memory_share, or set "
                "rollout.sleep=false"
            ) from error
        self._is_asleep = False

    def close(self) -> None:
        """End the server if it was started here; may be called twice."""
        self._failure = self._failure or "it is closed"
        if self._process is not None:
            self._process.close()

    def _start(self, model: str, spec: EngineSpec) -> str:
        settings, program = self._settings, self._program
        share = settings.memory_share or default_share(settings, spec)
        folder = Path(tempfile.mkdtemp(prefix="opd_server_"))
        # All users of the machine can reach a port, so its server asks for a key.
        if program.socket_option is not None:
            self._socket = folder / "http"
            address, url = [program.socket_option, str(self._socket)], "http://localhost"
        else:
            port, key = str(_free_port()), secrets.token_hex(32)  # no leading hyphen
            self._headers = {"Authorization": f"Bearer {key}"}
            address, url = ["--host", HOST, "--port", port], f"http://{HOST}:{port}"
            address += program.key_arguments(key, folder)
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(spec.gpus)} if spec.gpus else {}
        arguments = [*program.arguments(model, spec, share), *address, *settings.options]
        self._process = ServerProcess(
            [*(settings.command or program.command), *arguments],
            {**program.environment, **devices, **settings.environment},
            spec.workdir / "server.log",
            folder,
        )
        return url

    def _first_name(self, model: str) -> str:
        """Wait for the server, load the model if the server may hold other weights, and return the model's name."""
        self._wait()
        if self._process is not None:
            return NAME
        name = _name_among(openai_models(self._http), model, self.url)
        if self._first is not None:
            self._load(Path(model), self._version)
        return name

    def _wait(self) -> None:
        limit_s = self._settings.start_timeout_s
        deadline = time.monotonic() + (_POLL_S if self._process is None else limit_s)
        while not self._http.is_healthy():
            self._check_process()
            if time.monotonic() > deadline:
                if self._process is None:
                    raise RolloutError(
                        f"rollout.url={self._settings.url}: there is no healthy server; start it, or leave out url"
                    )
                raise self._process.error(
                    f"the rollout server was not ready in {limit_s:g} s (rollout.start_timeout_s)"
                )
            time.sleep(_POLL_S)

    def _probe(self) -> None:
        """Raise RolloutError if the server does not return token ids and the required log-probabilities."""
        # With top-k 1, the sampled token has probability 1 under the sampling policy.
        settings = self._settings
        configured = Sampling(settings.temperature, settings.top_p, settings.top_k)
        sampling = Sampling(top_k=1 if self._program.sees_cuts else None, needs_raw=configured.is_warped)
        try:
            (probe,) = self.generate([Request(np.zeros(1, np.int32), max_new_tokens=1, seed=0)], sampling)
            if self._program.sees_cuts and probe.behaviour_logprobs[0] < -ROUNDING:
                raise RolloutError(
                    "its log-probabilities are not those of the sampling policy, after temperature, top-k and top-p"
                )
        except RolloutError as error:
            hint = f"; {self._program.hint}" if self._process is None or settings.command else ""
            raise RolloutError(f"the rollout server cannot be used: {error}{hint}") from error

    def _check_same_model(self, shapes: Shapes, where: object) -> None:
        if self._first is not None:
            self._first.check_same_model(shapes, where)

    def _load(self, folder: Path, version: int) -> None:
        with self._weight_update(version):
            self._program.load(self._http, folder, version)

    @contextmanager
    def _weight_update(self, version: int) -> Iterator[None]:
        """Wrap a change of the weights. After a failure the weights are unknown, so the engine becomes unusable."""
        self._check_usable()
        self._wake()
        self._failure = f"version {version} of the weights was not loaded"
        try:
            yield
        except RolloutError as error:
            self._check_process()
            message = f"{self._failure}: {error}"
            raise (RolloutError(message) if self._process is None else self._process.error(message)) from error
        self._failure = None

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise RolloutError(f"the rollout server at {self.url} cannot be used any more: {self._failure}")
        self._check_process()

    def _check_process(self) -> None:
        if self._process is not None:
            self._process.check()


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _name_among(served: dict[str, str], model: str, url: str) -> str:
    """Return the server's name for the model; a folder can be loaded into a server's only model.

    Raises RolloutError if the server serves other models.
    """
    names = [name for name, source in served.items() if model in (name, source)]
    if not names and len(served) == 1 and Path(model).is_dir():
        return next(iter(served))
    if not names:
        raise RolloutError(f"rollout.url={url} serves {', '.join(served) or 'nothing'} and not {model}")
    return names[0]


class _StudentServer(ServerEngine):
    """A server that reads the student's weights from memory if it can, else from a folder."""

    def __init__(
        self, settings: ServerRollout, spec: EngineSpec, first: Path, version: int, student: StudentModel, folder: Path
    ) -> None:
        """Start or find the server. folder: holds the weights of at most two versions, at first those in `first`."""
        super().__init__(settings, spec, first, version)
        self._student, self._folder, self._dtype = student, folder, spec.dtype
        self._reads_memory = self.takes_memory

    def follow(self, version: int) -> None:
        if version == self.version:
            return
        previous = _version_folder(self._folder, self.version)
        if self._reads_memory:
            with self._student.held_weights(self._dtype) as file:
                self._reads_memory = self.update_from_memory(file, version)
        if not self._reads_memory:
            folder = _version_folder(self._folder, version)
            self._student.export(folder, self._dtype)
            self.update_weights(folder, version)
        shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def for_student(settings: ServerRollout, spec: EngineSpec, student: StudentModel, version: int) -> Iterator[Engine]:
    """Open the engine of a run. Raises RolloutError if the server does not start."""
    with _weights_folder(settings.weights_folder or spec.workdir) as folder:
        first = _version_folder(folder, version)
        student.export(first, spec.dtype)
        with _StudentServer(settings, spec, first, version, student, folder) as server:
            server.rest()
            yield server


@contextmanager
def _weights_folder(parent: Path) -> Iterator[Path]:
    """Create a private folder, locked while it is in use, and remove those of killed runs.

    Each run has its own: with a common one, two runs would sample each other's weights.
    """
    with storage_errors(parent, instead="choose another rollout.weights_folder"):
        parent.mkdir(parents=True, exist_ok=True)
        for lock in parent.glob(f"{_WEIGHTS}*/{_LOCK}"):
            with suppress(OSError), open_unlinked(lock, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_WEIGHTS, dir=parent))
    try:
        with open_unlinked(folder / f"{_LOCK}.new", "w") as file:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            Path(file.name).rename(folder / _LOCK)  # after locking, as an unlocked one counts as abandoned
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def for_model(settings: ServerRollout, spec: EngineSpec, model: str, _: str) -> Iterator[Generator]:
    """Open the engine of an evaluated model. Raises RolloutError if the server does not start."""
    with ServerEngine(settings, spec, resolve(model)) as server:
        yield server


def _version_folder(folder: Path, version: int) -> Path:
    return folder / f"version_{version:06d}"
