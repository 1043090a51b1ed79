"""Tunes the launch parameters of the Triton fused mixture-of-experts kernel.

The public names, each of which leads to one module. Importing moeopt imports neither torch nor triton.
"""

from moeopt.api import load, tune
from moeopt.errors import MoeoptError
from moeopt.gpu import GpuSpec
from moeopt.result import BatchResult, RoleResult, TuneResult
from moeopt.shape import DEFAULT_BATCH_SIZES, MoEShape
from moeopt.space import LaunchConfig, SearchSpace

__all__ = [
    "DEFAULT_BATCH_SIZES",
    "BatchResult",
    "GpuSpec",
    "LaunchConfig",
    "MoEShape",
    "MoeoptError",
    "RoleResult",
    "SearchSpace",
    "TuneResult",
    "load",
    "tune",
]
__version__ = "0.1.0"
