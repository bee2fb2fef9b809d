/*
 * Fixture of the NCCL transport's tests.
 */
#include "nccl_fixture.h"

#include "base/alloc.h"
#include "nccl/nccl_priv.h"

char nccl_fixture_memory[NCCL_FIXTURE_NBYTES];

const fsdp_dtype NCCL_F32 = {FSDP_DTYPE_FLOAT32, 4};
const fsdp_dtype NCCL_BF16 = {FSDP_DTYPE_BFLOAT16, 2};

static fsdp_nccl_events g_events;

fsdp_nccl_options nccl_fixture_options(void) {
  fsdp_nccl_options options;
  fsdp_nccl_options_init(&options);
  g_events = nccl_fake_events();
  options.prefix = "p";
  options.init_timeout_ms = 60000;
  options.timeout_ms = 60000;
  options.grace_ms = 300;
  options.leave_ms = 60000;
  options.poll_ms = 3600000;
  options.events = &g_events;
  options.splits_channels = true;
  return options;
}

fsdp_nccl_options nccl_fixture_quick_options(void) {
  fsdp_nccl_options options = nccl_fixture_options();
  options.poll_ms = 1;
  return options;
}

fsdp_transport *nccl_fixture_create(const fsdp_nccl_options *options,
                                    int64_t rank, int64_t world_size) {
  const fsdp_nccl_library library = nccl_fake_library();
  const fsdp_store store = nccl_fake_store();
  fsdp_transport *transport = NULL;
  fsdp_error error = {0};
  const fsdp_status status = fsdp_nccl_create(&library, options, &store, rank,
                                              world_size, &transport, &error);
  if (status != FSDP_OK) printf("cannot join: %s\n", error.message);
  CHECK_OK(status);
  return transport;
}

fsdp_transport *nccl_fixture_join_next(const fsdp_nccl_options *options,
                                       int64_t rank, int64_t world_size) {
  fsdp_transport *transport = nccl_fixture_create(options, rank, world_size);
  nccl_fixture_connect(transport);
  return transport;
}

void nccl_fixture_check_nothing_lives(void) {
  for (int i = 0; i < 10000 && fsdp_alloc_live() > 0; i++) {
    check_sleep_ms(1); /* a thread that was stuck frees the rest */
  }
  CHECK_I64(fsdp_alloc_live(), 0);
}

void nccl_fixture_leave(fsdp_transport *transport) {
  transport->ops->destroy(transport);
  nccl_fixture_check_nothing_lives();
  CHECK_I64(nccl_fake_num_live(), 0);
  CHECK_I64(nccl_fake_num_events(), 0);
  CHECK(!fsdp_nccl_priv_has_watchdog());
  CHECK_LACKS(nccl_fake_tape(), "WRONG");
}

void nccl_fixture_connect(fsdp_transport *transport) {
  fsdp_nccl_transport *self = fsdp_nccl_priv_of(transport);
  const int num_channels =
      self->options.splits_channels ? FSDP_NUM_CHANNELS : 1;
  for (int i = 0; i < num_channels; i++) {
    const fsdp_channel channel = (fsdp_channel)i;
    CHECK_OK(fsdp_nccl_priv_lock_channel(self, channel, NULL));
    CHECK_OK(fsdp_nccl_priv_connect(self, channel, NULL));
    fsdp_nccl_priv_unlock_channel(self, channel);
  }
}

void nccl_fixture_write_ids(void) {
  const fsdp_store store = nccl_fake_store();
  const fsdp_nccl_id id = {"id0"};
  CHECK_OK(store.set(store.context, "p/id/gather", &id, sizeof id, NULL));
  CHECK_OK(store.set(store.context, "p/id/reduce", &id, sizeof id, NULL));
}

fsdp_transport *nccl_fixture_join(const fsdp_nccl_options *options,
                                  int64_t rank, int64_t world_size) {
  nccl_fake_reset();
  nccl_fake_set_base(nccl_fixture_memory);
  if (rank > 0) nccl_fixture_write_ids();
  return nccl_fixture_join_next(options, rank, world_size);
}

