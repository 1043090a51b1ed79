"""GPUs and their limits: a table by name, and detection of what is present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Final

from msgspec import Meta

from moeopt.core.architecture import Architecture, architecture_of
from moeopt.core.fields import Rate, Size, check_fields
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
        """A GPU from a recording's header: unknown fields are taken from the table by name.

        Raises:
            UnknownGpuError: The mapping is not complete and the name is not in the table.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(data, Mapping):
            raise InvalidInputError(f"gpu is {data!r}: a mapping of its fields is expected")
        values = {name: value for name, value in data.items() if name in known}
        base = GPUS.get(_key(str(values.get("name", ""))))
        if base is not None:
            values = {**asdict(base), **values}
        missing = [name for name in known if name not in values and name not in _OPTIONAL]
        if missing:
            raise UnknownGpuError(
                f"GPU {values.get('name')!r} is not in the table and {missing[0]!r} is not given: "
                f"known GPUs are {', '.join(sorted({g.name for g in GPUS.values()}))}"
            )
        return cls(**values)

    @classmethod
    def by_name(cls, name: str) -> GpuSpec:
        """A GPU of the table. Case and the NVIDIA prefix do not matter.

        Raises:
            UnknownGpuError: The table has no such GPU.
        """
        spec = GPUS.get(_key(name))
        if spec is None:
            raise UnknownGpuError(
                f"GPU {name!r} is unknown: known GPUs are {', '.join(sorted({g.name for g in GPUS.values()}))}"
            )
        return spec

    @classmethod
    def named(cls, name: str | None) -> GpuSpec:
        """The GPU here that ``cuda:N`` names (the first: None, ``cuda``, ``auto``, ``all``), or one of the table.

        Raises:
            DeviceError: torch finds no such GPU.
            UnknownGpuError: The table has no such GPU.
        """
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
        known = GPUS.get(_key(p.name))
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
            bandwidth_gbps=known.bandwidth_gbps if known else 0.0,
            bf16_tflops=known.bf16_tflops if known else 0.0,
            fp8_tflops=known.fp8_tflops if known else 0.0,
            int8_tops=known.int8_tops if known else 0.0,
            unified_memory=bool(getattr(p, "is_integrated", False)),
        )


def cuda_index(name: str) -> int | None:
    """The index that ``cuda:1`` names, 0 for ``cuda`` and ``auto``; None for anything else."""
    kind, _, index = name.partition(":")
    if name in ("auto", "cuda"):
        return 0
    return int(index) if kind == "cuda" and index.isdigit() else None


_OPTIONAL: Final = ("fp8_tflops", "int8_tops", "unified_memory")


def _key(name: str) -> str:
    words = name.lower().replace("_", " ").split()
    return " ".join(w for w in words if w not in ("nvidia", "geforce"))


def _table() -> dict[str, GpuSpec]:
    kib, mib, gib = 1024, 1024**2, 1024**3
    pro = "NVIDIA RTX PRO 6000 Blackwell"
    # name, capability, SMs, KiB shared per block and per SM, warps per SM, MiB L2, GiB, GB/s,
    # dense TFLOP/s of bf16 and fp8, TOP/s of int8 (vendor's data sheets; unified memory last). With fp32
    # accumulation, which GeForce cards do at half the rate. RTX PRO 6000: 188 SMs x 1,024 FLOP x boost
    # clock (2.43, 2.617, 2.28 GHz). GB10: a half and a quarter of its dense FP4 rate, the only one published.
    rows: list[tuple[Any, ...]] = [
        (f"{pro} Server Edition", (12, 0), 188, 99, 100, 48, 128, 96, 1597, 468, 936, 936),
        (f"{pro} Workstation Edition", (12, 0), 188, 99, 100, 48, 128, 96, 1792, 504, 1008, 1008),
        (f"{pro} Max-Q Workstation Edition", (12, 0), 188, 99, 100, 48, 128, 96, 1792, 439, 878, 878),
        ("NVIDIA GeForce RTX 5090", (12, 0), 170, 99, 100, 48, 96, 32, 1792, 210, 419, 838),
        ("NVIDIA GB10", (12, 1), 48, 99, 100, 48, 24, 128, 273, 125, 250, 250, True),
        ("NVIDIA B200", (10, 0), 148, 227, 228, 64, 126, 180, 7700, 2250, 4500, 4500),
        ("NVIDIA H200", (9, 0), 132, 227, 228, 64, 60, 141, 4800, 989, 1979, 1979),
        ("NVIDIA H200 NVL", (9, 0), 132, 227, 228, 64, 60, 141, 4800, 835, 1671, 1671),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, 227, 228, 64, 50, 80, 3350, 989, 1979, 1979),
        ("NVIDIA H20", (9, 0), 78, 227, 228, 64, 60, 96, 4000, 148, 296, 296),
        ("NVIDIA H20-3e", (9, 0), 78, 227, 228, 64, 60, 141, 4917, 148, 296, 296),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, 164, 64, 40, 80, 2039, 312, 0, 624),
        ("NVIDIA L40S", (8, 9), 142, 99, 100, 48, 96, 48, 864, 362, 733, 733),
        ("NVIDIA GeForce RTX 4090", (8, 9), 128, 99, 100, 48, 72, 24, 1008, 165, 330, 660),
    ]  # fmt: skip
    table = {}
    for name, cap, sms, block, per_sm, warps, l2, mem, *rates in rows:
        sizes = block * kib, per_sm * kib, 65536, warps, l2 * mib, mem * gib
        table[_key(name)] = GpuSpec(name, cap, sms, *sizes, *rates)
    for alias, name in (("h100", "h100 80gb hbm3"), ("a100", "a100-sxm4-80gb")):
        table[alias] = table[name]
    return table


GPUS: Final[Mapping[str, GpuSpec]] = _table()
