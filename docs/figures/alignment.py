"""Draws the pictures of docs/alignment.md from real alignments of the demo tokenizers.

uv run docs/figures/alignment.py               # writes docs/images/alignment_{chunks,resync,chat}.svg; --format png
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from colours import INEXACT, INK, MANY, MASK, ONE_TO_ONE, PAPER, PLAIN, ROLE, STUDENT, TEACHER, picture_parser, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import BoxStyle, FancyBboxPatch, Patch, Rectangle
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import ChatRenderer, ChatTokens, TokenAligner, align_chat, pieces_of
from nemo_opd.models.load import load_tokenizer
from nemo_opd.types import Alignment

Box = tuple[float, float]
"""Left and right edge, in characters."""
BOX, GAP, SPACE, NAMES = 1.3, 1.7, 0.2, 8.0
"""Height of a token's box, of the space between the two rows, width between boxes and of the rows' names."""
INCHES = 0.125
"""Of one character's width."""

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GEMMA = """<bos>{% for m in messages %}<start_of_turn>{{ "model" if m.role == "assistant" else m.role }}
{{ m.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
MESSAGES = [
    {"role": "user", "content": "Bytes in 1250 €?"},
    {"role": "assistant", "content": "It has about 8."},
]


@dataclass(frozen=True)
class Row:
    """The tokens of one side, as they are written into boxes."""

    name: str
    color: str
    labels: list[str]
    special: NDArray[np.bool_]
    mask: NDArray[np.bool_] | None = None

    def part(self, start: int, stop: int) -> "Row":
        mask = None if self.mask is None else self.mask[start:stop]
        return Row(self.name, self.color, self.labels[start:stop], self.special[start:stop], mask)


def label(tokenizer: PreTrainedTokenizerFast, token_id: int) -> str:
    """Text with visible white space, or bytes in hexadecimal where they are no whole characters."""
    piece = pieces_of(tokenizer).bytes_of(token_id)
    try:
        text = piece.decode() if piece else str(tokenizer.convert_ids_to_tokens(token_id))
    except UnicodeDecodeError:
        return " ".join(f"{byte:02X}" for byte in piece)
    return text.replace(" ", "·").replace("\n", "↵")


def row(
    name: str,
    color: str,
    tokenizer: PreTrainedTokenizerFast,
    ids: Sequence[int],
    mask: NDArray[np.bool_] | None = None,
) -> Row:
    special = np.array([not pieces_of(tokenizer).bytes_of(token_id) for token_id in ids], np.bool_)
    return Row(name, color, [label(tokenizer, token_id) for token_id in ids], special, mask)


def place(student: Row, teacher: Row, bounds: NDArray[np.int32]) -> tuple[list[Box], list[Box]]:
    """Where the boxes stand: the two sides of a chunk below each other and equally wide."""
    boxes: tuple[list[Box], list[Box]] = ([], [])
    at = [0.0, 0.0]

    def put(side: int, labels: list[str], room: float) -> None:
        """Boxes for `labels`, widened evenly where they need less than `room`."""
        spare = max(0.0, room - sum(map(width, labels))) / max(1, len(labels))
        for text in labels:
            boxes[side].append((at[side], at[side] + width(text) + spare))
            at[side] = boxes[side][-1][1]

    for i, k, j, m in [*bounds.tolist(), [len(student.labels)] * 2 + [len(teacher.labels)] * 2]:
        put(0, student.labels[len(boxes[0]) : i], 0.0)
        put(1, teacher.labels[len(boxes[1]) : j], 0.0)
        at = [max(at)] * 2
        room = max(sum(map(width, student.labels[i:k])), sum(map(width, teacher.labels[j:m])))
        put(0, student.labels[i:k], room)
        put(1, teacher.labels[j:m], room)
    return boxes


def width(text: str) -> float:
    return len(text) + 0.7


def draw(ax: Axes, student: Row, teacher: Row, alignment: Alignment) -> None:
    """Two rows of tokens with their chunks between them."""
    placed = place(student, teacher, alignment.bounds)
    for side, boxes, bottom in zip((student, teacher), placed, (BOX + GAP, 0.0), strict=True):
        ax.text(-0.6, bottom + BOX / 2, side.name, ha="right", va="center", color=INK, fontsize=9)
        for n, box in enumerate(boxes):
            _token(ax, box, bottom, side, n)
    for c, (i, k, j, m) in enumerate(alignment.bounds.tolist()):
        _chunk(ax, (placed[0][i][0], placed[0][k - 1][1]), f"{k - i}:{m - j}", _kind(alignment, c))
    ax.set_xlim(-NAMES, max(boxes[-1][1] for boxes in placed) + 0.5)
    ax.set_ylim(-0.8, 2 * BOX + GAP + 0.8)
    ax.set_aspect("equal")
    ax.axis("off")


def _kind(alignment: Alignment, chunk: int) -> str:
    if alignment.inexact[chunk]:
        return INEXACT
    if alignment.special[chunk]:
        return ROLE
    return ONE_TO_ONE if alignment.one_to_one[chunk] else MANY


def _token(ax: Axes, box: Box, bottom: float, side: Row, n: int) -> None:
    left, right = box[0], box[1] - SPACE
    color = PLAIN if side.special[n] else side.color
    shape = BoxStyle("round", pad=0, rounding_size=0.18)
    ax.add_patch(
        FancyBboxPatch((left, bottom), right - left, BOX, shape, linewidth=0.7, edgecolor=INK, facecolor=color)
    )
    middle = bottom + BOX / 2 - 0.03
    font = {"family": "monospace", "fontsize": 9, "color": INK}
    ax.text((left + right) / 2, middle, side.labels[n], ha="center", va="center_baseline", fontdict=font)
    if side.mask is not None and side.mask[n]:
        edge = bottom - 0.35 if bottom == 0 else bottom + BOX + 0.35
        ax.plot([left, box[1]], [edge, edge], color=MASK, linewidth=3, solid_capstyle="butt")


def _chunk(ax: Axes, box: Box, text: str, color: str) -> None:
    left, right = box[0], box[1] - SPACE
    bottom, height = BOX + 0.14, GAP - 0.28
    ax.add_patch(Rectangle((left, bottom), right - left, height, facecolor=color, alpha=0.4, edgecolor="none"))
    if color == INEXACT:
        ax.add_patch(
            Rectangle((left, bottom), right - left, height, fill=False, edgecolor=color, linewidth=0, hatch="////")
        )
    for edge in (bottom, bottom + height):
        ax.plot([left, right], [edge, edge], color=color, linewidth=2, solid_capstyle="butt")
    if text != "1:1":
        frame = {"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.85}
        ax.text((left + right) / 2, BOX + GAP / 2, text, ha="center", va="center", fontsize=8, color=INK, bbox=frame)


def legend(figure: Figure, entries: dict[str, str]) -> None:
    handles = [
        Patch(facecolor=color, alpha=0.9 if color == MASK else 0.55, label=text) for text, color in entries.items()
    ]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=9, labelcolor=INK)


def canvas(parts: list[tuple[Row, Row, Alignment]]) -> Figure:
    """One panel for each part, at one scale."""
    figure, axes = plt.subplots(len(parts), 1, squeeze=False)
    for ax, part in zip(axes[:, 0], parts, strict=True):
        draw(ax, *part)
    widest = max(ax.get_xlim()[1] for ax in axes[:, 0])
    for ax in axes[:, 0]:
        ax.set_xlim(-NAMES, widest)
    height = 2 * BOX + GAP + 1.6
    figure.set_size_inches((widest + NAMES) * INCHES, (height * len(parts) + 2.2) * INCHES)
    figure.subplots_adjust(left=0, right=1, top=1, bottom=2.2 / (height * len(parts) + 2.2), hspace=0)
    return figure


def chunks() -> Figure:
    student, teacher = tokenizers()
    text = "The archive cost about 1250 €"
    figure = canvas([text_part(student, teacher, text, text)])
    legend(figure, {"chunk of one token on either side": ONE_TO_ONE, "chunk of several tokens (student:teacher)": MANY})
    return figure


def resync() -> Figure:
    """The student is given decomposed text, as where the teacher's tokenizer composes what it reads."""
    student, teacher = tokenizers()
    text = "The café cost about 1250: a naïve price"
    figure = canvas([text_part(student, teacher, unicodedata.normalize("NFD", text), text)])
    legend(figure, {"1:1": ONE_TO_ONE, "several tokens": MANY, "inexact: other bytes, not used for training": INEXACT})
    return figure


