/*
 * Tests of offload/: which groups are copied when, what the lanes wait for,
 * that bytes come back, and every failure.
 */
#include <stdlib.h>

#include "base/alloc.h"
#include "check.h"
#include "every_allocation.h"
#include "offload/offload.h"
#include "recorder.h"

enum { MAX_ITEMS = 64, CHUNK_NBYTES = 256 };

/* One saved storage, as the bridge has it. */
typedef struct saved {
  unsigned char *data; /* NULL: let go */
  int64_t nbytes;
  int64_t number;
  bool is_shared; /* somebody else holds it, too */
  bool is_known;  /* to the offload */
  fsdp_offload_item *item;
} saved;

/* Of the running test. */
static recorder *device;
static fsdp_offload *offload;
static saved items[MAX_ITEMS];
static int64_t num_items;

static unsigned char byte_of(const saved *self, int64_t i) {
  return (unsigned char)(self->number * 37 + i * 11 + 1);
}

/* COMPUTE is done with the memory: the allocator may hand it out again to work
 * that COMPUTE gets later. */
static void free_data(saved *self) {
  if (self->data == NULL) return;
  recorder_forget(device, self->data, self->nbytes, FSDP_LANE_COMPUTE);
  free(self->data);
  self->data = NULL;
}

static bool is_alone(void *context, void *token) {
  (void)context;
  return !((const saved *)token)->is_shared;
}

static void let_go(void *context, void *token) {
  (void)context;
  CHECK(((saved *)token)->data != NULL);
  free_data(token);
}

static fsdp_status make(void *context, void *token, void **data,
                        fsdp_error *error) {
  saved *self = token;
  (void)context;
  CHECK(self->data == NULL);
  void *fails = fsdp_calloc(1, 1); /* where a test makes it fail */
  if (fails == NULL) {
    return FSDP_FAIL(error, FSDP_OUT_OF_MEMORY, "device memory");
  }
  fsdp_free(fails);
  self->data = malloc((size_t)self->nbytes);
  memset(self->data, 0xCD, (size_t)self->nbytes);
  /* Where it was is what COMPUTE used last. */
  recorder_touch(device, FSDP_LANE_COMPUTE, self->data, self->nbytes, true);
  *data = self->data;
  return FSDP_OK;
}

static void forget(void *context, void *token) {
  saved *self = token;
  (void)context;
  CHECK(self->is_known);
  self->is_known = false;
  free_data(self);
}

static fsdp_status create(fsdp_error *error) {
  const fsdp_offload_calls calls = {NULL, is_alone, let_go, make, forget};
  return fsdp_offload_create(recorder_ops(device), &calls, CHUNK_NBYTES,
                             &offload, error);
}

static fsdp_status save(int64_t nbytes, fsdp_error *error) {
  saved *self = &items[num_items];
  *self = (saved){.nbytes = nbytes, .number = num_items};
  self->data = malloc((size_t)nbytes);
  for (int64_t i = 0; i < nbytes; i++) self->data[i] = byte_of(self, i);
  recorder_touch(device, FSDP_LANE_COMPUTE, self->data, nbytes, true);
  const fsdp_status status =
      fsdp_offload_add(offload, self, self->data, nbytes, &self->item, error);
  if (status != FSDP_OK) {
    free_data(self);
    return status;
  }
  self->is_known = true;
  num_items++;
  return status;
}

/* Backward reads an item. */
static fsdp_status read(int64_t index, fsdp_error *error) {
  saved *self = &items[index];
  const fsdp_status status = fsdp_offload_need(offload, self->item, error);
  if (status != FSDP_OK) return status;
  recorder_touch(device, FSDP_LANE_COMPUTE, self->data, self->nbytes, false);
  for (int64_t i = 0; i < self->nbytes; i++) {
    if (!CHECK_I64(self->data[i], byte_of(self, i))) break;
  }
  return status;
}

static void drop(int64_t index) {
  fsdp_offload_item *item = items[index].item;
  if (item == NULL) return;
  items[index].item = NULL;
  fsdp_offload_drop(offload, item);
}

/* All of a test; the offload and what it let go are gone after. */
static void end(void) {
  for (int64_t i = 0; i < num_items; i++) drop(i);
  fsdp_offload_destroy(offload);
  offload = NULL;
  for (int64_t i = 0; i < num_items; i++) CHECK(!items[i].is_known);
  num_items = 0;
  CHECK_TEXT(recorder_race(device), "");
  CHECK_I64(recorder_live_blocks(device), 0);
  CHECK_I64(recorder_live_events(device), 0);
}

