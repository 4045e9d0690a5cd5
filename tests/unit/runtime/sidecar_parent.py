"""A trainer in miniature: starts the sidecar under torchrun's variables, submits, prints the worker's pid, waits.

``python -m sidecar_parent POLICY``, as ``python -m snip_megatron.pretrain_gpt`` is started. Nothing guards the main
module against being imported a second time: the worker must not do it.
"""

import sys
import time

from sidecar_jobs import make_job

from snip_megatron.runtime.solving import SidecarClient

assert __name__ == "__main__"

client = SidecarClient(solve="sidecar_solvers:by_policy")
client.submit(make_job(policy=sys.argv[1]))
while client.pid is None:
    time.sleep(0.01)
print(client.pid, flush=True)
time.sleep(600)
