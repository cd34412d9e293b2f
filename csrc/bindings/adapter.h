// The Python object of a low-rank adapter, and the rows of a batch that have it, which several bindings take.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/checks.h"
#include "lora/adapter.h"

namespace mlxr {

// Weights are kept alive by nanobind; `table_rank` and `table_columns` are those of the update of a table of
// embeddings, 0 without one.
struct PythonAdapter {
    Adapter adapter;
    int64_t table_rank = 0, table_columns = 0;
    bool used = false;
};

}  // namespace mlxr

namespace {

// An adapter, its rows, its factor, and (rows, rank) numbers that are looked up for a table of embeddings, if it
// updates that.
using PythonAdapterRows = std::vector<std::tuple<mlxr::PythonAdapter*, Ints, float, std::optional<Matrix>>>;

// Rows of a batch of so many. A row may be that of several adapters, and a round ends where one comes again. `columns`
// are those of embeddings, or -1.
std::vector<mlxr::AdapterRows> check_adapters(const PythonAdapterRows& adapters, int64_t rows, int64_t columns = -1) {
    std::vector<mlxr::AdapterRows> checked;
    struct Owner {
        size_t adapter;  // counted from 1
        int round;
    };
    std::vector<Owner> owners(adapters.empty() ? 0 : static_cast<size_t>(rows), Owner{0, -1});
    int round = 0;
    for (const auto& [adapter, own, factor, looked_up] : adapters) {
        if (adapter == nullptr) refuse("lora: adapter", "None", "an adapter");
        const int64_t count = size_of(own, 0);
        check_indices("lora: rows", own.data(), count, rows);
        const std::span<const int32_t> listed(own.data(), static_cast<size_t>(count));
        const auto owner_of = [&](int32_t row) -> Owner& { return owners[static_cast<size_t>(row)]; };
        if (std::any_of(listed.begin(), listed.end(), [&](int32_t row) { return owner_of(row).round == round; }))
            ++round;
        for (const int32_t row : listed) {
            if (owner_of(row).adapter == checked.size() + 1) {
                refuse("lora: row " + std::to_string(row), "named twice", "named once by each adapter");
            }
            owner_of(row) = {checked.size() + 1, round};
        }
        if (looked_up) {
            check_size("lora: rows that are looked up", size_of(*looked_up, 0), count);
            check_size("lora: ranks that are looked up", size_of(*looked_up, 1), adapter->table_rank);
            if (columns >= 0) check_size("lora: columns of embeddings", adapter->table_columns, columns);
        }
        adapter->used = true;
        const float* const numbers = looked_up ? looked_up->data() : nullptr;
        checked.push_back({&adapter->adapter, own.data(), count, factor, round, numbers});
    }
    return checked;
}

}  // namespace
