"""Run directory, wandb figures and the HTML report. Imports nothing of a host framework."""
