// Memory for repacked weights: anonymous pages, zeroed, aligned to 2 MiB and offered to the kernel as huge
// pages, so that a stream through a weight misses the TLB rarely. Only the bytes asked for are ever touched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mlxr {

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

}  // namespace mlxr
