"""How far a job has come: the step of its newest checkpoint, and the step at which the training is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from snip_megatron.launch.arguments import megatron_arguments
from snip_megatron.launch.job import TRACKER, Job


@dataclass(frozen=True)
class Progress:
    """Progress of a job.

    Attributes:
        saved: Step of the newest checkpoint in the folder where checkpoints are saved; 0 without one.
        steps: Steps of the whole training.
    """

    saved: int
    steps: int

    @property
    def finished(self) -> bool:
        """Whether all steps are trained and saved."""
        return self.saved >= self.steps


def progress(job: Job) -> Progress:
    """Return the progress of a job. Arguments after ``--megatron`` override its own, as in Megatron."""
    words = megatron_arguments(job)
    steps, save = _last(words, "--train-iters"), _last(words, "--save")
    assert steps is not None
    assert save is not None
    try:
        saved = int((Path(save) / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no checkpoint, or one that a kill left without a name
        saved = 0
    return Progress(saved, int(steps))


def _last(words: Sequence[str], name: str) -> str | None:
    """Return the last value of an argument, given as ``NAME VALUE`` or as ``NAME=VALUE``."""
    found = None
    for position, word in enumerate(words):
        if word == name and position + 1 < len(words):
            found = words[position + 1]
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found
