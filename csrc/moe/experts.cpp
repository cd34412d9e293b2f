// See experts.h.
#include "moe/experts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mlxr {

namespace {

void check(const char* what, int64_t has, int64_t wants) {
    if (has == wants) return;
    throw std::invalid_argument(std::string("experts: ") + what + " is " + std::to_string(has) + ", expected " +
                                std::to_string(wants));
}

}  // namespace

void Experts::append(const LinearWeight& up, const LinearWeight& down) {
    const int64_t features = down.in_features(), made = up.out_features();
    check("columns of down", down.out_features(), up.in_features());
    if (made != features) check("columns of gate and up", made, 2 * features);
    if (made == features && kind_ == Activation::clamped_swiglu) check("columns of up", made, 2 * features);
    if (!up_.empty()) {
        check("in_features of up", up.in_features(), columns());
        check("columns of up", made, up_[0]->out_features());
        check("in_features of down", features, this->features());
    }
    up_.reserve(up_.size() + 1);
    down_.push_back(&down);
    up_.push_back(&up);
}

void run_route(Runtime& runtime, const RouteCall& call, int64_t rows) {
    constexpr int64_t kRowsEach = 8;
    Counted counted(runtime.tally, {OperatorName::moe, KernelName::route, static_cast<int>(Type::f32)});
    counted.does([&] {
        const int64_t numbers = rows * (call.experts + 2 * call.used);
        return Tally::Work{.nanoseconds = 0, .bytes = numbers * static_cast<int64_t>(sizeof(float)), .macs = 0};
    });
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t tasks = (rows + kRowsEach - 1) / kRowsEach;
    runtime.pool.parallel_for_near(static_cast<int>(tasks), [&](int task, int) {
        table.route(call, task * kRowsEach, std::min(rows, (task + 1) * kRowsEach));
    });
}

}  // namespace mlxr
