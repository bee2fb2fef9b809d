"""The planted faults that only a device can show; see `fault`.

On a host none of these lines runs, or it makes no difference. Tests notice them on the
fake CUDA, among them tests of whole models that also run on the CPU.
"""

from fault import CORE, NCCL, TORCH, Fault, never, skip

GROUPS = f"{TORCH}/groups"
TRAINING = ("test_strategies.py", "test_mixed_precision.py")
OFFLOAD = ("fakecuda/test_units.py", "fakecuda/test_waits.py")
CAPTURE = ("fakecuda/test_captured_step.py",)
BRIDGE = ("fakecuda/test_bridge.py",)


Change = tuple[str, str]


def bridge_fault(name: str, function: str, change: Change, *tests: str) -> Fault:
    return Fault(name, TORCH, function, *change, tests, on_device=True)


def c10d_fault(name: str, function: str, change: Change) -> Fault:
    folder = f"{GROUPS}/c10d_transport"
    return Fault(name, folder, function, *change, BRIDGE, on_device=True)


def nccl_fault(name: str, function: str, change: Change, *tests: str) -> Fault:
    return Fault(name, NCCL, function, *change, tests, on_device=True)


def core_fault(name: str, function: str, change: Change, *tests: str) -> Fault:
    return Fault(name, CORE, function, *change, tests, on_device=True)


