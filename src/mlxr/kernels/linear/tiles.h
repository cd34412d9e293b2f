// Tiles of 16 rows of a weight times 8 tokens, on the matrix units.
//
// A SIMD-group multiplies M tiles of rows with N tiles of tokens over every SPLIT-th step of columns. A step is eight
// runs of each row. Lane 4 g + t holds rows g and g + 8 of a tile and runs t and t + 4 of the step; one quad of its run
// is what it has to bring of 16 columns of the tile. So a lane multiplies the words that it loaded itself, and the
// columns are taken in whatever order the blocks have them: x is loaded in the same order, straight from its rows.
// Weights are scaled to bf16 in the lane, two at a time; sums are f32.

// What a lane holds of a step of one row: `fetch` brings the raw words, `words` makes those of `Q::load` of run j out
// of them, `terms` scale and offset of near and far quads as pairs, for numbers q instead of 1 + q / 2^BITS.
template <typename Q> struct Tile {
  enum { EACH = Q::WORDS + 4, RAW = 2 * EACH };
  static FUNCTION void fetch(Bytes base, uint64_t total, uint row, int runs, int first, PRIVATE uint *raw) {
    UNROLL
    for (int j = 0; j < 2; ++j) {
      const int index = first + 4 * j < runs ? first + 4 * j : runs - 1;
      float scale[2], offset[2];
      Q::load(base, total, row + index / Q::RUNS, index % Q::RUNS, raw + j * EACH);
      Q::scales(base, total, row + index / Q::RUNS, index % Q::RUNS, scale, offset);
      UNROLL
      for (int i = 0; i < 2; ++i) {
        raw[j * EACH + Q::WORDS + i] = float_to_bits(scale[i]);
        raw[j * EACH + Q::WORDS + 2 + i] = float_to_bits(offset[i]);
      }
    }
  }
  static FUNCTION void words(PRIVATE const uint *raw, int j, int, PRIVATE uint *w) {
    UNROLL
    for (int i = 0; i < Q::WORDS; ++i)
      w[i] = raw[j * EACH + i];
  }
  static FUNCTION void terms(PRIVATE const uint *raw, int j, int, PRIVATE uint *scale, PRIVATE uint *offset) {
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const float s = bits_to_float(raw[j * EACH + Q::WORDS + i]);
      const float o = bits_to_float(raw[j * EACH + Q::WORDS + 2 + i]);
      Q::pack_terms(s, o, scale + i, offset + i);
    }
  }
};

FUNCTION void split_nibbles(PRIVATE const uint *raw, PRIVATE uint *w) {
  UNROLL
  for (int u = 0; u < 4; ++u) {
    w[u] = raw[u] & 0x0F0F0F0Fu;
    w[4 + u] = raw[u] >> 4 & 0x0F0F0F0Fu;
  }
}

FUNCTION uint pack_twice(float v) { return pack_pair(v, v); }

// Small integers, byte `which` of each word, times d: a pair that holds it twice.
FUNCTION uint scale_byte(uint bytes, int which, uint d) {
  return multiply_pairs(multiply_pairs(widen_byte(bytes, which), 0x3F803F80u, 0xC300C300u), d, 0x80008000u);
}

template <> struct Tile<Q4_K> {
  enum { RAW = 12 };
  static FUNCTION void fetch(Bytes base, uint64_t, uint row, int, int first, PRIVATE uint *raw) {
    Bytes block = base + uint64_t(row + uint(first) / 8) * 144;
    load_words(block, raw);
    load_words(block + 16 + 16 * (uint(first) % 8), raw + 4);
    load_words(block + 80 + 16 * (uint(first) % 8), raw + 8);
  }
  static FUNCTION void words(PRIVATE const uint *raw, int j, int, PRIVATE uint *w) {
    split_nibbles(raw + 4 + 4 * j, w);
  }
  static FUNCTION void terms(PRIVATE const uint *raw, int j, int t, PRIVATE uint *scale, PRIVATE uint *offset) {
    const uint d = pack_twice(half_bits_to_float(raw[0] & 0xFFFFu));
    const uint least = pack_twice(-half_bits_to_float(raw[0] >> 16));
    const uint steps = j ? (raw[3] & 0x0F0F0F0Fu) | (raw[1] >> 2 & 0x30303030u) : raw[1] & 0x3F3F3F3Fu;
    const uint lows = j ? (raw[3] >> 4 & 0x0F0F0F0Fu) | (raw[2] >> 2 & 0x30303030u) : raw[2] & 0x3F3F3F3Fu;
    UNROLL
    for (int i = 0; i < 2; ++i) {
      scale[i] = scale_byte(steps, t / 2 * 2 + i, d);
      offset[i] = scale_byte(lows, t / 2 * 2 + i, least);
    }
  }
};

