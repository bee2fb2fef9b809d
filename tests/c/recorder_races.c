/*
 * Races: the recorder runs everything at once, a device does not. Each lane has
 * a clock, and knows which of the other lanes' work happens before its own:
 * what the waits for events say, and what the host saw when it enqueued. An
 * access is a race when an earlier one of the same memory by another lane, one
 * of the two writing, does not happen before it.
 */
#include "recorder_priv.h"

static const char *name_of_lane(int lane) {
  return lane == RECORDER_HOST ? "host"
                               : recorder_priv_lane_name((fsdp_lane)lane);
}

static void join(recorder_clock *clock, const recorder_clock *other) {
  for (int i = 0; i < RECORDER_NUM_LANES; i++) {
    if (other->done[i] > clock->done[i]) clock->done[i] = other->done[i];
  }
}

void recorder_priv_record(recorder *self, fsdp_event *event, fsdp_lane lane) {
  join(&self->clocks[lane], &self->clocks[RECORDER_HOST]);
  event->clock = self->clocks[lane];
}

void recorder_priv_wait(recorder *self, int lane, const fsdp_event *event) {
  join(&self->clocks[lane], &event->clock);
}

static void note_race(recorder *self, const access *before, const char *what) {
  char place[2 * RECORDER_NAME_NBYTES];
  const char *end = strrchr(self->tape, '\n');
  const char *line = end;
  if (self->race[0] != '\0') return;
  const bool shows_memory = self->shows_memory;
  self->shows_memory = true;
  (void)recorder_priv_memory_name(self, "", before->begin, place, sizeof place);
  self->shows_memory = shows_memory;
  while (line != NULL && line > self->tape && line[-1] != '\n') line--;
  snprintf(self->race, sizeof self->race, "%s, not after %s of %s by %s (%.*s)",
           what, before->is_write ? "write" : "read", place,
           name_of_lane(before->lane), line == NULL ? 0 : (int)(end - line),
           line == NULL ? "" : line);
}

static bool is_before(const access *earlier, const recorder_clock *clock) {
  return earlier->time <= clock->done[earlier->lane];
}

void recorder_touch(recorder *self, int lane, const void *data, int64_t nbytes,
                    bool is_write) {
  recorder_clock *clock = &self->clocks[lane];
  int64_t num_kept = 0;
  if (nbytes == 0 || data == NULL) return;
  join(clock, &self->clocks[RECORDER_HOST]);
  const access added = {.begin = data,
                        .end = (const char *)data + nbytes,
                        .lane = lane,
                        .time = ++clock->done[lane],
                        .is_write = is_write};
  for (int64_t i = 0; i < self->num_accesses; i++) {
    const access *earlier = &self->accesses[i];
    const bool overlaps =
        earlier->begin < added.end && added.begin < earlier->end;
    if (overlaps && (is_write || earlier->is_write) &&
        !is_before(earlier, clock)) {
      char what[64];
      snprintf(what, sizeof what, "%s by %s", is_write ? "write" : "read",
               name_of_lane(lane));
      note_race(self, earlier, what);
    }
    /* Whoever comes after this one comes after that one. */
    const bool is_covered =
        added.begin <= earlier->begin && earlier->end <= added.end &&
        (is_write || !earlier->is_write) && is_before(earlier, clock);
    if (is_covered) continue;
    if (num_kept < i) self->accesses[num_kept] = *earlier;
    num_kept++;
  }
  self->num_accesses = num_kept;
  self->accesses = recorder_priv_append_item(self->accesses, num_kept,
                                             sizeof *self->accesses);
  self->accesses[self->num_accesses++] = added;
}

static access access_of(const void *data, int64_t numel, fsdp_dtype dtype,
                        fsdp_lane lane, bool is_write) {
  const char *begin = data;
  return (access){.begin = begin,
                  .end = begin == NULL ? NULL : begin + numel * dtype.itemsize,
                  .lane = (int)lane,
                  .is_write = is_write};
}

void recorder_priv_check_items(recorder *self, fsdp_lane lane,
                               const fsdp_pack_item *items, int64_t num_items) {
  for (int64_t i = 0; i < num_items; i++) {
    const access written =
        access_of(items[i].to, items[i].numel, items[i].to_dtype, lane, true);
    for (int64_t j = 0; j < num_items; j++) {
      const access others[] = {
          access_of(items[j].to, items[j].numel, items[j].to_dtype, lane, true),
          access_of(items[j].from, items[j].numel, items[j].from_dtype, lane,
                    false)};
      for (int k = 0; i != j && k < 2; k++) {
        if (others[k].begin < written.end && written.begin < others[k].end) {
          note_race(self, &others[k], "write by an item of the same call");
        }
      }
    }
  }
}

void recorder_forget(recorder *self, const void *data, int64_t nbytes,
                     int lane) {
  const char *begin = data;
  recorder_clock clock = self->clocks[RECORDER_HOST];
  int64_t num_kept = 0;
  join(&clock, &self->clocks[lane]);
  for (int64_t i = 0; i < self->num_accesses; i++) {
    const access *earlier = &self->accesses[i];
    if (earlier->begin >= begin + nbytes || begin >= earlier->end) {
      self->accesses[num_kept++] = *earlier;
    } else if (!is_before(earlier, &clock)) {
      note_race(self, earlier, "free");
    }
  }
  self->num_accesses = num_kept;
}

void recorder_clear_race(recorder *self) {
  self->race[0] = '\0';
}

const char *recorder_race(const recorder *self) {
  return self->lacks_order ? "" : self->race;
}
