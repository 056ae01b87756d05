//! What of a reducer goes first.

use penstock_types::Priority;

/// The priority of a round of agreement, if buckets have the given one. Where the next pass waits for the last gradients, rounds are
/// urgent, and keep the queues short in which these would wait. Elsewhere that is not worth the stream that is kept free for it.
pub(super) fn of_round(given: Priority, last_first: bool) -> Priority {
    if last_first { given.min(Priority::LEAST_URGENT) } else { given }
}

/// The priority of a bucket where the last gradients are needed first, by the index of its last gradient. What is urgent (below 0)
/// stays so.
pub(super) fn priority(given: Priority, last: usize, gradients: usize) -> Priority {
    let spread = given.0.saturating_add(level(last, gradients));
    Priority(if given.0 < 0 { spread.min(-1) } else { spread })
}

/// How much less urgent a bucket is than what is no bucket, if its last gradient is this one of so many: from 1 to `LEVELS`.
fn level(last: usize, gradients: usize) -> i32 {
    1 + (LEVELS * (gradients - 1 - last) / gradients) as i32
}

/// How many priorities the buckets of a reducer have that sends its last gradients first.
const LEVELS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    /// Priorities at the ends of the range and beside 0 do not overflow, and no bucket of what is urgent ceases to be.
    #[test]
    fn what_is_urgent_stays_so() {
        for given in [i32::MIN, -128, -17, -2, -1, 0, 1, 127, i32::MAX] {
            for last in 0..100 {
                let found = priority(Priority(given), last, 100).0;
                assert!(found >= given && (found < 0) == (given < 0), "{given}, {last}: {found}");
            }
        }
    }

    /// Where gradients are needed one by one, and nowhere else. What the user has made more urgent stays so.
    #[test]
    fn rounds_are_urgent_where_a_pass_waits_for_them() {
        for (given, round) in [(-5, -5), (-1, -1), (0, -1), (127, -1)] {
            assert_eq!(of_round(Priority(given), true), Priority(round));
            assert_eq!(of_round(Priority(given), false), Priority(given));
        }
    }

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
