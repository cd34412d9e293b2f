// Types of which a run is 32 neighbours with one scale and no offset, streamed (stream.h): numbers are bytes with signs,
// which the scale of blocks.h times FACTOR brings to their size.

struct SignedBytes {
  static constexpr float FACTOR = 1.0f / 256.0f;
  enum { WORDS = 8 };
  static FUNCTION void split(PRIVATE const uint *w, int v, PRIVATE uint *near, PRIVATE uint *far) {
    *near = w[v];
    *far = w[4 + v];
  }
};
struct SignedFours { // 16 (q - 8)
  static constexpr float FACTOR = 1.0f / 256.0f;
  enum { WORDS = 4 };
  static FUNCTION void split(PRIVATE const uint *w, int v, PRIVATE uint *near, PRIVATE uint *far) {
    *near = (w[v] << 4 & 0xF0F0F0F0u) ^ 0x80808080u;
    *far = (w[v] & 0xF0F0F0F0u) ^ 0x80808080u;
  }
};
struct SignedFives { // 8 (q - 16); the fifth bits are in the fifth word
  static constexpr float FACTOR = 1.0f / 256.0f;
  enum { WORDS = 5 };
  static FUNCTION void split(PRIVATE const uint *w, int v, PRIVATE uint *near, PRIVATE uint *far) {
    *near = ((w[v] & 0x0F0F0F0Fu) | spread_four(w[4] >> (4 * v))) << 3 ^ 0x80808080u;
    *far = ((w[v] >> 4 & 0x0F0F0F0Fu) | spread_four(w[4] >> (4 * v + 16))) << 3 ^ 0x80808080u;
  }
};
template <typename Table> struct SignedTable {
  static constexpr float FACTOR = 1.0f;
  enum { WORDS = 4 };
  static FUNCTION void split(PRIVATE const uint *w, int v, PRIVATE uint *near, PRIVATE uint *far) {
    const uint first = look_up<Table>(w[v] & 0xFFFFu), second = look_up<Table>(w[v] >> 16);
    *near = pick_bytes(first, second, 0x6420u);
    *far = pick_bytes(first, second, 0x7531u);
  }
};

template <typename Q, typename U, typename Numbers> struct StreamedRuns {
  enum { UNIT = 1, WORDS = U::WORDS, OWN = Numbers::WORDS == 8 ? 8 : 4 };
  template <int COLUMNS>
  static FUNCTION void fetch(Bytes base, uint64_t total, uint row, uint jump, int unit, GROUP uint *to, int lane) {
    typedef typename U::template Of<COLUMNS> Of;
    uint from[Of::COPIES];
    Of::place(jump, lane, from);
    Of::bring(base, total, row, unit, from, to, lane);
  }
  struct Words { // of runs t and 4 + t
    uint q[2][2][Numbers::WORDS];
    float scale[2][2];
  };
  template <int COLUMNS> static FUNCTION void read(const GROUP uint *unit, int index, int lane, PRIVATE Words &w) {
    UNROLL
    for (int i = 0; i < 2; ++i) {
      UNROLL
      for (int j = 0; j < 2; ++j) {
        const int r = lane / 4 + 8 * i, run = lane % 4 + 4 * j;
        const GROUP uint *from = unit + r * U::STRIDE + OWN * run;
        read_words(from, w.q[i][j]);
        if (Numbers::WORDS == 8)
          read_words(from + 4, w.q[i][j] + Numbers::WORDS - 4);
        if (Numbers::WORDS == 5)
          w.q[i][j][Numbers::WORDS - 1] = unit[U::SECOND + r * U::SECOND_STRIDE + run];
        float scale[2], offset[2];
        U::template scales<Q, COLUMNS>(unit, r, run, index, scale, offset);
        w.scale[i][j] = Numbers::FACTOR * scale[0];
      }
    }
  }
  // b has a run in columns of its own, 2 t for high bytes and 2 t + 1 for low ones. So lane t has both sums of its run.
  template <int COLUMNS>
  static FUNCTION void add(PRIVATE const Words &w, const GROUP uint *x, int block, int lane, PRIVATE float *sums) {
    typedef Row<COLUMNS, UNIT> R;
    const int g = lane / 4, t = lane % 4;
    const bool meets = g / 2 == t;
    const GROUP uint *from = meets ? x + (g % 2 ? R::LOW : R::HIGH) + 64 * block + 8 * t : x + R::ZEROS;
    const float scale = bits_to_float(x[R::SCALES + block]);
    UNROLL
    for (int j = 0; j < 2; ++j) {
      uint n[4], f[4];
      read_words(from + (meets ? 32 * j : 0), n);
      read_words(from + (meets ? 32 * j : 0) + 4, f);
      int c[4] = {0, 0, 0, 0};
      UNROLL
      for (int v = 0; v < 4; ++v) {
        uint a[4];
        const uint b[2] = {n[v], f[v]};
        UNROLL
        for (int i = 0; i < 2; ++i)
          Numbers::split(w.q[i][j], v, a + i, a + 2 + i);
        multiply_signed_bytes(c, a, b);
      }
      UNROLL
      for (int i = 0; i < 2; ++i)
        sums[i] += scale * w.scale[i][j] * float(256 * c[2 * i] + c[2 * i + 1]);
    }
  }
};

