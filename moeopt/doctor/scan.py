"""Reader of server logs: one pass, in constant memory, that keeps what is said about MoE configs.

What is looked for is each engine's :class:`moeopt.engines.log.ServerLog`. Messages are looked for
anywhere in a line, so prefixes of ranks, containers and journals do not matter, nor does a line that
two ranks wrote into each other.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from moeopt import engines
from moeopt.engines.log import FILE, Event, LogFacts, LogLine
from moeopt.errors import InvalidInputError

_BLOCK: Final = 1 << 20
_LONGEST_LINE: Final = 1 << 18
_LONGEST_TEXT: Final = 400
_MOST_EVENTS: Final = 4096
_STARTING_LINES: Final = 200
# Messages that are of no engine.
COMMON_LINES: Final = (
    LogLine("autotune_done", "FlashInfer autotune", r"FlashInfer autotune completed"),
    LogLine("autotune_begun", "FlashInfer autotune", r"Running FlashInfer autotune"),
    LogLine("autotune_off", "FlashInfer autotune", r"Skipping FlashInfer autotune because it is disabled"),
    LogLine("autotune_disagree", "FlashInfer autotune", r"FlashInfer autotune: per-rank caches disagree"),
    LogLine(
        "autotune_mismatch",
        "[Autotuner]",
        r"\[Autotuner\]: Cache file (?P<path>[^\n]{1,1000}?) was created in a different environment "
        r"\((?P<what>[^\n]{1,1000}?)\)\. Ignoring",
    ),
    LogLine(
        "autotune_loaded",
        "[Autotuner]",
        r"\[Autotuner\]: Loaded (?P<count>\d+) configs from (?P<path>\S{1,1000})",
    ),
    LogLine(
        "dense",
        "default W8A8 Block",
        r"Using default W8A8 Block (?P<kind>FP8|INT8) kernel config\."
        rf"(?:[^\n]{{0,120}}?not found at (?P<asked>{FILE}))?",
    ),
    LogLine("mamba", "default Mamba SSU", r"Using default Mamba SSU config"),
    LogLine("lora", "default LoRA kernel", r"Using default LoRA kernel configs"),
    LogLine(
        "out_of_resource",
        "out of resource",
        r"out of resource: shared memory, Required: (?P<required>\d+), Hardware limit: (?P<limit>\d+)",
    ),
    LogLine("unknown_key", "specified but unrecognised", r"argument (?P<key>\w{1,80}) was specified but unrecognised"),
    LogLine(
        "bad_number",
        "invalid literal for int()",
        r"ValueError: invalid literal for int\(\) with base 10: '(?P<text>[^']{0,80})'",
    ),
    LogLine("ready", "startup complete", r"Application startup complete"),
)
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class _Rules:
    """What is looked for: the lines and settings of every engine, and those of none."""

    def __init__(self) -> None:
        specs = engines.every()
        self.lines = [("", line) for line in COMMON_LINES]
        self.lines += [(spec.name, line) for spec in specs for line in spec.log.lines]
        self.patterns = [re.compile(line.pattern) for _, line in self.lines]
        self.before_start = {(engine, line.kind) for engine, line in self.lines if line.before_start}
        self.starts = [words for spec in specs for words in spec.log.starts]
        self.lists = [words for spec in specs for words in spec.log.lists]
        self.anywhere = [(line, re.compile(line.pattern)) for spec in specs for line in spec.log.anywhere]
        keys = "|".join(dict.fromkeys(key for spec in specs for key in spec.log.settings))
        self.setting = re.compile(
            rf"""(?<![\w-])['"]?(?P<key>{keys})['"]?\s*[=:]\s*(?P<value>'[^'\n]*'|"[^"\n]*"|[^\s,)}}\]]+)"""
        )
        # What a line of interest holds: bytes.find of a few words is far faster than one large pattern.
        words = {*self.starts, *self.lists, *(line.words for _, line in self.lines)}
        words |= {line.words for line, _ in self.anywhere}
        self.needles = [w.encode() for w in sorted(words) if not any(o != w and o in w for o in words)]


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
    facts, rules = LogFacts(), _Rules()
    seen: dict[tuple[str, ...], Event] = {}
    number = 1
    for block, complete in _blocks(stream):
        for line_number, raw in _lines_of_interest(block, number, rules.needles):
            _take(line_number, raw, rules, facts, seen)
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


def _lines_of_interest(block: bytes, first_number: int, needles: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    hits: dict[int, int] = {}
    for needle in needles:
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


def _take(number: int, raw: bytes, rules: _Rules, facts: LogFacts, seen: dict[tuple[str, ...], Event]) -> None:
    line = _ANSI.sub("", raw.decode("utf-8", "replace")).rstrip("\r")
    if any(words in line for words in rules.starts):
        # Another start of the server: what came before is of a process that is gone, but for what it
        # printed while it read its options, just before this line.
        facts.starts += 1
        facts.start_line = number
        facts.settings.clear()
        facts.events[:] = [
            e for e in facts.events if (e.engine, e.kind) in rules.before_start and number - e.line < _STARTING_LINES
        ]
        seen.clear()
    if any(words in line for words in rules.lists):
        for match in rules.setting.finditer(line):
            facts.settings.setdefault(match["key"], (match["value"].strip("'\""), number))
    for setting, pattern in rules.anywhere:
        if setting.words in line and (found := pattern.search(line)):
            facts.settings.setdefault(setting.kind, (found["value"], number))
    for (engine, wanted), pattern in zip(rules.lines, rules.patterns, strict=True):
        if wanted.words in line:
            for match in pattern.finditer(line):
                values = {k: v for k, v in match.groupdict().items() if v is not None}
                _see(Event(wanted.kind, engine, values, number, _shortened(line, match.start())), facts, seen)


def _see(event: Event, facts: LogFacts, seen: dict[tuple[str, ...], Event]) -> None:
    message = (event.kind, event.engine, *event.values.values())
    if message in seen:
        seen[message].count += 1
    elif len(seen) >= _MOST_EVENTS:
        facts.dropped += 1
    else:
        seen[message] = event
        facts.events.append(event)


def _shortened(line: str, at: int) -> str:
    """A line around what was found in it."""
    text = line.strip()
    if len(text) <= _LONGEST_TEXT:
        return text
    begin = at if at > _LONGEST_TEXT // 2 else 0
    return ("..." if begin else "") + text[begin : begin + _LONGEST_TEXT] + "..."
