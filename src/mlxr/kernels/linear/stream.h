// One row of x times a weight, on the matrix units in integers.
//
// x is in the threadgroup's memory as integers 256 high + low of 16 bits, 256 columns to a scale; a weight's bytes meet
// high and low ones as they are, and sums are integers until a block is done. Columns of b that one row leaves free
// keep apart what has scales of its own.
// Each SIMD-group has its own part of the rows and columns of its threadgroup, and a ring in the threadgroup's memory to
// which blocks are copied while others are multiplied.

// A unit is UNIT blocks. The last unit of a row that has no whole number of them ends with the row (units.h): it begins
// with REPEATED columns of the one before, where x is 0.
template <int COLUMNS, int UNIT> struct Row {
  enum {
    BLOCKS = (COLUMNS + 256 * UNIT - 1) / (256 * UNIT) * UNIT,
    WHOLE = COLUMNS / (256 * UNIT) * UNIT, // blocks of whole units
    REPEATED = 256 * BLOCKS - COLUMNS,
    HIGH = 0, // in words
    LOW = 64 * BLOCKS,
    ZEROS = 128 * BLOCKS,
    MEANS = ZEROS + 64, // of 32 columns: for each block high and low bytes of four, then of the other four
    SCALES = MEANS + 4 * BLOCKS,
    WORDS = SCALES + (BLOCKS + 3) / 4 * 4
  };
};

// Eight columns of one block for every lane, as integers.
template <typename R> FUNCTION void place_block(PRIVATE const float *v, GROUP uint *row, int block, int lane) {
  uint top = 0u; // as bits, so that what is not a number stays so
  UNROLL
  for (int i = 0; i < 8; ++i) {
    const uint bits = float_to_bits(v[i]) & 0x7FFFFFFFu;
    top = bits > top ? bits : top;
  }
  UNROLL
  for (uint mask = 1; mask < 32; mask *= 2) {
    const uint other = float_to_bits(shuffle_xor(bits_to_float(top), mask));
    top = other > top ? other : top;
  }
  // scales are powers of two, the least of those with which the largest is below 127.5 * 256
  const uint exponent = (top + 0x20000u) >> 23, least = 15u;
  const float inverse = bits_to_float(exponent < least ? 0u : (268u - exponent) << 23);
  uint n[8], sum = 0u; // the bits of 1.5 * 2^23 + n end with those of n
  UNROLL
  for (int i = 0; i < 8; ++i) {
    n[i] = float_to_bits(v[i] * inverse + 12582912.0f);
    sum += n[i];
  }
  GROUP uint *to = row + 64 * block + 2 * lane;
  UNROLL
  for (int i = 0; i < 2; ++i) {
    to[R::LOW + i] = join_bytes<0>(n[4 * i], n[4 * i + 1], n[4 * i + 2], n[4 * i + 3]);
    to[R::HIGH + i] = join_bytes<1>(n[4 * i] + 128u, n[4 * i + 1] + 128u, n[4 * i + 2] + 128u, n[4 * i + 3] + 128u);
  }
  float all = float(int(sum - 8u * 0x4B400000u));
  all += shuffle_xor(all, 1);
  all += shuffle_xor(all, 2);
  const uint mean = float_to_bits(all / 32.0f + 12582912.0f) - 0x4B400000u;
  if (lane % 4 == 0) {
    GROUP uint8_t *means = reinterpret_cast<GROUP uint8_t *>(row + R::MEANS + 4 * block) + lane / 16 * 8 + lane / 4 % 4;
    means[0] = uint8_t((mean + 128u) >> 8);
    means[4] = uint8_t(mean);
  }
  if (lane == 0)
    row[R::SCALES + block] = exponent < least ? 0u : exponent < 255u ? (exponent - 14u) << 23 : 0x7FC00000u;
}

