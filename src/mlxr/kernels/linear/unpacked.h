// Blocks of weights that are unpacked in registers, where the matrix units take them; x is in the threadgroup's memory.
//
// A SIMD-group copies units (units.h) to its own ring in the threadgroup's memory. Lane 4 g + t unpacks of rows g and
// g + 8 what it has to hold of 16 columns: 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. So each weight is unpacked once for all
// tokens, and columns keep their order.

// Bytes 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of the sixteen from `first` on.
FUNCTION uint read_pairs(const GROUP uint *row, int first, int t) {
  const GROUP uint8_t *from = reinterpret_cast<const GROUP uint8_t *>(row) + first + 2 * t;
  return load_u16(from) | load_u16(from + 8) << 16;
}
FUNCTION void split_pairs(uint pairs, PRIVATE uint *w) {
  w[0] = pairs & 0x0F0F0F0Fu;
  w[1] = pairs >> 4 & 0x0F0F0F0Fu;
}
FUNCTION uint repeat_pair(float v) { return pack_pair(v, v); }

// What numbers a type's words hold: integers without signs, of which ZERO is zero; or bytes with signs.
template <int OFFSETS_, int ZERO> struct Unsigned {
  enum { OFFSETS = OFFSETS_ };
  static FUNCTION uint widen(uint word, int which) { // 128 + q is exact in bf16, and so is q then
    const uint less = 0xC300u + ZERO;
    return multiply_pairs(widen_bytes(word, which), 0x3F803F80u, less | less << 16);
  }
};
template <int OFFSETS_> struct Signed {
  enum { OFFSETS = OFFSETS_ };
  static FUNCTION uint widen(uint word, int which) { // 128 + the lower bits, less 128 or 256
    return multiply_pairs(widen_bytes(word & 0x80808080u, which), 0xBF80BF80u, widen_bytes(word & 0x7F7F7F7Fu, which));
  }
};

// How a type lies in a unit. `split` gives the near and the far four numbers that a lane holds of a run of a row, and
// `terms` their scales, or with OFFSETS scales and offsets, as pairs; SHARING runs have the same ones.
struct Singly {
  enum { SHARING = 1 };
};
template <typename Q, typename U> struct ScaledByType {
  static FUNCTION void terms(const GROUP uint *unit, int r, int run, uint, PRIVATE uint *step, PRIVATE uint *low) {
    constexpr int EACH = 256 / Q::BLOCK;
    float scale[2], offset[2];
    Q::scales(reinterpret_cast<Bytes>(unit + U::SCALES), 16 * EACH, uint64_t(r * EACH + run / Q::RUNS), run % Q::RUNS,
              scale, offset);
    UNROLL
    for (int i = 0; i < 2; ++i)
      Q::pack_terms(scale[i], offset[i], step + i, low + i);
  }
};
template <typename Q, typename U> struct ScaledInFloats {
  static FUNCTION void terms(const GROUP uint *unit, int r, int run, uint odd, PRIVATE uint *step, PRIVATE uint *low) {
    ScaledByType<Q, U>::terms(unit, r, run, odd, step, low);
    UNROLL
    for (int i = 0; i < 2; ++i)
      step[i] = repeat_pair(bits_to_float(step[i]));
  }
};

template <typename Q> struct PackedGrid;
template <typename Q> struct Packed : PackedGrid<Q> {}; // all but grids are told here

template <typename Q, typename U, int FIRST> struct PackedNibbles : U, ScaledByType<Q, U> {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    split_pairs(read_pairs(unit + r * U::STRIDE, FIRST + 16 * run, t), w);
  }
};
template <> struct Packed<Q4_0> : PackedNibbles<Q4_0, Unit<1, 128, 16>, 0>, Unsigned<0, 8>, Singly {};
template <> struct Packed<Q4_1> : PackedNibbles<Q4_1, Unit<1, 128, 32>, 0>, Unsigned<1, 0>, Singly {};
template <> struct Packed<Affine4<1>> : PackedNibbles<Affine4<1>, Unit<1, 128, 64>, 0>, Unsigned<1, 0>, Singly {};
template <> struct Packed<Affine4<2>> : PackedNibbles<Affine4<2>, Unit<1, 128, 32>, 0>, Unsigned<1, 0> {
  enum { SHARING = 2 };
};
template <> struct Packed<Q4_K> : PackedNibbles<Q4_K, Unit<0, 144>, 16>, Unsigned<1, 0> {
  enum { SHARING = 2 };
};

