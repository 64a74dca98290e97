"""A causal language model called for its logits or, before its head, for its hidden states (methods.md §9)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_opd.config.parallelism import Parallelism
from nemo_opd.distributed.mesh import context_axis, tensor_axis
from nemo_opd.distributed.shards import local
from nemo_opd.distributed.vocab_parallel import VocabularyShards
from nemo_opd.errors import ModelError
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.packed import PackedLogits, Packing
from nemo_opd.logits.parallel import ContextParallelLogits, VocabParallelLogits
from nemo_opd.logits.rows import TensorLogits, TrainableRows
from nemo_opd.models.context_parallel import RingAttention, gather_positions
from nemo_opd.models.packed_attention import bounds, is_packable, packed_attention
from nemo_opd.models.parallelize import is_compiled_in_place
from nemo_opd.models.tensor_styles import own_part
from nemo_opd.rotary import RotaryLimit, rotary_limit

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Names of the soft-cap in configurations."""

_OwnLogits = TensorLogits | HeadLogits
"""Logits [1, N, ·] of this rank's columns, with a row for each token."""


class _LogitSource(ABC):
    """Model that is called for its logits, or for hidden states and the head that logits are computed from.

    However the model is cut, each rank of its context- and tensor-parallel groups gets all positions of its texts, and
    its own `columns` of the vocabulary. Sequences are packed into one row without padding where the model allows it;
    what a call returns is packed either way.

    To train: compute losses from `whole` of a call's result, `cut_off`; go backward from their sum, and then call
    `backward` once with the gradient of the new leaf.
    """

    columns: range
    """Columns of the vocabulary that this rank computes."""
    reads_packed: bool
    """Whether the model reads the sequences of a call in one row, without padding."""
    rotary: RotaryLimit | None
    """Limit of rotary factors that depend on the longest sequence of a call."""
    block_bytes: int | None = None
    """Budget for a block of the logits, the same on all ranks; None: the least of the device."""

    def __init__(
        self, model: PreTrainedModel, width: int, *, mesh: DeviceMesh | None, parallelism: Parallelism | None
    ) -> None:
        """width: columns of the whole head. mesh, parallelism: those that the model was cut with."""
        self._model: Any = model
        self._tensor, self._context = (None, None) if mesh is None else (tensor_axis(mesh), context_axis(mesh))
        self._shards: VocabularyShards | None = None
        self._ring = None if self._context is None else RingAttention(self._context)
        self._multiple = 1 if self._ring is None else self._ring.multiple
        if parallelism is not None and parallelism.sequence_parallel:
            self._multiple *= parallelism.tp
        # Compiled code for a CPU cannot loop over sequences.
        is_compiled = mesh is not None and mesh.device_type == "cpu" and is_compiled_in_place(model)
        self.reads_packed = self._ring is None and not is_compiled and is_packable(model)
        self.rotary = rotary_limit(model.config.get_text_config().to_dict())
        self.columns = range(width) if self._tensor is None else range(*own_part(width, self._tensor))

    @abstractmethod
    def __call__(self, ids: Tensor, packing: Packing) -> _OwnLogits:
        """Map ids [B, S] to logits [1, N, own columns] of their tokens. Collective over all of the model's ranks.

        packing: of these sequences, on the device.
        """

    def _run(self, ids: Tensor, packing: Packing, result: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `result` to the model's logits for ids [B, S], and return what it makes of each token [1, N, ·]."""
        if self.reads_packed:
            return self._run_packed(ids, packing, result)
        # Later positions have no effect on earlier ones, so any id will do.
        ids = F.pad(ids, (0, self._missing(ids.shape[1])))
        if self._ring is None:
            made = result(self._model(input_ids=ids, use_cache=False).logits)
        else:
            with self._ring.positions(ids.shape[1], ids.device) as own:
                positions = own.unsqueeze(0).expand(len(ids), -1)
                output = self._model(input_ids=ids[:, own], position_ids=positions, use_cache=False)
                made = gather_positions(result(output.logits), own, self._ring.axis)
        return made[:, : packing.places.shape[1]].flatten(0, 1).index_select(0, packing.tokens).unsqueeze(0)

    def _run_packed(self, ids: Tensor, packing: Packing, result: Callable[[Tensor], Tensor]) -> Tensor:
        num_tokens = len(packing.tokens)
        # What the layout needs in addition is one more sequence.
        missing = self._missing(num_tokens)
        ends, longest = packing.bounds, max(*packing.lengths, missing)
        if missing:
            ends = F.pad(ends, (0, 1), value=num_tokens + missing)
        row = F.pad(ids.flatten()[packing.tokens], (0, missing)).unsqueeze(0)
        positions = F.pad(packing.positions, (0, missing)).unsqueeze(0)
        with packed_attention(self._model):
            output = self._model(input_ids=row, position_ids=positions, use_cache=False, **bounds(ends, longest))
        made = result(output.logits)
        return made[:, :num_tokens] if missing else made

    def num_positions(self, packing: Packing) -> int:
        """Return the positions, padding included, that the model reads of these sequences."""
        rows, width = (1, len(packing.tokens)) if self.reads_packed else packing.places.shape
        return rows * (width + self._missing(width))

    def _missing(self, length: int) -> int:
        """Return the positions by which a length must grow for the layout."""
        return -length % self._multiple

    def whole(self, made: _OwnLogits, packing: Packing) -> PackedLogits:
        """Return the logits [B, S, V] that losses and scores read, which all ranks with these texts compute together.

        Collective over the tensor-parallel group. The gradient that losses leave on hidden states is the same on every
        rank of that group, and each rank has that of its columns. Over a context-parallel group both are each
        rank's share.
        """
        source: TrainableRows = made
        if self._tensor is not None:
            if self._shards is None:
                self._shards = VocabularyShards(self._tensor.get_group(), made.shape[2], made.device)
            source = VocabParallelLogits(made, self._shards)
        if self._context is not None:
            source = ContextParallelLogits(source, self._context.get_group())
        return PackedLogits(source, packing.places, self.block_bytes)

    def backward(self, made: _OwnLogits, gradient: Tensor, packing: Packing) -> None:
        """Go backward from the gradient of the first leaf of `made` to those of all parameters.

        Over a context-parallel group gradients are summed: each rank gives that of its share of the loss. Collective
        over all of the model's ranks.
        """
        (leaf, *_) = made.leaves
        with self._attention(packing, leaf.device):
            leaf.backward(gradient)

    def _attention(self, packing: Packing, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which layers that are run again in the backward pass attend as in the forward pass."""
        if self._ring is not None:
            return self._ring.positions(packing.places.shape[1] + self._missing(packing.places.shape[1]), device)
        return packed_attention(self._model) if self.reads_packed else nullcontext()


class WithHead(_LogitSource):
    """Model that is called for its logits."""

    def __init__(
        self, model: PreTrainedModel, *, mesh: DeviceMesh | None = None, parallelism: Parallelism | None = None
    ) -> None:
        super().__init__(model, model.config.get_text_config().vocab_size, mesh=mesh, parallelism=parallelism)

    def __call__(self, ids: Tensor, packing: Packing) -> TensorLogits:
        return TensorLogits(self._run(ids, packing, lambda logits: logits))


class Headless(_LogitSource):
    """Model that is called for its final hidden states and its head, from which losses compute logits.

    Between calls the model is unchanged, and so is what it exports. Hidden states are the same on every rank of a
    tensor-parallel group; each rank has its `columns` of the head.

    Under FSDP2 the head is gathered with the model's other outer parameters, and stays so until `backward` or the next
    reshard; logits must be computed before. Losses leave gradients on the head, which FSDP2 reduces in `backward`
    together with those of a tied embedding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        key: str,
        mesh: DeviceMesh | None = None,
        parallelism: Parallelism | None = None,
    ) -> None:
        """mesh, parallelism: those that the model was cut with.

        Raises ModelError, naming `key`, for a head that is not one plain linear layer.
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

        Raises ModelError at the first call where the model does more to logits than `Head` does.
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
        """Compare what the model did to hidden states, which its head returned in place of logits, with `Head`."""
        if len(captured) == 1:
            expected = heads[0].after_linear(captured[0].detach())
            if expected.isnan().any():
                return  # NaN shows nothing; the next text may.
            if output.shape == expected.shape and torch.allclose(
                output.detach().to(expected.dtype), expected, 1e-2, 1e-2
            ):
                self._is_checked = True
                return
        raise ModelError(
            f"{self._key}: {type(self._model).__name__} does more between its head and its logits than a scale and a "
            "soft-cap, so hidden states cannot stand for logits; use handoff=logits"
        )


ReadingModel = Headless | WithHead
"""Map from ids [B, T] to logits [1, N, own columns] of their tokens, for handoff=hidden_states or logits."""


def reading_model(
    model: PreTrainedModel,
    handoff: Literal["hidden_states", "logits"],
    *,
    key: str,
    mesh: DeviceMesh,
    parallelism: Parallelism,
) -> ReadingModel:
    """Return the model as losses read it in this form of handoff. Raises ModelError as `Headless` does."""
    if handoff == "hidden_states":
        return Headless(model, key=key, mesh=mesh, parallelism=parallelism)
    return WithHead(model, mesh=mesh, parallelism=parallelism)


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward inside; afterwards restore the one before, which may be a replacement too."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
