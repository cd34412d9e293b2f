// Threads of a threadgroup on the host: each is a fiber that runs until it waits for others, so barriers and SIMD-group
// operations really happen, and a kernel whose threads do not all arrive at one is caught. Knows no word of kernel
// bodies: emulated.h, which comes next, makes them of this.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulated {

constexpr int LANES = 32;
constexpr int WORDS = 6; // that a lane gives in an exchange
constexpr size_t STACK_BYTES = 64 * 1024;

[[noreturn]] inline void fail(const char *what) {
  fprintf(stderr, "emulated kernel: %s\n", what);
  fflush(stderr);
  abort();
}

// For what a fiber waits: nothing, the lanes of its SIMD-group, all threads, a count; or it has ended.
enum class Wait { NONE, LANES, THREADS, COUNT, ENDED };

// A Context is where a fiber, or what schedules them, goes on later.
#if defined(__x86_64__)
extern "C" void mlxr_switch_stack(void **from, void *to);
asm(R"(
.text
.type mlxr_switch_stack, @function
mlxr_switch_stack:
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
)");
typedef void *Context;
inline void open_context(Context &context, char *stack, void (*begin)()) {
  void **top = reinterpret_cast<void **>(stack + STACK_BYTES);
  *--top = nullptr; // keeps the stack aligned as after a call
  *--top = reinterpret_cast<void *>(begin);
  for (int i = 0; i < 6; ++i)
    *--top = nullptr;
  context = top;
}
inline void switch_context(Context &from, Context &to) { mlxr_switch_stack(&from, to); }
#else
typedef ucontext_t Context;
inline void open_context(Context &context, char *stack, void (*begin)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = STACK_BYTES;
  context.uc_link = nullptr;
  makecontext(&context, begin, 0);
}
inline void switch_context(Context &from, Context &to) { swapcontext(&from, &to); }
#endif

// The address sanitizer has to know which stack is next, and then which one was left.
#if defined(__SANITIZE_ADDRESS__)
inline void leave_stack(void **kept, const void *next, size_t bytes) {
  __sanitizer_start_switch_fiber(kept, next, bytes);
}
inline void enter_stack(void *kept, const void **left, size_t *bytes) {
  __sanitizer_finish_switch_fiber(kept, left, bytes);
}
#else
inline void leave_stack(void **, const void *, size_t) {}
inline void enter_stack(void *, const void **, size_t *) {}
#endif

// What was begun and is not awaited yet; it happens when it is.
struct Copy {
  const void *from;
  void *to;
  int bytes, bundle;
};

struct Fiber {
  Wait wait = Wait::NONE;
  const int *count = nullptr; // with Wait::COUNT, what has to come to
  int wanted = 0;
  int thread = 0;
  int exchanges = 0;
  int bundles = 0;
  std::vector<Copy> copies;
  char *stack = nullptr;
  Context context;
};

struct Group {
  int threads = 0, x = 0, y = 0, z = 0;
  std::vector<Fiber> fibers;
  std::vector<uint32_t> exchanged; // per SIMD-group two sets of lanes, used in turn, WORDS of each lane
  Fiber *running = nullptr;
  void (*body)(void **arrays) = nullptr;
  void **arrays = nullptr;
  Context scheduler;
  const void *scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
};

static Group group;
static size_t deepest = 0; // bytes of a stack that thread 0 has used, where somebody asks

#if defined(MLXR_MEASURES)
constexpr char UNTOUCHED = 0x5A;
inline void mark_stack(char *stack) { memset(stack, UNTOUCHED, STACK_BYTES); }
inline void measure_stack(const char *stack) {
  size_t free = 0;
  while (free < STACK_BYTES && stack[free] == UNTOUCHED)
    ++free;
  deepest = STACK_BYTES - free > deepest ? STACK_BYTES - free : deepest;
}
#else
inline void mark_stack(char *) {}
inline void measure_stack(const char *) {}
#endif

inline int find_lane() { return group.running->thread % LANES; }

