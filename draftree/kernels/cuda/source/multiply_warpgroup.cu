// A step with activations as 16-bit floats, by the matrix instructions of four warps: the strip's weights become operands in
// registers, and the instructions themselves read activations in shared memory. The bits are those of multiply_halves.cu.
constexpr bool IS_WHOLE = HAS_BYTES || FORMAT == F16;  // sums are taken over all groups of a unit
constexpr bool HAS_ROOM = TOKEN_TILES <= 4;            // in registers, for sums that are not waited for at once
constexpr int BATCH = IS_WHOLE && HAS_ROOM ? 2 : 1;    // groups whose products are asked for together
constexpr int SUM_SETS = !IS_WHOLE && HAS_ROOM ? 2 : 1;
static_assert(!OWN_ROW, "a single row has no use for them");

struct Offsets {
  Place place;
};

DEV Offsets find_offsets() { return {own_place()}; }

// Activations of a step: halves, and their sums.
struct Input {
  Pieces x, sums;

  DEV_MEMBER Pieces halves(int group, int step) const {
    return further(x, group / 4 * TOKEN_TILES * X_TILE_BYTES + group % 4 * 512 + step * 256);
  }
};

DEV Input input_of_stage(const u8* stage) {
  const u8* x = stage + STEP_BYTES;
  // Units of 128 columns have eight halves of sums alone; the others are multiplied by zero.
  return {pieces_at(x, 128, X_TILE_BYTES), pieces_at(x + 2048, X_BLOCKS > 1 ? TOKEN_TILES * X_TILE_BYTES : 0, X_TILE_BYTES)};
}

// Sums of a group, where scales are floats.
DEV void add_group(float (*sums)[4], const Scales& s, int group, float (*acc)[4]) {
  const float factor[2] = {group_scale(s, 0.0f, 0, group, 0), group_scale(s, 0.0f, 1, group, 0)};
  hold_batch<TOKEN_TILES>(sums);
  add_scaled(sums, factor, acc);
}

// One warp: its strip by all columns of a unit. Calls leave when the stage has been read. Token tiles that are not live
// give sums that nobody reads.
template <class F>
DEV void multiply_unit(const u8* stage, const Input& input, const Offsets& at, u32 magic, float (*acc)[4], F leave) {
  float sums[SUM_SETS][TOKEN_TILES][4], offset[TOKEN_TILES][4];
  const Place place[2] = {at.place, in_half(at.place, 1)};
  const Scales scales[2] = {load_scales(stage, place[0]), load_scales(stage, place[1])};
  u32 minima[4] = {};
  if (HAS_OFFSET) load_min_operands(stage, at.place, threadIdx.x, minima);
#pragma unroll
  for (int first = 0; first < 2 * GROUPS; first += BATCH) {
    u32 a[BATCH][2][4];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int half = (first + i) / GROUPS;
      load_group(stage, place[half], scales[half], (first + i) % GROUPS, magic, a[i]);
    }
    float(*c)[4] = FORMAT == F16 ? acc : sums[first % SUM_SETS];
    hold_batch<TOKEN_TILES>(c);
    begin_batch();
#pragma unroll
    for (int i = 0; i < BATCH; i++)
#pragma unroll
      for (int step = 0; step < 2; step++) {
        const bool is_new = FORMAT != F16 && (!IS_WHOLE || first + i == 0) && step == 0;
        multiply_pieces<TOKEN_TILES>(c, a[i][step], input.halves(first + i, step), !is_new);
      }
    const bool is_last = first + BATCH == 2 * GROUPS;
    if (HAS_OFFSET && HAS_ROOM && is_last) multiply_pieces<TOKEN_TILES>(offset, minima, input.sums, 0);
    if (!is_last && (IS_WHOLE || SUM_SETS == 2))
      end_batch<1>();
    else
      end_batch<0>();
    const int done = first + 1 - SUM_SETS;  // the last group that has been waited for
    if (!IS_WHOLE && done >= 0) add_group(sums[done % SUM_SETS], scales[done / GROUPS], done % GROUPS, acc);
  }
  if (!IS_WHOLE && SUM_SETS == 2) add_group(sums[1], scales[1], GROUPS - 1, acc);
  if (FORMAT == F16) hold_batch<TOKEN_TILES>(acc);
  const Supers super = load_supers(stage, at.place);
  if (HAS_BYTES) hold_batch<TOKEN_TILES>(sums[0]), add_scaled(sums[0], super.scale, acc);
  if (HAS_OFFSET && !HAS_ROOM) {
    begin_batch();
    multiply_pieces<TOKEN_TILES>(offset, minima, input.sums, 0);
    end_batch<0>();
  }
  leave();
  if (!HAS_OFFSET) return;
  hold_batch<TOKEN_TILES>(offset);
  const float factor[2] = {min_factor(super.min[0]), min_factor(super.min[1])};
  add_scaled(offset, factor, acc);
}
