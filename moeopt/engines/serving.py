"""Kernels that an engine runs for the experts of a checkpoint, and whether they read config files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape

Reads = Literal["all", "some", "none"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What an engine looks at when it picks the kernel of a model's experts.

    Attributes:
        shape: The layer as one GPU sees it.
        method: The quantiser (see :class:`moeopt.models.quantization.Scheme`), or None where the weights are not
            quantised or nothing says by what.
        symmetric: Whether quantised weights have no zero points.
        act_order: Whether quantised weights are stored in the order of activations.
        static: Whether activations have one scale that is in the checkpoint.
        architecture: Of the model, or None.
        model_types: Of the model, from the root of its config inwards.
    """

    shape: MoEShape
    method: str | None = None
    symmetric: bool = True
    act_order: bool = False
    static: bool = False
    architecture: str | None = None
    model_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Serving:
    """The kernel that an engine runs for a checkpoint on a GPU, with its default options.

    Attributes:
        reads: Whether it reads Triton config files: for ``all`` batch sizes, for ``some``, or for ``none``.
        backend: What it is called.
        source: The engine's function that decides.
        why: One sentence.
        up_to: With ``some``: the largest batch size for which files are read.
        option: Option or environment variable (``NAME=value``) with which the Triton kernel runs; None where nothing
            makes it run, or nothing has to.
    """

    reads: Reads
    backend: str
    source: str
    why: str = ""
    up_to: int | None = None
    option: str | None = None

    def __str__(self) -> str:
        """One line."""
        text = {
            "all": f"read: {self.backend} runs by default",
            "some": f"read for M <= {self.up_to} only: {self.backend} runs by default",
            "none": f"not read: {self.backend} runs by default",
        }[self.reads]
        if self.why:
            text += f", as {self.why}"
        if self.reads != "all":
            text += (
                f"; start the server with {self.option}" if self.option else "; no option makes the Triton kernel run"
            )
        return f"{text} ({self.source})"


@dataclass(frozen=True, slots=True)
class ServingRules:
    """An engine's rules of which kernel runs.

    Attributes:
        serving: The kernel that runs without options for it, from checkpoint and GPU (None where it is not known).
        option: The option with which a version (None is the newest) runs the Triton kernel for a checkpoint; None
            where it needs none or has none.
        triton_first: Whether Triton runs unless a model or a GPU is an exception, so that no option is needed where
            the GPU is not known.
        refusal: Why the engine cannot load a checkpoint's experts on a CUDA GPU, or None.
        refined_block: The block into which it cuts that of the scales where it does not divide N on a GPU, from
            (block_n, block_k), N and the hidden size; None where it cannot.
    """

    serving: Callable[[Checkpoint, GpuSpec | None], Serving] = lambda checkpoint, gpu: Serving(
        "all", "the Triton kernel", "the only one"
    )
    option: Callable[[Checkpoint, tuple[int, ...] | None], str | None] = lambda checkpoint, version: None
    triton_first: bool = True
    refusal: Callable[[Checkpoint], str | None] = lambda checkpoint: None
    refined_block: Callable[[tuple[int, int], int, int], tuple[int, int] | None] = lambda block, n, hidden: None
