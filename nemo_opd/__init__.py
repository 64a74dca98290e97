"""Distil any set of teacher language models into a student, whatever their tokenizers."""

from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_opd.training.entry import Finished, distil, distil_on_policy
    from nemo_opd.users_code import Callback

for _package in ("torch", "transformers", "datasets", "tokenizers"):
    _spec = PathFinder.find_spec(_package)
    if _spec is not None and _spec.submodule_search_locations is None:  # Python's own message does not name it
        raise ImportError(f"{_spec.origin} is imported in place of the package {_package}; rename it")

__all__ = ["Callback", "Finished", "distil", "distil_on_policy"]


def __getattr__(name: str) -> Any:
    """Import public names on first use: most parts of the package need far less than they do.

    Raises ImportError without the extra `train`.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Callback":
        from nemo_opd.users_code import Callback

        return Callback
    from nemo_opd.extras import require_train

    require_train(f"nemo_opd.{name}")
    from nemo_opd.training import entry

    return getattr(entry, name)
