// See expert_rows.h.
#include "moe/expert_rows.h"

namespace mlxr {

ExpertRows::ExpertRows(const Experts& experts, std::span<const AdapterRows> adapters, int64_t used,
                       std::span<const ExpertGroup> groups, std::span<const int32_t> places,
                       std::span<const int32_t> owners) {
    if (adapters.empty()) return;
    // Where the rows of each group and adapter end; counted first, then the places of the next.
    std::vector<int64_t> ends(groups.size() * adapters.size(), 0);
    std::vector<bool> changes(ends.size());
    for (size_t i = 0; i < ends.size(); ++i) {
        const Adapter& adapter = *adapters[i % adapters.size()].adapter;
        const int64_t expert = groups[i / adapters.size()].expert;
        changes[i] = !adapter.find(&experts.up(expert)).empty() || !adapter.find(&experts.down(expert)).empty();
    }
    const auto visit = [&](const auto& body) {
        for (size_t one = 0; one < adapters.size(); ++one) {
            for (const int32_t token : std::span(adapters[one].rows, static_cast<size_t>(adapters[one].count))) {
                for (const int32_t place :
                     places.subspan(static_cast<size_t>(token * used), static_cast<size_t>(used))) {
                    const auto group = static_cast<size_t>(owners[static_cast<size_t>(place)]);
                    const size_t index = group * adapters.size() + one;
                    if (changes[index]) body(index, token, place - static_cast<int32_t>(groups[group].first));
                }
            }
        }
    };
    visit([&](size_t index, int32_t, int32_t) { ++ends[index]; });
    int64_t all = 0;
    for (int64_t& end : ends) {
        const int64_t count = end;
        end = all;
        all += count;
    }
    if (all == 0) return;
    tokens_.resize(static_cast<size_t>(all));
    rows_.resize(static_cast<size_t>(all));
    visit([&](size_t index, int32_t token, int32_t row) {
        const auto at = static_cast<size_t>(ends[index]++);
        tokens_[at] = token;
        rows_[at] = row;
    });
    int64_t begin = 0;
    for (size_t i = 0; i < ends.size(); ++i) {
        if (i % adapters.size() == 0) firsts_.push_back(shares_.size());
        const int64_t count = ends[i] - begin;
        if (count == 0) continue;
        Share share{adapters[i % adapters.size()], adapters[i % adapters.size()]};
        share.by_token.rows = tokens_.data() + begin;
        share.by_place.rows = rows_.data() + begin;
        share.by_token.count = share.by_place.count = count;
        shares_.push_back(share);
        begin = ends[i];
    }
    firsts_.push_back(shares_.size());
}

}  // namespace mlxr
