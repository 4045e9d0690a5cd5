"""How far a job has come: the step of its newest checkpoint, and the step at which the training is finished."""

from __future__ import annotations

from dataclasses import dataclass

from snip_megatron.launch.arguments import megatron_arguments
from snip_megatron.launch.job import TRACKER, Job, last_value


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
    steps = last_value(megatron_arguments(job), "--train-iters")
    assert steps is not None
    try:
        saved = int((job.save / TRACKER).read_text(encoding="ascii"))
    except (OSError, ValueError):  # no checkpoint, or one that a kill left without a name
        saved = 0
    return Progress(saved, int(steps))
