//! The clock that all processes of a host share.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the monotonic clock.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
