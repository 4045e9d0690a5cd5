"""Scaled GEMM backends."""