template <> struct Packed<Q5_K> : Unit<0, 176>, ScaledByType<Q5_K, Unit<0, 176>>, Unsigned<1, 0> {
  enum { SHARING = 2 };
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const uint high = read_pairs(unit + r * STRIDE, 16 + 16 * (run % 2), t);
    split_pairs(read_pairs(unit + r * STRIDE, 48 + 16 * run, t), w);
    w[0] |= spread_bit(high, 2 * (run / 2), 4);
    w[1] |= spread_bit(high, 2 * (run / 2) + 1, 4);
  }
};

template <typename Q, typename U> struct PackedFives : U, ScaledByType<Q, U>, Singly {
  static FUNCTION uint spread(uint bits) {
    return (bits & 1u) << 4 | (bits & 2u) << 11 | (bits & 256u) << 12 | (bits & 512u) << 19;
  }
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const uint high = unit[U::SECOND + r * U::SECOND_STRIDE + run] >> (2 * t);
    split_pairs(read_pairs(unit + r * U::STRIDE, 16 * run, t), w);
    w[0] |= spread(high);
    w[1] |= spread(high >> 16);
  }
};
template <> struct Packed<Q5_0> : PackedFives<Q5_0, Unit<1, 128, 32, 16>>, Unsigned<0, 16> {};
template <> struct Packed<Q5_1> : PackedFives<Q5_1, Unit<1, 128, 32, 32>>, Unsigned<1, 0> {};

template <typename Q, typename U, uint FLIP> struct PackedBytes : U, ScaledByType<Q, U> {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    w[0] = read_pairs(unit + r * U::STRIDE, 32 * run, t) ^ FLIP;
    w[1] = read_pairs(unit + r * U::STRIDE, 32 * run + 16, t) ^ FLIP;
  }
};
template <> struct Packed<Q8_0> : PackedBytes<Q8_0, Unit<1, 256, 16>, 0u>, Signed<0>, Singly {};
template <> struct Packed<Q8_K> : PackedBytes<Q8_K, Unit<1, 256, 4>, 0u>, Signed<0>, Singly {};
template <> struct Packed<Affine8<1>> : PackedBytes<Affine8<1>, Unit<1, 256, 64>, 0x80808080u>, Signed<1>, Singly {};
template <> struct Packed<Affine8<2>> : PackedBytes<Affine8<2>, Unit<1, 256, 32>, 0x80808080u>, Signed<1> {
  enum { SHARING = 2 };
};

template <typename Q, typename U, typename Table> struct PackedTable : U, Signed<0>, Singly {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const uint pairs = read_pairs(unit + r * U::STRIDE, 16 * run, t);
    const uint first = look_up<Table>(pairs & 0xFFFFu), second = look_up<Table>(pairs >> 16);
    w[0] = pick_bytes(first, second, 0x6420u);
    w[1] = pick_bytes(first, second, 0x7531u);
  }
};
template <> struct Packed<IQ4_NL> : PackedTable<IQ4_NL, Unit<1, 128, 16>, IQ4Table>, ScaledInFloats<IQ4_NL, Unit<1, 128, 16>> {};
template <> struct Packed<IQ4_XS> : PackedTable<IQ4_XS, Unit<1, 128, 4, 4>, IQ4Table>, ScaledInFloats<IQ4_XS, Unit<1, 128, 4, 4>> {};
template <> struct Packed<MXFP4> : PackedTable<MXFP4, Unit<1, 128, 8>, FP4Table>, ScaledByType<MXFP4, Unit<1, 128, 8>> {};

// Near numbers of a run are those of eight bytes, far ones of the next.
template <typename Q, typename U> struct PackedNvFp4 : U, Signed<0>, ScaledByType<Q, U>, Singly {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const GROUP uint8_t *from = reinterpret_cast<const GROUP uint8_t *>(unit + r * U::STRIDE) + 16 * run + 2 * t;
    UNROLL
    for (int side = 0; side < 2; ++side)
      w[side] = pick_bytes(look_up<FP4Table>(load_u16(from + 8 * side)), 0u, 0x3120u);
  }
};
template <> struct Packed<NVFP4> : PackedNvFp4<NVFP4, Unit<1, 128, 16>> {};
template <> struct Packed<NVFP4_SCALED> : PackedNvFp4<NVFP4_SCALED, Unit<1, 128, 16, 16>> {};