template <> struct Tile<Q6_K> {
  enum { RAW = 21 };
  static FUNCTION void fetch(Bytes base, uint64_t total, uint row, int, int first, PRIVATE uint *raw) {
    const uint block = row + uint(first) / 8; // narrow numbers make short addresses
    Bytes low = field<0, 128>(base, total, block) + 16 * (uint(first) % 8);
    Bytes high = field<128, 64>(base, total, block) + 16 * (uint(first) % 2);
    load_words(low, raw);
    load_words(low + 64, raw + 4);
    load_words(high, raw + 8);
    load_words(high + 32, raw + 12);
    load_words(field<192, 16>(base, total, block), raw + 16);
    raw[20] = load_u16(field<208, 2>(base, total, block));
  }
  static FUNCTION void words(PRIVATE const uint *raw, int j, int t, PRIVATE uint *w) {
    split_nibbles(raw + 4 * j, w);
    UNROLL
    for (int u = 0; u < 4; ++u) {
      const uint word = raw[8 + 4 * j + u] >> (2 * (t / 2));
      w[u] |= (word & 0x03030303u) << 4;
      w[4 + u] |= word & 0x30303030u;
    }
  }
  static FUNCTION void terms(PRIVATE const uint *raw, int j, int t, PRIVATE uint *scale, PRIVATE uint *offset) {
    const float d = half_bits_to_float(raw[20]);
    UNROLL
    for (int i = 0; i < 2; ++i) {
      scale[i] = pack_twice(d * float((signed char)(raw[16 + 2 * j + i] >> (8 * t))));
      offset[i] = multiply_pairs(scale[i], 0xC200C200u, 0x80008000u); // exactly -32 of them
    }
  }
};

template <> struct Tile<MXFP4> {
  enum { RAW = 10 };
  static FUNCTION void fetch(Bytes base, uint64_t total, uint row, int runs, int first, PRIVATE uint *raw) {
    UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint block = row + uint(first + 4 * j < runs ? first + 4 * j : runs - 1);
      load_words(field<0, 16>(base, total, block), raw + 5 * j);
      raw[5 * j + 4] = field<16, 1>(base, total, block)[0];
    }
  }
  static FUNCTION void words(PRIVATE const uint *raw, int j, int, PRIVATE uint *w) {
    UNROLL
    for (int i = 0; i < 4; ++i)
      w[i] = raw[5 * j + i];
  }
  static FUNCTION void terms(PRIVATE const uint *raw, int j, int, PRIVATE uint *scale, PRIVATE uint *offset) {
    scale[0] = scale[1] = pack_twice(MXFP4::scale_of(raw[5 * j + 4]));
    offset[0] = offset[1] = 0u;
  }
};

// Where the columns of x come from, eight neighbours at a time: straight from its rows.
template <int COLUMNS, int N, typename X> struct FromRows {
  enum { WORDS = 4 };
  const DEVICE X *from[N];
  float squares;
  FUNCTION FromRows(const DEVICE X *x, const DEVICE float *, GROUP uint *, int tokens, int thread_id)
      : squares(0.0f) {
    UNROLL
    for (int n = 0; n < N; ++n) {
      const int token = 8 * n + thread_id % 32 / 4;
      from[n] = x + uint64_t(token < tokens ? token : tokens - 1) * COLUMNS;
    }
  }
  FUNCTION void bring() {}
  FUNCTION void read(int n, int column, PRIVATE uint *b) const { load_pairs(from[n] + column, b); }
};

