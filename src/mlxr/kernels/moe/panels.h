// What panels.body does with a tile: SIMD-groups that fill slots, and others that multiply what is in them.
//
// A slot holds 64 columns: of some rows of the weight, then of the pairs of the tile, each row's pieces of eight columns
// crosswise as rings.h says. Blocks are unpacked to bf16 on their way there.

// Where the columns of x come from: a thread brings piece thread % 8 of every sixteenth pair, from pair thread / 8 on.
template <typename K, int PAIRS> struct PairFiller {
  uint rows[PAIRS / 16]; // of x, in sixteen bytes
  int count, place;
  FUNCTION void open(PRIVATE const Picked &pairs, int columns, int thread_id) {
    count = (pairs.count - thread_id / 8 + 15) / 16;
    place = thread_id / 8 * 32 + (thread_id % 8 ^ thread_id / 8 % 8) * 4;
    UNROLL
    for (int i = 0; i < PAIRS / 16; ++i)
      rows[i] = uint(pairs.row(16 * i + thread_id / 8)) * uint(columns / 8);
  }
  FUNCTION void bring(const DEVICE K *x, int column, GROUP uint *slot) const {
    UNROLL
    for (int i = 0; i < PAIRS / 16; ++i)
      if (i < count)
        copy_words(reinterpret_cast<Bytes>(x + uint64_t(rows[i]) * 8 + column), slot + place + i * 512);
  }
};

// The rows of a weight that a threadgroup makes outputs of: of each sixteen the first eight, and `gap` rows further on the
// second ones. The next sixteen are STEP rows further on; there are `sixteens`, what is beyond is not brought.
struct PanelRows {
  int first, gap, sixteens;
};

// Weights of 16 bits: a thread brings piece thread % 8 of every sixteenth row, from row thread / 8 on.
template <typename K, int INPUTS, int ROWS, int STEP> struct FloatFiller {
  const DEVICE K *from;
  int sixteens, place, piece;
  FUNCTION void open(Bytes weights, uint64_t, PRIVATE const PanelRows &rows, int thread_id) {
    const int row = thread_id / 8;
    piece = thread_id % 8 * 8;
    from = reinterpret_cast<const DEVICE K *>(weights) +
           uint64_t(rows.first + row % 8 + (row < 8 ? 0 : rows.gap)) * INPUTS + piece;
    sixteens = rows.sixteens;
    place = row * 32 + (thread_id % 8 ^ row % 8) * 4;
  }
  FUNCTION int column(int step) const { return 64 * step + piece; } // of x, that meets the thread's piece
  FUNCTION void fetch(int) {}
  FUNCTION void bring(int step, GROUP uint *slot) const {
    UNROLL
    for (int i = 0; i < ROWS / 16; ++i)
      if (i < sixteens)
        copy_words(reinterpret_cast<Bytes>(from + 64 * step + uint64_t(i) * STEP * INPUTS), slot + place + i * 512);
  }
};

// One run of blocks as words that were only loaded; see `Tile` in tiles.h.
template <typename Q> struct RawRun {
  enum { WORDS = Q::WORDS + 4 };
  static FUNCTION void fetch(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *raw) {
    float scale[2], offset[2];
    Q::load(base, total, block, run, raw);
    Q::scales(base, total, block, run, scale, offset);
    UNROLL
    for (int i = 0; i < 2; ++i) {
      raw[Q::WORDS + i] = float_to_bits(scale[i]);
      raw[Q::WORDS + 2 + i] = float_to_bits(offset[i]);
    }
  }
  static FUNCTION void words(PRIVATE const uint *raw, int, PRIVATE uint *w) {
    UNROLL
    for (int i = 0; i < Q::WORDS; ++i)
      w[i] = raw[i];
  }
  static FUNCTION void terms(PRIVATE const uint *raw, int, PRIVATE uint *scale, PRIVATE uint *offset) {
    UNROLL
    for (int i = 0; i < 2; ++i)
      Q::pack_terms(bits_to_float(raw[Q::WORDS + i]), bits_to_float(raw[Q::WORDS + 2 + i]), scale + i, offset + i);
  }
};
template <> struct RawRun<MXFP4> {
  enum { WORDS = 5 };
  static FUNCTION void fetch(Bytes base, uint64_t total, uint64_t block, int, PRIVATE uint *raw) {
    load_words(field<0, 16>(base, total, block), raw);
    raw[4] = field<16, 1>(base, total, block)[0];
  }
  static FUNCTION void words(PRIVATE const uint *raw, int, PRIVATE uint *w) { Tile<MXFP4>::words(raw, 0, 0, w); }
  static FUNCTION void terms(PRIVATE const uint *raw, int, PRIVATE uint *scale, PRIVATE uint *offset) {
    Tile<MXFP4>::terms(raw, 0, 0, scale, offset);
  }
};
template <> struct RawRun<Q4_K> {
  enum { WORDS = 8 };
  static FUNCTION void fetch(Bytes base, uint64_t, uint64_t block, int run, PRIVATE uint *raw) {
    load_words(base + block * 144, raw);
    load_words(base + block * 144 + 16 + 16 * run, raw + 4);
  }
  static FUNCTION void words(PRIVATE const uint *raw, int, PRIVATE uint *w) { split_nibbles(raw + 4, w); }
  static FUNCTION void terms(PRIVATE const uint *raw, int run, PRIVATE uint *scale, PRIVATE uint *offset) {
    Tile<Q4_K>::terms(raw, run / 4, run % 4, scale, offset);
  }
};