def text_part(
    student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast, student_text: str, teacher_text: str
) -> tuple[Row, Row, Alignment]:
    s_ids = student(student_text, add_special_tokens=False)["input_ids"]
    t_ids = teacher(teacher_text, add_special_tokens=False)["input_ids"]
    alignment = TokenAligner(student, teacher).align(s_ids, t_ids)
    return row("student", STUDENT, student, s_ids), row("teacher", TEACHER, teacher, t_ids), alignment


def chat() -> Figure:
    student, teacher = chat_tokenizers()
    s_tokens, t_tokens = ChatRenderer(student)(MESSAGES), ChatRenderer(teacher)(MESSAGES)
    alignment = align_chat(TokenAligner(student, teacher), s_tokens, t_tokens)
    s_row = row("student", STUDENT, student, s_tokens.ids.tolist(), s_tokens.assistant_mask)
    t_row = row("teacher", TEACHER, teacher, t_tokens.ids.tolist(), t_tokens.assistant_mask)
    s_break = second_turn(s_tokens, student, "<|im_start|>")
    t_break = second_turn(t_tokens, teacher, "<start_of_turn>")
    ends = len(s_row.labels), len(t_row.labels)
    parts = [
        (s_row.part(i, k), t_row.part(j, m), window(alignment, i, k, j, m))
        for i, k, j, m in [(0, s_break, 0, t_break), (s_break, ends[0], t_break, ends[1])]
    ]
    figure = canvas(parts)
    entries = {"paired by role": ROLE, "content, 1:1": ONE_TO_ONE, "content, several tokens": MANY}
    legend(figure, {**entries, "assistant mask: what is learned": MASK})
    return figure


