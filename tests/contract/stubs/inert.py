"""Packages that SGLang imports but a text model on the CPU never calls, as packages of which every name exists.

A stand-in calls `make_inert(__name__)`. Any submodule can then be imported from it, and any name is a class that raises
when it is built: a run that does need the real package stops there instead of computing something else.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar


def make_inert(package: str, version: str) -> None:
    """Give the package that is being imported every name and every submodule; `version` is its __version__."""
    module = sys.modules[package]
    module.__class__ = InertModule
    module.__version__ = version
    sys.meta_path.append(Submodules(package))


class InertModule(ModuleType):
    __path__: ClassVar[list[str]] = []  # makes it a package, whose submodules can be imported

    def __getattr__(self, name: str) -> Any:
        return inert_class(self.__name__, name)


class Names(type):
    """The attributes of an inert class, such as the members of an enum, are strings that name themselves."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__module__}.{cls.__name__}.{name}"


def inert_class(module: str, name: str) -> type:
    if name.startswith("__"):  # Python asks for these itself, and must hear that they are missing
        raise AttributeError(name)

    def refuse(self: object, *arguments: Any, **options: Any) -> None:
        raise RuntimeError(f"{module}.{name} is a stand-in of the contract tests; this needs the real package")

    return Names(name, (), {"__init__": refuse, "__module__": module})


class Submodules(MetaPathFinder, Loader):
    def __init__(self, package: str):
        self.prefix = package + "."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(self.prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
