"""Compute the tables of docs/scaling.md from the memory estimate that a run itself makes, and check its examples.

uv run docs/figures/scaling.py                 # writes them into docs/scaling.md; needs no model, network or GPU

Every example of the page is validated as a run's settings are, its ranks are placed and laid out, its batch is divided,
what each rank reads is planned, and its memory is estimated and offloading settled, all by
the functions that `run.dry_run=true` calls; only what is read from files (weights, tokenizers, text) is left out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from scaling_models import BY_MODEL, CONFIGS, SHAPES, Shape

from nemo_opd.config import RunConfig
from nemo_opd.config.composition import from_omegaconf
from nemo_opd.distributed.layout import Layout
from nemo_opd.models.lora import Adapters
from nemo_opd.models.parallelize import check_parallelism
from nemo_opd.preflight.delivery import arriving_bytes, check_deliveries, plan_deliveries
from nemo_opd.preflight.memory import Machine, MemoryEstimate, MemoryInputs, ModelSetup
from nemo_opd.preflight.memory_choices import largest_parts, settle_memory
from nemo_opd.preflight.model_info import model_size
from nemo_opd.preflight.ranks import require_batch_divides, resolve_layouts, resolve_placement, resolve_replicas

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "scaling.md"
GIB = 2**30
GPU_BYTES, HOST_BYTES = 79 * GIB, 1024 * GIB
"""Memory of an 80 GB GPU as PyTorch reports it, and of a node with eight of them."""


@dataclass(frozen=True)
class Example:
    title: str
    settings: Mapping[str, Any]
    """Settings as in a YAML file."""
    overrides: tuple[str, ...] = ()

    def config(self) -> RunConfig:
        """Return the settings, with placeholders for what is not about layout. Raises ConfigError."""
        config = OmegaConf.create(
            {
                # So that what does not fit is shown, not refused.
                "run": {"dry_run": True},
                "train": {"max_steps": 1000},
                "data": {"train": {"arrow_files": ["shard.arrow"]}},
                "cluster": {"device": "cuda", "address": "auto"},
            }
        )
        config = OmegaConf.merge(config, dict(self.settings))
        for override in self.overrides:
            key, _, value = override.partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
        return from_omegaconf(config, RunConfig)


@dataclass(frozen=True)
class Checked:
    config: RunConfig
    """With offloading settled."""
    student: Layout
    teachers: tuple[Layout, ...]
    memory: MemoryEstimate

    @property
    def micro_batches(self) -> int:
        """Microbatches of a student's rank in a step."""
        train = self.config.train
        return train.global_batch_size // (self.student.dp * train.micro_batch_size)

    @property
    def names(self) -> list[str]:
        """Short names of the student and its teachers."""
        return [BY_MODEL[each.model] for each in (self.config.student, *self.config.teachers)]

    @property
    def offloaded(self) -> str:
        names = [teacher.name for teacher in self.config.teachers if teacher.offload is True]
        names += ["student"] if self.config.student.offload is True else []
        return ", ".join(names) or "none"


def check(example: Example) -> Checked:
    """Check as preflight does, without files. Raises ConfigError for what preflight would refuse."""
    config = example.config()
    placement = resolve_placement(config, "cuda")
    student, teachers = resolve_layouts(config, placement)
    require_batch_divides(config, student.dp, [layout.dp for layout in teachers])
    every: list[Any] = [SHAPES[BY_MODEL[each.model]] for each in (config.student, *config.teachers)]
    for i, settings in enumerate((config.student, *config.teachers)):
        key = f"teachers.{i - 1}" if i else "student"
        check_parallelism(
            CONFIGS[BY_MODEL[settings.model]][1](), settings.parallelism, "cuda", key=f"{key}.parallelism"
        )
    if config.student.lora is not None:
        adapters = Adapters(config.student.lora, config.student.model, config.run.seed)
        shape = model_size(CONFIGS[BY_MODEL[config.student.model]][1](), adapters)
        every[0] = Shape(shape, every[0].vocab_size)
    layouts, lengths = (student, teachers), [config.train.max_length] * len(teachers)
    check_deliveries(config, placement, layouts, every[1:], "cuda")
    deliveries = plan_deliveries(config, placement, layouts, every[1:], "cuda", lengths=lengths)
    own, *others = (
        ModelSetup(shape.size, shape.vocab_size, layout)
        for shape, layout in zip(every, (student, *teachers), strict=True)
    )
    machine = Machine("cuda", GPU_BYTES, HOST_BYTES, placement.devices_per_node)
    arriving = arriving_bytes(deliveries, 1 + config.batches_ahead)
    config, situation = resolve_replicas(config, MemoryInputs(own, tuple(others), machine, arriving), placement)
    config, memory = settle_memory(config, situation)
    return Checked(config, situation.student.layout, tuple(each.layout for each in situation.teachers), memory)


