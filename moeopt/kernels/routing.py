"""Routings: the experts that tokens visit, drawn from a distribution or read from a file.

The same seed gives the same routing on every machine; numpy alone is used (torch only to read ``.pt``).
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from moeopt.core.shape import MoEShape
from moeopt.errors import InvalidInputError

Ids = NDArray[np.int32]

_FORMS: Final = "give uniform, zipf:1.2, dirichlet:0.5 or file:PATH"
_TOKENS_AT_ONCE: Final = 2048


@dataclass(frozen=True)
class Routing:
    """A distribution of tokens over experts. Made by :meth:`parse`.

    Attributes:
        key: Names the distribution in a study's key. A file's key is a hash of its content.
        kind: Where the experts come from.
        parameter: Exponent of zipf, concentration of dirichlet, else 0.
        arrays: The file's top-k ids, one array [tokens, columns] per layer or step.
    """

    key: str
    kind: Literal["uniform", "zipf", "dirichlet", "file"]
    parameter: float = 0.0
    arrays: tuple[Ids, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def parse(cls, text: str) -> Routing:
        """A routing from its name.

        Args:
            text: ``uniform``: every expert is as likely; ``zipf:S``: the i-th most popular expert has a
                weight of i^-S; ``dirichlet:A``: the weights are a draw of a symmetric Dirichlet
                distribution (small A: few experts take most tokens); ``file:PATH``: top-k ids captured
                from a server, ``.npy`` or ``.pt``, [tokens, top_k] or [layers, tokens, top_k], in ``.pt``
                also a list or dict of arrays [tokens, top_k]. Which experts are popular differs from
                draw to draw, as from layer to layer.

        Raises:
            InvalidInputError: The text is none of these, or the file cannot be used.
        """
        kind, _, argument = text.strip().partition(":")
        if kind == "uniform" and not argument:
            return cls("uniform", "uniform")
        if kind == "file" and argument:
            return _from_file(Path(argument).expanduser())
        if kind == "zipf":
            value = _number(text, argument, least=0.0, inclusive=True)
            return cls(f"zipf:{value:g}", "zipf", value)
        if kind == "dirichlet":
            value = _number(text, argument, least=0.0, inclusive=False)
            return cls(f"dirichlet:{value:g}", "dirichlet", value)
        raise InvalidInputError(f"routing {text!r} is unknown: {_FORMS}")

    def draw(self, shape: MoEShape, batch_size: int, count: int, seed: int) -> Ids:
        """Top-k ids of several forward passes.

        A token's routed experts are distinct. It also visits the last ``shape.shared_experts`` experts of
        the shape. With expert parallelism this GPU is the first rank; experts of other ranks become -1.

        Args:
            shape: The layer.
            batch_size: Tokens in one pass, M.
            count: Passes. The first passes are the same whatever the count.
            seed: Of the draws.

        Returns:
            int32 [count, M, top_k], -1 to num_experts - 1.

        Raises:
            InvalidInputError: The shape has too few experts, or the file is not of this shape.
        """
        routed, local = shape.top_k - shape.shared_experts, shape.num_experts - shape.shared_experts
        if routed > local * shape.ep_size:
            raise InvalidInputError(
                f"a token visits {routed} routed experts and there are {local * shape.ep_size}: "
                "check top_k, num_experts, shared_experts and ep_size"
            )
        out = np.empty((count, batch_size, shape.top_k), dtype=np.int32)
        out[:, :, routed:] = np.arange(local, shape.num_experts, dtype=np.int32)
        for index in range(count):
            rng = np.random.default_rng([seed % 2**63, batch_size, index])
            if self.kind == "file":
                read = self._read(shape, rng, batch_size, index)
                out[index, :, : read.shape[1]] = read
                continue
            experts = local * shape.ep_size
            if self.kind == "uniform" and routed**2 <= 2 * experts:
                ids = _choose_evenly(rng, experts, batch_size, routed)
            else:
                ids = _choose(rng, self._log_weights(rng, experts), batch_size, routed)
            out[index, :, :routed] = np.where(ids < local, ids, -1)
        return out

    def _log_weights(self, rng: np.random.Generator, experts: int) -> NDArray[np.float64]:
        if self.kind == "zipf":
            return rng.permutation(-self.parameter * np.log(np.arange(1, experts + 1, dtype=np.float64)))
        if self.kind == "dirichlet":
            # log of Gamma(A) variates, as Gamma(A + 1) * U^(1/A): small A would underflow.
            gamma = np.log(rng.standard_gamma(self.parameter + 1.0, experts))
            return np.asarray(gamma - rng.standard_exponential(experts) / self.parameter, dtype=np.float64)
        return np.zeros(experts)

    def _read(self, shape: MoEShape, rng: np.random.Generator, batch_size: int, index: int) -> Ids:
        """M tokens of one array: neighbours where there are enough, else drawn with replacement."""
        for array in self.arrays:
            _check_fits(array, shape)
        ids = self.arrays[index % len(self.arrays)]
        tokens, columns = ids.shape
        if tokens >= batch_size:
            start = int(rng.integers(tokens - batch_size + 1))
            ids = ids[start : start + batch_size]
        else:
            ids = ids[rng.integers(tokens, size=batch_size)]
        local = shape.num_experts if columns == shape.top_k else shape.num_experts - shape.shared_experts
        return np.where(ids < local, ids, -1).astype(np.int32)


def _choose(rng: np.random.Generator, log_weights: NDArray[np.float64], tokens: int, k: int) -> NDArray[np.int64]:
    """k distinct experts for each token, in order of id, drawn one after the other by weight.

    The k smallest of exponential variates divided by the weights are such a draw.
    """
    out = np.empty((tokens, k), dtype=np.int64)
    for start in range(0, tokens, _TOKENS_AT_ONCE):
        part = out[start : start + _TOKENS_AT_ONCE]
        times = np.log(rng.standard_exponential((len(part), len(log_weights)))) - log_weights
        if 0 < k < len(log_weights):
            part[:] = np.argpartition(times, k - 1, axis=1)[:, :k]
        else:
            part[:] = np.arange(len(log_weights))[:k]
    out.sort(axis=1)
    return out


def _choose_evenly(rng: np.random.Generator, experts: int, tokens: int, k: int) -> NDArray[np.int64]:
    """The same for equal weights: draws k at once, and draws again where two are the same."""
    out = np.sort(rng.integers(experts, size=(tokens, k)), axis=1)
    while (again := np.flatnonzero((out[:, 1:] == out[:, :-1]).any(axis=1))).size:
        out[again] = np.sort(rng.integers(experts, size=(again.size, k)), axis=1)
    return out


def _number(text: str, argument: str, *, least: float, inclusive: bool) -> float:
    try:
        value = float(argument)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least or (value == least and not inclusive):
        bound = "of at least" if inclusive else "greater than"
        raise InvalidInputError(f"routing {text!r} needs a number {bound} {least:g} after the colon: {_FORMS}")
    return value


def _from_file(path: Path) -> Routing:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"routing file {path} cannot be read: {error.strerror or error}") from None
    if path.suffix == ".npy":
        arrays = _numpy_arrays(path, content)
    elif path.suffix == ".pt":
        arrays = _torch_arrays(path, content)
    else:
        raise InvalidInputError(f"routing file {path} has suffix {path.suffix!r}: give a .npy or a .pt file")
    return Routing(f"file:{hashlib.sha256(content).hexdigest()[:16]}", "file", arrays=tuple(_validated(path, arrays)))


def _numpy_arrays(path: Path, content: bytes) -> list[NDArray[Any]]:
    try:
        return [np.asarray(np.load(io.BytesIO(content), allow_pickle=False))]
    except (ValueError, OSError, EOFError) as error:
        raise InvalidInputError(f"routing file {path} is not a .npy file of numbers: {error}") from None


def _torch_arrays(path: Path, content: bytes) -> list[NDArray[Any]]:
    import pickle

    import torch

    try:
        data = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInputError(f"routing file {path} is not a .pt file of tensors: {line}") from None
    items: Iterable[Any] = data.values() if isinstance(data, Mapping) else data
    if isinstance(data, torch.Tensor):
        items = [data]
    elif not isinstance(data, Mapping | list | tuple):
        raise InvalidInputError(
            f"routing file {path} holds a {type(data).__name__}: expected a tensor, or a list or dict of tensors"
        )
    arrays = []
    for item in items:
        if not isinstance(item, torch.Tensor):
            raise InvalidInputError(f"routing file {path} holds a {type(item).__name__}: expected tensors only")
        arrays.append(item.numpy() if item.dtype != torch.bfloat16 else item.float().numpy())
    return arrays


def _validated(path: Path, arrays: list[NDArray[Any]]) -> list[Ids]:
    """One array [tokens, columns] per layer or step."""
    out: list[Ids] = []
    for array in arrays:
        if array.dtype.kind not in "iu":
            raise InvalidInputError(f"routing file {path} holds {array.dtype} values: expected whole numbers")
        if array.ndim not in (2, 3) or 0 in array.shape:
            raise InvalidInputError(
                f"routing file {path} holds an array of shape {array.shape}: "
                "expected (tokens, top_k) or (layers, tokens, top_k)"
            )
        if array.min() < -1 or array.max() > np.iinfo(np.int32).max:
            raise InvalidInputError(
                f"routing file {path} holds expert ids from {array.min()} to {array.max()}: expected -1 or more"
            )
        out.extend(np.ascontiguousarray(part, dtype=np.int32) for part in (array if array.ndim == 3 else array[None]))
    if not out:
        raise InvalidInputError(f"routing file {path} holds no array: expected top-k ids")
    return out


def _check_fits(ids: Ids, shape: MoEShape) -> None:
    routed = shape.top_k - shape.shared_experts
    columns, allowed = ids.shape[1], {routed}
    if shape.ep_size == 1:
        allowed.add(shape.top_k)
    if columns not in allowed:
        raise InvalidInputError(
            f"the routing file has {columns} experts per token: expected "
            f"{' or '.join(str(n) for n in sorted(allowed))}, as the shape's top_k is {shape.top_k}"
            + (f" with {shape.shared_experts} shared" if shape.shared_experts else "")
        )
    experts = (shape.num_experts - shape.shared_experts) * shape.ep_size
    if columns == shape.top_k and shape.ep_size == 1:
        experts = shape.num_experts
    if int(ids.max()) >= experts:
        raise InvalidInputError(
            f"the routing file names expert {int(ids.max())}: the shape has {experts}, numbered from 0"
        )
