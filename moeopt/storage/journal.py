"""Optuna's journal file: an append-only log, for file systems where SQLite's locks do not work."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final

from optuna.exceptions import DuplicatedStudyError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from moeopt.core.config import PARAMETERS
from moeopt.errors import StorageError
from moeopt.storage.backend import Backend, Packed, TransientError
from moeopt.storage.codec import PACKED, StudyRow, TrialRow, repack, unpack, unpack_all
from moeopt.storage.url import StorageUrl

_log = logging.getLogger(__name__)
_TAIL: Final = 1 << 16


class _BatchingFile(JournalFileBackend):
    """A journal file that can take several records under one lock and one fsync."""

    def __init__(self, path: str) -> None:
        self._mutex = JournalFileSymlinkLock(path)
        super().__init__(path, self._mutex)
        self._batch = threading.local()

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        file: BinaryIO | None = getattr(self._batch, "file", None)
        if file is None:
            super().append_logs(logs)
        else:
            file.write("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())
            file.flush()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Within it this thread's records are appended without an fsync each; at the end there is one."""
        self._mutex.acquire()
        try:
            with Path(self._file_path).open("ab") as self._batch.file:
                yield
                os.fsync(self._batch.file.fileno())
        finally:
            self._batch.file = None
            self._mutex.release()


class JournalBackend(Backend):
    """A journal file."""

    def __init__(self, url: StorageUrl) -> None:
        assert url.path is not None
        self._url = url
        self._path = url.path
        with self._errors():
            repair(self._path)
            self._file = _BatchingFile(str(self._path))
            self._storage = JournalStorage(self._file)

    @property
    def storage(self) -> JournalStorage:
        return self._storage

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise StorageError(
                f"{self._url.display} cannot be written ({error.strerror}): give a --storage that can"
            ) from None
        except OSError as error:
            raise TransientError(f"the journal {self._url.display} cannot be used now: {error.strerror}") from None
        except (ValueError, KeyError, AssertionError) as error:
            raise StorageError(f"{self._url.display} is not an Optuna journal ({error}): move it away") from None

    def studies(self) -> list[StudyRow]:
        with self._errors():
            studies = self._storage.get_all_studies()
        return [StudyRow(s._study_id, s.study_name, unpack_all(s.user_attrs)) for s in studies]

    def ensure_studies(self, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        ids = {study.name: study.study_id for study in self.studies() if study.name in wanted}
        missing = [name for name in wanted if name not in ids]
        for name in missing:
            with self._errors():
                try:
                    ids[name] = self._storage.create_new_study([StudyDirection.MINIMIZE], name)
                except DuplicatedStudyError:
                    ids[name] = self._storage.get_study_id_from_name(name)
        self.set_attrs({ids[name]: wanted[name] for name in missing})
        return ids

    def set_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        with self._errors(), self._file.batch():
            for study_id, values in attrs.items():
                there = self._storage.get_study_user_attrs(study_id)
                for key, whole in values.items():
                    for part, value in repack(key, whole, there).items():
                        self._storage.set_study_user_attr(study_id, part, value)

    def set_system_attrs(self, attrs: Mapping[int, Mapping[str, Any]]) -> None:
        with self._errors(), self._file.batch():
            for study_id, values in attrs.items():
                for key, value in values.items():
                    self._storage.set_study_system_attr(study_id, key, value)

    def add_trials(self, rows: Sequence[tuple[int, TrialRow]], *, retry: bool = False) -> None:
        if retry:
            with self._errors():
                repair(self._path)
            there = {study_id: self._packed_attrs(study_id) for study_id in {study_id for study_id, _ in rows}}
            rows = [(s, row) for s, row in rows if _packed_part(row.user_attrs) not in there[s]]
        with self._errors(), self._file.batch():
            for study_id, row in rows:
                self._storage.create_new_trial(study_id, _frozen(row))

    def _packed_attrs(self, study_id: int) -> list[dict[str, Any]]:
        with self._errors():
            trials = self._storage.get_all_trials(study_id, deepcopy=False)
        return [_packed_part(trial.user_attrs) for trial in trials]

    def packed(self, study_ids: Sequence[int]) -> dict[int, list[Packed]]:
        out: dict[int, list[Packed]] = {}
        for study_id in study_ids:
            with self._errors():
                trials = self._storage.get_all_trials(
                    study_id, deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)
                )
            found = ((unpack(PACKED, _packed_part(trial.user_attrs)), trial) for trial in trials)
            out[study_id] = [
                (value, _naive(trial.datetime_complete)) for value, trial in found if isinstance(value, dict)
            ]
        return out

    def counts(self) -> dict[int, dict[str, int]]:
        out = {}
        with self._errors():
            for study in self._storage.get_all_studies():
                trials = self._storage.get_all_trials(study._study_id, deepcopy=False)
                out[study._study_id] = dict(Counter(trial.state.name for trial in trials))
        return out

    def sweep(self, study_ids: Sequence[int], older_than_s: float, reason: str) -> int:
        before = datetime.now() - timedelta(seconds=older_than_s)
        swept = 0
        with self._errors():
            for study_id in study_ids:
                for trial in self._storage.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,)):
                    start = _naive(trial.datetime_start)
                    if start is None or start <= before:
                        self._storage.set_trial_user_attr(trial._trial_id, "reason", reason)
                        self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                        swept += 1
        return swept

    def close(self) -> None:
        pass


def _packed_part(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attrs.items() if key == PACKED or key.startswith(PACKED + ".")}


def _naive(when: datetime | None) -> datetime | None:
    """Local time without a zone, as Optuna's versions differ in what they give."""
    return when if when is None or when.tzinfo is None else when.astimezone().replace(tzinfo=None)


def _frozen(row: TrialRow) -> FrozenTrial:
    trial = create_trial(
        state=TrialState[row.state],
        value=row.value,
        params=dict(row.params),
        distributions={name: PARAMETERS[name].distribution(value) for name, value in row.params.items()},
        user_attrs=dict(row.user_attrs),
        system_attrs={"constraints": [row.constraint]},
        intermediate_values=dict(enumerate(row.rounds)),
    )
    trial.datetime_start, trial.datetime_complete = row.start, row.complete
    return trial


def repair(path: Path) -> int:
    """Cuts a journal back to its last whole line; returns the bytes cut.

    A process killed in the middle of a write leaves half a line. The next append would join it,
    and the journal could never be read again.

    Raises:
        OSError: The file cannot be read or written.
    """
    if not path.exists() or path.stat().st_size == 0 or _ends_whole(path):
        return 0
    lock = JournalFileSymlinkLock(str(path))
    lock.acquire()
    try:
        if _ends_whole(path):  # the half line was another process's write under way
            return 0
        with path.open("r+b") as file:
            size = end = file.seek(0, os.SEEK_END)
            keep = 0
            while end > 0 and keep == 0:
                start = max(0, end - _TAIL)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                keep = start + newline + 1 if newline >= 0 else 0
                end = start
            file.seek(0)
            if keep == 0 and file.read(1) != b"{":
                raise StorageError(f"{path} is not an Optuna journal: move it away, or give another --storage")
            file.truncate(keep)
            os.fsync(file.fileno())
    finally:
        lock.release()
    _log.warning("%s: cut %d bytes of a line that was not written to its end", path, size - keep)
    return size - keep


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
