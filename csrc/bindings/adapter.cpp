// The Python face of low-rank adapters (lora/adapter.h).
#include "bindings/adapter.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bindings/weight.h"

void bind_adapter(nb::module_& m);

namespace {

// float32, float16, or bf16 as uint16.
using Numbers = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

mlxr::LoraType type_of(const Numbers& numbers) {
    switch (page_type_of("lora", "matrix", numbers)) {
        case mlxr::PageType::f32:
            return mlxr::LoraType::f32;
        case mlxr::PageType::f16:
            return mlxr::LoraType::f16;
        case mlxr::PageType::bf16:
            return mlxr::LoraType::bf16;
        default:
            refuse("lora: numbers of a matrix", "int8", "float32, float16, or bf16 as uint16");
    }
}

int64_t check_rank(int64_t rank) {
    if (rank < 1 || rank > mlxr::kMaxLoraRank) {
        refuse("lora: rank", std::to_string(rank), "1 to " + std::to_string(mlxr::kMaxLoraRank));
    }
    return rank;
}

// Of outputs of a weight from `first` on: a (rank, in_features) and b (rank, outputs).
void append_update(mlxr::PythonAdapter& self, mlxr::PythonWeight& weight, int64_t first, const Numbers& a,
                   const Numbers& b, float scale) {
    const int64_t rank = check_rank(size_of(a, 0)), made = size_of(b, 1);
    check_size("lora: ranks of b", size_of(b, 0), rank);
    check_size("lora: columns of a", size_of(a, 1), weight.weight.in_features());
    if (type_of(a) != type_of(b)) refuse("lora: numbers of b", "of another type", "of that of a");
    if (first < 0 || made < 1 || made > weight.weight.out_features() - first) {
        refuse("lora: outputs", std::to_string(made) + " from " + std::to_string(first) + " on",
               "some of the " + std::to_string(weight.weight.out_features()) + " of the weight");
    }
    for (const mlxr::LowRank& other : self.adapter.find(&weight.weight)) {
        if (first < other.first_column + other.made && other.first_column < first + made) {
            refuse("lora: outputs from " + std::to_string(first) + " on", "updated twice", "updated once");
        }
    }
    if (self.used) throw nb::value_error("lora: append after the adapter was used");
    const mlxr::LowRank update{type_of(a), size_of(a, 1), rank, made, first, scale, {}, {}};
    self.adapter.append(&weight.weight, update, a.data(), b.data());
}

// Of a table of embeddings: b (rank, columns) is multiplied by `rank` numbers of each token.
void append_table(mlxr::PythonAdapter& self, const Numbers& b, float scale) {
    if (self.table_rank != 0) refuse("lora: table", "updated twice", "updated once");
    if (self.used) throw nb::value_error("lora: append after the adapter was used");
    self.table_rank = check_rank(size_of(b, 0));
    self.table_columns = size_of(b, 1);
    const mlxr::LowRank update{type_of(b), 0, self.table_rank, self.table_columns, 0, scale, {}, {}};
    self.adapter.append(nullptr, update, nullptr, b.data());
}

void run_lora(Runtime& runtime, const mlxr::PythonWeight& weight, const PythonAdapterRows& adapters, Matrix x,
              MatrixOut out) {
    check_size("lora: rows of out", size_of(out, 0), size_of(x, 0));
    check_size("lora: columns of x", size_of(x, 1), weight.weight.in_features());
    check_size("lora: columns of out", size_of(out, 1), weight.weight.out_features());
    const std::vector<mlxr::AdapterRows> rows = check_adapters(adapters, size_of(x, 0));
    run_alone(runtime, [&] { mlxr::update_product(runtime, weight.weight, rows, x.data(), out.data()); });
}

void run_lora_table(Runtime& runtime, const PythonAdapterRows& adapters, MatrixOut out) {
    const std::vector<mlxr::AdapterRows> rows = check_adapters(adapters, size_of(out, 0), size_of(out, 1));
    run_alone(runtime, [&] { mlxr::update_embeddings(runtime, rows, out.data(), size_of(out, 1)); });
}

}  // namespace

void bind_adapter(nb::module_& m) {
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    nb::class_<mlxr::PythonAdapter>(m, "Adapter", "Low-rank updates of weights, laid out for the kernels.")
        .def(nb::init<>())
        .def("append", &append_update, nb::arg("weight"), nb::arg("first"), array("a"), array("b"), nb::arg("scale"),
             nb::keep_alive<1, 2>())
        .def("append_table", &append_table, array("b"), nb::arg("scale"))
        .def_prop_ro("nbytes", [](const mlxr::PythonAdapter& self) { return self.adapter.bytes(); });
    m.def("lora", &run_lora, nb::arg("runtime"), nb::arg("weight"), nb::arg("adapters"), array("x"), array("out"));
    m.def("lora_table", &run_lora_table, nb::arg("runtime"), nb::arg("adapters"), array("out"));
}
