// Executes one kernel launch on the CPU: blocks one after the other, a block's threads as fibers.
//
// A thread runs until it waits: at a barrier, or in a warp collective whose other lanes have not
// come. The scheduler then runs another one, in one of three orders, and reports what a GPU would
// let pass: barriers that not every thread reaches, accesses outside the arguments, two threads
// that touch a value without a barrier between them, a misaligned vector, an overflowing index.
//
// The kernel's own accesses arrive here through the calls that -fsanitize=thread and the undefined
// behaviour sanitizer leave in its code; their handlers below replace the compiler's libraries, so
// every access is checked before it happens. Guard pages around each buffer catch the rest. The
// first fault ends the launch: the running fiber is abandoned and a line of text says what it did.
//
// Not seen: weak memory order, coalescing, bank conflicts, registers. Not thread-safe: one launch
// at a time in a process.
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <ucontext.h>
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };

namespace {

constexpr unsigned MAX_THREADS = 1024, WARP = 32, MAX_COPIES = 256;
constexpr size_t STACK = 64 << 10, GUARD = 1 << 12, PAGE = 1 << 12;
constexpr size_t MAX_DYNAMIC = 228 << 10;
constexpr unsigned MOST_ACCESSES = 20u << 20;  // of one thread between two waits

struct Copy { char* to; const char* from; int width, bytes; unsigned group; };

enum class State { READY, AT_BARRIER, IN_COLLECTIVE, DONE };

typedef void (*Exchange)(void**);

struct Fiber {
#if defined(__x86_64__)
  void* stack_pointer;
#else
  ucontext_t context;
#endif
  uint3 thread;
  unsigned index;
  State state;
  int line;               // where it waits
  unsigned mask;          // of the collective it waits in
  Exchange exchange;
  void* mine;
  int vote;
  int* votes;
  Copy copies[MAX_COPIES];
  unsigned copy_count, copy_group;
};

// The last write and the last two reads of one value, for finding races.
struct Access { uint32_t block, thread, epoch, warp_epoch; };  // thread counts from 1; 0: none
struct Cell { Access write, read, earlier; };

}  // namespace

extern "C" {

struct EmulatedBuffer {  // one argument's memory; Python mirrors this layout
  char* begin;
  size_t bytes, item_bytes;
  char* map;
  size_t map_bytes;
  int writable;
  Cell* cells;
};

struct EmulatedLaunch {  // Python mirrors this layout
  void (*call)(void**);
  void** arguments;
  unsigned grid[3], block[3];
  size_t dynamic_bytes;
  int schedule;  // 0 forward, 1 reversed, 2 random
  uint64_t seed;
  EmulatedBuffer* buffers;
  unsigned buffer_count;
  char *shared, *shared_end;
  // What comes back.
  unsigned fault_block[3], fault_thread[3];
  int fault_in_thread, fault_buffer;
  uintptr_t fault_code;  // a return address in the kernel, or 0
  char text[256];
};

uint3 emulated_thread;
uint3 emulated_block;
dim3 emulated_block_dim, emulated_grid_dim;
void emulated_switch(void** save, void* to);
}

#if defined(__x86_64__)
asm(R"(
.text
.globl emulated_switch
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_switch, .-emulated_switch
)");
#endif

namespace {

Fiber* fibers;
char* stacks;  // MAX_THREADS of STACK bytes, each with a guard page at its low end
char* dynamic_map;
char* dynamic_shared;
Cell* shared_cells;

#if defined(__x86_64__)
void* scheduler_stack;
#else
ucontext_t scheduler_context;
#endif

EmulatedLaunch* launch;
Fiber* now;  // the running fiber, or null in the scheduler
unsigned accesses;  // by it since its turn came
bool faulted;
unsigned thread_count, warp_count, done_count;
uint32_t block_epoch, warp_epochs[MAX_THREADS / WARP], epoch_counter;
uint32_t block_number;          // in launch order, from 1
uint32_t* block_released;       // by block number: the epoch of its last fence
bool block_acquired;            // the running block has done an atomic
uint64_t random_state;

uint64_t random_next() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

void to_scheduler() {
  Fiber* from = now;
  now = nullptr;
#if defined(__x86_64__)
  emulated_switch(&from->stack_pointer, scheduler_stack);
#else
  swapcontext(&from->context, &scheduler_context);
#endif
}

void to_fiber(Fiber* fiber) {
  now = fiber;
  accesses = 0;
  emulated_thread = fiber->thread;
#if defined(__x86_64__)
  emulated_switch(&scheduler_stack, fiber->stack_pointer);
#else
  swapcontext(&scheduler_context, &fiber->context);
#endif
}

void note(const char* format, va_list arguments) {
  if (faulted) return;
  faulted = true;
  vsnprintf(launch->text, sizeof launch->text, format, arguments);
  memcpy(launch->fault_block, &emulated_block, sizeof launch->fault_block);
}

// Report the first fault and abandon the running fiber; in the scheduler, return.
__attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  note(format, arguments);
  va_end(arguments);
  if (!now) return;
  launch->fault_in_thread = 1;
  memcpy(launch->fault_thread, &now->thread, sizeof launch->fault_thread);
  now->state = State::DONE;
  to_scheduler();
  __builtin_unreachable();
}

