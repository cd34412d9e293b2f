// The Python face of the probe. See probe.h.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "bindings/embed.h"
#include "probe/probe.h"

namespace nb = nanobind;

namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 40;
constexpr int64_t kMaxAhead = int64_t{1} << 20;
constexpr int64_t kMaxMacs = int64_t{1} << 50;

void check_range(const char* what, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    throw nb::value_error((std::string("probe: ") + what + " is " + std::to_string(value) + ", expected " +
                           std::to_string(low) + " to " + std::to_string(high))
                              .c_str());
}

void make_probe(mlxr::Probe* self, mlxr::Runtime& runtime, int64_t bytes) {
    check_range("bytes", bytes, 1, kMaxBytes);
    nb::gil_scoped_release release;
    std::lock_guard lock(runtime.mutex);
    new (self) mlxr::Probe(runtime, static_cast<size_t>(bytes));
}

double run_read(const mlxr::Probe& self, mlxr::Runtime& runtime, int64_t ahead) {
    check_range("ahead", ahead, 0, kMaxAhead);
    nb::gil_scoped_release release;
    std::lock_guard lock(runtime.mutex);
    return self.read(runtime, ahead);
}

double run_multiply(const mlxr::Probe& self, mlxr::Runtime& runtime, int64_t macs) {
    check_range("macs", macs, 1, kMaxMacs);
    nb::gil_scoped_release release;
    std::lock_guard lock(runtime.mutex);
    return self.multiply(runtime, macs);
}

#if defined(MLXR_SANITIZED)
int32_t read_stray(const mlxr::Runtime& runtime, mlxr::RawBlocks data, int64_t at) {
    return mlxr::probe_table(runtime.isa)->read_stray(data.data(), at);
}

int32_t add(const mlxr::Runtime& runtime, int32_t a, int32_t b) {
    return mlxr::probe_table(runtime.isa)->add(a, b);
}

int64_t count_carelessly(mlxr::Runtime& runtime) {
    nb::gil_scoped_release release;
    std::lock_guard lock(runtime.mutex);
    int64_t count = 0;
    runtime.pool.parallel_for_near(runtime.pool.threads(), [&](int, int) { ++count; });
    return count;
}
#endif

}  // namespace

void bind_probe(nb::module_& m) {
#if defined(MLXR_SANITIZED)
    m.def("read_stray", &read_stray, nb::arg("runtime"), nb::arg("data").noconvert(), nb::arg("at"),
          "A canary: reads a vector at byte `at`, which nobody checks.");
    m.def("add_unchecked", &add, nb::arg("runtime"), nb::arg("a"), nb::arg("b"), "A canary: adds, which may overflow.");
    m.def("count_carelessly", &count_carelessly, nb::arg("runtime"),
          "A canary: all threads add one to the same number, without asking each other.");
#endif
    nb::class_<mlxr::Probe>(m, "Probe", "What the machine can do: memory reads and int8 products.")
        .def("__init__", &make_probe, nb::arg("runtime"), nb::arg("bytes"))
        .def_prop_ro("nbytes", &mlxr::Probe::bytes)
        .def("read", &run_read, nb::arg("runtime"), nb::arg("ahead"),
             "Seconds to read the buffer once with all threads.")
        .def("multiply", &run_multiply, nb::arg("runtime"), nb::arg("macs"),
             "Multiply-adds per second of all threads.");
}
