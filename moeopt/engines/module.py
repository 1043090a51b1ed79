"""Loads an engine's kernel file alone, without importing the rest of the engine.

The file is cut down to what a launch is made of: imports, constants, Triton kernels and plain
functions. Classes, other decorators and bare calls (operator registrations) are left out. What it
imports from its engine becomes a :class:`StandIn`, made on the fly by the file's own ``__import__``,
so that ``sys.modules`` never holds a trace of it and a later real import is untouched. Names that a
launch needs are given by the adapter. Lines keep their numbers: Triton reads a kernel's source from
the file, and the binary's key in its cache is the very one that the engine's own launch has.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import linecache
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from moeopt.errors import UnsupportedShapeError

_KEPT: Final = (
    ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign, ast.Try, ast.If,
)  # fmt: skip


class UnknownCallError(UnsupportedShapeError):
    """A launch calls a function of the engine that its adapter gives no stand-in for."""


class LoadState:
    """Whether the file is still being loaded, when calls of what is not known are harmless."""

    def __init__(self) -> None:
        self.loading = True


class StandIn:
    """Stands for one name of the engine: false, every attribute is another, and calling it after loading is an error.

    Args:
        name: Dotted name, for the message.
        state: Shared by all of one file.
        given: What the adapter gives, by the last part of a name.
    """

    def __init__(self, name: str, state: LoadState, given: Mapping[str, Any]) -> None:
        self._name = name
        self._state = state
        self._given = given

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if attribute in self._given:
            return self._given[attribute]
        return StandIn(f"{self._name}.{attribute}", self._state, self._given)

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        if not self._state.loading:
            raise UnknownCallError(
                f"the launch calls {self._name}, which this version of moeopt does not know: use an engine version "
                "that it is tested with, or kernel 'builtin'"
            )
        return StandIn(f"{self._name}()", self._state, self._given)

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: object) -> StandIn:
        return self

    __ror__ = __or__


class KernelNames(ABC):
    """The names of a kernel file, among which a launch is recorded.

    Attributes:
        names: Globals of its functions; what is put there is seen by them.
    """

    names: dict[str, Any]

    @abstractmethod
    def get(self, name: str) -> Any:
        """A name that the file itself defines, or None."""


class EngineModule(KernelNames):
    """What remains of a kernel file once it is loaded alone.

    Args:
        path: The file.
        package: Top-level package whose imports are stood in for.
        given: By name, what the file finds where it imports or reads that name from its engine.

    Raises:
        UnsupportedShapeError: The file cannot be read as Python or does not load.
    """

    def __init__(self, path: Path, package: str, given: Mapping[str, Any]) -> None:
        self.path = path
        self._package = package
        self._given = given
        self._state = LoadState()
        self.names = {
            "__name__": f"moeopt_alone_{package}",
            "__file__": str(path),
            "__builtins__": {**vars(builtins), "__import__": self._import},
        }
        linecache.checkcache(str(path))
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
            tree.body = [kept for node in tree.body if (kept := _keep(node)) is not None]
            flags = __future__.annotations.compiler_flag
            exec(compile(tree, str(path), "exec", flags=flags, dont_inherit=True), self.names)
        except (SyntaxError, NameError, TypeError, AttributeError, ImportError, ValueError) as error:
            raise UnsupportedShapeError(
                f"{path} cannot be loaded without the rest of its engine ({type(error).__name__}: {error}): use an "
                "engine version that moeopt is tested with, or kernel 'builtin'"
            ) from error
        self._state.loading = False

    def get(self, name: str) -> Any:
        value = self.names.get(name)
        return None if isinstance(value, StandIn) else value

    def _import(
        self,
        name: str,
        globals_: Mapping[str, Any] | None = None,
        locals_: Mapping[str, Any] | None = None,
        fromlist: tuple[str, ...] = (),
        level: int = 0,
    ) -> ModuleType | StandIn:
        if level or name.split(".")[0] == self._package:
            full = name if fromlist else self._package
            return StandIn(full, self._state, self._given)
        return builtins.__import__(name, globals_, locals_, fromlist, level)


def _keep(node: ast.stmt) -> ast.stmt | None:
    """The statement as it is executed, or None if no launch is made of it."""
    if not isinstance(node, _KEPT):
        return None
    if isinstance(node, ast.FunctionDef):
        # Caches are dropped too: the answers depend on the GPU that is compiled for.
        node.decorator_list = [d for d in node.decorator_list if _is_triton_jit(d)]
        if not node.decorator_list:
            node.args.defaults = [_constant(d) for d in node.args.defaults]
            node.args.kw_defaults = [d and _constant(d) for d in node.args.kw_defaults]
    return node


def _is_triton_jit(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(target, ast.Attribute) and target.attr == "jit" and ast.unparse(target.value) == "triton"


def _constant(default: ast.expr) -> ast.expr:
    """Defaults that are not literals belong to functions that no launch calls."""
    try:
        ast.literal_eval(default)
    except ValueError:
        return ast.copy_location(ast.Constant(None), default)
    return default
