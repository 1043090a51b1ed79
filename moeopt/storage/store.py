"""The study database: what was measured, by exact key and cell, as Optuna studies."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from moeopt.core.config import REQUIRED_KEYS
from moeopt.core.trial import Cell, Job
from moeopt.errors import StorageError
from moeopt.files import LockFile
from moeopt.storage.backend import Backend, Packed
from moeopt.storage.codec import StoredTrial, StudyRow, TrialContext, decode
from moeopt.storage.facts import CellFacts, Run
from moeopt.storage.key import StudyKey, cell_of
from moeopt.storage.open import check_new_file, is_there, open_backend
from moeopt.storage.url import StorageUrl
from moeopt.storage.writer import TrialWriter

if TYPE_CHECKING:
    import optuna

__all__ = ["StoredTrial", "StudyKey", "StudyStore", "StudySummary", "TrialWriter"]

_log = logging.getLogger(__name__)
_SWEPT: Final = "left RUNNING by a process that ended"
# None of our rows is ever RUNNING: work that is under way is a claim (storage/claims.py), which goes back in seconds.
# One of plain Optuna's in a shared database may be alive, unless its heartbeat says otherwise.
_STALE_S: Final = 3600.0


@dataclass(frozen=True)
class StudySummary:
    """One key in a database.

    Attributes:
        key: The key.
        cells: Its cells, each with the number of trials of each state (``COMPLETE``, ``PRUNED``, ...).
    """

    key: StudyKey
    cells: Mapping[Cell, Mapping[str, int]]

    @property
    def trials(self) -> int:
        """Trials in all."""
        return sum(sum(states.values()) for states in self.cells.values())


class StudyStore:
    """A study database: one Optuna study per (key, cell).

    Safe to use from one thread; its writer works in another.
    """

    def __init__(self, url: str | Path | Backend, *, create: bool = True) -> None:
        """Opens a database.

        Args:
            url: A path, ``sqlite:///PATH``, ``postgresql://...``, ``mysql://...``, ``journal://PATH``, or a path
                that ends in ``.journal``; or a backend of your own, which :meth:`close` closes.
            create: Whether to make it where it is not there. A file is made when it is first used, so that
                a run that is refused for something else leaves none behind.

        Raises:
            StorageError: It cannot be opened or made; the message has no password.
        """
        self._create = create
        self._opened: Backend | None = None
        if isinstance(url, Backend):
            self._url, self._opened = StorageUrl("other", "", None, type(url).__name__), url
        else:
            self._url = StorageUrl.parse(url)
            if self._url.path is None or not create or is_there(self._url.path):
                self._opened = open_backend(self._url, create=create)
            else:
                check_new_file(self._url)
        self._rows: dict[str, StudyRow] | None = None
        self._locks: dict[str, LockFile] = {}
        self._facts: dict[StudyKey, dict[Cell, CellFacts]] = {}  # replaced, never changed: the writer's thread reads it
        self._writers: list[TrialWriter] = []
        self.in_database: set[Job] = set()  # trials that a shared device has stored: the writers pass over them
        self.timed_elsewhere: set[Job] = set()  # those of them that another process timed

    @property
    def display(self) -> str:
        """Where it is, without a password."""
        return self._url.display

    @property
    def url(self) -> str:
        """What opens it again, password included: never show it."""
        return self._url.url

    @property
    def backend(self) -> Backend:
        """The database behind it; makes the file where there is none."""
        if self._opened is None:
            self._opened = open_backend(self._url, create=self._create)
        return self._opened

    @property
    def shared(self) -> bool:
        """Whether it is a database server, which workers on other machines can join."""
        return self._url.kind == "server"

    @property
    def exclusive(self) -> bool:
        """Whether :meth:`lock` keeps other runs of a key away: it is a database file."""
        return self._url.path is not None

    def lock(self, key: StudyKey, *, wait_s: float = 2.0) -> None:
        """Makes this run the only one of the key in a database file, until :meth:`close`.

        Does nothing for a database server, where runs share the work.

        Raises:
            StorageError: Another run has it.
        """
        path = self._url.path
        if path is None:
            return
        self.backend  # noqa: B018  (makes the directory)
        lock = self._locks.setdefault(key.digest, LockFile(path.with_name(f"{path.name}-{key.digest}.lock")))
        if lock.held:
            return
        try:
            taken = lock.acquire(wait_s)
        except OSError as error:
            raise StorageError(f"cannot write {lock.path} ({error.strerror}): give another --storage") from None
        if not taken:
            pid = lock.holder()
            raise StorageError(
                f"another run{f' (process {pid})' if pid else ''} is tuning {key.title()} in {self.display}: wait for "
                "it to end, or give another --storage"
            )

    def load(self, key: StudyKey, cells: Sequence[Cell]) -> dict[Cell, list[StoredTrial]]:
        """All finished trials of these cells, oldest first, as exactly as they were stored.

        Studies that are not there are created. Trials that were left RUNNING are failed, with a reason:
        where their heartbeat has been silent for a minute; without a heartbeat in a file when the key is
        locked, and on a server when they are an hour old.

        Raises:
            StorageError: The database went away, or a study of this name is of another key.
        """
        ids = self._ensure(key, cells)
        swept = 0
        if not self.exclusive or self._holds(key):
            swept = self.backend.sweep(list(ids.values()), 0.0 if self.exclusive else _STALE_S, _SWEPT)
        packed = self.backend.packed(list(ids.values()))
        if swept:
            _log.warning("%d trials had been left RUNNING by a process that ended: marked as failed", swept)
        return {cell: self._decode(cell, packed[study_id]) for cell, study_id in ids.items()}

    def _holds(self, key: StudyKey) -> bool:
        lock = self._locks.get(key.digest)
        return lock is not None and lock.held

    def _decode(self, cell: Cell, packed: Sequence[Packed]) -> list[StoredTrial]:
        trials = []
        for data, ended in packed:
            try:
                trials.append(decode(cell, data, ended))
            except (KeyError, TypeError, ValueError) as error:
                raise self._unreadable(f"a trial of {cell.role} M={cell.batch_size}", error) from None
        return trials

    def writer(self, key: StudyKey, *, give_up_s: float = 60.0) -> TrialWriter:
        """The writer of a run; locks the key (see :meth:`lock`).

        Args:
            key: Whose trials are stored. Only cells that were loaded can be written.
            give_up_s: How long its ``close`` waits for a database that is away.
        """
        self.lock(key)
        studies = {cell: row.study_id for cell, row in self._cells(key).items()}
        contexts: dict[Cell, TrialContext] = {}

        def context(cell: Cell) -> TrialContext:
            if cell not in contexts:
                contexts[cell] = self.trial_context(key, cell)
            return contexts[cell]

        writer = TrialWriter(self.backend, studies, context, skip=self.in_database, give_up_s=give_up_s)
        self._writers.append(writer)
        return writer

    def cells(self, key: StudyKey) -> tuple[Cell, ...]:
        """The cells of a key that have a study."""
        return tuple(sorted(self._cells(key)))

    def study_ids(self, key: StudyKey) -> dict[int, Cell]:
        """Optuna's ids of the studies of a key."""
        return {row.study_id: cell for cell, row in self._cells(key).items()}

    def require_shared(self) -> None:
        """Raises StorageError where workers cannot join, as the database is a file."""
        if not self.shared:
            raise StorageError(
                f"{self.display} is a file, and workers need a database server: give postgresql://... or mysql://..."
            )

    def trial_context(self, key: StudyKey, cell: Cell) -> TrialContext:
        """What the readable attributes of a cell's trials are computed from: facts kept beside the trials."""
        facts = self.facts(key, cell)
        rooflines = [facts.roofline_us.get(role) for role in cell.roles]
        moved = [facts.launch_bytes.get(role) for role in cell.roles]
        searched = {name for run in self.runs(key) for name in run.params}
        return TrialContext(
            shape=key.shape,
            roofline_us=None if None in rooflines else sum(filter(None, rooflines)),
            launch_bytes=None if None in moved else sum(filter(None, moved)),
            params=(*REQUIRED_KEYS, *sorted(searched - set(REQUIRED_KEYS))),
        )

    def facts(self, key: StudyKey, cell: Cell) -> CellFacts:
        """What :meth:`add_facts` has kept of a cell; empty where nothing was.

        Raises:
            StorageError: It cannot be read.
        """
        return self._facts_of(key).get(cell, CellFacts())

    def runs(self, key: StudyKey) -> list[Run]:
        """All runs of a key.

        Raises:
            StorageError: One of them cannot be read.
        """
        return [run for facts in self._facts_of(key).values() for run in facts.runs.values()]

    def add_facts(self, key: StudyKey, new: Mapping[Cell, CellFacts]) -> None:
        """Keeps facts about cells beside their trials.

        While a writer is open it stores them, before any trial that it is given later.

        Args:
            key: The key.
            new: Facts of each cell; those given replace what was there, others stay.
        """
        attrs = {}
        for cell, facts in new.items():
            known = self.facts(key, cell).encode()
            changed = {name: value for name, value in facts.encode().items() if known.get(name) != value}
            if changed:
                attrs[cell] = changed
        if not attrs:
            return
        ids = self._ensure(key, list(attrs))
        writer = next((w for w in self._writers if not w.closed), None)
        if writer is not None:
            for cell, changed in attrs.items():
                writer.put_attrs(ids[cell], changed)
        else:
            self.backend.set_attrs({ids[cell]: changed for cell, changed in attrs.items()})
        after = {cell: CellFacts.decode({**self.facts(key, cell).encode(), **attrs[cell]}) for cell in attrs}
        self._facts[key] = {**self._facts_of(key), **after}

    def _facts_of(self, key: StudyKey) -> dict[Cell, CellFacts]:
        if key not in self._facts:
            self._facts[key] = {cell: self._decode_facts(cell, row) for cell, row in self._cells(key).items()}
        return self._facts[key]

    def _decode_facts(self, cell: Cell, row: StudyRow) -> CellFacts:
        try:
            return CellFacts.decode(row.attrs)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._unreadable(f"what is kept of {cell.role} M={cell.batch_size}", error) from None

    def _unreadable(self, what: str, error: Exception) -> StorageError:
        return StorageError(
            f"{what} in {self.display} cannot be read ({error!r}): it was written by another version of moeopt"
        )

    def refresh(self) -> None:
        """Forgets what was read of studies and their facts, so that others' writes are seen."""
        self._rows = None
        self._facts.clear()

    def keys(self) -> list[StudySummary]:
        """All keys in the database, sorted by their words, with their cells and the trials of each state."""
        self._rows = None
        counts = self.backend.counts()
        found: dict[StudyKey, dict[Cell, Mapping[str, int]]] = defaultdict(dict)
        for row in self._studies().values():
            key, cell = StudyKey.from_attrs(row.attrs), cell_of(row.attrs)
            if key is not None and cell is not None:
                found[key][cell] = counts.get(row.study_id, {})
        summaries = [StudySummary(key, dict(sorted(cells.items()))) for key, cells in found.items()]
        return sorted(summaries, key=lambda s: (s.key.title(), s.key.mode, s.key.digest))

    def notices(self, key: StudyKey) -> list[str]:
        """One line for each key of the same layer, GPU and mode in the database that is not continued, and why."""
        others = [s for s in self.keys() if s.key != key and s.trials]
        same = [s for s in others if (s.key.shape, s.key.gpu, s.key.mode) == (key.shape, key.gpu, key.mode)]
        return [
            f"{s.trials} trials of {s.key.title()} in {self.display} are not continued: {key.difference(s.key)}"
            for s in same
        ]

    def optuna_study(self, key: StudyKey, cell: Cell) -> optuna.Study:
        """The Optuna study of one cell, for Optuna's own functions.

        Raises:
            StorageError: There is none.
        """
        import optuna

        name = key.study_name(cell)
        if name not in self._studies():
            raise StorageError(f"{self.display} has no study {name!r}: see moeopt status")
        return optuna.load_study(study_name=name, storage=self.backend.storage)

    def close(self) -> None:
        """Stores what its writers hold, lets go of the locks and the database. May be called more than once.

        Raises:
            StorageError: Something could not be stored.
        """
        try:
            for writer in self._writers:
                writer.close()
        finally:
            self._writers.clear()
            for lock in self._locks.values():
                lock.release()
            if self._opened is not None:
                self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _studies(self) -> dict[str, StudyRow]:
        if self._rows is None:
            self._rows = {row.name: row for row in self.backend.studies()}
        return self._rows

    def _cells(self, key: StudyKey) -> dict[Cell, StudyRow]:
        """The studies of a key; an error where one of its names holds another key."""
        out = {}
        for row in self._studies().values():
            cell = cell_of(row.attrs)
            if cell is None or row.name != key.study_name(cell):
                continue
            stored = StudyKey.from_attrs(row.attrs)
            if stored != key:
                what = key.difference(stored) if stored is not None else "its attributes cannot be read"
                raise StorageError(f"study {row.name!r} in {self.display} is of another key: {what}")
            out[cell] = row
        return out

    def _ensure(self, key: StudyKey, cells: Sequence[Cell]) -> dict[Cell, int]:
        known = self._cells(key)
        missing = [cell for cell in cells if cell not in known]
        if missing:
            attrs = key.attrs()
            wanted = {
                key.study_name(cell): {**attrs, "role": cell.role, "batch_size": cell.batch_size} for cell in missing
            }
            ids = self.backend.ensure_studies(wanted)
            rows = self._studies()
            for name, study_id in ids.items():
                rows[name] = StudyRow(study_id, name, wanted[name])
            known = self._cells(key)
        return {cell: known[cell].study_id for cell in cells}
