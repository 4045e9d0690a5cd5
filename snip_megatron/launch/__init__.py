"""Launching a known configuration: Megatron's arguments from the planner's model table, torchrun, signals, resume."""
