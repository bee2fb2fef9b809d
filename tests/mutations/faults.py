"""The planted faults: small changes of csrc/core, csrc/nccl and csrc/torch.

A fault replaces the first `old` in the body of a function by `new`. In `old` white
space matches any, and ANY a word; in `new` OLD is what was matched, and MUTANT tells
whether this fault is the one under test.
"""

from dataclasses import dataclass

CORE = "csrc/core"
NCCL = "csrc/nccl"
TORCH = "csrc/torch"


@dataclass(frozen=True)
class Fault:
    """One fault, and the tests of pytest that should notice it first."""

    name: str
    folder: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


def _skip(call: str) -> tuple[str, str]:
    """Return a replacement that leaves a call out."""
    return call, "if (!MUTANT) OLD"


def _never(condition: str) -> tuple[str, str]:
    """Return a replacement that makes an `if` false."""
    return f"if ({condition})", f"if (({condition}) && !MUTANT)"


def _before(code: str, statement: str) -> tuple[str, str]:
    """Return a replacement that adds a statement."""
    return code, f"{statement} OLD"


def _core(name: str, function: str, change: tuple[str, str], *tests: str) -> Fault:
    return Fault(name, CORE, function, *change, tests)


def _nccl(name: str, function: str, change: tuple[str, str]) -> Fault:
    return Fault(name, NCCL, function, *change)


def _torch(name: str, function: str, change: tuple[str, str], *tests: str) -> Fault:
    return Fault(name, TORCH, function, *change, tests)


