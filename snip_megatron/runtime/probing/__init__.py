"""Probes: passes over the first microbatches of a step that measure statistics and leave the training unchanged."""
