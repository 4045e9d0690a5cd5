"""Launches known configurations with torchrun: Megatron's arguments, signals and resuming."""
