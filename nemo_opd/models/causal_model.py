"""Causal language models that are called for their logits, or for hidden states and head (methods.md §9).

`check_head_precision` rejects a head that a lower compute dtype would round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from nemo_opd.config.model import Parallelism
from nemo_opd.distributed.collectives import VocabularyShards, local
from nemo_opd.distributed.process_group import context_axis, tensor_axis
from nemo_opd.errors import ModelError
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import TensorLogits, TrainableRows
from nemo_opd.logits.sources import ContextParallelLogits, PackedLogits, Packing, VocabParallelLogits
from nemo_opd.models.packed_attention import RingAttention, bounds, gather_positions, is_packable, packed_attention
from nemo_opd.models.parallelize import is_compiled_in_place
from nemo_opd.models.stored_weights import kept_in_fp32
from nemo_opd.models.tensor_styles import local_range
from nemo_opd.rotary import RotaryLimit, rotary_limit

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Names of the soft-cap in configurations."""

_LocalLogits = TensorLogits | HeadLogits
"""Logits [1, N, ·] of this rank's columns, with a row for each token."""


class _LogitSource(ABC):
    """Model that is called for its logits, or for its hidden states and head.

    However the model is sharded, each rank of its context- and tensor-parallel groups gets all positions of its texts,
    and its `columns` of the vocabulary. Sequences are packed into one row without padding if the model supports it; the
    result of a call is packed in any case.

    To train: `cut_off` a call's result, compute losses from its `whole`, run backward from their sum, and then call
    `backward` once with the gradient of the new leaf.
    """

    columns: range
    """Columns of the vocabulary that this rank computes."""
    reads_packed: bool
    """Whether the model reads the sequences of a call packed into one row, without padding."""
    rotary: RotaryLimit | None
    """Limit of rotary factors that depend on the longest sequence of a call."""
    block_bytes: int | None = None
    """Budget for a block of logits, the same on all ranks; by default the device's minimum."""

    def __init__(
        self, model: PreTrainedModel, width: int, *, mesh: DeviceMesh | None, parallelism: Parallelism | None
    ) -> None:
        """Wrap a model. width: columns of the full head. mesh, parallelism: as in `parallelize`."""
        self._model: Any = model
        self._tensor, self._context = (None, None) if mesh is None else (tensor_axis(mesh), context_axis(mesh))
        self._shards: VocabularyShards | None = None
        self._ring = None if self._context is None else RingAttention(self._context)
        self._multiple = 1 if self._ring is None else self._ring.multiple
        if parallelism is not None and parallelism.sequence_parallel:
            self._multiple *= parallelism.tp
        # Compiled code for CPUs cannot loop over sequences.
        is_compiled = mesh is not None and mesh.device_type == "cpu" and is_compiled_in_place(model)
        self.reads_packed = self._ring is None and not is_compiled and is_packable(model)
        self.rotary = rotary_limit(model.config.get_text_config().to_dict())
        self.columns = range(width) if self._tensor is None else range(*local_range(width, self._tensor))

    @abstractmethod
    def __call__(self, ids: Tensor, packing: Packing) -> _LocalLogits:
        """Map ids [B, S] to logits [1, N, len(columns)] of their tokens. Collective over all of the model's ranks.

        packing: the sequences' packing, on the device.
        """

    def _run(self, ids: Tensor, packing: Packing, result: Callable[[Tensor], Tensor]) -> Tensor:
        """Run the model on ids [B, S], apply `result` to its logits, and return the rows of all tokens [1, N, ·]."""
        if self.reads_packed:
            return self._run_packed(ids, packing, result)
        # Any id will do as padding: later positions have no effect on earlier ones.
        ids = F.pad(ids, (0, self._padding(ids.shape[1])))
        if self._ring is None:
            rows = result(self._model(input_ids=ids, use_cache=False).logits)
        else:
            with self._ring.positions(ids.shape[1], ids.device) as local_positions:
                positions = local_positions.unsqueeze(0).expand(len(ids), -1)
                output = self._model(input_ids=ids[:, local_positions], position_ids=positions, use_cache=False)
                rows = gather_positions(result(output.logits), local_positions, self._ring.axis)
        return rows[:, : packing.places.shape[1]].flatten(0, 1).index_select(0, packing.tokens).unsqueeze(0)

    def _run_packed(self, ids: Tensor, packing: Packing, result: Callable[[Tensor], Tensor]) -> Tensor:
        num_tokens = len(packing.tokens)
        # Padding is one more sequence.
        padding = self._padding(num_tokens)
        ends, longest = packing.bounds, max(*packing.lengths, padding)
        if padding:
            ends = F.pad(ends, (0, 1), value=num_tokens + padding)
        row = F.pad(ids.flatten()[packing.tokens], (0, padding)).unsqueeze(0)
        positions = F.pad(packing.positions, (0, padding)).unsqueeze(0)
        with packed_attention(self._model):
            output = self._model(input_ids=row, position_ids=positions, use_cache=False, **bounds(ends, longest))
        rows = result(output.logits)
        return rows[:, :num_tokens] if padding else rows

    def num_positions(self, packing: Packing) -> int:
        """Return the number of positions, including padding, that the model reads for these sequences."""
        rows, width = (1, len(packing.tokens)) if self.reads_packed else packing.places.shape
        return rows * (width + self._padding(width))

    def _padding(self, length: int) -> int:
        """Return the number of positions to add, as context and sequence parallelism need equal parts."""
        return -length % self._multiple

    def whole(self, logits: _LocalLogits, packing: Packing) -> PackedLogits:
        """Return the logits [B, S, V] for losses and scores, computed by all ranks with these texts together.

        Collective over the tensor-parallel group. On each of its ranks, losses leave the full gradient of hidden
        states and the gradient of the rank's columns; over a context-parallel group both are the rank's share.
        """
        source: TrainableRows = logits
        if self._tensor is not None:
            if self._shards is None:
                self._shards = VocabularyShards(self._tensor.get_group(), logits.shape[2], logits.device)
            source = VocabParallelLogits(logits, self._shards)
        if self._context is not None:
            source = ContextParallelLogits(source, self._context.get_group())
        return PackedLogits(source, packing.places, self.block_bytes)

    def backward(self, logits: _LocalLogits, gradient: Tensor, packing: Packing) -> None:
        """Run backward from the gradient of the first leaf of `logits` to all parameters.

        Over a context-parallel group gradients are summed: each rank passes the gradient of its share of the loss.
        Collective over all of the model's ranks.
        """
        (leaf, *_) = logits.leaves
        with self._attention(packing, leaf.device):
            leaf.backward(gradient)

    def _attention(self, packing: Packing, device: torch.device) -> AbstractContextManager[object]:
        """Return a context that makes recomputed layers attend in backward as they did in forward."""
        if self._ring is not None:
            return self._ring.positions(packing.places.shape[1] + self._padding(packing.places.shape[1]), device)
        return packed_attention(self._model) if self.reads_packed else nullcontext()


