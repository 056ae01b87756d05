//! Which buckets go first, where the last gradients of a pass are needed first.

/// How much less urgent a bucket is than what is no bucket, if its last gradient is this one of so many: from 1 to `LEVELS`.
pub(super) fn level(last: usize, gradients: usize) -> i32 {
    1 + (LEVELS * (gradients - 1 - last) / gradients) as i32
}

/// How many priorities the buckets of a reducer have that sends its last gradients first.
const LEVELS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// The last gradient is the most urgent one, and the first the least; no number of gradients leaves the levels.
    #[test]
    fn later_gradients_are_more_urgent() {
        for count in [1, 2, 15, 16, 17, 1000] {
            let levels: Vec<i32> = (0..count).map(|last| level(last, count)).collect();
            assert!(levels.is_sorted_by(|one, next| one >= next) && levels[count - 1] == 1, "{levels:?}");
            assert_eq!(levels[0] as usize, if count < LEVELS { 1 + LEVELS * (count - 1) / count } else { LEVELS });
        }
    }
}
