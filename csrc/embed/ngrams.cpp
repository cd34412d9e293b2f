// See ngrams.h.
#include "embed/ngrams.h"

#include <algorithm>
#include <cstddef>

namespace mlxr {

namespace {

constexpr float kMostIds = 0x1p24f;  // floats hold no more

// The rows of the last of `known` tokens, which are ids plus 1.
void find_rows(const NgramCall& call, const int32_t* known, int32_t* rows) {
    const size_t longest = call.multipliers.size(), each = call.sizes.size() / (longest - 1);
    uint64_t mixed = static_cast<uint64_t>(*known - 1) * call.multipliers[0];
    bool ended = false;
    for (size_t back = 1; back < longest; ++back) {
        const int32_t id = known[-static_cast<std::ptrdiff_t>(back)] - 1;
        ended = ended || id < 0 || id == call.end;
        mixed ^= static_cast<uint64_t>(ended ? call.end : id) * call.multipliers[back];
        for (size_t head = (back - 1) * each; head < back * each; ++head) {
            rows[head] = static_cast<int32_t>(mixed % call.sizes[head] + call.offsets[head]);
        }
    }
}

}  // namespace

void find_ngrams(const NgramCall& call) {
    const int64_t held = call.state_floats(), heads = call.heads();
    std::vector<int32_t> known;
    for (int64_t sequence = 0; sequence < call.states.sequences; ++sequence) {
        const int64_t start = call.states.starts[sequence], count = call.states.starts[sequence + 1] - start;
        known.assign(static_cast<size_t>(held + count), 0);
        if (call.states.reads[sequence] >= 0) {
            const float* const state =
                call.states.pool + call.states.reads[sequence] * call.states.slot_floats + call.states.first;
            std::transform(state, state + held, known.begin(),
                           [](float id) { return id >= 0.0f && id <= kMostIds ? static_cast<int32_t>(id) : 0; });
        }
        for (int64_t i = 0; i < count; ++i) {
            known[static_cast<size_t>(held + i)] = call.ids[start + i] + 1;
            find_rows(call, known.data() + held + i, call.rows + (start + i) * heads);
        }
        float* const to = call.states.pool + call.states.writes[sequence] * call.states.slot_floats + call.states.first;
        std::transform(known.end() - held, known.end(), to, [](int32_t id) { return static_cast<float>(id); });
    }
}

}  // namespace mlxr
