"""An engine that samples over HTTP."""

import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.errors import RolloutError
from nemo_opd.handoff.shared_memory import FileDescriptor
from nemo_opd.rollout.base import Completion, Engine, Request, Sampling
from nemo_opd.rollout.lengths import check_lengths
from nemo_opd.rollout.server.answer import ROUNDING, Expected, checked_logprobs
from nemo_opd.rollout.server.client import Client
from nemo_opd.rollout.server.folder import ModelFolder, Shapes, shapes_in
from nemo_opd.rollout.server.http import Http
from nemo_opd.rollout.server.process import ServerProcess
from nemo_opd.rollout.server.program import HOST, Launch, Program, Terms
from nemo_opd.rollout.server.sglang import SGLang
from nemo_opd.rollout.server.transformers import Transformers
from nemo_opd.rollout.server.vllm import VLLM

PROGRAMS: dict[str, type[Program]] = {"vllm": VLLM, "sglang": SGLang, "transformers": Transformers}
LOOK_S = 0.2
ALONE, BESIDE = 0.9, 0.3
"""Shares of memory of a server that has its GPUs to itself, and of one that has not, or runs on CPUs."""


class ServerEngine(Engine):
    """A server that was started here, or one that runs and was given by its address.

    One that was started here has its own session, an environment without any launcher's variables, and a log in
    `workdir/server.log`; all of its processes and temporary files are gone after `close`, and also when this process is
    killed. From the other it expects the program's own options (`Program.hint`); `close` leaves it running, with the
    last weights.

    Calls from several threads wait for each other: no request is under way while weights change, so that a completion's
    version is of the weights that sampled it.
    """

    def __init__(
        self,
        settings: ServerRollout,
        *,
        model: str | Path,
        vocab_size: int,
        end_ids: Collection[int],
        dtype: str,
        workdir: Path,
        version: int = 0,
        max_length: int | None = None,
        rounds_logits: bool = False,
        beside_training: bool = False,
    ) -> None:
        """model: what to sample with at first, a folder or a hub name. vocab_size: tokens there are. end_ids: each ends
        a sequence. dtype: of the server's weights, by its name. max_length: tokens of prompt and response together.
        rounds_logits: to the dtype, as the losses' logits are with handoff=logits. beside_training: on the same
        devices, unless the settings give the server GPUs of its own.

        Returns when the server has answered a request. Raises RolloutError where it does not, in
        `rollout.start_timeout_s` at most; nothing is left behind then.
        """
        self._settings, self._version = settings, version
        self._program = PROGRAMS[settings.program]()
        self._turn = threading.Lock()
        self._process: ServerProcess | None = None
        self._failure: str | None = None
        with ExitStack() as undo:
            undo.callback(self.close)
            model = str(model.resolve()) if isinstance(model, Path) else model
            self._first = ModelFolder.read(Path(model)) if Path(model).is_dir() else None
            self._max_length = max_length or (self._first.max_positions if self._first else None)
            launch = Launch(
                model,
                dtype,
                max_length,
                free_port(),
                fp32_logits=dtype != "float32" and not rounds_logits,
                memory_share=settings.memory_share or default_share(settings, beside_training),
            )
            self._url = settings.url or self._start(launch, workdir)
            self._client = self._make_client()
            name = self._first_name(model)
            head = self._first.head_size if self._first else 0
            self._terms = Terms(name, sorted(end_ids), vocab_size, max(vocab_size, head))
            self._probe()
            undo.pop_all()

    @property
    def version(self) -> int:
        return self._version

    @property
    def url(self) -> str:
        """Of the server."""
        return self._url

    @property
    def retried(self) -> int:
        """Requests sent again, so far."""
        return self._client.retried

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order.

        Where sampling is warped, most programs are asked a second time, for the raw log-probabilities of what they
        sampled. Raises RolloutError for a request the server refuses, one that had all its tries, and a server that
        died.
        """
        check_lengths(requests, self._max_length)
        with self._turn:
            self._check_usable()
            expected = Expected(self._terms.model, self._terms.vocab_size, frozenset(self._terms.end_ids))
            completions = self._client.complete(
                [self._program.body(each, sampling, self._terms) for each in requests],
                lambda i, reply: expected.completion(requests[i], self._program.answer(reply), self._version),
                self._check_process,
            )
            return self._with_raw(requests, completions) if sampling.is_warped and sampling.needs_raw else completions

    def _with_raw(self, requests: Sequence[Request], completions: list[Completion]) -> list[Completion]:
        """The completions with raw log-probabilities, where they are still without."""
        made = zip(requests, completions, strict=True)
        bodies = [body for body in (self._program.raw_body(*each, self._terms) for each in made) if body is not None]

        def read(i: int, reply: Any) -> Completion:
            known = self._program.raw_logprobs(reply, completions[i])
            return replace(completions[i], logprobs=checked_logprobs(known, len(completions[i].ids)))

        return self._client.complete(bodies, read, self._check_process) if bodies else completions

    def update_weights(self, folder: Path, version: int) -> None:
        """Sample from now on with the model in a Hugging Face folder, which the server must see under the same path.

        Waits for requests under way. Raises RolloutError: with the weights as before for a folder that has not this
        model whole, and with an engine of no use any more where the server itself does not take it.
        """
        folder = folder.resolve()
        # Some servers die of a folder they cannot read.
        self._check_same_model(ModelFolder.read(folder).shapes, folder)
        with self._turn:
            http = self._http()
            name = self._loaded(http, self._terms.model, str(folder), version)
            self._terms, self._version = replace(self._terms, model=name), version

    @property
    def takes_memory(self) -> bool:
        """Whether it may be given weights that a process of this machine holds in memory."""
        return self._process is not None and self._program.loads_files

    def update_from_memory(self, file: FileDescriptor, version: int) -> bool:
        """The same with safetensors that a process holds in memory.

        Returns False, with the weights as before, where the process is on another machine, or the server in a world of
        its own, such as a container, where it cannot see it. Raises RolloutError as `update_weights` does.
        """
        try:
            file.check()
            shapes = shapes_in([Path(file.path)])
        except (OSError, SafetensorError):
            return False
        self._check_same_model(shapes, "the student's process")
        with self._turn, self._replacing(version):
            is_taken = self._program.load_files(self._http(), [file.path], version)
            if is_taken:
                self._version = version
        return is_taken

    def _check_same_model(self, shapes: Shapes, where: object) -> None:
        if self._first is not None:
            self._first.check_same_model(shapes, where)

    def close(self) -> None:
        """End the server where it was started here. Closing twice is closing once."""
        self._failure = self._failure or "it is closed"
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self, launch: Launch, workdir: Path) -> str:
        command = self._settings.command or self._program.command
        self._process = ServerProcess(
            [*command, *self._program.arguments(launch), *self._settings.options],
            {**self._program.environment, **self._settings.environment},
            workdir / "server.log",
        )
        return f"http://{HOST}:{launch.port}"

    def _make_client(self) -> Client:
        settings, most = self._settings, self._program.max_concurrency
        return Client(
            url=self._url.rstrip("/") + self._program.path,
            concurrency=settings.concurrency if most is None else min(settings.concurrency, most),
            timeout_s=settings.request_timeout_s,
            retries=settings.retries,
            trust_env=self._is_foreign,
        )

    @property
    def _is_foreign(self) -> bool:
        return self._settings.url is not None

    def _http(self) -> Http:
        hint = self._program.hint if self._is_foreign else ""
        return Http(self._url, timeout_s=self._settings.start_timeout_s, trust_env=self._is_foreign, hint=hint)

    def _first_name(self, model: str) -> str:
        """Wait for the server, see to it that it has the model, and return the name it gives it."""
        http = self._http()
        self._wait(http)
        served = self._program.served(http)
        if not self._is_foreign:
            name, is_loaded = self._program.name(model), served is not None
        else:
            # What it was started with is not known; what it loads now is.
            name = model if served is None else named(served, model, self._url)
            is_loaded = self._first is None
        return name if is_loaded else self._loaded(http, name, model, self._version)

    def _wait(self, http: Http) -> None:
        deadline = time.monotonic() + (LOOK_S if self._is_foreign else self._settings.start_timeout_s)
        while not http.is_healthy():
            self._check_process()
            if time.monotonic() > deadline:
                raise self._late()
            time.sleep(LOOK_S)

    def _late(self) -> RolloutError:
        if self._process is None:
            return RolloutError(f"rollout.url={self._url}: there is no healthy server; start it, or leave out url")
        limit = f"{self._settings.start_timeout_s:g} s (rollout.start_timeout_s)"
        return self._process.error(f"the rollout server was not ready in {limit}")

    def _probe(self) -> None:
        """Raises RolloutError where the server gives no token ids or not the log-probabilities that are needed."""
        # The only token that can be sampled has probability 1 by the policy that samples it.
        settings = self._settings
        wanted = Sampling(settings.temperature, settings.top_p, settings.top_k)
        sampling = Sampling(top_k=1 if self._program.sees_cuts else None, needs_raw=wanted.is_warped)
        try:
            (probe,) = self.generate([Request(np.zeros(1, np.int32), max_new_tokens=1, seed=0)], sampling)
            if self._program.sees_cuts and probe.behaviour_logprobs[0] < -ROUNDING:
                raise RolloutError(
                    "its log-probabilities are not those of the policy that samples, after temperature, top-k and top-p"
                )
        except RolloutError as error:
            hint = f"; {self._program.hint}" if self._is_foreign or self._settings.command else ""
            raise RolloutError(f"the rollout server cannot be used: {error}{hint}") from error

    def _loaded(self, http: Http, name: str, folder: str, version: int) -> str:
        with self._replacing(version):
            return self._program.load(http, name, Path(folder), version)

    @contextmanager
    def _replacing(self, version: int) -> Iterator[None]:
        """Inside, weights change: until it is known which are there, none are."""
        self._check_usable()
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
            raise RolloutError(f"the rollout server at {self._url} cannot be used any more: {self._failure}")
        self._check_process()

    def _check_process(self) -> None:
        if self._process is not None:
            self._process.check()


def default_share(settings: ServerRollout, beside_training: bool) -> float:
    is_beside = beside_training and "CUDA_VISIBLE_DEVICES" not in settings.environment
    return ALONE if torch.cuda.is_available() and not is_beside else BESIDE


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def named(served: dict[str, str], model: str, url: str) -> str:
    """The name, of those that a server has, by which to ask for a model; the only one may have any. RolloutError."""
    fitting = [name for name, root in served.items() if model in (name, root)]
    if not fitting and len(served) == 1 and Path(model).is_dir():
        return next(iter(served))
    if not fitting:
        raise RolloutError(f"rollout.url={url} serves {', '.join(served) or 'nothing'} and not {model}")
    return fitting[0]
