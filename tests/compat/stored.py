"""Study databases as they were written by commit 6261dc7, read without any code of moeopt or Optuna.

What a trial holds is in one attribute, ``moeopt``, or where that is over 2,000 characters in ``moeopt.000``,
``moeopt.001``, ... of 1,000 each; all else beside it is for people and for Optuna's own functions.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEYS = (
    "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages", "maxnreg", "USE_TMA",
)  # fmt: skip


def _range(low: int, high: int, log: bool) -> dict[str, Any]:
    return {"name": "IntDistribution", "attributes": {"log": log, "step": 1, "low": low, "high": high}}


DISTRIBUTIONS = {
    "BLOCK_SIZE_M": _range(8, 512, True),
    "BLOCK_SIZE_N": _range(8, 512, True),
    "BLOCK_SIZE_K": _range(16, 512, True),
    "GROUP_SIZE_M": _range(1, 128, True),
    "num_warps": _range(1, 32, True),
    "num_stages": _range(1, 12, False),
    "maxnreg": _range(0, 255, False),
    "USE_TMA": {"name": "CategoricalDistribution", "attributes": {"choices": [False, True]}},
}
# Attributes of a trial that people read.
READABLE = {
    "TFLOP/s", "fraction of roofline", "GB/s", "µs per round", "registers", "spills", "shared bytes", "compile s",
    "relative error", "reason",
}  # fmt: skip
_JOURNAL_STATES = {0: "RUNNING", 1: "COMPLETE", 2: "PRUNED", 3: "FAIL", 4: "WAITING"}
_JOURNAL_CREATE, _JOURNAL_STUDY_ATTR, _JOURNAL_TRIAL = 0, 2, 4


@dataclass(frozen=True)
class Packed:
    """What the attribute ``moeopt`` holds."""

    run: str
    seq: int
    status: str
    config: tuple[int | bool, ...]
    us: tuple[float, ...]
    error: float | str | None = None
    resources: dict[str, list[float]] = field(default_factory=dict)
    failure: list[str | None] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, attrs: dict[str, Any]) -> Packed:
        """From a trial's user attributes."""
        data = joined(attrs)["moeopt"]
        known = {"run", "seq", "status", "config", "us", "error", "resources", "failure", "extra"}
        assert set(data) <= known, f"the packed attribute has a key that old code does not know: {sorted(data)}"
        assert [type(value) for value in data["config"]] == [int] * 7 + [bool], data["config"]
        assert data["status"] in ("ok", "raced_out", "rejected", "failed")
        assert len(data["run"]) == 12
        for values in data.get("resources", {}).values():
            assert len(values) == 4
        if "failure" in data:
            assert len(data["failure"]) == 3
        return cls(**{**data, "config": tuple(data["config"]), "us": tuple(data["us"])})


@dataclass
class Trial:
    """One row of trials with what other tables hold of it."""

    state: str
    value: float | None = None
    params: dict[str, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    attrs: dict[str, Any] = field(default_factory=dict)
    system_attrs: dict[str, Any] = field(default_factory=dict)
    rounds: dict[int, float] = field(default_factory=dict)

    def check(self) -> Packed:
        """Holds what Optuna's columns say against the packed measurement."""
        packed = Packed.of(self.attrs)
        config = dict(zip(KEYS, packed.config, strict=True))
        assert set(KEYS[:6]) <= set(self.params) <= set(KEYS)
        for name, (value, distribution) in self.params.items():
            assert value == int(config.pop(name)), name
            assert distribution == DISTRIBUTIONS[name], name
        assert not any(config.values()), "what is no parameter is at its default"
        timed = bool(packed.us)
        assert self.value == (statistics.median(packed.us) if timed else None)
        assert self.rounds == dict(enumerate(packed.us))
        assert self.state == ("COMPLETE" if packed.status == "ok" else "PRUNED")
        assert self.system_attrs == {"constraints": [0.0 if timed else 1.0]}
        shown = set(joined(self.attrs)) - {"moeopt"}
        assert shown <= READABLE
        assert (packed.status == "ok") == ("reason" not in shown)
        assert timed == ({"TFLOP/s", "µs per round"} <= shown)
        assert all(len(json.dumps(value)) <= 2045 for value in self.attrs.values()), "other databases refuse more"
        return packed


@dataclass
class Study:
    """An Optuna study: its attributes as stored, its trials oldest first."""

    attrs: dict[str, Any] = field(default_factory=dict)
    system_attrs: dict[str, Any] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)

    @property
    def runs(self) -> dict[str, Any]:
        """The runs that began with this cell, by tag."""
        return {n.removeprefix("run:"): run for n, run in joined(self.attrs).items() if n.startswith("run:")}

    def packed(self) -> list[Packed]:
        """The finished trials' measurements, checked."""
        return [trial.check() for trial in self.trials if trial.state in ("COMPLETE", "PRUNED")]

    def timed(self) -> list[tuple[int | bool, ...]]:
        """The configs with a time."""
        return [packed.config for packed in self.packed() if packed.us]


