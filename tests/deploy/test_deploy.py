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
"""Values for the scripts' variables."""


def kuberay() -> dict[str, Any]:
    """Return the specifications of the objects, keyed by kind."""
    return {
        document["kind"]: document["spec"] for document in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    }


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the name of a file and its command that starts an example."""
    compose_file = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    yield "compose.yaml", compose_file["services"]["demo"]["command"]
    yield "kuberay.yaml", shlex.split(kuberay()["RayJob"]["entrypoint"])
    for name in ("slurm.sh", "ray_job.sh"):
        lines = (DEPLOY / name).read_text().replace("\\\n", " ").splitlines()
        (line,) = (line for line in lines if "examples/run_off_policy_distillation.py" in line)
        yield (
            name,
            [re.sub(r"(.+?)=.*\$.*", lambda match: f"{match[1]}={VALUES[match[1]]}", word) for word in line.split()],
        )


@pytest.mark.parametrize(
    ("name", "command"), list(commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_settings_exist_and_go_together(name: str, command: list[str]) -> None:
    """Bug: a renamed key or a refused value, which a user notices only after the job's wait in the queue."""
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
    """Bugs: the image names a renamed extra or file; .dockerignore excludes a file that it needs."""
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras_in_use = re.findall(r"--extra (\w+)", dockerfile)
    assert extras_in_use
    assert set(extras_in_use) <= set(extras)
    for file in re.findall(r"/opt/nemo_opd/(\S+\.py)", dockerfile + (DEPLOY / "compose.yaml").read_text()):
        assert (ROOT / file.rstrip('",]')).exists()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"nemo_opd", "configs", "examples", "tools", "README.md", "LICENSE", "pyproject.toml"} & set(ignored)


def groups() -> list[dict[str, Any]]:
    spec = kuberay()["RayJob"]["rayClusterSpec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_containers_are_not_root() -> None:
    """Bug: code in a model's files, or a program that escapes its sandbox, is root in the container."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if re.match("(USER|CMD)", line)][-2] == "USER opd"
    for group in groups():
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"]


def test_the_policy_selects_all_pods_of_kuberay() -> None:
    """Bug: anyone in the cluster can connect to a pod, and Ray without a token runs any code."""
    objects = kuberay()
    labels = objects["NetworkPolicy"]["podSelector"]["matchLabels"]
    assert all(labels.items() <= group["template"]["metadata"]["labels"].items() for group in groups())
    assert objects["RayJob"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    pinned = re.search(r'"ray==(.+?)"', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    assert objects["RayJob"]["rayClusterSpec"]["rayVersion"] == pinned[1]


def test_pods_of_kuberay_have_the_volumes_that_they_mount() -> None:
    for group in groups():
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
