// Units of blocks, 256 columns of 16 rows, as they lie in the threadgroup's memory: plane after plane, row after row.
// Where a row has no whole number of them, its last unit ends with the row, and begins with columns of the one before.

// One plane of a unit, BYTES of each row STRIDE words apart, behind planes of BEFORE bytes; the second eight rows are
// `jump` rows further on. `place` says once where a lane copies from, COPIES pieces behind the first row's.
template <int COLUMNS, int BEFORE, int BYTES, int STRIDE> struct Plane {
  enum { ROW_BYTES = COLUMNS * BYTES / 256, EACH = BYTES % 16 || ROW_BYTES % 16 ? 4 : 16 };
  enum { PIECES = BYTES < EACH ? 1 : BYTES / EACH, COPIES = BYTES ? (PIECES + 1) / 2 : 0 };
  static FUNCTION void place(uint jump, int lane, PRIVATE uint *from) {
    UNROLL
    for (int i = 0; i < COPIES; ++i) {
      const int r = (32 * i + lane) / PIECES, p = (32 * i + lane) % PIECES;
      from[i] = (r + (r < 8 ? 0u : jump)) * ROW_BYTES + EACH * p;
    }
  }
  // Of two bytes, their neighbours come too, one of which is meant.
  static FUNCTION void bring(Bytes base, uint64_t total, uint row, int unit, PRIVATE const uint *from, GROUP uint *to,
                             int lane) {
    const uint64_t first = uint64_t(row) * ROW_BYTES +
                           (COLUMNS % 256 && unit == COLUMNS / 256 ? ROW_BYTES - BYTES : unit * BYTES);
    Bytes start = base + BEFORE * total + first;
    UNROLL
    for (int i = 0; i < COPIES; ++i) {
      const int r = (32 * i + lane) / PIECES, p = (32 * i + lane) % PIECES;
      if (r < 16) {
        Bytes piece = start + from[i];
        if (EACH == 16)
          stream_words(piece, to + (4 * STRIDE == BYTES ? 4 * (32 * i + lane) : r * STRIDE + 4 * p));
        else
          copy_word(BYTES < 4 ? piece - (uint(first) + from[i]) % 4 : piece,
                    to + r * STRIDE + p);
      }
    }
  }
};

// A unit of up to four planes with A, B, C and D bytes of a row. The rows of the first PADDED planes are PAD words
// further apart than they need, so that eight rows lie in different banks; behind `SCALES` words the planes after them
// lie as in a weight of 16 rows.
template <int PADDED, int A, int B = 0, int C = 0, int D = 0, int PAD = 4> struct Unit {
  enum {
    STRIDE = A / 4 + (PADDED > 0 ? PAD : 0),
    SECOND = 16 * STRIDE,
    SECOND_STRIDE = B / 4 + (PADDED > 1 ? PAD : 0),
    THIRD = SECOND + 16 * SECOND_STRIDE,
    LAST = THIRD + 16 * (C / 4),
    WORDS = LAST + (D ? 16 : 0),
    SCALES = 16 * PAD * PADDED
  };
  // Scale and offset of one of the eight runs of a row, of a type whose planes behind SCALES have them.
  template <typename Q, int COLUMNS>
  static FUNCTION void scales(const GROUP uint *unit, int row, int run, int, PRIVATE float *scale, PRIVATE float *offset) {
    constexpr int BLOCKS = 256 / Q::BLOCK;
    Q::scales(reinterpret_cast<Bytes>(unit + SCALES), 16 * BLOCKS, uint64_t(row * BLOCKS + run / Q::RUNS), run % Q::RUNS,
              scale, offset);
  }
  template <int COLUMNS> struct Of {
    typedef Plane<COLUMNS, 0, A, STRIDE> First;
    typedef Plane<COLUMNS, A, B, SECOND_STRIDE> Second;
    typedef Plane<COLUMNS, A + B, C, C / 4> Third;
    typedef Plane<COLUMNS, A + B + C, D, 1> Fourth;
    enum { AT_2 = First::COPIES, AT_3 = AT_2 + Second::COPIES, AT_4 = AT_3 + Third::COPIES };
    enum { COPIES = AT_4 + Fourth::COPIES };
    static FUNCTION void place(uint jump, int lane, PRIVATE uint *from) {
      First::place(jump, lane, from);
      Second::place(jump, lane, from + AT_2);
      Third::place(jump, lane, from + AT_3);
      Fourth::place(jump, lane, from + AT_4);
    }
    static FUNCTION void bring(Bytes base, uint64_t total, uint row, int unit, PRIVATE const uint *from, GROUP uint *to,
                               int lane) {
      First::bring(base, total, row, unit, from, to, lane);
      Second::bring(base, total, row, unit, from + AT_2, to + SECOND, lane);
      Third::bring(base, total, row, unit, from + AT_3, to + THIRD, lane);
      Fourth::bring(base, total, row, unit, from + AT_4, to + LAST, lane);
    }
  };
};

// d of a row, of whose two neighbours one is meant.
FUNCTION float read_half(uint both, uint odd) { return half_bits_to_float(odd ? both >> 16 : both & 0xFFFFu); }

// A unit of a grid's blocks, and those of a row of it.
template <typename Q> struct GridUnit : Unit<2, Q::A, Q::B, Q::C, Q::D> {
  typedef Unit<2, Q::A, Q::B, Q::C, Q::D> U;
  static FUNCTION GridPlanes planes(const GROUP uint *unit, int r, uint odd) {
    GridPlanes p;
    p.a = reinterpret_cast<Bytes>(unit + r * U::STRIDE);
    p.b = reinterpret_cast<Bytes>(unit + U::SECOND + r * U::SECOND_STRIDE);
    p.c = reinterpret_cast<Bytes>(unit + U::THIRD + r * (Q::C / 4));
    p.d = Q::D ? read_half(unit[U::LAST + r], odd) : 0.0f;
    return p;
  }
};

// Four numbers out of a table of sixteen bytes, by the nibbles of two bytes: near, far, near, far.
template <typename Table> FUNCTION uint look_up(uint nibbles) {
  const uint which = nibbles & 0x7777u;
  const uint below = pick_bytes(Table::T0, Table::T1, which), above = pick_bytes(Table::T2, Table::T3, which);
  return pick_bytes(below, above, (nibbles >> 1 & 0x4444u) | 0x3210u);
}
struct IQ4Table { // IQ4_VALUES
  static constexpr uint T0 = 0xBFAD9881u, T1 = 0xF6EADDCFu, T2 = 0x26190D01u, T3 = 0x71594535u;
};
struct FP4Table { // FP4_VALUES
  static constexpr uint T0 = 0x03020100u, T1 = 0x0C080604u, T2 = 0xFDFEFF00u, T3 = 0xF4F8FAFCu;
};
