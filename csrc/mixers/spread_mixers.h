// The recurrent mixers over the thread pool: how a call is cut for the threads, which never shows in the result. `call`
// must be checked; the caller holds runtime.mutex. Knows no Python.
#pragma once

#include "mixers/mixers.h"
#include "runtime/runtime.h"

namespace mlxr {

void spread_short_conv(Runtime& runtime, const ShortConvCall& call);

// q and k are the heads that a call of `spread_gated_delta` prepares; it fills in q, k, decay and factors of `call`.
void spread_gated_delta(Runtime& runtime, PrepareRecurrenceCall prepare, RecurrenceCall call);

// The same, but q and k are read as they are.
void spread_mamba2(Runtime& runtime, PrepareRecurrenceCall prepare, RecurrenceCall call);

void spread_scan(Runtime& runtime, const ScanCall& call);

void spread_gated_norm(Runtime& runtime, const GatedNormCall& call, int64_t rows);

}  // namespace mlxr
