"""The training entry on ranks of which the second has a fault of the benchmark's catalogue: ``PLANT`` at ``LINEAR``."""

import os

from benchmarks.quality import blame_bugs
from benchmarks.quality.blame_sites import Site, note_linears
from snip_megatron import pretrain_gpt


def main() -> int:
    """Plant the fault, and train."""
    note_linears()
    plant = getattr(blame_bugs, os.environ["PLANT"])
    plant(Site(os.environ["LINEAR"], rank=1, expert=int(os.environ.get("EXPERT", "0"))))
    return pretrain_gpt.main()