class LogitModel(_LogitSource):
    """Model that is called for its logits."""

    def __init__(
        self, model: PreTrainedModel, *, mesh: DeviceMesh | None = None, parallelism: Parallelism | None = None
    ) -> None:
        super().__init__(model, model.config.get_text_config().vocab_size, mesh=mesh, parallelism=parallelism)

    def __call__(self, ids: Tensor, packing: Packing) -> TensorLogits:
        return TensorLogits(self._run(ids, packing, lambda logits: logits))


class HiddenStateModel(_LogitSource):
    """Model that is called for its final hidden states and its head; losses compute logits from them.

    The model and its exports do not change. Hidden states are the same on every rank of a tensor-parallel group; each
    rank has its `columns` of the head.

    Under FSDP2 the head is gathered with the model's other outer parameters, and stays gathered until `backward` or the
    next reshard; logits must be computed before. Losses leave gradients on the head, which FSDP2 reduces in `backward`
    together with the gradients of a tied embedding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        key: str,
        mesh: DeviceMesh | None = None,
        parallelism: Parallelism | None = None,
    ) -> None:
        """Wrap a model. mesh, parallelism: as in `parallelize`.

        Raises ModelError, naming `key`, for a head that is not a single plain linear layer.
        """
        head: Any = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ModelError(
                f"{key}: the head is a {type(head).__name__}, not a plain linear layer, so hidden states cannot stand "
                "for logits; use handoff=logits, or an unquantised model"
            )
        super().__init__(model, head.weight.shape[0], mesh=mesh, parallelism=parallelism)
        self._linear, self._key = head, key
        config = model.config.get_text_config()
        self._scale = float(getattr(config, "logit_scale", None) or 1) / float(
            getattr(config, "logits_scaling", None) or 1
        )
        caps = (getattr(config, name, None) for name in SOFT_CAPS)
        self._soft_cap = next((float(cap) for cap in caps if cap), None)
        self._is_checked = False

    @property
    def hidden_size(self) -> int:
        return int(self._linear.weight.shape[1])

    def __call__(self, ids: Tensor, packing: Packing) -> HeadLogits:
        """Return logits that are computed when they are read.

        Raises ModelError at the first call if the model does more to logits than `Head` does.
        """
        captured: list[Tensor] = []
        heads: list[Head] = []

        def capture(hidden: Tensor) -> Tensor:
            captured.append(hidden)
            bias = None if self._linear.bias is None else local(self._linear.bias)
            heads.append(Head(local(self._linear.weight), bias, self._scale, self._soft_cap))
            return hidden

        def hidden_states(output: Tensor) -> Tensor:
            if not self._is_checked:
                self._check(captured, heads, output)
            return captured[0]

        with replaced_forward(self._linear, capture):
            hidden = self._run(ids, packing, hidden_states)
        return HeadLogits(hidden, heads[0])

    def _check(self, captured: list[Tensor], heads: list[Head], output: Tensor) -> None:
        """Compare the model's operations after its head with `Head`'s, on hidden states in place of logits."""
        if len(captured) == 1:
            expected = heads[0].after_linear(captured[0].detach())
            if expected.isnan().any():
                return  # NaN proves nothing; check the next text.
            if output.shape == expected.shape and torch.allclose(
                output.detach().to(expected.dtype), expected, 1e-2, 1e-2
            ):
                self._is_checked = True
                return
        raise ModelError(
            f"{self._key}: {type(self._model).__name__} does more between its head and its logits than a scale and a "
            "soft-cap, so hidden states cannot stand for logits; use handoff=logits"
        )


ReadingModel = HiddenStateModel | LogitModel
"""Map from ids [B, T] to logits [1, N, len(columns)] of their tokens, for handoff=hidden_states or logits."""


def reading_model(
    model: PreTrainedModel,
    handoff: Literal["hidden_states", "logits"],
    *,
    key: str,
    mesh: DeviceMesh,
    parallelism: Parallelism,
) -> ReadingModel:
    """Wrap a model for a form of handoff. Raises ModelError as `HiddenStateModel` does."""
    if handoff == "hidden_states":
        return HiddenStateModel(model, key=key, mesh=mesh, parallelism=parallelism)
    return LogitModel(model, mesh=mesh, parallelism=parallelism)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward inside; afterwards restore the previous one, which may be a replacement too."""
    previous = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if previous is not None:
            module.forward = previous


