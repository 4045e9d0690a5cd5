"""The sums of ``errors.py`` as Triton kernels. Nothing in this package is imported where Triton cannot run."""
