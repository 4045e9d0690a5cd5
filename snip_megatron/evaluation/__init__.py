"""Experiments: policies trained over seeds from one checkpoint, and what their losses say."""
