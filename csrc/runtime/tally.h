// What ran: calls by operator, kernel and form, counted by the code that chose the kernel; while profiling, also how
// long they took and what they had to do. Written by whoever holds the runtime's mutex, read at any time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "quants/quants.h"
#include "runtime/kernel_names.h"

namespace mlxr {

// An operator and what it ran: one kernel in one form, or several where parts of a weight differ. All in one word, so
// that counting is quick. A form is a small number, see tally.cpp.
class Ran {
  public:
    explicit Ran(OperatorName what) : word_(static_cast<uint64_t>(what) + 1) {}
    Ran(OperatorName what, KernelName kernel, int form) : Ran(what) { add(kernel, form); }

    // Once for the same; of more than kMost different ones the rest is left out.
    void add(KernelName kernel, int form);

    uint64_t word() const { return word_; }

    static constexpr int kMost = 5;
    static constexpr int kForms = 64;

  private:
    uint64_t word_;
    int items_ = 0;
};

static_assert(static_cast<int>(KernelName::count) * Ran::kForms < 1 << 10 && kTypeCount <= Ran::kForms);

// Forms of norms and of pages that are read; those of other operators are the numbers of their enums.
inline constexpr int kResidual = 1;
inline constexpr int kWindow = 4, kSoftcap = 8, kSinks = 16, kLatent = 32;
inline constexpr int kUngated = 16;

class Tally {
  public:
    struct Work {
        int64_t nanoseconds = 0, bytes = 0, macs = 0;
    };

    struct Row {
        std::string what, how;  // operator; kernel and form
        int64_t calls;
        Work work;
    };

    // One call while profiling; times are those of now_ns.
    struct Event {
        int32_t entry;  // of rows()
        int64_t start_ns, end_ns;
    };

    class Entry {
      public:
        void add_call() { bump(calls_, 1); }
        void add(const Work& work);

      private:
        friend class Tally;
        // The only writer need not lock.
        static void bump(std::atomic<int64_t>& value, int64_t by) {
            value.store(value.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
        }
        std::atomic<uint64_t> word_{0};
        std::atomic<int64_t> calls_{0}, nanoseconds_{0}, bytes_{0}, macs_{0};
    };

    // Counts a call; the entry stays.
    Entry& count(const Ran& ran) {
        Entry& entry = find(ran.word());
        entry.add_call();
        return entry;
    }

    // What has been counted, with the index of each row as events name it. From any thread.
    std::vector<std::pair<int32_t, Row>> rows() const;

    // Counts rows of experts that a kernel multiplied by weights of a type.
    void add_expert_rows(KernelName kernel, Type type, int64_t rows) {
        Entry::bump(expert_rows_[static_cast<size_t>(kernel)][static_cast<size_t>(type)], rows);
    }
    // What was counted so, by kernel and form. From any thread.
    std::vector<std::pair<std::string, int64_t>> expert_rows() const;

    static int64_t now_ns() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    // From here on calls are timed, and up to `events` of them kept one by one.
    void start_profile(size_t events);
    // Ends it and returns what was kept.
    std::vector<Event> stop_profile();
    bool is_profiling() const { return profiling_; }
    void keep(const Entry& entry, int64_t start_ns, int64_t end_ns);

  private:
    // Far more than models and loads make; what comes after them is counted together.
    static constexpr int kBits = 10, kEntries = 1 << kBits;

    Entry& find(uint64_t word);

    Entry entries_[kEntries + 1];
    std::atomic<int64_t> expert_rows_[static_cast<size_t>(KernelName::count)][kTypeCount] = {};
    bool profiling_ = false;
    size_t most_events_ = 0;
    std::vector<Event> events_;
};

// Counts a call, and times it to the end of the scope while profiling. Scopes do not nest.
class Counted {
  public:
    Counted(Tally& tally, const Ran& ran)
        : tally_(tally), entry_(tally.count(ran)), start_ns_(tally.is_profiling() ? Tally::now_ns() : 0) {}
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;
    ~Counted() {
        if (start_ns_ != 0) finish();
    }

    // Bytes that the call reads and writes, each once, and its multiply-adds; `measure` is asked while profiling only.
    template <typename Measure>
    void does(const Measure& measure) {
        if (start_ns_ != 0) work_ = measure();
    }

  private:
    void finish() noexcept;

    Tally& tally_;
    Tally::Entry& entry_;
    const int64_t start_ns_;
    Tally::Work work_;
};

}  // namespace mlxr
