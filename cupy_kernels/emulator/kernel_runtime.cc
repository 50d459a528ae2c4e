// What a kernel's code calls: the shim's functions by name, and what the sanitizers left in it.
extern "C" {

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