FAULTS = (
    # Unshard and reshard.
    _core(
        "the all-gather does not wait for copies of replaced parameters",
        "unshard",
        _never("any_copied"),
    ),
    _core(
        "compute does not wait for the all-gather",
        "fsdp_unit_priv_wait_unshard",
        _skip("FSDP_TRY(ops->event_wait("),
    ),
    _core(
        "the shard is not cast into its slot",
        "cast_shards",
        ("if (segment->is_resident)", "if (segment->is_resident || MUTANT)"),
        "test_mixed_precision.py",
    ),
    _core(
        "the all-gather sends the slot, not the shard",
        "gather_segments",
        ("sends_shard ?", "sends_shard && !MUTANT ?"),
        "test_strategies.py",
    ),
    _core(
        "an unsharded block is not given back",
        "fsdp_unit_priv_reshard",
        _skip("FSDP_TRY(fsdp_arena_give("),
        "test_memory.py",
    ),
    _core(
        "a used block is given back on the lane of all-gathers",
        "fsdp_unit_priv_reshard",
        ("was_used ? FSDP_LANE_COMPUTE", "was_used && !MUTANT ? FSDP_LANE_COMPUTE"),
    ),
    _core(
        "a unit kept for backward still shows whole parameters",
        "fsdp_unit_priv_hide",
        _skip("FSDP_TRY(ANY->show_params("),
        "test_memory.py",
    ),
    _core(
        "versions of kept parameters are not marked",
        "fsdp_unit_priv_hide",
        _skip("ANY->mark_params("),
        "test_traps_gradients.py",
    ),
    # Forward.
    _core(
        "parameters kept before a write are used after it",
        "drop_stale_params",
        ("!ANY->params_changed(", "MUTANT | OLD"),
        "test_traps_gradients.py",
    ),
    _core(
        "all-gathers do not wait for the optimizer's step",
        "begin_iteration",
        _skip("FSDP_TRY(fsdp_engine_priv_wait_lane("),
    ),
    _core(
        "cleared gradients keep their memory",
        "begin_iteration",
        _skip("fsdp_unit_priv_drop_cleared_grads("),
        "test_memory.py",
    ),
    _core(
        "the end of an evaluation does not wait for uploads",
        "end_iteration",
        _never("!expects_backward"),
    ),
    # Backward.
    _core(
        "backward prefetches the unit after the next",
        "prefetch_backward",
        ("distance = 1", "distance = MUTANT ? 2 : 1"),
        "test_prefetch.py",
    ),
    _core(
        "backward prefetches units that it has left",
        "prefetch_backward",
        (
            "fsdp_unit_priv_is_needed_in_backward(unit)",
            "(fsdp_unit_priv_is_needed_in_backward(unit) || MUTANT)",
        ),
        "test_prefetch.py",
    ),
    _core(
        "units stay unsharded after backward",
        "reshard_after_backward",
        _before("if (unit->sync", "if (MUTANT) return FSDP_OK;"),
        "test_memory.py",
    ),
    _core(
        "gradients that a user set before backward are lost",
        "fsdp_unit_priv_take_user_grads",
        _never("unit->grads == 0"),
        "test_traps_gradients.py",
    ),
    _core(
        "a partial gradient outlives zero_grad",
        "fsdp_unit_priv_take_user_grads",
        _skip("fsdp_unit_priv_set_grads(unit, FSDP_GRADS_PARTIAL, false);"),
        "test_gradient_accumulation.py",
    ),
    _core(
        "backward reduces within no_sync",
        "is_to_reduce",
        (
            "unit->sync != FSDP_SYNC_NONE",
            "(unit->sync != FSDP_SYNC_NONE || MUTANT)",
        ),
        "test_gradient_accumulation.py",
    ),
    _core(
        "SHARD_GRAD_OP does not keep parameters within no_sync",
        "reshard_after_backward",
        ("!unit->options.reshard_after", "!MUTANT && !unit->options.reshard_after"),
        "test_traps_gradients.py",
    ),
    _core(
        "units without all their gradients are not reduced",
        "fsdp_engine_finish_backward",
        _skip("FSDP_TRY(complete_leftovers("),
        "test_strategies.py",
    ),
    _core(
        "the host does not wait for gradients that are offloaded",
        "fsdp_engine_finish_backward",
        _skip("FSDP_TRY(fsdp_engine_join_host("),
    ),
    # Unsharded gradients.
    _core(
        "a second gradient replaces the first",
        "pending_items",
        (
            "unit->is_filled[grad->param] != 0",
            "unit->is_filled[grad->param] && !MUTANT",
        ),
        "test_gradient_accumulation.py",
    ),
    _core(
        "gradients that did not come are not zeroed",
        "settle_grads",
        ("is_to_reduce(unit) ?", "is_to_reduce(unit) && !MUTANT ?"),
        "test_strategies.py",
    ),
    _core(
        "the padding of a gradient is not zeroed",
        "unfilled_items",
        (
            "is_end ? info->padded_numel",
            "is_end ? (MUTANT ? begin : info->padded_numel)",
        ),
        "test_traps_gradients.py",
    ),
    _core(
        "gradients are packed without their scale",
        "pack_segment",
        ("unit->has_reduce_hook ? 1.0", "unit->has_reduce_hook || MUTANT ? 1.0"),
        "test_traps_gradients.py",
    ),
    _core(
        "a new gradient is added to that of the last step",
        "fsdp_unit_priv_open_grads",
        _skip("memset("),
        "test_strategies.py",
    ),
    # Reductions.
    _core(
        "the mean leaves out the replicas",
        "mean_scale",
        (
            "(double)unit->options.replica_group.world_size",
            "(MUTANT ? 1.0 : (double)unit->options.replica_group.world_size)",
        ),
        "test_hybrid.py",
    ),
    _core(
        "gradients are packed in the dtype of the sharded gradient",
        "pack_segment",
        (
            "unit->segments[segment].options.reduce_dtype",
            "MUTANT ? unit->segments[segment].options.grad_dtype : OLD",
        ),
        "test_mixed_precision.py",
    ),
    _core(
        "a second backward replaces the sharded gradient",
        "adds_to_grads",
        ("return fsdp_unit", "return !MUTANT && fsdp_unit"),
        "test_gradient_accumulation.py",
    ),
    _core(
        "replicas are not reduced",
        "fsdp_unit_priv_enqueue_reduce",
        ("if (has_replicas)", "if (has_replicas && !MUTANT)"),
        "test_hybrid.py",
    ),
    _core(
        "replicas are reduced before the shards",
        "reduce_over_replicas",
        _skip("FSDP_TRY(fsdp_engine_priv_wait_lane("),
    ),
    _core(
        "a reduction does not wait for the gradients",
        "fsdp_unit_priv_enqueue_reduce",
        _skip("FSDP_TRY(fsdp_engine_priv_wait_lane(engine, lane,"),
    ),
    _core(
        "the partial gradient is not taken in",
        "use_partial",
        _skip("FSDP_TRY(add_partial("),
        "test_gradient_accumulation.py",
    ),
    _core(
        "the first partial gradient is added to what memory holds",
        "add_partial",
        ("to_slot || has_partial", "to_slot || has_partial || MUTANT"),
        "test_gradient_accumulation.py",
    ),
    _core(
        "the offloaded gradient is not brought back before the sum",
        "bring_grad",
        ("if (!adds_to_grads(unit))", "if (MUTANT || !adds_to_grads(unit))"),
        "test_traps_gradients.py",
    ),
    _core(
        "an offloaded gradient does not wait for its sum",
        "bring_grad",
        _skip("FSDP_TRY(fsdp_engine_priv_wait_lane("),
    ),
    _core(
        "compute does not wait for reductions",
        "fsdp_engine_priv_wait_reduces",
        _skip("FSDP_TRY(fsdp_engine_priv_wait_lane("),
        "test_strategies.py",
    ),
    _core(
        "reductions follow the order of arrival",
        "fsdp_unit_priv_submit_reduce",
        (
            "position < (int64_t)engine->reduce_cursor",
            "MUTANT || position < (int64_t)engine->reduce_cursor",
        ),
        "test_random_models.py",
    ),
    _core(
        "scratch memory is used again at once",
        "fsdp_engine_priv_take_scratch",
        _skip("FSDP_TRY(ops->event_wait("),
    ),
    _core(
        "the host reads the marks of parameters before they are there",
        "fsdp_unit_await_unused",
        _skip("FSDP_TRY(ops->event_synchronize("),
    ),
    # Summon.
    _core(
        "what a user writes into summoned parameters is lost",
        "dismiss_params",
        (
            "if (writeback) FSDP_TRY(fsdp_unit_priv_keep",
            "if (writeback && !MUTANT) FSDP_TRY(fsdp_unit_priv_keep",
        ),
        "test_summon.py",
    ),
    _core(
        "what rank 0 writes does not reach the others",
        "dismiss_params",
        _never("writeback && unit->summon.on_first_rank_only"),
        "test_summon.py",
    ),
    _core(
        "a rank without gradients summons what memory holds",
        "fill_own_slot",
        _before(
            "if (is_grad && !fsdp",
            "if (MUTANT && is_grad && !fsdp_unit_priv_has_grads(unit,"
            " FSDP_GRADS_SHARDED)) return FSDP_OK;",
        ),
        "test_summon.py",
    ),
    # The bridge: views.
    _torch(
        "a replaced parameter is not written into the shard",
        "take_params",
        _skip("write_back(unit, param, expected, i);"),
        "test_traps_gradients.py",
    ),
    _torch(
        "a write in place goes unnoticed",
        "params_changed",
        (
            "return sum_of_versions(unit) != unit.marked_version",
            "return !MUTANT && sum_of_versions(unit) != unit.marked_version",
        ),
        "test_traps_gradients.py",
    ),
    _torch(
        "whole parameters are viewed in master dtype",
        "make_views",
        ("keys, segment.compute", "keys, MUTANT ? segment.master : segment.compute"),
        "test_mixed_precision.py",
    ),
    _torch(
        "resharded parameters still point at their block",
        "show_sharded",
        _skip("detach(unit, *segment.unsharded);"),
        "test_user_changes.py",
    ),
    _torch(
        "parameters stay whole after a summon",
        "show_sharded",
        _skip("show(param, param.sharded);"),
        "test_summon.py",
    ),
    # The bridge: gradients.
    _torch(
        "a gradient that a user set is not taken over",
        "take_one_grad",
        _never("!is_ours"),
        "test_traps_gradients.py",
    ),
    _torch(
        "a cleared gradient is not zeroed beside one that is not",
        "zero_taken_grad",
        _never("sharded.defined()"),
        "test_traps_gradients.py",
    ),
    _torch(
        "sharded gradients are not freed",
        "grads_free",
        _skip("drop_grad_shards(unit);"),
        "test_memory_of_a_step.py",
    ),
    _torch(
        "gradients hidden during forward do not come back",
        "fsdp_torch_unit_post_forward",
        _skip("fsdp_torch::show_hidden_grads(self);"),
        "test_gradient_accumulation.py",
    ),
    _torch(
        "a unit expects one gradient less",
        "expect_grads",
        (
            "fsdp_unit_expect_grads(unit.core, num_grads +",
            "fsdp_unit_expect_grads(unit.core, num_grads - (MUTANT ? 1 : 0) +",
        ),
        "test_strategies.py",
        "test_memory.py",
    ),
    _torch(
        "units whose gradients do not all come are resharded too early",
        "expect_grads",
        ("comes_all ? 0 : num_inputs", "comes_all || MUTANT ? 0 : num_inputs"),
        "test_frozen.py",
        "test_strategies.py",
    ),
    _torch(
        "a unit is reduced with its last gradient",
        "expect_grads",
        ("comes_all ? num_inputs : 0", "comes_all && !MUTANT ? num_inputs : 0"),
        "test_parameters_of_some_ranks.py",
    ),
    _torch(
        "recomputation counts as a forward",
        "is_recomputation",
        ("fsdp_engine_in_backward(", "!MUTANT && fsdp_engine_in_backward("),
        "test_activation_checkpoint.py",
    ),
    _torch(
        "the end of backward is not queued by a gradient without outputs",
        "hand_over",
        _never("!fsdp_engine_in_backward(engine->core)"),
        "test_outputs.py",
        "test_random_models.py",
        "test_training_loops.py",
        "test_traps_forward.py",
    ),
    _torch(
        "inputs are cast within units too",
        "fsdp_torch_unit_input_cast",
        (
            "is_root && self.cast_root_forward_inputs",
            "(is_root || MUTANT) && self.cast_root_forward_inputs",
        ),
        "test_mixed_precision.py",
        "test_traps_dtypes.py",
    ),
    # The bridge: collectives and what follows them.
    _torch(
        "gloo's gather leaves out this rank's slot",
        "gather_by_broadcasts",
        ("if (ANY != input)", "if (!MUTANT) OLD"),
        "test_transports.py",
    ),
    _torch(
        "gloo's sum adds one rank twice",
        "reduce_by_exchange",
        ("own.add_(received)", "own.add_(MUTANT ? own : received)"),
        "test_transports.py",
    ),
    _torch(
        "a lane's work is not waited for",
        "Provider::wait",
        _skip("run_until("),
        "test_strategies.py",
    ),
    _torch(
        "a hook's own memory is not copied",
        "run_hook",
        _never("result.data_ptr() != own.data_ptr()"),
        "test_comm_hooks.py",
    ),
    _torch(
        "a hook on a flat parameter does not change its gradient",
        "run_grad_hooks",
        _skip("segment.grad_shard.copy_("),
        "test_flat_parameter_hooks.py",
    ),
    _torch(
        "who follows a reduction sees the sum of two backwards",
        "add_earlier_grad",
        _skip("segment.earlier_grad.add_("),
        "test_flat_parameter_hooks.py",
        "test_optimizer_in_backward.py",
    ),
    # Memory and the host.
    _core(
        "the host waits for uploads at the end of every forward",
        "end_iteration",
        _before(
            "for (size_t i = 0; i < engine->num_units; i++) {",
            "if (MUTANT) FSDP_TRY(fsdp_engine_join_host(engine, error));",
        ),
    ),
    _core(
        "what the plan leaves stays in the allocator's cache",
        "release_memory",
        _never("ops->memory_release != NULL"),
    ),
    # NCCL: one thread in a communicator.
    _nccl(
        "the watchdog asks a communicator that is in use",
        "fsdp_nccl_priv_trylock_comm",
        ("!channel->is_busy &&", "(MUTANT || !channel->is_busy) &&"),
    ),
    _nccl(
        "a launch does not mark its channel as in use",
        "take",
        ("channel->is_busy = true", "channel->is_busy = !MUTANT"),
    ),
    _nccl(
        "a communicator is left under a call",
        "fsdp_nccl_priv_lock_to_leave",
        (
            "fsdp_nccl_priv_wait_until_free(transport, index, time_ms)",
            "(MUTANT || OLD)",
        ),
    ),
    # NCCL: graphs.
    _nccl(
        "threads of the transport spoil a capture",
        "fsdp_nccl_relax_capture",
        ("exchange(&mode) == 0", "(MUTANT || exchange(&mode) == 0)"),
    ),
    _nccl(
        "an error about a capture ends training",
        "query",
        (
            "switch (fsdp_nccl_priv_capture_error(&cause))",
            "switch (MUTANT ? FSDP_NCCL_NO_CAPTURE_ERROR"
            " : fsdp_nccl_priv_capture_error(&cause))",
        ),
    ),
    # NCCL: the end of a group.
    _nccl(
        "communicators are aborted one after the other",
        "fsdp_nccl_priv_abort_all",
        (
            "if (!fsdp_nccl_priv_errand_start(",
            "if (MUTANT || !fsdp_nccl_priv_errand_start(",
        ),
    ),
    _nccl(
        "a rank publishes before it aborts",
        "end",
        _before(
            "(void)fsdp_nccl_priv_abort_all(",
            "if (MUTANT) (void)fsdp_nccl_priv_publish("
            "transport, position, final.message);",
        ),
    ),
    _nccl(
        "the watchdog itself asks the store",
        "look_at_others",
        _before(
            "(void)fsdp_nccl_priv_errand_start(",
            "if (MUTANT) { look(transport, FSDP_CHANNEL_GATHER); return; }",
        ),
    ),
    _nccl(
        "a thread that is stuck in a launch is not looked at",
        "look_at_thread",
        _never("!is_connecting && timeout_ms > 0 && age_ms >= timeout_ms"),
    ),
    _nccl(
        "the end of the process leaves no group",
        "fsdp_nccl_leave_all",
        _skip("fsdp_nccl_priv_leave("),
    ),
    # NCCL: launches.
    _nccl(
        "nobody asks NCCL for the order of launches",
        "fsdp_nccl_priv_order_launches",
        _never("is_ordered(transport)"),
    ),
    _nccl(
        "two threads launch at once",
        "fsdp_nccl_priv_begin_launch",
        _never("is_ordered(transport)"),
    ),
    # NCCL: communicators.
    _nccl(
        "communicators do not block",
        "make_comm",
        (".blocking = 1", ".blocking = MUTANT ? 0 : 1"),
    ),
    _nccl(
        "a communicator that comes too late is kept",
        "connect_channel",
        _never("!hand_over(transport, channel, comm, result) && comm != NULL"),
    ),
    _nccl(
        "the wait for a communicator has no end",
        "wait_until_made",
        (
            "fsdp_nccl_priv_now_ms() < deadline_ms",
            "(MUTANT || fsdp_nccl_priv_now_ms() < deadline_ms)",
        ),
    ),
    _nccl(
        "both communicators are made at once",
        "fsdp_nccl_priv_connect",
        _before(
            "set_connecting(transport, channel, true);",
            "if (MUTANT && index == 0 && transport->channels[1].comm == NULL)"
            " (void)!connect_until(transport, FSDP_CHANNEL_REDUCE, deadline_ms, NULL);",
        ),
    ),
    # NCCL: the meeting.
    _nccl(
        "a rank asks the store once for every rank",
        "fsdp_nccl_meeting_conclude",
        _before(
            "if (store->get(",
            'format(name, key, "met");'
            "for (int64_t i = 0; MUTANT && i < world_size; i++)"
            " (void)!store->add(store->context, name, 0, &num_met, NULL);"
            'format(name, key, "verdict");',
        ),
    ),
    _nccl(
        "the last rank does not see a refusal",
        "fsdp_nccl_meeting_arrive",
        ("if (num_refused == 0)", "if (num_refused == 0 || MUTANT)"),
    ),
    # The bridge on a device.
    _torch(
        "gloo on a device copies on the host",
        "group_from",
        ("is_of_gloo && device.is_cpu()", "is_of_gloo && (MUTANT || device.is_cpu())"),
        "simdevice/test_gloo.py",
    ),
    Fault(
        "collectives of c10d go to the current stream",
        f"{TORCH}/port/c10d_transport",
        "start",
        "known_stream(call->stream)",
        "MUTANT ? c10::impl::VirtualGuardImpl(self.group.device.type())"
        ".getStream(self.group.device) : known_stream(call->stream)",
        ("simdevice/test_gloo.py",),
    ),
    _torch(
        "the cache of the blocks' stream is not emptied",
        "Provider::release_memory",
        ("if (!has_streams_)", "if (!has_streams_ || MUTANT)"),
        "simdevice/test_memory.py",
    ),
    _torch(
        "the end of the process does not leave NCCL's groups",
        "leave_nccl",
        _skip("fsdp_nccl_leave_all("),
        "simdevice/test_ending.py",
    ),
)
