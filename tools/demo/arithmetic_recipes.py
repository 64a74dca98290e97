"""What each model of the arithmetic demo is: its shape, its tokenizer and the sums it learns from."""

from dataclasses import dataclass, replace

from byte_bpe import LLAMA_LIKE, QWEN_LIKE, BPERecipe
from recipes import ModelRecipe

STUDENT_BPE = BPERecipe(size=265, pattern=r"\p{N}|[^\p{N}]+", eos=LLAMA_LIKE.eos, pad=LLAMA_LIKE.pad)
"""Single digits, and all that stands between two digits as one token (`; `, ` + `)."""
CROSS_BPE = BPERecipe(size=262, pattern=QWEN_LIKE.pattern, eos=QWEN_LIKE.eos, pad=QWEN_LIKE.pad)
"""Single digits too, and shorter tokens between them (`;` and a space, ` +` and a space)."""

STUDENT = ModelRecipe(
    STUDENT_BPE,
    96,
    layers=2,
    heads=3,
    kv_heads=3,
    mlp_width=256,
    steps=500,
    batch=64,
    learning_rate=3e-3,
    warmup=50,
    head_multiple=1,
)


@dataclass(frozen=True)
class ArithmeticRecipe:
    """A model, and how its training responses go wrong: each is worked with carries that may slip."""

    model: ModelRecipe
    forgotten: float = 0.0
    """Of the carries that are due, how many are left out."""
    invented: float = 0.0
    """Of the columns without a carry, but for the units, how many get one."""
    worked: float = 0.0
    """Of the texts, how many begin with the sum and its right response, which then never slips."""


ARITHMETIC_RECIPES = {
    "arithmetic_teacher": ArithmeticRecipe(
        ModelRecipe(
            STUDENT_BPE,
            96,
            layers=2,
            heads=3,
            kv_heads=3,
            mlp_width=320,
            steps=800,
            batch=64,
            learning_rate=3e-3,
            warmup=50,
            head_multiple=1,
        )
    ),
    "arithmetic_teacher_cross": ArithmeticRecipe(
        ModelRecipe(
            CROSS_BPE,
            96,
            layers=2,
            heads=3,
            kv_heads=3,
            mlp_width=352,
            steps=900,
            batch=64,
            learning_rate=3e-3,
            warmup=50,
        )
    ),
    "arithmetic_student": ArithmeticRecipe(STUDENT, forgotten=0.6, invented=0.25),
    "arithmetic_reader": ArithmeticRecipe(replace(STUDENT, steps=600), forgotten=0.6, invented=0.25, worked=0.5),
}
"""The student knows how an answer is written and adds columns, but its carries slip. So do those of the reader, but
where the worked sum stands in front.
"""
