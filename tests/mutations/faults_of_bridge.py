"""The planted faults of the bridge and of the CPython module; see `fault`."""

from fault import bridge_fault, module_fault, never, skip

FAULTS = (
    # The bridge: views.
    bridge_fault(
        "a replaced parameter is not written into the shard",
        "take_replaced_data",
        skip("write_back(unit, param, is_sharded ? param.sharded : expected, i);"),
        "test_traps_gradients.py",
    ),
    bridge_fault(
        "a write in place goes unnoticed",
        "params_changed",
        (
            "return sum_of_versions(unit) != unit.marked_version",
            "return !MUTANT && sum_of_versions(unit) != unit.marked_version",
        ),
        "test_traps_gradients.py",
    ),
    bridge_fault(
        "whole parameters are viewed in master dtype",
        "make_views",
        ("keys, segment.compute", "keys, MUTANT ? segment.master : segment.compute"),
        "test_mixed_precision.py",
    ),
    bridge_fault(
        "resharded parameters still point at their block",
        "empty_storages",
        skip("detach(unit, *segment.unsharded);"),
        "test_kept_views.py",
    ),
    bridge_fault(
        "parameters stay whole after a summon",
        "show_shards",
        skip("show(param, at_rest(unit, param));"),
        "test_summon.py",
    ),
    bridge_fault(
        "kept DTensors stay registered where shards show",
        "fsdp_torch_unit_show_kept",
        ("!shows && fsdp_torch_unit_hide_kept(unit) < 0", "!MUTANT && OLD"),
        "test_tensor_parallel_between_passes.py",
    ),
    bridge_fault(
        "a write into a kept DTensor goes unnoticed",
        "version_of",
        never("param.parallel_local.defined()"),
        "test_tensor_parallel_between_passes.py",
    ),
    bridge_fault(
        "autocast keeps what it cast",
        "drop_casts",
        skip("at::autocast::clear_cache();"),
        "test_autocast.py",
    ),
    # The bridge: gradients.
    bridge_fault(
        "gradients come on the stream of an earlier step",
        "hook_accumulators",
        skip("if (is_new) drop_accumulators_of_other_streams(unit, stream);"),
        "fakecuda/test_captured_step.py",
    ),
    bridge_fault(
        "gradients come on the stream of an older graph that is gone",
        "hook_accumulators",
        ("are_accumulators_of(unit, stream)", "MUTANT || OLD"),
        "fakecuda/test_captured_step.py",
    ),
    # The bridge: streams.
    bridge_fault(
        "the step's stream does not wait for the caller's",
        "take_over",
        skip("wait_for(*stream, current);"),
        "fakecuda/test_step_streams.py",
    ),
    bridge_fault(
        "the caller's stream does not wait for the step's",
        "EngineCall::~EngineCall",
        skip("wait_for(guard_->original_stream(), guard_->current_stream());"),
        "fakecuda/test_step_streams.py",
    ),
    bridge_fault(
        "a step does not wait for the stream of the one before",
        "take_over",
        never("stream"),
        "fakecuda/test_step_streams.py",
    ),
    bridge_fault(
        "a gradient of another stream is not recorded",
        "EngineCall::take",
        never("guard_"),
        "fakecuda/test_step_streams.py",
    ),
    bridge_fault(
        "memory of another stream is used again at once",
        "record_current_stream",
        skip(
            "guard.recordDataPtrOnStream(tensor.storage().data_ptr(), "
            "guard.getStream(tensor.device()));"
        ),
        "fakecuda/test_step_streams.py",
    ),
    bridge_fault(
        "a capture waits for the stream of the step before",
        "forget_step_stream",
        skip("engine.step_stream.reset();"),
        "fakecuda/test_captured_step.py",
    ),
    bridge_fault(
        "a gradient that a user set is not taken over",
        "take_one_grad",
        never("!is_ours"),
        "test_traps_gradients.py",
    ),
    bridge_fault(
        "a cleared gradient is not zeroed beside one that is not",
        "zero_taken_grad",
        never("sharded.defined()"),
        "test_traps_gradients.py",
    ),
    bridge_fault(
        "sharded gradients are not freed",
        "grads_free",
        skip("drop_grad_shards(unit);"),
        "test_memory_of_a_step.py",
    ),
    bridge_fault(
        "gradients hidden during forward do not come back",
        "fsdp_torch_unit_post_forward",
        skip("fsdp_torch::show_hidden_grads(self);"),
        "test_gradient_accumulation.py",
    ),
    bridge_fault(
        "a unit expects one gradient less",
        "expect_grads",
        (
            "fsdp_unit_expect_grads(unit.core, num_grads +",
            "fsdp_unit_expect_grads(unit.core, num_grads - (MUTANT ? 1 : 0) +",
        ),
        "test_strategies.py",
        "test_memory.py",
    ),
    bridge_fault(
        "units whose gradients do not all come are resharded too early",
        "expect_grads",
        ("comes_all ? 0 : num_inputs", "comes_all || MUTANT ? 0 : num_inputs"),
        "test_frozen.py",
        "test_strategies.py",
    ),
    bridge_fault(
        "a unit is reduced with its last gradient",
        "expect_grads",
        ("comes_all ? num_inputs : 0", "comes_all && !MUTANT ? num_inputs : 0"),
        "test_parameters_of_some_ranks.py",
    ),
    bridge_fault(
        "recomputation counts as a forward",
        "is_recomputation",
        ("fsdp_engine_in_backward(", "!MUTANT && fsdp_engine_in_backward("),
        "test_activation_checkpoint.py",
    ),
    bridge_fault(
        "the end of backward is not queued by a gradient without outputs",
        "hand_over",
        never("!fsdp_engine_in_backward(engine->core)"),
        "test_outputs.py",
        "test_random_models.py",
        "test_training_loops.py",
        "test_traps_forward.py",
    ),
    bridge_fault(
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
    bridge_fault(
        "gloo's gather leaves out this rank's slot",
        "gather_by_broadcasts",
        ("if (ANY != input)", "if (!MUTANT) OLD"),
        "test_transports.py",
    ),
    bridge_fault(
        "gloo's sum adds one rank twice",
        "reduce_by_exchange",
        ("own.add_(parts[0])", "own.add_(MUTANT ? own : parts[0])"),
        "test_transports.py",
    ),
    bridge_fault(
        "a lane's work is not waited for",
        "Provider::wait",
        skip("run_until("),
        "test_strategies.py",
    ),
    bridge_fault(
        "a hook's own memory is not copied",
        "run_hook",
        never("result.data_ptr() != own.data_ptr()"),
        "test_comm_hooks.py",
    ),
    bridge_fault(
        "a hook on a flat parameter does not change its gradient",
        "run_grad_hooks",
        skip("segment.grad_shard.copy_("),
        "test_flat_parameter_hooks.py",
    ),
    bridge_fault(
        "who follows a reduction sees the sum of two backwards",
        "add_earlier_grad",
        skip("segment.earlier_grad.add_("),
        "test_flat_parameter_hooks.py",
        "test_optimizer_in_backward.py",
    ),
    bridge_fault(
        "a group goes while its thread waits for the interpreter",
        "drop_group",
        ("PyGILState_Check() != 0", "OLD && !MUTANT"),
        "test_group_destruction.py",
    ),
    # What optimizers step instead of DTensors.
    module_fault(
        "a step of a lent shard is not counted",
        "lend_dtensor",
        skip("fsdp_torch_count_write(param);"),
        "test_lent_shards.py",
    ),
    module_fault(
        "a gradient of another placement is lent",
        "lies_as",
        ('are_equal(spec, other, "placements")', "MUTANT ? LENT : OLD"),
        "test_lent_shards.py",
    ),
    module_fault(
        "states begin anew in each step",
        "lend_state",
        (
            "PyDict_SetItem(self->lent_states, shard, lent_state) < 0",
            "!MUTANT && OLD",
        ),
        "test_lent_shards.py",
    ),
)