CHECKPOINTED = "student.activation_checkpointing=true"
SEPARATE = "cluster.placement=separate"


def settings_of(student: str, teachers: Iterable[str], nodes: int, gpus: int) -> dict[str, Any]:
    return {
        "student": {"model": CONFIGS[student][0]},
        "teachers": [{"name": name, "model": CONFIGS[name][0], "type": kind(student, name)} for name in teachers],
        "cluster": {"num_nodes": nodes, "gpus_per_node": gpus},
    }


def kind(student: str, teacher: str) -> str:
    families = [CONFIGS[name][0].partition("/")[0] for name in (student, teacher)]
    return "same_tokenizer" if families[0] == families[1] else "cross_tokenizer"


def row(
    machines: str, student: str, teachers: str, nodes: int, gpus: int, rows: int, micro: int, *more: str
) -> Example:
    batch = (f"train.global_batch_size={rows}", f"train.micro_batch_size={micro}", "train.max_length=2048")
    return Example(machines, settings_of(student, teachers.split(), nodes, gpus), (*batch, *more))


def teacher_tp(*degrees: int) -> tuple[str, ...]:
    return tuple(f"teachers.{i}.parallelism.tp={degree}" for i, degree in enumerate(degrees))


LAYOUTS = (
    row("1 GPU", "1B", "4B", 1, 1, 64, 4),
    row("1 GPU", "1B", "32B", 1, 1, 64, 4, CHECKPOINTED),
    row("1 GPU", "4B", "8B", 1, 1, 64, 1, CHECKPOINTED),
    row("1 GPU, LoRA", "4B", "8B", 1, 1, 64, 4, CHECKPOINTED, "student.lora.rank=16"),
    row("8 GPUs", "8B", "32B", 1, 8, 64, 4, CHECKPOINTED, *teacher_tp(8)),
    row("8 GPUs", "8B", "70B", 1, 8, 64, 4, CHECKPOINTED, *teacher_tp(8)),
    row("8 GPUs", "32B", "70B", 1, 8, 64, 1, CHECKPOINTED, *teacher_tp(8)),
    row("2 nodes", "8B", "70B", 2, 8, 128, 4, CHECKPOINTED, *teacher_tp(8)),
    row(
        "2 nodes, 8 + 8 GPUs",
        "8B",
        "70B",
        2,
        8,
        128,
        4,
        CHECKPOINTED,
        SEPARATE,
        "cluster.teacher_ranks=8",
        *teacher_tp(4),
    ),
    row("16 nodes", "8B", "70B 32B", 16, 8, 512, 4, CHECKPOINTED, *teacher_tp(8, 8)),
    row("8 nodes", "70B", "70B", 8, 8, 256, 4, CHECKPOINTED, *teacher_tp(8)),
)


def layout_rows() -> Iterator[list[str]]:
    for example in LAYOUTS:
        found = check(example)
        yield [
            example.title,
            f"{found.names[0]} ← {' + '.join(found.names[1:])}",
            shown(found.student),
            ", ".join(map(shown, found.teachers)),
            f"{found.config.train.micro_batch_size}" + (" ✓" if found.config.student.activation_checkpointing else ""),
            "; ".join(f"{memory.peak / GIB:.0f}" for memory in found.memory.memories[:-1]),
            found.memory.memories[0].peak_phase.value,
            found.offloaded,
            "yes" if found.memory.fits() else "**no**",
        ]


