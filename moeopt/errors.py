"""The errors moeopt raises for what a caller can mend.

Each message says what was given, what was expected and what to do, in one line. The command
line prints that line and ends with exit status 2.
"""


class MoeoptError(Exception):
    """Base of all errors that moeopt raises on purpose."""


class InvalidInputError(MoeoptError, ValueError):
    """A shape, config, option or file holds something that cannot be used."""


class UnknownGpuError(InvalidInputError):
    """A GPU was named that is neither present nor in the table."""


class RecordingError(InvalidInputError):
    """A recording cannot be read, is truncated, or is of another shape than asked for."""


class UnsupportedShapeError(InvalidInputError):
    """A kernel cannot run this shape or dtype on this GPU."""


class DeviceError(MoeoptError):
    """No device can be had, or the device cannot do what is asked (memory, driver)."""


class StorageError(MoeoptError):
    """A study database cannot be opened, is of another schema, or went away."""


class ExportError(MoeoptError):
    """A config file or its directory cannot be written or merged."""
