"""Sampling from the student (methods.md §10)."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from nemo_opd.config.base import Frozen, Settings
from nemo_opd.config.endpoint import whole_url


class RolloutBase(Settings):
    """Settings that all engines have in common."""

    n: int = Field(4, ge=1)
    """Rollouts of each prompt; `train.global_batch_size` counts rollouts."""
    max_new_tokens: int = Field(256, ge=1)
    """Most tokens in one turn of the student."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens. Longer prompts are dropped and counted; by default those that leave less than `max_new_tokens` of
    `train.max_length`.
    """
    temperature: float = Field(1.0, gt=0)
    """Logits are divided by it before a token is sampled."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; 1: from all."""
    top_k: int | None = Field(None, ge=1)
    """Sample from this number of likeliest tokens; null: from all."""
    on_policy_share: float = Field(1.0, ge=0, le=1)
    """Share of each batch's prompts that the student continues itself; the others come with the continuation that the
    dataset has (the λ of GKD).
    """
    staleness: int = Field(0, ge=0)
    """Optimizer steps that the sampling weights may be behind the student's."""
    overlap: bool = False
    """Sample the next batch while the student learns from this one; needs staleness of at least 1 and an engine with
    its own process.
    """


class HFRollout(RolloutBase):
    """transformers' generation in the student's own processes, with its weights as they are."""

    type: Literal["hf"] = "hf"
    batch_size: int = Field(64, ge=1)
    """Sequences a rank samples at a time."""

    @model_validator(mode="after")
    def weights_are_the_students(self) -> Self:
        for key, value in (("overlap", self.overlap), ("staleness", self.staleness)):
            if value:
                raise ValueError(
                    f"{key}={value}: type=hf samples in the student's own processes, with its weights as they are; "
                    f"leave {key} out, or use rollout=server"
                )
        return self


class ServerRollout(RolloutBase):
    """An OpenAI-compatible server with token ids and log-probabilities, in its own process."""

    type: Literal["server"] = "server"
    program: Literal["vllm", "sglang", "transformers"] = "vllm"
    """Program of the server, started here or found at `url`."""
    url: str | None = None
    """Address of a running server, with the options that docs/on_policy.md names; by default one is started on this
    machine and ended with the run.
    """
    command: tuple[str, ...] | None = Field(None, min_length=1)
    """Starts the server, without model and port; by default the program's own command. For a program in a separate
    virtual environment: [.venv-vllm/bin/vllm, serve].
    """
    options: tuple[str, ...] = ()
    """Further arguments of that command."""
    environment: Frozen[str, str] = Field(default_factory=dict)
    """Further variables of the server's environment, such as CUDA_VISIBLE_DEVICES."""
    gpus: int | None = Field(None, ge=1)
    """GPUs that a vLLM or SGLang started here has for itself, by tensor parallelism: the last of this machine. The
    training uses the first. By default the server shares the training's.
    """
    sleep: Literal["auto"] | bool = "auto"
    """Whether a vLLM started here gives its GPU memory back while teachers and student compute, with its weights in
    main memory. auto: where it shares the training's GPUs, unless overlap=true.
    """
    memory_share: float | None = Field(None, gt=0, le=1)
    """Share of each GPU's memory, or of the machine's on CPUs, that a vLLM or SGLang started here takes for weights and
    cache; by default 0.9 on separate GPUs (`gpus`, or `CUDA_VISIBLE_DEVICES` in `environment`), on the training's
    GPUs what the memory estimate leaves, at least 0.3, and on CPUs 0.3.
    """
    start_timeout_s: float = Field(600, gt=0)
    """Seconds that a server started here has to become ready, and any server to load the student's weights."""
    request_timeout_s: float = Field(300, gt=0)
    """Seconds for the completions of one prompt."""
    retries: int = Field(3, ge=0)
    """Number of times that a request is sent again which failed or came back unusable."""
    concurrency: int = Field(256, ge=1)
    """Requests under way at once."""
    weights_folder: Path | None = None
    """Folder in which the student is written for the server to load, in a subfolder `rollout_weights` that is removed
    at the end; by default in the run's directory. Server and student must both see it. A vLLM that is started here
    loads only its first weights from it, and reads later ones in the student's memory.
    """

    @field_validator("url")
    @classmethod
    def url_is_whole(cls, url: str | None) -> str | None:
        return url if url is None else whole_url(url)

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
            "rollout.overlap=true, by which it always samples": self.overlap,
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
        """Whether a server is started here on the devices of the training."""
        return self.url is None and not self.has_own_gpus

    @property
    def has_own_gpus(self) -> bool:
        """Whether a server started here uses other GPUs than the training."""
        return self.gpus is not None or "CUDA_VISIBLE_DEVICES" in self.environment

    @property
    def sleeps_on_gpus(self) -> bool:
        """Whether a server started here sleeps between samplings, if the training is on GPUs."""
        if self.sleep != "auto":
            return self.sleep
        return self.program == "vllm" and self.shares_devices and not self.overlap


Rollouts = Annotated[HFRollout | ServerRollout, Field(discriminator="type")]
