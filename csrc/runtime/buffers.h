// Memory of large results, used again when the last holder lets go: a fresh array of some megabytes costs a page fault
// and the clearing of a page every 4 KiB, again and again. Blocks are huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "linear/pages.h"

namespace mlxr {

class Buffers {
  public:
    // At least `bytes` bytes, contents undefined: a block that was given back and is not much larger, or a new one.
    // Throws std::bad_alloc. From any thread, as is give_back.
    Pages take(size_t bytes);

    // Keeps the block for later, or returns it to the system when enough are kept.
    void give_back(Pages block);

  private:
    std::mutex mutex_;
    std::vector<Pages> free_;
    size_t free_bytes_ = 0;
};

}  // namespace mlxr
