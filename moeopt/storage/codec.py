"""A measurement as an Optuna trial, and back, bit for bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from moeopt.core.config import REQUIRED_KEYS, LaunchConfig
from moeopt.core.shape import MoEShape
from moeopt.core.trial import Cell, Failure, Job, Measurement, Resources
from moeopt.kernels.work import launch_work

# Attributes over 2,045 characters fail on some databases; this leaves room for JSON's escapes.
_CHUNK: Final = 1000
_ATTRIBUTE_LIMIT: Final = 2000
PACKED: Final = "moeopt"


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial from the database.

    Attributes:
        measurement: What was measured, exactly as it was.
        run: Tag of the run that asked for it.
        seq: Its number in that run.
        ended: When it ended, local time, or None.
    """

    measurement: Measurement
    run: str
    seq: int
    ended: datetime | None = None


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A finished trial in Optuna's terms.

    Attributes:
        state: ``COMPLETE`` or ``PRUNED``.
        value: Median µs, or None where nothing was timed.
        params: Launch config.
        user_attrs: The packed measurement, and what a person wants to see beside it.
        constraint: Over 0 where the config cannot be used.
        rounds: µs per round, kept as intermediate values.
        start: When measuring began, local time.
        complete: When it ended, local time.
    """

    state: str
    value: float | None
    params: Mapping[str, int | bool]
    user_attrs: Mapping[str, Any]
    constraint: float
    rounds: tuple[float, ...]
    start: datetime
    complete: datetime


@dataclass(frozen=True)
class TrialContext:
    """What the readable attributes of a cell's trials are computed from.

    Attributes:
        shape: The layer.
        roofline_us: µs below which no kernel can go, or None.
        launch_bytes: Bytes that a launch moves at least, or None.
        params: Keys of the space that is searched. A key that is always at its default would show up in
            importance plots all the same, so that maxnreg and USE_TMA are there only where searched or set.
    """

    shape: MoEShape
    roofline_us: float | None = None
    launch_bytes: float | None = None
    params: tuple[str, ...] = REQUIRED_KEYS


def encode(
    measurement: Measurement, run: str, seq: int, context: TrialContext, start: datetime, complete: datetime
) -> TrialRow:
    """A measurement as a finished trial."""
    timed = bool(measurement.us) and measurement.status in ("ok", "raced_out")
    usable = measurement.status in ("ok", "raced_out")
    config = measurement.job.config
    params = {
        key: value for key, value in config.values().items() if key in REQUIRED_KEYS or key in context.params or value
    }
    return TrialRow(
        state="COMPLETE" if measurement.status == "ok" and timed else "PRUNED",
        value=measurement.median_us if timed else None,
        params=params,
        user_attrs={**pack(PACKED, _to_json(measurement, run, seq)), **_readable(measurement, context)},
        constraint=0.0 if usable else 1.0,
        rounds=measurement.us,
        start=start,
        complete=complete,
    )


def decode(cell: Cell, data: Mapping[str, Any], ended: datetime | None = None) -> StoredTrial:
    """The inverse of :func:`encode`, from the packed attribute.

    Raises:
        KeyError, TypeError, ValueError: The attribute is not one of ours.
    """
    failure = data.get("failure")
    error = data.get("error")
    return StoredTrial(
        measurement=Measurement(
            job=Job(cell, LaunchConfig.of_numbers(data["config"])),
            status=data["status"],
            us=tuple(float(v) for v in data["us"]),
            relative_error=None if error is None else float(error),
            resources={role: Resources(*values) for role, values in data.get("resources", {}).items()},
            failure=Failure(*failure) if failure is not None else None,
            extra=dict(data.get("extra", {})),
        ),
        run=data["run"],
        seq=data["seq"],
        ended=ended,
    )


def _to_json(measurement: Measurement, run: str, seq: int) -> dict[str, Any]:
    config = measurement.job.config
    out: dict[str, Any] = {
        "run": run,
        "seq": seq,
        "status": measurement.status,
        "config": list(config.values().values()),
        "us": list(measurement.us),
    }
    if measurement.relative_error is not None:
        error = measurement.relative_error
        out["error"] = error if math.isfinite(error) else str(error)
    if measurement.resources:
        out["resources"] = {
            role: [r.registers, r.spills, r.shared_bytes, r.compile_s] for role, r in measurement.resources.items()
        }
    if measurement.failure is not None:
        failure = measurement.failure
        out["failure"] = [failure.reason, failure.message, failure.log]
    if measurement.extra:
        out["extra"] = measurement.extra
    return out


def _readable(measurement: Measurement, context: TrialContext) -> dict[str, Any]:
    """What a person wants to see beside the parameters."""
    out: dict[str, Any] = {}
    if measurement.us:
        us = measurement.median_us
        cell = measurement.job.cell
        flops = sum(launch_work(context.shape, role, cell.batch_size).flops for role in cell.roles)
        out["TFLOP/s"] = round(flops / us / 1e6, 2)
        if context.roofline_us:
            out["fraction of roofline"] = round(context.roofline_us / us, 4)
        if context.launch_bytes:
            out["GB/s"] = round(context.launch_bytes / us / 1e3, 1)
        out["µs per round"] = [round(value, 3) for value in measurement.us]
    if measurement.resources:
        resources = list(measurement.resources.values())
        out["registers"] = max(r.registers for r in resources)
        out["spills"] = max(r.spills for r in resources)
        out["shared bytes"] = max(r.shared_bytes for r in resources)
        out["compile s"] = round(max(r.compile_s for r in resources), 3)
    if measurement.relative_error is not None and math.isfinite(measurement.relative_error):
        out["relative error"] = float(f"{measurement.relative_error:.3g}")
    if measurement.status == "raced_out":
        out["reason"] = "raced out"
    elif measurement.failure is not None:
        kind = "rejected" if measurement.status == "rejected" else measurement.failure.reason
        out["reason"] = f"{kind}: {measurement.failure.message}"[:400]
    return out


def pack(name: str, value: Any) -> dict[str, Any]:
    """A JSON-ready value as one attribute, or as several where it is too long for one."""
    text = json.dumps(value)
    if len(text) <= _ATTRIBUTE_LIMIT:
        return {name: value}
    return {f"{name}.{i:03d}": text[at : at + _CHUNK] for i, at in enumerate(range(0, len(text), _CHUNK))}


def unpack(name: str, attrs: Mapping[str, Any]) -> Any | None:
    """The inverse of :func:`pack`; None where it is not there or not whole."""
    if attrs.get(name) is not None:
        return attrs[name]
    parts = [attrs[key] for key in sorted(attrs) if key.startswith(name + ".") and key[len(name) + 1 :].isdigit()]
    try:
        return json.loads("".join(parts)) if parts else None
    except (ValueError, TypeError):
        return None


def unpack_all(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """All attributes with split ones joined again; not those of which a killed process has written a part."""
    found = {name: unpack(name, attrs) for name in dict.fromkeys(map(_base, attrs))}
    return {name: value for name, value in found.items() if value is not None}


def _base(key: str) -> str:
    name, _, number = key.rpartition(".")
    return name if name and len(number) == 3 and number.isdigit() else key


def repack(name: str, value: Any, attrs: Iterable[str]) -> dict[str, Any]:
    """:func:`pack`, and blanks for what an earlier value of another length left behind."""
    new = pack(name, value)
    stale = {key: None if key == name else "" for key in attrs if _base(key) == name and key not in new}
    return {**stale, **new}


@dataclass(frozen=True)
class StudyRow:
    """A study as stored.

    Attributes:
        study_id: Optuna's id.
        name: Its name.
        attrs: Its user attributes, split ones joined.
    """

    study_id: int
    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
