//! The packet: 48 bytes of header, then a block. Drawn in `docs/reference/packets.md`, and here:
//!
//! ```text
//!        0         2      3      4                  8        10     11     12
//!        +---------+------+------+------------------+--------+------+------+------------------+
//!   0    |  magic  | vers.| kind |       job        | epoch  |format|flags |     SeqNum       |
//!        +---------+------+------+------------------+--------+------+------+------------------+
//!  16    |       Ack             |      Credit      |exponent|    length   |     digest       |
//!        +-----------------------+------------------+--------+-------------+------------------+
//!  32    |                  workers                 |                   MAC                   |
//!        +------------------------------------------+-----------------------------------------+ 48
//! ```
//! All numbers are big-endian, also those of the payload. Nothing here allocates.

use super::key::Key;
use super::serial::Serial;
use std::fmt;

/// What a packet means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// A block, or a sum of blocks, on its way up.
    Push = 1,
    /// A committed sum on its way down.
    Result = 2,
    /// Reports which results workers have, on its way up.
    HeartbeatUp = 3,
    /// Reports which blocks the server has, on its way down.
    HeartbeatDown = 4,
    /// A worker asks for a result.
    Request = 5,
    /// Names the workers whose blocks are missing, on its way down.
    Missing = 6,
    /// The server has the sum of a block, on its way down, where results come apart.
    Accepted = 7,
    /// A worker asks for a result by its number in the pull flow.
    Pull = 8,
    /// A result of the pull flow, on its way down.
    Pulled = 9,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Kind> {
        use Kind::*;
        let all = [Push, Result, HeartbeatUp, HeartbeatDown, Request, Missing, Accepted, Pull, Pulled];
        all.into_iter().find(|kind| *kind as u8 == byte)
    }

    /// Whether it carries a block.
    #[must_use]
    pub fn has_block(self) -> bool {
        matches!(self, Kind::Push | Kind::Result | Kind::Pulled)
    }

    /// Whether workers send it.
    #[must_use]
    pub fn is_upward(self) -> bool {
        matches!(self, Kind::Push | Kind::HeartbeatUp | Kind::Request | Kind::Pull)
    }
}

/// What a block's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Format {
    /// No block.
    None = 0,
    /// 32-bit integers, added modulo 2^32.
    I32 = 1,
    /// 16-bit integers, added modulo 2^16.
    I16 = 2,
    /// Exponents of other blocks, 16-bit integers, combined by maximum.
    Exponents = 3,
    /// Floats as the tensor has them.
    F32 = 4,
    /// Floats as the tensor has them.
    F16 = 5,
    /// Floats as the tensor has them.
    Bf16 = 6,
    /// UTF-8: why the work behind a buffer failed, in place of its results.
    Text = 7,
}

impl Format {
    fn from_byte(byte: u8) -> Option<Format> {
        use Format::*;
        [None, I32, I16, Exponents, F32, F16, Bf16, Text].into_iter().find(|format| *format as u8 == byte)
    }

    /// Bytes of an element; 0 of none.
    #[must_use]
    pub fn element_bytes(self) -> usize {
        match self {
            Format::None => 0,
            Format::Text => 1,
            Format::I32 | Format::F32 => 4,
            Format::I16 | Format::Exponents | Format::F16 | Format::Bf16 => 2,
        }
    }

    /// Whether the order of additions matters.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Format::F32 | Format::F16 | Format::Bf16)
    }
}

/// The header of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// What the packet means.
    pub kind: Kind,
    /// The job that the packet belongs to.
    pub job: u32,
    /// The epoch of the job.
    pub epoch: u16,
    /// The format of the block's elements; `None` in a packet without a block.
    pub format: Format,
    /// A bit set of [`FLAG_LOST`], [`FLAG_FULL`] and [`FLAG_LAST`].
    pub flags: u8,
    /// The number of the block that the packet carries, requests or names; 0 in heartbeats. Where results come apart, those and
    /// [`Kind::Pull`] have numbers of their own.
    pub seq: Serial,
    /// The next number that the sender expects: of results in packets that go up, of blocks in packets that go down.
    pub ack: Serial,
    /// The highest SeqNum that the receiver may send.
    pub credit: Serial,
    /// The exponent that the block's workers share.
    pub exponent: i16,
    /// Going up: the name of the sender at the node above it, a bitmap of that node's children. In a `Missing`: the children of
    /// the node that it comes from whose blocks are missing; 0 if only blocks of other nodes are. Otherwise, going down: the state of the
    /// job's paths (`path.rs`), and in the upper half, where results come apart, a number: [`Header::aside`].
    pub workers: u64,
}

