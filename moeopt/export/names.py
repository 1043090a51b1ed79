"""Names of the config files that SGLang and vLLM look for.

Rules as of SGLang 0.5.23 (``fused_moe_triton_config.py``) and vLLM 0.33.0 (``fused_moe.py``). A file
whose name differs in one character is never read, and neither engine says more than one warning line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role
from moeopt.engines.names import Engine, check_engine
from moeopt.errors import ExportError, InvalidInputError, UnknownGpuError

# The three editions report three names, so a file tuned on one is not found on another.
RTX_PRO_6000_EDITIONS: Final[tuple[str, ...]] = (
    "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition",
    "NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition",
    "NVIDIA_RTX_PRO_6000_Blackwell_Max-Q_Workstation_Edition",
)
_FAMILIES: Final[tuple[tuple[str, ...], ...]] = (
    RTX_PRO_6000_EDITIONS,
    ("NVIDIA_H200", "NVIDIA_H200_NVL"),
    ("NVIDIA_H20", "NVIDIA_H20-3e"),
    ("NVIDIA_H100_80GB_HBM3", "NVIDIA_H100", "NVIDIA_H100_PCIe", "NVIDIA_H100_NVL"),
    ("NVIDIA_A100-SXM4-80GB", "NVIDIA_A100-SXM4-40GB", "NVIDIA_A100_80GB_PCIe", "NVIDIA_A800-SXM4-80GB"),
)

# dtype of a shape -> dtype=... in the name; bf16 and fp16 have none.
_DTYPE_NAMES: Final[dict[Engine, dict[str, str | None]]] = {
    "sglang": {
        "bf16": None,
        "fp16": None,
        "fp8_w8a8": "fp8_w8a8",
        "int8_w8a8": "int8_w8a8",
        "int8_w8a16": "int8_w8a16",
        "int4_w4a16": "int4_w4a16",
    },
    "vllm": {
        "bf16": None,
        "fp16": None,
        "fp8_w8a8": "fp8_w8a8",
        "int8_w8a8": None,
        "int8_w8a16": "int8_w8a16",
        "int4_w4a16": "int4_w4a16",
    },
}
# What the engines' get_config_dtype_str functions can return.
KNOWN_DTYPES: Final[dict[Engine, frozenset[str | None]]] = {
    "sglang": frozenset({None, "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16", "float32"}),
    "vllm": frozenset({None, "fp8_w8a8", "fp8_w8a16", "int8_w8a16", "int4_w4a16", "float32"}),
}

_NAME: Final = re.compile(
    r"E=(?P<e>\d+),N=(?P<n>\d+),device_name=(?P<device>[^,]+?)"
    r"(?:,dtype=(?P<dtype>[^,]+?))?"
    r"(?:,block_shape=\[(?P<bn>\d+),(?P<space> ?)(?P<bk>\d+)\])?"
    r"(?P<channel>,per_channel_quant=True)?"
    r"(?P<down>_down)?\.json"
)
_RELEASE: Final = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True)
class ConfigName:
    """What the name of a config file says.

    Attributes:
        engine: Whose spelling it has.
        num_experts: E, first dimension of the weights.
        intermediate_size: N as the engine counts it (SGLang's int4: packed, half the elements).
        device: The device name with underscores.
        dtype: The text after ``dtype=``, or None.
        block_shape: (block_n, block_k), or None.
        per_channel: Whether ``per_channel_quant=True`` is there (SGLang).
        down: Whether it is the file of the down projection (SGLang).
    """

    engine: Engine
    num_experts: int
    intermediate_size: int
    device: str
    dtype: str | None = None
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    down: bool = False

    @classmethod
    def of(cls, engine: str, shape: MoEShape, gpu_name: str, role: Role = "up") -> ConfigName:
        """The name that an engine asks for.

        Args:
            engine: ``sglang`` or ``vllm``.
            shape: The layer as one GPU sees it.
            gpu_name: The GPU's name as torch reports it, or as file names have it.
            role: vLLM reads one file for both.

        Raises:
            InvalidInputError: The engine is unknown, or it has no file for such a shape or device name.
        """
        engine = check_engine(engine)
        n = shape.intermediate_size
        if engine == "sglang" and shape.dtype == "int4_w4a16":
            if n % 2:
                raise InvalidInputError(
                    f"intermediate_size {n} is odd: two int4 weights share a byte, so give an even one"
                )
            n //= 2
        return cls(
            engine=engine,
            num_experts=shape.num_experts,
            intermediate_size=n,
            device=device_file_name(engine, gpu_name),
            dtype=_DTYPE_NAMES[engine][shape.dtype],
            block_shape=shape.block_shape,
            per_channel=shape.per_channel and engine == "sglang",
            down=role == "down" and engine == "sglang",
        )

    @classmethod
    def parse(cls, name: str, engine: str | None = None) -> ConfigName:
        """Reads a file name.

        Args:
            name: The name without directories.
            engine: Whose spelling to expect; None takes whichever fits (SGLang where both do).

        Raises:
            InvalidInputError: No engine reads a file of this name; the message says what is wrong.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvalidInputError(
                f"{name!r} is no config file name: expected "
                "E=..,N=..,device_name=..[,dtype=..][,block_shape=[128, 128]][,per_channel_quant=True][_down].json"
            )
        of_sglang = bool(match["channel"] or match["down"] or match["space"])
        of_vllm = bool(match["bn"] and not match["space"])
        if engine is None:
            if match["bn"] and of_vllm and (match["channel"] or match["down"]):
                raise InvalidInputError(f"{name!r} mixes two spellings: SGLang writes a space inside block_shape")
            engine = "vllm" if of_vllm else "sglang"
        engine = check_engine(engine)
        if engine == "sglang" and of_vllm:
            raise InvalidInputError(
                f"{name!r} has no space inside block_shape: SGLang asks for block_shape=[{match['bn']}, {match['bk']}]"
            )
        if engine == "vllm" and of_sglang:
            what = "a space inside block_shape" if match["space"] else "per_channel_quant or _down"
            raise InvalidInputError(f"{name!r} has {what}: vLLM never asks for such a name")
        parsed = cls(
            engine=engine,
            num_experts=int(match["e"]),
            intermediate_size=int(match["n"]),
            device=match["device"],
            dtype=match["dtype"],
            block_shape=(int(match["bn"]), int(match["bk"])) if match["bn"] else None,
            per_channel=bool(match["channel"]),
            down=bool(match["down"]),
        )
        asked = replace(parsed, device=device_file_name(engine, parsed.device))
        if str(asked) != name:
            raise InvalidInputError(f"{name!r} is never asked for: {engine} writes it {str(asked)!r}")
        return parsed

    def __str__(self) -> str:
        text = f"E={self.num_experts},N={self.intermediate_size},device_name={self.device}"
        if self.dtype:
            text += f",dtype={self.dtype}"
        if self.block_shape and all(self.block_shape):
            separator = ", " if self.engine == "sglang" else ","
            text += f",block_shape=[{self.block_shape[0]}{separator}{self.block_shape[1]}]"
        if self.per_channel:
            text += ",per_channel_quant=True"
        return text + ("_down.json" if self.down else ".json")

    def for_role(self, role: Role) -> ConfigName:
        """The name of the other role's file (the same for vLLM)."""
        return replace(self, down=role == "down" and self.engine == "sglang")


def device_file_name(engine: str, gpu_name: str) -> str:
    """The device name as an engine writes it in file names.

    SGLang: spaces become underscores. vLLM: runs of white space and slashes become an underscore, and
    every name with the word H200 becomes ``NVIDIA_H200``.

    Raises:
        InvalidInputError: The name is empty, or cannot be part of a file name.
    """
    engine = check_engine(engine)
    if not gpu_name.strip() or any(c in gpu_name for c in "\0\n\r,"):
        raise InvalidInputError(f"GPU name {gpu_name!r} cannot be in a file name: give it as torch reports it")
    if engine == "vllm":
        name = re.sub(r"[\s/]+", "_", gpu_name)
        return "NVIDIA_H200" if "H200" in name.split("_") else name
    if "/" in gpu_name:
        raise InvalidInputError(f"GPU name {gpu_name!r} has a slash: SGLang would look for a directory of that name")
    return gpu_name.replace(" ", "_")


def full_gpu_name(name: str) -> str:
    """A GPU's name as torch reports it: ``h200`` is NVIDIA H200. A name with its maker stays as it is."""
    if name.replace("_", " ").split(" ")[0].upper() in ("NVIDIA", "AMD", "INTEL(R)"):
        return name
    try:
        return GpuSpec.by_name(name).name
    except UnknownGpuError:
        return name


def device_relatives(device: str) -> tuple[str, ...]:
    """Other device names of the same silicon: another edition, or another spelling of the name.

    Args:
        device: A device name with underscores.
    """
    for family in _FAMILIES:
        if device in family:
            return tuple(name for name in family if name != device)
    return ()


def version_directory(triton_version: str) -> str:
    """SGLang's directory of one Triton version, such as ``triton_3_6_0``.

    Only the numbers of the version are used: a directory whose rest is not numbers makes SGLang's
    loader raise for every file that it has to look for.

    Raises:
        ExportError: The version does not begin with a number.
    """
    match = _RELEASE.match(triton_version)
    if match is None:
        raise ExportError(f"Triton version {triton_version!r} has no number: give one such as 3.6.0")
    return "triton_" + match[0].replace(".", "_")


def parse_version_directory(name: str) -> tuple[int, ...] | None:
    """The Triton version of a directory name, or None where SGLang's loader would not understand it."""
    parts = name.removeprefix("triton_").split("_")
    if not name.startswith("triton_") or not all(p.isascii() and p.isdigit() for p in parts):
        return None
    return tuple(int(p) for p in parts)


def nearest_key(keys: Sequence[int], batch_size: int) -> int:
    """The batch size whose config both engines use: the nearest, of two the first in the file.

    Args:
        keys: Batch sizes in the order of the file, at least one.
        batch_size: Tokens in the forward pass.
    """
    return min(keys, key=lambda key: abs(key - batch_size))