static fsdp_offload_stats stats(void) {
  fsdp_offload_stats result;
  fsdp_offload_get_stats(offload, &result);
  return result;
}

static int64_t device_nbytes(void) {
  int64_t total = 0;
  for (int64_t i = 0; i < num_items; i++) {
    if (items[i].data != NULL) total += items[i].nbytes;
  }
  return total;
}

static fsdp_status play_word(const char *word, int64_t number,
                             fsdp_error *error) {
  const struct {
    const char *word;
    int64_t count;
  } counts[] = {
      {"device", device_nbytes()},          {"held", stats().held_nbytes},
      {"peak", stats().peak_nbytes},        {"host", stats().host_nbytes},
      {"downloads", stats().num_downloads}, {"uploads", stats().num_uploads}};
  if (strcmp(word, "save") == 0) return save(number, error);
  if (strcmp(word, "enter") == 0) return fsdp_offload_enter(offload, error);
  if (strcmp(word, "leave") == 0) return fsdp_offload_leave(offload, error);
  if (strcmp(word, "read") == 0) return read(number, error);
  if (strcmp(word, "finish") == 0) {
    return fsdp_offload_end_backward(offload, error);
  }
  if (strcmp(word, "drop") == 0) {
    drop(number);
  } else if (strcmp(word, "spare") == 0) {
    fsdp_offload_spare(offload, items[number].item);
  } else if (strcmp(word, "again") == 0) {
    fsdp_offload_add_again(offload, items[number].item);
  } else if (strcmp(word, "share") == 0) {
    items[number].is_shared = true;
  } else if (strcmp(word, "unshare") == 0) {
    items[number].is_shared = false;
  } else if (strcmp(word, "keep") == 0) {
    fsdp_offload_keep_last(offload, number);
  } else if (strcmp(word, "clear") == 0) {
    recorder_clear(device);
  } else {
    size_t i = 0;
    while (strcmp(word, counts[i].word) != 0) i++;
    CHECK_I64(counts[i].count, number);
  }
  return FSDP_OK;
}

/* "save 100; enter; host 256": calls, until one fails, and what must hold. */
static fsdp_status play(const char *script, fsdp_error *error) {
  fsdp_status status = FSDP_OK;
  while (*script != '\0' && status == FSDP_OK) {
    char word[16] = "";
    int number = 0;
    const int64_t num_failures = check_num_failures;
    (void)sscanf(script, "%15[^; ] %d", word, &number);
    status = play_word(word, number, error);
    if (check_num_failures > num_failures) printf("  %s %d\n", word, number);
    script += strcspn(script, ";");
    script += strspn(script, "; ");
  }
  return status;
}

#define PLAY(script) CHECK_OK(play((script), NULL))

static void finish(void) {
  if (device == NULL) return;
  end();
  recorder_destroy(device);
  device = NULL;
}

/* A device that has no offload yet; the next one, or the end of the test, ends
 * both. */
static void open_device(void) {
  finish();
  check_at_end(finish);
  device = recorder_create();
}

static void begin(void) {
  open_device();
  CHECK_OK(create(NULL));
}

/* Forward and backward of three units that save 100, 200 and 300 bytes. */
#define FORWARD "enter; save 100; enter; save 200; enter; save 300; leave"
#define BACKWARD "read 2; drop 2; read 1; drop 1; read 0; drop 0; finish"

TEST(test_a_step_on_the_lanes) {
  begin();
  recorder_show_memory(device, true);
  PLAY("clear; enter; save 100; enter; save 200; device 300; enter");
  CHECK_LINES(recorder_tape(device),
              /* the second unit begins: the first one's go */
              "event e4; event e5; "
              "record e1 compute; wait download e1; host_alloc 256 h1; "
              "copy_to_host download 100 h1 <- ?; record e2 download; "
              /* the third one: they have gone */
              "event e6; event e7; wait compute e2; record e1 compute; "
              "wait download e1; host_alloc 256 h2; "
              "copy_to_host download 128 h1+128 <- ?; "
              "copy_to_host download 72 h2 <- ?; record e4 download");
  PLAY("device 200; held 300; clear; save 300; leave; device 300");
  CHECK_LINES(recorder_tape(device), "wait compute e4");
  PLAY("clear; read 2; device 500");
  CHECK_LINES(recorder_tape(device),
              "record e1 compute; wait upload e1; wait upload e4; "
              "copy_to_device upload 128 ? <- h1+128; "
              "copy_to_device upload 72 ? <- h2; record e5 upload");
  PLAY("drop 2; device 200; clear; read 1");
  CHECK_LINES(recorder_tape(device),
              "wait compute e5; record e1 compute; wait upload e1; "
              "wait upload e2; copy_to_device upload 100 ? <- h1; "
              "record e3 upload");
  PLAY("drop 1; clear; read 0; drop 0; finish; device 0; held 0; peak 300");
  CHECK_LINES(recorder_tape(device), "wait compute e3");
  PLAY("downloads 2; uploads 2; host 512; clear");
  PLAY("enter; save 100; enter");
  CHECK_HAS(recorder_tape(device), "record e1 upload; wait download e1");
  CHECK_LACKS(recorder_tape(device), "host_alloc");
}