impl Header {
    /// Where results come apart: of a result the SeqNum of its block, of other packets that go down the number of the result that
    /// is sent next.
    pub(crate) fn aside(&self) -> Serial {
        Serial((self.workers >> 32) as u32)
    }

    /// The bytes on the wire, sealed over `payload` under `key`. The payload is at most [`MAX_PAYLOAD_BYTES`].
    #[must_use]
    pub fn encode(&self, payload: &[u8], key: Option<&Key>) -> [u8; HEADER_BYTES] {
        debug_assert!(payload.len() <= MAX_PAYLOAD_BYTES);
        let mut out = [0u8; HEADER_BYTES];
        out[0..2].copy_from_slice(&MAGIC.to_be_bytes());
        out[2] = VERSION;
        out[3] = self.kind as u8;
        out[4..8].copy_from_slice(&self.job.to_be_bytes());
        out[8..10].copy_from_slice(&self.epoch.to_be_bytes());
        out[10] = self.format as u8;
        out[11] = self.flags;
        out[12..16].copy_from_slice(&self.seq.0.to_be_bytes());
        out[16..20].copy_from_slice(&self.ack.0.to_be_bytes());
        out[20..24].copy_from_slice(&self.credit.0.to_be_bytes());
        out[24..26].copy_from_slice(&self.exponent.to_be_bytes());
        out[26..28].copy_from_slice(&(payload.len() as u16).to_be_bytes());
        out[32..40].copy_from_slice(&self.workers.to_be_bytes());
        if let Some(key) = key {
            out[28..32].copy_from_slice(&crc32c::crc32c(payload).to_be_bytes());
            let code = key.code(&out[..CODED_BYTES]);
            out[40..48].copy_from_slice(&code.to_be_bytes());
        }
        out
    }
}

/// A received packet whose form is valid; [`Packet::verify`] says whether it belongs to the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// The header of the packet.
    pub header: Header,
    /// The block that follows the header; empty in packets without one.
    pub payload: &'a [u8],
    coded: &'a [u8],
    digest: u32,
    code: u64,
}

impl<'a> Packet<'a> {
    /// A packet that a node passes to itself.
    pub(crate) fn own(header: Header, payload: &'a [u8]) -> Packet<'a> {
        Packet { header, payload, coded: &[], digest: 0, code: 0 }
    }

    /// Checks MAC and digest. Without a key both must be 0, so that two nodes of which only one has a key never communicate.
    pub fn verify(&self, key: Option<&Key>) -> Result<(), PacketError> {
        let good = match key {
            Some(key) => key.code(self.coded) == self.code && crc32c::crc32c(self.payload) == self.digest,
            None => self.code == 0 && self.digest == 0,
        };
        if good { Ok(()) } else { Err(PacketError::Key) }
    }
}

/// Reads a datagram and validates its form.
pub fn decode(bytes: &[u8]) -> Result<Packet<'_>, PacketError> {
    if bytes.len() < HEADER_BYTES {
        return Err(PacketError::Truncated { bytes: bytes.len() });
    }
    let u16_at = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let u32_at = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    let u64_at = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    if u16_at(0) != MAGIC {
        return Err(PacketError::Magic);
    }
    if bytes[2] != VERSION {
        return Err(PacketError::Version(bytes[2]));
    }
    let kind = Kind::from_byte(bytes[3]).ok_or(PacketError::Kind(bytes[3]))?;
    let format = Format::from_byte(bytes[10]).ok_or(PacketError::Format(bytes[10]))?;
    let payload = &bytes[HEADER_BYTES..];
    let length = usize::from(u16_at(26));
    if length != payload.len() || length > MAX_PAYLOAD_BYTES {
        return Err(PacketError::Length { claimed: length, bytes: payload.len() });
    }
    if kind.has_block() == (format == Format::None) {
        return Err(PacketError::Block(kind));
    }
    if format == Format::Text && kind != Kind::Pulled {
        return Err(PacketError::Format(bytes[10]));
    }
    let whole = match format.element_bytes() {
        0 => length == 0,
        element => length > 0 && length.is_multiple_of(element),
    };
    if !whole {
        return Err(PacketError::Elements { format, length });
    }
    let header = Header {
        kind,
        job: u32_at(4),
        epoch: u16_at(8),
        format,
        flags: bytes[11],
        seq: Serial(u32_at(12)),
        ack: Serial(u32_at(16)),
        credit: Serial(u32_at(20)),
        exponent: u16_at(24) as i16,
        workers: u64_at(32),
    };
    let allowed = match kind {
        Kind::Push => FLAG_LOST | FLAG_FULL | FLAG_LAST,
        Kind::Result | Kind::Pulled => FLAG_FULL,
        Kind::HeartbeatUp | Kind::Request | Kind::Pull => FLAG_LOST,
        Kind::HeartbeatDown | Kind::Missing | Kind::Accepted => 0,
    };
    if header.flags & !allowed != 0 {
        return Err(PacketError::Flags { kind, flags: header.flags });
    }
    if kind.is_upward() && header.workers == 0 {
        return Err(PacketError::Workers);
    }
    Ok(Packet { header, payload, coded: &bytes[..CODED_BYTES], digest: u32_at(28), code: u64_at(40) })
}

