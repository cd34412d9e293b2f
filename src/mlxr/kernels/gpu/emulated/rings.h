// The words of rings, which some SIMD-groups fill and others read, and what each of them means; below, on the host.
// They follow emulated.h in kernels with boxed inputs alone. CUDA has them on sm_90a (cuda/rings.h), Metal has not.
//
//   BOX_ROOM              a ROOM that starts at a multiple of 1,024 bytes
//   SLOTS                 declares what tells of COUNT slots of a ring whether they are full
//   open_slots<COUNT, READERS, FILLERS>    before their use, by all threads: so many SIMD-groups free a slot each time,
//                         and so many (1) fill it, if not by boxes
//   expect_bytes          by the lane that fills a slot, before it brings what is so large
//   bring_box<ROWS, BLOCKS, KEEP>    begins to bring rows and blocks of 64 columns of a matrix of 16-bit numbers, whose
//                         size is given, into a slot: eight rows of all blocks, block after block, then the next eight.
//                         What lies beyond the end is zero. Piece p of eight numbers of row r lies at p ^ (r % 8).
//                         KEEP: others read the same, so it stays in the cache. The launch has a Box for the matrix
//   await_free, await_full    until what was in the slot before its `turn`th use has been read; until that use's is in
//   free_slot             by all lanes of a SIMD-group that has read it
//   fill_slot             by all lanes of a SIMD-group that has written its share of a slot and awaited its copies
//   take_registers<COUNT>, leave_registers<COUNT>    by four SIMD-groups, which have so many for a thread from here on:
//                         more than at first, once others have left theirs, or fewer
//   begin_products, multiply_panels<T, N, BLOCKS>, seal_products, await_products    by four SIMD-groups: sums += a b^T
//                         on the matrix units straight from the threadgroup's memory, with 64 rows of a, a box of one
//                         block, and N rows of b, a block of a box, both from column `first` on, 16 columns. Of
//                         SIMD-group s, lane 4 g + t has columns 8 j + 2 t and 8 j + 2 t + 1 of rows 16 s + g, then of
//                         16 s + g + 8. Sums are in, and what was read may be written again, once all that is sealed is
//                         awaited, or with await_products<COUNT> all but the last COUNT of it; here at once
//   multiply_held<N>      the same of bf16 with a in registers: each SIMD-group holds 16 rows of 16 columns as for
//                         multiply_tile, and b is N rows of a box of one block.
//                         hold_words says of four words, before begin_products, that they are made
//   begin_panels<T, N>    the same as multiply_panels from column 0 on, with boxes of one block, when sums were nothing
//   multiply_turned<T, N, ROWS>    sums += a b with a in registers as for multiply_held: b are N columns in blocks of 64,
//                         each a box of one block and ROWS rows, of which the 16 from row `first` on are taken
//   hold_sums<COUNT>      sums are not read before the products that were awaited
//   hold_word             a word is kept, and not made again wherever it is needed

namespace emulated {
struct Slot {
  int freed, filled, readers, fillers, arrived;
  int expected, bytes; // of the use that is being filled
  std::vector<Copy> copies;
};
} // namespace emulated

typedef emulated::Slot Slot;
#define SLOTS(name, COUNT) static Slot name[COUNT]
#define BOX_ROOM(name, WORDS) alignas(1024) static uint name[WORDS]

