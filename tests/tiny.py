"""Tiny random models and their tokenizers, made in a second, for tests of everything around the models."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SENTENCES = [
    "The quick brown fox jumps over the lazy dog 1234 times.",
    "def add(a, b):\n    return a + b  # 42",
    "Größe, naïve café, 東京と大阪, привет мир 🙂",
    "for i in range(1000):\n        print(i, i ** 2)",
]


@dataclass(frozen=True)
class Tiny:
    """Folders of a student and of teachers with the same and another tokenizer, and an Arrow file of documents."""

    student: Path
    teacher_same: Path
    teacher_cross: Path
    documents: Path

    def overrides(self, *more: str, teachers: int = 2) -> list[str]:
        """Return command-line overrides that replace the demo's models and data.

        teachers: 1 for the cross-tokenizer teacher alone, which starts one process less.
        """
        both = [f"teachers.0.model={self.teacher_cross}", f"teachers.1.model={self.teacher_same}"]
        return [
            f"student.model={self.student}",
            *(both if teachers == 2 else ["teachers=demo_single", both[0]]),
            f"data.train.arrow_files={self.documents}",
            f"data.validation.arrow_files={self.documents}",
            "data.validation.max_samples=6",
            "train.global_batch_size=4",
            "train.micro_batch_size=2",
            "train.max_length=48",
            "train.max_steps=4",
            "train.validate_every=null",
            "train.save_every=null",
            "logging.continued_texts=0",
            *more,
        ]


def make_tiny(folder: Path) -> Tiny:
    ours = train_tokenizer(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+", 400, "<|end|>")
    theirs = train_tokenizer(r"\p{N}|[^\s]?\p{L}+|\s+|[^\s\p{L}\p{N}]+", 340, "</s>")
    return Tiny(
        student=save_model(folder / "student", ours, width=16, seed=1),
        teacher_same=save_model(folder / "teacher_same", ours, width=24, seed=2),
        teacher_cross=save_model(folder / "teacher_cross", theirs, width=24, seed=3, extra_rows=20),
        documents=save_documents(folder / "documents.arrow", 24),
    )


def train_tokenizer(pattern: str, vocab_size: int, eos: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


def save_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    width: int,
    seed: int,
    extra_rows: int = 0,
    tied: bool = True,
) -> Path:
    """Save a Llama of two layers whose head has `extra_rows` more rows than the tokenizer. tied: the head is the
    embeddings.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + extra_rows,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_documents(file: Path, count: int) -> Path:
    """Save documents of different lengths, some longer than `train.max_length` and one a single character."""
    texts = ["".join(SENTENCES[(i + k) % len(SENTENCES)] for k in range(i % 3 + 1)) for i in range(count - 1)]
    table = pa.table({"text": [*texts, "x"]})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return file