// Or out of the threadgroup's memory, to which its threads bring the one row, multiplied by `norm`; each of them sums
// the squares of what it brings. SUMMED: with the sums of every sixteen neighbours, and a step of zeros behind it all.
template <int COLUMNS, bool NORM, bool SUMMED, int THREADS, typename X> struct FromShared {
  enum { WORDS = COLUMNS / 2 + (SUMMED ? COLUMNS / 16 + 128 : 0) };
  const DEVICE X *from;
  const DEVICE float *norm;
  GROUP uint *shared;
  int thread_id;
  float squares;
  FUNCTION FromShared(const DEVICE X *x, const DEVICE float *norm_, GROUP uint *shared_, int, int thread_id_)
      : from(x), norm(norm_), shared(shared_), thread_id(thread_id_), squares(0.0f) {}
  FUNCTION void bring() {
    UNROLL
    for (int first = 0; first < COLUMNS; first += 8 * THREADS) {
      const int column = first + 8 * thread_id;
      if (column >= COLUMNS)
        break;
      uint pairs[4];
      if (NORM) {
        float v[8], gain[8];
        load<8>(from + column, v);
        load<8>(norm + column, gain);
        UNROLL
        for (int i = 0; i < 8; ++i) {
          squares += v[i] * v[i];
          v[i] *= gain[i];
        }
        UNROLL
        for (int i = 0; i < 4; ++i)
          pairs[i] = pack_pair(v[2 * i], v[2 * i + 1]);
      } else {
        load_pairs(from + column, pairs);
      }
      store_words(shared + column / 2, pairs);
      if (SUMMED) { // whole SIMD-groups get here, since a step is what one of them brings
        float sum = 0.0f;
        UNROLL
        for (int i = 0; i < 4; ++i)
          sum += low_of(pairs[i]) + high_of(pairs[i]);
        sum += shuffle_xor(sum, 1);
        if (thread_id % 2 == 0)
          shared[COLUMNS / 2 + column / 16] = float_to_bits(sum);
      }
    }
    if (SUMMED && thread_id < 128)
      shared[COLUMNS / 2 + COLUMNS / 16 + thread_id] = 0u;
    barrier();
  }
  FUNCTION void read(int, int column, PRIVATE uint *b) const { read_words(shared + column / 2, b); }
};
template <bool IS_SHARED, int COLUMNS, int N, bool NORM, bool SUMMED, int THREADS, typename X> struct Source {
  typedef FromRows<COLUMNS, N, X> type;
};
template <int COLUMNS, int N, bool NORM, bool SUMMED, int THREADS, typename X>
struct Source<true, COLUMNS, N, NORM, SUMMED, THREADS, X> {
  typedef FromShared<COLUMNS, NORM, SUMMED, THREADS, X> type;
};

// One of the two runs of a step: all its quads times the same columns of x.
template <typename Q, int M, int N, typename From>
FUNCTION void multiply_runs(PRIVATE const uint (*raw)[Tile<Q>::RAW], int j, int t, PRIVATE const From &source,
                            int column, bool inside, PRIVATE float *sums) {
  uint w[2 * M][Q::WORDS], scale[2 * M][2], offset[2 * M][2];
  UNROLL
  for (int i = 0; i < 2 * M; ++i) {
    Tile<Q>::words(raw[i], j, t, w[i]);
    Tile<Q>::terms(raw[i], j, t, scale[i], offset[i]);
  }
  UNROLL
  for (int which_half = 0; which_half < 2; ++which_half) {
    uint a[M][2][2][4]; // of two units, near and far
    UNROLL
    for (int m = 0; m < M; ++m) {
      UNROLL
      for (int v = 0; v < 2; ++v) {
        uint upper[4], lower[4]; // near and far pairs of rows g and g + 8
        Q::pairs(w[2 * m], 2 * which_half + v, scale[2 * m], offset[2 * m], upper);
        Q::pairs(w[2 * m + 1], 2 * which_half + v, scale[2 * m + 1], offset[2 * m + 1], lower);
        UNROLL
        for (int side = 0; side < 2; ++side) {
          a[m][v][side][0] = upper[2 * side], a[m][v][side][1] = lower[2 * side];
          a[m][v][side][2] = upper[2 * side + 1], a[m][v][side][3] = lower[2 * side + 1];
        }
      }
    }
    UNROLL
    for (int n = 0; n < N; ++n) {
      UNROLL
      for (int side = 0; side < 2; ++side) {
        uint b[4];
        source.read(n, column + 8 * which_half + side * Q::DELTA, b);
        UNROLL
        for (int k = 0; k < 4; ++k)
          b[k] = inside ? b[k] : 0u;
        UNROLL
        for (int v = 0; v < 2; ++v) {
          UNROLL
          for (int m = 0; m < M; ++m)
            multiply_tile(sums + (m * N + n) * 4, a[m][v][side], b + 2 * v);
        }
      }
    }
  }
}

