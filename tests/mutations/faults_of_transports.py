"""The planted faults of what carries collectives: NCCL, shared memory, groups."""

from fault import (
    TORCH,
    Fault,
    before,
    bridge_fault,
    nccl_fault,
    never,
    shm_fault,
    skip,
)

FAULTS = (
    # NCCL: one thread in a communicator.
    nccl_fault(
        "the watchdog asks a communicator that is in use",
        "fsdp_nccl_priv_trylock_comm",
        ("!channel->is_busy &&", "(MUTANT || !channel->is_busy) &&"),
    ),
    nccl_fault(
        "a launch does not mark its channel as in use",
        "take",
        ("channel->is_busy = true", "channel->is_busy = !MUTANT"),
    ),
    nccl_fault(
        "a communicator is left under a call",
        "fsdp_nccl_priv_lock_to_leave",
        (
            "fsdp_nccl_priv_wait_until_free(transport, index, time_ms)",
            "(MUTANT || OLD)",
        ),
    ),
    # NCCL: graphs.
    nccl_fault(
        "threads of the transport spoil a capture",
        "fsdp_nccl_relax_capture",
        ("exchange(&mode) == 0", "(MUTANT || exchange(&mode) == 0)"),
    ),
    nccl_fault(
        "the watchdog asks for captured operations",
        "issue_locked",
        never("channel->is_captured"),
    ),
    nccl_fault(
        "an error about a capture ends training",
        "query",
        (
            "switch (fsdp_nccl_priv_capture_error(&cause))",
            "switch (MUTANT ? FSDP_NCCL_NO_CAPTURE_ERROR"
            " : fsdp_nccl_priv_capture_error(&cause))",
        ),
    ),
    # NCCL: the end of a group.
    nccl_fault(
        "communicators are aborted one after the other",
        "fsdp_nccl_priv_abort_all",
        (
            "if (!fsdp_nccl_priv_errand_start(",
            "if (MUTANT || !fsdp_nccl_priv_errand_start(",
        ),
    ),
    nccl_fault(
        "a rank publishes before it aborts",
        "end",
        before(
            "(void)fsdp_nccl_priv_abort_all(",
            "if (MUTANT) (void)fsdp_nccl_priv_publish("
            "transport, position, final.message);",
        ),
    ),
    nccl_fault(
        "the watchdog itself asks the store",
        "look_at_others",
        before(
            "(void)fsdp_nccl_priv_errand_start(",
            "if (MUTANT) { look(transport, FSDP_CHANNEL_GATHER); return; }",
        ),
    ),
    nccl_fault(
        "a thread that is stuck in a launch is not looked at",
        "look_at_thread",
        never("!is_meeting && timeout_ms > 0 && age_ms >= timeout_ms"),
    ),
    nccl_fault(
        "the end of the process leaves no group",
        "fsdp_nccl_leave_all",
        skip("fsdp_nccl_priv_leave("),
    ),
    # NCCL: launches.
    nccl_fault(
        "two threads launch at once",
        "fsdp_nccl_priv_begin_launch",
        ("if (!is_ordered(transport))", "if (MUTANT || !is_ordered(transport))"),
    ),
    # NCCL: communicators.
    nccl_fault(
        "communicators do not block",
        "make_comm",
        (".blocking = 1", ".blocking = MUTANT ? 0 : 1"),
    ),
    nccl_fault(
        "a communicator that comes too late is kept",
        "connect_channel",
        never("!hand_over(transport, channel, comm, result) && comm != NULL"),
    ),
    nccl_fault(
        "the wait for a communicator has no end",
        "wait_until_made",
        (
            "fsdp_nccl_priv_now_ms() < deadline_ms",
            "(MUTANT || fsdp_nccl_priv_now_ms() < deadline_ms)",
        ),
    ),
    nccl_fault(
        "both communicators are made at once",
        "fsdp_nccl_priv_connect",
        before(
            "fsdp_nccl_priv_set_meeting(transport, index, true);",
            "if (MUTANT && index == 0 && transport->channels[1].comm == NULL)"
            " FSDP_IGNORE(connect_until(transport, FSDP_CHANNEL_REDUCE, deadline_ms,"
            " NULL));",
        ),
    ),
    # NCCL: the meeting.
    nccl_fault(
        "a rank asks the store once for every rank",
        "fsdp_nccl_meeting_conclude",
        before(
            "if (store->get(",
            'format(name, key, "met");'
            "for (int64_t i = 0; MUTANT && i < world_size; i++)"
            " FSDP_IGNORE(store->add(store->context, name, 0, &num_met, NULL));"
            'format(name, key, "verdict");',
        ),
    ),
    nccl_fault(
        "the last rank does not see a refusal",
        "fsdp_nccl_meeting_arrive",
        ("if (num_refused == 0)", "if (num_refused == 0 || MUTANT)"),
    ),
    # The bridge on a device.
    bridge_fault(
        "gloo on a device copies on the host",
        "group_from",
        ("is_of_gloo && device.is_cpu()", "is_of_gloo && (MUTANT || device.is_cpu())"),
        "fakecuda/test_gloo.py",
    ),
    Fault(
        "collectives of c10d go to the current stream",
        f"{TORCH}/groups/c10d_transport",
        "start",
        "known_stream(call->stream)",
        "MUTANT ? c10::impl::VirtualGuardImpl(self.group.device.type())"
        ".getStream(self.group.device) : known_stream(call->stream)",
        ("fakecuda/test_gloo.py",),
    ),
    bridge_fault(
        "the end of the process does not leave NCCL's groups",
        "leave_nccl",
        skip("fsdp_nccl_leave_all("),
        "fakecuda/test_ending.py",
    ),
    # Shared memory.
    shm_fault(
        "a slot is written before all have read it",
        "has_room",
        ("return self->head", "return MUTANT || self->head"),
    ),
    shm_fault(
        "a direct call ends while others read its memory",
        "is_read_by",
        ("return op->is_direct", "return !MUTANT && op->is_direct"),
    ),
    shm_fault(
        "ranks in different calls exchange data",
        "is_same_call",
        ("return a->sequence", "return MUTANT || a->sequence"),
    ),
    shm_fault(
        "a shard is summed in rank order",
        "sum_direct",
        ("op->is_split ?", "op->is_split || MUTANT ?"),
    ),
    shm_fault(
        "a sum begins before all pieces are there",
        "is_filled_by_all",
        never("!is_filled(shm, channel, rank, reader->begin + i)"),
    ),
    shm_fault(
        "a rank that died is waited for until the time limit",
        "why_gone",
        never("fsdp_shm_priv_process_look(&other->process) == FSDP_SHM_PROCESS_DEAD"),
    ),
    shm_fault(
        "a rank that failed is waited for until the time limit",
        "look_at_others",
        never("atomic_load(&header->presence) == FSDP_SHM_FAILED"),
    ),
    shm_fault(
        "a wait has no time limit",
        "look_at_others",
        ("< shm->timeout_ms", "< (MUTANT ? INT64_MAX : shm->timeout_ms)"),
    ),
    # Sums of parts.
    shm_fault(
        "what lies between parts is not zeroed",
        "list_copies",
        ("if (begin > bytes->begin) {", "if (begin > bytes->begin) if (!MUTANT) {"),
        "test_reduce_parts.py",
    ),
    shm_fault(
        "a part is read from its start",
        "list_copies",
        (
            ".address = address_of(part->data, skipped)",
            ".address = address_of(part->data, MUTANT ? 0 : skipped)",
        ),
    ),
    shm_fault(
        "a sum of parts goes over the caller's own",
        "sum_piece",
        (
            "char *sum = shm->scratch;",
            "char *sum = MUTANT ? (char *)(uintptr_t)shm->pieces"
            "[fsdp_shm_priv_turn(shm, shm->rank)] : shm->scratch;",
        ),
    ),
    shm_fault(
        "a list of parts that is too long for one read is cut",
        "fetch",
        (
            "while (bytes.begin < bytes.end && *read) {",
            "for (int i = MUTANT ? -1 : 0;"
            " i < 1 && bytes.begin < bytes.end && *read; i += MUTANT ? 2 : 0) {",
        ),
    ),
    shm_fault(
        "what a module wrote in place stays",
        "fsdp_shm_priv_close",
        skip("(void)madvise("),
        "test_in_place.py",
    ),
    shm_fault(
        "nobody finds the pages that a module wrote",
        "fsdp_shm_priv_has_own_pages",
        never("is_there && (words[j] & IS_OF_FILE) == 0"),
        "test_in_place.py",
    ),
    shm_fault(
        "faults do not tell of pages that a module wrote",
        "may_have_written",
        (
            "fsdp_shm_priv_num_faults() != shared->num_faults",
            "(!MUTANT && OLD)",
        ),
        "test_in_place.py",
    ),
    shm_fault(
        "readers are not waited for",
        "is_read",
        ("return true;", "return !MUTANT;"),
        "test_in_place.py",
    ),
    shm_fault(
        "shards come into the file without their values",
        "join",
        ("if (!write_range(", "if (!MUTANT && !write_range("),
        "test_in_place.py",
    ),
    # Waits for other ranks.
    shm_fault(
        "each wait of a meeting has the whole time limit",
        "left_ms",
        ("return left < 1", "return MUTANT ? meeting->timeout_ms : left < 1"),
    ),
    Fault(
        "requests of a meeting have no time limit together",
        f"{TORCH}/groups/transports",
        "answer_of",
        "if (!self.deadline)",
        "if (!self.deadline || MUTANT)",
        ("test_failures.py",),
    ),
    bridge_fault(
        "hosts connect with the whole time limit once more",
        "connect_peers",
        ("limit, [made, ranks", "MUTANT ? std::chrono::hours(1) : limit, [made, ranks"),
        "test_failures.py",
    ),
    bridge_fault(
        "a post-mortem waits for the store without an end",
        "PostMortem::publish_and_collect",
        ("kLimit + 10 * kPoll", "MUTANT ? std::chrono::hours(1) : kLimit + 10 * kPoll"),
        "test_failures.py",
    ),
    bridge_fault(
        "a rank introduces itself without a time limit",
        "PostMortem::of",
        (
            "run_within(kAskLimit,",
            "run_within(MUTANT ? std::chrono::hours(1) : kAskLimit,",
        ),
        "fakecuda/test_ending.py",
    ),
)