// E4M3, whose exponents are 120 less than those of bf16.
struct Float8 {
  enum { OFFSETS = 0 };
  static FUNCTION uint widen(uint word, int which) {
    const uint two = pick_bytes(word, 0u, which ? 0x4342u : 0x4140u);
    return multiply_pairs((two & 0x007F007Fu) << 4 | (two & 0x00800080u) << 8, 0x7B807B80u, 0x80008000u);
  }
};
template <> struct Packed<F8_E4M3_128> : Unit<1, 256, 8>, ScaledInFloats<F8_E4M3_128, Unit<1, 256, 8>>, Float8, Singly {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    w[0] = read_pairs(unit + r * STRIDE, 32 * run, t);
    w[1] = read_pairs(unit + r * STRIDE, 32 * run + 16, t);
  }
};

template <> struct Packed<Q2_K> : Unit<1, 64, 16, 4>, ScaledByType<Q2_K, Unit<1, 64, 16, 4>>, Unsigned<1, 0>, Singly {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const uint pairs = read_pairs(unit + r * STRIDE, 32 * (run / 4) + 16 * (run % 2), t) >> (4 * (run / 2 % 2));
    w[0] = pairs & 0x03030303u;
    w[1] = pairs >> 2 & 0x03030303u;
  }
};

template <> struct Packed<Q3_K> : Unit<2, 64, 32, 12, 2>, Unsigned<0, 4>, Singly {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const uint high = read_pairs(unit + SECOND + r * SECOND_STRIDE, 16 * (run % 2), t);
    const uint pairs = read_pairs(unit + r * STRIDE, 32 * (run / 4) + 16 * (run % 2), t) >> (4 * (run / 2 % 2));
    const uint bit = 4 * (run / 4) + 2 * (run / 2 % 2);
    w[0] = (pairs & 0x03030303u) | spread_bit(high, bit, 2);
    w[1] = (pairs >> 2 & 0x03030303u) | spread_bit(high, bit + 1, 2);
  }
  static FUNCTION void terms(const GROUP uint *unit, int r, int run, uint odd, PRIVATE uint *step, PRIVATE uint *) {
    const float d = read_half(unit[LAST + r], odd);
    Bytes groups = reinterpret_cast<Bytes>(unit + THIRD + 3 * r);
    UNROLL
    for (int i = 0; i < 2; ++i)
      step[i] = repeat_pair(d * Q3_K::scale_of(groups, Q3_K::group(run) + 2 * i));
  }
};

template <> struct Packed<Q6_K> : Unit<2, 128, 64, 16, 2>, Unsigned<0, 32>, Singly {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const uint high = read_pairs(unit + SECOND + r * SECOND_STRIDE, 32 * (run / 4) + 16 * (run % 2), t);
    const uint more = high >> (2 * (run % 4 / 2));
    split_pairs(read_pairs(unit + r * STRIDE, 16 * run, t), w);
    w[0] |= (more & 0x03030303u) << 4;
    w[1] |= more & 0x30303030u;
  }
  static FUNCTION void terms(const GROUP uint *unit, int r, int run, uint odd, PRIVATE uint *step, PRIVATE uint *) {
    const float d = read_half(unit[LAST + r], odd);
    const uint shift = 8 * (run % 4);
    UNROLL
    for (int i = 0; i < 2; ++i)
      step[i] = repeat_pair(d * float((signed char)(unit[THIRD + 4 * r + 2 * (run / 4) + i] >> shift)));
  }
};

template <> struct Packed<TQ2_0> : Unit<1, 64, 0, 0, 2>, Unsigned<0, 1>, Singly {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    Packed<Q2_K>::split(unit, r, run, t, w); // whose rows are as long
  }
  static FUNCTION void terms(const GROUP uint *unit, int r, int, uint odd, PRIVATE uint *step, PRIVATE uint *) {
    step[0] = step[1] = repeat_pair(read_half(unit[LAST + r], odd));
  }
};

