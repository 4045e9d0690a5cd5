"""The training entry of ranks that time their GEMMs, by a clock that knows the rate of every format.

Module of warm ranks: ``python -m timed_pretrain``.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Any

from timings import RATES

from snip_megatron.megatron.startup import prepare
from snip_megatron.precision import Format
from snip_megatron.pretrain_gpt import parse_snip_arguments


def main() -> None:
    config = parse_snip_arguments(sys.argv[1:])
    startup = prepare(sys.argv[1:], config.no_compat)
    import torch

    from snip_megatron.megatron import entry, own_times, setup, validate

    class RateClock:
        """Each call takes as long as its format's rate says."""

        device = torch.device("cpu")

        def seconds[Key: Hashable](self, calls: Mapping[Key, Any]) -> dict[Key, float]:
            return {key: 1e-3 / RATES[of(key)] if isinstance(key, tuple) and len(key) == 2 else 1e-5 for key in calls}

    def of(key: Any) -> Format:
        return next(part for part in key if isinstance(part, Format))

    own_times.clock_for = lambda device: RateClock()
    for module in (setup, validate):
        module.check_measurable = lambda config, backend: None
    entry.run(startup)


if __name__ == "__main__":
    main()