// Makes integers of x, or of `norm` times x. A SIMD-group takes every SIMDS-th block, a lane eight columns of it; all of
// them are asked for at once, those of `norm` before x is there.
template <typename R, bool NORM, int SIMDS> struct Bringer {
  enum { MINE = (R::BLOCKS + SIMDS - 1) / SIMDS };
  float gain[NORM ? MINE : 1][8];
  int simd, lane;
  FUNCTION Bringer(const DEVICE float *norm, int simd_, int lane_) : simd(simd_), lane(lane_) {
    UNROLL
    for (int i = 0; i < (NORM ? MINE : 0); ++i)
      load<8>(norm + column(i), gain[i]);
  }
  FUNCTION int place(int i) const { // blocks that are not there are the last one again
    const int block = simd + i * SIMDS;
    return block < R::BLOCKS ? block : R::BLOCKS - 1;
  }
  FUNCTION int column(int i) const { // the first of this lane
    return 256 * place(i) + 8 * lane - (place(i) < R::WHOLE ? 0 : int(R::REPEATED));
  }
  // The sum of the squares that this lane has seen.
  template <typename X> FUNCTION float bring(const DEVICE X *x, GROUP uint *row) {
    float v[MINE][8], squares = 0.0f;
    UNROLL
    for (int i = 0; i < MINE; ++i)
      load<8>(x + column(i), v[i]);
    UNROLL
    for (int i = 0; i < MINE; ++i) {
      UNROLL
      for (int k = 0; k < (R::REPEATED ? 8 : 0); ++k)
        v[i][k] = place(i) >= R::WHOLE && column(i) < 256 * R::WHOLE ? 0.0f : v[i][k];
      const bool counts = simd + i * SIMDS < R::BLOCKS;
      UNROLL
      for (int k = 0; k < (NORM ? 8 : 0); ++k) {
        squares += counts ? v[i][k] * v[i][k] : 0.0f;
        v[i][k] *= gain[i][k];
      }
      if (counts)
        place_block<R>(v[i], row, place(i), lane);
    }
    for (int i = 32 * simd + lane; i < 64; i += 32 * SIMDS)
      row[R::ZEROS + i] = 0u;
    return squares;
  }
};

// How a type streams. A unit is UNIT blocks of each of 16 rows; the second eight rows are `jump` rows further on.
// `fetch` asks for a unit, of a row whose number is a multiple of eight, `read` takes what a lane needs of one that is
// there, of rows g and g + 8; `add` multiplies that.
template <typename Q> struct StreamedGrid;
template <typename Q> struct Streamed : StreamedGrid<Q> {}; // all but grids are told here and in stream_runs.h

