"""The planted faults of the core; see `fault`."""

from fault import before, core_fault, never, skip

FAULTS = (
    # Unshard and reshard.
    core_fault(
        "the all-gather does not wait for copies of replaced parameters",
        "unshard",
        never("any_copied"),
    ),
    core_fault(
        "compute does not wait for the all-gather",
        "fsdp_unit_priv_wait_unshard",
        skip("FSDP_TRY(ops->event_wait("),
    ),
    core_fault(
        "the shard is not cast into its slot",
        "cast_shards",
        ("if (segment->is_resident)", "if (segment->is_resident || MUTANT)"),
        "test_mixed_precision.py",
    ),
    core_fault(
        "the all-gather sends the slot, not the shard",
        "gather_segments",
        ("sends_shard ?", "sends_shard && !MUTANT ?"),
        "test_strategies.py",
    ),
    core_fault(
        "an unsharded block is not given back",
        "fsdp_unit_priv_reshard",
        skip("FSDP_TRY(give_block("),
        "test_memory.py",
    ),
    # Gradients in parts.
    core_fault(
        "gradients of another dtype stay where they are",
        "fsdp_unit_priv_leaves_grads",
        ("unit->num_unlike == 0", "(MUTANT || OLD)"),
        "test_reduce_parts.py",
    ),
    core_fault(
        "a sum in parts is not scaled to the mean",
        "list_place",
        skip("place.scale ="),
        "test_reduce_parts.py",
    ),
    core_fault(
        "a sum in parts replaces the sharded gradient",
        "list_place",
        skip("place.adds ="),
        "test_reduce_parts.py",
    ),
    core_fault(
        "each rank takes the first slot of a sum in parts",
        "list_place",
        ("unit->options.shard_group.rank", "(MUTANT ? 0 : OLD)"),
        "test_reduce_parts.py",
    ),
    core_fault(
        "gradients in parts outlive their reduction",
        "fsdp_unit_priv_end_parts",
        skip("fsdp_unit_priv_release_pending("),
    ),
    core_fault(
        "a reduction in parts does not wait for the gradients",
        "fsdp_unit_priv_start_parts",
        skip("FSDP_TRY(fsdp_engine_priv_wait_lane("),
    ),
    core_fault(
        "marks in parts are those of all parameters",
        "fsdp_unit_priv_list_marks",
        ("unit->was_used[i % layout->shard_numel] == 0", "(!MUTANT && OLD)"),
        "test_reduce_parts.py",
    ),
    # Shards in place.
    core_fault(
        "parameters that are kept are read in place",
        "reshards_in_time",
        ("unit->settings.reshard_after_forward", "(MUTANT || OLD)"),
        "test_in_place.py",
    ),
    core_fault(
        "an owner does not wait for its readers after forward",
        "fsdp_unit_post_forward",
        skip("FSDP_TRY(fsdp_engine_priv_await_readers("),
        "test_in_place.py",
    ),
    core_fault(
        "what the user asked for is read in place",
        "fsdp_unit_priv_choose_place",
        ("!is_on_demand", "(MUTANT || !is_on_demand)"),
    ),
    core_fault(
        "a reset leaves a unit open",
        "reset_unit",
        skip("fsdp_unit_priv_close("),
    ),
    core_fault(
        "blocks that are free on a host pile up",
        "fsdp_arena_give",
        ("if (ops->is_host) keep_only", "if (ops->is_host && !MUTANT) keep_only"),
    ),
    core_fault(
        "a lane uses a block before COMPUTE has left its memory",
        "find_or_add_block",
        ("if (is_host || is_compute)", "if (is_host || is_compute || MUTANT)"),
    ),
    core_fault(
        "a block goes before its reduction has ended",
        "let_go",
        never("!target->is_fresh"),
    ),
    core_fault(
        "gradient blocks leave at the end of backward only",
        "find_or_add_block",
        skip("FSDP_TRY(fsdp_arena_settle("),
    ),
    core_fault(
        "a gather in forward waits for the unit before",
        "fsdp_unit_pre_forward",
        skip("FSDP_TRY(reserve_next("),
    ),
    core_fault(
        "a block stays reserved after forward",
        "end_iteration",
        skip("fsdp_arena_unreserve("),
    ),
    core_fault(
        "an unused block goes before its gather has ended",
        "fsdp_unit_priv_reshard",
        ("if (!was_used) {", "if (!was_used && !MUTANT) {"),
    ),
    core_fault(
        "a unit kept for backward still shows whole parameters",
        "fsdp_unit_priv_hide",
        skip("FSDP_TRY(ANY->show_params("),
        "test_memory.py",
    ),
    core_fault(
        "versions of kept parameters are not marked",
        "fsdp_unit_priv_hide",
        skip("ANY->mark_params("),
        "test_traps_gradients.py",
    ),
    # Captured steps.
    core_fault(
        "a lane leaves the capture unjoined",
        "fsdp_engine_join_lanes",
        ("lane = FSDP_LANE_UNSHARD;", "lane = FSDP_LANE_UNSHARD + MUTANT;"),
    ),
    core_fault(
        "a replay finds units that keep old parameters",
        "bring_to_rest",
        skip("FSDP_TRY(fsdp_unit_priv_reshard("),
    ),
    core_fault(
        "collectives do not know that they are captured",
        "fsdp_engine_priv_open_launch",
        (
            ".is_captured = engine->is_capturing",
            ".is_captured = !MUTANT && engine->is_capturing",
        ),
    ),
    # Saved tensors in host memory.
    core_fault(
        "saved tensors are copied before compute has made them",
        "start_leaving",
        skip("FSDP_TRY(follow(self, FSDP_LANE_DOWNLOAD, FSDP_LANE_COMPUTE,"),
    ),
    core_fault(
        "host memory is used again while it is copied to the device",
        "start_leaving",
        never("self->has_uploads"),
    ),
    core_fault(
        "memory of saved tensors goes while it is copied",
        "finish_leaving",
        skip("FSDP_TRY( ops->event_wait("),
    ),
    core_fault(
        "saved tensors come back into memory that compute uses",
        "start_arriving",
        skip("FSDP_TRY(follow(self, FSDP_LANE_UPLOAD, FSDP_LANE_COMPUTE,"),
    ),
    core_fault(
        "saved tensors come back before they were copied",
        "start_arriving",
        skip("FSDP_TRY(ops->event_wait("),
    ),
    core_fault(
        "backward reads saved tensors before they are back",
        "finish_arriving",
        skip("FSDP_TRY( ops->event_wait("),
    ),
    core_fault(
        "saved tensors that somebody else holds are copied",
        "keep_shared",
        never("!self->calls.is_alone(self->calls.context, item->token)"),
    ),
    # Forward.
    core_fault(
        "parameters kept before a write are used after it",
        "drop_stale_params",
        ("!fsdp_unit_priv_is_stale(", "MUTANT | OLD"),
        "test_traps_gradients.py",
    ),
    core_fault(
        "parameters kept between forwards are used after a write",
        "any_is_stale",
        never("is_kept_between(unit) && fsdp_unit_priv_is_stale(unit)"),
        "test_kept_between_forwards.py",
    ),
    core_fault(
        "what a backward awaits is the next forward's also after a step",
        "fsdp_engine_expect_writes",
        skip("unit->may_be_stale ="),
        "test_kept_between_forwards.py",
    ),
    core_fault(
        "a forward that trains trusts what an evaluation kept",
        "drop_stale_params",
        ("engine->records_graph &&", "!MUTANT && OLD"),
        "test_kept_between_forwards.py",
    ),
    core_fault(
        "all-gathers do not wait for the optimizer's step",
        "begin_iteration",
        skip("FSDP_TRY(fsdp_engine_priv_wait_lane("),
    ),
    core_fault(
        "cleared gradients keep their memory",
        "begin_iteration",
        skip("fsdp_unit_priv_drop_cleared_grads("),
        "test_memory.py",
    ),
    core_fault(
        "the end of an evaluation does not wait for uploads",
        "end_iteration",
        never("!expects_backward"),
    ),
    # Backward.
    core_fault(
        "backward prefetches the unit after the next",
        "prefetch_backward",
        ("distance = 1", "distance = MUTANT ? 2 : 1"),
        "test_prefetch.py",
    ),
    core_fault(
        "backward prefetches units that it has left",
        "prefetch_backward",
        (
            "fsdp_unit_priv_is_needed_in_backward(unit)",
            "(fsdp_unit_priv_is_needed_in_backward(unit) || MUTANT)",
        ),
        "test_prefetch.py",
    ),
    core_fault(
        "units stay unsharded after backward",
        "reshard_after_backward",
        before("if (unit->settings.sync", "if (MUTANT) return FSDP_OK;"),
        "test_memory.py",
    ),
    core_fault(
        "gradients that a user set before backward are lost",
        "fsdp_unit_priv_take_user_grads",
        never("unit->grads == 0"),
        "test_traps_gradients.py",
    ),
    core_fault(
        "a partial gradient outlives zero_grad",
        "fsdp_unit_priv_take_user_grads",
        skip("fsdp_unit_priv_set_grads(unit, FSDP_GRADS_PARTIAL, false);"),
        "test_gradient_accumulation.py",
    ),
    core_fault(
        "backward reduces within no_sync",
        "is_to_reduce",
        (
            "unit->settings.sync != FSDP_SYNC_NONE",
            "(unit->settings.sync != FSDP_SYNC_NONE || MUTANT)",
        ),
        "test_gradient_accumulation.py",
    ),
    core_fault(
        "SHARD_GRAD_OP does not keep parameters within no_sync",
        "reshard_after_backward",
        ("!unit->settings.reshard_after", "!MUTANT && !unit->settings.reshard_after"),
        "test_traps_gradients.py",
    ),
    core_fault(
        "units without all their gradients are not reduced",
        "fsdp_engine_finish_backward",
        skip("FSDP_TRY(complete_leftovers("),
        "test_strategies.py",
    ),
    core_fault(
        "the host does not wait for gradients that are offloaded",
        "fsdp_engine_finish_backward",
        skip("FSDP_TRY(fsdp_engine_join_host("),
    ),
    # Unsharded gradients.
    core_fault(
        "a second gradient replaces the first",
        "pending_items",
        (
            "unit->is_filled[grad->param] != 0",
            "unit->is_filled[grad->param] && !MUTANT",
        ),
        "test_gradient_accumulation.py",
    ),
    core_fault(
        "gradients that did not come are not zeroed",
        "settle_grads",
        (
            "fsdp_unit_priv_fill_grads(unit, error)",
            "MUTANT ? fsdp_unit_priv_pack_grads(unit, error) : OLD",
        ),
        "test_strategies.py",
    ),
    core_fault(
        "the padding of a gradient is not zeroed",
        "unfilled_items",
        (
            "is_end ? info->padded_numel",
            "is_end ? (MUTANT ? begin : info->padded_numel)",
        ),
        "test_traps_gradients.py",
    ),
    core_fault(
        "gradients are packed without their scale",
        "fsdp_unit_priv_prescale",
        (
            "unit->settings.has_reduce_hook ? 1.0",
            "unit->settings.has_reduce_hook || MUTANT ? 1.0",
        ),
        "test_traps_gradients.py",
    ),
    core_fault(
        "a new gradient is added to that of the last step",
        "fsdp_unit_priv_open_grads",
        skip("memset("),
        "test_strategies.py",
    ),
    # Reductions.
    core_fault(
        "the mean leaves out the replicas",
        "fsdp_unit_priv_mean_scale",
        (
            "(double)unit->options.replica_group.world_size",
            "(MUTANT ? 1.0 : (double)unit->options.replica_group.world_size)",
        ),
        "test_hybrid.py",
    ),
    core_fault(
        "gradients are packed in the dtype of the sharded gradient",
        "pending_items",
        (
            "fsdp_unit_priv_block_dtype(unit, segment)",
            "MUTANT ? unit->segments[segment].options.grad_dtype : OLD",
        ),
        "test_mixed_precision.py",
    ),
    core_fault(
        "a second backward replaces the sharded gradient",
        "fsdp_unit_priv_adds_to_grads",
        ("return fsdp_unit", "return !MUTANT && fsdp_unit"),
        "test_gradient_accumulation.py",
    ),
    core_fault(
        "replicas are not reduced",
        "fsdp_unit_priv_enqueue_reduce",
        ("if (has_replicas)", "if (has_replicas && !MUTANT)"),
        "test_hybrid.py",
    ),
    core_fault(
        "replicas are reduced before the shards",
        "reduce_over_replicas",
        skip("FSDP_TRY(fsdp_engine_priv_wait_lane("),
    ),
    core_fault(
        "a reduction does not wait for the gradients",
        "fsdp_unit_priv_enqueue_reduce",
        skip("FSDP_TRY(fsdp_engine_priv_wait_lane(engine, lane,"),
    ),
    core_fault(
        "the partial gradient is not taken in",
        "use_partial",
        skip("FSDP_TRY(add_partial("),
        "test_gradient_accumulation.py",
    ),
    core_fault(
        "the first partial gradient is added to what memory holds",
        "add_partial",
        ("to_slot || has_partial", "to_slot || has_partial || MUTANT"),
        "test_gradient_accumulation.py",
    ),
    core_fault(
        "the offloaded gradient is not brought back before the sum",
        "accumulate_segments",
        never("unit->options.offloads && adds"),
        "test_traps_gradients.py",
    ),
    core_fault(
        "an offloaded gradient does not wait for its sum",
        "end_reduce",
        skip("FSDP_TRY(fsdp_engine_priv_wait_lane("),
    ),
    core_fault(
        "compute does not wait for reductions",
        "fsdp_engine_priv_wait_reduces",
        skip("FSDP_TRY(fsdp_engine_priv_wait_lane("),
        "test_strategies.py",
    ),
    core_fault(
        "reductions follow the order of arrival",
        "fsdp_unit_priv_submit_reduce",
        (
            "position < (int64_t)engine->reduce_cursor",
            "MUTANT || position < (int64_t)engine->reduce_cursor",
        ),
        "test_random_models.py",
    ),
    core_fault(
        "scratch memory is used again at once",
        "fsdp_engine_priv_take_scratch",
        skip("FSDP_TRY(ops->event_wait("),
    ),
    core_fault(
        "the host reads the marks of parameters before they are there",
        "fsdp_unit_await_unused",
        skip("FSDP_TRY(ops->event_synchronize("),
    ),
    # Summon.
    core_fault(
        "what a user writes into summoned parameters is lost",
        "dismiss_params",
        (
            "if (writeback) FSDP_TRY(fsdp_unit_priv_keep",
            "if (writeback && !MUTANT) FSDP_TRY(fsdp_unit_priv_keep",
        ),
        "test_summon.py",
    ),
    core_fault(
        "what rank 0 writes does not reach the others",
        "dismiss_params",
        never("writeback && unit->summon.on_first_rank_only"),
        "test_summon.py",
    ),
    core_fault(
        "a rank without gradients summons what memory holds",
        "fill_own_slots",
        before(
            "for (int64_t i = 0;",
            "if (MUTANT && is_zero) return FSDP_OK;",
        ),
        "test_summon.py",
    ),
    # Memory and the host.
    core_fault(
        "the host waits for uploads at the end of every forward",
        "end_iteration",
        before(
            "for (size_t i = 0; i < engine->num_units; i++) {",
            "if (MUTANT) FSDP_TRY(fsdp_engine_join_host(engine, error));",
        ),
    ),
)
