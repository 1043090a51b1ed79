"""Server logs: what one says, and an engine's rules for reading it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

# A path in a log line.
FILE: Final = r"[^\n]{1,2000}?\.json"
# Weight formats that no fused Triton kernel of the engines can multiply.
NVFP4: Final = frozenset({"modelopt_fp4", "nvfp4", "nvfp4_online", "petit_nvfp4"})
NOT_ON_TRITON: Final = NVFP4 | {"mxfp4", "mxfp8"}


@dataclass
class Event:
    """One message, however often it was logged.

    Attributes:
        kind: Which message (see :class:`LogLine`).
        engine: Whose message it is, or "" where it is of no engine.
        values: What the message names.
        line: First line that has it, from 1.
        text: That line, shortened.
        count: How many times it was logged.
    """

    kind: str
    engine: str
    values: Mapping[str, str]
    line: int
    text: str
    count: int = 1


@dataclass
class LogFacts:
    """What a log says about its last server start.

    Attributes:
        lines: Lines read.
        starts: Server starts seen.
        start_line: Line of the last one, or 0.
        settings: Server settings -> (value, line).
        events: Messages, in the order in which they first appeared.
        dropped: Distinct messages beyond what is kept.
    """

    lines: int = 0
    starts: int = 0
    start_line: int = 0
    settings: dict[str, tuple[str, int]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    dropped: int = 0

    def of(self, *kinds: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event.kind in kinds]

    def setting(self, *keys: str) -> str | None:
        """The value of the first of these settings that is there and is not None."""
        for key in keys:
            value = self.settings.get(key, ("None", 0))[0]
            if value not in ("None", ""):
                return value
        return None

    def is_on(self, key: str) -> bool:
        """Whether a setting is true."""
        return (self.setting(key) or "").lower() in ("true", "1")

    def number(self, key: str) -> int:
        """A setting that is a whole number, 1 where the log does not say."""
        text = self.setting(key) or "1"
        return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 6 else 1

    @property
    def version(self) -> tuple[int, ...] | None:
        """The engine's version, where the log says it."""
        for event in self.of("version"):
            match = re.match(r"\d+(?:\.\d+)*", event.values["version"])
            if match:
                return tuple(map(int, match[0].split(".")))
        return None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A message that is looked for.

    Attributes:
        kind: What it means: ``tuned``, ``fallback``, ``up_file``, ``default`` (of a config file; they name the
            ``path`` that is read, the one ``asked`` for, or both), ``ignored`` (no file is looked for),
            ``block_m`` (up and down differ in BLOCK_SIZE_M), ``mixed`` (some layers run on Triton), ``backend``
            (names the ``backend`` that runs, perhaps the ``gpu``), ``version``, ``ready``, ``no_configs``
            (the loader found no directory ``path``), or a word that another rule refers to.
        words: Every line with the message has these words.
        pattern: Regular expression; its named groups are the event's values.
        before_start: Whether it may come just before the line by which a start is known.
    """

    kind: str
    words: str
    pattern: str
    before_start: bool = False


# Kinds by which a log is known to be of the engine that writes them.
TELLING: Final = ("tuned", "fallback", "up_file", "default", "ignored", "block_m", "mixed", "backend", "version")


@dataclass(frozen=True, slots=True)
class Backend:
    """What is known of a MoE backend.

    Attributes:
        name: As the engine writes it.
        reads: Whether it reads Triton config files; None where that depends on the shape.
        why: One sentence.
    """

    name: str
    reads: bool | None
    why: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """How a running server lays a model out over its GPUs.

    Attributes:
        tp: Parts that ``moeopt --tp`` has to be told of.
        ep: Expert-parallel size, as ``moeopt --ep`` has to be told.
        start_tp: The server's own option of the tensor-parallel size.
        fuse_shared: Whether the log says that shared experts are fused or not; None where it does not say.
        draft: The draft model of speculative decoding, or None.
    """

    tp: int = 1
    ep: int = 1
    start_tp: int = 1
    fuse_shared: bool | None = None
    draft: str | None = None


@dataclass(frozen=True, slots=True)
class MisleadingOption:
    """A server option that does not do what it promises on GPUs of compute capability 12.

    Attributes:
        code: A short word for programs.
        settings: What it is called among the server's settings.
        kind: The log line that names it.
        harms: Whether it does harm, not just nothing.
        message: What was seen; ``{where}`` is the GPU.
    """

    code: str
    settings: tuple[str, ...]
    kind: str
    harms: bool
    message: str


@dataclass(frozen=True, slots=True)
class IgnoringMode:
    """A mode of the server in which config files are not looked for.

    Attributes:
        code: A short word for programs.
        setting: What turns it on.
        title: What it is called.
        message: What it does.
    """

    code: str
    setting: str
    title: str
    message: str


@dataclass(frozen=True, slots=True)
class FlashInferTuning:
    """FlashInfer's kernels, which tune themselves when the server starts.

    Attributes:
        setting: The server's setting that picks them.
        backends: Its values that are of FlashInfer, the one to advise first.
        off: The setting that turns the tuning off.
    """

    setting: str
    backends: tuple[str, ...]
    off: str


@dataclass(frozen=True, slots=True)
class ServerLog:
    """How an engine's log is read.

    Attributes:
        lines: Messages.
        starts: Words of the line by which a start of the server is known.
        lists: Words of the lines that list its settings.
        opening: What such a line is called, for messages.
        settings: Settings that are kept.
        anywhere: Settings (``kind``) that any line may have, each with a group ``value``.
        own: Settings that no other engine has.
        shown: Settings that are evidence of the backend in use.
        backend: Which MoE backend runs, None where that is not known; the second argument says whether the
            log has lines about config files.
        deployment: How the server lays the model out.
        triton_option: The server's option that makes the Triton kernel run, None where nothing does.
        kinds: Word by which ``backend`` lines tell schemes apart (their ``kind``, in lower case) -> dtypes of the
            layers that it is about.
        mixes: Whether the Triton kernel may run some layers beside a backend that reads no files.
        ignoring: A mode that ignores the files.
        flashinfer: FlashInfer's kernels, where they can stand in.
        misleading: Options that mislead.
        dense: Where files of the engine's dense GEMM kernel lie, and which kernel comes before it: a sentence.
    """

    lines: tuple[LogLine, ...]
    starts: tuple[str, ...]
    lists: tuple[str, ...]
    opening: str
    settings: tuple[str, ...]
    anywhere: tuple[LogLine, ...]
    own: tuple[str, ...]
    shown: tuple[str, ...]
    backend: Callable[[LogFacts, bool], Backend | None]
    deployment: Callable[[LogFacts], Deployment]
    triton_option: Callable[[LogFacts], str | None]
    kinds: Mapping[str, frozenset[str | None]] = field(default_factory=dict)
    mixes: bool = False
    ignoring: IgnoringMode | None = None
    flashinfer: FlashInferTuning | None = None
    misleading: tuple[MisleadingOption, ...] = ()
    dense: str = ""
