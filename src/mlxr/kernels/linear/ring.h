// A piece of 64 columns in the threadgroup's memory: chunks of 16 bytes, eight to a row. Rows that differ by one have
// their halves exchanged, so that eight lanes that read four chunks of two rows each meet no bank twice.
typedef const DEVICE uint8_t *Bytes;
FUNCTION int place_chunk(int row, int chunk) { return row * 8 + (chunk ^ (row & 1) * 4); }
