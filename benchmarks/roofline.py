"""Milliseconds and MFU of the production recipes by arithmetic, from what their steps ask of a GPU. Not a measurement.

uv run benchmarks/roofline.py          # writes benchmarks/results/roofline.{md,json}
uv run benchmarks/roofline.py --tiny   # a tiny recipe, in seconds

Counts come from a pretended GPU without values (tests/pretend_gpu.py), on which the workers' own code runs at the size
of the real models; constants from `roofline_hardware.py`; the arithmetic is in `roofline_time.py`.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from demo import commit  # noqa: E402
from roofline_counts import loss_as_it_is, micro_batch, work_of  # noqa: E402
from roofline_hardware import GPU, GPUS, Assumptions  # noqa: E402
from roofline_models import CUT, MODELS, RECIPES, ROWS, TINY, Recipe  # noqa: E402
from roofline_time import Machine, Plan, Times, Weights, step_times  # noqa: E402
from roofline_work import Counts, Kind  # noqa: E402

from nemo_opd.config.run import RunConfig  # noqa: E402
from nemo_opd.distributed.layout import Layout  # noqa: E402
from nemo_opd.preflight.memory import Machine as Memory  # noqa: E402
from nemo_opd.preflight.memory import MemoryInputs, ModelSetup  # noqa: E402
from nemo_opd.preflight.memory_choices import settle_memory  # noqa: E402
from nemo_opd.preflight.model_info import model_size, numel  # noqa: E402
from tests.composition import compose  # noqa: E402

COMMAND = "uv run benchmarks/roofline.py"
PARTS = (
    *("teachers", "handoff", "forward", "loss", "backward", "optimizer"),
    *("copies of FSDP2", "communication", "launches", "waits"),
)
GOAL = 0.5
BEFORE_KERNELS, BEFORE_BYTES, BEFORE_WAITS, BEFORE_USEFUL = 16_542, 134e9, 78, 0.39
"""Of commit a09c456: the loss's kernels and elementwise bytes for 2,048 tokens, 26 rows at a time; waits of a
microbatch; tokens among positions at 8 padded sequences at a time, after 11 % of the text was cut off."""


@dataclass(frozen=True)
class Row:
    """A step by arithmetic."""

    recipe: str
    machine: str
    tokens_at_a_time: int
    times: Times
    mfu: float


class Recipes:
    """Recipes with their settings; each is counted once."""

    def __init__(self) -> None:
        self._counted: dict[tuple[Any, ...], dict[str, Counts]] = {}

    def config(self, recipe: Recipe) -> RunConfig:
        return compose(*recipe.overrides, config_name=recipe.config)

    def tp(self, recipe: Recipe, number: int) -> int:
        return min(number, max(teacher.parallelism.tp for teacher in self.config(recipe).active_teachers))

    def parts(self, recipe: Recipe, machine: Machine, *, fused_layers: bool = True) -> dict[str, Counts]:
        tp, memory = self.tp(recipe, machine.number), machine.gpu.memory_bytes
        key = recipe, memory, tp, fused_layers
        if key not in self._counted:
            config = self.config(recipe)
            self._counted[key] = micro_batch(recipe, config, memory, tp=tp, fused_layers=fused_layers)
        return self._counted[key]

    def plan(self, recipe: Recipe, machine: Machine, parts: Mapping[str, Counts] | None = None, **more: Any) -> Plan:
        tp = self.tp(recipe, machine.number)
        number = max(1, round(recipe.sequences / len(recipe.lengths) / machine.number))
        reductions = sum(MODELS[name].layers for name in recipe.teachers) if tp > 1 else 0
        row = 2 * sum(recipe.lengths) * max(MODELS[name].width for name in recipe.teachers)
        return Plan(
            weights_of(recipe.student),
            {name: weights_of(name, tp) for name in recipe.teachers},
            self.parts(recipe, machine) if parts is None else parts,
            number,
            number * tp,
            tp,
            2 * reductions * row,
            reductions,
            **(self.kept(recipe, machine) | more),
        )

    def kept(self, recipe: Recipe, machine: Machine) -> dict[str, Any]:
        """Return what a run keeps gathered on these GPUs, as arguments of `Plan`."""
        tp, config = self.tp(recipe, machine.number), self.config(recipe)
        found, _ = settle_memory(
            config.model_copy(update={"run": config.run.model_copy(update={"dry_run": True})}),
            MemoryInputs(
                setup(recipe.student, Layout(machine.number)),
                tuple(setup(name, Layout(machine.number // tp, tp=tp)) for name in recipe.teachers),
                Memory("cuda", machine.gpu.memory_bytes, None, machine.number),
            ),
        )
        student, kept = found.student, zip(recipe.teachers, found.active_teachers, strict=True)
        return {
            "keeps_student": not (student.parallelism.frees_gathered or student.sync_each_micro_batch),
            "kept_teachers": tuple(name for name, teacher in kept if not teacher.parallelism.frees_gathered),
        }

    def row(
        self, recipe: Recipe, machine: Machine, parts: Mapping[str, Counts] | None = None, name: str = "", **more: Any
    ) -> Row:
        plan = self.plan(recipe, machine, parts, **more)
        times = step_times(plan, machine)
        utilization, batch = work_of(recipe, self.config(recipe), machine.gpu.flops)
        mfu = utilization.values(batch, times.total / plan.micro_batches)["perf/mfu"]
        shown = f"{machine.number} × {machine.gpu.name}"
        return Row(name or recipe.name, shown, sum(recipe.lengths), times, mfu)


def setup(name: str, layout: Layout) -> ModelSetup:
    size = model_size(MODELS[name].config())
    return ModelSetup(size, size.vocab_size, layout)


def weights_of(name: str, tp: int = 1) -> Weights:
    size = model_size(MODELS[name].config(tp=tp))
    layers = sum(numel(layer.shapes) for layer in size.layers)
    return Weights(layers, size.parameters - layers, 1 + len(size.layers))


def fits(recipe: Recipe, machine: Machine, tp: int) -> bool:
    """Return whether weights, gradients and optimizer states leave a tenth of the memory, without offload."""
    student = 16 * weights_of(recipe.student).all / machine.number
    teachers = sum(2 * weights_of(name).all for name in recipe.teachers) / max(tp, machine.number)
    return student + teachers < 0.9 * machine.gpu.memory_bytes


def changes(recipes: Recipes, recipe: Recipe, machine: Machine) -> list[Row]:
    """Return the recipe as it was, a row at a time, and with one change after the other."""
    one_row = {"lengths": recipe.lengths[: len(recipe.lengths) // ROWS]}
    full, recipe = recipe, replace(recipe, **one_row, overrides=(*recipe.overrides, "train.micro_batch_size=1"))
    config, now = recipes.config(recipe), recipes.parts(recipe, machine, fused_layers=False)
    products = Counter({kind: number for kind, number in now["loss"].kernels.items() if kind.name == "product"})
    elementwise = Kind("other", round(BEFORE_BYTES / BEFORE_KERNELS), 0)
    documented = Counts(products + Counter({elementwise: BEFORE_KERNELS}), BEFORE_WAITS)
    by_memory = replace(loss_as_it_is(recipe, config, machine.gpu.memory_bytes), waits=BEFORE_WAITS)
    compiled = replace(now["loss"], waits=BEFORE_WAITS)
    padded = {name: part if name == "loss" else part.padded(BEFORE_USEFUL) for name, part in now.items()}
    of_full = recipes.parts(full, machine)
    bound = {name: part if name == "loss" else part.only({"product", "attention"}) for name, part in of_full.items()}
    before = [
        recipes.row(recipe, machine, parts, name, keeps_student=False, kept_teachers=())
        for name, parts in {
            "a09c456, padded": padded | {"loss": documented},
            "packed": now | {"loss": documented},
            "blocks by memory": now | {"loss": by_memory},
            "closed forms in few kernels": now | {"loss": compiled},
            "no waits": now,
        }.items()
    ]
    return [
        *before,
        recipes.row(recipe, machine, now, "gathered and reduced once a step, as it fits"),
        recipes.row(recipe, machine, name="kernels of norms, rotary embeddings and gates"),
        recipes.row(full, machine, name=f"{ROWS} rows at a time: now"),
        recipes.row(full, machine, bound, "a bound: products and attention of layers alone"),
    ]


def table(rows: Sequence[Row]) -> list[str]:
    """Return a table of milliseconds for 2,048 tokens of the student, so that recipes compare."""
    lines = [f"| | {' | '.join(('GPUs', 'tokens', *PARTS, 'all', 'MFU'))} |", "|---" * (len(PARTS) + 5) + "|"]
    for row in rows:
        numbers = [f"{1e3 * row.times.parts.get(part, 0.0):.1f}" for part in PARTS]
        cells = [row.machine, f"{row.tokens_at_a_time:,}", *numbers, f"{1e3 * row.times.total:.1f}", f"{row.mfu:.0%}"]
        lines.append(f"| {row.recipe} | {' | '.join(cells)} |")
    return lines


def counts_table(parts: Mapping[str, Counts]) -> list[str]:
    lines = ["| part of a microbatch | kernels | GB | TFLOP | copies | waits |", "|---|---|---|---|---|---|"]
    for name, part in parts.items():
        lines.append(
            f"| {name} | {part.num_kernels:,} | {part.num_bytes / 1e9:.1f} | {part.flops / 1e12:.2f} | {part.copies} | "
            f"{part.waits} |"
        )
    return lines


def verdict(rows: Sequence[Row]) -> list[str]:
    """Say of each recipe whether it reaches the goal by this arithmetic."""
    lines = []
    for name in dict.fromkeys(row.recipe for row in rows):
        own = [row for row in rows if row.recipe == name]
        shown = ", ".join(f"{row.mfu:.1%} on {row.machine}" for row in own)
        reached = sum(row.mfu >= GOAL for row in own)
        lines.append(f"* {name}: {shown}; {GOAL:.0%} is reached on {reached} of {len(own)}")
    return lines


def sensitivity(recipes: Recipes, recipe: Recipe, machine: Machine) -> list[str]:
    """Say how far the MFU depends on what is assumed."""
    assumed = machine.assumed
    others = {
        "products at 0.6": replace(assumed, products=0.6),
        "products at 0.8": replace(assumed, products=0.8),
        "4 µs a launch": replace(assumed, launch_s=4e-6),
        "12 µs a launch": replace(assumed, launch_s=12e-6),
        "traffic at 0.75": replace(assumed, traffic=0.75),
    }
    found = [f"{name}: {recipes.row(recipe, replace(machine, assumed=each)).mfu:.0%}" for name, each in others.items()]
    return [f"* {recipe.name} on {machine.number} × {machine.gpu.name}: {', '.join(found)}"]


def per_row(row: Row, recipes: Recipes, recipe: Recipe, machine: Machine) -> Row:
    """Return the row with the times of 2,048 tokens of a GPU."""
    number = recipes.plan(recipe, machine).micro_batches * sum(recipe.lengths) / 2048
    return replace(row, times=Times({part: seconds / number for part, seconds in row.times.parts.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny recipe alone")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipes = Recipes()
    chosen, gpus = ((TINY,), GPUS[:1]) if options.tiny else ((*RECIPES, CUT), GPUS)
    rows = [row for recipe in chosen for gpu in gpus for row in rows_of(recipes, recipe, gpu)]
    stages = []
    for machine in (Machine(GPUS[0], 1), Machine(GPUS[0], 8)):
        stages += [per_row(row, recipes, chosen[0], machine) for row in changes(recipes, chosen[0], machine)]
    facts = {"commit": commit(), "date": date.today().isoformat(), "command": COMMAND, "torch": torch.__version__}
    text = [*report(recipes, chosen, rows, stages), *(f"* {name}: {value}" for name, value in facts.items()), ""]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "roofline.md").write_text("\n".join(text), encoding="utf-8")
    record = {
        **facts,
        "gpus": [asdict(gpu) for gpu in GPUS],
        "assumptions": asdict(Assumptions()),
        "recipes": [asdict(row) for row in rows],
        "changes": [asdict(row) for row in stages],
    }
    (options.output / "roofline.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(text))


def rows_of(recipes: Recipes, recipe: Recipe, gpu: GPU) -> list[Row]:
    """Return a recipe on one of these GPUs and on eight, where it fits."""
    machines = [Machine(gpu, number) for number in ((8,) if recipe is CUT else (1, 8))]
    found = [each for each in machines if fits(recipe, each, recipes.tp(recipe, each.number))]
    return [per_row(recipes.row(recipe, each), recipes, recipe, each) for each in found]


def report(recipes: Recipes, chosen: Sequence[Recipe], rows: Sequence[Row], stages: Sequence[Row]) -> list[str]:
    """Return the lines of the report, without its facts."""
    text = ["# Roofline: the production recipes by arithmetic", "", *INTRODUCTION]
    text += ["", "## The goal", "", *verdict(rows), *what_else(stages)]
    text += ["", "## Recipes, ms for 2,048 tokens of the student on each GPU", "", *table(rows)]
    text += ["", f"## One change after the other, {chosen[0].name}", "", *CHANGES, "", *table(stages)]
    text += ["", "## Counts", ""]
    for recipe in chosen:
        parts = recipes.parts(recipe, Machine(GPUS[0], 8))
        text += [f"{recipe.name}, {sum(recipe.lengths):,} tokens:", "", *counts_table(parts), ""]
    of_one = sensitivity(recipes, chosen[0], Machine(GPUS[0], 1))
    text += ["## How far it depends on what is assumed", "", *of_one]
    return [*text, "", "## Constants", "", *(f"* {gpu.name}: {gpu.source}" for gpu in GPUS), *assumptions(), ""]


def what_else(stages: Sequence[Row]) -> list[str]:
    """Say what the settings give that are not defaults, and what is possible at most."""
    *_, fused, now, bound = stages
    return [
        f"* {now.machine}, one change after the other: {fused.mfu:.0%} with kernels in the layers, {now.mfu:.0%} now, "
        f"{bound.mfu:.0%} if nothing of the layers but products and attention took time"
    ]


def assumptions() -> list[str]:
    """Return what is assumed of programs, as a list."""
    return [f"* assumed: `{name}` {value:g}" for name, value in asdict(Assumptions()).items()]


INTRODUCTION = (
    "Arithmetic, not measurement: no GPU has run any of this. Kernels, bytes, FLOPs, copies and waits are counted on a "
    "pretended GPU on which the workers' own code runs (packing, models, handoff, losses, backward passes); what is "
    "counted is turned into time by the constants below.",
    "",
    "* A kernel takes as long as its bytes, its FLOPs, or 3 µs, whichever is longest. None of its bytes is in a cache.",
    "* Parts follow one another. Of a part the longer counts of what the GPU does and what the host needs to ask for "
    "it; `launches` is what the host needs beyond the GPU's work.",
    "* FSDP2's transfers run beside the passes that they serve, and count where they are longer; its copies do not. "
    "Sums over a tensor-parallel group do not overlap with computation.",
    "* Attention within sequences is a flash kernel forward and three backward. A compiled function is one kernel that "
    "reads its arguments twice and writes its results once. Triton's kernels of losses and layers say what they read "
    "and write, which tests compare with what Triton's interpreter does.",
    "* Teachers take turns with the student on the same GPUs, so that handing over is a copy into a buffer, which is "
    "among the teacher's kernels, and `handoff` is what the host sends.",
    "* MFU is `perf/mfu` of a run (nemo_opd/preflight/flops.py): padding, recomputation and losses are no useful work.",
    "* Rollouts, reading data and validation are not in it.",
    "* Machines are those that hold weights, gradients and optimizer states; whether activations and what teachers "
    "hand over fit too is what the memory estimate of a dry run says.",
)
CHANGES = (
    f"The first row takes the documented counts of commit a09c456: {BEFORE_KERNELS:,} kernels and "
    f"{BEFORE_BYTES / 1e9:.0f} GB of elementwise traffic of the loss for 2,048 tokens, 26 rows at a time, "
    f"{BEFORE_WAITS} waits a microbatch, {BEFORE_USEFUL:.0%} of positions tokens; that 11 % of the "
    "text was cut off besides costs no time, but text. Products of the loss are taken as they are now. A run "
    "decides by its memory estimate what stays gathered. The last row is what layers would take if "
    "nothing but products and attention took time.",
)

if __name__ == "__main__":
    main()
