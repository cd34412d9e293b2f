// See pages.h.
#include "linear/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace mlxr {

namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kLine = 64;
constexpr size_t kRegion = size_t{64} << 20;  // what is not used of it costs no memory

size_t whole_pages(size_t bytes) {
    static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

void advise(const uint8_t* data, size_t bytes, int advice) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    if (bytes == 0) return;
    const uintptr_t first = reinterpret_cast<uintptr_t>(data) / page * page,
                    last = reinterpret_cast<uintptr_t>(data) + bytes;
    madvise(reinterpret_cast<void*>(first), last - first, advice);
}

}  // namespace

void expect_file(const uint8_t* data, size_t bytes) {
    advise(data, bytes, MADV_WILLNEED);
}

void release_file(const uint8_t* data, size_t bytes) {
    advise(data, bytes, MADV_DONTNEED);
}

Pages::Pages(size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    if constexpr (kExactMemory) {
        data_ = static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{kLine}));
        std::memset(data_, 0, bytes);
        return;
    }
    // Map with room to align, then give back what lies outside.
    const size_t wanted = whole_pages(bytes), mapped = wanted + kHuge;
    if (wanted < bytes || mapped < wanted) throw std::bad_alloc();
    void* raw = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw std::bad_alloc();
    uint8_t* const begin = static_cast<uint8_t*>(raw);
    const size_t before = (kHuge - reinterpret_cast<uintptr_t>(begin) % kHuge) % kHuge;
    data_ = begin + before;
    if (before > 0) munmap(begin, before);
    if (mapped > before + wanted) munmap(data_ + wanted, mapped - before - wanted);
#if defined(MADV_HUGEPAGE)
    madvise(data_, wanted, MADV_HUGEPAGE);  // advice: without it the pages are small, nothing else
#endif
}

Pages::~Pages() {
    if (data_ == nullptr) return;
    if constexpr (kExactMemory) {
        ::operator delete(data_, std::align_val_t{kLine});
    } else {
        munmap(data_, whole_pages(bytes_));
    }
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

Slice Slices::take(size_t bytes) {
    if (bytes > kRegion || kExactMemory) return {std::make_shared<Pages>(bytes), 0, bytes};
    std::shared_ptr<Pages> region = region_.lock();
    if (region == nullptr || bytes > region->bytes() - used_) {
        region = std::make_shared<Pages>(kRegion);
        region_ = region;
        used_ = 0;
    }
    const size_t first = used_;
    used_ = std::min(kRegion, (first + bytes + kLine - 1) / kLine * kLine);
    return {std::move(region), first, bytes};
}

}  // namespace mlxr
