//! What is just worth a round and a bucket: how large the smallest ones are, at the beginning of a pass and at its end.

use std::time::Duration;

/// How fast a reducer's rounds and buckets have been at best.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Of the shortest round: what it takes to ask all ranks when none keeps the others waiting.
    round: Option<Duration>,
    /// Of the fastest bucket, which shared the link with few others.
    bytes_per_s: f64,
}

impl Pace {
    /// A round has ended.
    pub(super) fn add_round(&mut self, took: Duration) {
        self.round = Some(self.round.map_or(took, |shortest| shortest.min(took)));
    }

    /// A bucket has ended, of so many bytes of gradients.
    pub(super) fn add_bucket(&mut self, bytes: u64, took: Duration) {
        self.bytes_per_s = self.bytes_per_s.max(bytes as f64 / took.as_secs_f64().max(f64::MIN_POSITIVE));
    }

    /// The least that a round carries before the end of a pass. Every byte of it leaves earlier than it would otherwise, by up to
    /// the time that so many bytes take. The round costs a round's time, if the next one has to wait for it; and processor
    /// time for one more round and bucket.
    pub(super) fn least_bytes(&self) -> u64 {
        // Nothing was measured before the end of the first pass: all rounds carry a bucket.
        self.round.map_or(u64::MAX, |round| (WORTH * round.as_secs_f64() * self.bytes_per_s) as u64)
    }
}

/// How many rounds' time its bytes must take: one that the next round may wait, one of processor time, and as much to be gained.
const WORTH: f64 = 4.0;

#[cfg(test)]
mod tests {
    use super::*;

    /// The shortest round and the fastest bucket count, whatever comes before and after them. A bucket that takes no time has no end
    /// of a rate, and is no defect.
    #[test]
    fn the_best_of_each_counts() {
        let mut pace = Pace::default();
        assert_eq!(pace.least_bytes(), u64::MAX);
        for (round_ms, bytes) in [(3, 1 << 20), (1, 1 << 10), (20, 1 << 21), (2, 1 << 20)] {
            pace.add_round(Duration::from_millis(round_ms));
            pace.add_bucket(bytes, Duration::from_millis(10));
        }
        // 2 MiB in 10 ms, four times 1 ms.
        assert!(pace.least_bytes().abs_diff((1 << 21) * 4 / 10) <= 1, "{pace:?}");
        pace.add_bucket(64, Duration::ZERO);
        assert_eq!(pace.least_bytes(), u64::MAX);
    }
}
