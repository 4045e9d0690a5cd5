"""The shape of a linear as one rank runs it in a training step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The size of a linear as one rank runs it in one training step.

    Attributes:
        tokens: tokens of one microbatch, after the all-gather of sequence parallelism.
        n, k: rows and columns of the rank's shard of W, its output and input features.
        microbatches: how often the rank runs such a GEMM in a step: microbatches of a step, times its experts.
        gathered: whether X is gathered from token shards (column-parallel linears under sequence parallelism). fprop
            and wgrad then quantise it separately.
        forwards: 2 if activations are recomputed in the backward, else 1.
        fused_accumulation: whether Megatron's own linear, which runs where all GEMMs are bf16, adds ∇W to ``main_grad``
            in its GEMM. Otherwise it writes ∇W in bf16 and adds it in another kernel.
        matrices: W of so many experts. Each is quantised once a step.
        grouped: whether a GEMM of all these experts is one grouped GEMM. ``tokens`` is the mean over experts.
        fused: the operand that is quantised with SwiGLU, in a grouped linear whose wgrad is in bf16: ``input`` if
            SwiGLU makes X, ``gradient`` if its gradient makes G; None for neither.
    """

    tokens: int
    n: int
    k: int
    microbatches: int = 1
    gathered: bool = False
    forwards: int = 1
    fused_accumulation: bool = True
    matrices: int = 1
    grouped: bool = False
    fused: str | None = None

    @property
    def group(self) -> tuple[int, int, int, int]:
        """The size of a grouped GEMM: number of experts, tokens of all experts, n, k."""
        return self.matrices, self.matrices * self.tokens, self.n, self.k

    @property
    def flops(self) -> float:
        """FLOPs of one GEMM in one microbatch. The three GEMMs have equal FLOPs."""
        return 2.0 * self.tokens * self.n * self.k
