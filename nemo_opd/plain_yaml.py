"""YAML of strangers: only plain values, and no more of them than the text has characters."""

from typing import Any

import yaml

_MOST_CHARACTERS = 1 << 20
"""A megabyte takes a quarter of a minute to read."""
_LONGEST_INTEGER = 100
"""Characters. YAML's integers of base 60 take quadratic time, and texts of long ones raise ValueError."""


class _Loader(yaml.SafeLoader):
    """A loader without long integers and without aliases, of which a few nested lines stand for billions of values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "aliases are not read; write the value itself", mark)
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > _LONGEST_INTEGER:
            raise yaml.constructor.ConstructorError(None, None, "this integer is too long", node.start_mark)
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises YAMLError, also for aliases, deep nesting and more than 1 MiB."""
    if len(text) > _MOST_CHARACTERS:
        raise yaml.YAMLError(f"it has {len(text):,} characters, and at most {_MOST_CHARACTERS:,} are read")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, MemoryError):
        raise
    except Exception as error:  # constructors raise many, such as for a date with 13 months
        raise yaml.YAMLError(str(error)) from error


def load_front_matter(text: str) -> Any:
    """Return the value of the YAML block that begins a card; None without one. Raises YAMLError as `load_yaml` does."""
    # Imported here, since the import takes as long as all others of a command.
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    block = REGEX_YAML_BLOCK.search(text)
    return load_yaml(block[2]) if block else None
