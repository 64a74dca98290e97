"""Names in a configuration folder: recipes, groups, and the options of each group."""

from pathlib import Path

from pydantic import BaseModel


def recipes(config_dir: Path) -> list[str]:
    return _stems(config_dir)


def groups(config_dir: Path, model: type[BaseModel]) -> list[str]:
    """Return the config groups of a model's settings."""
    return sorted(folder.name for folder in config_dir.iterdir() if folder.name in model.model_fields)


def options(config_dir: Path, group: str) -> list[str]:
    """Return the options of a group; empty if the group does not exist."""
    return _stems(config_dir / group)


def _stems(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))