template <typename Q, int M>
FUNCTION void fetch_step(Bytes weights, uint64_t total, PRIVATE const uint *blocks, int runs, int first,
                         PRIVATE uint (*raw)[Tile<Q>::RAW]) {
  UNROLL
  for (int i = 0; i < 2 * M; ++i)
    Tile<Q>::fetch(weights, total, blocks[i], runs, first, raw[i]);
}

// AHEAD: the words of the next step are under way while those of one are multiplied; else they are asked for after.
template <typename Q, int COLUMNS, int M, int N, int SPLIT, bool AHEAD, typename From>
FUNCTION void multiply_tiles(Bytes weights, uint64_t total, PRIVATE const int *rows, PRIVATE From &source, int slice,
                             int lane, PRIVATE float *sums) {
  constexpr int RUNS = COLUMNS / 32, STEPS = (RUNS + 7) / 8;
  const int t = lane % 4;
  uint blocks[2 * M];
  UNROLL
  for (int i = 0; i < 2 * M; ++i)
    blocks[i] = uint(rows[i]) * (COLUMNS / Q::BLOCK);
  UNROLL
  for (int i = 0; i < M * N * 4; ++i)
    sums[i] = 0.0f;
  uint raw[2 * M][Tile<Q>::RAW], next[2 * M][Tile<Q>::RAW];
  if (slice < STEPS)
    fetch_step<Q, M>(weights, total, blocks, RUNS, 8 * slice + t, raw);
  source.bring();
  for (int step = slice; step < STEPS; step += SPLIT) {
    const bool goes_on = step + SPLIT < STEPS;
    if (AHEAD && goes_on)
      fetch_step<Q, M>(weights, total, blocks, RUNS, 8 * (step + SPLIT) + t, next);
    UNROLL
    for (int j = 0; j < 2; ++j) {
      const int index = 8 * step + 4 * j + t;
      const bool inside = Q::RUNS == 8 || index < RUNS; // blocks of eight runs are whole steps
      const int run = inside ? index : RUNS - 1;
      multiply_runs<Q, M, N>(raw, j, t, source, run / Q::RUNS * Q::BLOCK + Q::first(run % Q::RUNS), inside, sums);
    }
    if (AHEAD) {
      UNROLL
      for (int i = 0; i < 2 * M; ++i) {
        UNROLL
        for (int k = 0; k < Tile<Q>::RAW; ++k)
          raw[i][k] = next[i][k];
      }
    } else if (goes_on) {
      fetch_step<Q, M>(weights, total, blocks, RUNS, 8 * (step + SPLIT) + t, raw);
    }
  }
}

// One row leaves seven of eight columns of b free. So b gets the near columns of run t in its column t and the far ones
// in column 4 + t, and a the numbers as they are: the sums of every run stay apart, and are scaled in f32 afterwards.
// Lane t of four then has sums 2 t and 2 t + 1. `add` scales them: `sums` are those of sixteen columns each of a step.
template <typename Q> struct Single {};

template <> struct Single<Q4_K> {
  static FUNCTION float add(PRIVATE const uint *raw, int j, int t, const GROUP uint *sums, float first, float second) {
    const uint steps = j ? (raw[3] & 0x0F0F0F0Fu) | (raw[1] >> 2 & 0x30303030u) : raw[1] & 0x3F3F3F3Fu;
    const uint lows = j ? (raw[3] >> 4 & 0x0F0F0F0Fu) | (raw[2] >> 2 & 0x30303030u) : raw[2] & 0x3F3F3F3Fu;
    const int group = t < 2 ? 2 * t : 2 * t - 3; // near ones, then far ones
    const float x = bits_to_float(sums[8 * j + 2 * group]) + bits_to_float(sums[8 * j + 2 * group + 1]);
    const float d = half_bits_to_float(raw[0] & 0xFFFFu), least = half_bits_to_float(raw[0] >> 16);
    return d * float(steps >> (8 * group) & 255u) * (first + second - 128.0f * x) -
           least * float(lows >> (8 * group) & 255u) * x;
  }
};