// Blocks with six-bit scales and minima, of 4 bits or with a fifth one, BLOCK_WORDS each of which FIRST are in front of
// the nibbles.
template <bool FIVE> struct StreamedSixes {
  enum { UNIT = 2, BLOCK_WORDS = FIVE ? 44 : 36, FIRST = FIVE ? 12 : 4, PIECES = BLOCK_WORDS / 2, REST = PIECES - 16 };
  enum { STRIDE = FIVE ? 112 : 80, WORDS = 16 * STRIDE }; // in words; rows 64 bytes apart in the banks
  template <int COLUMNS>
  static FUNCTION void fetch(Bytes base, uint64_t, uint row, uint jump, int unit, GROUP uint *to, int lane) {
    constexpr uint ROW = COLUMNS / 64 * BLOCK_WORDS;
    const uint first = COLUMNS % 512 && unit == COLUMNS / 512 ? ROW - 8 * BLOCK_WORDS : 8 * BLOCK_WORDS * unit;
    Bytes base_row = base + uint64_t(row) * ROW + first;
    const uint further = jump * ROW;
    UNROLL
    for (int i = 0; i < 8; ++i) {
      const int r = 2 * i + lane / 16;
      stream_words(base_row + r * ROW + (i < 4 ? 0u : further) + 16 * (lane % 16), to + r * STRIDE + 4 * (lane % 16));
    }
    UNROLL
    for (int i = 0; i < REST / 2; ++i) {
      const int r = (32 * i + lane) / REST, p = (32 * i + lane) % REST;
      stream_words(base_row + r * ROW + (r < 8 ? 0u : further) + 256 + 16 * p, to + r * STRIDE + 64 + 4 * p);
    }
  }
  struct Words {
    uint head[UNIT][2][4], q[UNIT][2][2][4], fifth[FIVE ? UNIT : 1][2][4];
  };
  template <int COLUMNS> static FUNCTION void read(const GROUP uint *unit, int, int lane, PRIVATE Words &w) {
    UNROLL
    for (int b = 0; b < UNIT; ++b) {
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const GROUP uint *from = unit + (lane / 4 + 8 * i) * STRIDE + BLOCK_WORDS * b;
        read_words(from, w.head[b][i]);
        read_words(from + FIRST + 4 * (lane % 4), w.q[b][i][0]);
        read_words(from + FIRST + 16 + 4 * (lane % 4), w.q[b][i][1]);
        if (FIVE)
          read_words(from + 4 + 4 * (lane % 2), w.fifth[b][i]);
      }
    }
  }
  // Four near numbers and four far ones, these times 16 where there is no fifth bit, of run t or 4 + t.
  static FUNCTION uint near_of(PRIVATE const Words &w, int b, int i, int j, int v, int t) {
    const uint low = w.q[b][i][j][v] & 0x0F0F0F0Fu;
    return FIVE ? low | spread_bit(w.fifth[FIVE ? b : 0][i][v], uint(2 * (t / 2) + 4 * j), 4) : low;
  }
  static FUNCTION uint far_of(PRIVATE const Words &w, int b, int i, int j, int v, int t) {
    const uint word = w.q[b][i][j][v];
    if (!FIVE)
      return word & 0xF0F0F0F0u;
    return (word >> 4 & 0x0F0F0F0Fu) | spread_bit(w.fifth[FIVE ? b : 0][i][v], uint(2 * (t / 2) + 4 * j + 1), 4);
  }
  // b has near and far of a pair of runs, which share their scales, in columns of their own, high and low: 4 far + 2 low
  // + pair. So lane t has the sums of both pairs.
  template <int COLUMNS>
  static FUNCTION void add(PRIVATE const Words &w, const GROUP uint *x, int block, int lane, PRIVATE float *sums) {
    typedef Row<COLUMNS, UNIT> R;
    const int g = lane / 4, t = lane % 4;
    const bool meets = g % 2 == t / 2;
    const int at = (g / 2 % 2 ? R::LOW : R::HIGH) + 16 * (t / 2) + 4 * (t % 2);
    const GROUP uint *near = meets && g < 4 ? x + at + 64 * block : x + R::ZEROS;
    const GROUP uint *far = meets && g >= 4 ? x + at + 64 * block + 8 : x + R::ZEROS;
    const int step = meets && g < 4 ? 64 : 0, far_step = meets && g >= 4 ? 64 : 0;
    const float whole_part = t % 2 ? 1.0f : 256.0f, part = FIVE || t < 2 ? whole_part : 0.0625f * whole_part;
    const float low_part = t % 2 ? 32.0f : 8192.0f;
    UNROLL
    for (int b = 0; b < UNIT; ++b) {
      PRIVATE const uint (*head)[4] = w.head[b];
      int whole[2] = {0, 0};
      UNROLL
      for (int j = 0; j < 2; ++j) {
        uint n[4], f[4];
        read_words(near + b * step + 32 * j, n);
        read_words(far + b * far_step + 32 * j, f);
        int c[4] = {0, 0, 0, 0};
        UNROLL
        for (int v = 0; v < 4; v += 2) {
          const uint low[4] = {near_of(w, b, 0, j, v, t), near_of(w, b, 1, j, v, t), near_of(w, b, 0, j, v + 1, t),
                               near_of(w, b, 1, j, v + 1, t)};
          const uint high[4] = {far_of(w, b, 0, j, v, t), far_of(w, b, 1, j, v, t), far_of(w, b, 0, j, v + 1, t),
                                far_of(w, b, 1, j, v + 1, t)};
          multiply_bytes(c, low, n + v);
          multiply_bytes(c, high, f + v);
        }
        UNROLL
        for (int i = 0; i < 2; ++i) {
          const uint steps = (j ? (head[i][3] & 0x0F0F0F0Fu) | (head[i][1] >> 2 & 0x30303030u)
                                : head[i][1] & 0x3F3F3F3Fu) >> (8 * (t / 2));
          whole[i] += c[2 * i] * int(steps & 255u) + c[2 * i + 1] * int(steps >> 16 & 255u);
        }
      }
      const uint mean = x[R::MEANS + 4 * (block + b) + t];
      const float scale = bits_to_float(x[R::SCALES + block + b]);
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint lows = t / 2 ? (head[i][3] >> 4 & 0x0F0F0F0Fu) | (head[i][2] >> 2 & 0x30303030u)
                                : head[i][2] & 0x3F3F3F3Fu;
        const float d = half_bits_to_float(head[i][0] & 0xFFFFu), least = half_bits_to_float(head[i][0] >> 16);
        sums[i] += scale * (d * (float(whole[i]) * part) - least * (float(dot_bytes(lows, mean)) * low_part));
      }
    }
  }
};
template <> struct Streamed<Q4_K> : StreamedSixes<false> {};
template <> struct Streamed<Q5_K> : StreamedSixes<true> {};

