"""Distil any set of teacher language models into a student, whatever their tokenizers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_opd.training.callbacks import Callback
    from nemo_opd.training.entry import Finished, distil, distil_on_policy

__all__ = ["Callback", "Finished", "distil", "distil_on_policy"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: most parts of the package need far less than these names."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_opd.training import callbacks, entry

    return getattr(callbacks if name == "Callback" else entry, name)
