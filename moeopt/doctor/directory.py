"""Judgement of a directory of config files, and of which file an engine would read."""

from __future__ import annotations

from pathlib import Path

from moeopt import engines
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.doctor.commands import tune_commands
from moeopt.doctor.diagnosis import Diagnosis, Evidence, Finding, LayerState, State, by_severity
from moeopt.engines import EngineSpec
from moeopt.engines.serving import Checkpoint
from moeopt.errors import InvalidInputError
from moeopt.export.lookup import How, Lookup, config_root, find_config_files, guess_engine
from moeopt.export.names import ConfigName
from moeopt.export.read import ConfigFile, Problem, check_pair, read_config_file
from moeopt.models.request import ModelRequest

_MOST_PROBLEMS_A_FILE = 6
_STATES: dict[How, State] = {"exact": "tuned", "fallback": "fallback", "up_file": "up_file", "missing": "default"}


def check_directory(directory: str | Path, engine: str | None = None, gpu: GpuSpec | None = None) -> list[Finding]:
    """A finding for each problem of each file.

    Args:
        directory: With config files.
        engine: Whose; None finds out.
        gpu: Only files of this GPU are checked against its limits; None takes each file's own.

    Raises:
        InvalidInputError: It is not a directory.
    """
    spec = engines.get(engine or guess_engine(directory))
    root = config_root(spec.name, directory)
    if not root.is_dir():
        raise InvalidInputError(f"{root} is not a directory: give one with config files")
    findings: list[Finding] = []
    files: dict[Path, ConfigFile] = {}
    for path in _config_files(root, spec):
        files[path] = read_config_file(path, engine=spec.name)
        findings += _findings(files[path].problems)
    for path, file in files.items():
        if file.name is not None and file.name.down:
            up = files.get(path.with_name(str(file.name.for_role("up"))))
            findings += _findings(check_pair(up, file)) if up is not None else [_down_alone(path)]
    if not files:
        findings += _one_level_off(root, spec)
    for found in spec.layout.version_folders(root):
        if spec.layout.version_of(found.name) is None:
            message = (
                f"{found.name} is no Triton version in numbers: {spec.title}'s loader raises ValueError for every "
                "file that it does not find at once. Rename it."
            )
            findings.append(Finding("error", "bad_directory", message, (Evidence(str(found)),)))
    return findings


def _one_level_off(root: Path, spec: EngineSpec) -> list[Finding]:
    """Files of the engine that lie a directory below the one in which it looks."""
    below = sorted({path.parent for path in root.glob(f"*/{spec.names.pattern}")})
    message = f"Files lie one directory below, where {spec.title} does not look: set {spec.variable}={{}}."
    return [Finding("error", "below", message.format(place), (Evidence(str(place)),)) for place in below]


def other_root(directory: str | Path, spec: EngineSpec) -> list[Finding]:
    """What to set the engine's variable to, where the directory that was given is one below that."""
    root = config_root(spec.name, directory)
    if root == Path(directory):
        return []
    message = f"{spec.variable} has to name {root}: {spec.title} looks in {spec.layout.example} below it."
    return [Finding("warning", "other_root", message, (Evidence(str(directory)),))]


def _default_kernel(
    spec: EngineSpec, shape: MoEShape, gpu: GpuSpec | None, request: ModelRequest | None
) -> list[Finding]:
    """That another kernel than Triton runs unless an option says so, for all batch sizes or for some."""
    checkpoint = request.derive()[1].checkpoint if request is not None else Checkpoint(shape)
    found = spec.serving.serving(checkpoint, gpu)
    if gpu is None or found.reads == "all":
        return []
    return [Finding("warning", "other_kernel", f"{spec.title} on {gpu.name}: {found}.")]


