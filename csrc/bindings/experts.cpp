// The Python face of mixtures of experts (moe/experts.h).
#include "bindings/experts.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <mutex>
#include <string>

#include "bindings/adapter.h"
#include "bindings/weight.h"

void bind_experts(nb::module_& m);

namespace {

using mlxr::PythonExperts;
using mlxr::PythonRouter;
using mlxr::PythonWeight;

mlxr::Scoring parse_scoring(const std::string& name) {
    if (name == "softmax") return mlxr::Scoring::softmax;
    if (name == "sigmoid") return mlxr::Scoring::sigmoid;
    if (name == "softmax_chosen") return mlxr::Scoring::softmax_chosen;
    if (name == "sparsemixer") return mlxr::Scoring::sparsemixer;
    refuse("router: scoring", name, "softmax, sigmoid, softmax_chosen or sparsemixer");
}

void make_router(PythonRouter* self, int64_t experts, int64_t used, const std::string& scoring, bool renormalises,
                 float floor, float scale, int64_t groups, int64_t groups_used, float gap, OptionalVector choice_bias,
                 OptionalVector expert_scales) {
    check_between("router: experts", experts, 1, mlxr::kMostExperts);
    check_between("router: used", used, 1, experts);
    check_between("router: groups", groups, 1, experts);
    const int64_t size = experts / groups;
    if (experts % groups != 0 || (groups > 1 && size < 2)) {
        refuse("router: groups", std::to_string(groups), "so many that each has as many experts, two or more");
    }
    check_between("router: groups_used", groups_used, (used + size - 1) / size, groups);
    PythonRouter router{.choice_bias = choice_bias, .expert_scales = expert_scales};
    const auto keep = [&](const char* what, const OptionalVector& vector) -> const float* {
        if (!vector) return nullptr;
        check_size(what, size_of(*vector, 0), experts);
        return vector->data();
    };
    router.call = {.logits = nullptr,
                   .experts = experts,
                   .used = used,
                   .scoring = parse_scoring(scoring),
                   .groups = groups,
                   .groups_used = groups_used,
                   .renormalises = renormalises,
                   .floor = floor,
                   .scale = scale,
                   .gap = gap,
                   .choice_bias = keep("router: length of choice_bias", choice_bias),
                   .expert_scales = keep("router: length of expert_scales", expert_scales),
                   .chosen = nullptr,
                   .shares = nullptr};
    new (self) PythonRouter(std::move(router));
}

void append_expert(PythonExperts& self, PythonWeight& up, PythonWeight& down) {
    self.experts.append(up.weight, down.weight);
    up.used = down.used = true;
}

void limit(PythonExperts& self, Runtime& runtime, int64_t slots) {
    nb::gil_scoped_release release;
    const std::lock_guard lock(runtime.mutex);
    self.experts.limit(runtime, slots);
}

// Rows of each expert, steps, experts that had rows in all steps, experts that were read from the file.
nb::tuple list_use(const PythonExperts& self) {
    const mlxr::ExpertUse& use = self.experts.use();
    nb::list rows;
    for (int64_t expert = 0; expert < self.experts.count(); ++expert) rows.append(use.rows(expert));
    const mlxr::ExpertSlots* const slots = self.experts.slots();
    return nb::make_tuple(nb::tuple(rows), use.steps(), use.groups(), slots == nullptr ? 0 : slots->reads());
}

void route(Runtime& runtime, Matrix logits, const PythonRouter& router, IntMatrixOut chosen, MatrixOut shares) {
    mlxr::RouteCall call = router.call;
    const int64_t rows = size_of(logits, 0);
    check_size("route: columns of logits", size_of(logits, 1), call.experts);
    check_size("route: rows of chosen", size_of(chosen, 0), rows);
    check_size("route: columns of chosen", size_of(chosen, 1), call.used);
    check_size("route: rows of shares", size_of(shares, 0), rows);
    check_size("route: columns of shares", size_of(shares, 1), call.used);
    call.logits = logits.data();
    call.chosen = chosen.data();
    call.shares = shares.data();
    run_alone(runtime, [&] { mlxr::run_route(runtime, call, rows); });
}

void mix(Runtime& runtime, Matrix x, IntMatrix chosen, Matrix shares, const PythonExperts& self,
         const PythonAdapterRows& adapters, MatrixOut out) {
    const mlxr::Experts& experts = self.experts;
    if (experts.count() == 0) refuse("mix: experts", "empty", "at least one");
    const int64_t tokens = size_of(x, 0), used = size_of(chosen, 1);
    check_size("mix: columns of x", size_of(x, 1), experts.columns());
    check_size("mix: rows of chosen", size_of(chosen, 0), tokens);
    check_size("mix: rows of shares", size_of(shares, 0), tokens);
    check_size("mix: columns of shares", size_of(shares, 1), used);
    check_size("mix: rows of out", size_of(out, 0), tokens);
    check_size("mix: columns of out", size_of(out, 1), experts.columns());
    check_between("mix: columns of chosen", used, 1, mlxr::kMostExperts);
    check_between("mix: rows of x", tokens, 0, INT32_MAX / used);
    check_indices("mix: chosen", chosen.data(), tokens * used, experts.count());
    const std::vector<mlxr::AdapterRows> rows = check_adapters(adapters, tokens);
    const mlxr::MixCall call{x.data(), chosen.data(), shares.data(), tokens, used, out.data(), rows};
    run_alone(runtime, [&] { mlxr::run_mix(runtime, experts, call); });
}

}  // namespace

void bind_experts(nb::module_& m) {
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    nb::class_<PythonRouter>(m, "Router", "How the experts of a token are chosen, and what each one's share is.")
        .def("__init__", &make_router, nb::arg("experts"), nb::arg("used"), nb::arg("scoring"), nb::arg("renormalises"),
             nb::arg("floor"), nb::arg("scale"), nb::arg("groups"), nb::arg("groups_used"), nb::arg("gap"),
             array("choice_bias").none(), array("expert_scales").none());
    nb::class_<PythonExperts>(m, "Experts", "Feed-forward blocks of one shape, checked.")
        .def(
            "__init__",
            [](PythonExperts* self, const std::string& activation, const std::vector<float>& parameters) {
                const mlxr::Activation kind = parse_activation("experts: activation", activation);
                const auto numbers = check_parameters("experts: number of parameters", kind, parameters);
                new (self) PythonExperts{mlxr::Experts(kind, numbers)};
            },
            nb::arg("activation"), nb::arg("parameters") = std::vector<float>())
        .def("append", &append_expert, nb::arg("up"), nb::arg("down"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("limit", &limit, nb::arg("runtime"), nb::arg("slots"), "Keeps the weights of so many in memory at a time.")
        .def("list_use", &list_use, "(rows of each, steps, experts that had rows in these, experts that were read).");
    m.def("route", &route, nb::arg("runtime"), array("logits"), nb::arg("router"), array("chosen"), array("shares"));
    m.def("mix", &mix, nb::arg("runtime"), array("x"), array("chosen"), array("shares"), nb::arg("experts"),
          nb::arg("adapters"), array("out"));
}
