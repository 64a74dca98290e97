"""What teachers' processes hold where they answer the evaluation's questions (`evaluation.teachers=true`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.run import RunConfig
from nemo_opd.training.memory.estimate import Phase
from nemo_opd.training.memory.process import Process
from nemo_opd.training.memory.sampling import Drawing, SamplingJob, is_warped, with_sampling
from nemo_opd.training.memory.teacher import TeacherJob, teacher_process


def are_asked(config: RunConfig) -> bool:
    return config.evaluation is not None and config.evaluation.teachers and bool(config.active_teachers)


def teacher_processes(config: RunConfig, jobs: Sequence[TeacherJob], *, shared: bool) -> list[Process]:
    """shared: all are on the same device. They answer one after the other, so there the phase is that of the one that
    needs most for it, while the others wait.
    """
    waiting = [teacher_process(job) for job in jobs]
    if not are_asked(config):
        return waiting
    answering = [answering_process(job) for job in jobs]
    if not shared:
        return answering
    most = max(range(len(jobs)), key=lambda i: held(answering[i]) - held(waiting[i]))
    return [*waiting[:most], answering[most], *waiting[most + 1 :]]


def answering_process(job: TeacherJob) -> Process:
    sampling = SamplingJob(job.settings.name, Phase.ANSWERS, job.setup, job.item_bytes, answers(job))
    return with_sampling(teacher_process(replace(job, answers=True)), sampling)


def held(process: Process) -> int:
    return sum(part.at(Phase.ANSWERS) for part in process.device)


def answers(job: TeacherJob) -> Drawing:
    """The most of any batch. A question is taken to be so much longer in its own tokens as its sequences may be; of
    turns behind the first it may be all but one token.
    """
    config, longest = job.config, job.asked_width
    questions, rollout = config.evaluation, config.rollout
    assert questions is not None
    assert rollout is not None
    as_long = -(-longest_prompt(config) * longest // config.train.max_length)
    return Drawing(
        rows=questions.teacher_batch_size,
        prompt=min(longest - 1, as_long) if config.environment is None else longest - 1,
        new=min(questions.max_new_tokens or rollout.max_new_tokens, longest - 1),
        is_warped=is_warped(questions),
    )
