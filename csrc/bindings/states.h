// The states of a batch's sequences, checked.
#pragma once

#include <vector>

#include "bindings/checks.h"
#include "mixers/mixers.h"

namespace {

// `floats` of each slot of `pool` (slots, floats of a slot) belong to the operator, from `at` on. No sequence writes a
// slot that any sequence reads or writes.
inline mlxr::States check_states(const std::string& name, const MatrixOut& pool, int64_t at, int64_t floats,
                                 const Ints& reads, const Ints& writes, const Ints& starts, int64_t tokens) {
    const int64_t slots = size_of(pool, 0), sequences = size_of(reads, 0);
    if (at < 0 || at + floats > size_of(pool, 1)) {
        refuse(name + ": floats of a slot", std::to_string(size_of(pool, 1)),
               "at least " + std::to_string(at + floats));
    }
    check_size((name + ": length of write slots").c_str(), size_of(writes, 0), sequences);
    check_size((name + ": length of starts").c_str(), size_of(starts, 0), sequences + 1);
    std::vector<bool> taken(static_cast<size_t>(slots), false);
    for (int64_t i = 0; i < sequences; ++i) {
        const int64_t slot = reads.data()[i];
        if (slot < -1 || slot >= slots) {
            refuse(name + ": read slot", std::to_string(slot), "-1 to " + std::to_string(slots - 1));
        }
        if (slot >= 0) taken[static_cast<size_t>(slot)] = true;
    }
    check_indices((name + ": write slots").c_str(), writes.data(), sequences, slots);
    for (int64_t i = 0; i < sequences; ++i) {
        const size_t slot = static_cast<size_t>(writes.data()[i]);
        if (taken[slot]) refuse(name + ": write slot", std::to_string(slot), "one that is neither read nor written");
        taken[slot] = true;
    }
    check_size((name + ": first of starts").c_str(), starts.data()[0], 0);
    check_size((name + ": last of starts").c_str(), starts.data()[sequences], tokens);
    for (int64_t i = 0; i < sequences; ++i) {
        if (starts.data()[i] >= starts.data()[i + 1]) refuse(name + ": starts", "not rising", "no sequence empty");
    }
    return {pool.data(), size_of(pool, 1), at, reads.data(), writes.data(), starts.data(), sequences};
}

}  // namespace