def second_turn(tokens: ChatTokens, tokenizer: PreTrainedTokenizerFast, start: str) -> int:
    return int(np.flatnonzero(tokens.ids == tokenizer.convert_tokens_to_ids(start))[1])


def window(alignment: Alignment, i: int, k: int, j: int, m: int) -> Alignment:
    """The chunks inside student tokens [i, k), counted from i and j."""
    inside = (alignment.bounds[:, 0] >= i) & (alignment.bounds[:, 1] <= k)
    names = {field.name for field in fields(alignment)} - {"student_chunk_id", "teacher_chunk_id"}
    by_chunk = {name: getattr(alignment, name)[inside] for name in names}
    by_chunk["bounds"] = by_chunk["bounds"] - np.array([i, i, j, j], np.int32)
    ids = alignment.student_chunk_id[i:k], alignment.teacher_chunk_id[j:m]
    return Alignment(*ids, **by_chunk)


def tokenizers() -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    return load_tokenizer("demo:student", key="student"), load_tokenizer("demo:teacher_cross", key="teacher")


def chat_tokenizers() -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """The demo tokenizers with the special tokens and templates of two well-known families."""
    student, teacher = tokenizers()
    student.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    teacher.add_special_tokens(
        {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "additional_special_tokens": ["<start_of_turn>"]}
    )
    student.chat_template, teacher.chat_template = CHATML, GEMMA
    return student, teacher


def main() -> None:
    options = picture_parser(__doc__).parse_args()
    mpl.rcParams["hatch.linewidth"] = 0.6
    options.output.mkdir(parents=True, exist_ok=True)
    for name, figure in {"chunks": chunks(), "resync": resync(), "chat": chat()}.items():
        save(figure, options.output / f"alignment_{name}.{options.format}", dpi=150)


if __name__ == "__main__":
    main()
