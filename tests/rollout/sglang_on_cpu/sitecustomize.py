"""Stand-ins for packages that SGLang imports on the way to any model, and that have no build for CPUs."""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

NAMES = {"sgl_kernel", "torchaudio", "torchvision"}


class StandIn(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else StandIn(f"{self.__name__}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(f"{self.__name__} is a stand-in")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        # importlib.util.find_spec asks whether a package is there: it is not, and libraries go without it.
        is_asked = sys._getframe(2).f_globals.get("__name__") == "importlib.util"
        if name.split(".")[0] not in NAMES or is_asked:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
