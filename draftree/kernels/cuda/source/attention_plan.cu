// How attention is shared out: which keys are reduced together, and by whom.
//
// Keys are taken in tiles of TILE positions; tiles of a segment add up in one set of sums, segments of a span are
// merged in order, then the spans. Segments are SEGMENT positions long, from WIDE_FROM on (0: nowhere) twice, from
// 4 WIDE_FROM on four times as long. All bounds are absolute positions, so that a row's result does not depend on where
// the committed sequence ends or on what else the pass holds. No row sees keys before `first`; with a window, rows see
// the first `sinks` positions and those of their window. Tiles before `own` hold the same keys for all rows and are
// read once for many of them; from there on each row's keys are looked up by position.
// An item is one block's work: some columns (rows times heads of a key head) of a segment, or of a whole span where
// there are plenty (and FOLDS). Who does what changes nothing in the result.
constexpr int TILE = 64;
constexpr int SPAN = 4;          // segments
constexpr int COLS = 8 * COL_TILES;  // most columns of an item: groups of 8
constexpr int FOLD_WAVES = 3;    // blocks fold spans themselves when there are that many items for each, or it is even
constexpr float LOWEST = -1e30f;  // the maximum of nothing
// Partial results: sums, or (not FOLDS) what the weights give each dimension on average, two halves a word.
#if FOLDS
using Partial = float;
constexpr int PARTIALS = DIM;
#else
using Partial = u32;
constexpr int PARTIALS = DIM / 2;
#endif
constexpr int NUM_TOKENS = 0, COMMITTED = 1, IS_TREE = 2, FIRST = 5, SINKS = 6;  // words of control

// For numbers below a million, without the long way round that division takes.
DEV int divide(int a, int b) { return __float2int_rz(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b))); }
DEV int ceil_div(int a, int b) { return divide(a + b - 1, b); }

constexpr int WIDEST = WIDE_FROM ? 4 * SEGMENT : SEGMENT;
constexpr int FIRST_WIDE = WIDE_FROM / SEGMENT, FIRST_WIDEST = FIRST_WIDE + 3 * WIDE_FROM / (2 * SEGMENT);  // segments
static_assert(WIDE_FROM % (2 * SEGMENT) == 0, "wide segments begin where others do");
DEV int segment_of(int position) {
  if (!WIDE_FROM || position >= 4 * WIDE_FROM) return FIRST_WIDEST + (position - 4 * WIDE_FROM) / WIDEST;
  return position < WIDE_FROM ? position / SEGMENT : FIRST_WIDE + (position - WIDE_FROM) / (2 * SEGMENT);
}
DEV int segment_begin(int segment) {
  if (!WIDE_FROM || segment >= FIRST_WIDEST) return 4 * WIDE_FROM + (segment - FIRST_WIDEST) * WIDEST;
  return segment < FIRST_WIDE ? segment * SEGMENT : WIDE_FROM + (segment - FIRST_WIDE) * 2 * SEGMENT;
}

struct Shape {
  int kv_heads, group, head_dim, window, is_bidirectional;
};

struct Plan {
  int live;                                       // rows of this launch
  int committed, end;                             // the first position of the pass, and the one after its last row
  int first, sinks, sink_segments;                // segments before those of the window, if there are any between
  int own, first_tile;                            // no row sees anything before first_tile but sinks
  int first_segment, dense_end, last_segment;     // segments before dense_end have no keys of a single row
  int num_slots;                                  // of segments, or spans, before dense_end
  int fold_begin, fold_end;                       // spans that are folded by one block each
  int rows_an_item, own_groups, num_own_items;
  int col_tiles, tiles_an_item, dense_groups, num_items;
  int kinds, stride;  // of queries; from a block's item to its next, where it has no rows that bring keys

  // Where a segment's or its span's partial result lies.
  DEV_MEMBER int slot_of(int segment) const {
    if (segment < sink_segments) return segment;
    const int folded = fold_end - fold_begin, before = fold_begin * SPAN - first_segment;
    if (segment < fold_begin * SPAN || !folded) return sink_segments + segment - first_segment;
    return sink_segments + (segment < fold_end * SPAN ? before + segment / SPAN - fold_begin
                                                      : segment - first_segment - (SPAN - 1) * folded);
  }