/// Why bytes are not a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PacketError {
    /// Fewer bytes than a header.
    Truncated {
        /// How many bytes the datagram has.
        bytes: usize,
    },
    /// The first two bytes are not the magic number of Penstock's packets.
    Magic,
    /// The packet has another version than [`VERSION`].
    Version(u8),
    /// No kind of packet has this number.
    Kind(u8),
    /// No format of blocks has this number.
    Format(u8),
    /// Flags that this kind may not carry.
    Flags {
        /// The kind of the packet.
        kind: Kind,
        /// The flags that it carries.
        flags: u8,
    },
    /// The datagram is not as long as it claims, or longer than a block may be.
    Length {
        /// The length in the header.
        claimed: usize,
        /// The bytes that followed the header.
        bytes: usize,
    },
    /// A block in a packet of a kind that has none, or the other way round.
    Block(Kind),
    /// The block is not a whole number of elements.
    Elements {
        /// The format of the block.
        format: Format,
        /// The length of the block in bytes.
        length: usize,
    },
    /// The packet names no worker.
    Workers,
    /// The MAC or the digest is wrong.
    Key,
}

impl fmt::Display for PacketError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PacketError::Truncated { bytes } => {
                write!(f, "a datagram of {bytes} bytes; a header has {HEADER_BYTES}")
            }
            PacketError::Magic => write!(f, "a datagram that is not Penstock's"),
            PacketError::Version(version) => {
                write!(f, "a packet of version {version}; this is {VERSION}: install the same release everywhere")
            }
            PacketError::Kind(kind) => write!(f, "a packet of unknown kind {kind}"),
            PacketError::Format(format) => write!(f, "a block of unknown format {format}"),
            PacketError::Flags { kind, flags } => write!(f, "a {kind:?} packet with flags {flags:#x}"),
            PacketError::Length { claimed, bytes } => {
                write!(f, "a packet of {bytes} bytes that claims {claimed}; at most {MAX_PAYLOAD_BYTES} are allowed")
            }
            PacketError::Block(kind) => write!(f, "a {kind:?} packet with a block where none belongs, or without one"),
            PacketError::Elements { format, length } => {
                write!(f, "{length} bytes, which are not elements of {format:?}")
            }
            PacketError::Workers => write!(f, "a packet that names no worker"),
            PacketError::Key => write!(f, "a packet under another key, or damaged"),
        }
    }
}

impl std::error::Error for PacketError {}