template <> struct Single<Q6_K> {
  static FUNCTION float add(PRIVATE const uint *raw, int j, int t, const GROUP uint *sums, float first, float second) {
    const uint groups = (t < 2 ? raw[16 + 2 * j] : raw[17 + 2 * j]) >> (16 * (t % 2));
    const float x0 = bits_to_float(sums[8 * j + 2 * t]), x1 = bits_to_float(sums[8 * j + 2 * t + 1]);
    return half_bits_to_float(raw[20]) * (float((signed char)(groups)) * (first - 160.0f * x0) +
                                          float((signed char)(groups >> 8)) * (second - 160.0f * x1));
  }
};

// Which of the two ways a row goes.
template <bool IS_SINGLE, typename Q, int COLUMNS, int M, int N, int SPLIT, bool AHEAD, typename From> struct Tiles {
  static FUNCTION void multiply(Bytes weights, uint64_t total, PRIVATE const int *rows, PRIVATE From &source, int slice,
                                int lane, PRIVATE float *sums) {
    multiply_tiles<Q, COLUMNS, M, N, SPLIT, AHEAD>(weights, total, rows, source, slice, lane, sums);
  }
};
template <typename Q, int COLUMNS, int SPLIT, bool AHEAD, typename From>
struct Tiles<true, Q, COLUMNS, 1, 1, SPLIT, AHEAD, From> {
  static FUNCTION void multiply(Bytes weights, uint64_t total, PRIVATE const int *rows, PRIVATE From &source, int slice,
                                int lane, PRIVATE float *sums) {
    constexpr int RUNS = COLUMNS / 32, STEPS = RUNS / 8, SUMS = COLUMNS / 2, ZEROS = SUMS + COLUMNS / 16;
    const int t = lane % 4, g = lane / 4;
    uint blocks[2];
    UNROLL
    for (int i = 0; i < 2; ++i)
      blocks[i] = uint(rows[i]) * (COLUMNS / Q::BLOCK);
    uint raw[2][Tile<Q>::RAW];
    fetch_step<Q, 1>(weights, total, blocks, RUNS, 8 * (slice < STEPS ? slice : 0) + t, raw);
    source.bring();
    // all other lanes bring zeros
    const GROUP uint *near = source.shared + (g == t ? 128 * slice : ZEROS);
    const GROUP uint *far = source.shared + (g == t + 4 ? 128 * slice : ZEROS);
    const int near_step = g == t ? 128 * SPLIT : 0, far_step = g == t + 4 ? 128 * SPLIT : 0;
    float upper = 0.0f, lower = 0.0f;
    for (int step = slice; step < STEPS; step += SPLIT) {
      UNROLL
      for (int j = 0; j < 2; ++j) {
        uint w[2][Q::WORDS];
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        UNROLL
        for (int i = 0; i < 2; ++i)
          Tile<Q>::words(raw[i], j, t, w[i]);
        const int column = Q::first(4 * j + t);
        UNROLL
        for (int which_half = 0; which_half < 2; ++which_half) {
          uint x0[4], x1[4];
          read_words(near + column / 2 + 4 * which_half, x0);
          read_words(far + column / 2 + Q::DELTA / 2 + 4 * which_half, x1);
          UNROLL
          for (int v = 0; v < 2; ++v) {
            const int u = 2 * which_half + v;
            const uint a[4] = {widen_bytes(w[0][u], 0), widen_bytes(w[1][u], 0), widen_bytes(w[0][u], 1),
                               widen_bytes(w[1][u], 1)};
            const uint b[4] = {widen_bytes(w[0][4 + u], 0), widen_bytes(w[1][4 + u], 0), widen_bytes(w[0][4 + u], 1),
                               widen_bytes(w[1][4 + u], 1)};
            multiply_tile(c, a, x0 + 2 * v);
            multiply_tile(d, b, x1 + 2 * v);
          }
        }
        const GROUP uint *x = source.shared + SUMS + 16 * step;
        upper += Single<Q>::add(raw[0], j, t, x, c[0] + d[0], c[1] + d[1]);
        lower += Single<Q>::add(raw[1], j, t, x, c[2] + d[2], c[3] + d[3]);
      }
      near += near_step;
      far += far_step;
      if (step + SPLIT < STEPS)
        fetch_step<Q, 1>(weights, total, blocks, RUNS, 8 * (step + SPLIT) + t, raw);
    }
    UNROLL
    for (uint mask = 1; mask < 4; mask *= 2) {
      upper += shuffle_xor(upper, mask);
      lower += shuffle_xor(lower, mask);
    }
    sums[0] = upper, sums[2] = lower;
    sums[1] = sums[3] = 0.0f;
  }
};
