// The words of rings in CUDA C++ for sm_90a: slots are pairs of mbarriers, boxes are tensor maps, panels are wgmma's.
// See emulated/rings.h for what each of them means.
struct __align__(64) Box {
  unsigned long long words[16];
};
typedef unsigned long long Slot;
#define SLOTS(name, COUNT) __shared__ Slot name[2 * (COUNT)]
#define BOX_ROOM(name, WORDS) extern __shared__ __align__(1024) uint name[]

FUNCTION void await_slot(const Slot *slot, int turn) {
  asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
               "@!done bra again;}" ::"r"(shared_address(slot)),
               "r"(turn & 1)
               : "memory");
}
template <int COUNT, int READERS, int FILLERS = 1> FUNCTION void open_slots(Slot *slots) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * COUNT; ++i) {
      const int arrivals = i < COUNT ? FILLERS : READERS;
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(slots + i)), "r"(arrivals));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}
template <int COUNT> FUNCTION void await_free(Slot *slots, int slot, int turn) {
  await_slot(slots + COUNT + slot, turn - 1);
}
template <int COUNT> FUNCTION void await_full(Slot *slots, int slot, int turn) { await_slot(slots + slot, turn); }
template <int COUNT> FUNCTION void free_slot(Slot *slots, int slot) {
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(slots + COUNT + slot)) : "memory");
}
template <int COUNT> FUNCTION void fill_slot(Slot *slots, int slot) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(slots + slot)) : "memory");
}
FUNCTION void expect_bytes(Slot *slots, int slot, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(slots + slot)), "r"(bytes)
               : "memory");
}
template <int ROWS, int BLOCKS, bool KEEP>
FUNCTION void bring_box(const Box &box, int, int, int row, int column, uint *to, Slot *slots, int slot) {
  unsigned long long policy;
  if (KEEP)
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  else
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
               "l"(&box), "r"(shared_address(slots + slot)), "r"(0), "r"(column / 64), "r"(row / 8), "l"(policy)
               : "memory");
}

template <int COUNT> FUNCTION void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> FUNCTION void leave_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
FUNCTION void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FUNCTION void seal_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int COUNT = 0> FUNCTION void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}
template <int BLOCKS> FUNCTION unsigned long long describe_panel(const uint *p, int first) {
  const unsigned long long at = ((shared_address(p) + 2 * first) & 0x3FFFF) >> 4, groups = 64 * BLOCKS;
  return at | 1ull << 16 | groups << 32 | 1ull << 62; // rows of 128 bytes, crosswise; eight are `groups` from the next
}
template <typename T, int N> struct Panels {};
#define MLXR_PLACES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MLXR_PLACES_32 MLXR_PLACES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MLXR_PLACES_48 MLXR_PLACES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MLXR_PLACES_64 MLXR_PLACES_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MLXR_PLACES_96 MLXR_PLACES_64 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MLXR_PLACES_112 MLXR_PLACES_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MLXR_PLACES_128 MLXR_PLACES_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MLXR_PLACES_160 MLXR_PLACES_128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define MLXR_PLACES_192 MLXR_PLACES_160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MLXR_PLACES_256 MLXR_PLACES_192 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MLXR_SUMS_8(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define MLXR_SUMS_16 MLXR_SUMS_8(0)
#define MLXR_SUMS_32 MLXR_SUMS_16, MLXR_SUMS_8(8)
#define MLXR_SUMS_48 MLXR_SUMS_32, MLXR_SUMS_8(16)
#define MLXR_SUMS_64 MLXR_SUMS_48, MLXR_SUMS_8(24)
#define MLXR_SUMS_96 MLXR_SUMS_64, MLXR_SUMS_8(32), MLXR_SUMS_8(40)
#define MLXR_SUMS_112 MLXR_SUMS_96, MLXR_SUMS_8(48)
#define MLXR_SUMS_128 MLXR_SUMS_112, MLXR_SUMS_8(56)
#define MLXR_SUMS_160 MLXR_SUMS_128, MLXR_SUMS_8(64), MLXR_SUMS_8(72)
#define MLXR_SUMS_192 MLXR_SUMS_160, MLXR_SUMS_8(80), MLXR_SUMS_8(88)
#define MLXR_SUMS_256 MLXR_SUMS_192, MLXR_SUMS_8(96), MLXR_SUMS_8(104), MLXR_SUMS_8(112), MLXR_SUMS_8(120)
#define MLXR_PANELS(T, KIND, N, A, B)                                                                                  \
  template <> struct Panels<T, N> {                                                                                    \
    static FUNCTION void multiply(float *sums, unsigned long long a, unsigned long long b) {                           \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" MLXR_PLACES_##N                \
                   "}, %" #A ", %" #B ", 1, 1, 1, 0, 0;"                                                               \
                   : MLXR_SUMS_##N                                                                                     \
                   : "l"(a), "l"(b));                                                                                  \
    }                                                                                                                  \
    static FUNCTION void begin(float *sums, unsigned long long a, unsigned long long b) {                              \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" MLXR_PLACES_##N                \
                   "}, %" #A ", %" #B ", 0, 1, 1, 0, 0;"                                                               \
                   : MLXR_SUMS_##N                                                                                     \
                   : "l"(a), "l"(b));                                                                                  \
    }                                                                                                                  \
  };
