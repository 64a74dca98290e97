"""Settings of the student, and settings that student and teachers share."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nemo_opd.config.settings import Frozen, MayChange, Settings
from nemo_opd.config.train import AdamW, Optimizer, Scheduler


class Parallelism(Settings):
    """Layout of a model. Data parallelism takes the remaining ranks: ranks / (cp · tp)."""

    tp: int = Field(1, ge=1)
    """Tensor parallel: ranks that share every layer's matrices and the vocabulary."""
    cp: int = Field(1, ge=1)
    """Context parallel: ranks that share the positions of every sequence. Above 1 it needs GPUs."""
    sequence_parallel: bool = False
    """Shard positions over the tensor-parallel ranks between attention and feed-forward blocks."""

    replicas: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Copies of the model, each sharded over separate ranks (HSDP). 1: one copy over all ranks. auto: one copy per node
    on several GPU nodes, if its weights, gradients and optimizer state then take at most half of a GPU and the run fits
    without `offload`; else 1.
    """
    reshard_after_forward: Literal[True, False, "auto"] = "auto"
    """Free a layer's gathered weights after its forward pass (FSDP). false: keep all weights unsharded, and gather them
    once a step instead of twice a microbatch. auto: false on GPUs if they take at most a quarter of one and the run
    fits without `offload`.
    """

    @property
    def frees_gathered(self) -> bool:
        """Whether layers free their gathered weights; `auto` counts as true until it is resolved."""
        return self.reshard_after_forward is not False

    @model_validator(mode="after")
    def sequence_parallel_needs_tp(self) -> "Parallelism":
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel=true with tp=1: positions are sharded over the ranks of a tensor-parallel group, "
                "which has only one; set tp to 2 or more, or sequence_parallel=false"
            )
        return self


class ModelSource(Settings):
    """A model with its tokenizer and chat template."""

    model: str | None = None
    """A Hugging Face folder, a folder with an adapter (PEFT), a hub name (`NAME@REVISION`), or `demo:student`."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default the model's."""
    chat_template: str | None = None
    """The chat template if the tokenizer has none or another one is needed: a file (Jinja), the folder of a model whose
    template to take, or `plain`, a simple template for base models.
    """
    chat_template_kwargs: Frozen[str, bool | int | float | str | None] = Field(default_factory=dict)
    """Arguments of the template besides the conversation, such as `enable_thinking: false`."""


class Model(ModelSource):
    """Settings that student and teachers share."""

    parallelism: MayChange[Parallelism] = Field(default_factory=Parallelism)
    """Parallel layout of the model."""
    attn_implementation: MayChange[Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] | None] = None
    """Attention implementation of transformers; by default its own choice, usually sdpa. Flash attention needs a GPU
    and a package of its own (flash-attn, flash-attn-3).
    """
    compile: MayChange[bool] = False
    """Compile the decoder layers with `torch.compile`: a few minutes at the start, then faster steps."""
    fused_layers: MayChange[Literal[True, False, "auto"]] = "auto"
    """Compute norms, rotary embeddings and gated activations with Triton kernels. auto: on GPUs in 16 bits without
    `compile`, if the family is supported (Llama, Mistral, Qwen, Phi-3).
    """

    @model_validator(mode="after")
    def attention_and_compile_suit_parallelism(self) -> Self:
        cp, tp = self.parallelism.cp, self.parallelism.tp
        if self.attn_implementation is not None and cp > 1:
            raise ValueError(
                f"attn_implementation={self.attn_implementation} with parallelism.cp={cp}: context-parallel ranks use "
                "ring attention; leave attn_implementation out, or set parallelism.cp=1"
            )
        if self.compile and tp > 1:
            raise ValueError(
                f"compile=true with parallelism.tp={tp}: torch.compile fails on tensor-parallel layers for sequences "
                "of any length; set compile=false or parallelism.tp=1"
            )
        if self.fused_layers is True and self.compile:
            raise ValueError(
                "fused_layers=true with compile=true: the compiler fuses these operations itself; leave one of them out"
            )
        return self

    def with_parallelism(self, **changes: object) -> Self:
        """Return a copy with other values of `parallelism`, without validation."""
        return self.model_copy(update={"parallelism": self.parallelism.model_copy(update=changes)})

    @property
    def reference(self) -> str:
        """Folder or name of the model. Must be set; self-teachers have it only in `RunFields.active_teachers`."""
        assert self.model is not None
        return self.model

    @property
    def tokenizer_source(self) -> tuple[str, str]:
        """The key that names the tokenizer, and its value."""
        return ("model", self.reference) if self.tokenizer is None else ("tokenizer", self.tokenizer)


