"""SNIP for Megatron: choose, while training, which GEMM of which linear runs in FP4, FP8 or BF16."""

__version__ = "0.1.0"
