"""The report's table of answers: the student's at the first evaluation and the last, beside those of its teachers."""

from html import escape
from pathlib import Path

from nemo_opd.logging.formats import amount
from nemo_opd.logging.samples import ShownAnswer, by_teacher, first_and_last, read_samples

MAX_OPEN = 480
"""Characters of a text that stand open; of a longer one its start and its end do, where an answer usually is."""
MAX_LINES = 12


def samples_section(path: Path, correct_reward: float) -> str:
    """HTML; empty where there are none. Answers of `correct_reward` or more are right.

    Raises DataError where samples.jsonl is damaged.
    """
    answers = read_samples(path) if path.exists() else []
    columns = {f"student after step {step:,}": own for step, own in first_and_last(answers).items()}
    columns |= {f"teacher {name}": own for name, own in by_teacher(answers).items()}
    places = dict.fromkeys(place for own in columns.values() for place in own)
    rows = (_row({who: own.get(place) for who, own in columns.items()}, correct_reward) for place in places)
    return f"<section><h2>Answers</h2>{''.join(rows)}</section>" if places else ""


def _row(answers: dict[str, ShownAnswer | None], correct_reward: float) -> str:
    """answers: to one question, by who gave them."""
    known = next(answer for answer in answers.values() if answer is not None)
    wanted = "" if known.answer is None else f'<p class="wanted">answer <b>{escape(known.answer)}</b></p>'
    title = f"question {known.question:,} · {known.kind}" + f" {known.sample}" * (known.kind == "sampled")
    cells = "".join(_cell(who, answer, correct_reward) for who, answer in answers.items())
    return (
        f'<div class="question"><small>{title}</small>{_text(known.prompt)}{wanted}'
        f'<div class="answers">{cells}</div></div>'
    )


def _cell(who: str, answer: ShownAnswer | None, correct_reward: float) -> str:
    label = f'<b class="who">{escape(who)}</b>'
    if answer is None:
        return f'<div class="answer">{label}<small>not asked</small></div>'
    facts = [f"reward {answer.reward:g}".replace("-", "−")]
    facts += [f"{amount(answer.num_tokens)} token{'s' * (answer.num_tokens != 1)}"]
    facts += ["cut at the limit"] * (answer.finish_reason == "length")
    badge = '<b class="good">right</b>' if answer.reward >= correct_reward else '<b class="bad">wrong</b>'
    kind = "answer" if answer.teacher is None else "answer teacher"
    return f'<div class="{kind}">{label}<small>{" · ".join((badge, *facts))}</small>{_text(answer.response)}</div>'


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
