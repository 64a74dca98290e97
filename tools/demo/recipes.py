"""What each demo model is: its shape, its tokenizer and its training."""

from dataclasses import dataclass

from byte_bpe import LLAMA_LIKE, QWEN_LIKE, BPERecipe

CONTEXT = 512
"""Longest sequence a demo model is configured for, in tokens."""
SEQUENCE = 256
"""Tokens a training or validation sequence, and so the positions the models have seen."""
SEED = 0


@dataclass(frozen=True)
class ModelRecipe:
    """A Llama of `layers` x `width`, trained `steps` steps of `batch` sequences at a peak rate of `learning_rate`."""

    bpe: BPERecipe
    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    steps: int
    batch: int
    learning_rate: float
    warmup: int
    head_multiple: int = 64

    @property
    def head_rows(self) -> int:
        """Rows of the embedding and the head: the tokenizer's size, padded to a multiple of `head_multiple`."""
        return -(-self.bpe.size // self.head_multiple) * self.head_multiple


RECIPES = {
    "teacher_same": ModelRecipe(
        LLAMA_LIKE,
        144,
        layers=3,
        heads=4,
        kv_heads=2,
        mlp_width=320,
        steps=2763,
        batch=4,
        learning_rate=3e-3,
        warmup=100,
    ),
    "teacher_cross": ModelRecipe(
        QWEN_LIKE,
        160,
        layers=3,
        heads=5,
        kv_heads=1,
        mlp_width=384,
        steps=2000,
        batch=4,
        learning_rate=3e-3,
        warmup=100,
    ),
    "student": ModelRecipe(
        LLAMA_LIKE, 96, layers=2, heads=3, kv_heads=1, mlp_width=256, steps=200, batch=8, learning_rate=2e-3, warmup=20
    ),
}
