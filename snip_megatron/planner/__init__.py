"""Prediction of a configuration's shapes, memory, time and overhead of SNIP, before it is launched (README.md)."""
