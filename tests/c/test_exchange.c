/*
 * Tests of state/exchange: the picture, every failure, and random exchanges of
 * all ranks played through byte by byte.
 */
#include "base/alloc.h"
#include "check.h"
#include "every_allocation.h"
#include "placement_fixture.h"
#include "state/exchange.h"

/* --- Pictures ------------------------------------------------------------ */

/* Items over two ranks or more. The items own their placements. */
typedef struct items_list {
  fsdp_exchange_item items[4];
  fsdp_placement *placements[8];
  int64_t num_items;
  int64_t world_size;
} items_list;

static fsdp_placement *over_ranks(const fsdp_range *ranges, int64_t num_ranks) {
  fsdp_piece pieces[8];
  for (int64_t rank = 0; rank < num_ranks; rank++) {
    pieces[rank] = (fsdp_piece){.in_param = ranges[rank], .buffer = rank};
  }
  return place(pieces, num_ranks);
}

static void add_item(items_list *list, int64_t itemsize, const fsdp_range *held,
                     const fsdp_range *needed) {
  fsdp_placement **placements = &list->placements[2 * list->num_items];
  placements[0] = over_ranks(held, list->world_size);
  placements[1] = over_ranks(needed, list->world_size);
  list->items[list->num_items++] = (fsdp_exchange_item){
      .itemsize = itemsize, .held = placements[0], .needed = placements[1]};
}

static void release_items(items_list *list) {
  for (int64_t i = 0; i < 2 * list->num_items; i++) {
    fsdp_placement_destroy(list->placements[i]);
  }
  list->num_items = 0;
}

static fsdp_exchange *plan(const items_list *list, int64_t rank,
                           int64_t direct_nbytes) {
  const fsdp_exchange_spec spec = {list->items, list->num_items, rank,
                                   list->world_size, direct_nbytes};
  fsdp_exchange *exchange = NULL;
  CHECK_OK(fsdp_exchange_create(&spec, &exchange, NULL));
  return exchange;
}

static size_t write_messages(char *text, size_t size, const char *way,
                             const fsdp_exchange_message *messages,
                             int64_t num_messages) {
  size_t used = 0;
  for (int64_t i = 0; i < num_messages; i++) {
    const fsdp_exchange_message *message = &messages[i];
    used += (size_t)snprintf(text + used, size - used,
                             "%s %" PRId64 ", %" PRId64 " bytes:", way,
                             message->peer, message->nbytes);
    for (int64_t j = 0; j < message->num_pieces; j++) {
      const fsdp_exchange_piece *piece = &message->pieces[j];
      used += (size_t)snprintf(text + used, size - used,
                               " %" PRId64 "[%" PRId64 " + %" PRId64 "]",
                               piece->item, piece->offset, piece->nbytes);
    }
    used +=
        (size_t)(message->same_as == i
                     ? snprintf(text + used, size - used, "\n")
                     : snprintf(text + used, size - used,
                                " as message %" PRId64 "\n", message->same_as));
  }
  return used;
}

/* Destroys the exchange. */
static const char *text_of(fsdp_exchange *exchange) {
  static char text[4096];
  size_t used = 0;
  int64_t num = 0;
  const fsdp_exchange_copy *copies = fsdp_exchange_copies(exchange, &num);
  text[0] = '\0';
  for (int64_t i = 0; i < num; i++) {
    used += (size_t)snprintf(text + used, sizeof text - used,
                             "copy %" PRId64 " %" PRId64 " -> %" PRId64
                             ", %" PRId64 " bytes\n",
                             copies[i].item, copies[i].source_offset,
                             copies[i].target_offset, copies[i].nbytes);
  }
  const fsdp_exchange_message *messages =
      fsdp_exchange_outgoing(exchange, &num);
  used += write_messages(text + used, sizeof text - used, "to", messages, num);
  messages = fsdp_exchange_incoming(exchange, &num);
  (void)write_messages(text + used, sizeof text - used, "from", messages, num);
  fsdp_exchange_destroy(exchange);
  return text;
}

