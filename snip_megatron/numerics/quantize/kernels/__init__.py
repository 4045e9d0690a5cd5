"""Triton kernels of the quantisers in ``packed.py``, and how the host launches them.

Triton runs on CUDA, or on a CPU with ``TRITON_INTERPRET=1`` (slow; for tests). Elsewhere only ``listing.py`` and
``replay.py`` of this package are imported.
"""