template <> struct Streamed<Q6_K> {
  enum { UNIT = 1, STRIDE = 48, HIGH = 16 * STRIDE, HIGH_STRIDE = 24, GROUPS = HIGH + 16 * HIGH_STRIDE };
  enum { HALVES = GROUPS + 64, WORDS = HALVES + 16 };
  template <int COLUMNS>
  static FUNCTION void fetch(Bytes base, uint64_t total, uint row, uint jump, int unit, GROUP uint *to, int lane) {
    constexpr uint BLOCKS = COLUMNS / 256;
    const uint block = row * BLOCKS + unit;
    Bytes low = field<0, 128>(base, total, block), high = field<128, 64>(base, total, block);
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * i + lane / 8;
      stream_words(low + (r + (i < 2 ? 0u : jump)) * BLOCKS * 128 + 16 * (lane % 8), to + r * STRIDE + 4 * (lane % 8));
    }
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = 8 * i + lane / 4;
      stream_words(high + (r + (i < 1 ? 0u : jump)) * BLOCKS * 64 + 16 * (lane % 4), to + HIGH + r * HIGH_STRIDE + 4 * (lane % 4));
    }
    if (lane < 16) {
      const uint other = block + (lane + (lane < 8 ? 0u : jump)) * BLOCKS;
      stream_words(field<192, 16>(base, total, other), to + GROUPS + 4 * lane);
      copy_word(field<208, 2>(base, total, other & ~1u), to + HALVES + lane); // two neighbours, one of which is meant
    }
  }
  struct Words {
    uint q[2][2][4], h[2][2][4], groups[2][2], halves[2];
  };
  template <int COLUMNS> static FUNCTION void read(const GROUP uint *unit, int, int lane, PRIVATE Words &w) {
    const int t = lane % 4;
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const int r = lane / 4 + 8 * i;
      UNROLL
      for (int j = 0; j < 2; ++j) {
        read_words(unit + r * STRIDE + 16 * j + 4 * t, w.q[i][j]);
        read_words(unit + HIGH + r * HIGH_STRIDE + 8 * j + 4 * (t % 2), w.h[i][j]);
        w.groups[i][j] = unit[GROUPS + 4 * r + 2 * j + t / 2];
      }
      w.halves[i] = unit[HALVES + r];
    }
  }
  // b has near runs in columns 0 to 3 and far ones in 4 to 7; high and low are apart. Lane t has columns 2 t and 2 t + 1.
  template <int COLUMNS>
  static FUNCTION void add(PRIVATE const Words &w, const GROUP uint *x, int block, int lane, PRIVATE float *sums) {
    typedef Row<COLUMNS, UNIT> R;
    const int g = lane / 4, t = lane % 4;
    const GROUP uint *near = g == t ? x + 64 * block + 4 * t : x + R::ZEROS;
    const GROUP uint *far = g == t + 4 ? x + 64 * block + 16 + 4 * t : x + R::ZEROS;
    const int near_low = g == t ? int(R::LOW) : 0, far_low = g == t + 4 ? int(R::LOW) : 0;
    int high[2] = {0, 0}, low[2] = {0, 0};
    UNROLL
    for (int j = 0; j < 2; ++j) {
      uint n[2][4], f[2][4];
      read_words(near + 32 * j, n[0]);
      read_words(near + near_low + 32 * j, n[1]);
      read_words(far + 32 * j, f[0]);
      read_words(far + far_low + 32 * j, f[1]);
      int c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
      UNROLL
      for (int v = 0; v < 4; v += 2) {
        uint a[4], b[4]; // four times q - 32
        UNROLL
        for (int k = 0; k < 4; ++k) {
          const uint word = w.q[k % 2][j][v + k / 2], more = w.h[k % 2][j][v + k / 2] >> (2 * (t / 2));
          a[k] = ((word << 2 & 0x3C3C3C3Cu) ^ 0x80808080u) ^ (more << 6 & 0xC0C0C0C0u);
          b[k] = ((word >> 2 & 0x3C3C3C3Cu) ^ 0x80808080u) ^ (more << 2 & 0xC0C0C0C0u);
        }
        multiply_signed_bytes(c, a, n[0] + v);
        multiply_signed_bytes(d, a, n[1] + v);
        multiply_signed_bytes(c, b, f[0] + v);
        multiply_signed_bytes(d, b, f[1] + v);
      }
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const uint groups = w.groups[i][j] >> (16 * (t % 2));
        const int first = int((signed char)(groups)), second = int((signed char)(groups >> 8));
        high[i] += c[2 * i] * first + c[2 * i + 1] * second;
        low[i] += d[2 * i] * first + d[2 * i + 1] * second;
      }
    }
    const float scale = 0.25f * bits_to_float(x[R::SCALES + block]);
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const float d = half_bits_to_float((block + g * (COLUMNS / 256)) % 2 ? w.halves[i] >> 16 : w.halves[i] & 0xFFFFu);
      sums[i] += scale * d * (256.0f * float(high[i]) + float(low[i]));
    }
  }
};

