"""What a user's settings name in a module of theirs."""

import importlib
import sys
from pathlib import Path
from typing import Any

from nemo_opd.errors import ConfigError
from nemo_opd.rollout.users_code import described


def imported(reference: str, *, key: str, form: str) -> Any:
    """What `package.module:name` names; the working folder is looked in too.

    key: of the setting; form: how it is written, for messages. Raises ConfigError where it cannot be imported.
    """
    module, _, name = reference.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what a module raises when imported shares no base class, and it may call sys.exit
        raise ConfigError(
            f"{key}={reference}: cannot be imported ({described(error)}); give `{form}`, with the package "
            "installed or in the working folder"
        ) from error
