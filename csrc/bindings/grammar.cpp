// The Python face of grammar_matcher.h. The library's functions and objects come as addresses, so that nothing of it is
// needed to build this module. Waiting for a matcher, and freeing one, is done without the GIL: a thread that is at it
// may need it for the tokens of a forced text.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "grammar/grammar_matcher.h"
#include "runtime/runtime.h"

namespace nb = nanobind;

namespace {

using MaskOut = nb::ndarray<uint32_t, nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Holds what the matcher needs: the runtime, and whoever answers the library.
class Matcher {
  public:
    Matcher(nb::object runtime, nb::object tokens, const mlxr::GrammarFunctions& functions, void* matcher,
            size_t mask_words)
        : runtime_(std::move(runtime)),
          tokens_(std::move(tokens)),
          functions_(functions),
          inner_(new mlxr::GrammarMatcher(nb::cast<mlxr::Runtime&>(runtime_).pool.errands(), functions, matcher,
                                          mask_words)) {}
    Matcher(const Matcher&) = delete;
    Matcher& operator=(const Matcher&) = delete;
    ~Matcher() {
        const nb::gil_scoped_release release;
        delete inner_;
    }

    void accept(uint32_t token) {
        make_ready();
        inner_->accept(token);
    }

    void replay(const std::vector<uint32_t>& tokens) {
        const nb::gil_scoped_release release;
        inner_->replay(tokens);
    }

    bool write_mask(const MaskOut& out) {
        if (out.size() != inner_->mask_words()) {
            throw nb::value_error(("GrammarMatcher: the mask has " + std::to_string(out.size()) + " words, expected " +
                                   std::to_string(inner_->mask_words()))
                                      .c_str());
        }
        make_ready();
        const uint32_t* const mask = inner_->finish();
        if (mask == nullptr) return false;
        std::memcpy(out.data(), mask, inner_->mask_words() * sizeof(uint32_t));
        return true;
    }

    size_t count_allowed(const std::vector<uint32_t>& tokens) {
        const nb::gil_scoped_release release;
        return inner_->count_allowed(tokens);
    }

    std::string read_error() {
        const nb::gil_scoped_release release;
        return inner_->error();
    }

    Matcher* fork() {
        void* copy;
        {
            const nb::gil_scoped_release release;
            copy = inner_->clone();
        }
        return new Matcher(runtime_, tokens_, functions_, copy, inner_->mask_words());
    }

  private:
    // The GIL is let go of only for a reason: other threads keep it for long.
    void make_ready() {
        if (inner_->is_ready()) return;
        const nb::gil_scoped_release release;
        inner_->finish();
    }

    nb::object runtime_, tokens_;
    mlxr::GrammarFunctions functions_;
    mlxr::GrammarMatcher* inner_;
};

std::vector<uint32_t> ask(const nb::callable& find, const std::string& text) {
    const nb::gil_scoped_acquire acquire;
    try {
        return nb::cast<std::vector<uint32_t>>(find(nb::bytes(text.data(), text.size())));
    } catch (nb::python_error& error) {
        error.discard_as_unraisable("the tokens of a forced text");
        return {};
    }
}

// In the order of GrammarFunctions.
mlxr::GrammarFunctions read_functions(const std::vector<uintptr_t>& addresses) {
    mlxr::GrammarFunctions functions;
    static_assert(sizeof functions == 6 * sizeof(uintptr_t));
    if (addresses.size() != 6) throw nb::value_error("GrammarMatcher: six functions are needed");
    std::memcpy(&functions, addresses.data(), sizeof functions);
    return functions;
}

}  // namespace

void bind_grammar(nb::module_& m) {
    nb::class_<mlxr::ForcedTokens> forced(m, "ForcedTokens", "Answers the grammar library from any thread.");
    forced
        .def(
            "__init__",
            [](mlxr::ForcedTokens* self, nb::callable find) {
                new (self) mlxr::ForcedTokens([find](const std::string& text) { return ask(find, text); });
            },
            nb::arg("find"))
        .def_prop_ro("address", [](const mlxr::ForcedTokens& self) { return reinterpret_cast<uintptr_t>(&self); })
        .def_prop_ro_static("function",
                            [](nb::handle) { return reinterpret_cast<uintptr_t>(&mlxr::ForcedTokens::write); })
        .def_prop_ro("nbytes", &mlxr::ForcedTokens::bytes);
    forced.attr("MAX_BYTES") = mlxr::ForcedTokens::kMaxBytes;
    nb::class_<Matcher>(m, "GrammarMatcher", "The state of a grammar in one answer; masks are made beside the caller.")
        .def(
            "__init__",
            [](Matcher* self, nb::object runtime, nb::object tokens, const std::vector<uintptr_t>& functions,
               uintptr_t matcher, size_t mask_words) {
                new (self) Matcher(std::move(runtime), std::move(tokens), read_functions(functions),
                                   reinterpret_cast<void*>(matcher), mask_words);
            },
            nb::arg("runtime"), nb::arg("tokens"), nb::arg("functions"), nb::arg("matcher"), nb::arg("mask_words"))
        .def("accept", &Matcher::accept, nb::arg("token_id"))
        .def("replay", &Matcher::replay, nb::arg("token_ids"))
        .def("write_mask", &Matcher::write_mask, nb::arg("out").noconvert())
        .def("count_allowed", &Matcher::count_allowed, nb::arg("token_ids"))
        .def("read_error", &Matcher::read_error)
        .def("fork", &Matcher::fork, nb::rv_policy::take_ownership);
    nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
        const nb::gil_scoped_release release;
        mlxr::Errands::close();
    }));
}
