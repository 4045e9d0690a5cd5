"""SNIP for Megatron: choose, while training, which GEMM of which linear runs in FP4, FP8 or BF16."""

from snip_megatron import deprecated as deprecated

__version__ = "0.1.0"
