//! How long things take, and how often waiting for them is doubled: what workers and servers share.

/// Mean and variation of RFC 6298, with one more sample.
pub(super) fn smoothed(before: Option<(u64, u64)>, sample: u64) -> (u64, u64) {
    match before {
        None => (sample, sample / 2),
        Some((mean, variation)) => ((7 * mean + sample) / 8, (3 * variation + mean.abs_diff(sample)) / 4),
    }
}

/// Doublings of a time-out: 64 times.
pub(super) const MAX_BACKOFF: u32 = 6;
/// So many answers in a row to what was asked for more than once: they take longer than they did. By chance rare: at 5 % loss in each
/// direction one in ten (one in five through an aggregator) is lost again, and so all of these in one of 10^8 (10^5).
pub(super) const MAX_DOUBTFUL: u32 = 8;
