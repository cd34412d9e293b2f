// Rows of an embedding table, decoded from raw blocks.
#pragma once

#include <cstdint>

#include "quants/quants.h"
#include "runtime/runtime.h"

namespace mlxr {

// out[t][:] = row ids[t] of the table at `data`, `columns` columns each. The ids are in range; columns are
// whole blocks of the type. The caller holds the runtime's mutex.
void embed(Runtime& runtime, Type type, const uint8_t* data, int64_t columns, const int32_t* ids, int64_t tokens,
           float* out);

}  // namespace mlxr