// Grids with one scale for 32 columns: what a lane reads of them it looks up at once.
template <typename Q> struct StreamedGrid : StreamedRuns<Q, GridUnit<Q>, SignedBytes> {
  typedef StreamedRuns<Q, GridUnit<Q>, SignedBytes> Base;
  template <int COLUMNS>
  static FUNCTION void read(const GROUP uint *unit, int index, int lane, PRIVATE typename Base::Words &w) {
    UNROLL
    for (int i = 0; i < 2; ++i) {
      UNROLL
      for (int j = 0; j < 2; ++j) {
        const int r = lane / 4 + 8 * i, run = lane % 4 + 4 * j;
        const GridPlanes p = GridUnit<Q>::planes(unit, r, uint(r * (COLUMNS / 256) + index) % 2u);
        const uint signs = Q::signs(p, run);
        UNROLL
        for (int k = 0; k < 8; ++k)
          w.q[i][j][k] = Q::signed_bytes(Q::quad(p, run, k, signs));
        w.scale[i][j] = Q::step(p, run, 0);
      }
    }
  }
};

// A unit of MXFP4: a plane of nibbles, as in units.h, and one of a byte to 32 columns, whose rows begin anywhere: from the
// word on that has the first byte of a row, three words come, or two if they are enough.
struct UnitFP4 {
  enum { STRIDE = 48, SECOND = 16 * STRIDE, SECOND_STRIDE = 3, WORDS = SECOND + 16 * SECOND_STRIDE };
  // Of a row, by how many bytes the first one of a unit is behind the beginning of a word; rows in eights are whole words.
  template <int COLUMNS> static FUNCTION uint shift(int row, int unit) {
    return uint(row * (COLUMNS / 32) + (COLUMNS % 256 && unit == COLUMNS / 256 ? COLUMNS / 32 - 8 : 0)) % 4u;
  }
  template <int COLUMNS> struct Of {
    typedef Plane<COLUMNS, 0, 128, STRIDE> First;
    enum { COPIES = First::COPIES + 2, ROW_BYTES = COLUMNS / 32 };
    static FUNCTION void place(uint jump, int lane, PRIVATE uint *from) {
      First::place(jump, lane, from);
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const int r = (32 * i + lane) / 3, p = (32 * i + lane) % 3;
        from[First::COPIES + i] = (r + (r < 8 ? 0u : jump)) * ROW_BYTES + 4 * p;
      }
    }
    static FUNCTION void bring(Bytes base, uint64_t total, uint row, int unit, PRIVATE const uint *from, GROUP uint *to,
                               int lane) {
      First::bring(base, total, row, unit, from, to, lane);
      Bytes start = base + 128 * total + uint64_t(row) * ROW_BYTES +
                    (COLUMNS % 256 && unit == COLUMNS / 256 ? ROW_BYTES - 8 : 8 * unit);
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const int r = (32 * i + lane) / 3, p = (32 * i + lane) % 3;
        const uint before = shift<COLUMNS>(r, unit);
        if (r < 16 && (p < 2 || before))
          copy_word(start + from[First::COPIES + i] - before, to + SECOND + 3 * r + p);
      }
    }
  };
  template <typename Q, int COLUMNS>
  static FUNCTION void scales(const GROUP uint *unit, int row, int run, int index, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes bytes = reinterpret_cast<Bytes>(unit + SECOND + 3 * row) + shift<COLUMNS>(row, index);
    Q::scales(bytes, 0, uint64_t(run), 0, scale, offset);
  }
};

// Rows are 16 banks apart, or those of bytes four, which keeps what eight lanes read apart.
template <> struct Streamed<Q8_0> : StreamedRuns<Q8_0, Unit<1, 256, 16>, SignedBytes> {};
template <> struct Streamed<Q4_0> : StreamedRuns<Q4_0, Unit<1, 128, 16, 0, 0, 16>, SignedFours> {};
template <> struct Streamed<Q5_0> : StreamedRuns<Q5_0, Unit<1, 128, 32, 16, 0, 16>, SignedFives> {};
template <> struct Streamed<IQ4_NL> : StreamedRuns<IQ4_NL, Unit<1, 128, 16, 0, 0, 16>, SignedTable<IQ4Table>> {};
template <> struct Streamed<IQ4_XS> : StreamedRuns<IQ4_XS, Unit<1, 128, 4, 4, 0, 16>, SignedTable<IQ4Table>> {};
template <> struct Streamed<MXFP4> : StreamedRuns<MXFP4, UnitFP4, SignedTable<FP4Table>> {};
