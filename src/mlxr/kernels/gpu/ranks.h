// Lines between ranks, which are devices that compute one model. Each rank has an inbox: for each rank that sends, and
// for even and odd turns, LINES lines. A turn is a round in which every thread sends lines and takes those that the
// same thread of each other rank sent to it. A line of one turn is sent once all of the turn before have come, so the
// line of two turns before, in whose place it goes, has been read. All threadgroups must be able to run at once.
//
//   addresses             those of the inboxes by rank, then of the counts and of the words that the host sees
//   counts                turns so far; threadgroups that have ended
//   host words            what the host sets when another rank has ended; what is set here when one was waited for in vain
template <int COUNT, int LINES> struct Ranks {
  uint *inboxes[COUNT], *own, *counts, *host;
  uint rank, turn, patience_ms;
  bool gave_up;
};
template <int COUNT, int LINES>
FUNCTION void open_ranks(Ranks<COUNT, LINES> &ranks, const long long *addresses, int rank, int patience_ms) {
  UNROLL
  for (int i = 0; i < COUNT; ++i) {
    ranks.inboxes[i] = reinterpret_cast<uint *>(addresses[i]);
    if (i == 0 || i == rank)
      ranks.own = ranks.inboxes[i];
  }
  ranks.counts = reinterpret_cast<uint *>(addresses[COUNT]);
  ranks.host = reinterpret_cast<uint *>(addresses[COUNT + 1]);
  ranks.rank = uint(rank), ranks.patience_ms = uint(patience_ms);
  ranks.turn = read_now(ranks.counts) + 1u;
  ranks.gave_up = false;
}
template <int COUNT, int LINES>
FUNCTION uint *find_line(const Ranks<COUNT, LINES> &ranks, uint *inbox, uint sender, uint line) {
  return inbox + 4ull * ((2u * sender + (ranks.turn & 1u)) * uint64_t(LINES) + line);
}
template <int COUNT, int LINES>
FUNCTION void send_all(const Ranks<COUNT, LINES> &ranks, uint line, uint first, uint second) {
  UNROLL
  for (int i = 0; i < COUNT; ++i)
    if (uint(i) != ranks.rank)
      send_line(find_line(ranks, ranks.inboxes[i], ranks.rank, line), first, second, ranks.turn);
}
template <int COUNT, int LINES> FUNCTION bool is_vain(Ranks<COUNT, LINES> &ranks, uint since_ms) {
  if (read_now(ranks.host) || read_now(ranks.host + 1))
    return true;
  if (read_clock_ms() - since_ms < ranks.patience_ms)
    return false;
  write_now(ranks.host + 1, ranks.turn | 1u);
  return true;
}
// WIDTH lines of one sender, each `step` behind the one before, asked for together.
template <int WIDTH, int COUNT, int LINES>
FUNCTION void take_from(Ranks<COUNT, LINES> &ranks, uint sender, uint line, uint step, uint (*w)[2]) {
  const uint *from = find_line(ranks, ranks.own, sender, line);
  uint since_ms = 0u;
  for (uint tries = 0u; !ranks.gave_up; ++tries) {
    bool is_there = true;
    UNROLL
    for (int i = 0; i < WIDTH; ++i)
      is_there = take_line(from + 4u * step * uint(i), ranks.turn, w[i]) && is_there;
    if (is_there)
      return;
    rest();
    if (tries == 0u)
      since_ms = read_clock_ms();
    if (tries % 1024u == 1023u)
      ranks.gave_up = is_vain(ranks, since_ms);
  }
  UNROLL
  for (int i = 0; i < WIDTH; ++i)
    w[i][0] = w[i][1] = 0xFFFFFFFFu; // not a number
}
// By all threads, in the end: the last threadgroup counts the turns.
template <int COUNT, int LINES>
FUNCTION void close_ranks(const Ranks<COUNT, LINES> &ranks, uint thread_id, uint groups, uint turns) {
  barrier(); // all have read the count
  if (thread_id == 0u && count_up(ranks.counts + 1) == groups - 1u) {
    write_now(ranks.counts + 1, 0u);
    write_now(ranks.counts, read_now(ranks.counts) + turns);
  }
}
