// See runtime.h.
#include "runtime.h"

#include <new>

namespace mlxr {

namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

Runtime::Runtime(int threads, Isa isa_) : pool(threads), isa(isa_), kernels(kernel_table(isa_)) {}

Runtime::~Runtime() {
    for (Region& region : regions_) ::operator delete(region.data, kAlignment);
}

std::byte* Runtime::scratch(Scratch use, size_t bytes) {
    Region& region = regions_[static_cast<int>(use)];
    if (bytes > region.bytes) {
        const size_t grown = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        ::operator delete(region.data, kAlignment);
        region = Region{};
        region.data = static_cast<std::byte*>(::operator new(grown, kAlignment));
        region.bytes = grown;
    }
    return region.data;
}

}  // namespace mlxr
