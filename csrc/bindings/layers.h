// The Python object of layers, which several bindings take.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "bindings/checks.h"
#include "bindings/embed.h"
#include "layers/blocks.h"

namespace mlxr {

// Layers, and the arrays they point into; nanobind keeps the weights alive.
struct PythonLayers {
    std::vector<Layer> layers;
    std::vector<Vector> arrays;
    std::vector<RawBlocks> tables;
    std::vector<Matrix> matrices;
    std::vector<Ints> orders;
    int64_t experts = 0, used = 0;                // that the last router of this layer chooses from, and for a token
    int64_t columns = 0;                          // of the stream
    std::array<int64_t, kRegisters> widths = {};  // columns of what was last written there
    std::vector<int64_t> state_floats;            // of each layer: how long its slots must be

    Layer& last() {
        if (layers.empty()) refuse("layers: append_layer", "missing", "called before operators are appended");
        return layers.back();
    }

    void append_layer(int64_t own_columns) {
        experts = used = 0;
        if (!layers.empty()) check_size("layers: columns of the stream", own_columns, columns);
        columns = own_columns;
        state_floats.push_back(0);
        layers.emplace_back();
    }

    // The last operator keeps `floats` numbers of a sequence's state, from `at` on.
    void keep_state(int64_t at, int64_t floats) {
        if (at < 0) refuse("layers: state", std::to_string(at), "at 0 or more");
        state_floats.back() = std::max(state_floats.back(), at + floats);
    }

    // Columns of what was kept that an operator reads, from `first` on.
    void check_kept(int64_t first, int64_t count) const {
        if (first < 0 || first + count > width(Register::kept)) {
            refuse("layers: columns that were kept", std::to_string(width(Register::kept)),
                   std::to_string(first + count));
        }
    }

    Operator& append(Kind kind, const char* source = "x", const char* target = "x") {
        Operator op{};
        op.kind = kind;
        op.source = parse_register(source);
        op.target = parse_register(target);
        return last().operators.emplace_back(op);
    }

    static bool is_of_stream(Register place) {
        return place == Register::stream || place == Register::delta || place == Register::normed;
    }

    // Columns of a register, 0 before it is written.
    int64_t width(Register place) const { return is_of_stream(place) ? columns : widths[static_cast<size_t>(place)]; }

    // An operator writes so many columns there.
    void write(const char* what, Register place, int64_t written) {
        if (is_of_stream(place)) check_size(what, written, columns);
        widths[static_cast<size_t>(place)] = written;
    }

    const float* keep(const char* what, const Vector& array, int64_t length) {
        check_size(what, size_of(array, 0), length);
        arrays.push_back(array);
        return array.data();
    }

    const float* keep(const char* what, const OptionalVector& array, int64_t length) {
        return array ? keep(what, *array, length) : nullptr;
    }

    static Register parse_register(const std::string& name) {
        if (name == "stream") return Register::stream;
        if (name == "delta") return Register::delta;
        if (name == "normed") return Register::normed;
        if (name == "x") return Register::x;
        if (name == "inputs") return Register::inputs;
        if (name == "kept") return Register::kept;
        if (name == "turned") return Register::turned;
        if (name == "streams") return Register::streams;
        if (name == "gains") return Register::gains;
        if (name == "steps") return Register::steps;
        if (name != "other") {
            refuse("layers: register", name,
                   "stream, streams, gains, steps, delta, normed, turned, x, kept, other or inputs");
        }
        return Register::other;
    }
};

}  // namespace mlxr
