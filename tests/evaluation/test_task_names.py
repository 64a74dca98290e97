"""Names of lm-eval's tasks that are not found in its files, so that a task which there is would be refused."""

import pytest

from nemo_opd.evaluation.benchmark_tasks import task_names

pytest.importorskip("lm_eval", reason="needs the extra eval")


def test_groups_tags_lists_and_quoted_keys_are_found() -> None:
    """Bug: only what is written as `task: NAME`."""
    wanted = {"mmlu", "gsm8k", "humaneval_plus", "mbpp_plus", "ai2_arc", "AraDiCE_ArabicMMLU_high_stem_biology_egy"}
    assert wanted <= task_names()


@pytest.mark.nightly
def test_they_are_those_of_lm_eval() -> None:
    from lm_eval.tasks import TaskManager

    known = TaskManager().all_tasks
    assert set(known) <= task_names()
    assert len(task_names()) < 1.01 * len(known)
