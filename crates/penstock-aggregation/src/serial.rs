//! Numbers that wrap around (RFC 1982): a is newer than b when it is less than half the circle ahead.

use std::fmt;

/// A SeqNum, Ack or Credit.
///
/// Not `Ord`: the order is circular. It holds between any two numbers that are less than 2^31 apart. The window and the
/// lifetime of a datagram guarantee that: at 100 Gbit/s and 1 KiB a block, 2^31 blocks take three minutes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Serial(pub u32);

impl Serial {
    /// The number `n` further on.
    #[must_use]
    pub fn plus(self, n: u32) -> Serial {
        let unused = unused_bits();
        Serial(self.0.wrapping_add(n) << unused >> unused)
    }

    /// How far it lies ahead of `base`; negative when behind.
    #[must_use]
    pub fn ahead_of(self, base: Serial) -> i32 {
        let unused = unused_bits();
        (self.0.wrapping_sub(base.0) << unused) as i32 >> unused
    }

    /// Whether it lies strictly ahead.
    #[must_use]
    pub fn is_newer_than(self, other: Serial) -> bool {
        self.ahead_of(other) > 0
    }

    /// The number that is further on.
    #[must_use]
    pub fn newest(self, other: Serial) -> Serial {
        if other.is_newer_than(self) { other } else { self }
    }

    /// The number that is further behind.
    #[must_use]
    pub fn oldest(self, other: Serial) -> Serial {
        if other.is_newer_than(self) { self } else { other }
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How many of the upper bits no number has. Only tests leave some unused, so that machines go around the circle often.
#[cfg(not(test))]
fn unused_bits() -> u32 {
    0
}

#[cfg(test)]
fn unused_bits() -> u32 {
    UNUSED_BITS.get()
}

#[cfg(test)]
thread_local! {
    static UNUSED_BITS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// On this thread the circle has 2^`bits` numbers from now on.
#[cfg(test)]
pub(crate) fn use_circle_of(bits: u32) {
    UNUSED_BITS.set(32 - bits);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Order holds across the wrap, from both sides of the half circle.
    #[test]
    fn order_is_circular() {
        for base in [0, 1, 5, u32::MAX - 1, u32::MAX, 1 << 31] {
            let base = Serial(base);
            assert!(base.plus(1).is_newer_than(base) && !base.is_newer_than(base.plus(1)));
            assert!(base.plus((1 << 31) - 1).is_newer_than(base));
            assert!(!base.plus(1 << 31).is_newer_than(base));
            assert!(!base.is_newer_than(base));
            assert_eq!(base.newest(base.plus(3)), base.plus(3));
            assert_eq!(base.plus(3).newest(base), base.plus(3));
            assert_eq!(base.oldest(base.plus(3)), base);
            assert_eq!(base.plus(3).ahead_of(base), 3);
            assert_eq!(base.ahead_of(base.plus(3)), -3);
        }
    }
}
