// The memory of registers while layers run. What a block writes lies in one region, which the next block takes over;
// stream, delta, and inputs or streams have memory of their own, which stays.
#pragma once

#include <array>

#include "layers/blocks.h"

namespace mlxr {

// Whether what blocks write there has its own memory, which stays when the block ends.
inline bool stays(Register place) {
    return place == Register::stream || place == Register::delta || place == Register::inputs ||
           place == Register::streams;
}

class Registers {
  public:
    // `call` must outlive this.
    Registers(Runtime& runtime, const LayersCall& call) : runtime_(runtime), call_(call) {
        set(Register::stream, call.stream, call.columns);
        set(Register::delta, call.delta, call.columns);
    }

    // Memory for the arrays of a block, `floats` of each token, in place of that of the block before.
    void reserve(int64_t floats, int64_t arrays) {
        const size_t count = static_cast<size_t>(call_.tokens * floats + kAlignment * arrays);
        next_ = reinterpret_cast<float*>(runtime_.scratch(Scratch::blocks, count * sizeof(float)));
    }

    // An array with `columns` numbers of each token, out of what was reserved.
    float* take(int64_t columns) {
        float* const taken = next_;
        next_ += (call_.tokens * columns + kAlignment - 1) / kAlignment * kAlignment;
        return taken;
    }

    float* find(Register place) const { return places_[static_cast<size_t>(place)]; }
    int64_t columns(Register place) const { return columns_[static_cast<size_t>(place)]; }

    // Where an operator writes `columns` numbers of each token.
    float* write(Register place, int64_t columns) {
        if (place == Register::delta) {
            has_delta_ = true;
            return call_.delta;
        }
        if (place == Register::stream) return call_.stream;
        if (place == Register::inputs || place == Register::streams) {
            const size_t bytes = static_cast<size_t>(call_.tokens * columns) * sizeof(float);
            const Scratch use = place == Register::inputs ? Scratch::inputs : Scratch::streams;
            return set(place, reinterpret_cast<float*>(runtime_.scratch(use, bytes)), columns);
        }
        return set(place, take(columns), columns);
    }

    // Whether anything is to be added to the stream; who adds it says so.
    bool has_delta() const { return has_delta_; }
    void drop_delta() { has_delta_ = false; }

  private:
    static constexpr int64_t kAlignment = 16;  // in floats

    float* set(Register place, float* memory, int64_t columns) {
        columns_[static_cast<size_t>(place)] = columns;
        return places_[static_cast<size_t>(place)] = memory;
    }

    Runtime& runtime_;
    const LayersCall& call_;
    float* next_ = nullptr;
    std::array<float*, kRegisters> places_ = {};
    std::array<int64_t, kRegisters> columns_ = {};
    bool has_delta_ = false;
};

}  // namespace mlxr