TEST(test_header_picture) {
  const fsdp_range held[] = {{0, 3}, {3, 5}};
  const fsdp_range needed[] = {{0, 5}, {3, 5}};
  items_list list = {.world_size = 2};
  add_item(&list, 4, held, needed);
  CHECK_LINES(
      text_of(plan(&list, 0, 100)),
      "copy 0 0 -> 0, 12 bytes; to 1, 0 bytes:; from 1, 8 bytes: 0[12 + 8]");
  CHECK_LINES(
      text_of(plan(&list, 1, 100)),
      "copy 0 0 -> 0, 8 bytes; to 0, 8 bytes: 0[0 + 8]; from 0, 0 bytes:");
  fsdp_exchange *exchange = plan(&list, 1, 100);
  CHECK_I64(fsdp_exchange_num_items(exchange), 1);
  CHECK_I64(fsdp_exchange_held_nbytes(exchange, 0), 8);
  CHECK_I64(fsdp_exchange_needed_nbytes(exchange, 0), 8);
  fsdp_exchange_destroy(exchange);
  fsdp_exchange_destroy(NULL);
  release_items(&list);
  CHECK_TEXT(text_of(plan(&list, 0, 1)), "");
}

/* Two small pieces and a large one; both peers get what rank 0 has, rank 2
 * without item 2. */
TEST(test_packing) {
  const fsdp_range held[] = {{0, 2}, {0, 0}, {0, 0}};
  const fsdp_range all[] = {{0, 0}, {0, 2}, {0, 2}};
  const fsdp_range first[] = {{0, 0}, {0, 2}, {1, 1}};
  items_list list = {.world_size = 3};
  add_item(&list, 1, held, all);
  add_item(&list, 8, held, all);
  add_item(&list, 2, held, all);
  CHECK_LINES(
      text_of(plan(&list, 0, 16)),
      "to 1, 16 bytes: 1[0 + 16]; to 1, 6 bytes: 0[0 + 2] 2[0 + 4]; "
      "to 2, 16 bytes: 1[0 + 16]; "
      "to 2, 6 bytes: 0[0 + 2] 2[0 + 4] as message 1; from 1, 0 bytes:; "
      "from 2, 0 bytes:");
  CHECK_LINES(text_of(plan(&list, 2, 16)),
              "to 0, 0 bytes:; from 0, 16 bytes: 1[0 + 16]; "
              "from 0, 6 bytes: 0[0 + 2] 2[0 + 4]");
  release_items(&list);
  add_item(&list, 1, held, all);
  add_item(&list, 8, held, all);
  add_item(&list, 2, held, first);
  CHECK_LINES(
      text_of(plan(&list, 0, 17)),
      "to 1, 22 bytes: 0[0 + 2] 1[0 + 16] 2[0 + 4]; "
      "to 2, 18 bytes: 0[0 + 2] 1[0 + 16]; from 1, 0 bytes:; from 2, 0 bytes:");
  release_items(&list);
}

/* What all ranks hold is passed to nobody. */
TEST(test_held_by_all) {
  const fsdp_range all[] = {{0, 4}, {0, 4}};
  const fsdp_range parts[] = {{0, 2}, {2, 4}};
  items_list list = {.world_size = 2};
  add_item(&list, 4, all, parts);
  add_item(&list, 4, all, all);
  CHECK_LINES(text_of(plan(&list, 1, 1)),
              "copy 0 8 -> 0, 8 bytes; copy 1 0 -> 0, 16 bytes");
  release_items(&list);
}

