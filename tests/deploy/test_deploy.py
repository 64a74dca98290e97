"""The files in deploy/ name settings, files and extras that exist; Docker, SLURM and Kubernetes are not run."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.composition import PRODUCTION, ROOT, compose

DEPLOY = ROOT / "deploy"
TEACHERS = "teachers=qwen3_32b"
VALUES = {"cluster.num_nodes": "2", "cluster.gpus_per_node": "8", "cluster.address": "auto", "run.output_dir": "/run"}
"""Values in the place of the scripts' variables."""


def kuberay() -> dict[str, Any]:
    """Return the specifications of the objects, keyed by kind."""
    return {each["kind"]: each["spec"] for each in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each command that starts an example, by the file that has it."""
    compose_file = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    yield "compose.yaml", compose_file["services"]["demo"]["command"]
    yield "kuberay.yaml", shlex.split(kuberay()["RayJob"]["entrypoint"])
    for name in ("slurm.sh", "ray_job.sh"):
        lines = (DEPLOY / name).read_text().replace("\\\n", " ").splitlines()
        (line,) = (each for each in lines if "examples/run_off_policy_distillation.py" in each)
        yield (
            name,
            [re.sub(r"(.+?)=.*\$.*", lambda found: f"{found[1]}={VALUES[found[1]]}", word) for word in line.split()],
        )


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda each: each if isinstance(each, str) else "")
def test_settings_exist_and_go_together(name: str, command: list[str]) -> None:
    """A key that was renamed, a value that is refused: found by whoever submits the job, after the queue."""
    overrides = [word for word in command if re.fullmatch(r"[a-z_.]+=\S+", word)]
    assert overrides
    is_recipe = "--config" in command
    config = compose(
        *overrides, *([TEACHERS] if is_recipe else []), config_name=PRODUCTION if is_recipe else "off_policy_demo"
    )
    assert config.cluster.num_nodes == (2 if is_recipe else 1)


@pytest.mark.world
@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o111


def test_the_image_has_what_it_names() -> None:
    """An extra or a file that was renamed, a file that the image needs and that is left out of its context."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"--extra (\w+)", dockerfile)
    assert named
    assert set(named) <= set(extras)
    for file in re.findall(r"/opt/nemo_opd/(\S+\.py)", dockerfile + (DEPLOY / "compose.yaml").read_text()):
        assert (ROOT / file.rstrip('",]')).exists()
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert not {"nemo_opd", "configs", "examples", "tools", "README.md", "LICENSE", "pyproject.toml"} & set(left_out)


def groups() -> list[dict[str, Any]]:
    spec = kuberay()["RayJob"]["rayClusterSpec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_containers_are_not_root() -> None:
    """Bug: code in a model's files, or a program that leaves its sandbox, is root of the container."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if re.match("(USER|CMD)", line)][-2] == "USER opd"
    for group in groups():
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"]


def test_the_policy_selects_all_pods_of_kuberay() -> None:
    """Bug: a pod that anybody in the cluster can connect to, and Ray without a token runs what it is sent."""
    objects = kuberay()
    chosen = objects["NetworkPolicy"]["podSelector"]["matchLabels"]
    assert all(chosen.items() <= group["template"]["metadata"]["labels"].items() for group in groups())
    assert objects["RayJob"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    pinned = re.search(r'"ray==(.+?)"', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    assert objects["RayJob"]["rayClusterSpec"]["rayVersion"] == pinned[1]


def test_pods_of_kuberay_have_the_volumes_that_they_mount() -> None:
    for group in groups():
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
