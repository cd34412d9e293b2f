// The Python object of a low-rank adapter, and the rows of a batch that have it, which several bindings take.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/checks.h"
#include "layers/adapter.h"

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

// An adapter, its rows, and (rows, rank) numbers that are looked up for a table of embeddings, if it updates that.
using PythonAdapterRows = std::vector<std::tuple<mlxr::PythonAdapter*, Ints, std::optional<Matrix>>>;

// Rows of a batch of so many; no row may be that of two adapters. `columns` are those of embeddings, or -1.
std::vector<mlxr::AdapterRows> check_adapters(const PythonAdapterRows& adapters, int64_t rows, int64_t columns = -1) {
    std::vector<mlxr::AdapterRows> checked;
    std::vector<bool> taken(adapters.empty() ? 0 : static_cast<size_t>(rows));
    for (const auto& [adapter, own, looked_up] : adapters) {
        if (adapter == nullptr) refuse("lora: adapter", "None", "an adapter");
        const int64_t count = size_of(own, 0);
        check_indices("lora: rows", own.data(), count, rows);
        for (int64_t i = 0; i < count; ++i) {
            const auto row = static_cast<size_t>(own.data()[i]);
            if (taken[row]) refuse("lora: row " + std::to_string(row), "that of two updates", "that of one");
            taken[row] = true;
        }
        if (looked_up) {
            check_size("lora: rows that are looked up", size_of(*looked_up, 0), count);
            check_size("lora: ranks that are looked up", size_of(*looked_up, 1), adapter->table_rank);
            if (columns >= 0) check_size("lora: columns of embeddings", adapter->table_columns, columns);
        }
        adapter->used = true;
        checked.push_back({&adapter->adapter, own.data(), count, looked_up ? looked_up->data() : nullptr});
    }
    return checked;
}

}  // namespace
