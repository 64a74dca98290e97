"""Workers of a model that is evaluated outside a run."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.teacher import SameTokenizerTeacher
from nemo_opd.evaluation.likelihoods import Scored
from nemo_opd.models.load import load_config
from nemo_opd.models.parallelize import check_parallelism
from nemo_opd.rollout.base import BatchLimit, Completion, Generator, Request, Sampling
from nemo_opd.training.launch import open_cluster, require_processes
from nemo_opd.training.model_group import ModelGroup
from nemo_opd.training.ranks import colocated, resolve_device, resolve_layout, resolve_ranks
from nemo_opd.workers.frozen import FrozenWorker
from nemo_opd.workers.memory import EVALUATED_TASKS

_MICRO_BATCH_TOKENS = 16_384
"""Benchmark tokens per microbatch of a rank."""


class EvaluatedModel(Generator):
    """A frozen model on the ranks of a cluster."""

    def __init__(self, group: ModelGroup, end_ids: Collection[int], limit: BatchLimit) -> None:
        """Store the arguments. end_ids: tokens that end a sequence. limit: batch size limit of a rank's sampling."""
        self._group, self._end_ids, self._limit = group, end_ids, limit

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._group.continued(requests, sampling, self._end_ids, self._limit, about="questions")

    def likelihoods(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Return the sequences' likelihoods, in order (see `Scorer`)."""
        return self._group.likelihoods(rows)


@contextmanager
def open_model(config: EvaluationConfig, vocab_size: int, end_ids: Collection[int]) -> Iterator[EvaluatedModel]:
    """Start the workers and load the model.

    Raises ConfigError if the ranks are not available, and the workers' ModelError and ClusterError.
    """
    assert isinstance(config.rollout, HFRollout)
    cluster = config.cluster.on(config.device)
    device = resolve_device(cluster, "device")
    placement = colocated(resolve_ranks(cluster, device), cluster.num_nodes)
    require_processes(cluster, placement, device)
    layout = resolve_layout("parallelism", len(placement.student), config.parallelism)
    check_parallelism(load_config(config.model, key="model"), config.parallelism, device, key="parallelism")
    settings = SameTokenizerTeacher(
        type="same_tokenizer",
        name="model",
        model=config.model,
        tokenizer=config.tokenizer,
        parallelism=config.parallelism,
        dtype=config.dtype,
    )
    arguments = {
        "settings": settings,
        "tasks": EVALUATED_TASKS,
        "key": "model",
        "vocab_size": vocab_size,
        "device": device,
    }
    with (
        open_cluster(cluster, device, placement) as running,
        running.group("model", FrozenWorker, arguments, placement.student) as group,
    ):
        running.gather([group.ready])
        yield EvaluatedModel(
            ModelGroup(group, layout, _MICRO_BATCH_TOKENS), end_ids, BatchLimit(config.rollout.batch_size)
        )
