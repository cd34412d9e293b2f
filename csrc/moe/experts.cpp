// See experts.h.
#include "moe/experts.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace mlxr {

namespace {

void check(const char* what, int64_t has, int64_t wants) {
    if (has == wants) return;
    throw std::invalid_argument(std::string("experts: ") + what + " is " + std::to_string(has) + ", expected " +
                                std::to_string(wants));
}

// Whether two weights may lie in the same place, one after the other.
bool are_alike(const LinearWeight& one, const LinearWeight& other) {
    return std::equal(
        one.parts().begin(), one.parts().end(), other.parts().begin(), other.parts().end(),
        [](const LinearWeight::Part& a, const LinearWeight::Part& b) { return a.type == b.type && a.rows == b.rows; });
}

void check_left(const LinearWeight& weight, const LinearWeight& first) {
    const bool left = std::all_of(weight.parts().begin(), weight.parts().end(),
                                  [](const LinearWeight::Part& part) { return part.source != nullptr; });
    if (!left || weight.parts().empty()) throw std::invalid_argument("experts: weights are not left in their file");
    if (!are_alike(weight, first)) throw std::invalid_argument("experts: weights differ in their types");
}

}  // namespace

ExpertSlots::ExpertSlots(Runtime& runtime, std::vector<LinearWeight*> up, std::vector<LinearWeight*> down,
                         int64_t count)
    : up_(std::move(up)), down_(std::move(down)), slots_(static_cast<size_t>(count)), places_(up_.size(), -1) {
    for (Slot& slot : slots_) {
        slot.up = runtime.weights.take(static_cast<size_t>(up_[0]->room()));
        slot.down = runtime.weights.take(static_cast<size_t>(down_[0]->room()));
    }
    std::vector<int64_t> first(slots_.size());
    std::iota(first.begin(), first.end(), 0);
    hold(runtime, first);
    reads_.store(0, std::memory_order_relaxed);
}

void ExpertSlots::hold(Runtime& runtime, std::span<const int64_t> experts) {
    ++now_;
    std::vector<const LinearWeight*> missing;
    missing.reserve(2 * experts.size());
    for (const int64_t expert : experts) {
        const int64_t place = places_[static_cast<size_t>(expert)];
        if (place >= 0) slots_[static_cast<size_t>(place)].last_use = now_;
    }
    for (const int64_t expert : experts) {
        const auto index = static_cast<size_t>(expert);
        if (places_[index] >= 0) continue;
        Slot& slot = find_victim();
        clear(slot);
        slot.expert = expert;
        slot.last_use = now_;
        places_[index] = &slot - slots_.data();
        up_[index]->load(slot.up);
        down_[index]->load(slot.down);
        missing.push_back(up_[index]);
        missing.push_back(down_[index]);
    }
    if (missing.empty()) return;
    try {
        repack_parts(runtime, missing);
    } catch (...) {  // no memory: what was not read is not there
        for (Slot& slot : slots_) {
            if (slot.last_use == now_) clear(slot);
        }
        throw;
    }
    reads_.store(reads() + static_cast<int64_t>(missing.size() / 2), std::memory_order_relaxed);
}

void ExpertSlots::clear(Slot& slot) {
    if (slot.expert < 0) return;
    const auto index = static_cast<size_t>(slot.expert);
    up_[index]->unload();
    down_[index]->unload();
    places_[index] = -1;
    slot.expert = -1;
}

// Of those that are not needed now the one that was used least recently; an empty one first.
ExpertSlots::Slot& ExpertSlots::find_victim() {
    return *std::min_element(slots_.begin(), slots_.end(),
                             [](const Slot& a, const Slot& b) { return a.last_use < b.last_use; });
}

void Experts::limit(Runtime& runtime, int64_t slots) {
    if (up_.empty() || slots_ != nullptr) throw std::invalid_argument("experts: there are none to limit, or they are");
    if (slots < 1 || slots > count()) check("number of slots", slots, count());
    for (size_t i = 0; i < up_.size(); ++i) {
        check_left(*up_[i], *up_[0]);
        check_left(*down_[i], *down_[0]);
    }
    slots_ = std::make_unique<ExpertSlots>(runtime, up_, down_, slots);
}

void Experts::append(LinearWeight& up, LinearWeight& down) {
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
    use_->append();
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
