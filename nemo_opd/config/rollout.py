"""Sampling from the student (methods.md §10), environments, and alarms about the samples."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from nemo_opd.config.settings import YEAR_S, Excludes, FilePath, Frozen, MayChange, Needs, Settings, UsersCode
from nemo_opd.config.teacher import Address

_ADDRESS_OPTIONS = (
    *("--host", "--port", "--uds", "--config", "--api-key", "--admin-api-key"),
    *("--dist-init-addr", "--data-parallel-address", "--grpc-port"),
)

_Started = Excludes("url")
"""For a server that the run starts."""
_Sampled = Needs("type", ("server",))
"""For samples of a server, as the student's own processes sample with its current weights."""


class TokenSampling(Settings):
    """Distribution from which tokens are sampled."""

    temperature: float = Field(1.0, gt=0)
    """Divisor of the logits before a token is sampled."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; 1: from all tokens."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this many of the likeliest tokens, or from all if null."""


class RolloutBase(TokenSampling):
    """Settings that all engines share."""

    n: int = Field(4, ge=1)
    """Rollouts per prompt; `train.global_batch_size` counts rollouts."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum tokens in one turn of the student."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Maximum tokens of a prompt; longer prompts are dropped and counted. By default `train.max_length` minus
    `max_new_tokens`.
    """
    on_policy_share: float = Field(1.0, ge=0, le=1)
    """Share of each batch's prompts that the student continues itself (the λ of GKD); other prompts use the dataset's
    continuation.
    """
    staleness: Annotated[int, _Sampled] = Field(0, ge=0)
    """Maximum optimizer steps that the sampling weights may lag behind the student's."""
    overlap: Annotated[bool, _Sampled] = False
    """Sample the next batch while the student learns from the current one; needs staleness of at least 1 and
    type=server.
    """


class HFRollout(RolloutBase):
    """Generation by transformers in the student's own processes, with its current weights."""

    type: Literal["hf"] = "hf"
    batch_size: MayChange[int] = Field(64, ge=1)
    """Sequences that a rank samples at a time."""


