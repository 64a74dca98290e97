"""Summary, records and closing table of an invented run."""

from pathlib import Path

from nemo_opd.logging.interface import ClosingRow, ClosingTable, RunSummary, Score, ScoreRow, TeacherSummary


def summary(output_dir: Path, total_steps: int = 20) -> RunSummary:
    teachers = (
        TeacherSummary(
            "phi4mini",
            "microsoft/Phi-4-mini-instruct",
            "cross_tokenizer",
            1.0,
            "p_kl",
            coverage=("overlap 0.674, one to one 0.612", "exact pairs of numerals: 1-digit 10/10"),
            warnings=("p_kl fits badly",),
        ),
        TeacherSummary("llama3b", "meta-llama/Llama-3.2-3B", "same_tokenizer", 0.8, "same_vocab"),
    )
    return RunSummary(
        "demo",
        "llama-1b",
        teachers,
        "cpu",
        "2 ranks: 2 data parallel",
        total_steps,
        {"steps": f"{total_steps}, 2 epochs", "learning rate": "0.01, adamw", "loss": "p_kl, KD weight 1"},
        "9 documents from text (text_key)",
        "64 packed rows",
        2048,
        output_dir,
    )


def record(step: int) -> dict[str, float]:
    return {
        "epoch": step / 10,
        "train/loss": 3.0 - step / 10,
        "train/kd": 1.0 - step / 30,
        "train/ce": 2.0 - step / 15,
        "train/kd/phi4mini": 0.5,
        "train/kd/llama3b": 0.4,
        "train/grad_norm": 1.25,
        "train/lr": 5e-5,
        "train/student_tokens": 4096,
        "perf/tokens_per_s": 2048.0,
        "perf/tflops_per_s": 395.6,
        "perf/mfu": 0.4,
        "perf/useful_positions": 0.96,
        "perf/step_s": 2.0,
        "perf/teacher_s": 0.75,
        "perf/data_wait_s": 0.25,
        "perf/student_forward_s": 0.25,
        "perf/loss_s": 0.125,
        "perf/student_backward_s": 0.5,
        "perf/other_s": 0.125,
    }


def validation(bits_per_byte: float) -> dict[str, float]:
    return {"val/loss": 3.0, "val/kd": 1.0, "val/ce": 2.0, "val/bits_per_byte": bits_per_byte}


CLOSING = ClosingTable(
    before=ClosingRow("student before", 2.0, "llama-1b", 2.5),
    after=ClosingRow("student after", 1.5, "step 20", 1.75),
    teachers=(ClosingRow("phi4mini", None, shared_bits_per_byte=1.25), ClosingRow("llama3b", None, "not measured")),
)
QUESTIONS = ClosingTable(
    before=None,
    after=None,
    scores=(
        ScoreRow("greedy", Score(0.2, 0.1, 0.3), Score(0.4, 0.3, 0.5), {"phi4mini": Score(0.9, 0.8, 0.95)}),
        ScoreRow("pass@4", None, Score(0.6, 0.5, 0.7)),
    ),
)
