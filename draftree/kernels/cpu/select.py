"""Finding the few large values among many: the largest, the k largest, a share of probability.

One pass in blocks of lanes skips whatever cannot matter, so cost follows the few that do. A filter
is kept as a threshold (value, token): a token is in if its value is larger, or equal with an id not
above the threshold's.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures)
import math

import numpy as np

from draftree.kernels.cpu.jit import carray, njit
from draftree.kernels.cpu.kernel import native
from draftree.kernels.cpu.noise import MAX_NOISE, bits_above, noise_bits, noise_key, noise_of
from draftree.kernels.cpu.simd import (
    blend,
    exp,
    load,
    load_first,
    max_lanes,
    maximum,
    splat,
    store,
    store_first,
    sum_lanes,
)
from draftree.kernels.cpu.view import (
    f32_pointer,
    f32_view,
    f64_pointer,
    i64_pointer,
    i64_view,
    u32_view,
    u64_pointer,
)
from draftree.kernels.cpu.word import stack_bytes

_BLOCK = 64
_HASH_BYTES = 8 * _BLOCK
_MINUS_INFINITY = np.float32(-np.inf)
_ZERO, _ONE = np.int64(0), np.int64(1)  # typed: a literal would compile a callee once more
_ALL_BITS, _ONE_BIT = np.uint32(0xFFFFFFFF), np.uint32(1)
_NUM_BINS = 1024
_MASS_BYTES = 8 * _NUM_BINS
_BINS_PER_UNIT = 32.0
_NEAR = np.float32(16.0)  # what lies further below the maximum rarely takes part in a share


@njit
def _block_max(address, count):
    """The largest of up to 64 values."""
    if count >= _BLOCK:
        a, b = load(address), load(address + 64)
        c, d = load(address + 128), load(address + 192)
        return max_lanes(maximum(maximum(a, b), maximum(c, d)))
    top, low = splat(_MINUS_INFINITY), splat(_MINUS_INFINITY)
    for i in range(0, count, 16):
        top = maximum(blend(load_first(address + 4 * i, min(16, count - i)), low, count - i), top)
    return max_lanes(top)


@njit
def _argmax(values):
    address, best, start = values.ctypes.data, _MINUS_INFINITY, 0
    for i in range(0, len(values), _BLOCK):
        top = _block_max(address + 4 * i, len(values) - i)
        if top > best:
            best, start = top, i
    for i in range(start, min(start + _BLOCK, len(values))):
        if values[i] == best:
            return i
    return 0


@njit
def _sum_exp(values, top):
    """Sum of e^(value - top) in sixteen lanes by index."""
    address, count, shift = values.ctypes.data, len(values), splat(top)
    total, zero = splat(0.0), splat(0.0)
    whole = count // 16 * 16
    for i in range(0, 4 * whole, 64):
        total = total + exp(load(address + i) - shift)
    if whole < count:
        rest = exp(load_first(address + 4 * whole, count - whole) - shift)
        total = total + blend(rest, zero, count - whole)
    return sum_lanes(total)


@njit
def _is_worse(score_a, id_a, score_b, id_b):
    return score_a < score_b or (score_a == score_b and id_a > id_b)


@njit
def _sift(scores, ids, i, count):
    """Restore a heap whose root is the worst, after a change at i."""
    while True:
        worst, child = i, 2 * i + 1
        for c in range(child, min(child + 2, count)):
            if _is_worse(scores[c], ids[c], scores[worst], ids[worst]):
                worst = c
        if worst == i:
            return
        scores[i], scores[worst] = scores[worst], scores[i]
        ids[i], ids[worst] = ids[worst], ids[i]
        i = worst


@njit
def _push(scores, ids, count, limit, score, token):
    """Keep the best `limit`; returns how many are kept."""
    if count < limit:
        scores[count], ids[count] = score, token
        i = count
        while i > 0 and _is_worse(scores[i], ids[i], scores[(i - 1) // 2], ids[(i - 1) // 2]):
            parent = (i - 1) // 2
            scores[i], scores[parent] = scores[parent], scores[i]
            ids[i], ids[parent] = ids[parent], ids[i]
            i = parent
        return count + 1
    if _is_worse(scores[0], ids[0], score, token):
        scores[0], ids[0] = score, token
        _sift(scores, ids, _ZERO, limit)
    return count


@njit
def _sort(scores, ids, count):
    """Turn the heap into a list, best first."""
    for last in range(count - 1, 0, -1):
        scores[0], scores[last] = scores[last], scores[0]
        ids[0], ids[last] = ids[last], ids[0]
        _sift(scores, ids, _ZERO, last)


@njit
def _take_largest(values, limit, scores, ids):
    """The `limit` largest values, best first."""
    address, count = values.ctypes.data, _ZERO
    for start in range(0, len(values), _BLOCK):
        if count == limit and _block_max(address + 4 * start, len(values) - start) <= scores[0]:
            continue
        for i in range(start, min(start + _BLOCK, len(values))):
            if count < limit or values[i] > scores[0]:
                count = _push(scores, ids, count, limit, values[i], i)
    _sort(scores, ids, count)
    return count


@njit
def _hash_block(key, start, tokens, hashes):
    """Noise bits of the tokens, or without any of those from start on; returns the largest."""
    largest = np.uint64(0)
    if len(tokens) == 0:
        for i in range(_BLOCK):
            hashes[i] = noise_bits(key, start + i)
            largest = max(largest, hashes[i])
    for i in range(len(tokens)):
        hashes[i] = noise_bits(key, tokens[i])
        largest = max(largest, hashes[i])
    return largest


@njit
def _take_noisy(values, tokens, divisor, key, floor, threshold, threshold_id, limit, scores, ids):
    """The `limit` largest value / divisor + noise among the tokens inside the threshold, best
    first.

    tokens: whose values these are; none: of all, in order. ids: places in values. floor: a score
    that as many tokens are known to reach; the closer, the more is skipped.
    """
    address, count = values.ctypes.data, _ZERO
    hashes = carray(u64_pointer(stack_bytes(_HASH_BYTES)), _BLOCK)
    for start in range(0, len(values), _BLOCK):
        top = _block_max(address + 4 * start, len(values) - start)
        if top < threshold or top == _MINUS_INFINITY:
            continue
        top = top / divisor
        if count == limit:
            floor = max(floor, scores[0])
        margin = 1e-5 + 1e-6 * abs(floor)  # scores are rounded to float32
        gap = np.float64(floor) - np.float64(top) - margin
        if gap > MAX_NOISE:
            continue
        needed = bits_above(gap)
        if _hash_block(key, start, tokens[start : start + _BLOCK], hashes) < needed:
            continue
        for i in range(start, min(start + _BLOCK, len(values))):
            value = values[i]
            is_in = value > threshold or (value == threshold and i <= threshold_id)
            if is_in and hashes[i - start] >= needed and value > _MINUS_INFINITY:
                score = value / divisor + noise_of(hashes[i - start])
                count = _push(scores, ids, count, limit, score, i)
    _sort(scores, ids, count)
    return count


@njit
def _fill_bins(values, top, lowest, mass):
    """Add e^(value - top) of values from `lowest` on to bins by distance; returns their sum."""
    address, total = values.ctypes.data, 0.0
    for start in range(0, len(values), _BLOCK):
        if _block_max(address + 4 * start, len(values) - start) < lowest:
            continue
        for i in range(start, min(start + _BLOCK, len(values))):
            if values[i] >= lowest:
                below = np.float64(top) - np.float64(values[i])
                weight = math.exp(-below)
                mass[_bin_of(below)] += weight
                total += weight
    return total


@njit
def _bin_of(below):
    return int(min(below * _BINS_PER_UNIT, _NUM_BINS - 1.0))


@njit
def _share_threshold(values, top, share, scores, ids):
    """The threshold of the smallest set of largest values that holds a share of the probability."""
    wanted = np.float64(share) * np.float64(_sum_exp(values, top))
    mass = carray(f64_pointer(stack_bytes(_MASS_BYTES)), _NUM_BINS)
    mass[:] = 0.0
    if _fill_bins(values, top, top - _NEAR, mass) < wanted:
        mass[:] = 0.0
        _fill_bins(values, top, _MINUS_INFINITY, mass)
    held, chosen = 0.0, 0
    while chosen < _NUM_BINS - 1 and held + mass[chosen] < wanted:
        held += mass[chosen]
        chosen += 1
    address, count = values.ctypes.data, _ZERO
    lowest = top - np.float32((chosen + 1) / _BINS_PER_UNIT + 1e-3)
    if chosen == _NUM_BINS - 1:
        lowest = _MINUS_INFINITY
    for start in range(0, len(values), _BLOCK):
        if _block_max(address + 4 * start, len(values) - start) < lowest:
            continue
        for i in range(start, min(start + _BLOCK, len(values))):
            if values[i] >= lowest and _bin_of(np.float64(top) - np.float64(values[i])) == chosen:
                count = _push(scores, ids, count, len(values), values[i], i)
    _sort(scores, ids, count)
    return _border_in(scores, ids, count, top, held, wanted)


@njit
def _border_in(scores, ids, count, top, held, wanted):
    """The first entry of a list, best first, at which what is held reaches what is wanted."""
    for i in range(count):
        held += math.exp(np.float64(scores[i]) - np.float64(top))
        if held >= wanted:
            return scores[i], ids[i]
    if count == 0:
        return _MINUS_INFINITY, np.int64(0)
    return scores[count - 1], ids[count - 1]


@native("array -> int")
def choose_greedy(logits):
    return _argmax(f32_view(logits))


@native("array array array float float float")
def penalize(logits, seen_ids, seen_counts, repetition, presence, frequency):
    """In place: repetition scales towards less likely; presence and frequency subtract."""
    logits, seen_ids, seen_counts = f32_view(logits), i64_view(seen_ids), i64_view(seen_counts)
    for i in range(len(seen_ids)):
        token, count = seen_ids[i], seen_counts[i]
        value = logits[token]
        factor = np.float32(repetition)
        value = value / factor if value > 0 else value * factor
        if count > 0:
            value -= np.float32(presence) + np.float32(frequency) * np.float32(count)
        logits[token] = value


@native("array array")
def forbid(logits, bits):
    """In place: minus infinity for each token whose bit in the uint32 words is not set."""
    logits, bits = f32_view(logits), u32_view(bits)
    address, nothing = logits.ctypes.data, splat(_MINUS_INFINITY)
    for word in range(len(bits)):
        allowed, start = bits[word], 32 * word
        if allowed == _ALL_BITS:
            continue
        if allowed == 0 and start + 32 <= len(logits):
            store(address + 4 * start, nothing)
            store(address + 4 * start + 64, nothing)
            continue
        for i in range(start, min(start + 32, len(logits))):
            if (allowed >> np.uint32(i - start)) & _ONE_BIT == 0:
                logits[i] = _MINUS_INFINITY


@native("array float int float float int int array array array -> int")
def choose_filtered(logits, temperature, top_k, top_p, min_p, seed, position, scaled, scores, ids):
    """The token with the largest logit / T + noise among those that pass the filters."""
    logits, scaled = f32_view(logits), f32_view(scaled)
    scores, ids = f32_view(scores), i64_view(ids)
    source, target, count = logits.ctypes.data, scaled.ctypes.data, len(logits)
    divisor, whole = splat(np.float32(temperature)), len(logits) // 16 * 16
    for i in range(0, 4 * whole, 64):
        store(target + i, load(source + i) / divisor)
    if whole < count:
        rest = load_first(source + 4 * whole, count - whole) / divisor
        store_first(target + 4 * whole, count - whole, rest)
    best = _argmax(scaled)
    top = scaled[best]
    threshold, threshold_id = _MINUS_INFINITY, np.int64(count)
    if 0 < top_k < count:
        kept = _take_largest(scaled, top_k, scores, ids)
        threshold, threshold_id = scores[kept - 1], ids[kept - 1]
        if top_p < 1.0:
            total = 0.0
            for i in range(kept):
                total += math.exp(np.float64(scores[i]) - np.float64(top))
            threshold, threshold_id = _border_in(scores, ids, kept, top, 0.0, top_p * total)
    elif top_p < 1.0:
        threshold, threshold_id = _share_threshold(scaled, top, top_p, scores, ids)
    if min_p > 0.0:
        lowest = np.float32(np.float64(top) + math.log(min_p))
        if lowest > threshold:
            threshold, threshold_id = lowest, np.int64(count)
    key, one = noise_key(seed, position), np.float32(1.0)
    floor = top + noise_of(noise_bits(key, best))
    every = ids[:0]
    kept = _take_noisy(scaled, every, one, key, floor, threshold, threshold_id, _ONE, scores, ids)
    return ids[0] if kept > 0 else best


@njit
def _noisy_floor(values, tokens, divisor, key, limit, scratch):
    """A score that `limit` tokens reach: the last of the best among the largest values."""
    num_tried = min(2 * limit, len(values))
    words = scratch.ctypes.data
    places, large = i64_pointer(words), f32_pointer(words + 24 * limit)
    places, large = carray(places, num_tried), carray(large, num_tried)
    _take_largest(values, num_tried, large, places)
    ids, scores = i64_pointer(words + 16 * limit), f32_pointer(words + 32 * limit)
    scores, ids, count = carray(scores, limit), carray(ids, limit), _ZERO
    for i in range(num_tried):
        token = tokens[places[i]] if len(tokens) > 0 else places[i]
        score = large[i] / divisor + noise_of(noise_bits(key, token))
        count = _push(scores, ids, count, limit, score, places[i])
    return scores[0]


@njit
def _rank_row(logits, tokens, temperature, key, reach, scores, ids, log_probs, scratch):
    limit = _take_largest(logits, len(ids), scores, ids)
    top = scores[0]
    log_total = np.float64(top) + math.log(np.float64(_sum_exp(logits, top)))
    if temperature > 0.0 and scores[limit - 1] > _MINUS_INFINITY:
        divisor = np.float32(temperature)
        floor = _noisy_floor(logits, tokens, divisor, key, limit, scratch)
        threshold, last = (floor - np.float32(reach)) * divisor, len(logits)
        kept = _take_noisy(logits, tokens, divisor, key, floor, threshold, last, limit, scores, ids)
        if kept < limit:
            low = _MINUS_INFINITY
            _take_noisy(logits, tokens, divisor, key, floor, low, last, limit, scores, ids)
    for i in range(len(ids)):
        log_probs[i] = np.float32(np.float64(logits[ids[i]]) - log_total)
        if len(tokens) > 0:
            ids[i] = tokens[ids[i]]


@native("array array float int int float int array array array array")
def _rank_rows(
    logits, tokens, temperature, seed, position, reach, count, scores, ids, log_probs, scratch
):
    logits, tokens, scratch = f32_view(logits), i64_view(tokens), i64_view(scratch)
    scores, ids, log_probs = f32_view(scores), i64_view(ids), f32_view(log_probs)
    num_rows = len(ids) // count
    width = len(logits) // num_rows
    for row in range(num_rows):
        key, best = noise_key(seed, position + row), slice(row * count, (row + 1) * count)
        values = logits[row * width : (row + 1) * width]
        found = scores[best], ids[best], log_probs[best]
        _rank_row(values, tokens, temperature, key, reach, *found, scratch)


def rank_rows(logits, tokens, temperature, seed, position, reach, count):
    """Scores float32, tokens int64, log-probabilities float32 [rows, count], best first: by logit,
    or with a temperature by logit / T + noise at position, position + 1, …

    tokens as in _take_noisy. reach: what would need more noise than this may be missed.
    """
    ids = np.empty((len(logits), count), np.int64)
    scores, log_probs = np.empty((2, len(logits), count), np.float32)
    scratch = np.empty(5 * count, np.int64) if temperature > 0.0 else tokens  # of _noisy_floor
    noise = temperature, seed, position, reach
    _rank_rows(logits, tokens, *noise, count, scores, ids, log_probs, scratch)
    return scores, ids, log_probs
