"""The training entry, counting what an update exchanges and opens: module of warm ranks, with ``COUNTED=<folder>``.

Each rank writes ``rank<k>.json``: ``calls`` (group → [count, bytes], of the first update, without its passes),
``opened`` (paths that SNIP opened at its steps' boundaries), ``decision`` (bytes of the message with the maps),
``forwards`` (number of those that measured them), and on rank 0 ``planned``, what ``snip plan`` says.
"""

import contextlib
import functools
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CALLS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "gather",
    "scatter", "all_to_all_single", "all_gather_object", "gather_object", "broadcast_object_list", "barrier", "send",
    "recv",
)  # fmt: skip
_CODE = (".py", ".pyc", ".so")


class Counter:
    """Counts calls of collectives while ``counts`` is set, and opened files while ``watches`` is."""

    def __init__(self) -> None:
        self.calls: dict[str, list[int]] = {}
        self.opened: set[str] = set()
        self.counts, self.watches = False, False

    def install(self) -> None:
        for name in _CALLS:
            setattr(
                dist, name, functools.wraps(getattr(dist, name))(functools.partial(self._call, getattr(dist, name)))
            )
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def only(self, *, counts: bool) -> Iterator[None]:
        before, self.counts = self.counts, counts
        try:
            yield
        finally:
            self.counts = before

    def _call(self, genuine: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.counts:
            return genuine(*args, **kwargs)
        tensor = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
        entry = self.calls.setdefault(group_name(group), [0, 0])
        entry[0] += 1
        entry[1] += 0 if tensor is None else tensor.numel() * tensor.element_size()
        with self.only(counts=False):  # one call may consist of others
            return genuine(*args, **kwargs)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.watches or event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        path = args[0]
        if isinstance(path, str) and not path.startswith(("/proc/", "/sys/", "/dev/")) and not path.endswith(_CODE):
            self.opened.add(path)


def group_name(group: Any) -> str:
    from megatron.core import parallel_state as state

    groups = {
        "tensor": state.get_tensor_model_parallel_group(),
        "data": state.get_data_parallel_group(with_context_parallel=True),
        "expert tensor": state.get_expert_tensor_parallel_group(),
        "expert data": state.get_expert_data_parallel_group(),
        "embedding": state.get_embedding_group(),
    }
    return "world" if group is None else next(name for name, each in groups.items() if each is group)


def planned(args: Any, registry: Any, config: Any, precision_map: Any) -> Any:
    """Return what ``snip plan`` says of this training."""
    from snip_megatron.megatron.times import layout_of
    from snip_megatron.planner.updates import update_scale

    return update_scale(layout_of(args, registry.rows, config), config, precision_map)


def main() -> int:
    from megatron.training import get_args

    from snip_megatron import pretrain_gpt
    from snip_megatron.megatron.host import MegatronStep
    from snip_megatron.runtime import probe_memory
    from snip_megatron.runtime.controller import Controller
    from snip_megatron.runtime.exchange import MapChannel

    counter, body, number = Counter(), dict[str, Any](forwards=0), os.environ["RANK"]
    counter.install()
    before_step, after_step, schedule = Controller.before_step, Controller.after_step, MegatronStep.schedule
    losses, agree = MegatronStep.losses, MapChannel.agree

    def before(controller: Any, step: int, *args: Any) -> None:
        counter.watches = True
        first = controller.config.first_update
        with counter.only(counts=first <= step <= first + controller.config.lag):
            before_step(controller, step, *args)
        counter.watches = False
        if number == "0" and controller.state.precision_map is not None:
            config = controller.config
            body["planned"] = planned(get_args(), controller.registry, config, controller.state.precision_map)

    def after(*args: Any) -> None:
        counter.watches = True
        after_step(*args)
        counter.watches = False

    def passes(*args: Any, **kwargs: Any) -> None:
        with counter.only(counts=False):
            schedule(*args, **kwargs)

    def forward(step: MegatronStep) -> Any:
        body["forwards"] += 1
        return losses(step)

    def agreed(channel: MapChannel, value: Any) -> Any:
        if value and isinstance(value, tuple):  # the candidates, on rank 0
            body["decision"] = len(pickle.dumps(value))
        return agree(channel, value)

    MegatronStep.losses, MapChannel.agree = forward, agreed  # type: ignore[method-assign]
    Controller.before_step, Controller.after_step = before, after  # type: ignore[method-assign]
    MegatronStep.schedule = passes  # type: ignore[method-assign]
    probe_memory.device_memory = lambda device: probe_memory.FreeMemory(1e12, 0.0, 0.0)
    code = pretrain_gpt.main()
    body |= {"calls": counter.calls, "opened": sorted(counter.opened)}
    Path(os.environ["COUNTED"], f"rank{number}.json").write_text(json.dumps(body))
    return code
