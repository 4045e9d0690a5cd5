"""Measurement of GEMMs and quantisations on this GPU."""
