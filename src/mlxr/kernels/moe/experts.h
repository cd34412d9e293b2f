// What products of experts have besides those of `linear`: rows of x that are picked, and floats on the matrix units.
//
// Work comes in tiles: an expert and some of the pairs of a token and a rank that were sent to it. With SORTED `tiles`
// holds for each one the expert, its first place in `order` and how many pairs it has, and `order` the pairs; else a
// tile is one pair, and `tiles` the expert of each.

struct Picked {
  const DEVICE int *order;
  int first, count, fan; // pairs for each row of x
  bool sorted;
  FUNCTION int pair(int t) const {
    const int place = first + (t < count ? t : count - 1);
    return sorted ? order[place] : place;
  }
  FUNCTION Offset row(int t) const { return Offset(pair(t) / fan); }
};

// `tiles` points to device memory, or on Metal to constant memory: the experts of one token may be fewer than eight.
template <typename Tiles>
FUNCTION Picked pick_tile(Tiles tiles, const DEVICE int *order, int tile, bool sorted, int fan, PRIVATE int *expert) {
  Picked picked;
  picked.order = order;
  picked.sorted = sorted;
  picked.fan = fan;
  *expert = sorted ? tiles[4 * tile] : tiles[tile];
  picked.first = sorted ? tiles[4 * tile + 1] : tile;
  picked.count = sorted ? tiles[4 * tile + 2] : 1;
  return picked;
}
