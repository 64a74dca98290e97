"""What the student samples in its own workers (`rollout.type=hf`)."""

from __future__ import annotations

from nemo_opd.config.evaluation import Evaluation
from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.training.memory.estimate import Phase
from nemo_opd.training.memory.process import Process
from nemo_opd.training.memory.sampling import Drawing, SamplingJob, is_warped, with_sampling
from nemo_opd.training.memory.student import OWNER, StudentJob


def with_rollouts(process: Process, job: StudentJob) -> Process:
    """The student's process; as it is where the student does not sample there."""
    if not isinstance(job.config.rollout, HFRollout):
        return process
    drawing = rollouts(job.config, job.setup.layout.dp)
    return with_sampling(process, SamplingJob(OWNER, Phase.ROLLOUT, job.setup, job.compute_bytes, drawing))


def rollouts(config: RunConfig, dp: int) -> Drawing:
    """The most of any batch, rollouts or questions. Of turns behind the first a prompt may be all but one token."""
    rollout, questions, longest = config.rollout, config.evaluation, config.train.max_length
    assert isinstance(rollout, HFRollout)
    kinds: list[HFRollout | Evaluation] = [rollout] if questions is None else [rollout, questions]
    new = max(each.max_new_tokens or 0 for each in kinds)
    rows = -(-config.train.global_batch_size // dp) if questions is None else rollout.batch_size
    prompt = longest_prompt(config) if config.environment is None else longest - 1
    return Drawing(
        rows=min(rollout.batch_size, rows),
        prompt=prompt,
        new=min(new, longest - 1),
        is_warped=any(map(is_warped, kinds)),
    )
