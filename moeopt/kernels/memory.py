"""GPU memory that a tune needs, computed without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from moeopt.core.shape import ROLES, MoEShape
from moeopt.kernels.work import activation_bytes, expected_visits, expert_bytes, output_bytes
from moeopt.kernels.workset import LAUNCHES, copies_wanted, launches_wanted

# What CUDA, cuBLAS and the binaries take beyond the tensors, and room for random numbers in float32
# while weights are drawn in pieces.
CONTEXT_BYTES: Final = 700 * 2**20
_SCRATCH_BYTES: Final = 768 * 2**20


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of GPU memory.

    Attributes:
        weights: One layer's weights and scales: held once, whatever is tried.
        copies: Copies of them that keep the L2 cache cold (1 unless the whole layer nearly fits in L2);
            fewer are made where memory is short.
        operands: Activations and routings of all batch sizes, several routings each.
        output: The largest output.
        largest_reference: The largest reference result, in float32.
        references: All of them; those that do not fit are computed again when needed.
        scratch: For drawing weights and comparing results.
        context: CUDA's own.
    """

    weights: int
    copies: int
    operands: int
    output: int
    largest_reference: int
    references: int
    scratch: int
    context: int = CONTEXT_BYTES

    @property
    def least(self) -> int:
        """What must be free once the CUDA context is there."""
        return self.weights + self.operands + 2 * self.output + self.largest_reference + self.scratch

    @property
    def total(self) -> int:
        """What is taken where memory is plentiful, the context included."""
        return self.least + self.weights * (self.copies - 1) + self.references - self.largest_reference + self.context

    def refusal(self, gpu: str, free: int, holders: Sequence[str] = ()) -> str:
        """One line: how much is needed and free, and who holds the rest."""
        held = f"; held by {', '.join(holders)}" if holders else ""
        return (
            f"{gpu} has {free / 2**30:.1f} GiB of memory free and {self.least / 2**30:.1f} GiB are needed "
            f"(weights {self.weights / 2**30:.1f}, operands {self.operands / 2**30:.1f}, output and reference "
            f"{(2 * self.output + self.largest_reference) / 2**30:.1f}){held}: free memory, or leave the largest "
            "batch sizes out"
        )

    def to_dict(self) -> dict[str, int]:
        """JSON-ready, ``least`` and ``total`` included."""
        return {**asdict(self), "least": self.least, "total": self.total}


def memory_needed(shape: MoEShape, batch_sizes: Sequence[int], *, l2_bytes: int = 0) -> MemoryNeed:
    """What tuning these batch sizes needs.

    A layer is held whole: with fewer experts in memory than the layer has, several experts would
    share weights, find them in L2, and be timed as faster than they are. So a shape that does not
    fit is refused, with these numbers.

    Args:
        shape: The layer.
        batch_sizes: What will be timed.
        l2_bytes: Size of the L2 cache, or 0 where it may stay warm.
    """
    weights = int(sum(expert_bytes(shape, role) for role in ROLES) * shape.num_experts)
    operands, outputs, references, copies = 0.0, [0], [0], 1
    for m in batch_sizes:
        for role in ROLES:
            pairs, k = m * shape.top_k, shape.reduction(role)
            per_launch = expected_visits(shape, m).experts * expert_bytes(shape, role)
            launches = launches_wanted(shape, role, per_launch, l2_bytes) if l2_bytes else LAUNCHES
            if l2_bytes:
                copies = max(copies, copies_wanted(shape, role, per_launch, launches, l2_bytes))
            tokens = m if role == "up" else pairs
            scales = 4 * tokens * (k / shape.block_shape[1] if shape.block_shape else 1)
            # Ids and routed weights, and alignments for five BLOCK_SIZE_M of up to twice the pairs.
            operands += launches * (activation_bytes(shape, role, tokens) + scales + pairs * (8 + 5 * 2 * 4))
            outputs.append(output_bytes(shape, role, m))
            references.append(4 * pairs * shape.output_rows(role))
    largest = max(references)
    return MemoryNeed(
        weights=weights,
        copies=copies,
        operands=int(operands),
        output=max(outputs),
        largest_reference=largest,
        references=sum(references),
        scratch=_SCRATCH_BYTES + largest,
    )