void complete_collective(unsigned warp);
void complete_barrier();

void fiber_main() {
  launch->call(launch->arguments);
  if (now->copy_count) fail("returns before its asynchronous copies have landed");
  now->state = State::DONE;
  ++done_count;
  complete_collective(now->index / WARP);  // the others may have waited for this one only
  to_scheduler();
  __builtin_unreachable();
}

void prepare(Fiber* fiber, unsigned index) {
  unsigned x = emulated_block_dim.x, y = emulated_block_dim.y;
  fiber->thread = {index % x, index / x % y, index / (x * y)};
  fiber->index = index;
  fiber->state = State::READY;
  fiber->copy_count = fiber->copy_group = 0;
  char* top = stacks + (index + 1) * STACK;
#if defined(__x86_64__)
  void** stack = (void**)top;
  *--stack = nullptr;  // where fiber_main would return to
  *--stack = (void*)fiber_main;
  for (int i = 0; i < 6; ++i) *--stack = nullptr;
  fiber->stack_pointer = stack;
#else
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = top - STACK + GUARD;
  fiber->context.uc_stack.ss_size = STACK - GUARD;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, fiber_main, 0);
#endif
}

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

// Nobody can go on and not all have returned.
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

// Races and bounds.

enum class Kind { READ, WRITE, ATOMIC };  // an atomic races with nothing

const char* name_of(Kind kind) {
  return kind == Kind::READ ? "reads" : kind == Kind::WRITE ? "writes" : "does an atomic on";
}

bool unordered(const Access& before, bool shared) {
  if (!before.thread) return false;
  if (shared && before.epoch != block_epoch) return false;  // an earlier block's, or launch's
  if (before.block != block_number)
    return !(block_acquired && block_released[before.block] >= before.epoch);
  if (before.epoch != block_epoch || before.thread == now->index + 1) return false;
  unsigned warp = now->index / WARP;
  return (before.thread - 1) / WARP != warp || before.warp_epoch == warp_epochs[warp];
}

void report_race(const Access& before, bool wrote, Kind kind, int buffer, size_t element) {
  char where[48], who[64];
  launch->fault_buffer = buffer;
  if (buffer < 0) sprintf(where, "shared memory");
  else sprintf(where, "element %zu of @", element);
  if (before.block == block_number) sprintf(who, "thread %u", before.thread - 1);
  else sprintf(who, "thread %u of another block", before.thread - 1);
  fail("race: %s %s, which %s %s with nothing to order them", name_of(kind), where, who,
       wrote ? "wrote" : "read");
}

void visit(Cell& cell, Kind kind, int buffer, size_t element) {
  uint32_t thread = now->index + 1;
  Access mine = {block_number, thread, block_epoch, warp_epochs[now->index / WARP]};
  if (kind == Kind::ATOMIC) return;
  bool shared = buffer < 0;
  if (unordered(cell.write, shared)) report_race(cell.write, true, kind, buffer, element);
  if (kind == Kind::READ) {
    if (cell.read.thread != thread || cell.read.block != block_number) cell.earlier = cell.read;
    cell.read = mine;
    return;
  }
  if (unordered(cell.read, shared)) report_race(cell.read, false, kind, buffer, element);
  if (unordered(cell.earlier, shared)) report_race(cell.earlier, false, kind, buffer, element);
  cell.write = mine;
}

// The pages of the code itself: constants and the runtime's variables live there.
struct Image { uintptr_t begin, end; } images[2];

bool in_image(uintptr_t address) {
  for (const Image& image : images)
    if (address - image.begin < image.end - image.begin) return true;
  return false;
}