// Blocks: a thread unpacks run thread % 2 of the two of a step, of every 64th row from row thread / 2 on. The columns of
// a step come in the order of the runs: sixteen near ones and sixteen far ones of each.
template <typename Q, int INPUTS, int ROWS, int STEP> struct BlockFiller {
  Bytes weights;
  uint64_t total, block;
  int sixteens, row, which, piece;
  uint raw[ROWS / 64][RawRun<Q>::WORDS];
  FUNCTION void open(Bytes weights_, uint64_t total_, PRIVATE const PanelRows &rows, int thread_id) {
    weights = weights_;
    total = total_;
    row = thread_id / 2;
    which = thread_id % 2;
    piece = thread_id % 8;
    block = uint64_t(rows.first + row / 16 * STEP + row % 8 + (row % 16 < 8 ? 0 : rows.gap)) * (INPUTS / Q::BLOCK);
    sixteens = rows.sixteens - row / 16;
  }
  FUNCTION int column(int step) const {
    const int run = 2 * step + piece / 4;
    return run / Q::RUNS * Q::BLOCK + Q::first(run % Q::RUNS) + piece % 4 / 2 * Q::DELTA + piece % 2 * 8;
  }
  FUNCTION void fetch(int step) {
    const int run = 2 * step + which;
    UNROLL
    for (int i = 0; i < ROWS / 64; ++i)
      if (4 * i < sixteens)
        RawRun<Q>::fetch(weights, total, block + uint64_t(4 * i * STEP) * (INPUTS / Q::BLOCK) + run / Q::RUNS,
                         run % Q::RUNS, raw[i]);
  }
  FUNCTION void bring(int step, GROUP uint *slot) {
    const int run = (2 * step + which) % Q::RUNS;
    UNROLL
    for (int i = 0; i < ROWS / 64; ++i) {
      uint w[Q::WORDS], scale[2], offset[2], out[2][4];
      RawRun<Q>::words(raw[i], run, w);
      RawRun<Q>::terms(raw[i], run, scale, offset);
      GROUP uint *to = slot + (row + 64 * i) * 32;
      UNROLL
      for (int which_half = 0; which_half < 2; ++which_half) {
        uint pieces[2][4]; // near, far
        UNROLL
        for (int v = 0; v < 2; ++v) {
          Q::pairs(w, 2 * which_half + v, scale, offset, out[v]);
          UNROLL
          for (int k = 0; k < 4; ++k)
            pieces[k / 2][2 * v + k % 2] = out[v][k];
        }
        UNROLL
        for (int side = 0; side < 2; ++side)
          store_words(to + ((which * 4 + side * 2 + which_half) ^ row % 8) * 4, pieces[side]);
      }
    }
  }
};
template <int TYPE, typename K, int INPUTS, int ROWS, int STEP> struct PanelFiller {
  typedef BlockFiller<typename Blocks<TYPE>::type, INPUTS, ROWS, STEP> type;
  enum { BLOCK = Blocks<TYPE>::type::BLOCK };
};
template <typename K, int INPUTS, int ROWS, int STEP> struct PanelFiller<1, K, INPUTS, ROWS, STEP> {
  typedef FloatFiller<K, INPUTS, ROWS, STEP> type;
  enum { BLOCK = 1 };
};
template <typename K, int INPUTS, int ROWS, int STEP> struct PanelFiller<30, K, INPUTS, ROWS, STEP> {
  typedef FloatFiller<K, INPUTS, ROWS, STEP> type;
  enum { BLOCK = 1 };
};

