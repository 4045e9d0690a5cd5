"""Predicted seconds of GEMMs: shapes, cost models, tables of measured times."""