  // Whether a row has a part of the segment, which sees segments first to last and sinks.
  DEV_MEMBER bool is_seen(int segment, int first, int last) const {
    return segment < sink_segments || (segment >= first && segment <= last);
  }
};

DEV Plan make_plan(const int* control, int first_row, int num_rows, const Shape& shape, int num_blocks) {
  Plan p;
  p.live = max(0, min(num_rows, control[NUM_TOKENS] - first_row));
  p.committed = control[COMMITTED], p.end = p.committed + control[NUM_TOKENS];
  p.own = shape.is_bidirectional ? (p.end + TILE - 1) / TILE * TILE : p.committed / TILE * TILE;
  p.first = control[FIRST], p.sinks = shape.window ? control[SINKS] : 0;
  p.first_tile = max(p.first, shape.window ? p.committed - shape.window + 1 : 0) / TILE * TILE;
  p.sink_segments = p.sinks ? segment_of(p.sinks - 1) + 1 : 0;
  if (p.sinks && p.sink_segments >= segment_of(p.first_tile)) p.first_tile = p.sink_segments = 0;
  p.first_segment = segment_of(p.first_tile), p.last_segment = segment_of(p.end - 1);
  p.dense_end = shape.is_bidirectional ? p.last_segment + 1 : segment_of(p.own);
  const int num_dense = p.sink_segments + p.dense_end - p.first_segment, num_own = p.last_segment + 1 - p.dense_end;
  const int row_tiles = (shape.group + 7) / 8;
  p.rows_an_item = ceil_div(shape.kv_heads * p.live * num_own, num_dense ? max(1, num_blocks / 2) : num_blocks);
  p.rows_an_item = max(1, min(divide(COL_TILES, row_tiles), p.rows_an_item));
  p.own_groups = ceil_div(p.live, p.rows_an_item);
  p.num_own_items = num_own * shape.kv_heads * p.own_groups;
  p.col_tiles = (p.live * shape.group + 7) / 8;
  const int free_blocks = max(num_blocks / 2, num_blocks - p.num_own_items);
  const int dense_items = max(1, num_dense * shape.kv_heads);  // with all columns
  p.tiles_an_item = FOLDS ? ceil_div(dense_items * p.col_tiles, max(1, free_blocks))
                          : ceil_div(p.col_tiles, max(1, divide(free_blocks, dense_items)));
  p.tiles_an_item = max(1, min(COL_TILES, p.tiles_an_item));
  p.dense_groups = ceil_div(p.col_tiles, p.tiles_an_item);
  p.tiles_an_item = ceil_div(p.col_tiles, p.dense_groups);  // none is left with a few
  p.fold_begin = (p.first_segment + SPAN - 1) / SPAN, p.fold_end = max(p.fold_begin, p.dense_end / SPAN);
  const int folded_items = (p.fold_end - p.fold_begin) * shape.kv_heads * p.dense_groups;
  const int waves = ceil_div(folded_items, num_blocks);
  const bool fits = waves >= 2 && folded_items * 10 >= waves * num_blocks * 9;
  if (!FOLDS || (!fits && folded_items < FOLD_WAVES * num_blocks)) p.fold_end = p.fold_begin;
  p.num_slots = num_dense - (SPAN - 1) * (p.fold_end - p.fold_begin);
  p.kinds = shape.kv_heads * p.dense_groups;
  const int even = divide(num_blocks, p.kinds) * p.kinds;
  p.stride = even * 16 >= num_blocks * 15 ? even : num_blocks;
  p.num_items = p.live ? p.num_own_items + p.num_slots * shape.kv_heads * p.dense_groups : 0;
  return p;
}

// Columns [first_col, first_col + num_cols) of the key head: row = column / width, head of the group = column % width.
struct Item {
  int kv_head, segment, num_segments, slot;
  int width, first_col, num_cols;
  int first_row, end_row;  // rows that bring keys of their own
};

