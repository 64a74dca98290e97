"""A run on conversations: a template for student and teacher, samples cached, the template saved with the student.

The first teacher reads the student's conversations, the second privileged prompts with a column of the data.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from nemo_opd.logging.loggers import read
from tests.tiny import Tiny
from tests.training.launch import run_here
from tests.training.templates import STUDENT, TEACHER

pytestmark = pytest.mark.world

TOOLS = [{"name": "jump"}]


def test_a_run_on_conversations(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "student.jinja").write_text(STUDENT)
    (tmp_path / "teacher.jinja").write_text(TEACHER)
    chats = [
        [{"role": "user", "content": f"fox {i}?"}, {"role": "assistant", "content": f"The quick brown fox {i * 37}"}]
        for i in range(8)
    ]
    hints = [f"The quick brown fox is {i * 37}." for i in range(8)]
    table = pa.table({"chat": chats, "fns": [json.dumps(TOOLS)] * 8, "text": ["unused"] * 8, "hint": hints})
    pq.write_table(table, tmp_path / "chats.parquet")
    run_here(
        tmp_path / "run",
        tiny.overrides(
            "data.train.arrow_files=null",
            f"data.train.parquet_files={tmp_path / 'chats.parquet'}",
            "data.validation.arrow_files=null",
            f"data.validation.parquet_files={tmp_path / 'chats.parquet'}",
            "++data.messages_key=chat",
            "++data.tools_key=fns",
            f"++student.chat_template={tmp_path / 'student.jinja'}",
            f"++teachers.0.chat_template={tmp_path / 'teacher.jinja'}",
            f"++teachers.1.chat_template={tmp_path / 'student.jinja'}",
            "++teachers.1.context.template='{prompt} {hint}'",
            "++teachers.1.context.gap_every=2",
            "++teachers.1.context.contrast=true",
            "train.max_length=96",
        ),
    )
    start_record, *steps = read(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 4
    assert all(record["train/kd"] > 0 for record in steps)
    assert steps[-1]["val/ce"] < start_record["val/ce"]
    # "The quick brown fox " stands in the solution: 20 of 21 to 23 bytes.
    assert all(0.85 < record["train/leakage/same"] < 1 for record in steps)
    assert ["train/contrast_gap/same" in record for record in steps] == [False, True, False, True]
    assert steps[1]["train/privilege_gap/same"] != steps[1]["train/contrast_gap/same"]
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "final").chat_template == STUDENT
    assert list((tmp_path / "cache" / "samples").glob("*.sqlite"))