class ServerRollout(RolloutBase):
    """An OpenAI-compatible server in a separate process that returns token ids and log-probabilities."""

    type: Literal["server"] = "server"
    program: Literal["vllm", "sglang"] = "vllm"
    """Program of the server, started here or already running at `url`."""
    url: MayChange[Address | None] = None
    """Address of a running server (docs/on_policy.md has its options); by default one is started on this machine and
    stopped with the run.
    """
    command: Annotated[MayChange[tuple[str, ...] | None], _Started] = Field(None, min_length=1)
    """Command that starts the server, without model and address, such as [.venv-vllm/bin/vllm, serve]; by default the
    program's own. vLLM's must accept --uds.
    """
    options: Annotated[MayChange[tuple[str, ...]], _Started] = ()
    """More arguments of that command, except address, key and configuration file, which the run chooses."""
    environment: Annotated[MayChange[Frozen[str, str]], _Started] = Field(default_factory=dict)
    """More environment variables of the server, such as CUDA_VISIBLE_DEVICES."""
    gpus: Annotated[MayChange[int | None], _Started] = Field(None, ge=1)
    """GPUs reserved for a server started here, with tensor parallelism: the last ones of this machine. By default it
    shares the training's GPUs.
    """
    sleep: MayChange[Literal["auto"] | bool] = "auto"
    """Whether a vLLM started here releases its GPU memory while teachers and student compute. auto: if it shares the
    training's GPUs, unless overlap=true.
    """
    memory_share: Annotated[MayChange[float | None], _Started] = Field(None, gt=0, le=1)
    """Share of each GPU's (or, on CPUs, the machine's) memory that a server started here uses. By default 0.9 on its
    own GPUs; on the training's GPUs the memory left by the estimate, at least 0.3; on CPUs 0.3.
    """
    start_timeout_s: MayChange[float] = Field(600, gt=0)
    """Seconds for a server started here to become ready, and for any server to load the student's weights."""
    request_timeout_s: MayChange[float] = Field(300, gt=0)
    """Seconds for the completions of one prompt."""
    retries: MayChange[int] = Field(3, ge=0)
    """Number of times that a failed or unusable request is repeated."""
    concurrency: MayChange[int] = Field(256, ge=1)
    """Maximum requests in flight."""
    weights_folder: MayChange[FilePath | None] = None
    """Folder, visible to server and student, in which the student is written for the server, in a subfolder that only
    this user can read; by default the run's directory. A vLLM started here loads only its first weights from it.
    """

    @field_validator("options")
    @classmethod
    def the_address_is_chosen_by_the_run(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            name = option.partition("=")[0].replace("_", "-")
            # Programs also take the beginning of a name.
            if len(name) > 3 and any(address.startswith(name) for address in _ADDRESS_OPTIONS):
                raise ValueError(
                    f"{option}: the run chooses address, key and configuration file of a server that it starts; leave "
                    "it out, or start the server yourself and give rollout.url"
                )
        return options

    @model_validator(mode="after")
    def overlap_is_stale(self) -> Self:
        if self.overlap and not self.staleness:
            raise ValueError("overlap=true samples with weights one step old; write rollout.staleness=1 or more")
        return self

    @model_validator(mode="after")
    def only_an_idle_vllm_sleeps(self) -> Self:
        reasons = {
            f"rollout.program={self.program}": self.program != "vllm",
            f"rollout.url={self.url}, a server that others may use": self.url is not None,
            "rollout.overlap=true, with which it samples all the time": self.overlap,
        }
        for reason, applies in reasons.items():
            if self.sleep is True and applies:
                raise ValueError(f"sleep=true with {reason}; write rollout.sleep=false, or leave it out")
        return self

    @model_validator(mode="after")
    def gpus_are_named_once(self) -> Self:
        if self.gpus is not None and "CUDA_VISIBLE_DEVICES" in self.environment:
            raise ValueError(
                f"gpus={self.gpus} with environment.CUDA_VISIBLE_DEVICES={self.environment['CUDA_VISIBLE_DEVICES']}: "
                "both say which GPUs the server has; leave out one of them"
            )
        return self

    @property
    def shares_devices(self) -> bool:
        """Whether a server is started here on the training's devices."""
        return self.url is None and not self.has_own_gpus

    @property
    def has_own_gpus(self) -> bool:
        """Whether a server started here uses separate GPUs."""
        return self.gpus is not None or "CUDA_VISIBLE_DEVICES" in self.environment

    @property
    def sleeps_on_gpus(self) -> bool:
        """Whether a server started here sleeps between samplings if training runs on GPUs."""
        if self.sleep != "auto":
            return self.sleep
        return self.program == "vllm" and self.shares_devices and not self.overlap


Rollouts = Annotated[HFRollout | ServerRollout, Field(discriminator="type")]


class EnvironmentBase(Settings):
    max_turns: int = Field(4, ge=1)
    """Maximum turns of the student in one rollout."""
    max_response_tokens: int = Field(256, ge=1)
    """Maximum tokens of the environment between two turns; longer answers are cut and marked as cut."""
    call_timeout_s: MayChange[float] = Field(300, gt=0, le=YEAR_S)
    """Seconds for one answer; an environment that takes longer ends the run."""


class CalculatorEnvironment(EnvironmentBase):
    """An environment that answers calls of an arithmetic tool."""

    type: Literal["calculator"] = "calculator"


class FunctionEnvironment(EnvironmentBase):
    """Your own Environment (nemo_opd.rollout.environment), `package.module:Class`, created for each rollout."""

    type: Literal["function"] = "function"
    function: UsersCode
    """`package.module:Class`."""


Environment = Annotated[CalculatorEnvironment | FunctionEnvironment, Field(discriminator="type")]


class Health(Settings):
    """Alarms about the student's samples, relative to the first steps of the run."""

    action: Literal["warn", "stop"] = "warn"
    """stop: save a checkpoint and end the run."""
    patience: int = Field(5, ge=1)
    """Consecutive steps that must cross a limit."""
    max_length_growth: float = Field(4.0, gt=1)
    """Largest mean response length relative to the first steps."""
    max_truncation_rate: float = Field(0.9, gt=0, le=1)
    """Largest share of truncated rollouts."""
    min_entropy: float = Field(0.02, ge=0)
    """Smallest entropy in nats per token."""
    max_repetition: float = Field(0.5, gt=0, le=1)
    """Largest share of a response's 4-grams that occurred earlier in it."""
    max_mismatch: float = Field(0.1, gt=0)
    """Largest mean |log-probability by the engine − by the trainer| of sampled tokens, in nats."""
