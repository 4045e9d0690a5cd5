"""Probes: passes that measure statistics between two training steps of Megatron's loop."""
