from __future__ import annotations

import inspect

import pytest

from moeopt import errors
from moeopt.errors import InvalidInputError, MoeoptError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_can_be_caught_as_a_moeopt_error_and_has_a_docstring(kind: type[Exception]) -> None:
    assert issubclass(kind, MoeoptError)
    assert kind.__doc__
    with pytest.raises(MoeoptError, match="what was given"):
        raise kind("what was given")


def test_bad_input_is_a_value_error_too() -> None:
    assert issubclass(InvalidInputError, ValueError)
    for kind in (errors.UnknownGpuError, errors.RecordingError, errors.UnsupportedShapeError):
        assert issubclass(kind, InvalidInputError)
    for kind in (errors.DeviceError, errors.StorageError, errors.ExportError):
        assert not issubclass(kind, InvalidInputError)
