"""Times launches on a GPU with CUDA graphs and device events."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

log = logging.getLogger(__name__)

# Cycles that the probe of events inside a graph spins for: 50 to 500 µs at 2 to 0.2 GHz.
_PROBE_CYCLES: Final = 100_000
_LEAD_CYCLES: Final = 60_000


class GraphTimer:
    """Captures launches into a graph and times its replays, on torch's current stream.

    Where torch and the driver can, the two events are nodes of the graph itself, before the first
    and after the last launch, so that the time of starting a graph is not in them. Elsewhere they
    are recorded around the replay, behind a short spinning kernel that hides the host's part.

    The current stream must not be the default one, which cannot be captured.
    """

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._graph: Any = None
        self._launches = 0
        self._outer: tuple[Any, Any] = self._make_events()
        self._events = self._outer
        self.inside = False
        self.inside = self._probe()

    @property
    def method(self) -> str:
        """How times are taken, in words for a recording's header."""
        return "events inside the graph" if self.inside else "events around the graph's replay"

    def capture(self, launches: Sequence[Callable[[], None]]) -> None:
        """Captures the launches, in order, as one graph. Each binary has to have run once before."""
        try:
            self._capture(launches)
        except RuntimeError:
            if not self.inside:
                raise
            # Perhaps this driver cannot put such a launch beside an event node. If it is the launch's
            # own fault, it fails again.
            inside, events = self.inside, self._events
            self.inside, self._events = False, self._outer
            try:
                self._capture(launches)
            except RuntimeError:
                self.inside, self._events = inside, events
                raise
            log.warning("these launches cannot be captured with events inside: events are recorded around graphs")

    def _capture(self, launches: Sequence[Callable[[], None]]) -> None:
        self.drop()
        self._launches = len(launches)
        graph = self._torch.cuda.CUDAGraph()
        # torch.cuda.graph() would collect garbage and empty the allocator's cache: milliseconds each.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            if self.inside:
                self._events[0].record()
            for launch in launches:
                launch()
            if self.inside:
                self._events[1].record()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        self._graph = graph

    def replay(self) -> None:
        """Replays once without timing."""
        self._graph.replay()

    def time(self) -> float:
        """Microseconds per launch of one replay."""
        first, last = self._events
        if self.inside:
            self._graph.replay()
        else:
            self._torch.cuda._sleep(_LEAD_CYCLES)
            first.record()
            self._graph.replay()
            last.record()
        self._torch.cuda.current_stream().synchronize()
        return float(first.elapsed_time(last)) * 1000.0 / self._launches

    def time_once(self, launch: Callable[[], None]) -> float:
        """Microseconds of one launch outside a graph, loading of the binary included."""
        first, last = self._outer
        first.record()
        launch()
        last.record()
        self._torch.cuda.current_stream().synchronize()
        return float(first.elapsed_time(last)) * 1000.0

    def drop(self) -> None:
        """Frees the graph."""
        self._graph = None
        self._launches = 0

    def _make_events(self, **kind: bool) -> tuple[Any, Any]:
        event = self._torch.cuda.Event
        return event(enable_timing=True, **kind), event(enable_timing=True, **kind)

    def _probe(self) -> bool:
        """Whether events inside a graph time what lies between them."""

        def spin() -> None:
            self._torch.cuda._sleep(_PROBE_CYCLES)

        spin()
        self.capture([spin])
        self.time()
        around = self.time()
        try:
            self._events = self._make_events(external=True)
            self.inside = True
            self._capture([spin])
            self.time()
            within = self.time()
        except (RuntimeError, TypeError) as error:
            log.info("no events inside CUDA graphs here (%s): they are recorded around replays", error)
            within = 0.0
        finally:
            self.drop()
        # The clock may have gone up in between; starting a graph is a few µs of `around`.
        if 0.5 * around <= within <= 1.1 * around:
            return True
        self._events = self._outer
        return False