template <> struct Packed<TQ1_0> : Unit<1, 48, 4, 0, 2>, Unsigned<0, 1>, Singly {
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const GROUP uint *row = unit + r * STRIDE;
    UNROLL
    for (int side = 0; side < 2; ++side)
      w[side] = take_digit(read_pairs(row, run < 5 ? 16 * side : 32, t), run < 5 ? run : 2 * (run - 5) + side % 2);
    if (run == 7) {
      const uint last = unit[SECOND + r], shift = 16 * (t % 2);
      w[1] = (take_digit(last, t / 2) >> shift & 0xFFFFu) | take_digit(last, t / 2 + 2) >> shift << 16;
    }
  }
  static FUNCTION void terms(const GROUP uint *unit, int r, int, uint odd, PRIVATE uint *step, PRIVATE uint *) {
    step[0] = step[1] = repeat_pair(read_half(unit[LAST + r], odd));
  }
};

// Grids, whose numbers a lane looks up in the order in which it holds them.
template <typename Q> struct PackedGrid : GridUnit<Q>, Signed<0>, Singly {
  typedef GridUnit<Q> U;
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const GridPlanes p = U::planes(unit, r, 0u);
    const uint signs = Q::signs(p, run), shift = 16 * (t % 2);
    UNROLL
    for (int side = 0; side < 2; ++side) {
      const int quad = 4 * side + t / 2;
      const uint low = Q::quad(p, run, quad, signs) >> shift, high = Q::quad(p, run, quad + 2, signs) >> shift;
      w[side] = Q::signed_bytes((low & 0xFFFFu) | high << 16);
    }
  }
  static FUNCTION void terms(const GROUP uint *unit, int r, int run, uint odd, PRIVATE uint *step, PRIVATE uint *) {
    const GridPlanes p = U::planes(unit, r, odd);
    UNROLL
    for (int side = 0; side < 2; ++side)
      step[side] = repeat_pair(Q::step(p, run, side));
  }
};

// Half the entries of the table of a row: those of its first runs, or with SIDE 1 of its last ones.
template <typename Q> struct Table {
  static FUNCTION void fill(const GROUP uint *unit, int r, int side, uint odd, PRIVATE uint (*terms)[4]) {
    constexpr int ENTRIES = 4 / Packed<Q>::SHARING;
    UNROLL
    for (int i = 0; i < ENTRIES; ++i)
      Packed<Q>::terms(unit, r, Packed<Q>::SHARING * (side * ENTRIES + i), odd, terms[i], terms[i] + 2);
  }
};
template <typename Q> struct TableOfSixes {
  static FUNCTION float widen(uint bytes, int which) { // exactly
    return bits_to_float(pick_bytes(bytes, 0x4B000000u, 0x7650u + which)) - 8388608.0f;
  }
  static FUNCTION void fill(const GROUP uint *unit, int r, int side, uint, PRIVATE uint (*terms)[4]) {
    uint w[4];
    read_words(unit + r * Packed<Q>::STRIDE, w);
    const float d = half_bits_to_float(w[0] & 0xFFFFu), least = -half_bits_to_float(w[0] >> 16);
    const uint steps = side ? (w[3] & 0x0F0F0F0Fu) | (w[1] >> 2 & 0x30303030u) : w[1] & 0x3F3F3F3Fu;
    const uint lows = side ? (w[3] >> 4 & 0x0F0F0F0Fu) | (w[2] >> 2 & 0x30303030u) : w[2] & 0x3F3F3F3Fu;
    UNROLL
    for (int i = 0; i < 2; ++i) {
      UNROLL
      for (int k = 0; k < 2; ++k) {
        terms[i][k] = repeat_pair(d * widen(steps, 2 * i + k));
        terms[i][2 + k] = repeat_pair(least * widen(lows, 2 * i + k));
      }
    }
  }
};
template <> struct Table<Q4_K> : TableOfSixes<Q4_K> {};
template <> struct Table<Q5_K> : TableOfSixes<Q5_K> {};