MLXR_PANELS(bf16, "bf16", 32, 16, 17)
MLXR_PANELS(f16, "f16", 32, 16, 17)
MLXR_PANELS(bf16, "bf16", 48, 24, 25)
MLXR_PANELS(f16, "f16", 48, 24, 25)
MLXR_PANELS(bf16, "bf16", 64, 32, 33)
MLXR_PANELS(f16, "f16", 64, 32, 33)
MLXR_PANELS(bf16, "bf16", 96, 48, 49)
MLXR_PANELS(f16, "f16", 96, 48, 49)
MLXR_PANELS(bf16, "bf16", 112, 56, 57)
MLXR_PANELS(f16, "f16", 112, 56, 57)
MLXR_PANELS(bf16, "bf16", 128, 64, 65)
MLXR_PANELS(f16, "f16", 128, 64, 65)
MLXR_PANELS(bf16, "bf16", 160, 80, 81)
MLXR_PANELS(f16, "f16", 160, 80, 81)
MLXR_PANELS(bf16, "bf16", 192, 96, 97)
MLXR_PANELS(f16, "f16", 192, 96, 97)
template <typename T, int N, int BLOCKS>
FUNCTION void multiply_panels(float *sums, const uint *a, const uint *b, int first) {
  Panels<T, N>::multiply(sums, describe_panel<1>(a, first), describe_panel<BLOCKS>(b, first));
}
template <typename T, int N> FUNCTION void begin_panels(float *sums, const uint *a, const uint *b) {
  Panels<T, N>::begin(sums, describe_panel<1>(a, 0), describe_panel<1>(b, 0));
}

template <int N> struct Held {};
#define MLXR_HELD(N, A, B, C, D, AT)                                                                                   \
  template <> struct Held<N> {                                                                                         \
    static FUNCTION void multiply(float *sums, const uint *a, unsigned long long b) {                                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MLXR_PLACES_##N "}, {%" #A ", %" #B    \
                   ", %" #C ", %" #D "}, %" #AT ", 1, 1, 1, 0;"                                                        \
                   : MLXR_SUMS_##N                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
    }                                                                                                                  \
  };
MLXR_HELD(16, 8, 9, 10, 11, 12)
MLXR_HELD(32, 16, 17, 18, 19, 20)
MLXR_HELD(64, 32, 33, 34, 35, 36)
MLXR_HELD(96, 48, 49, 50, 51, 52)
MLXR_HELD(128, 64, 65, 66, 67, 68)
MLXR_HELD(192, 96, 97, 98, 99, 100)
MLXR_HELD(256, 128, 129, 130, 131, 132)
FUNCTION void hold_word(uint &word) { asm volatile("" : "+r"(word)); }
FUNCTION void hold_words(uint *a) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}
template <int N> FUNCTION void multiply_held(float *sums, const uint *a, const uint *b, int first) {
  Held<N>::multiply(sums, a, describe_panel<1>(b, first));
}

template <typename T, int N> struct Turned {};
#define MLXR_TURNED(T, KIND, N, A, B, C, D, AT)                                                                        \
  template <> struct Turned<T, N> {                                                                                    \
    static FUNCTION void multiply(float *sums, const uint *a, unsigned long long b) {                                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." KIND "." KIND " {" MLXR_PLACES_##N "}, {%" #A     \
                   ", %" #B ", %" #C ", %" #D "}, %" #AT ", 1, 1, 1, 1;"                                               \
                   : MLXR_SUMS_##N                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
    }                                                                                                                  \
  };
MLXR_TURNED(bf16, "bf16", 64, 32, 33, 34, 35, 36)
MLXR_TURNED(f16, "f16", 64, 32, 33, 34, 35, 36)
MLXR_TURNED(bf16, "bf16", 128, 64, 65, 66, 67, 68)
MLXR_TURNED(f16, "f16", 128, 64, 65, 66, 67, 68)
MLXR_TURNED(bf16, "bf16", 256, 128, 129, 130, 131, 132)
MLXR_TURNED(f16, "f16", 256, 128, 129, 130, 131, 132)
template <typename T, int N, int ROWS>
FUNCTION void multiply_turned(float *sums, const uint *a, const uint *b, int first) {
  const unsigned long long at = ((shared_address(b) + 128 * first) & 0x3FFFF) >> 4, block = 8 * ROWS;
  Turned<T, N>::multiply(sums, a, at | block << 16 | 64ull << 32 | 1ull << 62);
}
template <int COUNT> FUNCTION void hold_sums(float *sums) {
  UNROLL
  for (int i = 0; i < COUNT; ++i)
    asm volatile("" : "+f"(sums[i])::"memory");
}