// Where the tiles of a threadgroup are, and where it has x: the first `split` tiles are rows of `first` from `row` on,
// MADE each, the others those of `second` from 0 on, and meet another row of x, `apart` words further on. The second
// eight rows of a tile are `jump` rows further on.
template <int MADE> struct TilePlaces {
  Bytes first, second;
  int row, jump, split, apart;
  FUNCTION Bytes weights(int tile) const { return tile < split ? first : second; }
  FUNCTION uint row_of(int tile) const { return uint(tile < split ? row + tile * MADE : (tile - split) * MADE); }
  FUNCTION int x_of(int tile) const { return tile < split ? 0 : apart; }
};

// The work of a SIMD-group: units [at, end) of the tiles of its threadgroup, those of a tile after one another.
template <typename Q, int COLUMNS, int SIMDS, int STAGES, int MADE> struct Stream {
  enum { UNITS = Row<COLUMNS, Streamed<Q>::UNIT>::BLOCKS / Streamed<Q>::UNIT };
  TilePlaces<MADE> places;
  uint64_t total;
  int begin, end, asked, lane;
  GROUP uint *ring;
  FUNCTION Stream(PRIVATE const TilePlaces<MADE> &places_, uint64_t total_, int tiles, int simd, int lane_,
                  GROUP uint *rings)
      : places(places_), total(total_), begin(simd * tiles * UNITS / SIMDS), end((simd + 1) * tiles * UNITS / SIMDS),
        asked(begin), lane(lane_), ring(rings + simd * STAGES * Streamed<Q>::WORDS) {}
  FUNCTION void ask(int slot) {
    const int tile = asked / UNITS;
    if (asked < end)
      Streamed<Q>::template fetch<COLUMNS>(places.weights(tile), total, places.row_of(tile), uint(places.jump),
                                           asked % UNITS, ring + slot * Streamed<Q>::WORDS, lane);
    ++asked;
    seal_copies();
  }
  FUNCTION void open() {
    UNROLL
    for (int i = 0; i < STAGES; ++i)
      ask(i);
  }
  // `sums` gets 16 of each tile that this SIMD-group has a part of.
  FUNCTION void run(const GROUP uint *x, GROUP float *sums) {
    float part[2] = {0.0f, 0.0f};
    int slot = 0;
    for (int unit = begin; unit < end; ++unit) {
      await_copies<STAGES - 1>();
      simd_barrier();
      typename Streamed<Q>::Words words;
      Streamed<Q>::template read<COLUMNS>(ring + slot * Streamed<Q>::WORDS, unit % UNITS, lane, words);
      simd_barrier();
      ask(slot);
      Streamed<Q>::template add<COLUMNS>(words, x + places.x_of(unit / UNITS), unit % UNITS * Streamed<Q>::UNIT, lane,
                                         part);
      slot = slot + 1 < STAGES ? slot + 1 : 0;
      if ((unit + 1) % UNITS == 0 || unit + 1 == end) {
        UNROLL
        for (int i = 0; i < 2; ++i) {
          part[i] += shuffle_xor(part[i], 1);
          part[i] += shuffle_xor(part[i], 2);
          if (lane % 4 == 0)
            sums[8 * i + lane / 4] = part[i];
          part[i] = 0.0f;
        }
        sums += 16;
      }
    }
  }
};
template <int UNITS, int SIMDS> FUNCTION float add_parts(const GROUP float *sums, int tiles, int tile, int place, int kept) {
  float sum = 0.0f;
  UNROLL
  for (int simd = 0; simd < SIMDS; ++simd) {
    const int begin = simd * tiles * UNITS / SIMDS, end = (simd + 1) * tiles * UNITS / SIMDS;
    if (begin < (tile + 1) * UNITS && end > tile * UNITS && begin < end)
      sum += sums[(simd * kept + tile - begin / UNITS) * 16 + place];
  }
  return sum;
}
