// For tiles.h: where the columns of x come from if its rows are picked, and floats as blocks of one run.

template <int COLUMNS, int N, typename X> struct FromPicked {
  enum { WORDS = 4 };
  const DEVICE X *from[N];
  float squares;
  FUNCTION FromPicked(const DEVICE X *x, PRIVATE const Picked &picked, GROUP uint *, int thread_id) : squares(0.0f) {
    UNROLL
    for (int n = 0; n < N; ++n)
      from[n] = x + picked.row(8 * n + thread_id % 32 / 4) * COLUMNS;
  }
  FUNCTION void bring() {}
  FUNCTION void read(int n, int column, PRIVATE uint *b) const { load_pairs(from[n] + column, b); }
};

// The one row that a tile has, in the threadgroup's memory.
template <int COLUMNS, bool SUMMED, int THREADS, typename X>
struct FromOne : FromShared<COLUMNS, false, SUMMED, THREADS, X> {
  FUNCTION FromOne(const DEVICE X *x, PRIVATE const Picked &picked, GROUP uint *shared, int thread_id)
      : FromShared<COLUMNS, false, SUMMED, THREADS, X>(x + picked.row(0) * COLUMNS, nullptr, shared, 1, thread_id) {}
};

template <bool STAGED, int COLUMNS, int N, bool SUMMED, int THREADS, typename X> struct PickedSource {
  typedef FromPicked<COLUMNS, N, X> type;
};
template <int COLUMNS, int N, bool SUMMED, int THREADS, typename X>
struct PickedSource<true, COLUMNS, N, SUMMED, THREADS, X> {
  typedef FromOne<COLUMNS, SUMMED, THREADS, X> type;
};

// Numbers of 16 bits, whose pairs of neighbours stand in words already.
struct PairRun : OneRun {
  enum { STEP = 4, WORDS = 16, OFFSETS = 0 };
  static FUNCTION void load(Bytes base, uint64_t, uint64_t block, int, PRIVATE uint *w) {
    UNROLL
    for (int u = 0; u < 4; ++u)
      load_words(base + block * 64 + 16 * u, w + 4 * u);
  }
  static FUNCTION void scales(Bytes, uint64_t, uint64_t, int, PRIVATE float *scale, PRIVATE float *offset) {
    scale[0] = scale[1] = 1.0f;
    offset[0] = offset[1] = 0.0f;
  }
  static FUNCTION void pack_terms(float, float, PRIVATE uint *step, PRIVATE uint *low) { *step = *low = 0u; }
};
struct BF16Run : PairRun {
  static FUNCTION void pairs(PRIVATE const uint *w, int u, PRIVATE const uint *, PRIVATE const uint *,
                             PRIVATE uint *out) {
    UNROLL
    for (int i = 0; i < 4; ++i)
      out[i] = w[8 * (i / 2) + 2 * u + i % 2];
  }
};
struct F16Run : PairRun {
  static FUNCTION void pairs(PRIVATE const uint *w, int u, PRIVATE const uint *, PRIVATE const uint *,
                             PRIVATE uint *out) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint word = w[8 * (i / 2) + 2 * u + i % 2];
      out[i] = pack_pair(half_bits_to_float(word & 0xFFFFu), half_bits_to_float(word >> 16));
    }
  }
};
struct F32Run : F32 {
  static FUNCTION void pack_terms(float, float, PRIVATE uint *step, PRIVATE uint *low) { *step = *low = 0u; }
  static FUNCTION void pairs(PRIVATE const uint *w, int u, PRIVATE const uint *, PRIVATE const uint *,
                             PRIVATE uint *out) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int at = 16 * (i / 2) + 4 * u + 2 * (i % 2);
      out[i] = pack_pair(bits_to_float(w[at]), bits_to_float(w[at + 1]));
    }
  }
};

template <int ID> struct TileBlocks { typedef typename Blocks<ID>::type type; };
template <> struct TileBlocks<0> { typedef F32Run type; };
template <> struct TileBlocks<1> { typedef F16Run type; };
template <> struct TileBlocks<30> { typedef BF16Run type; };