DEV Item item_at(const Plan& p, const Shape& shape, int index) {
  Item item;
  item.num_segments = 1;
  if (index < p.num_own_items) {
    const int rest = divide(index, p.own_groups), place = divide(rest, shape.kv_heads);
    item.width = (shape.group + 7) / 8 * 8;
    item.first_row = (index - rest * p.own_groups) * p.rows_an_item;
    item.end_row = min(p.live, item.first_row + p.rows_an_item);
    item.first_col = item.first_row * item.width, item.num_cols = (item.end_row - item.first_row) * item.width;
    item.kv_head = rest - place * shape.kv_heads, item.segment = p.dense_end + place;
    item.slot = p.slot_of(item.segment);
    return item;
  }
  index -= p.num_own_items;
  const int rest = divide(index, p.dense_groups), first_tile = (index - rest * p.dense_groups) * p.tiles_an_item;
  item.width = shape.group, item.first_row = item.end_row = 0;
  item.first_col = first_tile * 8, item.num_cols = min(p.tiles_an_item, p.col_tiles - first_tile) * 8;
  item.slot = divide(rest, shape.kv_heads), item.kv_head = rest - item.slot * shape.kv_heads;
  if constexpr (!FOLDS) item.slot = p.num_slots - 1 - item.slot;  // the later ones first: they are not shorter
  item.segment = item.slot;
  const int place = item.slot - p.sink_segments;
  if (place < 0) return item;
  const int folded = p.fold_end - p.fold_begin, before = p.fold_begin * SPAN - p.first_segment;
  const bool is_span = folded && place >= before && place < before + folded;
  item.segment = p.first_segment + place;
  if (is_span) item.segment = (p.fold_begin + place - before) * SPAN, item.num_segments = SPAN;
  if (folded && place >= before + folded) item.segment += (SPAN - 1) * folded;
  return item;
}

// A block's items: those with rows that bring keys, then others with the same queries, where that leaves few blocks
// idle. Long ones come first, and every second round of blocks goes backwards, so that all end at about the same time.
DEV int first_plain_item(const Plan& p) {
  const int place = (blockIdx.x + gridDim.x - p.num_own_items % gridDim.x) % gridDim.x;
  return place < p.stride ? p.num_own_items + place : p.num_items;
}
DEV int first_item(const Plan& p) {
  return FOLDS || blockIdx.x < p.num_own_items ? static_cast<int>(blockIdx.x) : first_plain_item(p);
}
DEV int next_item(const Plan& p, int index) {
  const int next = index + gridDim.x;
  if (FOLDS || next < p.num_own_items) return next;
  if (index < p.num_own_items) return first_plain_item(p);
  const int kinds = p.stride % p.kinds ? 1 : p.kinds, place = (index - p.num_own_items) % p.stride, kind = place % kinds;
  return index - place + p.stride + (p.stride - kinds - (place - kind)) + kind;
}

// Tiles [begin, end) of a segment for one row of an item, or for all of them (row < first_row); keys from limit on are
// hidden.
struct Run {
  int begin, end, limit;
};

DEV Run run_of(const Plan& p, const Item& item, int segment, int row, const int* positions) {
  const int begin = segment_begin(segment), end = segment_begin(segment + 1);
  if (row < item.first_row && segment < p.sink_segments) return {begin, min(end, (p.sinks + TILE - 1) / TILE * TILE), p.end};
  if (row < item.first_row) return {max(begin, p.first_tile), min(end, p.own), p.end};
  const int limit = positions[row] + 1;
  return {max(begin, p.own), min(end, limit), limit};
}

// What merging a part into a state multiplies each of them with.
struct Factors {
  float state, part;
};

// The maximum and the sum of the weights of a state, with those of a part that follows it.
DEV Factors merge(float2& state, float2 part) {
  const float top = fmaxf(state.x, part.x);
  const Factors by = {exp2f(__fsub_rn(state.x, top)), exp2f(__fsub_rn(part.x, top))};
  state = make_float2(top, __fmaf_rn(part.y, by.part, __fmul_rn(state.y, by.state)));
  return by;
}
