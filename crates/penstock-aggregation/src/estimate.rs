//! Round-trip estimates and backoff, which workers and servers share.

/// Mean and variation of RFC 6298, with one more sample.
pub(super) fn smoothed(before: Option<(u64, u64)>, sample: u64) -> (u64, u64) {
    match before {
        None => (sample, sample / 2),
        Some((mean, variation)) => ((7 * mean + sample) / 8, (3 * variation + mean.abs_diff(sample)) / 4),
    }
}

/// Doublings of a time-out: at most 64 times its first value.
pub(super) const MAX_BACKOFF: u32 = 6;
/// After this many answers in a row to repeated requests, the round trip counts as longer than before. Rare by chance: at 5 %
/// loss in each direction one in ten (one in five through an aggregator) is lost again, so all of these are lost in one of
/// 10^8 (10^5).
pub(super) const MAX_DOUBTFUL: u32 = 8;
