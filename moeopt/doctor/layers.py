"""States of the MoE layer shapes that a log speaks of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from moeopt.doctor.diagnosis import Finding, LayerState, State, lines_of
from moeopt.engines import EngineSpec
from moeopt.engines.log import Event, LogFacts
from moeopt.errors import InvalidInputError
from moeopt.export.names import ConfigName


@dataclass
class _Layer:
    name: ConfigName | None
    states: dict[str, dict[State, Event]] = field(default_factory=lambda: {"up": {}, "down": {}})
    paths: dict[tuple[str, State], Path] = field(default_factory=dict)

    def see(self, role: str, state: State, event: Event, path: str | None) -> None:
        self.states[role].setdefault(state, event)
        if path:
            self.paths.setdefault((role, state), Path(path))


# Of several states seen for one file the worst counts: some rank or node is in it.
_WORST: Final[tuple[State, ...]] = ("default", "fallback", "up_file", "tuned")


def layers_of(facts: LogFacts, spec: EngineSpec) -> tuple[list[LayerState], list[Finding]]:
    """What the server does for each shape, and a finding for each shape whose ranks disagree."""
    layers: dict[str, _Layer] = {}
    for event in facts.of(*_WORST):
        path = event.values.get("asked") or event.values.get("path")
        name = _name(path, spec.name)
        if path is None and any(layer.name is not None for layer in layers.values()):
            continue  # it says nothing that a line with a path does not
        up_name = name.for_role("up") if name else None
        layer = layers.setdefault(str(up_name) if up_name else Path(path or "").name, _Layer(up_name))
        state = cast(State, event.kind)
        role = "down" if state == "up_file" or (name is not None and name.down) else "up"
        layer.see(role, state, event, event.values.get("path") or path)
    states, findings = [], []
    for layer in layers.values():
        states.append(_state(layer, spec))
        for role in ("up", "down"):
            seen: dict[State, Event] = {s: event for s, event in layer.states[role].items() if s != "up_file"}
            if len(seen) > 1:
                findings.append(_disagreement(layer, role, seen))
    return states, findings


def _state(layer: _Layer, spec: EngineSpec) -> LayerState:
    up, down = _worst(layer.states["up"]), _worst(layer.states["down"])
    if not spec.split:
        down = "up_file" if up == "tuned" else up
    elif down == "up_file" and up == "default":
        # SGLang 0.5.6 to 0.5.15 say the one of the down projection, whatever the other runs.
        down = "default"
    up_path = layer.paths.get(("up", up))
    return LayerState(layer.name, up, down, up_path, layer.paths.get(("down", down)) if spec.split else up_path)


def _worst(seen: dict[State, Event]) -> State:
    return next((state for state in _WORST if state in seen), "not_seen")


def _disagreement(layer: _Layer, role: str, seen: dict[State, Event]) -> Finding:
    words = {"tuned": "reads its file", "fallback": "reads one of another Triton version", "default": "finds none"}
    what = " and ".join(f"one {words[state]} ({event.count} times)" for state, event in seen.items())
    message = (
        f"processes differ for the {role} projection of {layer.name or 'a layer'}: {what}. Do all nodes have the same "
        "files, GPUs and Triton versions?"
    )
    return Finding("warning", "ranks_disagree", message, lines_of(seen.values()))


def _name(path: str | None, engine: str) -> ConfigName | None:
    if path is None:
        return None
    try:
        return ConfigName.parse(path.replace("\\", "/").rpartition("/")[2], engine)
    except InvalidInputError:
        return None
