"""``snip calibrate``: the seconds that GEMMs and quantisations take on the GPU at hand (README.md)."""
