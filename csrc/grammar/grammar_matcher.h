// The state of one grammar in one answer, as the grammar library keeps it, with the tokens that may come next: computed
// as an errand as soon as a token was chosen. Knows the library only by the addresses of its functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/errands.h"

namespace mlxr {

// The C interface of llguidance, as far as it is used here.
struct GrammarFunctions {
    int32_t (*consume_tokens)(void* matcher, const uint32_t* tokens, size_t count);
    int32_t (*compute_mask_into)(void* matcher, uint32_t* mask, size_t mask_bytes);
    const char* (*get_error)(void* matcher);
    void* (*clone)(const void* matcher);
    void (*free)(void* matcher);
    int32_t (*validate_tokens)(void* matcher, const uint32_t* tokens, size_t count);
};

// Asked by the library for the tokens of a text that the grammar leaves no choice about. Answers are kept as long as
// they take at most kMaxBytes together; then all of them go.
class ForcedTokens {
  public:
    using Find = std::function<std::vector<uint32_t>(const std::string& text)>;
    static constexpr size_t kMaxBytes = size_t{4} << 20;

    // `find` is called by any thread.
    explicit ForcedTokens(Find find) : find_(std::move(find)) {}

    // Writes at most `room` ids; returns how many there are. `self` is a ForcedTokens.
    static size_t write(const void* self, const uint8_t* text, size_t text_bytes, uint32_t* ids, size_t room);

    // What the kept answers take.
    size_t bytes() const;

  private:
    static constexpr size_t kEntryBytes = 128;  // about what the map takes besides texts and ids

    void keep(const std::string& text, const std::vector<uint32_t>& ids);

    Find find_;
    mutable std::mutex mutex_;
    std::unordered_map<std::string, std::vector<uint32_t>> found_;
    size_t bytes_ = 0;
};

class GrammarMatcher final : public Errand {
  public:
    // Owns `matcher` from now on.
    GrammarMatcher(Errands& errands, const GrammarFunctions& functions, void* matcher, size_t mask_words);
    ~GrammarMatcher();

    // Goes on after a token, and finds what may come next: later, or beside what the caller does now.
    void accept(uint32_t token);

    // Goes on after several tokens at once.
    void replay(const std::vector<uint32_t>& tokens);

    // Whether all that was handed over is done, so that accept() and finish() take no time.
    bool is_ready() const { return is_idle() && !is_due_; }

    // What may come next, a bit for each token; null after an error.
    const uint32_t* finish();
    size_t mask_words() const { return mask_.size(); }

    // How many of the tokens could come next, one after another; 0 after an error. The state stays as it is.
    size_t count_allowed(const std::vector<uint32_t>& tokens);

    // In the library's words; empty without an error.
    std::string error();

    // Another one in the same state.
    void* clone();

    void run() override;

  private:
    // Throws std::runtime_error for what a fork() has cut off. So do all who use it.
    void end_errand();
    void consume(const uint32_t* tokens, size_t count);

    Errands& errands_;
    const GrammarFunctions functions_;
    void* const matcher_;
    std::vector<uint32_t> mask_;
    std::optional<uint32_t> token_;  // to go on after
    bool is_due_ = true;             // the mask
    bool failed_ = false;
};

}  // namespace mlxr
