"""GPUs and their limits: by name, by hand, or as torch finds them here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Final

from msgspec import Meta

from moeopt.core.architecture import Architecture, architecture_of
from moeopt.core.fields import Rate, Size, check_fields, checked
from moeopt.core.gpu_by_hand import EXAMPLE, is_by_hand, read_by_hand
from moeopt.core.gpu_names import name_key, names_like, part_of
from moeopt.core.gpu_table import ALIASES, MIG_MULTIPROCESSORS, ROWS
from moeopt.errors import DeviceError, InvalidInputError, UnknownGpuError


@dataclass(frozen=True)
class GpuSpec:
    """What a launch config may use on a GPU, and how fast the GPU is at best.

    Attributes:
        name: The name that torch and the driver report.
        compute_capability: (major, minor).
        multiprocessors: Number of streaming multiprocessors.
        shared_memory_per_block_optin: Bytes of shared memory one block may ask for.
        shared_memory_per_multiprocessor: Bytes of shared memory of a multiprocessor.
        registers_per_multiprocessor: 32-bit registers of a multiprocessor.
        warps_per_multiprocessor: Most resident warps.
        l2_bytes: Size of the L2 cache.
        memory_bytes: Size of the GPU's memory.
        bandwidth_gbps: Memory bandwidth of the data sheet in GB/s.
        bf16_tflops: Dense bf16 tensor-core rate of the data sheet, without sparsity.
        fp8_tflops: The same for fp8; 0 where the GPU has no fp8 tensor cores.
        int8_tops: The same for int8.
        unified_memory: Whether the GPU shares the host's memory.
    """

    name: str
    compute_capability: Annotated[tuple[Size, Size], Meta(description="two numbers such as [9, 0]")]
    multiprocessors: Size
    shared_memory_per_block_optin: Size
    shared_memory_per_multiprocessor: Size
    registers_per_multiprocessor: Size
    warps_per_multiprocessor: Size
    l2_bytes: Size
    memory_bytes: Size
    bandwidth_gbps: Rate
    bf16_tflops: Rate
    fp8_tflops: Rate = 0.0
    int8_tops: Rate = 0.0
    unified_memory: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def sm(self) -> int:
        """Compute capability as one number, such as 90 or 120."""
        return self.compute_capability[0] * 10 + self.compute_capability[1]

    @property
    def architecture(self) -> Architecture:
        """What GPUs of its compute capability have in common."""
        return architecture_of(self.compute_capability)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping."""
        return {**asdict(self), "compute_capability": list(self.compute_capability)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GpuSpec:
        """A GPU from a recording's header or a description by hand: unknown keys do not count.

        What is not given is as the compute capability has it, or the table by the name or by ``like``.

        Raises:
            UnknownGpuError: The mapping is not complete and the name is not in the table.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(data, Mapping):
            raise InvalidInputError(f"gpu is {data!r}: a mapping of its fields is expected")
        values = {name: value for name, value in data.items() if name in known}
        name = str(values.get("name", ""))
        base = GPUS.get(name_key(name))
        like = asdict(base) if base is not None else _part(name, _count(values.get("multiprocessors"))) or {}
        if data.get("like") is not None:
            like = asdict(cls.by_name(str(data["like"])))
        values = {**_of_architecture(values.get("compute_capability")), **like, **values}
        missing = [key for key in known if key not in values and key not in _OPTIONAL]
        if missing:
            raise UnknownGpuError(
                f"GPU {values.get('name')!r} is not in the table and {missing[0]!r} is not given: give it, as in "
                f"{EXAMPLE}"
            )
        return cls(**values)

    @classmethod
    def by_name(cls, name: str) -> GpuSpec:
        """A GPU of the table, or a MIG instance or virtual GPU of one. Case and the NVIDIA prefix do not matter.

        Raises:
            UnknownGpuError: The table has no such GPU, or not how many multiprocessors such an instance has.
        """
        if (spec := GPUS.get(name_key(name))) is not None:
            return spec
        part = _part(name)
        if part is None or "multiprocessors" not in part:
            raise UnknownGpuError(_unknown(name))
        return cls(**part)

    @classmethod
    def named(cls, name: str | None) -> GpuSpec:
        """The GPU that a text names or describes.

        Args:
            name: ``cuda:N`` for one here (the first: None, ``cuda``, ``auto``, ``all``), a name of the table, or a
                description by hand: a TOML file, or ``key=value,...`` with the fields of this class. Shared memory,
                registers and warps may be left out where the compute capability is known, sizes may have a unit as
                in ``96MiB``, and ``like`` names a GPU that has whatever is not given.

        Raises:
            DeviceError: torch finds no such GPU.
            InvalidInputError: The description cannot be used.
            UnknownGpuError: The table has no such GPU, or the description is not complete.
        """
        if name is not None and is_by_hand(name):
            return cls.from_dict(read_by_hand(name, [field.name for field in fields(cls)]))
        index = 0 if name in (None, "all") else cuda_index(str(name))
        return cls.by_name(str(name)) if index is None else cls.detect(index)

    @classmethod
    def detect(cls, index: int = 0) -> GpuSpec:
        """The CUDA GPU with this index; rates that the driver does not report are from the table.

        Raises:
            DeviceError: torch finds no such GPU.
        """
        import torch

        if not torch.cuda.is_available():
            raise DeviceError(
                "no CUDA GPU was found: use a GPU machine, or replay a recording with --gpu recorded:FILE"
            )
        if index >= torch.cuda.device_count():
            raise DeviceError(f"cuda:{index} was asked for and {torch.cuda.device_count()} GPUs are visible")
        p: Any = torch.cuda.get_device_properties(index)  # the stubs lack some of its fields
        major, minor = torch.cuda.get_device_capability(index)
        base = GPUS.get(name_key(p.name))
        known = asdict(base) if base is not None else _part(p.name, p.multi_processor_count) or {}
        return cls(
            name=p.name,
            compute_capability=(major, minor),
            multiprocessors=p.multi_processor_count,
            shared_memory_per_block_optin=p.shared_memory_per_block_optin,
            shared_memory_per_multiprocessor=p.shared_memory_per_multiprocessor,
            registers_per_multiprocessor=p.regs_per_multiprocessor,
            warps_per_multiprocessor=p.max_threads_per_multi_processor // p.warp_size,
            l2_bytes=p.L2_cache_size,
            memory_bytes=p.total_memory,
            **{rate: known.get(rate, 0.0) for rate in _RATES},
            unified_memory=bool(getattr(p, "is_integrated", False)),
        )


def cuda_index(name: str) -> int | None:
    """The index that ``cuda:1`` names, 0 for ``cuda`` and ``auto``; None for anything else."""
    kind, _, index = name.partition(":")
    if name in ("auto", "cuda"):
        return 0
    return int(index) if kind == "cuda" and index.isdigit() else None


def _count(given: Any) -> int | None:
    return given if isinstance(given, int) and not isinstance(given, bool) else None


_OPTIONAL: Final = ("fp8_tflops", "int8_tops", "unified_memory")
_RATES: Final = ("bandwidth_gbps", "bf16_tflops", "fp8_tflops", "int8_tops")
_REGISTERS: Final = 65536


def _of_architecture(capability: Any) -> dict[str, Any]:
    """What all GPUs of a compute capability have, as far as it is known."""
    try:
        architecture = architecture_of(checked(capability, tuple[int, int], "compute_capability"))
    except InvalidInputError:
        return {}  # the field's own check says so
    out: dict[str, Any] = {"registers_per_multiprocessor": _REGISTERS}
    if architecture.shared_kib is not None and architecture.warps is not None:
        block, multiprocessor = (kib * 1024 for kib in architecture.shared_kib)
        out["shared_memory_per_block_optin"] = block
        out["shared_memory_per_multiprocessor"] = multiprocessor
        out["warps_per_multiprocessor"] = architecture.warps
    return out


def _table() -> dict[str, GpuSpec]:
    table = {}
    for name, capability, multiprocessors, l2, memory, *rates in ROWS:
        table[name_key(name)] = GpuSpec(
            name,
            capability,
            multiprocessors,
            **_of_architecture(capability),
            l2_bytes=l2 * 1024**2,
            memory_bytes=memory * 1024**3,
            **dict(zip((*_RATES, "unified_memory"), rates, strict=False)),
        )
    return table | {alias: table[name_key(name)] for alias, name in ALIASES.items()}


GPUS: Final[Mapping[str, GpuSpec]] = _table()


def _part(name: str, multiprocessors: int | None = None) -> dict[str, Any] | None:
    """What is known of a MIG instance or virtual GPU of a GPU of the table; None where the name is of neither.

    A MIG instance has a share of L2 and bandwidth as of the memory, and rates by its multiprocessors.

    Args:
        name: As the driver reports it.
        multiprocessors: Of the part; None for what is known of such a one, without which it has no rates.
    """
    part = part_of(name)
    board = GPUS.get(name_key(part.board)) if part is not None else None
    if part is None or board is None:
        return None
    known = {**asdict(board), "name": " ".join(name.replace("_", " ").split())}
    if part.slices is None:
        return {**known, "memory_bytes": min(part.gib * 1024**3, board.memory_bytes)}
    sizes = MIG_MULTIPROCESSORS.get(board.name, {})
    count = max((memory for _, memory in sizes), default=8)
    memory = max(1, min(count, round(count * part.gib * 1024**3 / board.memory_bytes)))
    share = memory / count
    known |= {key: int(known[key] * share) for key in ("l2_bytes", "memory_bytes")}
    known["bandwidth_gbps"] *= share
    del known["multiprocessors"]
    if multiprocessors is None and part.whole_instance:
        multiprocessors = sizes.get((part.slices, memory))
    if multiprocessors is not None:
        known["multiprocessors"] = multiprocessors
        known |= {rate: known[rate] * multiprocessors / board.multiprocessors for rate in _RATES[1:]}
    return known


def _unknown(name: str) -> str:
    """One line for a name that the table does not have: what may have been meant, and what to do."""
    by_hand = f"describe it by hand, --gpu {EXAMPLE}"
    part = part_of(name)
    if part is not None and name_key(part.board) in GPUS:
        return (
            f"{name!r} is a part of {GPUS[name_key(part.board)].name} whose multiprocessors are not known: add them, "
            f'--gpu "name={name},multiprocessors=N" (nvidia-smi mig -lgip shows them)'
        )
    known = list(dict.fromkeys(gpu.name for gpu in GPUS.values()))
    if like := names_like(part.board if part is not None else name, known):
        return f"GPU {name!r} is unknown: did you mean {' or '.join(like)}? Else {by_hand}"
    return f"GPU {name!r} is unknown: known GPUs are {', '.join(sorted(known))}; {by_hand}"
