"""Settings of the student, and settings that student and teachers share."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nemo_opd.config.base import Frozen, Settings
from nemo_opd.config.lora import Lora
from nemo_opd.config.optim import AdamW, Optimizer, Scheduler
from nemo_opd.config.parallelism import Parallelism


class Model(Settings):
    """Settings that student and teachers share."""

    model: str | None = None
    """A Hugging Face folder, a folder with an adapter (PEFT), a hub name, or `demo:student`."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default the model's."""
    chat_template: str | None = None
    """A file with the chat template (Jinja), if the tokenizer has none or another one is needed."""
    chat_template_kwargs: Frozen[str, bool | int | float | str | None] = Field(default_factory=dict)
    """Arguments of the template besides the conversation, such as `enable_thinking: false`."""
    parallelism: Parallelism = Field(default_factory=Parallelism)
    """Parallel layout of the model."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] | None = None
    """Attention implementation of transformers; by default its own choice, usually sdpa. Flash attention is a separate
    package (flash-attn, flash-attn-3) and needs a GPU; sdpa uses PyTorch's.
    """
    compile: bool = False
    """Compile the decoder layers with `torch.compile`: a few minutes at the start, then faster steps."""
    fused_layers: Literal[True, False, "auto"] = "auto"
    """Compute norms, rotary embeddings and gated activations of the layers with Triton kernels, which read and write
    each number once. auto: on GPUs in 16 bits without `compile`, if the family is supported (Llama, Mistral, Qwen,
    Phi-3); true: always, or fail.
    """

    @model_validator(mode="after")
    def attn_implementation_needs_cp_1(self) -> Self:
        cp = self.parallelism.cp
        if self.attn_implementation is not None and cp > 1:
            raise ValueError(
                f"attn_implementation={self.attn_implementation} with parallelism.cp={cp}: context-parallel ranks use "
                "ring attention; leave attn_implementation out, or set parallelism.cp=1"
            )
        return self

    @model_validator(mode="after")
    def compile_needs_tp_1(self) -> Self:
        tp = self.parallelism.tp
        if self.compile and tp > 1:
            raise ValueError(
                f"compile=true with parallelism.tp={tp}: torch.compile fails on tensor-parallel layers for sequences "
                "of any length; set compile=false or parallelism.tp=1"
            )
        return self

    @model_validator(mode="after")
    def fused_layers_need_no_compile(self) -> Self:
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


class Student(Model):
    """The model that learns."""

    model: str
    """A Hugging Face folder, a folder with an adapter (PEFT), a hub name, or `demo:student`."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute precision; master weights are fp32 in any case. auto: bfloat16 on GPU, float32 on CPU."""
    offload: Literal[True, False, "auto"] = "auto"
    """Move parameters and optimizer state to host memory while the teachers run. auto: if the memory estimate says that
    the run does not fit even with teachers offloaded.
    """
    activation_checkpointing: bool = False
    """Keep only each layer's input and recompute the layer in the backward pass: a third more compute, and much less
    memory for long sequences.
    """
    sync_each_micro_batch: Literal[True, False, "auto"] = "auto"
    """Reduce gradients over ranks after each microbatch (FSDP). false: each rank accumulates unsharded fp32 gradients,
    which are reduced once a step. auto: false on GPUs if that fits without `offload` by the memory estimate.
    """
    lora: Lora | None = None
    """Train low-rank adapters in fp32 and freeze the model's weights, which are stored in the compute precision. By
    default all weights are trained.
    """
    optimizer: Optimizer = Field(default_factory=AdamW)
    """Optimizer of all trained weights."""
    scheduler: Scheduler = Field(default_factory=Scheduler)
    """Learning rate over the steps of the run."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def optimizer_is_adamw_by_default(cls, optimizer: Any) -> Any:
        return {"type": "adamw", **optimizer} if isinstance(optimizer, Mapping) else optimizer

    @model_validator(mode="after")
    def muon_needs_tp_1(self) -> "Student":
        tp = self.parallelism.tp
        if self.optimizer.type == "muon" and tp > 1:
            raise ValueError(
                f"optimizer.type=muon with parallelism.tp={tp}: it orthogonalizes whole matrices, and tensor-parallel "
                "ranks have parts of them; set optimizer.type=adamw or parallelism.tp=1"
            )
        return self

    @model_validator(mode="after")
    def lora_needs_cp_1(self) -> "Student":
        cp = self.parallelism.cp
        if self.lora is not None and cp > 1:
            raise ValueError(
                f"lora with parallelism.cp={cp}: adapters are not tested with context parallelism; set "
                "student.parallelism.cp=1, with activation_checkpointing=true for long sequences, or student.lora=null"
            )
        return self

    @model_validator(mode="after")
    def lora_needs_tp_1(self) -> "Student":
        tp = self.parallelism.tp
        if self.lora is not None and tp > 1:
            raise ValueError(
                f"lora with parallelism.tp={tp}: tensor parallelism does not shard adapters; set "
                "student.parallelism.tp=1 (the frozen weights are sharded over all ranks anyway), or student.lora=null"
            )
        return self
