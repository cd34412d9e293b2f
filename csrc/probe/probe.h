// What the machine can do, measured with the same threads, memory and instructions as the kernels use: bytes read
// from memory and int8 products, per second. The yardstick of the benchmarks; no kernel uses it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/pages.h"
#include "probe/probe_table.h"
#include "runtime/runtime.h"

namespace mlxr {

class Probe {
  public:
    // `bytes` is rounded up to whole pieces of 8 MiB; it should be several times the last cache. All threads fill the
    // buffer, so that no byte of it is the system's shared page of zeros. Throws std::bad_alloc. The caller of every
    // method holds the runtime's mutex.
    Probe(Runtime& runtime, size_t bytes);

    size_t bytes() const { return memory_.bytes(); }

    // Reads the buffer once with all threads; seconds.
    double read(Runtime& runtime, int64_t ahead) const;

    // Multiplies for some `macs` multiply-adds with all threads; multiply-adds per second.
    double multiply(Runtime& runtime, int64_t macs) const;

  private:
    Pages memory_;
};

}  // namespace mlxr
