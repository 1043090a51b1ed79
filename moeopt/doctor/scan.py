"""Reads a server log once, in constant memory, and keeps what it says about MoE configs.

Line formats as of SGLang 0.5.23 and vLLM 0.33.0, and what older releases wrote where that differs.
Messages are looked for anywhere in a line, so prefixes of ranks, containers and journals do not
matter, nor does a line that two ranks wrote into each other.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from moeopt.errors import InvalidInputError

_BLOCK: Final = 1 << 20
_LONGEST_LINE: Final = 1 << 18
_LONGEST_TEXT: Final = 400
_MOST_EVENTS: Final = 4096
_FILE: Final = r"[^\n]{1,2000}?\.json"

# What a line of interest holds: bytes.find of a few words is far faster than one large pattern.
_NEEDLES: Final = (
    b"MoE",
    b"moe",
    b"backend for",
    b"FlashInfer autotune",
    b"allreduce",
    b"server_args=",
    b"non-default args",
    b"LLM engine (v",
    b"out of resource",
    b"fired up and ready",
    b"startup complete",
    b"invalid literal for int()",
)

# Message -> (words that it has, what it names).
_PATTERNS: Final[Mapping[str, tuple[str, re.Pattern[str]]]] = {
    "sglang_used": ("Using MoE kernel config", re.compile(rf"Using MoE kernel config from (?P<path>{_FILE})")),
    "sglang_fallback": (
        "Fallback to triton",
        re.compile(
            rf"Config file not found at (?P<asked>{_FILE})\. Fallback to triton version (?P<version>[\w.+]+) "
            rf"and use MoE kernel config from (?P<path>{_FILE})"
        ),
    ),
    "sglang_down_reuses_up": ("Down MoE config", re.compile(rf"Down MoE config file not found at (?P<asked>{_FILE})")),
    "sglang_default": (
        "Using default MoE kernel",
        re.compile(
            rf"Using default MoE kernel config\.(?:[^\n]{{0,200}}?Config file not found at (?P<asked>{_FILE}))?"
        ),
    ),
    "sglang_deterministic": (
        "Deterministic inference",
        re.compile(r"Deterministic inference is enabled, using default MoE kernel config"),
    ),
    "sglang_block_m": (
        "down_moe config",
        re.compile(
            r"down_moe config BLOCK_SIZE_M=(?P<down>\d+) does not match up config BLOCK_SIZE_M=(?P<up>\d+) "
            r"at M=(?P<m>\d+)"
        ),
    ),
    "sglang_fp8_uses_triton": ("MoEMethod has no", re.compile(r"MoEMethod has no (?P<backend>\w+) path; using triton")),
    "sglang_picked": ("as MoE runner", re.compile(r"Use (?P<backend>\w+) as MoE runner backend on (?P<gpu>[\w/]+)")),
    "autotune_done": ("autotune completed", re.compile(r"FlashInfer autotune completed")),
    "autotune_begun": ("Running FlashInfer", re.compile(r"Running FlashInfer autotune")),
    "allreduce_flag": ("--enable-flashinfer", re.compile(r"--enable-flashinfer-allreduce-fusion")),
    "sum_allreduce_flag": ("--enable-fused", re.compile(r"--enable-fused-moe-sum-all-reduce")),
    "vllm_used": ("for MoE layer", re.compile(rf"Using configuration from (?P<path>{_FILE}) for MoE layer")),
    "vllm_default": (
        "Using default MoE config",
        re.compile(rf"Using default MoE config\.(?:[^\n]{{0,200}}?Config file not found at \[?'?(?P<asked>{_FILE}))?"),
    ),
    "vllm_backend": (
        "backend",
        re.compile(
            r"Using '?(?P<backend>[\w ]{2,60}?)'? (?P<kind>Unquantized|Fp8|NvFp4|WNA16|Mxfp4|MxFp8|Int8|W4A8) MoE "
            r"(?:LoRA )?backend"
        ),
    ),
    "vllm_backend_for": (
        " for ",
        re.compile(r"Using (?P<backend>[\w ]{2,60}?) (?:kernels?|backend) for (?P<kind>[\w ]{2,30}) MoE"),
    ),
    "vllm_version": ("LLM engine", re.compile(r"LLM engine \(v(?P<version>[^)\s]{1,60})\)")),
    "out_of_resource": (
        "out of resource",
        re.compile(r"out of resource: shared memory, Required: (?P<required>\d+), Hardware limit: (?P<limit>\d+)"),
    ),
    "bad_version_directory": (
        "invalid literal",
        re.compile(r"ValueError: invalid literal for int\(\) with base 10: '(?P<text>[^']{0,80})'"),
    ),
    "ready_sglang": ("fired up", re.compile(r"The server is fired up and ready")),
    "ready_vllm": ("startup complete", re.compile(r"Application startup complete")),
}
_WHILE_STARTING: Final = ("sglang_picked", "allreduce_flag", "sum_allreduce_flag")
_STARTING_LINES: Final = 200
_SETTING_LINE: Final = re.compile(r"server_args=|non-default args|LLM engine \(v")
_START: Final = re.compile(r"server_args=|non-default args: ")
_SETTING: Final = re.compile(
    r"""(?<![\w-])['"]?(?P<key>model_path|model|tp_size|tensor_parallel_size|ep_size|quantization|moe_runner_backend|"""
    r"""moe_a2a_backend|moe_backend|enable_expert_parallel|enable_flashinfer_allreduce_fusion|"""
    r"""flashinfer_allreduce_fusion_backend|enable_fused_moe_sum_all_reduce|enable_deterministic_inference|"""
    r"""disable_flashinfer_autotune|log_level)['"]?\s*[=:]\s*(?P<value>'[^'\n]*'|"[^"\n]*"|[^\s,)}\]]+)"""
)
_BACKEND_SETTING: Final = re.compile(r"moe_runner_backend['\"]?\s*[=:]\s*['\"]?(?P<value>[a-z][a-z0-9_]*)")
_BACKEND_OPTION: Final = re.compile(r"--moe(?:-runner)?-backend[= ](?P<value>[a-z][a-z0-9_]*)")
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Event:
    """One message, however often it was logged.

    Attributes:
        kind: Which message.
        values: What the message names.
        line: First line that has it, from 1.
        text: That line, shortened.
        count: How many times it was logged.
    """

    kind: str
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