/* Items are parameters of two placements that they share. */
TEST(test_params_of_a_layout) {
  fsdp_flat_layout *layout = placement_picture();
  const int64_t numels[] = {5, 7, 3};
  fsdp_placement *flat = place_flat(layout, 0, 0, 2);
  fsdp_placement *first = NULL;
  CHECK_OK(fsdp_placement_create_on_ranks(numels, 3, (fsdp_range){0, 1}, &first,
                                          NULL));
  const items_list list = {
      .items = {{4, 2, flat, first}, {2, 0, flat, first}, {8, 1, flat, first}},
      .num_items = 3,
      .world_size = 2};
  CHECK_LINES(text_of(plan(&list, 0, 100)),
              "copy 1 0 -> 0, 8 bytes; to 1, 0 bytes:; "
              "from 1, 14 bytes: 0[0 + 12] 1[8 + 2]");
  CHECK_LINES(text_of(plan(&list, 1, 100)),
              "to 0, 14 bytes: 0[0 + 12] 1[0 + 2]; from 0, 0 bytes:");
  fsdp_placement_destroy(flat);
  fsdp_placement_destroy(first);
  fsdp_flat_layout_destroy(layout);
}

/* --- Failures ------------------------------------------------------------ */

static void check_refused(fsdp_exchange_spec spec, fsdp_status expected,
                          const char *message) {
  fsdp_exchange *exchange = NULL;
  fsdp_error error = {0};
  const int64_t live = fsdp_alloc_live();
  CHECK_I64(fsdp_exchange_create(&spec, &exchange, &error), expected);
  CHECK_TEXT(error.message, message);
  CHECK(exchange == NULL);
  CHECK_I64(fsdp_alloc_live(), live);
}

TEST(test_refused) {
  const fsdp_range good[] = {{0, 3}, {3, 5}};
  const fsdp_range huge[] = {{0, 3}, {3, INT64_MAX / 4}};
  const fsdp_piece twice[] = {{.in_param = {0, 1}, .buffer = 1},
                              {.in_param = {2, 3}, .buffer = 1}};
  items_list list = {.world_size = 2};
  add_item(&list, 4, good, good);
  add_item(&list, 0, good, good);
  add_item(&list, 8, good, huge);
  const fsdp_exchange_item *items = list.items;
  check_refused((fsdp_exchange_spec){items, 2, 0, 2, 1}, FSDP_INVALID_ARGUMENT,
                "item 1 has 0 bytes an element");
  check_refused((fsdp_exchange_spec){items + 2, 1, 0, 2, 1}, FSDP_OVERFLOW,
                "rank 1 has elements up to 2305843009213693951 of item 0, 8 "
                "bytes each: too many");
  check_refused((fsdp_exchange_spec){items, 1, 2, 2, 1}, FSDP_INVALID_ARGUMENT,
                "rank 2 of 2 ranks");
  check_refused((fsdp_exchange_spec){items, 1, -1, 2, 1}, FSDP_INVALID_ARGUMENT,
                "rank -1 of 2 ranks");
  check_refused((fsdp_exchange_spec){items, 1, 0, 1, 1}, FSDP_INVALID_ARGUMENT,
                "item 0 lies on rank 1 of 1 ranks");
  fsdp_placement *split = place(twice, 2);
  const fsdp_exchange_item item = {4, 0, split, items[0].needed};
  check_refused((fsdp_exchange_spec){&item, 1, 0, 2, 1}, FSDP_INVALID_ARGUMENT,
                "rank 1 has two pieces of item 0, need at most one");
  fsdp_placement_destroy(split);
  release_items(&list);
}

TEST(test_too_many_bytes) {
  const fsdp_range held[] = {{0, INT64_MAX}, {0, 0}};
  const fsdp_range less[] = {{0, INT64_MAX - 1}, {0, 0}};
  const fsdp_range needed[] = {{0, 0}, {0, INT64_MAX}};
  items_list list = {.world_size = 2};
  add_item(&list, 1, held, needed);
  add_item(&list, 1, held, needed);
  text_of(plan(&list, 0, INT64_MAX)); /* large enough to go alone */
  release_items(&list);
  add_item(&list, 1, less, needed);
  add_item(&list, 1, less, needed);
  check_refused((fsdp_exchange_spec){list.items, 2, 0, 2, INT64_MAX},
                FSDP_OVERFLOW, "the messages for rank 1 have too many bytes");
  release_items(&list);
}