void report_outside(uintptr_t address, size_t bytes, Kind kind) {
  long nearest = 0;
  int found = -1;
  for (unsigned i = 0; i < launch->buffer_count; ++i) {
    const EmulatedBuffer& buffer = launch->buffers[i];
    if (address < (uintptr_t)buffer.map || address >= (uintptr_t)buffer.map + buffer.map_bytes)
      continue;
    found = i;
    bool past = address + bytes > (uintptr_t)buffer.begin + buffer.bytes;
    nearest = past ? (long)(address - ((uintptr_t)buffer.begin + buffer.bytes))
                   : (long)(address - (uintptr_t)buffer.begin);
    launch->fault_buffer = found;
    fail("%s %zu bytes of @, %ld bytes %s", name_of(kind), bytes, past ? nearest : -nearest,
         past ? "past its end" : "before its start");
  }
  fail("%s %zu bytes at %s", name_of(kind), bytes,
       address < PAGE ? "a null pointer" : "an address outside every argument");
}

void access(const void* pointer, size_t bytes, Kind kind) {
  uintptr_t address = (uintptr_t)pointer;
  if (address - (uintptr_t)stacks < MAX_THREADS * STACK || !now) return;
  if (++accesses > MOST_ACCESSES) fail("goes on and on, while no other thread gets a turn");
  char* at = (char*)pointer;
  bool fixed = at >= launch->shared && at + bytes <= launch->shared_end;
  if (fixed || (at >= dynamic_shared && at + bytes <= dynamic_shared + launch->dynamic_bytes)) {
    size_t base = fixed ? at - launch->shared : MAX_DYNAMIC + (at - dynamic_shared);
    for (size_t i = 0; i < bytes; ++i) visit(shared_cells[base + i], kind, -1, 0);
    return;
  }
  if (in_image(address)) return;
  for (unsigned i = 0; i < launch->buffer_count; ++i) {
    EmulatedBuffer& buffer = launch->buffers[i];
    if (at < buffer.begin || at + bytes > buffer.begin + buffer.bytes) continue;
    if (kind != Kind::READ && !buffer.writable) {
      launch->fault_buffer = i;
      fail("writes @, which is read only");
    }
    size_t first = (at - buffer.begin) / buffer.item_bytes;
    size_t last = (at - buffer.begin + bytes - 1) / buffer.item_bytes;
    for (size_t cell = first; cell <= last; ++cell) visit(buffer.cells[cell], kind, i, cell);
    return;
  }
  report_outside(address, bytes, kind);
}

// Signals, for what no call announced.

void on_signal(int number, siginfo_t* info, void*) {
  if (!now || !launch) {
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  uintptr_t address = (uintptr_t)info->si_addr;
  if (number == SIGSEGV || number == SIGBUS) {
    if (address - (uintptr_t)stacks < MAX_THREADS * STACK) fail("overflows its stack");
    report_outside(address, 1, Kind::READ);
  }
  fail("stops with signal %d", number);
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction kept_actions[4];
stack_t kept_stack;
char* signal_stack;

void catch_signals() {
  stack_t own = {};
  own.ss_sp = signal_stack;
  own.ss_size = STACK;
  sigaltstack(&own, &kept_stack);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &kept_actions[i]);
}

void release_signals() {
  for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &kept_actions[i], nullptr);
  sigaltstack(&kept_stack, nullptr);
}

char* pages(size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : (char*)found;
}

bool set_up() {
  if (fibers) return true;
  stacks = pages(MAX_THREADS * STACK);
  signal_stack = pages(STACK);
  dynamic_map = pages(MAX_DYNAMIC + 2 * GUARD);
  fibers = (Fiber*)pages(MAX_THREADS * sizeof(Fiber));
  if (!stacks || !signal_stack || !dynamic_map || !fibers) return false;
  for (unsigned i = 0; i < MAX_THREADS; ++i) mprotect(stacks + i * STACK, GUARD, PROT_NONE);
  mprotect(dynamic_map, GUARD, PROT_NONE);
  mprotect(dynamic_map + GUARD + MAX_DYNAMIC, GUARD, PROT_NONE);
  return true;
}