/// Bytes of a header.
pub const HEADER_BYTES: usize = 48;
/// The largest block: a multiple of 64 bytes that fits, with this header, UDP and IPv6, an MTU of 9000.
pub const MAX_PAYLOAD_BYTES: usize = 8896;
/// The sender receives nothing from the aggregator above it.
pub const FLAG_LOST: u8 = 1;
/// Elements as the tensor has them. Only the server takes such blocks; aggregators that only add integers drop them.
pub const FLAG_FULL: u8 = 2;
/// The block is the last one of its buffer.
pub const FLAG_LAST: u8 = 4;
pub(super) const MAGIC: u16 = 0x5041;
/// The version of packets and receipts, which daemons report. 2: servers and aggregators without a secret send only to
/// addresses that answer receipts. 3: what goes down carries the state of the job's paths, and no longer the workers that bypass. 4: the
/// pull flow.
pub const VERSION: u8 = 4;
/// How many bytes of the header the MAC covers.
const CODED_BYTES: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header {
            kind: Kind::Push,
            job: 0x0102_0304,
            epoch: 0x0506,
            format: Format::I32,
            flags: FLAG_LOST,
            seq: Serial(0x0708_090a),
            ack: Serial(0x0b0c_0d0e),
            credit: Serial(0x0f10_1112),
            exponent: -2,
            workers: 0x1314_1516_1718_191a,
        }
    }

    fn bytes(header: &Header, payload: &[u8], key: Option<&Key>) -> Vec<u8> {
        [&header.encode(payload, key)[..], payload].concat()
    }

    /// Every field lies where the document draws it.
    #[test]
    fn layout() {
        let packet = bytes(&header(), &[0xaa; 8], None);
        let head = "5041 04 01 01020304 0506 01 01 0708090a 0b0c0d0e 0f101112 fffe 0008 00000000 131415161718191a";
        let head: String = head.replace(' ', "") + &"00".repeat(8) + &"aa".repeat(8);
        assert_eq!(packet.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), head);
    }

    /// A packet survives the wire, with a key and without; only the same key opens it.
    #[test]
    fn round_trip() {
        let (key, other) = (Key([1; 16]), Key([2; 16]));
        let sealed = bytes(&header(), &[7; 12], Some(&key));
        let packet = decode(&sealed).unwrap();
        assert_eq!((packet.header, packet.payload), (header(), &[7u8; 12][..]));
        assert_eq!(packet.verify(Some(&key)), Ok(()));
        assert_eq!(packet.verify(Some(&other)), Err(PacketError::Key));
        assert_eq!(packet.verify(None), Err(PacketError::Key));
        let open = bytes(&header(), &[7; 12], None);
        assert_eq!(decode(&open).unwrap().verify(None), Ok(()));
        assert_eq!(decode(&open).unwrap().verify(Some(&key)), Err(PacketError::Key));
    }

    /// Under a key no single flipped bit goes unnoticed, in header or block.
    #[test]
    fn every_flipped_bit_is_noticed() {
        let key = Key([9; 16]);
        let good = bytes(&header(), &[5; 16], Some(&key));
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let noticed = decode(&bad).map_or_else(Err, |packet| packet.verify(Some(&key)));
            assert!(noticed.is_err(), "bit {bit} flipped unnoticed");
        }
    }

    /// Each way to be malformed has its reason.
    #[test]
    fn reasons() {
        let good = bytes(&header(), &[0; 8], None);
        let with = |at: usize, byte: u8| {
            let mut bad = good.clone();
            bad[at] = byte;
            decode(&bad).unwrap_err()
        };
        assert_eq!(decode(&good[..47]), Err(PacketError::Truncated { bytes: 47 }));
        assert_eq!(decode(&good[..52]), Err(PacketError::Length { claimed: 8, bytes: 4 }));
        assert_eq!(decode(&[&good[..], &[0]].concat()), Err(PacketError::Length { claimed: 8, bytes: 9 }));
        assert_eq!(with(0, 0), PacketError::Magic);
        assert_eq!(with(2, 1), PacketError::Version(1));
        assert_eq!(with(3, 0), PacketError::Kind(0));
        assert_eq!(with(3, 10), PacketError::Kind(10));
        assert_eq!(with(3, 3), PacketError::Block(Kind::HeartbeatUp));
        assert_eq!(with(10, 8), PacketError::Format(8));
        assert_eq!(with(10, 7), PacketError::Format(7), "a text is no block to add");
        assert_eq!(with(10, 0), PacketError::Block(Kind::Push));
        assert_eq!(with(11, 8), PacketError::Flags { kind: Kind::Push, flags: 8 });
        let odd = bytes(&header(), &[0; 6], None);
        assert_eq!(decode(&odd), Err(PacketError::Elements { format: Format::I32, length: 6 }));
        let empty = bytes(&header(), &[], None);
        assert_eq!(decode(&empty), Err(PacketError::Elements { format: Format::I32, length: 0 }));
        let nobody = bytes(&Header { workers: 0, ..header() }, &[0; 8], None);
        assert_eq!(decode(&nobody), Err(PacketError::Workers));
        let mut long = bytes(&header(), &[0; MAX_PAYLOAD_BYTES], None);
        assert!(decode(&long).is_ok());
        long.extend([0; 4]);
        long[26..28].copy_from_slice(&(MAX_PAYLOAD_BYTES as u16 + 4).to_be_bytes());
        assert!(matches!(decode(&long), Err(PacketError::Length { .. })));
    }

    proptest! {
        /// Arbitrary bytes never panic the decoder, not even with the right start; what it accepts it would write the
        /// same way.
        #[test]
        fn garbage_is_refused_calmly(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..96),
            kind in 0u8..11, format in 0u8..9, flags in 0u8..9,
        ) {
            let _ = decode(&bytes);
            if bytes.len() >= HEADER_BYTES {
                bytes[0..3].copy_from_slice(&[0x50, 0x41, VERSION]);
                (bytes[3], bytes[10], bytes[11]) = (kind, format, flags);
                let length = bytes.len() - HEADER_BYTES;
                bytes[26..28].copy_from_slice(&(length as u16).to_be_bytes());
                bytes[28..32].fill(0);
                bytes[40..48].fill(0);
                if let Ok(packet) = decode(&bytes) {
                    let again = [&packet.header.encode(packet.payload, None)[..], packet.payload].concat();
                    prop_assert_eq!(&again, &bytes);
                    prop_assert_eq!(packet.verify(None), Ok(()));
                }
            }
        }
    }
}
