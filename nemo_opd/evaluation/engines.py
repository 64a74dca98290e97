"""What samples where a model is evaluated by itself: the model in this process, or a server."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.rollout import HFRollout
from nemo_opd.errors import ConfigError
from nemo_opd.models.folder import read_template, resolve
from nemo_opd.models.generation import generating
from nemo_opd.models.load import load_model, load_tokenizer
from nemo_opd.rollout.base import Completion, Generator, Request, Sampling
from nemo_opd.rollout.hf import Sampler, end_ids, max_positions
from nemo_opd.rollout.server import ServerEngine


class OwnModel:
    """The model in this process; its weights do not change."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._sampler.generate(requests, sampling, version=0)


@contextmanager
def open_engine(
    config: EvaluationConfig, model: PretrainedConfig, tokenizer: PreTrainedTokenizerFast, output_dir: Path
) -> Iterator[Generator]:
    """The engine that `rollout` names, closed at the end. A server's log is in `output_dir`.

    Raises ModelError where the model cannot be loaded, RolloutError where a server does not come up.
    """
    ends = end_ids(tokenizer, GenerationConfig.from_model_config(model))
    if isinstance(config.rollout, HFRollout):
        device = device_of(config)
        loaded = load_model(config.model, dtype_of(config, device), key="model").eval().to(device)
        batch_size = config.rollout.batch_size
        sampler = Sampler(loaded, end_ids=ends, vocab_size=len(tokenizer), batch_size=batch_size, device=device)
        with generating(loaded, None):
            yield OwnModel(sampler)
        return
    server = ServerEngine(
        config.rollout,
        model=resolve(config.model),
        vocab_size=len(tokenizer),
        end_ids=ends,
        dtype=config.dtype,
        workdir=output_dir,
        max_length=max_positions(model),
    )
    with closing(server):
        yield server


def device_of(config: EvaluationConfig) -> str:
    """Raises ConfigError for a GPU that is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: PyTorch sees no GPU on this machine; write device=cpu")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def dtype_of(config: EvaluationConfig, device: str) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def tokenizer_of(config: EvaluationConfig) -> PreTrainedTokenizerFast:
    """With the chat template that the settings name. Raises ModelError."""
    key, source = ("model", config.model) if config.tokenizer is None else ("tokenizer", config.tokenizer)
    tokenizer = load_tokenizer(source, key=key)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template, key="chat_template")
    return tokenizer
