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
        likelihoods = [(0.0, False)] * len(rows)
        for indices, (sequences,) in batches(rows, 1, 16_384):
            scores = read(source, token_rows(sequences), [slice(0, len(sequences))], device)
            for i, answer in zip(indices, answers(scores), strict=True):
                likelihoods[i] = answer
        return likelihoods

    return scorer
