"""Scaled GEMM backends."""

BACKENDS = ("auto", "reference", "emulated", "hopper", "transformer_engine")
"""Values of ``--snip-gemm``. ``auto`` selects the fastest backend that runs here and keeps the numbers of the map. On
Blackwell that is ``transformer_engine``: Transformer Engine's linears run the map themselves, and a backend of this
room runs probes and measuring passes."""

EMULATIONS = ("reference", "emulated")  # backends that show what formats do to training, and save no time

LIBRARIES = ("auto", "deepgemm", "cublas")
"""Values of ``gemm_library``, the library that runs fp8 and fp4 products. ``auto``: cuBLASLt, and on Hopper DeepGEMM
for fprop and dgrad if all ranks can load it, with cuBLASLt's bits. ``deepgemm`` raises an error if DeepGEMM cannot be
loaded, ``cublas`` does not use it."""
