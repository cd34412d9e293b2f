// Items of work for items.body: a tile of pairs, and M tiles of 16 outputs of its expert, or with GATE of 8 and as many
// rows of the other half.
template <typename Q, int INPUTS, int ROWS, int M, int N, int GATE> struct Item {
  enum { MADE = GATE ? 8 : 16, OUTPUTS = GATE ? ROWS / 2 : ROWS, BLOCKS = (OUTPUTS + M * MADE - 1) / (M * MADE) };
  enum { RUNS = INPUTS / 32, STEPS = (RUNS + 7) / 8 };
  Picked picked;
  int expert, first; // output
  int rows[N];       // of x, of the lane's pairs
  template <typename Tiles> FUNCTION void open(Tiles tiles, const DEVICE int *order, int item, int items, int fan) {
    const bool exists = item < items;
    picked = pick_tile(tiles, order, exists ? item / BLOCKS : 0, true, fan, &expert);
    picked.count = exists ? picked.count : 0;
    first = item % BLOCKS * (M * MADE);
  }
  FUNCTION void find_rows(int lane) {
    UNROLL
    for (int n = 0; n < N; ++n)
      rows[n] = int(picked.row(8 * n + lane / 4));
  }
  static FUNCTION void fetch(Bytes weights, int first, int step, int lane, PRIVATE uint (*raw)[Tile<Q>::RAW]) {
    uint blocks[2 * M];
    UNROLL
    for (int i = 0; i < 2 * M; ++i) {
      const int wanted = first + i / 2 * MADE + lane / 4 + (GATE ? 0 : i % 2 * 8);
      blocks[i] = uint((wanted < OUTPUTS ? wanted : OUTPUTS - 1) + (GATE ? i % 2 * OUTPUTS : 0)) * (INPUTS / Q::BLOCK);
    }
    fetch_step<Q, M>(weights, uint64_t(ROWS) * (INPUTS / Q::BLOCK), blocks, RUNS, 8 * step + lane % 4, raw);
  }
};

template <int COLUMNS, int N, typename X> struct FromRowsOf {
  const DEVICE X *from[N];
  FUNCTION FromRowsOf(const DEVICE X *x, PRIVATE const int *rows) {
    UNROLL
    for (int n = 0; n < N; ++n)
      from[n] = x + uint64_t(rows[n]) * COLUMNS;
  }
  FUNCTION void read(int n, int column, PRIVATE uint *b) const { load_pairs(from[n] + column, b); }
};