// How x comes to the slots: 64 columns of N tokens each, in the order in which units from `start` on are taken. Where a row
// has no whole number of units, the last one begins with columns of the one before, for which x is zero.
template <int COLUMNS> struct Circle {
  int begin, start, end;
  FUNCTION int steps() const { return 4 * (end - begin); }
  FUNCTION int column(int step) const { // COLUMNS for zeros
    const int before_end = 4 * (end - start), rest = COLUMNS % 256;
    const int column = 64 * (step < before_end ? 4 * start + step : 4 * begin + step - before_end);
    if (rest == 0 || column < COLUMNS - rest)
      return column;
    return column < COLUMNS - 2 * rest + 256 ? COLUMNS : column - 256 + rest;
  }
};

// By FILLERS SIMD-groups, each lane of which brings one of every 4 FILLERS rows; AHEAD slots are under way.
template <bool BOXED, int N, int INPUTS, int X_STAGES, int FILLERS, int AHEAD> struct XFiller {
  enum { ARRIVALS = FILLERS };
  template <typename X>
  static FUNCTION void fill(const DEVICE X *x, PRIVATE const Circle<INPUTS> &circle, int first_token, int all,
                            GROUP uint *room, PRIVATE Slot *slots, int thread_id) {
    const int row = thread_id / 8, piece = thread_id % 8, steps = circle.steps();
    const int tokens = all - first_token < N ? all - first_token : N;
    const DEVICE X *from = x + uint64_t(first_token + row) * INPUTS + 8 * piece;
    for (int i = 0; i < steps; ++i) {
      const int column = circle.column(i);
      if (i >= X_STAGES)
        await_free<X_STAGES>(slots, i % X_STAGES, i / X_STAGES);
      UNROLL
      for (int first = 0; first < N; first += 4 * FILLERS) { // sums of rows that are not there are not read
        GROUP uint *to = room + i % X_STAGES * (N * 32) + (first + row) * 32 + (piece ^ ((first + row) & 7)) * 4;
        if (INPUTS % 256 && column == INPUTS) {
          const uint zeros[4] = {0u, 0u, 0u, 0u};
          store_words(to, zeros);
        } else if (first + row < tokens) {
          copy_words(reinterpret_cast<Bytes>(from + column + first * INPUTS), to);
        }
      }
      seal_copies();
      if (i >= AHEAD) {
        await_copies<AHEAD>();
        fill_slot<X_STAGES>(slots, (i - AHEAD) % X_STAGES);
      }
    }
    await_copies<0>();
    for (int i = steps > AHEAD ? steps - AHEAD : 0; i < steps; ++i)
      fill_slot<X_STAGES>(slots, i % X_STAGES);
  }
};

// By one lane, in boxes, as many as there are slots.
template <int N, int INPUTS, int X_STAGES, int FILLERS, int AHEAD>
struct XFiller<true, N, INPUTS, X_STAGES, FILLERS, AHEAD> {
  enum { ARRIVALS = 1 };
  template <typename X>
  static FUNCTION void fill(const X &x, PRIVATE const Circle<INPUTS> &circle, int first_token, int all, GROUP uint *room,
                            PRIVATE Slot *slots, int thread_id) {
    if (thread_id == 0)
      for (int i = 0; i < circle.steps(); ++i) {
        const int slot = i % X_STAGES;
        if (i >= X_STAGES)
          await_free<X_STAGES>(slots, slot, i / X_STAGES);
        expect_bytes(slots, slot, N * 128);
        bring_box<N, 1, true>(x, all, INPUTS, first_token, circle.column(i), room + slot * (N * 32), slots, slot);
      }
  }
};

