// The Python face of the probe. See probe.h.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <mutex>
#include <string>

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

}  // namespace

void bind_probe(nb::module_& m) {
    nb::class_<mlxr::Probe>(m, "Probe", "What the machine can do: memory reads and int8 products.")
        .def("__init__", &make_probe, nb::arg("runtime"), nb::arg("bytes"))
        .def_prop_ro("nbytes", &mlxr::Probe::bytes)
        .def("read", &run_read, nb::arg("runtime"), nb::arg("ahead"),
             "Seconds to read the buffer once with all threads.")
        .def("multiply", &run_multiply, nb::arg("runtime"), nb::arg("macs"),
             "Multiply-adds per second of all threads.");
}
