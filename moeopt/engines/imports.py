"""An engine's own module, imported where its package lies, as the GPU process launches it."""

from __future__ import annotations

import builtins
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from moeopt.engines.module import KernelNames
from moeopt.engines.source import EngineSource


class ImportedModule(KernelNames):
    """A view of an engine's imported module in which a launch can be recorded.

    The kernels and constants are the module's own objects. Its functions are copied onto this view's
    names, without their caches, so that what the adapter gives and the recorders are seen by them and
    by nobody else: the module itself stays as the engine made it.

    Args:
        source: Where the kernel is; its ``module`` names what is imported.
        given: By name, what the functions find instead of what they import from their engine.

    Raises:
        ImportError: Another file was imported under that name.
        Exception: Whatever the engine's package raises while it is imported.
    """

    def __init__(self, source: EngineSource, given: Mapping[str, Any]) -> None:
        module = importlib.import_module(source.module)
        file = getattr(module, "__file__", None)
        if file is None or Path(file).resolve() != source.path:
            raise ImportError(f"{source.module} was imported from {file}, not from {source.path}")
        self._package = source.engine
        self._given = given
        self.names = dict(vars(module))
        self.names["__builtins__"] = {**vars(builtins), "__import__": self._import}
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == module.__name__
            function = inspect.unwrap(value) if own and callable(value) else None
            if isinstance(function, FunctionType) and not hasattr(value, "arg_names"):
                self.names[name] = self._moved(function)
            elif name in given and not own:
                self.names[name] = given[name]

    def get(self, name: str) -> Any:
        return self.names.get(name)

    def _moved(self, function: FunctionType) -> FunctionType:
        """The function with this view's names as its globals."""
        moved = FunctionType(
            function.__code__, self.names, function.__name__, function.__defaults__, function.__closure__
        )
        moved.__kwdefaults__ = function.__kwdefaults__
        moved.__annotations__ = function.__annotations__
        return moved

    def _import(
        self,
        name: str,
        globals_: Mapping[str, Any] | None = None,
        locals_: Mapping[str, Any] | None = None,
        fromlist: tuple[str, ...] = (),
        level: int = 0,
    ) -> Any:
        """Imports inside functions: what is given comes before the engine's own."""
        found = builtins.__import__(name, globals_, locals_, fromlist, level)
        if fromlist and (level or name.split(".")[0] == self._package):
            return _Given(found, self._given)
        return found


class _Given:
    """A module of the engine's, with some names replaced."""

    def __init__(self, module: ModuleType, given: Mapping[str, Any]) -> None:
        self._module = module
        self._names = given

    def __getattr__(self, name: str) -> Any:
        return self._names[name] if name in self._names else getattr(self._module, name)