// The work of a SIMD-group, one of four: its part of HELD tiles of 64 rows, units [begin, end) of the columns in a circle
// from any of them on, times N tokens, whose columns pass through the slots of x, 64 to a slot. Scales of a unit go
// through a table.
template <typename Q, int COLUMNS, int N, int HELD, int STAGES, int X_STAGES, int DEPTH> struct Unpacked {
  typedef Packed<Q> P;
  enum {
    ENTRIES = 8 / P::SHARING,
    EACH = P::OFFSETS ? 4 : 2,
    PITCH = ENTRIES * EACH + EACH,
    SCALED = 16 * PITCH,
    WORDS = HELD * (STAGES * P::WORDS + SCALED),
    SPAN = Q::DELTA >= 64 ? 2 : 1 // slots that a step needs
  };
  Bytes weights;
  uint64_t total;
  typedef typename P::template Of<COLUMNS> Of;
  uint rows[HELD], jump, from[Of::COPIES];
  int begin, end, asked, left, lane;
  GROUP uint *ring;
  FUNCTION void ask(int stage) {
    if (left > 0)
      UNROLL
      for (int h = 0; h < HELD; ++h)
        Of::bring(weights, total, rows[h], asked, from, ring + (stage * HELD + h) * P::WORDS, lane);
    asked = find_next(asked);
    --left;
    seal_copies();
  }
  FUNCTION int find_next(int unit) const { return unit + 1 < end ? unit + 1 : begin; }
  FUNCTION void open(int start) {
    asked = start;
    Of::place(jump, lane, from);
    UNROLL
    for (int i = 0; i < Of::COPIES; ++i)
      hold_word(from[i]); // once, and not again wherever they are needed
    UNROLL
    for (int i = 0; i < STAGES - 1; ++i)
      ask(i);
  }
  FUNCTION void fill_table(const GROUP uint *unit, int h, int at, GROUP uint *table) const {
    const int r = lane / 2;
    const uint odd = ((rows[h] + r + (r < 8 ? 0u : jump)) * (COLUMNS / 256) + at) % 2;
    uint terms[ENTRIES / 2][4];
    Table<Q>::fill(unit, r, lane % 2, odd, terms);
    GROUP uint *to = table + r * PITCH + lane % 2 * (ENTRIES / 2) * EACH;
    UNROLL
    for (int i = 0; i < ENTRIES / 2; ++i) {
      if (P::OFFSETS)
        store_words(to + i * EACH, terms[i]);
      else
        to[i * EACH] = terms[i][0], to[i * EACH + 1] = terms[i][1];
    }
  }
  // Two runs of rows g and g + 8: 16 near columns of the first, 16 far ones, then those of the second.
  static FUNCTION void unpack(const GROUP uint *unit, const GROUP uint *table, int step, int lane,
                              PRIVATE uint (*a)[4]) {
    const int g = lane / 4, t = lane % 4;
    UNROLL
    for (int j = 0; j < 2; ++j) {
      const int run = 2 * step + j;
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const int r = g + 8 * i;
        uint w[2], terms[4];
        const GROUP uint *entry = table + r * PITCH + run / P::SHARING * EACH;
        if (P::OFFSETS)
          read_words(entry, terms);
        else
          terms[0] = entry[0], terms[1] = entry[1];
        P::split(unit, r, run, t, w);
        UNROLL
        for (int side = 0; side < 2; ++side) {
          UNROLL
          for (int which_half = 0; which_half < 2; ++which_half)
            a[2 * j + side][2 * which_half + i] = multiply_pairs(P::widen(w[side], which_half), terms[side],
                                                           P::OFFSETS ? terms[2 + side] : 0x80008000u);
        }
      }
    }
  }
  FUNCTION void run(int start, const GROUP uint *x_room, PRIVATE Slot *x_slots, PRIVATE float (*sums)[N / 2]) {
    GROUP uint *table = ring + HELD * STAGES * P::WORDS;
    uint a[DEPTH + 1][4][4];
    int stage = 0, x_slot = 0, x_turn = 0, at = start;
    for (int i = begin; i < end; ++i) {
      await_copies<STAGES - 2>();
      simd_barrier();
      ask(stage ? stage - 1 : STAGES - 1);
      const GROUP uint *unit = ring + stage * HELD * P::WORDS;
      UNROLL
      for (int h = 0; h < HELD; ++h)
        fill_table(unit + h * P::WORDS, h, at, table + h * SCALED);
      simd_barrier();
      UNROLL
      for (int step = 0; step < 4; ++step) {
        UNROLL
        for (int s = step; s < (step % SPAN ? 0 : step + SPAN); ++s) {
          const bool over = x_slot + s >= X_STAGES;
          await_full<X_STAGES>(x_slots, over ? x_slot + s - X_STAGES : x_slot + s, over ? x_turn + 1 : x_turn);
        }
        UNROLL
        for (int h = 0; h < HELD; ++h) {
          PRIVATE uint (*held)[4] = a[(step * HELD + h) % (DEPTH + 1)];
          unpack(unit + h * P::WORDS, table + h * SCALED, step, lane, held);
          UNROLL
          for (int i = 0; i < 4; ++i)
            hold_words(held[i]);
          begin_products();
          UNROLL
          for (int j = 0; j < 2; ++j) {
            UNROLL
            for (int side = 0; side < 2; ++side) {
              const int column = Q::first((2 * step + j) % Q::RUNS) + (2 * step + j) / Q::RUNS * Q::BLOCK + side * Q::DELTA;
              const int slot = x_slot + column / 64;
              multiply_held<N>(sums[h], held[2 * j + side],
                               x_room + (slot >= X_STAGES ? slot - X_STAGES : slot) * (N * 32), column % 64);
            }
          }
          seal_products();
          if (step == 3 && h == HELD - 1)
            await_products<0>(); // nothing is under way where the loop begins again
          else
            await_products<DEPTH>();
          // steps whose products are all in
          const int in = step * HELD + h + (DEPTH && !(step == 3 && h == HELD - 1) ? 0 : 1), done = in / HELD;
          const int before = step * HELD + h == 0 ? 0 : (step * HELD + h - 1 + (DEPTH ? 0 : 1)) / HELD;
          UNROLL
          for (int s = before / SPAN * SPAN; s < done / SPAN * SPAN; ++s)
            free_slot<X_STAGES>(x_slots, x_slot + s >= X_STAGES ? x_slot + s - X_STAGES : x_slot + s);
        }
      }
      at = find_next(at);
      stage = stage + 1 < STAGES ? stage + 1 : 0;
      x_slot += 4;
      if (x_slot >= X_STAGES) {
        x_slot -= X_STAGES;
        ++x_turn;
      }
    }
  }
};