fsdp_transport *nccl_fixture_open(int64_t rank, int64_t world_size) {
  const fsdp_nccl_options options = nccl_fixture_options();
  return nccl_fixture_join(&options, rank, world_size);
}

fsdp_call nccl_fixture_call(fsdp_channel channel, intptr_t stream,
                            const char *label) {
  return (fsdp_call){
      .channel = channel, .stream = nccl_fake_stream(stream), .label = label};
}

fsdp_status nccl_fixture_gather(fsdp_transport *transport, const char *label,
                                fsdp_error *error) {
  const fsdp_call call = nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, label);
  return transport->ops->all_gather(transport, &call, nccl_fixture_memory,
                                    nccl_fixture_memory, 4, NCCL_F32, NULL,
                                    error);
}

fsdp_status nccl_fixture_unit(fsdp_transport *transport, bool has_reduce,
                              fsdp_error *error) {
  const fsdp_transport_ops *ops = transport->ops;
  const fsdp_call gather =
      nccl_fixture_call(FSDP_CHANNEL_GATHER, 1, "all_gather of unit 'a'");
  const fsdp_call reduce =
      nccl_fixture_call(FSDP_CHANNEL_REDUCE, 2, "reduce_scatter of unit 'a'");
  char *memory = nccl_fixture_memory;
  fsdp_status status = FSDP_OK;

  FSDP_TRY(ops->group_begin(transport, &gather, error));
  FSDP_TRY(ops->all_gather(transport, &gather, memory, memory + 16, 4, NCCL_F32,
                           NULL, error));
  FSDP_TRY(ops->all_gather(transport, &gather, memory + 64, memory + 512, 2,
                           NCCL_F32, NULL, error));
  FSDP_TRY(ops->group_end(transport, &gather, error));
  if (!has_reduce) return FSDP_OK;
  FSDP_TRY(ops->group_begin(transport, &reduce, error));
  FSDP_TRY(ops->reduce_scatter(transport, &reduce, memory, 4, NCCL_F32, NULL,
                               error));
  FSDP_TRY(ops->reduce_scatter(transport, &reduce, memory + 64, 2, NCCL_F32,
                               NULL, error));
  FSDP_TRY(ops->group_end(transport, &reduce, error));
done:
  return status;
}

static void *gather_in_thread(void *gather) {
  nccl_fixture_gather_thread *self = gather;
  self->status = nccl_fixture_gather(self->transport, "unit 'b'", &self->error);
  return NULL;
}

void nccl_fixture_start_gather(nccl_fixture_gather_thread *self,
                               const char *tape) {
  CHECK(pthread_create(&self->thread, NULL, gather_in_thread, self) == 0);
  nccl_fixture_wait_for_tape(tape);
}

void nccl_fixture_join_gather(nccl_fixture_gather_thread *self,
                              fsdp_status status) {
  CHECK(pthread_join(self->thread, NULL) == 0);
  CHECK_I64(self->status, status);
}

void nccl_fixture_wait_for_aborts(int64_t num) {
  for (int i = 0; i < 10000 && nccl_fake_num(NCCL_FAKE_ABORTS) < num; i++) {
    check_sleep_ms(1);
  }
  CHECK_I64(nccl_fake_num(NCCL_FAKE_ABORTS), num);
}

fsdp_status nccl_fixture_wait_for_failure(fsdp_transport *transport,
                                          fsdp_error *error) {
  for (int i = 0; i < 10000; i++) {
    const fsdp_status status = transport->ops->check(transport, error);
    if (status != FSDP_OK) return status;
    check_sleep_ms(1);
  }
  return FSDP_OK;
}

void nccl_fixture_wait_for_tape(const char *text) {
  for (int i = 0; i < 10000; i++) {
    if (strstr(nccl_fake_tape(), text) != NULL) return;
    check_sleep_ms(1);
  }
  CHECK(strstr(nccl_fake_tape(), text) != NULL);
}