// A library's mappings follow each other; its zeroed data comes last and has no name.
Image image_around(void* inside) {
  Dl_info info;
  dladdr(inside, &info);
  Image found = {(uintptr_t)info.dli_fbase, (uintptr_t)info.dli_fbase};
  FILE* maps = fopen("/proc/self/maps", "r");
  char line[512];
  while (maps && fgets(line, sizeof line, maps)) {
    unsigned long begin, end;
    if (sscanf(line, "%lx-%lx", &begin, &end) == 2 && begin == found.end) found.end = end;
  }
  if (maps) fclose(maps);
  return found;
}

void find_images() {
  if (!images[0].begin) images[0] = image_around(&emulated_thread);
  if (!in_image((uintptr_t)launch->call)) images[1] = image_around((void*)launch->call);
}

bool make_cells() {
  size_t fixed = launch->shared_end - launch->shared;
  if (fixed > MAX_DYNAMIC) return false;
  if (!shared_cells) shared_cells = (Cell*)pages(2 * MAX_DYNAMIC * sizeof(Cell));
  for (unsigned i = 0; i < launch->buffer_count; ++i) {
    EmulatedBuffer& buffer = launch->buffers[i];
    buffer.cells = (Cell*)calloc(buffer.bytes / buffer.item_bytes + 1, sizeof(Cell));
  }
  return shared_cells;
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

extern "C" {

// Memory for one argument between two guard pages, at the end of its pages (or at the start), no
// better aligned than `align` bytes promise. `buffer->bytes` and `item_bytes` are set.
int emulated_allocate(EmulatedBuffer* buffer, size_t align, int at_start) {
  size_t inside = (buffer->bytes + 2 * align + PAGE - 1) / PAGE * PAGE;
  buffer->map_bytes = inside + 2 * GUARD;
  buffer->map = pages(buffer->map_bytes);
  if (!buffer->map) return 0;
  mprotect(buffer->map, GUARD, PROT_NONE);
  mprotect(buffer->map + GUARD + inside, GUARD, PROT_NONE);
  memset(buffer->map + GUARD, 0xff, inside);
  uintptr_t low = (uintptr_t)buffer->map + GUARD, high = low + inside - buffer->bytes;
  uintptr_t begin = at_start ? low : high / align * align;
  if (begin % (2 * align) == 0) begin += at_start ? align : 0 - align;
  buffer->begin = (char*)begin;
  return 1;
}

// Whether nobody wrote to the slack around the argument, where guard pages don't reach.
int emulated_intact(const EmulatedBuffer* buffer) {
  const char* end = buffer->map + buffer->map_bytes - GUARD;
  for (const char* p = buffer->map + GUARD; p < end; ++p)
    if ((p < buffer->begin || p >= buffer->begin + buffer->bytes) && *p != (char)0xff) return 0;
  return 1;
}

void emulated_free(EmulatedBuffer* buffer) { munmap(buffer->map, buffer->map_bytes); }

// Run a launch; 1 if it went through, 0 if the launch's text says what went wrong.
int emulated_launch(EmulatedLaunch* wanted) {
  launch = wanted;
  faulted = false;
  launch->fault_in_thread = 0;
  launch->fault_buffer = -1;
  launch->fault_code = 0;
  launch->text[0] = 0;
  if (!set_up() || !make_cells()) {
    strcpy(launch->text, "the emulator has no memory for it");
    return 0;
  }
  emulated_block_dim = {launch->block[0], launch->block[1], launch->block[2]};
  emulated_grid_dim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  thread_count = launch->block[0] * launch->block[1] * launch->block[2];
  warp_count = (thread_count + WARP - 1) / WARP;
  dynamic_shared = dynamic_map + GUARD + MAX_DYNAMIC - (launch->dynamic_bytes + 15) / 16 * 16;
  random_state = launch->seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
  if (!random_state) random_state = 1;
  find_images();
  catch_signals();
#if defined(__x86_64__)
  unsigned kept = _mm_getcsr();
  _mm_setcsr(kept | 0x8040);  // flush denormal results and operands to zero
  run_grid();
  _mm_setcsr(kept);
#else
  run_grid();
#endif
  release_signals();
  for (unsigned i = 0; i < launch->buffer_count; ++i) free(launch->buffers[i].cells);
  launch = nullptr;
  return !faulted;
}

// What a kernel calls.

void emulated_fail(const char* what) { fail("%s", what); }

void emulated_barrier(int line, int vote, int* votes) {
  now->state = State::AT_BARRIER;
  now->line = line;
  now->vote = vote;
  now->votes = votes;
  to_scheduler();
}

void emulated_collective(unsigned mask, Exchange exchange, void* mine, int line) {
  if (!(mask >> (now->index % WARP) & 1))
    fail("calls the warp collective of line %d with mask %08x, which leaves it out", line, mask);
  now->state = State::IN_COLLECTIVE;
  now->line = line;
  now->mask = mask;
  now->exchange = exchange;
  now->mine = mine;
  complete_collective(now->index / WARP);
  if (now->state != State::READY) to_scheduler();
}

void* emulated_dynamic_shared() {
  if (!launch->dynamic_bytes) fail("asks for dynamic shared memory, and the launch gave none");
  return dynamic_shared;
}

void emulated_copy_async(void* to, const void* from, int width, int bytes) {
  if ((uintptr_t)to % width || (uintptr_t)from % width)
    fail("copies %d bytes asynchronously from or to an address not aligned to as many", width);
  if (now->copy_count == MAX_COPIES) fail("has more than %u copies in flight", MAX_COPIES);
  if (bytes > 0) access(from, bytes, Kind::READ);
  now->copies[now->copy_count++] = {(char*)to, (const char*)from, width, bytes, now->copy_group};
}

void emulated_copy_async_commit() { ++now->copy_group; }

void emulated_copy_async_wait(int groups) {
  unsigned kept = 0;
  for (unsigned i = 0; i < now->copy_count; ++i) {
    Copy copy = now->copies[i];
    if (copy.group + groups >= now->copy_group) {
      now->copies[kept++] = copy;
      continue;
    }
    access(copy.to, copy.width, Kind::WRITE);
    memcpy(copy.to, copy.from, copy.bytes);
    memset(copy.to + copy.bytes, 0, copy.width - copy.bytes);
  }
  now->copy_count = kept;
}

void emulated_fence() { block_released[block_number] = ++epoch_counter; }

void emulated_atomic(void* address, unsigned bytes) {
  if ((uintptr_t)address % bytes) fail("does an atomic on a misaligned address");
  access(address, bytes, Kind::ATOMIC);
  block_acquired = true;
}

// What -fsanitize=thread leaves in a kernel's code.

#define HERE (launch->fault_code = (uintptr_t)__builtin_return_address(0))
#define ACCESSES(bytes)                                                                    \
  void __tsan_read##bytes(void* p) { if (now) { HERE; access(p, bytes, Kind::READ); } }          \
  void __tsan_write##bytes(void* p) { if (now) { HERE; access(p, bytes, Kind::WRITE); } }          \
  void __tsan_unaligned_read##bytes(void* p) { if (now) { HERE; access(p, bytes, Kind::READ); } } \
  void __tsan_unaligned_write##bytes(void* p) { if (now) { HERE; access(p, bytes, Kind::WRITE); } }
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
void __tsan_read_range(void* p, size_t bytes) { if (now) { HERE; access(p, bytes, Kind::READ); } }
void __tsan_write_range(void* p, size_t bytes) { if (now) { HERE; access(p, bytes, Kind::WRITE); } }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// What the undefined behaviour sanitizer leaves in it: a description of the place, and operands.
struct Place { const char* file; uint32_t line, column; };
#define AT_PLACE(what, ...) (launch->fault_code = 0, \
  fail("%s:%u: " what, place->file, place->line __VA_OPT__(, ) __VA_ARGS__))

void __ubsan_handle_type_mismatch_v1_abort(Place* place, uintptr_t address) {
  if (!address) AT_PLACE("goes through a null pointer");
  AT_PLACE("goes through a misaligned pointer");
}
void __ubsan_handle_out_of_bounds_abort(Place* place, uintptr_t index) {
  AT_PLACE("indexes an array out of its bounds, at %ld", (long)(int32_t)index);
}
#define OVERFLOWS(name, what)                                             \
  void __ubsan_handle_##name##_abort(Place* place, uintptr_t, uintptr_t) { \
    AT_PLACE(what);                                                        \
  }
OVERFLOWS(add_overflow, "a signed sum overflows")
OVERFLOWS(sub_overflow, "a signed difference overflows")
OVERFLOWS(mul_overflow, "a signed product overflows")
OVERFLOWS(negate_overflow, "a signed negation overflows")
OVERFLOWS(divrem_overflow, "an integer division by zero or overflow")
OVERFLOWS(shift_out_of_bounds, "a shift by more bits than there are")
OVERFLOWS(pointer_overflow, "a pointer's arithmetic overflows")
}