template <typename Q, typename U> struct PackedTwos : U, ScaledByType<Q, U>, Unsigned<0, 1>, Singly {
  static FUNCTION uint pick(uint bits) { // columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of sixteen
    return (bits & 0x30003u) | (bits & 0xC000Cu) << 6;
  }
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const GROUP uint *row = unit + r * U::STRIDE + 2 * run;
    w[0] = pick(row[0] >> (4 * t));
    w[1] = pick(row[1] >> (4 * t));
  }
};
template <> struct Packed<Q2_0> : PackedTwos<Q2_0, Unit<1, 64, 8>> {};
template <> struct Packed<PQ2_0> : PackedTwos<PQ2_0, Unit<1, 64, 4>> {};

template <> struct Packed<Q1_0> : Unit<1, 32, 4>, ScaledByType<Q1_0, Unit<1, 32, 4>>, Unsigned<0, 1>, Singly {
  static FUNCTION uint pick(uint bits) {
    return (bits & 1u) << 1 | (bits & 2u) << 8 | (bits & 256u) << 9 | (bits & 512u) << 16;
  }
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const uint bits = unit[r * STRIDE + run] >> (2 * t);
    w[0] = pick(bits);
    w[1] = pick(bits >> 16);
  }
};

template <> struct Packed<PTQ1_0> : Unit<1, 48, 8>, ScaledByType<PTQ1_0, Unit<1, 48, 8>>, Unsigned<0, 1>, Singly {
  static FUNCTION uint both(uint pair, int first) { // digits of two bytes, and the next ones
    return (take_digit(pair, first) & 0xFFFFu) | take_digit(pair, first + 1) << 16;
  }
  static FUNCTION void split(const GROUP uint *unit, int r, int run, int t, PRIVATE uint *w) {
    const int block = run / 4, part = run % 4;
    const GROUP uint *row = unit + r * STRIDE + 6 * block;
    const uint pairs = read_pairs(row, 0, t);
    const uint pair = load_u16(reinterpret_cast<const GROUP uint8_t *>(row) + 16 + 2 * t);
    const uint last = unit[SECOND + r * SECOND_STRIDE + block] & 0xFFFFu;
    w[0] = part < 3 ? take_digit(pairs, 2 * part) : both(pair, 2);
    w[1] = part < 2 ? take_digit(pairs, 2 * part + 1) : both(pair, 0);
    if (part == 3)
      w[1] = (take_digit(pair, 4) & 0xFFFFu) | take_digit(last, t) << 16;
  }
};
