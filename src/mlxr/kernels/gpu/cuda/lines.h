// The words of lines in CUDA C++. See emulated/lines.h for what each of them means.
FUNCTION void send_line(uint *to, uint first, uint second, uint turn) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(to), "r"(first), "r"(second), "r"(turn)
               : "memory");
}
FUNCTION bool take_line(const uint *from, uint turn, uint *w) {
  uint first, second;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(first), "=r"(w[1]), "=r"(second)
               : "l"(from)
               : "memory");
  return first == turn && second == turn;
}
FUNCTION uint count_up(uint *count) { return atomicAdd(count, 1u); }
FUNCTION uint read_now(const uint *p) { return *reinterpret_cast<const volatile uint *>(p); }
FUNCTION void write_now(uint *p, uint v) { *reinterpret_cast<volatile uint *>(p) = v; }
FUNCTION void settle_writes() { __threadfence_system(); }
FUNCTION uint read_clock_ms() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return uint(ns / 1000000ull);
}
FUNCTION void rest() {}
