"""Result of a tune."""

from __future__ import annotations

import os
import weakref
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moeopt.core.shape import Role
from moeopt.core.trial import Cell
from moeopt.errors import InvalidInputError
from moeopt.tuning.outcome import Outcome

if TYPE_CHECKING:
    import optuna


class TuneResult(Outcome):
    """The best configs of a shape, per batch size: to look at, to export, to open in Optuna, to draw."""

    @classmethod
    def of(cls, outcome: Outcome) -> TuneResult:
        """The outcome of a tune, or of a database that was read, with what can be done with it."""
        return cls(**{field.name: getattr(outcome, field.name) for field in fields(outcome)})

    def export(self, engine: str, directory: str | os.PathLike[str], *, replace: bool = False) -> list[Path]:
        """Writes the config files that an engine reads.

        Args:
            engine: ``sglang`` or ``vllm``. vLLM has one config for both projections: of a split tune
                it gets the best that was timed for both; a tune in joint mode looks for a better one.
            directory: SGLang: what ``SGLANG_MOE_CONFIG_DIR`` names; vLLM: ``VLLM_TUNED_CONFIG_FOLDER``.
            replace: Drop what an existing file holds for other batch sizes, instead of merging.

        Returns:
            The written paths.

        Raises:
            ExportError: The directory cannot be written, or an existing file cannot be merged.
        """
        from moeopt.export import export_configs

        table = self.configs_for(engine)
        return export_configs(engine, Path(directory), self.shape, self.gpu, self.info.triton, table, replace=replace)

    def study(self, role: Role | Literal["joint"], batch_size: int) -> optuna.Study:
        """The Optuna study of one (role, batch size): Optuna's own functions work on it.

        Its connection to the database is closed with it: when nothing refers to it any more, or at exit.

        Raises:
            InvalidInputError: The result has no study database, or the cell was not tuned.
        """
        from moeopt.storage.store import StudyStore

        if not self.storage or self.key is None:
            raise InvalidInputError("this result has no study database: tune with a storage to keep one")
        self.best(batch_size)
        store = StudyStore(self.storage, create=False)
        try:
            study = store.optuna_study(self.key, Cell(role, batch_size))
        except BaseException:
            store.close()
            raise
        weakref.finalize(study, store.close)
        return study

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes a self-contained HTML page with plots.

        Raises:
            ExportError: The file cannot be written.
        """
        from moeopt.report.html import write_report

        return write_report(self, Path(path))