def check_head_precision(config: PretrainedConfig, dtype: torch.dtype, *, key: str, reference: str) -> None:
    """Raise ModelError if a model that computes in a lower `dtype` keeps its head, or the head's input, in fp32.

    Parameters are gathered and hidden states handed over in that dtype: an fp32 head would be rounded silently, or fail
    in its first product. key: `student` or `teachers.i`. reference: the model's, for the message.
    """
    if dtype == torch.float32:
        return
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)  # writes the dtype into it
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    is_kept = kept_in_fp32(model, dtype)
    if any(is_kept(f"{name}.weight") for name, module in model.named_modules() if module is head):
        reason = "its head is kept in float32"
    elif (input_dtype := dtype_before(model, head)) not in (None, dtype):
        reason = f"its head reads hidden states in {_name(input_dtype)}"
    else:
        return
    raise ModelError(
        f"{key}.model={reference}: {reason} while {key}.dtype computes in {_name(dtype)}, which would round the head; "
        f"write {key}.dtype=float32"
    )


def dtype_before(model: Any, head: nn.Linear) -> torch.dtype | None:
    """Return the dtype of the head's input for layers that output `head`'s dtype; None if it cannot be determined."""
    dtypes: list[torch.dtype] = []

    def forward(hidden: Tensor) -> Tensor:
        dtypes.append(hidden.dtype)
        return hidden

    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    last = torch.zeros(1, 2, head.in_features, dtype=head.weight.dtype, device="meta")
    try:
        with (
            torch.no_grad(),
            replaced_forward(model.base_model, lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=last)),
            replaced_forward(head, forward),
        ):
            model(input_ids=ids, use_cache=False)
    except Exception:  # each model's code may raise its own errors on meta
        return None
    return dtypes[0] if len(dtypes) == 1 else None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
