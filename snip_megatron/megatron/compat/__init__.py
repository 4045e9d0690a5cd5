"""The only modules that use names of Megatron that are private or differ between versions.

These names are checked when the modules are imported.
"""

from snip_megatron.megatron.compat.checkpoints import checkpoint_arguments, checkpoint_has, state_beside_model
from snip_megatron.megatron.compat.gradients import (
    check_gradient_reduction,
    check_reduced_models,
    gradients_reduced_in_fp8,
    report_expert_gradients,
)
from snip_megatron.megatron.compat.graphs import (
    IMPLEMENTATIONS,
    RecaptureError,
    graph_implementation,
    graphs_bypassed,
    graphs_leave_experts_out,
    let_graphs_hold_experts,
    schedule_without_graph,
)
from snip_megatron.megatron.compat.host_work import fuse_copies, lighten_buckets
from snip_megatron.megatron.compat.loop import (
    TrainStep,
    attention_logits_restored,
    batch_size_ramp,
    divisible,
    evaluations_watched,
    gather_parameters,
    keep_microbatches,
    learning_rate,
    past_microbatches,
    quiet_schedule,
    random_states,
    repeated,
    rerun_disabled,
    separate_offloading,
    wrap_evaluate,
    wrap_train_step,
)
from snip_megatron.megatron.compat.megatron_precision import let_snip_choose, separate_experts
from snip_megatron.megatron.compat.optimizers import main_parameter, update_of
from snip_megatron.megatron.compat.patches import apply, check, set_defaults
from snip_megatron.megatron.compat.routing import RepeatedRouting, routers_restored, routing_repeated, why_host_counts
from snip_megatron.megatron.compat.sharding import ShardedParameters, optimizer_instance, process_groups
from snip_megatron.megatron.compat.versions import MEGATRON_VERSION, changed
