// The words of lines, by which devices give each other numbers; below, on the host, where a device is a process.
//
//   send_line             two words and their turn into a line of 16 bytes, which may be another device's. The halves of
//                         a line come whole, each with its turn, in any order.
//   take_line             the two words, if the line has those of this turn
//   count_up              adds one to a count that all threadgroups share, and returns what it was
//   read_now, write_now   a word that the host or another threadgroup may change or look at
//   settle_writes         what was written so far is seen before what is written later
//   read_clock_ms         a clock in milliseconds, of which differences count
//   rest                  in a loop that waits for another device
#include <atomic>
#include <chrono>
#include <sched.h>

FUNCTION void send_line(uint *to, uint first, uint second, uint turn) {
  reinterpret_cast<std::atomic<uint64_t> *>(to)[0].store(first | uint64_t(turn) << 32, std::memory_order_release);
  reinterpret_cast<std::atomic<uint64_t> *>(to)[1].store(second | uint64_t(turn) << 32, std::memory_order_release);
}
FUNCTION bool take_line(const uint *from, uint turn, uint *w) {
  uint turns[2];
  for (int i = 0; i < 2; ++i) {
    const uint64_t half = reinterpret_cast<const std::atomic<uint64_t> *>(from)[i].load(std::memory_order_acquire);
    w[i] = uint(half), turns[i] = uint(half >> 32);
  }
  return turns[0] == turn && turns[1] == turn;
}
FUNCTION uint count_up(uint *count) { return (*count)++; }
FUNCTION uint read_now(const uint *p) { return *static_cast<const volatile uint *>(p); }
FUNCTION void write_now(uint *p, uint v) { *static_cast<volatile uint *>(p) = v; }
FUNCTION void settle_writes() { std::atomic_thread_fence(std::memory_order_seq_cst); }
FUNCTION uint read_clock_ms() {
  return uint(std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
                  .count());
}
FUNCTION void rest() { sched_yield(); }
