"""The kinds of faults that end a job."""

import os
import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path
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


class CheckpointDamaged(RankKilled):
    """The host dies and takes part of the latest checkpoint with it."""

    name, weight = "latest checkpoint half-written", 8
    MODES = ("no metadata.json", "no .metadata", ".metadata cut", "part cut", "part missing")

    def draw(self, rng: random.Random, world: int) -> dict[str, Any]:
        return super().draw(rng, world) | {"mode": rng.choice(self.MODES)}

    def damage(self, folder: Path, params: Mapping[str, Any]) -> int:
        """Damage the latest checkpoint in ``folder``; the iteration that has to be loaded instead."""
        iterations = sorted(int(path.name[5:]) for path in folder.glob("iter_*") if (path / "metadata.json").exists())
        latest = folder / f"iter_{int((folder / TRACKER).read_text()):07d}"
        part = sorted(latest.glob("*.distcp"))[0]
        match params["mode"]:
            case "no metadata.json":
                (latest / "metadata.json").unlink()
            case "no .metadata":
                (latest / ".metadata").unlink()
            case ".metadata cut":
                os.truncate(latest / ".metadata", (latest / ".metadata").stat().st_size // 2)
            case "part cut":
                os.truncate(part, part.stat().st_size // 2)
            case "part missing":
                part.unlink()
        return max(i for i in iterations if i < int(latest.name[5:]))


class LatestDamaged(CheckpointDamaged):
    name, weight = "`latest` half-written", 8
    MODES = ("empty", "garbage", "names none")

    def damage(self, folder: Path, params: Mapping[str, Any]) -> int:
        tracker = folder / TRACKER
        latest = int(tracker.read_text())
        tracker.write_text({"empty": "", "garbage": "\0\0", "names none": str(latest + 1)}[params["mode"]])
        return latest


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
    RankKilled, Preempted, KilledInSave, CheckpointDamaged, LatestDamaged, RankKilledUnderTorchrun, AgentKilled,
)  # fmt: skip
