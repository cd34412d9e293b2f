// See buffers.h.
#include "runtime/buffers.h"

#include <utility>

namespace mlxr {

namespace {

constexpr size_t kUnit = size_t{1} << 20;  // sizes are multiples of this, so that similar results share blocks
constexpr size_t kMostFreeBytes = size_t{256} << 20;

}  // namespace

Pages Buffers::take(size_t bytes) {
    if (kExactMemory) return Pages(bytes);
    const size_t wanted = (bytes + kUnit - 1) / kUnit * kUnit;
    {
        const std::lock_guard lock(mutex_);
        Pages* best = nullptr;
        for (Pages& block : free_) {
            if (block.bytes() < wanted || block.bytes() > 2 * wanted) continue;
            if (best == nullptr || block.bytes() < best->bytes()) best = &block;
        }
        if (best != nullptr) {
            Pages taken = std::move(*best);
            *best = std::move(free_.back());
            free_.pop_back();
            free_bytes_ -= taken.bytes();
            return taken;
        }
    }
    return Pages(wanted);
}

void Buffers::give_back(Pages block) {
    const std::lock_guard lock(mutex_);
    const size_t bytes = block.bytes();
    if (kExactMemory || free_bytes_ + bytes > kMostFreeBytes) return;
    free_.push_back(std::move(block));
    free_bytes_ += bytes;
}

}  // namespace mlxr
