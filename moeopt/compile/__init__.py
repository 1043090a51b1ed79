"""Compiling for a GPU that need not be there, in processes that may die."""

from __future__ import annotations

from moeopt.compile.binary import TensorCore, tensor_core
from moeopt.compile.failure_memo import FailureMemo, triton_cache_dir
from moeopt.compile.pool import Compiled, CompilePool
from moeopt.compile.rejection import SPILL_LIMIT_BYTES, rejection

__all__ = [
    "SPILL_LIMIT_BYTES",
    "CompilePool",
    "Compiled",
    "FailureMemo",
    "TensorCore",
    "rejection",
    "tensor_core",
    "triton_cache_dir",
]