def scan_log(path: str | Path) -> LogFacts:
    """Reads a log file once.

    Args:
        path: The file; ``-`` is standard input.

    Raises:
        InvalidInputError: It cannot be read.
    """
    if str(path) == "-":
        import sys

        return scan(sys.stdin.buffer)
    try:
        with Path(path).open("rb") as file:
            return scan(file)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read ({error.strerror or error}): give a server log") from None


def scan(stream: BinaryIO) -> LogFacts:
    """Reads a log from a binary stream; any bytes will do."""
    facts = LogFacts()
    seen: dict[tuple[str, ...], Event] = {}
    number = 1
    for block, complete in _blocks(stream):
        for line_number, raw in _lines_of_interest(block, number):
            _take(line_number, raw, facts, seen)
        number += block.count(b"\n")
        facts.lines = number - 1 if complete else number
    return facts


def _blocks(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Blocks that end at the end of a line, but for a line that never ends; (block, whether it ends a line)."""
    rest = b""
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    while chunk := stream.read(_BLOCK):
        if first and chunk[:2] in (b"\xff\xfe", b"\xfe\xff"):
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
        first = False
        if decoder is not None:
            chunk = decoder.decode(chunk).encode("utf-8", "replace")
        chunk = rest + chunk
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield chunk[:cut], True
        rest = chunk[cut:]
        if len(rest) > _BLOCK:
            yield rest, False
            rest = b""
    if rest:
        yield rest, False


def _lines_of_interest(block: bytes, first_number: int) -> Iterator[tuple[int, bytes]]:
    hits: dict[int, int] = {}
    for needle in _NEEDLES:
        at = block.find(needle)
        while at >= 0:
            start = block.rfind(b"\n", 0, at) + 1
            hits.setdefault(start, at)
            end = block.find(b"\n", at)
            at = block.find(needle, end) if end >= 0 else -1
    number, counted = first_number, 0
    for start in sorted(hits):
        number += block.count(b"\n", counted, start)
        counted = start
        end = block.find(b"\n", start)
        end = len(block) if end < 0 else end
        if end - start > _LONGEST_LINE:
            start = max(start, hits[start] - _LONGEST_LINE // 2)
            end = min(end, start + _LONGEST_LINE)
        yield number, block[start:end]


def _take(number: int, raw: bytes, facts: LogFacts, seen: dict[tuple[str, ...], Event]) -> None:
    line = _ANSI.sub("", raw.decode("utf-8", "replace")).rstrip("\r")
    if _START.search(line):
        # Another start of the server: what came before is of a process that is gone, but for what it
        # printed while it read its options, just before this line.
        facts.starts += 1
        facts.start_line = number
        facts.settings.clear()
        facts.events[:] = [e for e in facts.events if e.kind in _WHILE_STARTING and number - e.line < _STARTING_LINES]
        seen.clear()
    if _SETTING_LINE.search(line):
        for match in _SETTING.finditer(line):
            value = match["value"].strip("'\"")
            facts.settings.setdefault(match["key"], (value, number))
    for key, backend in (("moe_runner_backend", _BACKEND_SETTING), ("backend_option", _BACKEND_OPTION)):
        if found := backend.search(line):
            facts.settings.setdefault(key, (found["value"], number))
    for kind, (words, pattern) in _PATTERNS.items():
        if words not in line:
            continue
        for match in pattern.finditer(line):
            values = {k: v for k, v in match.groupdict().items() if v is not None}
            message = (kind, *values.values())
            if message in seen:
                seen[message].count += 1
            elif len(seen) >= _MOST_EVENTS:
                facts.dropped += 1
            else:
                text = line.strip()
                if len(text) > _LONGEST_TEXT:
                    begin = match.start() if match.start() > _LONGEST_TEXT // 2 else 0
                    text = ("..." if begin else "") + text[begin : begin + _LONGEST_TEXT] + "..."
                seen[message] = Event(kind, values, number, text)
                facts.events.append(seen[message])