// Four SIMD-groups: 64 rows of every slot times N pairs. `slot` and `turn` are where the ring is, and go on.
template <typename K, int N, int STAGES, int SLOT, int DEPTH>
FUNCTION void multiply_slots(const GROUP uint *room, const GROUP uint *x, Slot *slots, int steps, PRIVATE int &slot,
                             PRIVATE int &turn, PRIVATE float *sums) {
  UNROLL
  for (int i = 0; i < N / 2; ++i)
    sums[i] = 0.0f;
  for (int step = 0; step < steps; ++step) {
    await_full<STAGES>(slots, slot, turn);
    begin_products();
    UNROLL
    for (int k = 0; k < 64; k += 16)
      multiply_panels<K, N, 1>(sums, room + slot * SLOT, x + slot * SLOT, k);
    seal_products();
    await_products<DEPTH>();
    if (!DEPTH)
      free_slot<STAGES>(slots, slot);
    else if (step > 0)
      free_slot<STAGES>(slots, slot ? slot - 1 : STAGES - 1);
    if (++slot == STAGES) {
      slot = 0;
      ++turn;
    }
  }
  if (DEPTH) {
    await_products();
    free_slot<STAGES>(slots, slot ? slot - 1 : STAGES - 1);
  }
}

// Where results of pairs go: a SIMD-group keeps in `rows` and `factors` the row of `out` that each pair of its tile has, and
// what that is multiplied by. So stores, after which everything else is read again, wait for nothing.
template <int PAIRS> struct PanelTargets {
  enum { HELD = (PAIRS + 31) / 32 };
  GROUP int *rows;
  GROUP float *factors;
  // Asks for the pairs of a tile, which are wanted when it has been multiplied.
  FUNCTION void open(PRIVATE const Picked &picked, int lane) const {
    simd_barrier(); // until all lanes have done with the tile before
    UNROLL
    for (int i = 0; i < HELD; ++i)
      if (32 * i + lane < picked.count)
        copy_word(reinterpret_cast<Bytes>(picked.order + picked.first + 32 * i + lane),
                  reinterpret_cast<GROUP uint *>(rows + 32 * i + lane));
    seal_copies();
  }
  // With SHARED_OUT rows are ordered by rank.
  template <bool SHARED_OUT> FUNCTION void place(const DEVICE float *shares, int used, int tokens, int count, int lane) const {
    await_copies<0>();
    if (SHARED_OUT) {
      int pairs[HELD];
      float own[HELD];
      UNROLL
      for (int i = 0; i < HELD; ++i) {
        pairs[i] = 32 * i + lane < count ? rows[32 * i + lane] : 0; // which the lane itself asked for
        own[i] = shares[pairs[i]];
      }
      UNROLL
      for (int i = 0; i < HELD; ++i)
        if (32 * i + lane < count) {
          rows[32 * i + lane] = pairs[i] % used * tokens + pairs[i] / used;
          factors[32 * i + lane] = own[i];
        }
    }
    simd_barrier();
  }
};
template <int N, int GATE, bool BIAS, bool SHARED_OUT, typename Y>
FUNCTION void store_panel(PRIVATE const float *sums, const GROUP int *rows, const GROUP float *factors, int count,
                          const DEVICE float *bias, int row, int made, DEVICE Y *out, int lane) {
  const int first = row + lane / 4, second = first + (GATE ? made : 8);
  const bool has_first = first < made, has_second = !GATE && second < made;
  const float low = BIAS && has_first ? bias[first] : 0.0f;
  const float high = BIAS && (GATE ? has_first : has_second) ? bias[second] : 0.0f;
  UNROLL
  for (int j = 0; j < N / 4; ++j) {
    const int t = 8 * (j / 2) + lane % 4 * 2 + j % 2;
    if (t >= count)
      continue;
    float a = sums[4 * (j / 2) + j % 2] + low, b = sums[4 * (j / 2) + 2 + j % 2] + high;
    if (GATE)
      a = gate_with<GATE>(a, b);
    if (SHARED_OUT) {
      a *= factors[t];
      b *= factors[t];
    }
    DEVICE Y *to = out + uint64_t(rows[t]) * made;
    if (has_first)
      to[first] = Y(a);
    if (has_second)
      to[second] = Y(b);
  }
}
