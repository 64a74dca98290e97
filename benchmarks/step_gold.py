"""TRL's GOLD trainer on the same models and texts, a step at a time on demand.

It runs in a process of its own, which says when a step is done and waits for leave to take the next: so its steps and
ours can take turns, and its memory is its own.
"""

import multiprocessing
import os
import resource
import time
import traceback
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

LEAVE_S = 10.0
"""For a process that waits for leave to take a step; one in the middle of a step needs longer, and is killed."""
PROMPT_CHARS = 8
"""GOLD wants a prompt before each completion, which its loss leaves out."""
NOTES = (
    "GOLD has one process and no sharding, and holds the logits of a microbatch of both models. Its loss is its own: "
    "JSD on exact pairs and sorted probabilities on the rest, which `loss=gold` is closest to (with `loss=uld` all are "
    "sorted), here with cross entropy at the same weight. It leaves out the first "
    f"{PROMPT_CHARS} characters of each text and reads a token less, as it has no begin-of-text. It tokenizes for the "
    "teacher and aligns inside of the step, here both are done ahead. It puts the rows of aligned probabilities into "
    "their places one by one, and autograd then makes a gradient of the whole [S, V] for each, so its time grows with "
    "S² · V."
)


class GoldError(Exception):
    """GOLD cannot do this; the message says why."""


@dataclass(frozen=True)
class Job:
    student: Path
    teacher: Path
    texts: Path
    scratch: Path
    steps: int
    rows: int
    """Texts of a step."""
    micro_batch_size: int
    length: int
    device: str
    threads: int
    checkpointing: bool
    is_hybrid: bool
    ce_weight: float


class Gold:
    """Steps of the trainer. Raises GoldError where it cannot take them, or needs more than `limit_s` for one."""

    def __init__(self, job: Job, limit_s: float) -> None:
        self._limit_s = limit_s
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, job))
        self._process.start()
        # Otherwise a process that dies would leave this end waiting.
        theirs.close()
        try:
            self._receive()
        except GoldError:
            self.close()
            raise

    def step(self) -> float:
        """Seconds of one optimizer step, its data included."""
        self._pipe.send("step")
        return float(self._receive())

    def peak_bytes(self) -> int:
        """The most so far: of PyTorch's allocator on a GPU, else of the process."""
        self._pipe.send("peak")
        return int(self._receive())

    def _receive(self) -> float:
        try:
            if not self._pipe.poll(self._limit_s):
                raise GoldError(f"a step takes more than {self._limit_s:g} s")
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise GoldError(f"its process ended with status {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise GoldError(answer)
        return float(answer)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(LEAVE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> "Gold":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def work(pipe: Connection, job: Job) -> None:
    """The process: any error goes through the pipe as one line."""
    try:
        train(pipe, job)
    except (EOFError, ConnectionError):
        return  # whoever asked for steps has gone
    except BaseException as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")


def train(pipe: Connection, job: Job) -> None:
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(job.threads)
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gold import GOLDTrainer

    class TakesTurns(TrainerCallback):
        """Waits for leave before the first step and behind each."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pipe.send(0.0)
            self._wait(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if job.device == "cuda":
                torch.cuda.synchronize()
            pipe.send(time.perf_counter() - self._began)
            self._wait(control)

        def _wait(self, control: Any) -> None:
            try:
                while pipe.recv() == "peak":
                    pipe.send(peak_bytes(job.device))
            except EOFError:
                control.should_training_stop = True
            self._began = time.perf_counter()

    tokenizer = AutoTokenizer.from_pretrained(job.student, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    teacher_dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    GOLDTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.student, dtype=torch.float32, trust_remote_code=False),
        teacher_model=AutoModelForCausalLM.from_pretrained(job.teacher, dtype=teacher_dtype, trust_remote_code=False),
        args=settings(job),
        train_dataset=dataset(job, tokenizer),
        processing_class=tokenizer,
        callbacks=[TakesTurns()],
    ).train()


def settings(job: Job) -> Any:
    from trl.experimental.gold import GOLDConfig

    return GOLDConfig(
        output_dir=str(job.scratch),
        max_steps=job.steps,
        per_device_train_batch_size=job.micro_batch_size,
        gradient_accumulation_steps=job.rows // job.micro_batch_size,
        max_length=job.length,
        max_completion_length=1,
        lmbda=0.0,
        use_uld_loss=True,
        uld_use_hybrid_loss=job.is_hybrid,
        uld_crossentropy_weight=job.ce_weight,
        teacher_tokenizer_name_or_path=str(job.teacher),
        learning_rate=1e-5,
        **checkpointing(job.checkpointing),
        bf16=job.device == "cuda",
        use_cpu=job.device == "cpu",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def checkpointing(wanted: bool) -> dict[str, bool]:
    """Newer and older transformers have different names for it, and GOLD has it on unless told otherwise."""
    from trl.experimental.gold import GOLDConfig

    names = {field.name for field in fields(GOLDConfig)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: wanted}


def dataset(job: Job, tokenizer: Any) -> Any:
    from datasets import Dataset

    texts = [row["text"] for row in Dataset.from_json(str(job.texts), cache_dir=str(job.scratch))]
    ends = [prompt_end(text, tokenizer) for text in texts]
    return Dataset.from_list(
        [{"prompt": text[:end], "completion": text[end:]} for text, end in zip(texts, ends, strict=True)]
    )


def prompt_end(text: str, tokenizer: Any) -> int:
    """End of the first token that ends at PROMPT_CHARS or later: GOLD counts a token across the cut as completion."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return next(end for _, end in offsets if end >= PROMPT_CHARS)


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