TEST(test_a_step_allocates_nothing_once_it_has_enough) {
  begin();
  PLAY(FORWARD "; " BACKWARD "; host 512");
  for (int step = 0; step < 3; step++) {
    num_items = 0;
    PLAY("clear; " FORWARD "; " BACKWARD "; host 512");
    CHECK_LACKS(recorder_tape(device), "host_alloc");
    CHECK_LACKS(recorder_tape(device), "event");
  }
  PLAY("downloads 8; uploads 8");
}

TEST(test_the_last_groups_stay) {
  begin();
  PLAY("keep 2; " FORWARD
       "; device 500; downloads 1; read 2; uploads 0; "
       "read 1; uploads 1; device 600; read 0; finish");
  begin();
  PLAY("keep 3; " FORWARD
       "; device 600; downloads 0; keep 0; enter; "
       "downloads 3; leave; device 0");
  PLAY("read 2; read 1; read 0; finish; held 600; device 0");
}

TEST(test_units_that_save_nothing_are_no_groups) {
  begin();
  PLAY(
      "enter; enter; save 100; enter; enter; enter; device 100; downloads 1; "
      "leave; leave; device 0; save 10; drop 1; enter; enter; read 0; "
      "device 100");
}

TEST(test_what_others_hold_goes_later) {
  begin();
  PLAY(
      "save 100; save 50; share 1; enter; downloads 1; save 20; device 170; "
      "enter; device 70; downloads 2; unshare 1; save 10; enter; leave; "
      "downloads 4; device 0");
  PLAY("read 3; device 80; read 2; device 180; read 1; read 0; finish");
  begin();
  PLAY("save 100; share 0; enter; save 10; enter; drop 0; leave; downloads 1");
}

TEST(test_an_item_that_is_saved_again_goes_with_the_later_unit) {
  begin();
  PLAY(
      "keep 2; save 100; enter; again 0; save 10; enter; downloads 0; "
      "save 20; enter; downloads 2; again 0; leave; device 20; held 110; "
      "read 0; device 130");
}

TEST(test_a_backward_that_runs_twice) {
  begin();
  PLAY(FORWARD);
  for (int pass = 0; pass < 2; pass++) {
    PLAY(
        "read 2; spare 2; read 1; spare 1; read 0; spare 0; device 300; "
        "finish; device 300; held 300");
  }
  PLAY("uploads 4; downloads 2; drop 2; drop 1; drop 0; held 0");
}

TEST(test_what_came_back_for_nothing_goes) {
  begin();
  PLAY(FORWARD
       "; read 2; device 500; finish; device 300; read 1; device 600; "
       "finish; device 300; uploads 3; drop 0; drop 1; held 0");
}

/* What is dropped in flight is freed behind the copy. */
TEST(test_drops_in_flight) {
  begin();
  PLAY(
      "save 100; enter; drop 0; device 100; save 10; enter; device 10; "
      "drop 1; leave; device 0");
  begin();
  PLAY(FORWARD "; read 2; drop 1; device 500; finish; device 300; held 100");
  begin(); /* nothing comes after */
  PLAY("save 100; enter; drop 0");
  begin();
  PLAY(FORWARD "; read 2; drop 1; drop 0; drop 2");
}

/* Two forwards before their backwards, the first of which comes first. */
TEST(test_backwards_in_the_order_of_forwards) {
  begin();
  PLAY(FORWARD
       "; enter; save 40; enter; save 50; leave; downloads 4; "
       "device 50; read 2; drop 2; read 1; drop 1; read 0; drop 0; "
       "finish; read 4; drop 4; read 3; drop 3; finish; held 0");
}

