"""The kinds of faults that end a job."""

import os
import random
import signal
import time
from typing import Any

from faults.injection import Rank
from faults.kind import Kind

TRACKER = "latest_checkpointed_iteration.txt"


class RankKilled(Kind):
    name, group, weight = "rank killed, job started again", "restart", 12

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"rank": rng.randrange(world), "delay_s": rng.uniform(0, 0.15)}

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if step == fault.step and rank.number == fault.params["rank"]:
            self._strike(rank, fault, signal.SIGKILL)

    def _strike(self, rank: Rank, fault: Any, number: int) -> None:
        def strike() -> None:
            rank.note(fault.number, "injected")
            os.kill(os.getpid(), number)

        rank.later(fault.params["delay_s"], strike)


class Preempted(RankKilled):
    """SIGTERM, as SLURM sends before it takes the nodes: Megatron saves and ends (--exit-signal-handler)."""

    name, weight = "SIGTERM (preemption)", 10

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if step == fault.step and rank.number == fault.params["rank"]:
            self._strike(rank, fault, signal.SIGTERM)


class KilledInSave(Kind):
    name, group, weight = "killed while saving", "restart", 12

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"rank": rng.randrange(world), "delay_s": rng.uniform(0, 0.06)}

    def install(self, rank: Rank, fault: Any) -> None:
        import megatron.training.training as training

        genuine = training.save_checkpoint

        def save(iteration: int, *args: Any, **kwargs: Any) -> Any:
            if iteration < fault.step or rank.number != fault.params["rank"]:
                return genuine(iteration, *args, **kwargs)

            def strike() -> None:
                rank.note(fault.number, "injected")
                os.kill(os.getpid(), signal.SIGKILL)

            rank.later(fault.params["delay_s"], strike)
            genuine(iteration, *args, **kwargs)
            return time.sleep(60)  # the save was over first; the signal comes

        training.save_checkpoint = save


class RankKilledUnderTorchrun(RankKilled):
    name, group, weight = "rank killed, torchrun restarts", "launcher", 3

    def at_step(self, rank: Rank, fault: Any, step: int) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            super().at_step(rank, fault, step)


class AgentKilled(Kind):
    """One of two torchrun agents and its rank die; another agent joins. The job runner does it."""

    name, group, weight = "torchrun agent killed, another joins", "launcher", 2

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return {"delay_s": rng.uniform(0, 0.3)}


ENDINGS: tuple[type[Kind], ...] = (
    RankKilled, Preempted, KilledInSave, RankKilledUnderTorchrun, AgentKilled,
)  # fmt: skip