def joined(attrs: dict[str, Any]) -> dict[str, Any]:
    """Attributes with those joined again that are stored in parts; blanks are what a longer value left."""
    out: dict[str, Any] = {}
    parts: dict[str, str] = {}
    for key in sorted(attrs):
        name, _, number = key.rpartition(".")
        if name and len(number) == 3 and number.isdigit():
            parts[name] = parts.get(name, "") + attrs[key]
        elif attrs[key] is not None:
            out[key] = attrs[key]
    return {**out, **{name: json.loads(text) for name, text in parts.items() if text}}


def exact(value: Any) -> str:
    """A text that differs where 1, 1.0 and true do; in any order of keys."""
    return json.dumps(value, sort_keys=True)


def studies(path: Path) -> dict[str, Study]:
    """The studies of a database file, by name."""
    if path.suffix == ".journal":
        return _journal(path.read_bytes().splitlines())
    with closing(sqlite3.connect(path)) as connection:
        return from_sql(lambda query: connection.execute(query).fetchall())


def from_sql(rows: Callable[[str], Iterable[Any]]) -> dict[str, Study]:
    """The studies behind a function that answers queries."""
    found = {number: (name, Study()) for number, name in rows("select study_id, study_name from studies")}
    for number, key, value in rows("select study_id, key, value_json from study_user_attributes"):
        found[number][1].attrs[key] = json.loads(value)
    for number, key, value in rows("select study_id, key, value_json from study_system_attributes"):
        found[number][1].system_attrs[key] = json.loads(value)
    trials = {}
    for number, trial, state in rows("select study_id, trial_id, state from trials order by trial_id"):
        trials[trial] = Trial(state)
        found[number][1].trials.append(trials[trial])
    for trial, value, kind in rows("select trial_id, value, value_type from trial_values"):
        assert kind == "FINITE"
        trials[trial].value = value
    for trial, name, value, text in rows(
        "select trial_id, param_name, param_value, distribution_json from trial_params"
    ):
        trials[trial].params[name] = (value, json.loads(text))
    for trial, key, value in rows("select trial_id, key, value_json from trial_user_attributes"):
        trials[trial].attrs[key] = json.loads(value)
    for trial, key, value in rows("select trial_id, key, value_json from trial_system_attributes"):
        trials[trial].system_attrs[key] = json.loads(value)
    for trial, step, value in rows("select trial_id, step, intermediate_value from trial_intermediate_values"):
        trials[trial].rounds[step] = value
    return dict(found.values())


def _journal(lines: list[bytes]) -> dict[str, Study]:
    found: list[tuple[str, Study]] = []
    for line in lines:
        log = json.loads(line)
        if log["op_code"] == _JOURNAL_CREATE:
            found.append((log["study_name"], Study()))
        elif log["op_code"] == _JOURNAL_STUDY_ATTR:
            found[log["study_id"]][1].attrs |= log["user_attr"]
        elif log["op_code"] == _JOURNAL_TRIAL:
            forms = {name: json.loads(text) for name, text in log["distributions"].items()}
            found[log["study_id"]][1].trials.append(
                Trial(
                    _JOURNAL_STATES[log["state"]],
                    log.get("value"),
                    {name: (value, forms[name]) for name, value in log["params"].items()},
                    log["user_attrs"],
                    log["system_attrs"],
                    {int(step): us for step, us in log["intermediate_values"].items()},
                )
            )
        else:
            raise AssertionError(f"old code wrote no such record: {log}")
    return dict(found)