TEST(test_bad_arguments) {
  fsdp_error error;
  const fsdp_offload_calls calls = {0};
  open_device();
  CHECK_FAILS(
      fsdp_offload_create(recorder_ops(device), &calls, 100, &offload, &error),
      FSDP_INVALID_ARGUMENT, error.message,
      "chunks of 100 bytes of host memory: need a positive multiple of "
      "64");
  CHECK(offload == NULL);
  CHECK_OK(create(NULL));
  fsdp_offload_item *item = NULL;
  CHECK_FAILS(fsdp_offload_add(offload, NULL, NULL, 0, &item, &error),
              FSDP_INVALID_ARGUMENT, error.message,
              "a saved tensor of 0 bytes: need at least 1");
  CHECK_OK(fsdp_offload_add(offload, &items[0], NULL, INT64_MAX, &item, NULL));
  items[0] = (saved){.is_known = true, .item = item};
  num_items = 1;
  CHECK_FAILS(fsdp_offload_enter(offload, &error), FSDP_OVERFLOW, error.message,
              "0 bytes of saved tensors and 9223372036854775807 more do not "
              "fit in int64");
  fsdp_offload_destroy(NULL);
}

/* All that a step does, for failures; what fails may be tried again. */
#define WHOLE                                                               \
  "enter; save 100; enter; save 700; share 1; enter; unshare 1; save 300; " \
  "enter; save 10; leave; read 3; read 2; read 1; read 0; finish"

static fsdp_status work(void *context, fsdp_error *error) {
  (void)context;
  fsdp_status status = create(error);
  if (status != FSDP_OK) return status;
  status = play(WHOLE, error);
  end();
  return status;
}

TEST(test_every_allocation_fails_once) {
  open_device();
  CHECK_I64(every_allocation(work, NULL), 18);
}

/* A call fails, and the step goes on as if the user had caught the error:
 * nothing that is read is wrong, and nothing is freed too early. */
TEST(test_every_call_fails_once) {
  open_device();
  for (int64_t i = 0;; i++) {
    fsdp_error error = {0};
    recorder_fail_at(device, i);
    fsdp_status status = create(&error);
    if (status == FSDP_OK) {
      static const char *const words[] = {
          "enter",  "save 100", "enter",  "save 700", "enter",  "save 300",
          "enter",  "save 10",  "leave",  "read 3",   "read 2", "read 1",
          "read 0", "finish",   "read 2", "finish"};
      for (size_t j = 0; j < sizeof words / sizeof *words; j++) {
        fsdp_error its = {0};
        const fsdp_status each = play(words[j], &its);
        if (each == FSDP_OK) continue;
        CHECK(strstr(its.message, "injected") != NULL);
        status = each;
        PLAY(words[j]); /* again */
      }
      end();
    }
    recorder_fail_at(device, -1);
    if (status == FSDP_OK) {
      CHECK(i > 40);
      break;
    }
  }
}

/* Random programs: whatever is read is right, nobody reads or frees memory that
 * a lane still uses, and nothing is left. */
TEST(test_random_programs) {
  for (uint64_t start = 1; start <= 300; start++) {
    uint64_t seed = start;
    begin();
    fsdp_offload_keep_last(offload, 1 + check_random(&seed, 3));
    for (int64_t step = 0; step < 150; step++) {
      const int64_t choice = check_random(&seed, 12);
      const int64_t index =
          num_items == 0 ? -1 : check_random(&seed, num_items);
      const bool is_live = index >= 0 && items[index].item != NULL;
      if (choice < 3 && num_items < MAX_ITEMS) {
        CHECK_OK(save(1 + check_random(&seed, 600), NULL));
      } else if (choice < 6) {
        CHECK_OK(fsdp_offload_enter(offload, NULL));
      } else if (choice == 6) {
        CHECK_OK(fsdp_offload_leave(offload, NULL));
      } else if (choice == 7) {
        CHECK_OK(fsdp_offload_end_backward(offload, NULL));
      } else if (is_live && choice < 10) {
        CHECK_OK(read(index, NULL));
        if (check_random(&seed, 2)) {
          fsdp_offload_spare(offload, items[index].item);
        }
      } else if (is_live && choice == 10) {
        drop(index);
      } else if (is_live) {
        items[index].is_shared = check_random(&seed, 2) == 1;
        fsdp_offload_add_again(offload, items[index].item);
      }
    }
    const int64_t num_failures = check_num_failures;
    finish();
    if (check_num_failures > num_failures) {
      printf("  seed %d\n", (int)start);
      break;
    }
  }
}
