"""Triton kernels of the quantisers in ``packed.py``. Nothing in this package is imported where Triton cannot run."""
