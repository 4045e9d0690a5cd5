"""The training entry, recording every step bit for bit: ``python -m graphed_pretrain`` with ``TRACE=<folder>``.

Each rank writes ``rank<k>.json``: ``losses`` (last pipeline stage) and ``grad_norms`` (step from 1 -> float.hex()),
``replays`` (step from 1 -> CUDA graphs that were replayed in it), ``free`` (bytes of the card
after it) and ``weights`` (SHA-256 of each parameter at the end, sorted: layers of Transformer Engine's own order
theirs in another way). With ``FILL=<step>:<bytes>`` all but so many bytes of the card are taken after that step, and
no weights are written. With ``FAIL=<step>:<kind>`` the first capture after that step fails: by an exception, or out of
``memory``. A SnipError ends the training as it ends the entry. Linears get the names of ``snip_te_map`` where arguments
have its factory. Gated delta nets in deterministic mode take their norm from torch too: every process would choose by
times in which order that of flash-linear-attention sums.
"""

import ctypes
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from snip_megatron.megatron.startup import prepare, report
from snip_megatron.precision.errors import SnipError
from snip_megatron.pretrain_gpt import parse_snip_arguments


class Recorder:
    """Wraps Megatron's train_step, and counts replays."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = {"losses": {}, "grad_norms": {}, "replays": {}, "free": {}}
        self._fill_after, self._leave = map(int, os.environ.get("FILL", "0:0").split(":"))
        fail_after, _, self._kind = os.environ.get("FAIL", "0:").partition(":")
        self._fail_after = int(fail_after)
        self._model: list[torch.nn.Module] = []
        self._replays = 0
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: Any) -> None:
            self._replays += 1
            replay(graph)

        torch.cuda.CUDAGraph.replay = counted  # type: ignore[method-assign]

    def wrap(self, train_step: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            number = kwargs["iteration"] + 1
            self._model, self._replays = args[2], 0
            result = train_step(*args, **kwargs)
            if result[0]:
                self.body["losses"][number] = float(result[0]["lm loss"]).hex()
            torch.cuda.synchronize()
            self.body["grad_norms"][number] = float(result[5]).hex()
            self.body["replays"][number] = self._replays
            if number == self._fill_after:
                self._fill()
            if number == self._fail_after:
                torch.nn.modules.module.register_module_forward_pre_hook(self._fail)
            self.body["free"][number] = torch.cuda.mem_get_info()[0]
            return result

        return step

    def _fill(self) -> None:
        """Take memory from the driver, as another process would, and not from torch's allocator."""
        size = torch.cuda.mem_get_info()[0] - self._leave
        address = ctypes.c_uint64()
        code = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        assert code == 0, f"cuMemAlloc of {size} bytes: error {code}"

    def _fail(self, *_: Any) -> None:
        """Fail in a capture as a layer would."""
        if torch.cuda.is_current_stream_capturing():
            if self._kind == "memory":
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            raise RuntimeError("injected into a capture")

    def _digests(self) -> list[str]:
        for chunk in self._model:
            getattr(chunk, "synchronize_param_gather", lambda: None)()  # Megatron-FSDP puts each rank's share back
        parameters = [parameter.detach() for chunk in self._model for parameter in chunk.parameters()]
        parameters = [getattr(parameter, "_local_tensor", parameter).float().cpu() for parameter in parameters]
        return sorted(hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in parameters)

    def write(self, path: Path) -> None:
        if not self._leave and "weights" not in self.body:
            self.body["weights"] = self._digests()
        path.mkdir(exist_ok=True)
        (path / f"rank{os.environ['RANK']}.json").write_text(json.dumps(self.body))


def _named(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    import snip_te_map  # type: ignore[import-not-found]

    for chunk in chunks:
        snip_te_map.name_linears(chunk)
    return chunks


def main() -> int:
    startup = prepare(sys.argv[1:], parse_snip_arguments(sys.argv[1:]).snip_no_compat)
    from snip_megatron.megatron import compat
    from snip_megatron.megatron.compat import pretraining
    from snip_megatron.megatron.entry import run

    if "gated_delta_net" in sys.argv:
        from megatron.core.ssm.gated_delta_net import common

        common.HAVE_FLA, common.l2norm = True, lambda x: functional.normalize(x, dim=-1, eps=1e-6)
    if "snip_te_map.quantizer_factory" in sys.argv:
        configure = pretraining.model_config

        def configure_named(*args: Any, **named: Any) -> Any:
            model = configure(*args, **named)
            model.pre_wrap_hooks.append(_named)
            return model

        pretraining.model_config = configure_named
    recorder = Recorder()
    compat.wrap_train_step(recorder.wrap)
    try:
        run(startup)
    except SnipError as error:
        recorder.body["weights"] = []
        report(error, "pretrain_gpt")
        return error.exit_code
    finally:
        recorder.write(Path(os.environ["TRACE"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
