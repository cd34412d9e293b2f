// What one Context of Python owns natively: the thread pool, the chosen instruction set, and scratch memory
// that grows to the largest call and stays. Every operator takes the Runtime, locks it, and runs without the
// GIL.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "linear/pages.h"
#include "runtime/buffers.h"
#include "runtime/cpu_features.h"
#include "runtime/kernel_table.h"
#include "runtime/tally.h"
#include "runtime/thread_pool.h"

namespace mlxr {

// One region per use, so that two operators that call each other cannot share a buffer by accident.
enum class Scratch : int {
    activations,
    panels,
    attend,
    sample,
    operators,
    blocks,
    gated,
    inputs,
    streams,
    mixers,
    experts,
    adapters,
    parts,
    count
};

class Runtime {
  public:
    // `isa` must be available (isa_available). Throws std::system_error when threads cannot be started.
    Runtime(int threads, Isa isa);
    Runtime(const Runtime&) = delete;
    Runtime& operator=(const Runtime&) = delete;

    // At least `bytes` bytes, 64-byte aligned (huge pages when there are some), contents undefined; valid until the
    // next call for the same use. Throws std::bad_alloc. Allocates only when the region must grow.
    std::byte* scratch(Scratch use, size_t bytes);

    // Held for the whole of an operator: the pool and the scratch serve one call at a time.
    std::mutex mutex;
    ThreadPool pool;
    const Isa isa;
    const KernelTable* const kernels;

    // What ran, for the ledger.
    Tally tally;

    // Whether products may take strips where these are faster than rows; the sums are the same.
    bool takes_strips = true;

    // Memory of weights, and of pools of keys and values: their pages are short runs all over a pool.
    Slices weights, pools;

    // Memory of results; shared with those that are still held when the runtime goes.
    const std::shared_ptr<Buffers> buffers = std::make_shared<Buffers>();

  private:
    Pages regions_[static_cast<int>(Scratch::count)];
};

}  // namespace mlxr
