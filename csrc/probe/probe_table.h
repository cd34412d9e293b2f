// The probe's loops of each tier: plain functions, no threads, no Python. See probe.h.
#pragma once

#include <cstdint>

#include "runtime/cpu_features.h"

namespace mlxr {

// The loops of one tier.
struct ProbeTable {
    // Reads `bytes` bytes (a multiple of 1024, data 64-byte aligned) once, in order, asking for memory `ahead` bytes
    // in advance unless it is 0. Returns something that depends on all of them.
    int32_t (*read)(const uint8_t* data, int64_t bytes, int64_t ahead);
    // Products of `steps` steps on data of the first-level cache, multiply_macs multiply-adds each. Returns their sum.
    int32_t (*multiply)(const uint8_t* data, int64_t steps);
    int64_t multiply_macs;
#if defined(MLXR_SANITIZED)
    // Canaries: a vector that begins at byte `at` of `data`, wherever that is, and a sum that may overflow.
    int32_t (*read_stray)(const uint8_t* data, int64_t at);
    int32_t (*add)(int32_t a, int32_t b);
#endif
};

inline constexpr int64_t kProbeDataBytes = 4096;  // that `multiply` needs

const ProbeTable* probe_table(Isa isa);

}  // namespace mlxr

extern "C" {  // as far as the tiers are compiled
const mlxr::ProbeTable* mlxr_probe_portable() noexcept;
const mlxr::ProbeTable* mlxr_probe_avx2() noexcept;
const mlxr::ProbeTable* mlxr_probe_avx512() noexcept;
const mlxr::ProbeTable* mlxr_probe_avx512bf16() noexcept;
const mlxr::ProbeTable* mlxr_probe_neon() noexcept;
const mlxr::ProbeTable* mlxr_probe_amx() noexcept;
}
