"""Triton kernels of the quantisers in ``packed.py``, and how the host launches them.

Where Triton cannot run, only ``listing.py`` and ``replay.py`` of this package are imported.
"""
