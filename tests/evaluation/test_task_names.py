"""Catches existing lm-eval tasks that are refused because their names are not found in its files."""

import pytest

from nemo_opd.evaluation.benchmark_tasks import task_names

pytest.importorskip("lm_eval", reason="needs the extra eval")


def test_groups_tags_lists_and_quoted_keys_are_found() -> None:
    """Bug: only names written as `task: NAME` are found."""
    expected = {"mmlu", "gsm8k", "humaneval_plus", "mbpp_plus", "ai2_arc", "AraDiCE_ArabicMMLU_high_stem_biology_egy"}
    assert expected <= task_names()


@pytest.mark.nightly
def test_names_match_lm_eval() -> None:
    from lm_eval.tasks import TaskManager

    expected = TaskManager().all_tasks
    assert set(expected) <= task_names()
    assert len(task_names()) < 1.01 * len(expected)
