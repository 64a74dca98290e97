"""Distillation in `transformers.Trainer` and its subclasses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn

from nemo_opd.errors import ConfigError
from nemo_opd.integrations.distillation import Distillation
from nemo_opd.logging.metrics import merge
from nemo_opd.types import Batch, Metric, Normalizers
from nemo_opd.workers.step import with_numbers

_BY_LENGTH = ("group_by_length", "batch_rebalance")
"""Values of `train_sampling_strategy` whose sampler needs the length of each row."""


class DistillationMixin:
    """Distillation for a subclass of `transformers.Trainer`: `class MyTrainer(DistillationMixin, Trainer)`.

    Rows of the datasets are texts or conversations, which the collator tokenizes for all models. Losses are normalized
    over the global batch, across microbatches and processes, as in nemo_opd's own loop. The terms of the loss are
    logged, and in an evaluation also bits per byte and accuracy, over all texts.

    With several processes it communicates one all-reduce of counts per step and one gather of metrics per log.
    """

    args: Any
    accelerator: Any

    def __init__(self, *args: Any, distillation: Distillation, **kwargs: Any) -> None:
        """Pass all other arguments to the trainer. Raises ConfigError if they do not fit a distillation."""
        for key in ("data_collator", "compute_loss_func", "compute_metrics"):
            if kwargs.get(key) is not None:
                raise ConfigError(f"{key}: the distillation provides batches, loss and metrics; leave it out")
        self.distillation = distillation
        self._distillation_metrics: dict[bool, dict[str, Metric]] = {True: {}, False: {}}
        """Merged metrics of training (True) and evaluation (False) since they were last logged."""
        kwargs = {"processing_class": distillation.tokenizer, **kwargs, "data_collator": distillation.collator}
        super().__init__(*args, **kwargs)
        for reason in self._unsupported():
            raise ConfigError(reason)
        if isinstance(dataset := getattr(self, "train_dataset", None), Sized) and hasattr(dataset, "__getitem__"):
            distillation.check(dataset)
        distillation.to(self.args.device)
        # Otherwise Trainer would divide the loss by the number of microbatches.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True

    def _unsupported(self) -> Iterator[str]:
        """Yield an error message for each unsupported argument."""
        if self.args.n_gpu > 1:
            yield f"{self.args.n_gpu} GPUs in one process (DataParallel): start a process for each with torchrun"
        if self.args.label_smoothing_factor:
            yield f"label_smoothing_factor={self.args.label_smoothing_factor:g}: losses have no smoothing; set it to 0"
        parallel = getattr(self.accelerator, "parallelism_config", None)
        for key in ("tp_size", "cp_size", "sp_size"):
            if (size := getattr(parallel, key, 1)) > 1:
                yield f"{key}={size}: losses need unsharded logits here; set it to 1, or use nemo_opd.distil"

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns that the collator and a sampler read, instead of the model's arguments."""
        self._signature_columns = [*self.distillation.collator.columns, self.args.length_column_name]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset  # type: ignore[attr-defined]
        return super()._get_train_sampler(self._with_lengths(dataset))  # type: ignore[misc]

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return super()._get_eval_sampler(self._with_lengths(eval_dataset))  # type: ignore[misc]

    def _with_lengths(self, dataset: Any) -> Any:
        """Return a dataset with a column of lengths for the sampler, if it needs one; rows are not tokenized yet.

        Trainer reads the column only from a `datasets.Dataset`. Raises ConfigError if the rows have no such column.
        """
        strategy = getattr(self.args, "train_sampling_strategy", None)
        column = self.args.length_column_name
        if strategy not in _BY_LENGTH or column in (getattr(dataset, "column_names", None) or ()):
            return dataset
        if not hasattr(dataset, "column_names") and isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
            rows = (dataset[i] for i in range(len(dataset)))
            lengths = [row.get(column) if isinstance(row, Mapping) else None for row in rows]
            if None not in lengths:
                from datasets import Dataset

                return Dataset.from_dict({column: lengths})
        raise ConfigError(
            f"train_sampling_strategy={strategy}: rows are tokenized in the collator, so their lengths are not "
            f"known in advance; add a column {column} (length_column_name) to all rows of the dataset, such as the "
            "length of the text, or leave it out"
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Normalizers | None]:
        """Return the microbatches of a step, and the normalizers of their losses over all processes."""
        samples, _ = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        return samples, self._normalizers([sample["batch"] for sample in samples]) if samples else None

    def _normalizers(self, batches: list[Batch]) -> Normalizers:
        counts = self.distillation.counts(batches)
        if self.accelerator.num_processes > 1:
            counts = self.accelerator.reduce(counts.to(self.args.device), "sum")
        if not counts.any():
            warnings.warn(
                "no text of this step has a token to learn, so its loss is 0; leave out empty texts, and "
                "conversations without an answer within train.max_length",
                stacklevel=2,
            )
        return self.distillation.normalizers(counts)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Normalizers | None = None,
    ) -> Any:
        """Return the microbatch's share of the global batch's loss, or without normalizers its own loss."""
        outputs = model(input_ids=inputs["input_ids"], use_cache=False)
        is_training = num_items_in_batch is not None
        output = self.distillation.loss(
            outputs.logits, inputs["batch"], num_items_in_batch, for_validation=not is_training
        )
        self._distillation_metrics[is_training] = merge([self._distillation_metrics[is_training], output.metrics])
        # Gradients are averaged over processes, but the loss is the sum of their shares.
        loss = output.loss * self.accelerator.num_processes if is_training else output.loss
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Return the loss of a batch without logits, which would be kept for the entire dataset."""
        prepared = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        prepared["batch"] = self._without_repeated(prepared["batch"])
        with torch.no_grad():
            return self.compute_loss(model, prepared).detach(), None, None

    def _without_repeated(self, batch: Batch) -> Batch:
        """Empty the rows of repeated texts: the last batches of all processes are filled up with the first texts."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return batch
        first = self.accelerator.process_index * len(batch)
        return batch.emptied(torch.arange(first, first + len(batch)) >= state.remainder)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Add the metrics and the loss over all texts, which differ from a mean over batches."""
        self._distillation_metrics[False] = {}
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)  # type: ignore[misc]
        values = self._distillation_values(is_training=False)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in values.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the terms of the loss to a training log."""
        if "loss" in logs:  # logs of an evaluation, or at the end of training, have no such key
            logs = {**self._distillation_values(is_training=True), **logs}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _distillation_values(self, *, is_training: bool) -> dict[str, float]:
        """Return and clear the metrics since the last log, merged over all processes."""
        metrics, self._distillation_metrics[is_training] = with_numbers(self._distillation_metrics[is_training]), {}
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            metrics = merge(gather_object([metrics]))
        return self.distillation.values(metrics) if metrics else {}
