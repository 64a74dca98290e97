"""Tables of the real-model benchmark: means over seeds with intervals, and what was not run."""

from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.quality_statistics import compare, interval
from benchmarks.real_models.outcomes import Outcome
from benchmarks.real_models.questions import TASK
from benchmarks.real_models.settings import BESIDE_GOLD, SETTINGS, Experiment, Setting

Score = Callable[[Outcome], float]


def of(outcomes: Sequence[Outcome], setting: Setting) -> list[Outcome]:
    """Return the outcomes of a setting, by seed."""
    return sorted(
        (each for each in outcomes if (each.experiment, each.setting) == (setting.experiment, setting.name)),
        key=lambda each: each.seed,
    )


def settings_of(experiment: Experiment) -> list[Setting]:
    """Return the settings of a table; of GOLD's, also runs of ours with the same pair, texts and steps."""
    beside = BESIDE_GOLD if experiment == "gold" else ()
    return [each for each in SETTINGS if each.experiment == experiment or each.name in beside]


def mean_cell(values: Sequence[float], digits: int = 3) -> str:
    """Return `1.234 ± 0.012`, the half width of the 95 % interval by Student's t; without it for one seed."""
    found = interval(values)
    width = "" if found.half_width is None else f" ± {found.half_width:.{digits}f}"
    return f"{found.mean:.{digits}f}{width}"


def difference_cell(own: Sequence[Outcome], control: Sequence[Outcome], score: Score) -> str:
    """Return the mean difference to the control with the same seeds."""
    found = compare(*({each.seed: score(each) for each in side} for side in (own, control))).difference
    if found is None:
        return "—"
    width = "" if found.half_width is None else f" ± {found.half_width:.3f}"
    return f"{found.mean:+.3f}{width}".replace("-", "−")


def bits(outcome: Outcome) -> float:
    return outcome.end["all"]


def texts_table(outcomes: Sequence[Outcome], settings: Sequence[Setting]) -> list[str]:
    """Return rows of bits per byte, by domain too, and of what a run costs."""
    chosen = [(setting, own) for setting in settings if (own := of(outcomes, setting))]
    if not chosen:
        return ["Not run yet."]
    domains = [name for name in chosen[0][1][0].end if name not in ("all", TASK)]
    has_questions = TASK in chosen[0][1][0].end
    columns = ["run", "seeds", "steps", "before", "bits per byte", "to its control", *domains]
    columns += ["which line, %"] * has_questions + ["CPU s a step", "CPU s"]
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    for setting, own in chosen:
        control = [each for each in outcomes if each.setting == setting.control]
        cells = [
            setting.about,
            str(len(own)),
            str(own[0].steps),
            f"{own[0].start['all']:.3f}",
            mean_cell([bits(each) for each in own]),
            difference_cell(own, control, bits),
            *(f"{fmean(each.end[name] for each in own):.3f}" for name in domains),
        ]
        if has_questions:
            cells.append(mean_cell([100 * each.end[TASK] for each in own], 1))
        times = [fmean(each.cpu_s_per_step for each in own), fmean(each.cpu_s for each in own)]
        lines.append([*cells, f"{times[0]:.2f}", f"{times[1]:.0f}"])
    return as_markdown(lines)


def sums_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return rows of the on-policy runs: shares of right sums, greedy and sampled."""
    chosen = [(setting, of(outcomes, setting)) for setting in settings_of("on_policy")]
    lines = [
        ["run", "seeds", "steps", "greedy, before", "greedy", "sampled, before", "sampled"],
        ["---", *["---:"] * 6],
    ]
    for setting, own in chosen:
        if own:
            cells = [setting.about, str(len(own)), str(own[0].steps)]
            for measure in ("greedy", "pass@1"):
                cells.append(f"{100 * fmean(each.start[measure] for each in own):.1f} %")
                cells.append(f"{mean_cell([100 * each.end[measure] for each in own], 1)} %")
            lines.append(cells)
    return as_markdown(lines) if len(lines) > 2 else ["Not run yet."]


def not_run(outcomes: Sequence[Outcome], planned: Sequence[tuple[Setting, int]]) -> list[str]:
    """Return what is planned and has no result, by setting."""
    there = {each.key for each in outcomes}
    missing: dict[str, list[str]] = {}
    for setting, seed in planned:
        if (setting.experiment, setting.name, seed) not in there:
            missing.setdefault(f"{setting.experiment}: {setting.name}", []).append(str(seed))
    return [f"* {name}, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}" for name, seeds in missing.items()]


def as_markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in lines]
