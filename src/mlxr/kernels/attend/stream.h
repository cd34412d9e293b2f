// Tiles of keys and values in the threadgroup's memory: rows of D 16-bit numbers, in pieces of eight. The pieces of
// eight neighbouring rows that stand in one column lie in different banks.
template <int D> FUNCTION int find_piece(int row, int piece) { return row * (D / 2) + (piece ^ (row % 8)) * 4; }

// Starts to bring TILE rows that lie together, all lanes 512 bytes at a time.
template <int D, int TILE> FUNCTION void bring_tile(const DEVICE uint8_t *from, GROUP uint *to, int lane) {
  constexpr int PIECES = D / 8;
  UNROLL
  for (int i = 0; i < TILE * PIECES / 32; ++i) {
    const int index = 32 * i + lane;
    copy_words(from + 16 * index, to + find_piece<D>(index / PIECES, index % PIECES));
  }
}