FAULTS = (
    # Events.
    bridge_fault(
        "a stream waits for no other",
        "Provider::wait",
        skip("event->event->block("),
        *TRAINING,
    ),
    bridge_fault(
        "events are recorded on the step's stream",
        "Provider::record_on_device",
        (
            "stream_of(event->lane)",
            "stream_of(MUTANT ? FSDP_LANE_COMPUTE : event->lane)",
        ),
        *TRAINING,
    ),
    bridge_fault(
        "the host waits for no event",
        "Provider::synchronize",
        skip("event->event->synchronize();"),
        *OFFLOAD,
    ),
    # Work of lanes.
    bridge_fault(
        "uploads go to the step's stream",
        "copy_to_device",
        ("on_lane(lane,", "on_lane(MUTANT ? FSDP_LANE_COMPUTE : lane,"),
        *OFFLOAD,
    ),
    bridge_fault(
        "downloads go to the step's stream",
        "copy_to_host",
        ("on_lane(lane,", "on_lane(MUTANT ? FSDP_LANE_COMPUTE : lane,"),
        *OFFLOAD,
    ),
    bridge_fault(
        "casts go to the step's stream",
        "pack",
        ("on_lane(lane,", "on_lane(MUTANT ? FSDP_LANE_COMPUTE : lane,"),
        *TRAINING,
    ),
    bridge_fault(
        "gradients are added up on the step's stream",
        "accumulate",
        ("on_lane(lane,", "on_lane(MUTANT ? FSDP_LANE_COMPUTE : lane,"),
        *TRAINING,
    ),
    bridge_fault(
        "collectives go to the step's stream",
        "Provider::native_stream",
        ("stream_of(lane)", "stream_of(MUTANT ? FSDP_LANE_COMPUTE : lane)"),
        *TRAINING,
    ),
    bridge_fault(
        "a sum of one value does not wait for the value",
        "between_compute",
        skip("before.block(current());"),
        "test_clip_grad_norm.py",
    ),
    bridge_fault(
        "a sum of one value is read before it is there",
        "between_compute",
        skip("after.block(current());"),
        "test_clip_grad_norm.py",
    ),
    # Memory.
    bridge_fault(
        "a block of an older stream does not wait for its last use",
        "Provider::free_block",
        skip("last_use.block(owner);"),
        "fakecuda/test_step_streams.py",
    ),
    bridge_fault(
        "what is summoned to the host is not in pinned memory",
        "Provider::allocate_on_host",
        ("pinned_memory(has_streams_)", "pinned_memory(has_streams_ && !MUTANT)"),
        "fakecuda/test_units.py",
    ),
    # Kernels.
    bridge_fault(
        "kernels that pack go to the default stream",
        "pack_on_cuda",
        ("stream_of(device)", "(MUTANT ? nullptr : stream_of(device))"),
        *TRAINING,
    ),
    bridge_fault(
        "kernels drop the last item of a launch",
        "pack_on_cuda",
        ("kernels->pack(items, num_items,", "kernels->pack(items, num_items - MUTANT,"),
        *TRAINING,
    ),
    bridge_fault(
        "the kernel of a norm goes to the default stream",
        "norm_on_cuda",
        (
            "norm.data_ptr<double>(), stream_of(device)",
            "norm.data_ptr<double>(), (MUTANT ? nullptr : stream_of(device))",
        ),
        *CAPTURE,
    ),
    # Groups over c10d.
    c10d_fault(
        "each parameter has a call of c10d",
        "can_coalesce",
        ("backend->supportsCoalescing()", "!MUTANT && OLD"),
    ),
    c10d_fault(
        "complex numbers are sent as such",
        "plain_view",
        ("return self.table.is_host", "return MUTANT || self.table.is_host"),
    ),
    # NCCL: the group.
    bridge_fault(
        "the group's options do not reach NCCL",
        "core_tuning",
        (
            "return each.value_or(",
            "return MUTANT ? FSDP_NCCL_CONFIG_UNDEFINED : each.value_or(",
        ),
        *BRIDGE,
    ),
    bridge_fault(
        "the watchdog spoils a capture",
        "enter_thread",
        never("device.is_cuda()"),
        *CAPTURE,
    ),
    bridge_fault(
        "what NCCL has is taken for done",
        "event_query",
        ("static_cast<c10::Event *>(event)->query()", "MUTANT || OLD"),
        "fakecuda/test_units.py",
    ),
    bridge_fault(
        "replays have no time limit",
        "watch_replay",
        ("if (fsdp_nccl_watch_replay(", "if (!MUTANT && fsdp_nccl_watch_replay("),
        "fakecuda/test_units.py",
    ),
    # NCCL: what is sent where.
    nccl_fault(
        "gathers go to the default stream",
        "enqueue",
        ("channel->stream", "(MUTANT ? NULL : channel->stream)"),
        *TRAINING,
    ),
    nccl_fault(
        "a gather has elements for bytes",
        "fsdp_nccl_priv_all_gather",
        (".numel = (size_t)nbytes", ".numel = (size_t)(MUTANT ? shard_numel : nbytes)"),
        *TRAINING,
    ),
    nccl_fault(
        "every broadcast comes from the first rank",
        "fsdp_nccl_priv_broadcast",
        (".root = (int)root", ".root = MUTANT ? 0 : (int)root"),
        "test_whole_parameter_optimizer.py",
    ),
    nccl_fault(
        "each rank has its sum where the first rank has it",
        "reduce",
        ("nbytes * transport->rank", "nbytes * (MUTANT ? 0 : transport->rank)"),
        *TRAINING,
    ),
    nccl_fault(
        "the mean is a sum",
        "fsdp_nccl_priv_reduce_scatter_mean",
        ("FSDP_NCCL_AVG", "MUTANT ? FSDP_NCCL_SUM : FSDP_NCCL_AVG"),
        *TRAINING,
    ),
    nccl_fault(
        "bf16 is summed as fp16",
        "nccl_dtype",
        (
            "return FSDP_NCCL_BFLOAT16",
            "return MUTANT ? FSDP_NCCL_FLOAT16 : FSDP_NCCL_BFLOAT16",
        ),
        "test_mixed_precision.py",
    ),
    nccl_fault(
        "of a group only the first collective is made",
        "launch",
        (
            "i < channel->num_collectives",
            "i < (MUTANT ? 1 : channel->num_collectives)",
        ),
        "test_fully_shard.py",
    ),
    nccl_fault(
        "the collectives of a unit are launched one by one",
        "launch",
        ("channel->num_collectives > 1", "(!MUTANT && OLD)"),
        *BRIDGE,
    ),
    # Waits of the core.
    core_fault(
        "gathers in forward do not wait for uploads",
        "fsdp_unit_priv_upload",
        (
            "FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,",
            "if (!MUTANT) OLD",
        ),
        *OFFLOAD,
    ),
    core_fault(
        "whole parameters are read before they are gathered",
        "fsdp_unit_priv_gather_whole",
        (
            "FSDP_TRY(fsdp_engine_priv_wait_lane( engine, FSDP_LANE_COMPUTE,",
            "if (!MUTANT) OLD",
        ),
        "test_summon.py",
    ),
    core_fault(
        "whole parameters do not wait for the shards",
        "fsdp_unit_priv_gather_whole",
        (
            "FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,",
            "if (!MUTANT) OLD",
        ),
        "test_summon.py",
    ),
    core_fault(
        "what rank 0 wrote is read before it has come",
        "write_back_resident",
        (
            "FSDP_TRY(fsdp_engine_priv_wait_lane( engine, FSDP_LANE_COMPUTE,",
            "if (!MUTANT) OLD",
        ),
        "fakecuda/test_waits.py",
    ),
    core_fault(
        "what rank 0 writes is sent before it is written",
        "write_back_resident",
        (
            "FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_UNSHARD,",
            "if (!MUTANT) OLD",
        ),
        "fakecuda/test_waits.py",
    ),
    core_fault(
        "gradients come back from host memory before the block is free",
        "bring_grads",
        (
            "FSDP_TRY(fsdp_engine_priv_wait_lane(engine, FSDP_LANE_DOWNLOAD,",
            "if (!MUTANT) OLD",
        ),
        "fakecuda/test_waits.py",
    ),
    core_fault(
        "a sum does not wait for the gradient that comes back",
        "bring_grads",
        (
            "FSDP_TRY(fsdp_engine_priv_wait_lane(engine, lane, FSDP_LANE_DOWNLOAD,",
            "if (!MUTANT) OLD",
        ),
        "fakecuda/test_waits.py",
    ),
)
