"""Retry policy of all calls to a study database."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from moeopt.errors import StorageError

_log = logging.getLogger(__name__)

_FIRST_DELAY_S: Final = 0.1
LAST_DELAY_S: Final = 5.0
# Two processes that make the same row get out of each other's way in a moment.
CONFLICT_S: Final = 5.0


class TransientError(StorageError):
    """The database is away, locked or full: what was not stored may be stored later."""


class ConflictError(TransientError):
    """Another process wrote the same row at the same moment."""


def retrying(give_up_s: float, error: type[TransientError] = TransientError) -> Retrying:
    """Calls a function again, with growing delays, while it raises an error that may pass.

    Args:
        give_up_s: Seconds after which the error is raised all the same.
        error: What may pass.
    """
    return Retrying(
        retry=retry_if_exception_type(error),
        wait=wait_exponential(multiplier=_FIRST_DELAY_S, max=LAST_DELAY_S),
        stop=stop_after_delay(give_up_s),
        before_sleep=saying("trying again"),
        reraise=True,
    )


def saying(what: str) -> Callable[[RetryCallState], None]:
    """Warns once, when the first call has failed; two that write the same row are nothing to warn of."""

    def say(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        if state.attempt_number == 1 and not isinstance(error, ConflictError):
            _log.warning("%s; %s", error, what)

    return say
