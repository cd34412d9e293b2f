// Work over rows or other parts that are alike, cut for the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/runtime.h"

namespace mlxr {

// Fewer elements than this take one thread no longer than waking the others.
constexpr int64_t kSerialElements = 1 << 15;

// Runs body(first, last) over [0, count), on several threads when the work, in elements, is worth it.
template <typename Body>
void run_ranges(Runtime& runtime, int64_t count, int64_t elements_each, const Body& body) {
    const int threads = runtime.pool.threads();
    if (threads == 1 || count * elements_each < kSerialElements) return body(int64_t{0}, count);
    const int64_t parts = std::min<int64_t>(count, threads);
    runtime.pool.parallel_for_near(static_cast<int>(parts),
                                   [&](int part, int) { body(count * part / parts, count * (part + 1) / parts); });
}

}  // namespace mlxr