static fsdp_status create(void *spec, fsdp_error *error) {
  fsdp_exchange *exchange = NULL;
  const fsdp_status status = fsdp_exchange_create(spec, &exchange, error);
  CHECK((exchange != NULL) == (status == FSDP_OK));
  fsdp_exchange_destroy(exchange);
  return status;
}

TEST(test_out_of_memory) {
  const fsdp_range held[] = {{0, 3}, {3, 5}};
  const fsdp_range needed[] = {{0, 5}, {0, 5}};
  items_list list = {.world_size = 2};
  add_item(&list, 4, held, needed);
  add_item(&list, 9, held, needed);
  fsdp_exchange_spec spec = {list.items, 2, 0, 2, 16};
  CHECK_I64(every_allocation(create, &spec), 13);
  release_items(&list);
}

/* --- All ranks together --------------------------------------------------- */

enum {
  RANKS = 5,
  ITEMS = 4,
  NUMEL = 12,
  ITEMSIZE = 4,
  ROOM = NUMEL * ITEMSIZE
};

typedef struct world {
  int64_t num_ranks;
  int64_t direct_nbytes;
  fsdp_range held[ITEMS][RANKS];
  fsdp_range needed[ITEMS][RANKS];
  items_list list;
  fsdp_exchange *exchanges[RANKS];
  unsigned char results[RANKS][ITEMS][ROOM];
} world;

static unsigned char byte_of(int64_t item, int64_t index) {
  return (unsigned char)(1 + item * ROOM + index);
}

/* The ranks hold an item in any order, with elements that nobody holds; or all
 * ranks hold all of it. */
static void draw_item(world *self, int64_t index, uint64_t *seed) {
  const bool is_held_by_all = check_random(seed, 4) == 0;
  int64_t bounds[RANKS + 1];
  int64_t next = check_random(seed, 3);
  const int64_t turn = check_random(seed, self->num_ranks);
  for (int64_t i = 0; i <= self->num_ranks; i++) {
    bounds[i] = next;
    next += check_random(seed, (NUMEL - next) / 2 + 1);
  }
  for (int64_t i = 0; i < self->num_ranks; i++) {
    const int64_t rank = (i + turn) % self->num_ranks;
    self->held[index][rank] = is_held_by_all
                                  ? (fsdp_range){0, NUMEL}
                                  : (fsdp_range){bounds[i], bounds[i + 1]};
    const int64_t begin = check_random(seed, NUMEL + 1);
    const int64_t numel = check_random(seed, NUMEL - begin + 1);
    self->needed[index][rank] = (fsdp_range){begin, begin + numel};
  }
  add_item(&self->list, 1 + check_random(seed, ITEMSIZE), self->held[index],
           self->needed[index]);
}

/* The number `number` of the messages to or from a peer; NULL behind them. */
static const fsdp_exchange_message *message_at(
    const fsdp_exchange_message *messages, int64_t num_messages, int64_t peer,
    int64_t number) {
  for (int64_t i = 0; i < num_messages; i++) {
    if (messages[i].peer == peer && number-- == 0) return &messages[i];
  }
  return NULL;
}

/* A byte of the message that `from` sends, by the messages that are the same:
 * what is packed once must be right for all. */
static unsigned char sent_byte(const world *self, int64_t from,
                               const fsdp_exchange_message *messages,
                               const fsdp_exchange_message *message,
                               int64_t index) {
  const fsdp_exchange_message *packed = &messages[message->same_as];
  const fsdp_exchange_piece *piece = packed->pieces;
  while (index >= piece->nbytes) index -= (piece++)->nbytes;
  const int64_t itemsize = self->list.items[piece->item].itemsize;
  const int64_t begin = self->held[piece->item][from].begin * itemsize;
  return byte_of(piece->item, begin + piece->offset + index);
}

