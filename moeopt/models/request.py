"""A shape that is asked for by a model: what a command line or a log says of it, and its options again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeopt import engines
from moeopt.core.shape import MoEShape
from moeopt.engines.log import Deployment
from moeopt.export.names import ConfigName
from moeopt.models.derive import Derivation, shape_from_model
from moeopt.models.lookup import OPTIONS


@dataclass(frozen=True)
class ModelRequest:
    """A model, and how it is laid out; the arguments of :func:`~moeopt.models.derive.shape_from_model`.

    Attributes:
        path: Its ``config.json`` or directory.
        engine: Whose rules give E and N.
        tp: Tensor-parallel size.
        ep: Expert-parallel size.
        dtype: Instead of what the config says.
        fuse_shared: Whether shared experts are fused; None for what the engine does.
        overrides: Fields of the shape that are given by hand.
    """

    path: str | Path
    engine: str = engines.DEFAULT
    tp: int = 1
    ep: int = 1
    dtype: str | None = None
    fuse_shared: bool | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def derive(self) -> tuple[MoEShape, Derivation]:
        """The shape, and where its numbers came from.

        Raises:
            InvalidInputError: As :func:`~moeopt.models.derive.shape_from_model`.
        """
        return shape_from_model(
            self.path,
            engine=self.engine,
            tp=self.tp,
            ep=self.ep,
            dtype=self.dtype,
            fuse_shared_experts=self.fuse_shared,
            overrides=self.overrides,
        )

    def laid_out(self, deployment: Deployment) -> ModelRequest:
        """A copy in which what was not given is as a running server has it."""
        return replace(
            self,
            tp=deployment.tp if self.tp == 1 else self.tp,
            ep=deployment.ep if self.ep == 1 else self.ep,
            fuse_shared=deployment.fuse_shared if self.fuse_shared is None else self.fuse_shared,
        )

    def named(self, name: ConfigName) -> ModelRequest:
        """A copy whose file has this name, whatever the model's config says; one that is not here is taken at its word.

        Args:
            name: Of the up projection's file.
        """
        here = Path(self.path).exists()
        overrides = {
            **self.overrides,
            "num_experts": name.num_experts,
            "intermediate_size": engines.get(name.engine).names.elements(name),
        }
        if name.dtype or here:
            if name.per_channel:
                overrides["per_channel"] = True
            elif name.block_shape or here:
                overrides["block_shape"] = name.block_shape or ()
        return replace(self, dtype=name.dtype or ("bf16" if here else self.dtype), overrides=overrides)

    def options(self) -> str:
        """As options of ``moeopt tune``, quoted for a shell."""
        words = [f"--model {shlex.quote(str(self.path))} --engine {self.engine} --tp {self.tp}"]
        words += [f"--ep {self.ep}"] if self.ep > 1 else []
        if self.fuse_shared is not None:
            words.append("--fuse-shared" if self.fuse_shared else "--no-fuse-shared")
        words += [f"--dtype {self.dtype}"] if self.dtype is not None else []
        for key, value in self.overrides.items():
            if isinstance(value, tuple):
                value = "{},{}".format(*value) if value else "none"
            words.append(OPTIONS[key] + ("" if value is True else f" {value}"))
        return " ".join(words)
