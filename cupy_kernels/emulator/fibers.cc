// Executes one kernel launch on the CPU: blocks one after the other, a block's threads as fibers.
//
// A thread runs until it waits: at a barrier, or in a warp collective for the other lanes. The
// scheduler then runs another thread, in one of three orders, and reports faults that a GPU would
// not report: barriers that not every thread reaches, accesses outside the arguments, two threads
// that touch a value without a barrier between them, a misaligned vector, an overflowing index.
//
// The kernel's own accesses are seen here through the calls that -fsanitize=thread and the undefined
// behaviour sanitizer insert into its code; their handlers below replace the compiler's libraries, so
// every access is checked before it happens. Guard pages around each buffer catch the rest. The
// first fault ends the launch: the running fiber is abandoned and a line of text says what it did.
//
// Not seen: weak memory order, coalescing, bank conflicts, registers. Not thread-safe: one launch
// at a time in a process.
//
// This file has what the others share: the structs, the fibers, and how a fault ends a launch.
// build.py appends scheduler.cc, checks.cc, launch.cc and kernel_runtime.cc.
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
// Our own context switch is twenty times as fast as ucontext, which makes two system calls a turn.
#if defined(__x86_64__) && !defined(PORTABLE)
#define OWN_SWITCH 1
#else
#define OWN_SWITCH 0
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
#if OWN_SWITCH
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

#if OWN_SWITCH
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

#if OWN_SWITCH
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
#if OWN_SWITCH
  emulated_switch(&from->stack_pointer, scheduler_stack);
#else
  swapcontext(&from->context, &scheduler_context);
#endif
}

void to_fiber(Fiber* fiber) {
  now = fiber;
  accesses = 0;
  emulated_thread = fiber->thread;
#if OWN_SWITCH
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
#if OWN_SWITCH
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

}  // namespace
