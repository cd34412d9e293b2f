// The Python face: mlxr._native. Checks and converts arguments, releases the GIL, locks the Runtime, calls
// csrc. Nothing else in csrc (but bindings_*.cpp) knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/embed.h"
#include "bindings/weight.h"
#include "embed/embed.h"
#include "quants/quants.h"
#include "runtime/buffers.h"
#include "runtime/cpu_features.h"
#include "runtime/runtime.h"

namespace nb = nanobind;

void bind_grammar(nb::module_& m);
void bind_probe(nb::module_& m);
void bind_operators(nb::module_& m);
void bind_adapter(nb::module_& m);
void bind_layers(nb::module_& m);
void bind_blocks(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_mixers(nb::module_& m);
void bind_sample(nb::module_& m);

namespace {

using Matrix = nb::ndarray<float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstMatrix = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstVector = nb::ndarray<const float, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<std::string> list_isas(bool (*has)(mlxr::Isa)) {
    std::vector<std::string> names;
    for (int i = 0; i < mlxr::kIsaCount; ++i) {
        const auto isa = static_cast<mlxr::Isa>(i);
        if (has(isa)) names.emplace_back(mlxr::isa_name(isa));
    }
    return names;
}

// A module that was built for one machine alone may have been moved to another.
void check_machine() {
    if (mlxr::isa_available(mlxr::best_isa())) return;
    std::string names;
    for (const std::string& name : list_isas(mlxr::isa_built)) names += (names.empty() ? "" : ", ") + name;
    throw std::runtime_error("it was built for another machine, with " + names +
                             " kernels alone, which this processor cannot run");
}

constexpr int kMaxThreads = 1024;

void make_runtime(mlxr::Runtime* self, int threads, const std::string& isa_name) {
    mlxr::Isa isa;
    if (threads < 1 || threads > kMaxThreads) {
        throw nb::value_error(("threads must be 1 to 1024, not " + std::to_string(threads)).c_str());
    }
    if (!mlxr::parse_isa(isa_name, isa)) {
        throw nb::value_error(
            ("unknown instruction set '" + isa_name + "'; known: portable, avx2, avx512, avx512bf16, neon, amx")
                .c_str());
    }
    if (!mlxr::isa_available(isa)) {
        throw nb::value_error(("this machine or build has no '" + isa_name + "' kernels").c_str());
    }
    new (self) mlxr::Runtime(threads, isa);
}

void check_size(const char* what, size_t has, size_t wants) {
    if (has == wants) return;
    throw nb::value_error(
        (std::string(what) + " is " + std::to_string(has) + ", expected " + std::to_string(wants)).c_str());
}

void append_part(mlxr::PythonWeight& self, mlxr::Runtime& runtime, const std::string& type_name, int64_t rows,
                 ConstBytes data, std::optional<ConstVector> bias) {
    const mlxr::Type type = mlxr::find_type(type_name);
    self.weight.check(type, rows, data.size());
    if (bias) check_size("linear weight: length of bias", bias->size(), static_cast<size_t>(rows));
    mlxr::LinearWeight::Part part;
    {
        nb::gil_scoped_release release;
        std::lock_guard lock(runtime.mutex);
        part = self.weight.repack(runtime, type, rows, data.data(), bias ? bias->data() : nullptr);
    }
    if (self.used) throw nb::value_error("linear weight: append after the weight was used");
    self.weight.append(std::move(part));
}

// As append, but the blocks stay in the file that they are mapped from.
void leave(mlxr::PythonWeight& self, const std::string& type_name, int64_t rows, mlxr::RawBlocks data,
           std::optional<ConstVector> bias) {
    const mlxr::Type type = mlxr::find_type(type_name);
    self.weight.check(type, rows, data.size());
    if (bias) check_size("linear weight: length of bias", bias->size(), static_cast<size_t>(rows));
    if (self.used) throw nb::value_error("linear weight: left after the weight was used");
    self.left.push_back(data);
    self.weight.append(self.weight.leave(type, rows, data.data(), data.size(), bias ? bias->data() : nullptr));
}

// A weight that stays in its file, in memory for as long as this lives; others stay as they are.
class Loaded {
  public:
    Loaded(mlxr::Runtime& runtime, mlxr::LinearWeight& weight) : weight_(weight), was_loaded_(weight.is_loaded()) {
        if (was_loaded_) return;
        const auto bytes = static_cast<size_t>(weight.room());
        weight.load({std::make_shared<mlxr::Pages>(bytes), 0, bytes});
        const mlxr::LinearWeight* const one = &weight;
        mlxr::repack_parts(runtime, {&one, 1});
    }
    Loaded(const Loaded&) = delete;
    Loaded& operator=(const Loaded&) = delete;
    ~Loaded() {
        if (!was_loaded_) weight_.unload();
    }

  private:
    mlxr::LinearWeight& weight_;
    const bool was_loaded_;
};

void linear(mlxr::Runtime& runtime, ConstMatrix x, mlxr::PythonWeight& weight, Matrix out) {
    check_size("linear: columns of x", x.shape(1), static_cast<size_t>(weight.weight.in_features()));
    check_size("linear: rows of out", out.shape(0), x.shape(0));
    check_size("linear: columns of out", out.shape(1), static_cast<size_t>(weight.weight.out_features()));
    weight.used = true;
    nb::gil_scoped_release release;
    std::lock_guard lock(runtime.mutex);
    const Loaded loaded(runtime, weight.weight);
    mlxr::multiply(runtime, weight.weight, x.data(), static_cast<int64_t>(x.shape(0)), out.data());
}

// Bytes that are zero, for pools of pages: dealt out one after another, so that all of them are huge pages.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> make_zeros(mlxr::Runtime& runtime, size_t bytes) {
    auto slice = std::make_unique<mlxr::Slice>();
    {
        const std::lock_guard lock(runtime.mutex);
        *slice = runtime.pools.take(bytes);
    }
    uint8_t* const data = slice->data();
    const nb::capsule owner(slice.release(), [](void* p) noexcept { delete static_cast<mlxr::Slice*>(p); });
    return {data, {bytes}, owner};
}

// An array out of the runtime's buffers, which get its memory back when the array is gone.
nb::ndarray<nb::numpy, float, nb::ndim<2>> make_empty(mlxr::Runtime& runtime, size_t rows, size_t columns) {
    struct Held {
        std::shared_ptr<mlxr::Buffers> buffers;
        mlxr::Pages block;
    };
    if (columns != 0 && rows > (size_t{1} << 48) / columns) throw std::bad_alloc();
    auto held = std::make_unique<Held>(Held{runtime.buffers, runtime.buffers->take(rows * columns * sizeof(float))});
    float* const data = reinterpret_cast<float*>(held->block.data());
    const nb::capsule owner(held.release(), [](void* p) noexcept {
        const std::unique_ptr<Held> back(static_cast<Held*>(p));
        try {
            back->buffers->give_back(std::move(back->block));
        } catch (const std::bad_alloc&) {  // no room for the note that it is free: then it is not kept
        }
    });
    return {data, {rows, columns}, owner};
}

// (index, operator, kernel and form, calls, nanoseconds, bytes, multiply-adds) of all that ran.
nb::list list_ran(const mlxr::Runtime& runtime) {
    nb::list listed;
    for (const auto& [index, row] : runtime.tally.rows()) {
        const mlxr::Tally::Work& work = row.work;
        listed.append(nb::make_tuple(index, row.what, row.how, row.calls, work.nanoseconds, work.bytes, work.macs));
    }
    return listed;
}

// (kernel and form, rows) of what experts multiplied.
nb::list list_expert_rows(const mlxr::Runtime& runtime) {
    nb::list listed;
    for (const auto& [name, rows] : runtime.tally.expert_rows()) listed.append(nb::make_tuple(name, rows));
    return listed;
}

constexpr size_t kMostEvents = size_t{1} << 22;

void start_profile(mlxr::Runtime& runtime, size_t events) {
    if (events > kMostEvents) {
        throw nb::value_error(
            ("profile: events is " + std::to_string(events) + ", expected at most " + std::to_string(kMostEvents))
                .c_str());
    }
    nb::gil_scoped_release release;
    const std::lock_guard lock(runtime.mutex);
    runtime.tally.start_profile(events);
}

// (index, start, end) of each call that was kept, in nanoseconds.
nb::list stop_profile(mlxr::Runtime& runtime) {
    std::vector<mlxr::Tally::Event> events;
    {
        nb::gil_scoped_release release;
        const std::lock_guard lock(runtime.mutex);
        events = runtime.tally.stop_profile();
    }
    nb::list listed;
    for (const mlxr::Tally::Event& event : events) {
        listed.append(nb::make_tuple(event.entry, event.start_ns, event.end_ns));
    }
    return listed;
}

void embed(mlxr::Runtime& runtime, mlxr::TokenIds ids, const std::string& type_name, mlxr::RawBlocks data, Matrix out) {
    check_size("embed: rows of out", out.shape(0), ids.size());
    const mlxr::Type type = mlxr::check_embed(ids, type_name, data, out.shape(1));
    nb::gil_scoped_release release;
    std::lock_guard lock(runtime.mutex);
    mlxr::embed(runtime, type, data.data(), static_cast<int64_t>(out.shape(1)), ids.data(),
                static_cast<int64_t>(ids.size()), out.data());
}

}  // namespace

