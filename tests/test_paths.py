import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_opd import distil
from nemo_opd.errors import ConfigError
from nemo_opd.paths import cache_dir, keep_compiled_code_private


def unknown(_: object) -> None:
    raise KeyError


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a container's user without an entry in passwd got a traceback."""
    for name in ("NEMO_OPD_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match=r"no home folder for the cache; set \$NEMO_OPD_CACHE"):
        cache_dir("samples")


@pytest.mark.parametrize("called_from_python", [False, True])
def test_compiled_code_lies_in_the_cache_unless_told_otherwise(
    called_from_python: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a run started from Python compiles into a folder in /tmp, and executes code from it."""
    monkeypatch.setenv("NEMO_OPD_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    if called_from_python:
        with pytest.raises(ConfigError):
            distil({"no_such_section": 1})
    else:
        keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_compiled_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


@pytest.mark.world
def test_the_aligner_runs_where_no_compiled_code_can_be_kept(tmp_path: Path) -> None:
    """Bug: a user without a home who does not own the package could not import the aligner."""
    code = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from nemo_opd.alignment.merge import jit\n"
        "print(jit(lambda x: x + 1)(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "2\n", done.stderr
