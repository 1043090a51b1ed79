"""Names that docstrings refer to, as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|attr|data|mod|exc):`~?(?:moeopt\.)?([^`]+)`")


class Roles(griffe.Extension):
    """Turns the roles of docstrings, such as ``:class:`Device```, into code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with each object once it is read."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
