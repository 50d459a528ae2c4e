// What is found before an access happens: races between threads, addresses outside every argument.
//
// Each value of an argument and each byte of shared memory has a cell that remembers its last write
// and its last two reads. Two accesses, one a write, are ordered by a barrier of the block between
// them, in a warp by a collective too, and between blocks by a fence after the first and an atomic
// before the second. Whatever is not ordered is a race, in this schedule or in another.
namespace {

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
  if (++accesses > MOST_ACCESSES) fail("runs without end, while no other thread gets a turn");
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

}  // namespace
