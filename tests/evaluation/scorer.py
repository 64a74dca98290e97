"""Likelihoods of a model in this process."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from nemo_opd.evaluation.likelihoods import Scored, Scorer, answers, batches, read, token_rows
from nemo_opd.models.causal_model import HiddenStateModel, LogitModel


def model_scorer(model: PreTrainedModel, device: str) -> Scorer:
    """Return the scorer of a model in this process."""
    source = (
        HiddenStateModel(model, key="model") if type(model.get_output_embeddings()) is nn.Linear else LogitModel(model)
    )

    @torch.no_grad()
    def scorer(rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        found = [(0.0, False)] * len(rows)
        for numbers, (own,) in batches(rows, 1, 16_384):
            scores = read(source, token_rows(own), [slice(0, len(own))], device)
            for i, answer in zip(numbers, answers(scores), strict=True):
                found[i] = answer
        return found

    return scorer
