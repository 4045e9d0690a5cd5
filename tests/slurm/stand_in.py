"""In place of ``snip`` where SLURM, the script and the agent are the test's subject: steps that only sleep.

``launch`` runs the real supervisor (:func:`tools.torchrun.supervise`) over a launcher and a rank that take the
place of torchrun and of Megatron: the launcher ignores the signals that torchrun ignores, the rank has Megatron's
handler, and a checkpoint is the number of a step. The environment variable STAND_IN is JSON:

* ``steps`` of the whole training; ``hold``: whether a step lasts until the ranks are signalled;
* ``evaluate``: seconds of the evaluation after the steps;
* ``fail``: exit code of the rank on the first node, while the rank on the second waits for it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from snip_megatron.megatron.startup import note_exit_code
from snip_megatron.tools import torchrun

HOW = {"steps": 100000, "evaluate": 0, "fail": 0, "hold": False} | json.loads(os.environ.get("STAND_IN", "{}"))
STEP_S, SAVE_S = 0.1, 0.5


def launch(save: Path) -> int:
    command = [sys.executable, __file__, "launcher", "--save", str(save)]
    return torchrun.supervise(command, {}, torchrun.failure_file(save))[0]


def launcher(save: Path) -> int:
    return int(subprocess.run([sys.executable, __file__, torchrun.ENTRY, "--save", str(save)]).returncode != 0)


def rank(save: Path) -> int:
    node, asked = os.environ["SLURM_PROCID"], []
    if HOW["fail"]:  # before Megatron has its handler
        if node == "0":
            time.sleep(1)
            note_exit_code(HOW["fail"])
            return int(HOW["fail"])
        time.sleep(300)
    signal.signal(signal.SIGTERM, lambda *args: asked.append(args))
    meet(save, node)
    print("started", flush=True)

    def save_checkpoint(step: int) -> None:
        time.sleep(SAVE_S)
        if node == "0":
            save.mkdir(exist_ok=True)
            (save / "latest_checkpointed_iteration.txt").write_text(str(step))

    for step in range(saved(save) + 1, HOW["steps"] + 1):
        time.sleep(STEP_S)
        while HOW["hold"] and not asked:
            time.sleep(STEP_S)
        print(f" iteration {step:8d}/", flush=True)
        if asked:
            save_checkpoint(step)
            return 0
    save_checkpoint(HOW["steps"])
    print("evaluating", flush=True)
    until = time.monotonic() + HOW["evaluate"]
    while time.monotonic() < until:
        time.sleep(0.1)
    return 0


def meet(save: Path, node: str) -> None:
    """Wait for the other ranks, as real ones do when they connect."""
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    (save.parent / f"start{start}.rank{node}").touch()
    while len(list(save.parent.glob(f"start{start}.rank*"))) < int(os.environ["SLURM_NNODES"]):
        time.sleep(STEP_S)


def saved(save: Path) -> int:
    file = save / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else 0


def main(words: list[str]) -> int:
    save = Path(words[words.index("--save") + 1])
    parts = {"launcher": launcher, torchrun.ENTRY: rank}
    if words[0] in parts:
        return parts[words[0]](save)
    if "--hardware" in words:
        print(2, 1)
    elif "--progress" in words:
        print(saved(save), HOW["steps"])
    elif not {"--dry-run", "--check"} & set(words):
        return launch(save)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