def judge_directory(
    directory: str | Path,
    *,
    engine: str | None = None,
    shape: MoEShape | None = None,
    gpu: GpuSpec | None = None,
    gpu_name: str | None = None,
    triton_version: str | None = None,
    request: ModelRequest | None = None,
) -> Diagnosis:
    """Checks a directory; with a shape, a GPU and a Triton version also says which file would be read.

    Args:
        directory: With config files.
        engine: Whose; None finds out.
        shape: The layer.
        gpu: The server's GPU where the table knows it.
        gpu_name: Its name as torch reports it.
        triton_version: Of the server, where its engine looks at it.
        request: The model and its layout, for the commands to run next.

    Raises:
        InvalidInputError: It is not a directory, or too little was given to say which file would be read.
    """
    engine = engine or guess_engine(directory)
    spec = engines.get(engine)
    findings = check_directory(directory, engine, gpu)
    if shape is None:
        return _only_checked(directory, spec, findings)
    if gpu_name is None:
        raise InvalidInputError("--gpu is missing: the file's name has the GPU's, as torch reports it")
    if triton_version is None and spec.layout.versioned:
        raise InvalidInputError(
            f"--triton is missing: {spec.title} looks in the directory of the server's Triton version"
        )
    name = ConfigName.of(engine, shape, gpu_name)
    lookup = find_config_files(engine, directory, name, triton_version or "0")
    first = [*lookup_findings(lookup), *other_root(directory, spec), *_default_kernel(spec, shape, gpu, request)]
    state = LayerState(
        lookup.name, _STATES[lookup.up.how], _STATES[lookup.down.how], lookup.up.path or lookup.up.asked,
        lookup.down.path or lookup.down.asked,
    )  # fmt: skip
    # Problems of files that this server does not read are worth a note to it, no more.
    read = {str(p) for p in (lookup.up.path, lookup.down.path) if p is not None}
    rest = [
        f if any(e.text in read for e in f.evidence) else Finding("note", f.code, f.message, f.evidence)
        for f in findings
    ]
    broken = any(f.severity == "error" and any(e.text in read for e in f.evidence) for f in rest)
    title = spec.title
    if lookup.tuned and not broken:
        code, verdict = "tuned", f"Tuned: {title} reads {lookup.name} from {lookup.root}."
        if lookup.root != Path(directory):
            verdict = f"Tuned, where {spec.variable} names {lookup.root}: {title} reads {lookup.name}."
    elif lookup.up.how == "missing":
        code, verdict = "default", f"Not tuned: {title} finds no {lookup.name} in {lookup.root}."
    elif broken:
        code, verdict = "broken", f"Broken: {title} reads {lookup.name} from {lookup.root}, and cannot use all of it."
    else:
        code, verdict = "fallback", f"Half tuned: {title} reads {lookup.up.path}, which is not all that it asks for."
    after = () if code == "tuned" else tune_commands(spec, None, [lookup.name], shape, request)
    return Diagnosis(code, verdict, engine, None, (state,), by_severity(first + rest), after)


def lookup_findings(lookup: Lookup) -> list[Finding]:
    """What a lookup says: files that are missing or stand in, and near misses."""
    spec = engines.get(lookup.engine)
    findings = []
    for found in (lookup.up, lookup.down):
        there = f"there is no {found.asked}."
        if found.how == "missing" and found.role == "up":
            findings.append(Finding("error", "default", f"No file for this layer: it looks for {found.asked}."))
        elif found.how == "fallback":
            message = f"The {found.role} projection takes a file of Triton {found.version}: {there}"
            findings.append(Finding("warning", "fallback", message, (Evidence(str(found.path)),)))
        elif found.how == "up_file" and spec.split:
            message = f"The down projection takes up's file: {there}"
            findings.append(Finding("warning", "down_reuses_up", message))
    for name in lookup.obstacles:
        message = f"{spec.title}'s loader raises ValueError over the directory {name}: rename it."
        findings.append(Finding("error", "bad_directory", message))
    if not lookup.tuned:
        for miss in lookup.near_misses:
            findings.append(Finding("note", "near_miss", f"Not read: {miss.why}.", (Evidence(str(miss.path)),)))
    return findings


def _only_checked(directory: str | Path, spec: EngineSpec, findings: list[Finding]) -> Diagnosis:
    count = len(_config_files(config_root(spec.name, directory), spec))
    if count == 0:
        findings = [*findings, Finding("error", "empty", f"{directory} holds no config file of {spec.title}.")]
        return Diagnosis("empty", findings[-1].message, spec.name, None, (), by_severity(findings))
    bad = {e.text for f in findings if f.severity != "note" for e in f.evidence}
    if any(f.severity != "note" for f in findings):
        code, verdict = "problems", f"{len(bad)} of {count} {spec.name} config files in {directory} have problems."
    else:
        sound = f"{count} {spec.name} config files in {directory} are sound"
        code, verdict = "checked", f"{sound}; give a shape, --gpu and --triton to hear which one is read."
    return Diagnosis(code, verdict, spec.name, None, (), by_severity(findings))


def _config_files(root: Path, spec: EngineSpec) -> list[Path]:
    paths = {path for folder in spec.layout.folders for path in root.glob(folder + spec.names.pattern)}
    return sorted(path for path in paths if ",backend=" not in path.name)


def _findings(problems: tuple[Problem, ...] | list[Problem]) -> list[Finding]:
    """One finding for each kind of problem of a file; many entries with the same one are counted."""
    grouped: dict[str, list[Problem]] = {}
    for problem in problems:
        grouped.setdefault(problem.code, []).append(problem)
    findings = []
    for code, same in list(grouped.items())[:_MOST_PROBLEMS_A_FILE]:
        more = f" (and {len(same) - 1} more of this kind)" if len(same) > 1 else ""
        findings.append(Finding(same[0].severity, code, f"{same[0]}{more}", (Evidence(str(same[0].path)),)))
    return findings


def _down_alone(path: Path) -> Finding:
    message = f"{path.name} has no up file beside it: the up projection runs without, with another BLOCK_SIZE_M."
    return Finding("warning", "down_alone", message, (Evidence(str(path)),))
