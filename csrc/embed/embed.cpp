// See embed.h.
#include "embed/embed.h"

#include <algorithm>

namespace mlxr {

void embed(Runtime& runtime, Type type, const uint8_t* data, int64_t columns, const int32_t* ids, int64_t tokens,
           float* out) {
    const TypeInfo& info = type_info(type);
    const auto decode = runtime.kernels->quant[static_cast<int>(type)].decode;
    const int64_t blocks = columns / info.block_elements, row_bytes = blocks * info.block_bytes;
    Counted counted(runtime.tally, {OperatorName::embed, KernelName::plain, static_cast<int>(type)});
    counted.does([&] {
        const int64_t floats = static_cast<int64_t>(sizeof(float)) * columns;
        return Tally::Work{.nanoseconds = 0, .bytes = tokens * (row_bytes + floats), .macs = 0};
    });
    // A few rows take less time than waking the other threads.
    const int tasks = tokens * columns < 16384 ? 1 : static_cast<int>(std::min<int64_t>(tokens, 1024));
    runtime.pool.parallel_for_near(tasks, [&](int task, int) {
        for (int64_t t = tokens * task / tasks; t < tokens * (task + 1) / tasks; ++t) {
            const uint8_t* const row = data + ids[t] * row_bytes;
            if (decode == nullptr) {
                decode_floats(type, row, columns, out + t * columns);
            } else {
                decode(row, blocks, out + t * columns);
            }
        }
    });
}

}  // namespace mlxr
