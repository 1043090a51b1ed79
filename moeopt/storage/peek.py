"""A look into a SQLite file that changes nothing in it, whoever made it."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_OURS: Final = re.compile(r"(.+) \| (?:up|down|joint) \| M=\d+ \| [0-9a-f]{6}")
_TRIALS: Final = """SELECT study_name, COUNT(trial_id) FROM studies LEFT JOIN trials USING (study_id)
    GROUP BY study_id ORDER BY study_id"""
_OPEN_RUNS: Final = """SELECT COUNT(*) FROM study_user_attributes
    WHERE "key" LIKE 'run:%' AND value_json LIKE '%"finished": false%'"""


@dataclass(frozen=True)
class Peek:
    """What a database file holds.

    Attributes:
        titles: Of the keys of its studies that have trials: shape, GPU, kernel and Triton in words.
        trials: Trials of these studies.
        open_runs: Runs that have not come to their end.
    """

    titles: tuple[str, ...]
    trials: int
    open_runs: int


def peek(path: Path) -> Peek | None:
    """What a study database holds; None where the file is none of ours, or cannot be read.

    Args:
        path: Of a file; anything but an SQLite database that Optuna made is passed over.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as connection:
            rows = connection.execute(_TRIALS).fetchall()
            (open_runs,) = connection.execute(_OPEN_RUNS).fetchone()
    except sqlite3.Error:
        return None
    ours = [(match[1], trials) for name, trials in rows if (match := _OURS.fullmatch(name)) and trials]
    if not ours:
        return None
    return Peek(tuple(dict.fromkeys(title for title, _ in ours)), sum(trials for _, trials in ours), open_runs)
