// See runtime.h.
#include "runtime/runtime.h"

namespace mlxr {

Runtime::Runtime(int threads, Isa isa_) : pool(threads), isa(isa_), kernels(kernel_table(isa_)) {}

std::byte* Runtime::scratch(Scratch use, size_t bytes) {
    Pages& region = regions_[static_cast<int>(use)];
    if (bytes > region.bytes() || kExactMemory) {
        region = Pages();  // first back to the system, so that both are never there at once
        region = Pages(kExactMemory ? bytes : bytes + bytes / 4);
    }
    return reinterpret_cast<std::byte*>(region.data());
}

}  // namespace mlxr