NB_MODULE(_native, m) {
    check_machine();
    m.doc() = "CPU kernels of mlxr.";
    nb::set_leak_warnings(false);  // weights that live until the interpreter ends are no news for the user
    m.attr("interface") = MLXR_STAMP;
    m.def(
        "available_isas", [] { return list_isas(mlxr::isa_available); },
        "Instruction sets this build and machine can run, lowest first.");
    m.def(
        "left_out_isas", [] { return list_isas(mlxr::isa_left_out); },
        "Instruction sets that this build could have, but was made without for one machine alone, lowest first.");
    m.def("best_isa", [] { return mlxr::isa_name(mlxr::best_isa()); }, "The fastest of available_isas().");
    m.def("default_threads", &mlxr::default_threads,
          "Physical cores this process may use: affinity mask and cgroup quota taken into account.");
    nb::class_<mlxr::Runtime>(m, "Runtime", "Thread pool, chosen instruction set and scratch memory.")
        .def("__init__", &make_runtime, nb::arg("threads"), nb::arg("isa"))
        .def_prop_ro("threads", [](const mlxr::Runtime& self) { return self.pool.threads(); })
        .def_prop_ro("isa", [](const mlxr::Runtime& self) { return mlxr::isa_name(self.isa); })
        .def_rw("takes_strips", &mlxr::Runtime::takes_strips, "Whether products may take strips; the bits are equal.")
        .def("list_ran", &list_ran, "(index, operator, kernel and form, calls, nanoseconds, bytes, multiply-adds).")
        .def("list_expert_rows", &list_expert_rows, "(kernel and form, rows) of what experts multiplied.")
        .def("start_profile", &start_profile, nb::arg("events"), "Times calls, and keeps so many of them one by one.")
        .def("stop_profile", &stop_profile, "(index, start, end) of the calls that were kept.")
        .def_static("now_ns", &mlxr::Tally::now_ns, "The clock of a profile.");
    nb::class_<mlxr::PythonWeight>(m, "LinearWeight", "One or several weights that share their input, repacked.")
        .def(nb::init<int64_t>(), nb::arg("in_features"))
        .def("append", &append_part, nb::arg("runtime"), nb::arg("type_name"), nb::arg("rows"),
             nb::arg("data").noconvert(), nb::arg("bias").noconvert().none(),
             "Adds a weight given as raw blocks; its outputs follow those so far.")
        .def("leave", &leave, nb::arg("type_name"), nb::arg("rows"), nb::arg("data").noconvert(),
             nb::arg("bias").noconvert().none(),
             "Adds a weight whose raw blocks stay in the file that they are mapped from.")
        .def_prop_ro("in_features", [](const mlxr::PythonWeight& self) { return self.weight.in_features(); })
        .def_prop_ro("out_features", [](const mlxr::PythonWeight& self) { return self.weight.out_features(); })
        .def_prop_ro("nbytes", [](const mlxr::PythonWeight& self) { return self.weight.bytes(); });
    m.def("linear", &linear, nb::arg("runtime"), nb::arg("x").noconvert(), nb::arg("weight"),
          nb::arg("out").noconvert(), "out = x W^T + b.");
    m.def("embed", &embed, nb::arg("runtime"), nb::arg("token_ids").noconvert(), nb::arg("type_name"),
          nb::arg("data").noconvert(), nb::arg("out").noconvert(), "out[t] = decoded row token_ids[t] of raw blocks.");
    m.def("empty", &make_empty, nb::arg("runtime"), nb::arg("rows"), nb::arg("columns"),
          "A float32 array whose memory is used again afterwards; contents undefined. For large results.");
    m.def("zeros", &make_zeros, nb::arg("runtime"), nb::arg("bytes"),
          "An array of bytes that are zero, in huge pages; the system gives the memory as they are written.");
    bind_grammar(m);
    bind_probe(m);
    bind_operators(m);
    bind_adapter(m);
    bind_experts(m);
    bind_layers(m);
    bind_blocks(m);
    bind_mixers(m);
    bind_sample(m);
}
