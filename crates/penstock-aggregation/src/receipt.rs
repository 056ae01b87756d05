//! Receipts: a daemon asks whether an address receives packets before it sends anything else there.
//!
//! The one who opens a job names the addresses of its nodes, and one packet can cause up to 64 others. So a daemon that lets
//! everybody open jobs could be made to flood a third party. To an address that has not shown that it receives, such a daemon
//! sends only receipts: one for each packet from there, or for one that another node of the job has sent, no longer than what
//! came. The address returns the number in the receipt, which only a receiver can know (the cookie of DTLS, RFC 6347, section
//! 4.2.1, and of QUIC's Retry).
//!
//! ```text
//!        +---------+------+------+------------------+--------+-----+------------------+
//!   0    |  magic  | vers.|  16  |       job        | epoch  |  0  |        0         |
//!        +---------+------+------+------------------+--------+-----+------------------+
//!  16    |              returned             |   0   ...    |       asked            |
//!        +-----------------------------------+--------------+------------------------+ 40, then 0 up to 48
//! ```
//! For the machines, and for switches, a receipt is a malformed packet; drivers take it out first.

use super::Key;
use super::packet::{HEADER_BYTES, MAGIC, VERSION};

/// A receipt: asks for a number to be returned, or returns one, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The job that it belongs to.
    pub job: u32,
    /// The epoch of the job.
    pub epoch: u16,
    /// The number that the receiver had asked for; 0: none.
    pub returned: u64,
    /// The number that the receiver is to return; 0: none.
    pub asked: u64,
}

impl Receipt {
    /// Whether a datagram is a receipt of this version. (One of another version is a packet of another version, and counted as
    /// that.)
    #[must_use]
    pub fn is(bytes: &[u8]) -> bool {
        bytes.len() == HEADER_BYTES && bytes[..4] == START
    }

    /// The bytes on the wire.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..4].copy_from_slice(&START);
        out[4..8].copy_from_slice(&self.job.to_be_bytes());
        out[8..10].copy_from_slice(&self.epoch.to_be_bytes());
        out[16..24].copy_from_slice(&self.returned.to_be_bytes());
        out[32..40].copy_from_slice(&self.asked.to_be_bytes());
        out
    }

    /// Reads what [`Receipt::encode`] wrote; `None` for other bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Receipt> {
        let whole: &[u8; HEADER_BYTES] = bytes.try_into().ok()?;
        let u64_at = |at: usize| u64::from_be_bytes(whole[at..at + 8].try_into().expect("8 bytes"));
        let receipt = Receipt {
            job: u32::from_be_bytes(whole[4..8].try_into().expect("4 bytes")),
            epoch: u16::from_be_bytes([whole[8], whole[9]]),
            returned: u64_at(16),
            asked: u64_at(32),
        };
        (receipt.encode() == *whole).then_some(receipt)
    }

    /// A worker's answer: returns the number, and asks for none.
    #[must_use]
    pub fn answer(&self) -> Option<Receipt> {
        (self.asked != 0).then_some(Receipt { returned: self.asked, asked: 0, ..*self })
    }

    /// The number that an address is asked to return; it cannot be guessed without the key.
    #[must_use]
    pub fn number(key: &Key, job: u32, epoch: u16, address: &std::net::SocketAddr) -> u64 {
        let mut bytes = [0; 24];
        bytes[0..4].copy_from_slice(&job.to_be_bytes());
        bytes[4..6].copy_from_slice(&epoch.to_be_bytes());
        bytes[6..8].copy_from_slice(&address.port().to_be_bytes());
        let ip = match address.ip() {
            std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            std::net::IpAddr::V6(ip) => ip,
        };
        bytes[8..24].copy_from_slice(&ip.octets());
        // 0 means that nothing is asked.
        key.code(&bytes) | 1
    }
}

/// Magic, version, and a kind beyond those of [`super::Kind`], with room for more of them.
const START: [u8; 4] = [(MAGIC >> 8) as u8, MAGIC as u8, VERSION, 16];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PacketError, decode};
    use proptest::prelude::*;

    proptest! {
        /// It survives the wire, is no packet to a machine, and nothing else is taken for one.
        #[test]
        fn round_trip(job: u32, epoch: u16, returned: u64, asked: u64, at in 0usize..HEADER_BYTES, byte: u8) {
            let receipt = Receipt { job, epoch, returned, asked };
            let mut bytes = receipt.encode();
            prop_assert!(Receipt::is(&bytes) && decode(&bytes).is_err());
            prop_assert_eq!(Receipt::decode(&bytes), Some(receipt));
            prop_assert_eq!(receipt.answer().is_some(), asked != 0);
            bytes[at] = byte;
            prop_assert!(Receipt::decode(&bytes).is_none_or(|other| other.encode() == bytes));
            prop_assert_eq!(Receipt::decode(&bytes[..at]), None);
        }
    }

    /// One of another version is a packet of another version, so that daemons count and report it.
    #[test]
    fn other_versions() {
        let mut bytes = Receipt { job: 1, epoch: 1, returned: 0, asked: 5 }.encode();
        bytes[2] = VERSION - 1;
        assert!(!Receipt::is(&bytes));
        assert_eq!(decode(&bytes), Err(PacketError::Version(VERSION - 1)));
    }

    /// Another job, epoch, address, port or key has another number.
    #[test]
    fn numbers() {
        let number = |key: u8, job, epoch, address: &str| {
            Receipt::number(&Key([key; 16]), job, epoch, &address.parse().expect("an address"))
        };
        let all = [
            number(1, 7, 1, "10.0.0.1:5"),
            number(2, 7, 1, "10.0.0.1:5"),
            number(1, 8, 1, "10.0.0.1:5"),
            number(1, 7, 2, "10.0.0.1:5"),
            number(1, 7, 1, "10.0.0.2:5"),
            number(1, 7, 1, "10.0.0.1:6"),
            number(1, 7, 1, "[fd00::1]:5"),
        ];
        for (i, one) in all.iter().enumerate() {
            assert!(*one != 0 && !all[..i].contains(one));
        }
    }
}