/* Returns whether there was a message. */
static bool pass_message(world *self, int64_t from, int64_t to,
                         int64_t number) {
  int64_t num_out, num_in;
  const fsdp_exchange_message *outgoing =
      fsdp_exchange_outgoing(self->exchanges[from], &num_out);
  const fsdp_exchange_message *incoming =
      fsdp_exchange_incoming(self->exchanges[to], &num_in);
  const fsdp_exchange_message *out = message_at(outgoing, num_out, to, number);
  const fsdp_exchange_message *in = message_at(incoming, num_in, from, number);
  if (!CHECK((out == NULL) == (in == NULL)) || out == NULL) return false;
  CHECK_I64(out->nbytes, in->nbytes);
  CHECK(out->num_pieces <= 1 || out->pieces[0].nbytes < self->direct_nbytes);
  int64_t index = 0;
  for (int64_t i = 0; i < in->num_pieces; i++) {
    const fsdp_exchange_piece *piece = &in->pieces[i];
    for (int64_t j = 0; j < piece->nbytes; j++, index++) {
      self->results[to][piece->item][piece->offset + j] =
          sent_byte(self, from, outgoing, out, index);
    }
  }
  CHECK_I64(index, in->nbytes);
  return true;
}

static void run_world(world *self) {
  for (int64_t rank = 0; rank < self->num_ranks; rank++) {
    self->exchanges[rank] = plan(&self->list, rank, self->direct_nbytes);
    int64_t num;
    const fsdp_exchange_copy *copies =
        fsdp_exchange_copies(self->exchanges[rank], &num);
    for (int64_t i = 0; i < num; i++) {
      const int64_t itemsize = self->list.items[copies[i].item].itemsize;
      const int64_t begin = self->held[copies[i].item][rank].begin * itemsize;
      for (int64_t j = 0; j < copies[i].nbytes; j++) {
        self->results[rank][copies[i].item][copies[i].target_offset + j] =
            byte_of(copies[i].item, begin + copies[i].source_offset + j);
      }
    }
  }
  for (int64_t from = 0; from < self->num_ranks; from++) {
    for (int64_t to = 0; to < self->num_ranks; to++) {
      if (from == to) continue;
      int64_t number = 0;
      while (pass_message(self, from, to, number)) number++;
    }
  }
}

/* Every needed element that somebody holds is there, and nothing else. */
static void check_results(const world *self) {
  for (int64_t rank = 0; rank < self->num_ranks; rank++) {
    for (int64_t i = 0; i < self->list.num_items; i++) {
      const int64_t itemsize = self->list.items[i].itemsize;
      const fsdp_range needed = self->needed[i][rank];
      for (int64_t j = 0; j < ROOM; j++) {
        const int64_t byte = needed.begin * itemsize + j;
        bool is_held = false;
        for (int64_t holder = 0; holder < self->num_ranks; holder++) {
          is_held |= self->held[i][holder].begin * itemsize <= byte &&
                     byte < self->held[i][holder].end * itemsize;
        }
        is_held &= byte < needed.end * itemsize;
        CHECK_I64(self->results[rank][i][j], is_held ? byte_of(i, byte) : 0);
      }
    }
  }
}

TEST(test_random_exchanges) {
  const int64_t before = check_num_failures;
  for (uint64_t first = 1; first <= 3000; first++) {
    uint64_t seed = first * 77777;
    world self = {.num_ranks = 1 + check_random(&seed, RANKS),
                  .direct_nbytes = check_random(&seed, 20)};
    const int64_t num_items = check_random(&seed, ITEMS + 1);
    self.list.world_size = self.num_ranks;
    for (int64_t i = 0; i < num_items; i++) draw_item(&self, i, &seed);
    run_world(&self);
    check_results(&self);
    for (int64_t rank = 0; rank < self.num_ranks; rank++) {
      fsdp_exchange_destroy(self.exchanges[rank]);
    }
    release_items(&self.list);
    if (check_num_failures == before) continue;
    printf("seed %" PRIu64 "\n", first);
    return;
  }
}
