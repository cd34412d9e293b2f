// The Python face of the blocks of a layer (blocks.h). What belongs to the weights is checked when a block is made,
// what belongs to a batch with each call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>

#include "bindings_checks.h"
#include "bindings_weight.h"
#include "blocks.h"

void bind_blocks(nb::module_& m);

namespace {

using mlxr::PythonWeight;
using OptionalVector = std::optional<Vector>;
using OptionalMatrix = std::optional<Matrix>;

// A block with the arrays it points into; the weights are kept alive by nanobind.
struct PythonAttention {
    mlxr::AttentionBlock block;
    Vector norm;
    OptionalVector q_norm, k_norm;
    int64_t window;
    float scale;
};

struct PythonFeedForward {
    mlxr::FeedForwardBlock block;
    Vector norm;
};

void check_norm(const char* what, const Vector& norm, int64_t length) {
    check_size(what, size_of(norm, 0), length);
}

void make_attention(PythonAttention* self, Vector norm, float eps, PythonWeight& qkv, OptionalVector q_norm,
                    OptionalVector k_norm, PythonWeight& output, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    float scale, int64_t window) {
    if (head_dim < 1 || kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
        refuse("self_attention: heads", std::to_string(heads),
               "a multiple of the " + std::to_string(kv_heads) + " key heads");
    }
    check_norm("self_attention: length of norm", norm, qkv.weight.in_features());
    check_size("self_attention: columns of qkv", qkv.weight.out_features(), (heads + 2 * kv_heads) * head_dim);
    check_size("self_attention: in_features of output", output.weight.in_features(), heads * head_dim);
    check_size("self_attention: columns of output", output.weight.out_features(), qkv.weight.in_features());
    if (q_norm.has_value() != k_norm.has_value()) refuse("self_attention: q_norm", "alone", "given with k_norm");
    if (q_norm) check_norm("self_attention: length of q_norm", *q_norm, head_dim);
    if (k_norm) check_norm("self_attention: length of k_norm", *k_norm, head_dim);
    qkv.used = output.used = true;
    const mlxr::AttentionBlock block{norm.data(),
                                     eps,
                                     &qkv.weight,
                                     q_norm ? q_norm->data() : nullptr,
                                     k_norm ? k_norm->data() : nullptr,
                                     &output.weight,
                                     heads,
                                     kv_heads,
                                     head_dim};
    new (self) PythonAttention{block, norm, q_norm, k_norm, window, scale};
}

void make_feed_forward(PythonFeedForward* self, Vector norm, float eps, PythonWeight& gate_up, PythonWeight& down,
                       const char* kind) {
    check_norm("feed_forward: length of norm", norm, gate_up.weight.in_features());
    check_size("feed_forward: columns of gate_up", gate_up.weight.out_features(), 2 * down.weight.in_features());
    check_size("feed_forward: columns of down", down.weight.out_features(), gate_up.weight.in_features());
    gate_up.used = down.used = true;
    new (self) PythonFeedForward{
        {norm.data(), eps, &gate_up.weight, &down.weight, parse_activation("feed_forward: kind", kind)}, norm};
}

mlxr::StreamCall check_stream(const char* name, int64_t columns, const Matrix& stream, const OptionalMatrix& delta,
                              MatrixOut& sum, MatrixOut& out) {
    const int64_t tokens = size_of(stream, 0);
    const auto check = [&](const char* what, const auto& array) {
        if (size_of(array, 0) == tokens && size_of(array, 1) == columns) return;
        refuse(std::string(name) + ": " + what,
               "of shape (" + std::to_string(size_of(array, 0)) + ", " + std::to_string(size_of(array, 1)) + ")",
               "(" + std::to_string(tokens) + ", " + std::to_string(columns) + ")");
    };
    check("stream", stream);
    if (delta) check("delta", *delta);
    check("sum", sum);
    check("out", out);
    return {stream.data(), delta ? delta->data() : nullptr, sum.data(), out.data(), tokens, columns};
}

void run_self_attention(Runtime& runtime, PythonAttention& self, Matrix stream, OptionalMatrix delta, Ints positions,
                        Matrix cosines, Matrix sines, bool interleaved, PoolOut k_pool, PoolOut v_pool, Ints slots,
                        Ints query_starts, Ints context_lengths, IntMatrix page_table, MatrixOut sum, MatrixOut out) {
    const mlxr::AttentionBlock& block = self.block;
    const mlxr::StreamCall call = check_stream("self_attention", block.qkv->in_features(), stream, delta, sum, out);
    mlxr::AttentionCall attention{};
    attention.sequences = size_of(context_lengths, 0);
    attention.rope = check_rope(positions, cosines, sines, interleaved, call.tokens, block.head_dim);
    attention.keys = attention.values = check_write(k_pool, v_pool, slots, call.tokens);
    attention.values.pool = v_pool.data();
    attention.values.values = true;
    attention.attend = check_attend(k_pool, v_pool, query_starts, context_lengths, page_table, call.tokens, block.heads,
                                    self.scale, self.window);
    check_size("self_attention: kv_heads of the pools", attention.keys.kv_heads, block.kv_heads);
    check_size("self_attention: head_dim of the pools", attention.keys.head_dim, block.head_dim);
    run_alone(runtime, [&] { mlxr::run_self_attention(runtime, block, attention, call); });
}

void run_feed_forward(Runtime& runtime, PythonFeedForward& self, Matrix stream, OptionalMatrix delta, MatrixOut sum,
                      MatrixOut out) {
    const mlxr::StreamCall call =
        check_stream("feed_forward", self.block.gate_up->in_features(), stream, delta, sum, out);
    run_alone(runtime, [&] { mlxr::run_feed_forward(runtime, self.block, call); });
}

}  // namespace

void bind_blocks(nb::module_& m) {
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    nb::class_<PythonAttention>(m, "AttentionBlock", "Weights of self-attention, checked.")
        .def("__init__", &make_attention, array("norm"), nb::arg("eps"), nb::arg("qkv"), array("q_norm").none(),
             array("k_norm").none(), nb::arg("output"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
             nb::arg("scale"), nb::arg("window"), nb::keep_alive<1, 4>(), nb::keep_alive<1, 7>());
    nb::class_<PythonFeedForward>(m, "FeedForwardBlock", "Weights of the feed-forward block, checked.")
        .def("__init__", &make_feed_forward, array("norm"), nb::arg("eps"), nb::arg("gate_up"), nb::arg("down"),
             nb::arg("kind"), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>());
    m.def("self_attention", &run_self_attention, nb::arg("runtime"), nb::arg("block"), array("stream"),
          array("delta").none(), array("positions"), array("cos"), array("sin"), nb::arg("interleaved"),
          array("k_pool"), array("v_pool"), array("slots"), array("query_starts"), array("context_lengths"),
          array("page_table"), array("sum"), array("out"));
    m.def("feed_forward", &run_feed_forward, nb::arg("runtime"), nb::arg("block"), array("stream"),
          array("delta").none(), array("sum"), array("out"));
}