template <int COUNT, int READERS, int FILLERS = 1> FUNCTION void open_slots(Slot *slots) {
  if (emulated::group.running->thread == 0)
    for (int i = 0; i < COUNT; ++i) {
      slots[i] = Slot{};
      slots[i].readers = READERS;
      slots[i].fillers = FILLERS;
    }
  barrier();
}
FUNCTION void expect_bytes(Slot *slots, int slot, int bytes) {
  slots[slot].expected = bytes;
  slots[slot].copies.clear();
}
template <int ROWS, int BLOCKS, bool KEEP, typename T>
FUNCTION void bring_box(const T *matrix, int rows, int columns, int row, int column, uint *to, Slot *slots, int slot) {
  if (reinterpret_cast<uintptr_t>(to) % 1024 || column % 64 || row % 8 || ROWS % 8)
    emulated::fail("a box does not start where it must");
  Slot &filled = slots[slot];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < 64 * BLOCKS; c += 8) {
      uint *at = to + (r / 8 * BLOCKS + c / 64) * 256 + r % 8 * 32 + (c % 64 / 8 ^ r % 8) * 4;
      memset(at, 0xFF, 16); // not a number, for who reads too early
      const bool exists = row + r < rows && column + c < columns;
      filled.copies.push_back({exists ? matrix + size_t(row + r) * columns + column + c : nullptr, at, 16, 0});
    }
  filled.bytes += 128 * ROWS * BLOCKS;
  if (filled.bytes > filled.expected)
    emulated::fail("more bytes are brought into a slot than expected");
  if (filled.bytes == filled.expected) {
    filled.expected = filled.bytes = 0;
    ++filled.filled;
  }
}
template <int COUNT> FUNCTION void await_free(Slot *slots, int slot, int turn) {
  emulated::await_count(slots[slot].freed, turn * slots[slot].readers);
}
template <int COUNT> FUNCTION void await_full(Slot *slots, int slot, int turn) {
  emulated::await_count(slots[slot].filled, turn + 1);
  for (const emulated::Copy &copy : slots[slot].copies)
    if (copy.from)
      memcpy(copy.to, copy.from, copy.bytes);
    else
      memset(copy.to, 0, copy.bytes);
  slots[slot].copies.clear();
}
template <int COUNT> FUNCTION void free_slot(Slot *slots, int slot) {
  simd_barrier();
  if (emulated::find_lane() == 0)
    ++slots[slot].freed;
}
template <int COUNT> FUNCTION void fill_slot(Slot *slots, int slot) {
  simd_barrier();
  if (emulated::find_lane() == 0 && ++slots[slot].arrived == slots[slot].fillers) {
    slots[slot].arrived = 0;
    ++slots[slot].filled;
  }
}
template <int COUNT> FUNCTION void take_registers() {}
template <int COUNT> FUNCTION void leave_registers() {}
FUNCTION void begin_products() {}
FUNCTION void seal_products() {}
template <int COUNT = 0> FUNCTION void await_products() {}
template <typename T> FUNCTION float panel_value(const uint *panel, int blocks, int row, int column) {
  const uint *group = panel + row / 8 * blocks * 256;
  return half_of<T>(group[row % 8 * 32 + (column / 8 ^ row % 8) * 4 + column % 8 / 2], column % 2);
}
template <typename T, int N, int BLOCKS>
FUNCTION void multiply_panels(float *sums, const uint *a, const uint *b, int first) {
  const int thread = emulated::group.running->thread % 128, lane = thread % 32;
  for (int j = 0; j < N / 8; ++j)
    for (int i = 0; i < 4; ++i) {
      const int row = thread / 32 * 16 + lane / 4 + i / 2 * 8, column = 8 * j + lane % 4 * 2 + i % 2;
      for (int k = first; k < first + 16; ++k)
        sums[4 * j + i] += panel_value<T>(a, 1, row, k) * panel_value<T>(b, BLOCKS, column, k);
    }
}
template <typename T, int N> FUNCTION void begin_panels(float *sums, const uint *a, const uint *b) {
  for (int i = 0; i < N / 2; ++i)
    sums[i] = 0.0f;
  multiply_panels<T, N, 1>(sums, a, b, 0);
}
template <int COUNT> FUNCTION void hold_sums(float *) {}
FUNCTION void hold_word(uint &) {}
FUNCTION void hold_words(uint *) {}
template <int N> FUNCTION void multiply_held(float *sums, const uint *a, const uint *b, int first) {
  const uint *all = emulated::exchange(a, 4);
  const int lane = emulated::find_lane();
  for (int j = 0; j < N / 8; ++j)
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) {
        const uint pair = all[(lane / 4 * 4 + k % 8 / 2) * emulated::WORDS + k / 8 * 2 + i / 2];
        sums[4 * j + i] += half_of<bf16>(pair, k % 2) * panel_value<bf16>(b, 1, 8 * j + lane % 4 * 2 + i % 2, first + k);
      }
}
template <typename T, int N, int ROWS>
FUNCTION void multiply_turned(float *sums, const uint *a, const uint *b, int first) {
  const uint *all = emulated::exchange(a, 4);
  const int lane = emulated::find_lane();
  for (int j = 0; j < N / 8; ++j)
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 16; ++k) {
        const uint pair = all[(lane / 4 * 4 + k % 8 / 2) * emulated::WORDS + k / 8 * 2 + i / 2];
        const int column = 8 * j + lane % 4 * 2 + i % 2;
        sums[4 * j + i] +=
            half_of<T>(pair, k % 2) * panel_value<T>(b + column / 64 * ROWS * 32, 1, first + k, column % 64);
      }
}
