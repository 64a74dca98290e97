"""Draws the pictures of docs/on_policy.md; the tokens and masks are those of a real conversation with the calculator.

uv run docs/figures/on_policy.py               # writes docs/images/on_policy_{phases,masks}.svg; --format png
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from colours import INK, MUTED, OTHER, PLAIN, SAMPLED, STUDENT, TEACHER, picture_parser, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from transformers import PreTrainedTokenizerBase

from nemo_opd.config.rollout import CalculatorEnvironment
from nemo_opd.data.row_types import Prompt, Rollout
from nemo_opd.models.load import load_tokenizer
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.conversation import ConversationRenderer
from nemo_opd.rollout.engine_interface import Completion, Request, Sampling
from nemo_opd.rollout.environment import build_environment

WIDTH = 96
"""Characters of a line of tokens."""

TEMPLATE = """{% if tools %}<tools>{{ tools[0].function.name }}</tools>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TURNS = ('<tool_call>{"name": "calculator", "arguments": {"expression": "17*23"}}</tool_call>', "It is 391.")


class Script:
    """An engine that says what it was told to."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str]) -> None:
        self._tokenizer, self._turns = tokenizer, iter(turns)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        said = self._tokenizer(f"{next(self._turns)}<|im_end|>", add_special_tokens=False)["input_ids"]
        return [Completion(np.array(said, np.int32), *[np.full(len(said), -0.5, np.float32)] * 2, "stop", 0)]


def conversation() -> tuple[Rollout, list[str]]:
    """The rollout, and what stands for each of its tokens."""
    tokenizer = load_tokenizer("demo:student", key="student")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    environment = build_environment(CalculatorEnvironment(max_turns=2))
    collector = Collector(
        Script(tokenizer, TURNS),
        ConversationRenderer(tokenizer),
        sampling=Sampling(),
        max_new_tokens=200,
        max_length=600,
        environment=environment,
    )
    prompt = Prompt(0, [{"role": "user", "content": "What is 17 times 23?"}], answer="391")
    (rollout,) = collector.collect([prompt], 1, 0)
    return rollout, [tokenizer.decode([i]).replace("\n", "⏎") for i in rollout.ids.tolist()]


def draw_masks() -> Figure:
    rollout, labels = conversation()
    lines: list[list[int]] = [[]]
    for i, label in enumerate(labels):
        if sum(len(labels[j]) + 1 for j in lines[-1]) + len(label) > WIDTH:
            lines.append([])
        lines[-1].append(i)
    figure = plt.figure(figsize=(11, 0.42 * len(lines) + 0.7))
    axes = figure.add_axes((0.01, 0.0, 0.98, 1.0))
    for row, line in enumerate(lines):
        x = 0.0
        for i in line:
            width = len(labels[i]) + 0.7
            color = SAMPLED if rollout.loss_mask[i] else PLAIN
            box(axes, x, -row * 1.45, width, 1.1, labels[i], color, size=9, family="DejaVu Sans Mono")
            x += width + 0.3
    axes.set_xlim(-0.5, WIDTH + 2)
    axes.set_ylim(-1.45 * (len(lines) - 1) - 0.9, 2.4)
    axes.axis("off")
    handles = [
        Patch(facecolor=SAMPLED, edgecolor=INK, linewidth=0.5, label="sampled by the student: in the loss"),
        Patch(facecolor=PLAIN, edgecolor=INK, linewidth=0.5, label="prompt, template and tool: not in the loss"),
    ]
    axes.legend(handles=handles, loc="upper left", ncol=2, frameon=False, fontsize=10)
    return figure


def draw_phases() -> Figure:
    figure = plt.figure(figsize=(11, 3.6))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    for x, title, text, color in (
        (0.2, "1  sample", "the engine continues each prompt\nrollout.n times", OTHER),
        (4.1, "2  score", "every teacher reads the samples\non its own tokens", TEACHER),
        (8.0, "3  update", "losses from hidden states,\none optimizer step", STUDENT),
    ):
        box(axes, x, 1.2, 2.8, 1.3, f"{title}\n\n{text}", color, size=11)
    arrow(axes, (3.0, 1.85), (4.1, 1.85), "ids, masks,\nalignment")
    arrow(axes, (6.9, 1.85), (8.0, 1.85), "hidden\nstates")
    arrow(axes, (9.4, 1.2), (1.6, 1.2), "weights, version n + 1", bend=-0.18)
    arrow(axes, (1.6, 3.2), (1.6, 2.5), "prompts", side=0.55)
    axes.set_xlim(0, 11)
    axes.set_ylim(0, 3.4)
    axes.axis("off")
    return figure


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, *, size: float, **font: str
) -> None:
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=color, edgecolor=INK, linewidth=0.6))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK, **font)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], label: str, bend: float = 0.0, side: float = 0.0
) -> None:
    path = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            start, end, connectionstyle=path, arrowstyle="-|>", mutation_scale=14, color=MUTED, linewidth=1.4
        )
    )
    x, y = (start[0] + end[0]) / 2 + side, (start[1] + end[1]) / 2
    y += 0.42 if not bend and not side else (-0.9 if bend else 0)
    axes.text(x, y, label, ha="center", va="center", fontsize=10, color=MUTED)


def main() -> None:
    options = picture_parser(__doc__).parse_args()
    for name, draw in (("phases", draw_phases), ("masks", draw_masks)):
        save(draw(), options.output / f"on_policy_{name}.{options.format}", dpi=120)


if __name__ == "__main__":
    main()