ALL_LINEAR: Literal["all-linear"] = "all-linear"

_ModuleNames = Annotated[tuple[str, ...], Field(min_length=1)]


class Lora(Settings):
    """y = W x + alpha / rank · B A x, with W frozen and A and B trained (Hu et al. 2021)."""

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: int = Field(32, ge=1)
    """An adapter's output is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are zeroed at random in training."""
    target_modules: Literal["all-linear"] | _ModuleNames = ALL_LINEAR
    """Linear layers with an adapter, by the ends of their names, such as [q_proj, v_proj]. all-linear: all except the
    head.
    """
    export: MayChange[Literal["merged", "adapter"]] = "merged"
    """Form of `student` in checkpoints and of `final`. merged: a complete model. adapter: a folder for `peft`, which
    needs the base model.
    """


class Student(Model):
    """The model that learns."""

    model: str
    """A Hugging Face folder, a folder with an adapter (PEFT), a hub name (`NAME@REVISION`), or `demo:student`."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute precision; master weights are fp32 in any case. auto: bfloat16 on GPU, float32 on CPU."""
    offload: MayChange[Literal[True, False, "auto"]] = "auto"
    """Move parameters and optimizer state to host memory while the teachers run. auto: if, by the memory estimate, the
    run does not fit even with teachers offloaded.
    """
    activation_checkpointing: MayChange[bool] = False
    """Recompute each layer in the backward pass from its input: a third more compute, and much less memory for long
    sequences.
    """
    sync_each_micro_batch: MayChange[Literal[True, False, "auto"]] = "auto"
    """Reduce gradients over ranks after each microbatch (FSDP). false: once a step, from unsharded fp32 gradients on
    each rank. auto: false on GPUs if that fits without `offload`.
    """
    lora: Lora | None = None
    """Train low-rank adapters in fp32 and freeze the model's weights. By default all weights are trained."""
    optimizer: Optimizer = Field(default_factory=AdamW)
    """Optimizer of all trained weights."""
    scheduler: Scheduler = Field(default_factory=Scheduler)
    """Learning rate over the steps of the run."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def optimizer_is_adamw_by_default(cls, optimizer: Any) -> Any:
        return {"type": "adamw", **optimizer} if isinstance(optimizer, Mapping) else optimizer

    @model_validator(mode="after")
    def muon_and_lora_suit_parallelism(self) -> Self:
        cp, tp = self.parallelism.cp, self.parallelism.tp
        if self.optimizer.type == "muon" and tp > 1:
            raise ValueError(
                f"optimizer.type=muon with parallelism.tp={tp}: it orthogonalizes whole matrices, and tensor-parallel "
                "ranks have parts of them; set optimizer.type=adamw or parallelism.tp=1"
            )
        if self.lora is not None and cp > 1:
            raise ValueError(
                f"lora with parallelism.cp={cp}: adapters are not tested with context parallelism; set "
                "student.parallelism.cp=1, with activation_checkpointing=true for long sequences, or student.lora=null"
            )
        if self.lora is not None and tp > 1:
            raise ValueError(
                f"lora with parallelism.tp={tp}: tensor parallelism does not shard adapters; set "
                "student.parallelism.tp=1 (the frozen weights are sharded over all ranks anyway), or student.lora=null"
            )
        return self


def require_repo(name: str) -> None:
    """Raise ValueError unless the name is a `user/name` that the hub accepts."""
    from huggingface_hub.utils import validate_repo_id  # takes a second, and few settings need it

    if name.count("/") != 1:
        raise ValueError(f"{name!r} is not a repository of a user or an organization; write user/name")
    try:
        validate_repo_id(name)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{reason}; write user/name") from error
