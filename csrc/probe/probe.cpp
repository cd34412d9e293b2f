// See probe.h.
#include "probe/probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

namespace mlxr {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPieceBytes = size_t{8} << 20;  // long enough for a stream, short enough to share out evenly
constexpr int kTasksPerThread = 16;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Wakes the threads, so that the measured section begins with all of them spinning.
void wake(Runtime& runtime) {
    runtime.pool.parallel_for_near(runtime.pool.threads(), [](int, int) {});
}

}  // namespace

const ProbeTable* probe_table(Isa isa) {
    switch (isa) {
#define TIER(name)  \
    case Isa::name: \
        return mlxr_probe_##name();
#define LEFT_OUT(name)
#include "tiers.def"
        default:
            return nullptr;
    }
}

Probe::Probe(Runtime& runtime, size_t bytes)
    : memory_((std::max<size_t>(bytes, 1) + kPieceBytes - 1) / kPieceBytes * kPieceBytes) {
    runtime.pool.parallel_for_near(static_cast<int>(memory_.bytes() / kPieceBytes), [&](int piece, int) {
        std::memset(memory_.data() + static_cast<size_t>(piece) * kPieceBytes, piece % 127 + 1, kPieceBytes);
    });
}

double Probe::read(Runtime& runtime, int64_t ahead) const {
    const ProbeTable& table = *probe_table(runtime.isa);
    std::atomic<int32_t> sum{0};
    wake(runtime);
    const Clock::time_point start = Clock::now();
    runtime.pool.parallel_for(static_cast<int>(memory_.bytes() / kPieceBytes), [&](int piece, int) {
        const uint8_t* const data = memory_.data() + static_cast<size_t>(piece) * kPieceBytes;
        sum.fetch_xor(table.read(data, static_cast<int64_t>(kPieceBytes), ahead), std::memory_order_relaxed);
    });
    return seconds_since(start);
}

double Probe::multiply(Runtime& runtime, int64_t macs) const {
    const ProbeTable& table = *probe_table(runtime.isa);
    const int tasks = kTasksPerThread * runtime.pool.threads();
    const int64_t steps = std::max<int64_t>(1, macs / tasks / table.multiply_macs);
    std::atomic<int32_t> sum{0};
    wake(runtime);
    const Clock::time_point start = Clock::now();
    runtime.pool.parallel_for(
        tasks, [&](int, int) { sum.fetch_xor(table.multiply(memory_.data(), steps), std::memory_order_relaxed); });
    return static_cast<double>(steps) * tasks * static_cast<double>(table.multiply_macs) / seconds_since(start);
}

}  // namespace mlxr
