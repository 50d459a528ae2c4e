// A launch from end to end: memory between guard pages, signals caught, blocks run, all put back.
namespace {

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

// A library's own segments, its zeroed data included; other memory may follow them at once.
Image image_around(void* inside) {
  Dl_info info;
  dladdr(inside, &info);
  Image found = {(uintptr_t)info.dli_fbase, (uintptr_t)info.dli_fbase};
  auto measure = [](dl_phdr_info* library, size_t, void* data) {
    Image& image = *(Image*)data;
    if (library->dlpi_addr != image.begin) return 0;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
      const auto& part = library->dlpi_phdr[i];
      uintptr_t end = library->dlpi_addr + part.p_vaddr + part.p_memsz;
      if (part.p_type == PT_LOAD && end > image.end) image.end = end;
    }
    return 1;
  };
  dl_iterate_phdr(measure, &found);
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

}  // extern "C"
