// Which instruction sets this build carries and this machine (processor and operating system) can run.
// Knows nothing of kernels; the tiers' names are the ones Python sees.
#pragma once

#include <string_view>

namespace mlxr {

enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3, neon = 4, amx = 5 };
inline constexpr int kIsaCount = 6;

// "portable", "avx2", "avx512", "avx512bf16", "neon" or "amx".
const char* isa_name(Isa isa);

// Sets `isa` and returns true when `name` is a tier's name.
bool parse_isa(std::string_view name, Isa& isa);

// Whether kernels of this tier are compiled in, and whether they were left out because the module is for one machine
// alone. CMake writes tiers.def, with a row for each tier of the architecture: TIER(name) or LEFT_OUT(name).
bool isa_built(Isa isa);
bool isa_left_out(Isa isa);

// True when kernels of this tier are compiled in and can run here.
//   avx2       = AVX2, FMA, F16C, BMI2
//   avx512     = AVX-512 F, BW, DQ, VL, VNNI, VBMI on top of avx2: Intel's since Ice Lake
//   avx512bf16 = AVX-512 BF16 on top of avx512: AMD's since Zen 4
//   neon       = Armv8 with the dot product of bytes (Armv8.2 dotprod)
//   amx        = AMX-TILE and AMX-INT8 on top of avx512, where Linux lets this process use them: asked once
bool isa_available(Isa isa);

// The fastest available tier, which is the highest but on Intel's processors without AMX: Emerald Rapids takes two
// cycles for vdpbf16ps and half of one for a multiply-add, so that the operators of avx512 are faster there than those
// of avx512bf16. `portable`, which is then not available either, where this module has none for this machine.
Isa best_isa();

// Threads that may run here at once: physical cores in the affinity mask, no more than the cgroup's CPU quota
// allows; of Apple's chips the performance cores, as a section lasts as long as its slowest thread.
int default_threads();

}  // namespace mlxr
