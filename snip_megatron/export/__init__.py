"""Exports of precision maps and checkpoints to the formats of other tools."""
