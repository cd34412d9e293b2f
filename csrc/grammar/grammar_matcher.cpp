// See grammar_matcher.h.
#include "grammar/grammar_matcher.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace mlxr {

size_t ForcedTokens::write(const void* self, const uint8_t* text, size_t text_bytes, uint32_t* ids, size_t room) {
    ForcedTokens& tokens = *static_cast<ForcedTokens*>(const_cast<void*>(self));
    const auto copy = [&](const std::vector<uint32_t>& found) {
        std::copy_n(found.begin(), std::min(found.size(), room), ids);
        return found.size();
    };
    try {
        const std::string key(reinterpret_cast<const char*>(text), text_bytes);
        {
            const std::lock_guard lock(tokens.mutex_);
            const auto known = tokens.found_.find(key);
            if (known != tokens.found_.end()) return copy(known->second);
        }
        const std::vector<uint32_t> found = tokens.find_(key);
        tokens.keep(key, found);
        return copy(found);
    } catch (...) {  // nothing is forced then
        return 0;
    }
}

size_t ForcedTokens::bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
}

void ForcedTokens::keep(const std::string& text, const std::vector<uint32_t>& ids) {
    const size_t bytes = kEntryBytes + text.size() + ids.size() * sizeof(uint32_t);
    if (bytes > kMaxBytes) return;  // one that others would have to make room for, and still not enough
    const std::lock_guard lock(mutex_);
    if (bytes_ + bytes > kMaxBytes) {
        found_.clear();
        bytes_ = 0;
    }
    if (found_.emplace(text, ids).second) bytes_ += bytes;
}

GrammarMatcher::GrammarMatcher(Errands& errands, const GrammarFunctions& functions, void* matcher, size_t mask_words)
    : errands_(errands), functions_(functions), matcher_(matcher), mask_(mask_words) {}

GrammarMatcher::~GrammarMatcher() {
    errands_.drop(*this);
    if (is_idle()) functions_.free(matcher_);
}

void GrammarMatcher::end_errand() {
    errands_.finish(*this);
    if (!is_idle()) throw std::runtime_error("a grammar's state was lost when the process was forked");
}

void GrammarMatcher::accept(uint32_t token) {
    end_errand();
    token_ = token;
    is_due_ = true;
    errands_.add(*this);
}

void GrammarMatcher::replay(const std::vector<uint32_t>& tokens) {
    end_errand();
    consume(tokens.data(), tokens.size());
    is_due_ = true;
}

const uint32_t* GrammarMatcher::finish() {
    end_errand();
    run();
    return failed_ ? nullptr : mask_.data();
}

size_t GrammarMatcher::count_allowed(const std::vector<uint32_t>& tokens) {
    end_errand();
    if (failed_) return 0;
    const int32_t allowed = functions_.validate_tokens(matcher_, tokens.data(), tokens.size());
    return allowed < 0 ? 0 : static_cast<size_t>(allowed);
}

std::string GrammarMatcher::error() {
    end_errand();
    const char* const text = functions_.get_error(matcher_);
    return text == nullptr ? "" : text;
}

void* GrammarMatcher::clone() {
    end_errand();
    return functions_.clone(matcher_);
}

void GrammarMatcher::run() {
    if (!std::exchange(is_due_, false)) return;
    if (const std::optional<uint32_t> token = std::exchange(token_, std::nullopt)) consume(&*token, 1);
    const size_t mask_bytes = mask_.size() * sizeof(uint32_t);
    failed_ = failed_ || functions_.compute_mask_into(matcher_, mask_.data(), mask_bytes) != 0;
}

void GrammarMatcher::consume(const uint32_t* tokens, size_t count) {
    failed_ = failed_ || functions_.consume_tokens(matcher_, tokens, count) != 0;
}

}  // namespace mlxr
