"""The report's table of answers: the first evaluation and the last side by side."""

from html import escape
from pathlib import Path

from nemo_opd.logging.formats import amount
from nemo_opd.logging.samples import ShownAnswer, first_and_last, read_samples

MAX_OPEN = 480
"""Characters of a text that stand open; of a longer one its start and its end do, where an answer usually is."""
MAX_LINES = 12


def samples_section(path: Path) -> str:
    """HTML; empty where there are none. Raises DataError where samples.jsonl is damaged."""
    evaluations = first_and_last(read_samples(path)) if path.exists() else ()
    places = list(dict.fromkeys(place for answers in evaluations for place in answers))
    if not places:
        return ""
    steps = [next(iter(answers.values())).step for answers in evaluations]
    heads = "".join(f'<div class="head">after step {step:,}</div>' for step in steps)
    rows = "".join(_row([answers.get(place) for answers in evaluations]) for place in places)
    return (
        f'<section><h2>Answers</h2><div class="answers" style="--columns: {len(steps)}">{heads}{rows}</div></section>'
    )


def _row(answers: list[ShownAnswer | None]) -> str:
    known = next(answer for answer in answers if answer is not None)
    wanted = "" if known.answer is None else f'<p class="wanted">answer <b>{escape(known.answer)}</b></p>'
    title = f"question {known.question:,} · {known.kind}" + f" {known.sample}" * (known.kind == "sampled")
    question = f'<div class="question"><small>{title}</small>{_text(known.prompt)}{wanted}</div>'
    return question + "".join(map(_cell, answers))


def _cell(answer: ShownAnswer | None) -> str:
    if answer is None:
        return '<div class="answer"><small>not asked</small></div>'
    facts = [f"{amount(answer.num_tokens)} token{'s' * (answer.num_tokens != 1)}"]
    facts += ["cut at the limit"] * (answer.finish_reason == "length")
    return (
        f'<div class="answer"><small>{_badge(answer.reward)} {" · ".join(facts)}</small>{_text(answer.response)}</div>'
    )


def _badge(reward: float) -> str:
    kind = "good" if reward > 0 else "bad"
    return f'<b class="badge {kind}">reward {f"{reward:g}".replace("-", "−")}</b>'


def _text(text: str) -> str:
    """As written, line by line. Of a long one the start and the end, and the whole when it is clicked."""
    if not text.strip():
        return '<p class="nothing">(nothing)</p>'
    start, end = _ends(text)
    if not end:
        return f'<div class="text">{escape(text)}</div>'
    preview = f"{escape(start)}\n<i>… {len(text):,} characters …</i>\n{escape(end)}"
    return (
        f'<details class="text"><summary><span class="preview">{preview}</span>'
        f'<span class="fold">fold</span></summary>{escape(text)}</details>'
    )


def _ends(text: str) -> tuple[str, str]:
    """What stands open of a text; the end is empty where all of it does."""
    lines = text.split("\n")
    if len(text) <= MAX_OPEN and len(lines) <= MAX_LINES:
        return text, ""
    half, few = MAX_OPEN // 2, MAX_LINES // 2
    return "\n".join(lines[:few])[:half].rstrip(), "\n".join(lines[-few:])[-half:].lstrip()
