"""Inputs that experts keep for their backward, at a tiny size."""

import torch

from benchmarks.layers.experts import TINY, UNIFORM
from benchmarks.layers.experts_steps import Problem, libraries, library_step, snip_step
from snip_megatron.numerics.products.hopper import HopperBackend
from snip_megatron.numerics.quantize import operands, swiglu
from tests.unit.numerics.products import emulated_grouped
from tests.unit.numerics.products.emulated_cublaslt import EmulatedCublasLt


def test_eight_bits_save_at_most_six_tenths_of_the_inputs_of_bf16() -> None:
    (shape,) = TINY.values()
    problem = Problem(shape, "cpu")
    with torch.compiler.set_stance("force_eager"):
        bf16 = problem.saved_inputs(library_step(problem, libraries(problem, "cpu")["torch"]))
        assert bf16 == sum(problem.splits) * (128 + 128) * 2
        problem.context.backend = HopperBackend(
            operands, EmulatedCublasLt(), activations=swiglu, groups=emulated_grouped
        )
        for formats in UNIFORM.values():
            assert problem.saved_inputs(snip_step(problem, formats)) <= 0.6 * bf16
