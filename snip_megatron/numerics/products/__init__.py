"""Scaled GEMM backends."""

BACKENDS = ("auto", "reference", "emulated", "hopper", "transformer_engine")
"""Values of ``--snip-gemm``. ``auto`` selects the fastest backend that runs here and keeps the numbers of the map.
With ``transformer_engine``, which ``auto`` is on Blackwell, Transformer Engine's linears run the map themselves. Probes
and measuring passes then use a backend of this room."""

EMULATIONS = ("reference", "emulated")
"""Backends that show what formats do to training, and save no time."""

LIBRARIES = ("auto", "cublas")
"""Values of ``gemm_library``: the library that runs fp8 and fp4 products on Hopper. DeepGEMM runs fprop
and dgrad where it is installed, with cuBLASLt's bits; ``cublas``: it does not."""