EXAMPLE_OF_PARTS = LAYOUTS[4]
PARTS = (
    ("student: parameters", "4 · W / S"),
    ("student: optimizer", "8 · W / S with AdamW"),
    ("student: gradients", "4 · W / S; before the second microbatch only in the backward pass"),
    ("student: gathered parameters", "c · (embedding + head + 2 layers); c · W if they stay gathered"),
    ("student: unsharded gradients", "0; 4 · W if gradients are reduced once per step"),
    ("student: activations", "layers · [a layer's](#activations), or c · D · T with checkpointing, + (8 + c) · D · T"),
    ("student: gradients of hidden states and head", "c · D · T + (4 + c) · D · V"),
    ("student: blocks of logits, temporaries of a loss", "(1 + V / all vocabularies) · B + B"),
    ("32B: parameters", "c · W / S"),
    ("32B: gathered parameters", "as the student's, in two parts: outside the layers, and two layers"),
    ("32B: activations", "¾ of a layer's, or c · E · T if that is more"),
    ("32B: hidden states handed over", "c · E · a rank's positions of a batch · (1 + batches ahead)"),
    ("32B: head handed over", "c · E · V"),
    ("student: CUDA", "½ GiB for each process"),
)
"""Parts of the estimate, and their formulas. Numbers are from one example, at the peak if the part is alive then."""


def part_rows() -> Iterator[list[str]]:
    (gpu, _) = check(EXAMPLE_OF_PARTS).memory.memories
    parts = {str(part): part.at(gpu.peak_phase) or max(part.num_bytes.values()) for part in gpu.parts}
    for name, formula in PARTS:
        yield [name, formula, f"{parts[name] / GIB:.2f}"]


def shown(layout: Layout) -> str:
    degrees = {"dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    found = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "1 rank"
    return f"{found} in {layout.replicas} copies" if layout.replicas > 1 else found


def model_rows() -> Iterator[list[str]]:
    for name, shape in SHAPES.items():
        size, weights = shape.size, shape.size.parameters
        head = size.vocab_size * size.hidden_size
        layer = max(sum(map(prod, layer.shapes)) for layer in size.layers)
        yield [
            f"{name} ({CONFIGS[name][0]})",
            f"{weights / 1e9:.2f}",
            f"{16 * weights / GIB:,.0f}",
            f"{2 * weights / GIB:,.1f}",
            f"{2 * layer / GIB:.2f}",
            f"{2 * head / GIB:.2f}",
            f"{4 * 2048 * size.hidden_size * 2 / 2**20:.0f}",
            f"{4 * 2048 * size.vocab_size * 2 / 2**20:,.0f}",
        ]


def table(columns: Iterable[str], rows: Iterator[list[str]]) -> str:
    lines = [list(columns), ["---"] * len(list(columns)), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


MODELS = (
    "model",
    "10⁹ weights",
    "as student, GiB",
    "as teacher, GiB",
    "a layer, GiB",
    "head, GiB",
    "hidden states, MiB",
    "the same as logits, MiB",
)
COLUMNS = ("machines", "models", "student", "teachers", "microbatch", "GiB of a GPU", "at", "offloaded", "fits")
EXAMPLE = re.compile(r"<!-- example (?P<name>\w+) -->\n```yaml\n(?P<yaml>.*?)```", re.DOTALL)


def documented(page: str) -> list[Example]:
    """Return the page's examples: YAML blocks after a mark."""
    return [Example(found["name"], yaml.safe_load(found["yaml"])) for found in EXAMPLE.finditer(page)]


def summary(found: Checked) -> str:
    layouts = [f"student {shown(found.student)}"]
    layouts += [f"{name} {shown(layout)}" for name, layout in zip(found.names[1:], found.teachers, strict=True)]
    fits = "fits" if found.memory.fits() else "does not fit"
    gpu = found.memory.memories[0]
    return (
        f"Layouts: {', '.join(layouts)}; microbatches per rank: {found.micro_batches}; offloaded: {found.offloaded}; "
        f"{gpu.peak / GIB:.0f} GiB of a GPU at the peak ({gpu.peak_phase.value}), {fits}. Most of it: "
        f"{largest_parts(gpu)}."
    )


def blocks(page: str) -> dict[str, str]:
    """Return the text between the marks of each name."""
    made = {
        "models": table(MODELS, model_rows()),
        "parts": table(("part", "bytes", "GiB in the example"), part_rows()),
        "layouts": table(COLUMNS, layout_rows()),
    }
    for example in documented(page):
        found = check(example)
        if f"<!-- {example.title} -->" not in page:
            continue  # shown for its keys alone
        made[example.title] = summary(found)
    return made


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, text in blocks(page).items():
        begin = page.index(f"<!-- {name} -->\n") + len(f"<!-- {name} -->\n")
        end = page.index("<!-- end -->", begin)
        page = f"{page[:begin]}\n{text}\n\n{page[end:]}"
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
