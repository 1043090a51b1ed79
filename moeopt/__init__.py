"""Tunes the launch parameters of the Triton fused mixture-of-experts kernel.

The public names. Each leads to one module, which is loaded when the name is first used: importing moeopt imports
neither torch nor triton nor plotly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from moeopt import models
    from moeopt.api import load, tune
    from moeopt.core.config import LaunchConfig
    from moeopt.core.gpu import GpuSpec
    from moeopt.core.provenance import Provenance
    from moeopt.core.shape import DEFAULT_BATCH_SIZES
    from moeopt.core.space import SearchSpace
    from moeopt.core.trial import Cell, Failure, Job, Measurement
    from moeopt.devices import open_device
    from moeopt.doctor import diagnose
    from moeopt.errors import MoeoptError
    from moeopt.kernels import get_kernel
    from moeopt.kernels.base import MoEKernel
    from moeopt.measure.base import Device, DeviceSpec
    from moeopt.measure.options import DeviceOptions
    from moeopt.models import MoEShape, shape_from_model
    from moeopt.recordings import record
    from moeopt.recordings.device import RecordedDevice
    from moeopt.recordings.format import Recording
    from moeopt.recordings.record import Recorder
    from moeopt.result import TuneResult
    from moeopt.search import pruner as pruners
    from moeopt.search import sampler as samplers
    from moeopt.search.pruner import RacingPruner
    from moeopt.search.sampler import LatticeSampler, PoolSampler
    from moeopt.storage.store import StudyStore
    from moeopt.tuning import verify
    from moeopt.tuning.outcome import BatchResult, RoleResult
    from moeopt.tuning.suggest import suggest

__all__ = [
    "DEFAULT_BATCH_SIZES",
    "BatchResult",
    "Cell",
    "Device",
    "DeviceOptions",
    "DeviceSpec",
    "Failure",
    "GpuSpec",
    "Job",
    "LatticeSampler",
    "LaunchConfig",
    "Measurement",
    "MoEKernel",
    "MoEShape",
    "MoeoptError",
    "PoolSampler",
    "Provenance",
    "RacingPruner",
    "RecordedDevice",
    "Recorder",
    "Recording",
    "RoleResult",
    "SearchSpace",
    "StudyStore",
    "TuneResult",
    "diagnose",
    "get_kernel",
    "load",
    "models",
    "open_device",
    "pruners",
    "record",
    "samplers",
    "shape_from_model",
    "suggest",
    "tune",
    "verify",
]
__version__ = "0.1.0"

# The module that each name is from.
_HOME: Final = {
    "DEFAULT_BATCH_SIZES": "core.shape",
    "BatchResult": "tuning.outcome",
    "Cell": "core.trial",
    "Device": "measure.base",
    "DeviceOptions": "measure.options",
    "DeviceSpec": "measure.base",
    "Failure": "core.trial",
    "GpuSpec": "core.gpu",
    "Job": "core.trial",
    "LatticeSampler": "search.sampler",
    "LaunchConfig": "core.config",
    "Measurement": "core.trial",
    "MoEKernel": "kernels.base",
    "MoEShape": "models",
    "MoeoptError": "errors",
    "PoolSampler": "search.sampler",
    "Provenance": "core.provenance",
    "RacingPruner": "search.pruner",
    "RecordedDevice": "recordings.device",
    "Recorder": "recordings.record",
    "Recording": "recordings.format",
    "RoleResult": "tuning.outcome",
    "SearchSpace": "core.space",
    "StudyStore": "storage.store",
    "TuneResult": "result",
    "diagnose": "doctor",
    "get_kernel": "kernels",
    "load": "api",
    "open_device": "devices",
    "shape_from_model": "models",
    "suggest": "tuning.suggest",
    "tune": "api",
}
_MODULES: Final = {
    "models": "models",
    "pruners": "search.pruner",
    "record": "recordings.record",
    "samplers": "search.sampler",
    "verify": "tuning.verify",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(f"moeopt.{_MODULES[name]}")
    elif name in _HOME:
        value = getattr(import_module(f"moeopt.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'moeopt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
