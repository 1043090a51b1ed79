"""Test suites for parts that you add to moeopt: a device, a kernel, a strategy, a database.

Each is a class of pytest tests that states what moeopt expects of such a part. Subclass it under a
name that pytest collects, and override the fixtures that make yours; moeopt's own parts run through
the same classes. ``pip install 'moeopt[testing]'`` brings what they need. A device, whole::

    import pytest
    from moeopt import Device, DeviceSpec, Failure, GpuSpec, Measurement, MoEShape, Provenance, get_kernel
    from moeopt.testing.suites import DeviceTestCase


    class RowsDevice(Device):
        '''Says that taller tiles take longer.'''

        def __init__(self):
            shape, gpu, provenance = MoEShape(8, 2, 256, 128), GpuSpec.by_name("H200"), Provenance("made up", "builtin")
            super().__init__(DeviceSpec.of_kernel(get_kernel("builtin"), shape, gpu, provenance))

        def measure(self, jobs, race=lambda job, rounds: False):
            for job in jobs:
                if not self.spec.candidates([job.config]):
                    yield Measurement(job, "failed", failure=Failure("constraints", "it does not fit the GPU"))
                    continue
                us, status = [], "ok"
                while len(us) < 3 and status == "ok":
                    us.append(job.cell.batch_size + 0.1 * job.config.block_size_m)
                    if race(job, us):
                        status = "raced_out"
                yield Measurement(job, status, us=tuple(us))


    class TestRowsDevice(DeviceTestCase):
        @pytest.fixture
        def make_device(self):
            return RowsDevice
"""

from __future__ import annotations

try:
    import pytest
except ImportError:
    raise ImportError("moeopt.testing.suites needs pytest: pip install 'moeopt[testing]'") from None

# Before they are imported, so that their assertions tell what they compared.
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("device", "kernel", "storage", "strategy")))

from moeopt.testing.suites.device import DeviceTestCase  # noqa: E402  (registered above)
from moeopt.testing.suites.kernel import KernelTestCase  # noqa: E402
from moeopt.testing.suites.storage import StorageTestCase  # noqa: E402
from moeopt.testing.suites.strategy import StrategyTestCase  # noqa: E402

__all__ = ["DeviceTestCase", "KernelTestCase", "StorageTestCase", "StrategyTestCase"]
