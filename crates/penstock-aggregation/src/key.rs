//! The keyed check of a packet.

use siphasher::sip::SipHasher24;
use std::fmt;
use std::hash::Hasher;

/// A job's key for one epoch: SipHash-2-4 (Aumasson and Bernstein, 2012).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(pub [u8; 16]);

impl Key {
    /// The code over a header, which holds the digest of the payload.
    #[must_use]
    pub fn code(&self, bytes: &[u8]) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(bytes);
        hasher.finish()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vector of the SipHash paper, appendix A: key 00..0f, input 00..0e.
    #[test]
    fn vector_of_the_paper() {
        let key = Key(std::array::from_fn(|i| i as u8));
        let input: [u8; 15] = std::array::from_fn(|i| i as u8);
        assert_eq!(key.code(&input), 0xa129_ca61_49be_45e5);
    }

    /// A key does not appear in a log.
    #[test]
    fn debug_hides_it() {
        assert_eq!(format!("{:?}", Key([7; 16])), "Key(..)");
    }
}
