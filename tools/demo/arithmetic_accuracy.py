"""How many of the demo's sums a saved model answers rightly."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.demo.arithmetic_questions import Sum

MAX_NEW_TOKENS = 40
"""A response is at most 30 tokens of the student and 33 of the cross teacher, with the end token."""
SEED = 0


@torch.inference_mode()
def accuracy(folder: Path, questions: Sequence[Sum], *, greedy: bool, worked: bool = False) -> float:
    """Share of the questions whose last number is the answer; one response each, greedy or drawn at temperature 1.

    worked: with the sum and its right response in front.
    """
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    texts = [question.worked_prompt if worked else question.prompt for question in questions]
    prompts = tokenizer(texts, padding=True, return_tensors="pt")
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    ids = model.generate(**prompts, **sampling, max_new_tokens=MAX_NEW_TOKENS)
    answers = tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text.split(" ")[-1] == question.answer for text, question in zip(answers, questions, strict=True)]
    return sum(right) / len(right)