inline void leave(Wait wait) {
  Fiber *self = group.running;
  self->wait = wait;
  void *kept = nullptr;
  leave_stack(wait == Wait::ENDED ? nullptr : &kept, group.scheduler_stack, group.scheduler_stack_bytes);
  switch_context(self->context, group.scheduler);
  enter_stack(kept, &group.scheduler_stack, &group.scheduler_stack_bytes);
}

inline void begin_fiber() {
  enter_stack(nullptr, &group.scheduler_stack, &group.scheduler_stack_bytes);
  group.body(group.arrays);
  leave(Wait::ENDED);
  fail("a thread ran on after its end");
}

inline void start(Fiber &fiber) {
  fiber.wait = Wait::NONE;
  fiber.exchanges = fiber.bundles = 0;
  fiber.copies.clear();
  open_context(fiber.context, fiber.stack, begin_fiber);
}

inline void resume(Fiber &fiber) {
  group.running = &fiber;
  void *kept = nullptr;
  leave_stack(&kept, fiber.stack, STACK_BYTES);
  switch_context(group.scheduler, fiber.context);
  enter_stack(kept, nullptr, nullptr);
}

inline bool all_wait(int first, int last, Wait wait) {
  for (int i = first; i < last; ++i)
    if (group.fibers[i].wait != wait)
      return false;
  return true;
}

inline void release(int first, int last) {
  for (int i = first; i < last; ++i)
    group.fibers[i].wait = Wait::NONE;
}

inline void run_group() {
  for (Fiber &fiber : group.fibers)
    start(fiber);
  while (true) {
    for (Fiber &fiber : group.fibers)
      if (fiber.wait == Wait::NONE)
        resume(fiber);
    if (all_wait(0, group.threads, Wait::ENDED))
      return;
    bool moved = false;
    for (int first = 0; first < group.threads; first += LANES)
      if (all_wait(first, first + LANES, Wait::LANES)) {
        release(first, first + LANES);
        moved = true;
      }
    for (Fiber &fiber : group.fibers)
      if (fiber.wait == Wait::COUNT && *fiber.count >= fiber.wanted) {
        fiber.wait = Wait::NONE;
        moved = true;
      }
    if (!moved && all_wait(0, group.threads, Wait::THREADS)) {
      release(0, group.threads);
      moved = true;
    }
    if (!moved)
      fail("some threads wait at a barrier or SIMD-group operation that others never reach");
  }
}

inline void run(void (*body)(void **), void **arrays, int groups_x, int groups_y, int groups_z, int threads) {
  if (threads % LANES)
    fail("the threads of a threadgroup must be whole SIMD-groups");
  group.body = body;
  group.arrays = arrays;
  group.threads = threads;
  group.fibers.resize(threads);
  group.exchanged.assign(2 * WORDS * threads, ~0u);
  for (int i = 0; i < threads; ++i) {
    group.fibers[i].thread = i;
    if (!group.fibers[i].stack)
      group.fibers[i].stack = static_cast<char *>(aligned_alloc(64, STACK_BYTES));
  }
  deepest = 0;
  mark_stack(group.fibers[0].stack);
  for (group.z = 0; group.z < groups_z; ++group.z)
    for (group.y = 0; group.y < groups_y; ++group.y)
      for (group.x = 0; group.x < groups_x; ++group.x)
        run_group();
  measure_stack(group.fibers[0].stack);
}

inline void await_count(const int &count, int wanted) {
  Fiber *self = group.running;
  if (count >= wanted)
    return;
  self->count = &count;
  self->wanted = wanted;
  leave(Wait::COUNT);
}

// Every lane gives some words; afterwards each may read those of all lanes of its SIMD-group, WORDS to a lane.
inline const uint32_t *exchange(const uint32_t *words, int count) {
  Fiber *self = group.running;
  const int simd = self->thread / LANES;
  uint32_t *all = &group.exchanged[(2 * simd + (self->exchanges++ & 1)) * LANES * WORDS];
  memcpy(all + find_lane() * WORDS, words, count * sizeof(uint32_t));
  leave(Wait::LANES);
  return all;
}

} // namespace emulated
