// Memory for repacked weights and for pools of keys and values: anonymous pages, zeroed, aligned to 2 MiB and offered
// to the kernel as huge pages, so that reading it misses the TLB rarely. Only the bytes asked for are ever touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace mlxr {

// Under sanitizers memory is given out to the byte and not shared, so that they see what lies outside.
#if defined(MLXR_SANITIZED)
inline constexpr bool kExactMemory = true;
#else
inline constexpr bool kExactMemory = false;
#endif

class Pages {
  public:
    Pages() = default;
    explicit Pages(size_t bytes);  // throws std::bad_alloc
    ~Pages();
    Pages(Pages&& other) noexcept;
    Pages& operator=(Pages&& other) noexcept;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// Memory of one weight or pool, out of a region that it may share with others; the region goes with the last of them.
class Slice {
  public:
    Slice() = default;
    Slice(std::shared_ptr<Pages> region, size_t first, size_t bytes)
        : region_(std::move(region)), data_(region_->data() + first), bytes_(bytes) {}

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

    // `bytes` of these bytes, from `first` on.
    Slice cut(size_t first, size_t bytes) const {
        Slice part = *this;
        part.data_ += first;
        part.bytes_ = bytes;
        return part;
    }

  private:
    std::shared_ptr<Pages> region_;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// Deals out memory, one slice right after the other, so that all of it is huge pages (a weight of its own would
// end in small ones) and a stream finds what is read next where it expects it. Nothing is dealt out twice: all of it is
// zeros.
class Slices {
  public:
    Slice take(size_t bytes);  // 64-byte aligned; throws std::bad_alloc

  private:
    std::weak_ptr<Pages> region_;
    size_t used_ = 0;
};

// Bytes of a mapped file: that they will be read soon, and that their pages may leave this process's memory. Both are
// advice.
void expect_file(const uint8_t* data, size_t bytes);
void release_file(const uint8_t* data, size_t bytes);

}  // namespace mlxr
