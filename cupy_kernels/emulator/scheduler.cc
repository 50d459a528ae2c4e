// The scheduler: which thread of a block runs next, which block follows, and what each waits for.
namespace {

// Complete the collective that the lanes of a warp wait in, if all it names have come. Lanes that
// have returned take no part, as on the GPU.
void complete_collective(unsigned warp) {
  unsigned first = warp * WARP, last = first + WARP < thread_count ? first + WARP : thread_count;
  for (unsigned leader = first; leader < last; ++leader) {
    Fiber* head = &fibers[leader];
    if (head->state != State::IN_COLLECTIVE) continue;
    void* lanes[WARP] = {};
    bool complete = true;
    for (unsigned i = first; i < last && complete; ++i) {
      Fiber* fiber = &fibers[i];
      if (!(head->mask >> (i - first) & 1) || fiber->state == State::DONE) continue;
      complete = fiber->state == State::IN_COLLECTIVE && fiber->mask == head->mask &&
                 fiber->line == head->line && fiber->exchange == head->exchange;
      lanes[i - first] = fiber->mine;
    }
    if (!complete) continue;
    for (unsigned i = first; i < last; ++i)
      if (lanes[i - first]) fibers[i].state = State::READY;
    warp_epochs[warp] = ++epoch_counter;
    head->exchange(lanes);
  }
}

void complete_barrier() {
  int counts[2] = {0, (int)thread_count};
  for (unsigned i = 0; i < thread_count; ++i) {
    if (fibers[i].state != State::AT_BARRIER || fibers[i].line != fibers[0].line) return;
    counts[0] += fibers[i].vote;
  }
  block_epoch = ++epoch_counter;
  for (unsigned i = 0; i < thread_count; ++i) {
    fibers[i].state = State::READY;
    if (fibers[i].votes) memcpy(fibers[i].votes, counts, sizeof counts);
  }
}

const char* waits(const Fiber& fiber, char* out) {
  const char* where = fiber.state == State::AT_BARRIER ? "waits at the barrier of line"
                                                       : "waits in the warp collective of line";
  if (fiber.state == State::DONE)
    sprintf(out, "thread (%u,%u,%u) has returned", fiber.thread.x, fiber.thread.y, fiber.thread.z);
  else
    sprintf(out, "thread (%u,%u,%u) %s %d", fiber.thread.x, fiber.thread.y, fiber.thread.z, where,
            fiber.line);
  return out;
}

// No thread can continue, and not all have returned.
void report_deadlock() {
  Fiber* waiting = nullptr;
  for (unsigned i = 0; i < thread_count && !waiting; ++i)
    if (fibers[i].state != State::DONE) waiting = &fibers[i];
  Fiber* other = nullptr;
  for (unsigned i = 0; i < thread_count && !other; ++i)
    if (fibers[i].state != waiting->state || fibers[i].line != waiting->line) other = &fibers[i];
  char one[96], two[96];
  fail("divergent barrier: %s, %s", waits(*waiting, one), other ? waits(*other, two) : "alone");
}

void shuffle(unsigned* order, unsigned count) {
  for (unsigned i = count; i > 1; --i) {
    unsigned j = random_next() % i, kept = order[i - 1];
    order[i - 1] = order[j];
    order[j] = kept;
  }
}

void set_order(unsigned* order, unsigned count) {
  for (unsigned i = 0; i < count; ++i) order[i] = launch->schedule == 1 ? count - 1 - i : i;
  if (launch->schedule == 2) shuffle(order, count);
}

void run_block() {
  static unsigned order[MAX_THREADS];
  memset(launch->shared, 0xff, launch->shared_end - launch->shared);
  if (launch->dynamic_bytes) memset(dynamic_shared, 0xff, launch->dynamic_bytes);
  for (unsigned i = 0; i < thread_count; ++i) prepare(&fibers[i], i);
  for (unsigned i = 0; i < warp_count; ++i) warp_epochs[i] = ++epoch_counter;
  block_epoch = ++epoch_counter;
  ++block_number;
  block_acquired = false;
  done_count = 0;
  set_order(order, thread_count);
  while (done_count < thread_count && !faulted) {
    bool moved = false;
    for (unsigned i = 0; i < thread_count && !faulted; ++i) {
      Fiber* fiber = &fibers[order[i]];
      if (fiber->state != State::READY) continue;
      moved = true;
      to_fiber(fiber);
    }
    if (faulted) return;
    if (!moved) complete_barrier();
    if (!moved && fibers[order[0]].state != State::READY) report_deadlock();
    if (launch->schedule == 2) shuffle(order, thread_count);
  }
}

void run_grid() {
  uint64_t blocks = (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
  unsigned* order = (unsigned*)malloc(blocks * sizeof(unsigned));
  block_released = (uint32_t*)calloc(blocks + 1, sizeof(uint32_t));
  set_order(order, blocks);
  block_number = 0;
  for (uint64_t i = 0; i < blocks && !faulted; ++i) {
    unsigned x = launch->grid[0], y = launch->grid[1], at = order[i];
    emulated_block = {at % x, at / x % y, at / (x * y)};
    run_block();
  }
  free(block_released);
  free(order);
}

}  // namespace
