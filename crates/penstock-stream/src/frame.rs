//! The frame: what a stream carries at a time.
//!
//! ```text
//!        0       4    5    6       8              16     20       24             32
//!        +-------+----+----+-------+--------------+------+--------+--------------+
//!   0    | magic | ver|kind| flags |    group     | gen. |priority|      op      |
//!        +-------+----+----+-------+--------------+------+--------+--------------+
//!   32   |  tag  | message |      offset          |     total     | length | ack |
//!        +-------+---------+-------+--------------+------+--------+--------+-----+
//!   64   |    fingerprint  |        credit        |header|payload |    serial    |
//!        |                 |                      |  sum |   sum  |              |
//!        +---+---+----+----+-----+----------------+------+--------+--------------+ 96
//!  96    |cl.|dir|order | coflow |   sent_at    |sizes |
//!        +---+---+------+--------+--------------+------+ 112
//! ```
//! All numbers are little-endian. `length` bytes of payload follow.
//!
//! `cl.` (class), `dir` (direction) and `tag` are the frame's [`NumberSpace`]: class 0 is the collectives of a group, with
//! direction 0 and the number of their channel ([`ChannelId`]) as the tag; class 1 is point-to-point messages, in direction 0
//! from the lower to the higher of two ranks, in direction 1 back. Other classes are refused.
//!
//! `order` and `sizes` belong to the fingerprint: the memory layout of the tensor ([`crate::fingerprint::Layout`]).
//! `coflow` names the messages that are of use only together, such as those of one evaluation; 0 is none. Callers say it
//! (`penstock.priority`), and nothing orders by it yet.
//!
//! `sent_at` is the sender's clock in microseconds, modulo 2^32: its changes tell how long frames wait on their way.
//!
//! `ack` and `credit` belong to the stream and to the pair of nodes, not to the frame they ride on: every frame in one
//! direction tells how many frames of the other direction have been taken.

mod ending;

pub use ending::{Counts, Farewell};

use crate::fingerprint::{Fingerprint, Layout, Order};
use penstock_types::{ChannelId, Generation, GroupId, OpSeq, Priority, Scope};

/// Operations that are counted together, as packets are in a packet number space of QUIC: the `op`-th of a space on one rank meets
/// the `op`-th of that space on the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NumberSpace {
    /// Collectives of a group, in the order of one of its channels.
    Collective(ChannelId),
    /// Messages from one rank to another under one tag. The direction is part of the name: what rank 0 sends to rank 1
    /// and what rank 1 sends to rank 0 under the same tag have nothing to do with each other.
    PointToPoint {
        /// From which of the two ranks to which.
        direction: Direction,
        /// The user's tag.
        tag: u32,
    },
}

/// The direction of a point-to-point message between two ranks of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Direction {
    /// From the lower rank to the higher one.
    Up = 0,
    /// From the higher rank to the lower one.
    Down = 1,
}

impl Direction {
    /// The direction of what rank `from` sends to rank `to`.
    #[must_use]
    pub fn between(from: u32, to: u32) -> Direction {
        if from < to { Direction::Up } else { Direction::Down }
    }
}

impl NumberSpace {
    /// Class, direction and tag, as frames carry them.
    fn encode(self) -> (u8, u8, u32) {
        match self {
            NumberSpace::Collective(number) => (0, 0, number.0),
            NumberSpace::PointToPoint { direction, tag } => (1, direction as u8, tag),
        }
    }

    /// The group's channel that it belongs to.
    #[must_use]
    pub fn channel(self) -> ChannelId {
        match self {
            NumberSpace::Collective(number) => number,
            NumberSpace::PointToPoint { .. } => ChannelId::MAIN,
        }
    }

    fn decode(class: u8, direction: u8, tag: u32) -> Result<NumberSpace, FrameError> {
        match (class, direction, tag) {
            (0, 0, tag) => Ok(NumberSpace::Collective(ChannelId(tag))),
            (1, 0, tag) => Ok(NumberSpace::PointToPoint { direction: Direction::Up, tag }),
            (1, 1, tag) => Ok(NumberSpace::PointToPoint { direction: Direction::Down, tag }),
            _ => Err(FrameError::Class { class, direction, tag }),
        }
    }
}

/// Names one message between two nodes: the `message`-th of operation `op` in a number space of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageKey {
    /// The group.
    pub group: GroupId,
    /// In which space of the group it is counted.
    pub space: NumberSpace,
    /// Its number in that space.
    pub op: OpSeq,
    /// The number that the plan gave it.
    pub message: u32,
}

impl MessageKey {
    /// Whether it belongs to a channel, or to any channel of a group.
    #[must_use]
    pub fn is_in(&self, scope: Scope) -> bool {
        scope.covers(self.group, self.space.channel())
    }

    /// Whether it is the first message of a send.
    pub(crate) fn begins_a_send(&self) -> bool {
        matches!(self.space, NumberSpace::PointToPoint { .. }) && self.message == 0
    }
}

/// What a frame means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Bytes `offset..offset + length` of a message of `total` bytes.
    Data = 0,
    /// A message of `total` bytes that lies in memory of the sender's; the payload says where ([`Reference`]).
    Reference = 1,
    /// The receiver has read the message that a `Reference` named.
    Done = 2,
    /// The receiver is ready for messages `message..message + offset` of the operation.
    Grant = 3,
    /// The sender has a message that waits for a `Grant`, and the receiver may not give that grant unasked: a short message
    /// beyond the eager credit, or the first message of a send.
    Announce = 4,
    /// Only `ack` and `credit`. Not itself acknowledged.
    Ack = 5,
    /// A heartbeat without content; acknowledged by a `HeartbeatReply`. `offset` is the time on the sender's clock.
    Heartbeat = 6,
    /// Answer to a `Heartbeat`, with its `offset`.
    HeartbeatReply = 7,
    /// The sender waits for the receiver in this operation; the fingerprint is the sender's view of the operation.
    Probe = 8,
    /// Answer to a `Probe`: `offset` operations have been issued in the channel so far.
    ProbeReply = 9,
    /// The group has failed, or, where the channel is not the main one, the channel has; the payload says why
    /// ([`crate::peer::Report`]). `total`: for how many channels it also says which of their first collectives still count.
    /// `offset` is 1 where the sender passes on what another rank has told it.
    Report = 10,
    /// The sender leaves in good order: the receiver has taken all its messages. The receiver acknowledges this frame after
    /// its own frames have been acknowledged.
    Bye = 11,
    /// The sender has memory of `total` bytes for us to map, under the number in `offset`; a descriptor of it comes with
    /// the frame.
    Share = 12,
    /// The sender will send no more references to the memory that was shared under the number in `offset`.
    Unshare = 13,
    /// The sender has closed the channel, or left the group where that is its main one: it waits for nothing there and starts
    /// nothing. All that it sent there came before this frame, except messages without a grant. The payload says what it did there
    /// ([`Farewell`]); `offset` is 1 where the sender leaves the group.
    Left = 14,
    /// For `offset` nanoseconds the sender wants nothing that is less urgent than `priority`, since another node sends it what is as
    /// urgent as that. Not itself acknowledged.
    Pause = 15,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Kind> {
        use Kind::*;
        const ALL: [Kind; 16] = [
            Data,
            Reference,
            Done,
            Grant,
            Announce,
            Ack,
            Heartbeat,
            HeartbeatReply,
            Probe,
            ProbeReply,
            Report,
            Bye,
            Share,
            Unshare,
            Left,
            Pause,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == byte)
    }

    /// Whether the receiver counts the frame in `ack`, so that the sender repeats it if the stream is lost first.
    #[must_use]
    pub fn is_counted(self) -> bool {
        !matches!(self, Kind::Ack | Kind::Heartbeat | Kind::HeartbeatReply | Kind::Pause)
    }

    /// The largest payload that a frame of this kind may carry.
    fn max_payload(self) -> u32 {
        match self {
            Kind::Data => MAX_FRAME_BYTES,
            Kind::Reference => Reference::BYTES as u32,
            Kind::Report => MAX_REPORT_BYTES + Counts::MAX_BYTES,
            Kind::Left => Farewell::MAX_BYTES,
            _ => 0,
        }
    }
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it means.
    pub kind: Kind,
    /// Bit set of `FLAG_*`.
    pub flags: u16,
    /// Which message it belongs to.
    pub key: MessageKey,
    /// The job's generation.
    pub generation: Generation,
    /// How urgent.
    pub priority: Priority,
    /// Where in the message the payload belongs.
    pub offset: u64,
    /// Bytes of the whole message.
    pub total: u64,
    /// Bytes of payload behind this header.
    pub length: u32,
    /// Counted frames of the other direction of this stream that were taken, modulo 2^32.
    pub ack: u32,
    /// What the sender believes the operation to be ([`crate::fingerprint`]).
    pub fingerprint: Fingerprint,
    /// Identifies messages that are useful only together (a coflow); 0 for none. Nothing orders by it yet.
    pub coflow: u32,
    /// When the frame was given to the stream, in microseconds on the sender's clock, modulo 2^32.
    pub sent_at: u32,
    /// Bytes of eager messages of the other direction that were consumed so far.
    pub credit: u64,
    /// CRC32C of the payload; 0 unless [`FLAG_PAYLOAD_SUM`] is set.
    pub payload_sum: u32,
    /// Identifies the frame between its two nodes for good, also after its operation is forgotten, so that duplicates are
    /// recognised. Data on eager credit: the credit that the sender has used so far, this message included. Control frames:
    /// how many were sent before. Other data: 0, since the offset in the message identifies it.
    pub serial: u64,
}

impl Header {
    /// Bytes of an encoded header.
    pub const BYTES: usize = 112;

    /// A header of `kind` for `key`, all else zero.
    #[must_use]
    pub fn new(kind: Kind, key: MessageKey) -> Header {
        Header {
            kind,
            flags: 0,
            key,
            generation: Generation(0),
            priority: Priority(0),
            offset: 0,
            total: 0,
            length: 0,
            ack: 0,
            fingerprint: Fingerprint::default(),
            coflow: 0,
            sent_at: 0,
            credit: 0,
            payload_sum: 0,
            serial: 0,
        }
    }

    /// The bytes on the wire. The header carries a CRC32C of its own: a flipped bit in an offset would be worse than
    /// one in a gradient.
    #[must_use]
    pub fn encode(&self) -> [u8; Header::BYTES] {
        let mut out = [0u8; Header::BYTES];
        out[0..4].copy_from_slice(&FRAME_MAGIC);
        out[4] = VERSION_MAJOR;
        out[5] = self.kind as u8;
        out[6..8].copy_from_slice(&self.flags.to_le_bytes());
        out[8..16].copy_from_slice(&self.key.group.0.to_le_bytes());
        out[16..20].copy_from_slice(&self.generation.0.to_le_bytes());
        out[20..24].copy_from_slice(&self.priority.0.to_le_bytes());
        out[24..32].copy_from_slice(&self.key.op.0.to_le_bytes());
        let (class, direction, tag) = self.key.space.encode();
        out[32..36].copy_from_slice(&tag.to_le_bytes());
        out[36..40].copy_from_slice(&self.key.message.to_le_bytes());
        out[40..48].copy_from_slice(&self.offset.to_le_bytes());
        out[48..56].copy_from_slice(&self.total.to_le_bytes());
        out[56..60].copy_from_slice(&self.length.to_le_bytes());
        out[60..64].copy_from_slice(&self.ack.to_le_bytes());
        out[64..72].copy_from_slice(&self.fingerprint.what.to_le_bytes());
        out[72..80].copy_from_slice(&self.credit.to_le_bytes());
        out[84..88].copy_from_slice(&self.payload_sum.to_le_bytes());
        out[88..96].copy_from_slice(&self.serial.to_le_bytes());
        out[96] = class;
        out[97] = direction;
        out[98..100].copy_from_slice(&self.fingerprint.layout.order.0.to_le_bytes());
        out[100..104].copy_from_slice(&self.coflow.to_le_bytes());
        out[104..108].copy_from_slice(&self.sent_at.to_le_bytes());
        out[108..112].copy_from_slice(&self.fingerprint.layout.sizes.to_le_bytes());
        let sum = crc32c::crc32c(&out);
        out[80..84].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Decodes a header and validates all of it: magic, version, checksum, kind, channel, and that the lengths fit together.
    pub fn decode(bytes: &[u8; Header::BYTES]) -> Result<Header, FrameError> {
        let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().expect("2 bytes"));
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if bytes[0..4] != FRAME_MAGIC {
            return Err(FrameError::Magic);
        }
        if bytes[4] != VERSION_MAJOR {
            return Err(FrameError::Version(bytes[4]));
        }
        let mut summed = *bytes;
        summed[80..84].fill(0);
        if crc32c::crc32c(&summed) != u32_at(80) {
            return Err(FrameError::HeaderSum);
        }
        let kind = Kind::from_byte(bytes[5]).ok_or(FrameError::Kind(bytes[5]))?;
        let header = Header {
            kind,
            flags: u16_at(6),
            key: MessageKey {
                group: GroupId(u64_at(8)),
                space: NumberSpace::decode(bytes[96], bytes[97], u32_at(32))?,
                op: OpSeq(u64_at(24)),
                message: u32_at(36),
            },
            generation: Generation(u32_at(16)),
            priority: Priority(u32_at(20) as i32),
            offset: u64_at(40),
            total: u64_at(48),
            length: u32_at(56),
            ack: u32_at(60),
            fingerprint: Fingerprint {
                what: u64_at(64),
                layout: Layout { order: Order(u16_at(98)), sizes: u32_at(108) },
            },
            coflow: u32_at(100),
            sent_at: u32_at(104),
            credit: u64_at(72),
            payload_sum: u32_at(84),
            serial: u64_at(88),
        };
        if header.length > kind.max_payload() {
            return Err(FrameError::Length { kind, length: header.length });
        }
        if kind == Kind::Reference && header.length as usize != Reference::BYTES {
            return Err(FrameError::Length { kind, length: header.length });
        }
        if kind == Kind::Data
            && header.offset.checked_add(u64::from(header.length)).is_none_or(|end| end > header.total)
        {
            return Err(FrameError::Range { offset: header.offset, length: header.length, total: header.total });
        }
        Ok(header)
    }
}

/// Where a message lies in the memory of a process on the same host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Address in the sender's address space, or offset in memory that it shares.
    pub address: u64,
    /// The sender's epoch. The bytes are those of the message only while this epoch lasts.
    pub epoch: u64,
    /// The number of the memory region that the sender shares ([`Kind::Share`]); 0: the message lies in the sender's private
    /// memory.
    pub region: u64,
}

impl Reference {
    /// Bytes of an encoded reference.
    pub const BYTES: usize = 24;

    /// The payload of a `Reference` frame.
    #[must_use]
    pub fn encode(self) -> [u8; Reference::BYTES] {
        let mut out = [0; Reference::BYTES];
        for (place, number) in out.chunks_exact_mut(8).zip([self.address, self.epoch, self.region]) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        out
    }

    /// Reads the payload of a `Reference` frame.
    #[must_use]
    pub fn decode(bytes: [u8; Reference::BYTES]) -> Reference {
        let at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        Reference { address: at(0), epoch: at(8), region: at(16) }
    }
}

/// Why bytes are not a frame. The stream that carried them cannot be trusted any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// The magic is wrong: the stream is out of step, or the other end is not Penstock.
    Magic,
    /// Another major version.
    Version(u8),
    /// An unknown kind.
    Kind(u8),
    /// The class of the number space is unknown, or the class has no such direction or tag.
    Class {
        /// Its claimed class.
        class: u8,
        /// Its claimed direction.
        direction: u8,
        /// Its claimed tag.
        tag: u32,
    },
    /// The header's own checksum does not hold.
    HeaderSum,
    /// The payload's checksum does not hold.
    PayloadSum,
    /// The length is not one that this kind of frame may have.
    Length {
        /// The frame's kind.
        kind: Kind,
        /// Its claimed length.
        length: u32,
    },
    /// The payload does not lie inside its message, or overlaps another frame.
    Range {
        /// Claimed offset.
        offset: u64,
        /// Claimed length.
        length: u32,
        /// Claimed message length.
        total: u64,
    },
    /// A frame that its sender may not send now (no grant, another generation, acknowledgements of frames that were never
    /// sent).
    OutOfTurn(&'static str),
}

impl std::fmt::Display for FrameError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FrameError::Magic => write!(f, "bytes that are not a Penstock frame"),
            FrameError::Version(version) => {
                write!(f, "a frame of protocol version {version}; this is {VERSION_MAJOR}")
            }
            FrameError::Kind(kind) => write!(f, "a frame of unknown kind {kind}"),
            FrameError::Class { class, direction, tag } => {
                write!(f, "a frame of an unknown number space (class {class}, direction {direction}, tag {tag})")
            }
            FrameError::HeaderSum => write!(f, "a frame header whose checksum does not hold"),
            FrameError::PayloadSum => write!(f, "a frame whose payload checksum does not hold"),
            FrameError::Length { kind, length } => write!(f, "a {kind:?} frame of {length} bytes"),
            FrameError::Range { offset, length, total } => {
                write!(f, "a frame for bytes {offset}+{length} that does not fit its message of {total} bytes")
            }
            FrameError::OutOfTurn(what) => write!(f, "a frame out of turn: {what}"),
        }
    }
}

impl std::error::Error for FrameError {}

/// First bytes of every frame.
pub const FRAME_MAGIC: [u8; 4] = *b"PSTK";
/// Peers must have the same major version.
pub const VERSION_MAJOR: u8 = 5;
/// Newer minors only add feature bits.
pub const VERSION_MINOR: u8 = 0;
/// The payload is covered by `payload_sum`.
pub const FLAG_PAYLOAD_SUM: u16 = 1;
/// The largest payload of a data frame: big enough that system calls vanish (a 256 KiB write costs ~50 us, its call
/// ~1 us), small enough to stay in an L2 cache between arrival and reduction.
pub const MAX_FRAME_BYTES: u32 = 256 * 1024;
/// The smallest cut of a longer message. Slow streams share the tail in finer pieces: with 64 KiB, one GSO super-packet, ten
/// all-reduces of 1 MiB over 1 Gbit/s and 32 streams took 108 to 113 ms instead of 104 to 107 with 32 KiB.
/// 16 KiB goes with the small windows of streams that share a link (`PATIENCE_SHARED`); 8 and 4 KiB were no better.
pub const MIN_FRAME_BYTES: u32 = 16 * 1024;
/// Bound on the text of a `Report`.
pub const MAX_REPORT_BYTES: u32 = 2048;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header {
            kind: Kind::Data,
            flags: FLAG_PAYLOAD_SUM,
            key: MessageKey {
                group: GroupId(u64::MAX - 3),
                space: NumberSpace::PointToPoint { direction: Direction::Down, tag: 7 },
                op: OpSeq(1 << 40),
                message: 12,
            },
            generation: Generation(3),
            priority: Priority(-5),
            offset: 1 << 33,
            total: 1 << 34,
            length: 65536,
            ack: u32::MAX,
            fingerprint: Fingerprint {
                what: 0x0123_4567_89ab_cdef,
                layout: Layout { order: Order(0xfedc), sizes: 0x89ab_cdef },
            },
            coflow: 0x7654_3210,
            sent_at: 0x89ab_cdef,
            credit: 1 << 50,
            payload_sum: 0xdead_beef,
            serial: 1 << 51,
        }
    }

    /// A header survives the wire.
    #[test]
    fn round_trip() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
    }

    /// Every channel survives the wire, two channels never look alike there, and what names no channel is refused.
    #[test]
    fn channels_survive_the_wire() {
        let mut seen = std::collections::HashMap::new();
        for (class, direction, tag) in
            (0..=255u8).flat_map(|class| (0..4u8).flat_map(move |dir| [0, 1, u32::MAX].map(|tag| (class, dir, tag))))
        {
            let mut frame = header().encode();
            (frame[96], frame[97]) = (class, direction);
            frame[32..36].copy_from_slice(&tag.to_le_bytes());
            frame[80..84].fill(0);
            let sum = crc32c::crc32c(&frame);
            frame[80..84].copy_from_slice(&sum.to_le_bytes());
            let known = (class == 0 && direction == 0) || (class == 1 && direction < 2);
            match Header::decode(&frame) {
                Ok(decoded) => {
                    assert!(known && decoded.encode() == frame, "{class} {direction} {tag}");
                    assert_eq!(seen.insert(decoded.key.space, (class, direction, tag)), None);
                }
                Err(error) => {
                    assert!(!known);
                    assert_eq!(error, FrameError::Class { class, direction, tag });
                }
            }
        }
        assert_eq!(seen.len(), 3 + 2 * 3);
    }

    /// No single flipped bit goes unnoticed.
    #[test]
    fn every_flipped_bit_is_noticed() {
        let good = header().encode();
        for bit in 0..Header::BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bad).is_err(), "bit {bit} flipped unnoticed");
        }
    }

    /// A length beyond the bound is refused from the header alone, before anything is allocated; the bound itself is
    /// not.
    #[test]
    fn length_is_pinned_from_both_sides() {
        let mut frame = header();
        frame.length = MAX_FRAME_BYTES;
        assert!(Header::decode(&frame.encode()).is_ok());
        frame.length += 1;
        assert_eq!(
            Header::decode(&frame.encode()),
            Err(FrameError::Length { kind: Kind::Data, length: MAX_FRAME_BYTES + 1 })
        );
        frame.length = 10;
        frame.offset = frame.total - 10;
        assert!(Header::decode(&frame.encode()).is_ok());
        frame.offset += 1;
        assert!(matches!(Header::decode(&frame.encode()), Err(FrameError::Range { .. })));
        frame.offset = u64::MAX - 1;
        assert!(matches!(Header::decode(&frame.encode()), Err(FrameError::Range { .. })));
    }

    proptest! {
        /// Arbitrary bytes never panic the decoder, not even with the right magic, version and sum; what it accepts it
        /// would write the same way, and its lengths fit together.
        #[test]
        fn garbage_is_refused_calmly(
            bytes in proptest::collection::vec(any::<u8>(), Header::BYTES),
            kind in 0u8..17,
            (class, direction) in (0u8..3, 0u8..3),
        ) {
            let mut frame: [u8; Header::BYTES] = bytes.try_into().expect("as many");
            prop_assert!(Header::decode(&frame).is_err());
            frame[0..4].copy_from_slice(&FRAME_MAGIC);
            frame[4] = VERSION_MAJOR;
            frame[5] = kind;
            (frame[96], frame[97]) = (class, direction);
            // Lengths that are small often enough to fit.
            frame[58..60].fill(0);
            frame[80..84].fill(0);
            let sum = crc32c::crc32c(&frame);
            frame[80..84].copy_from_slice(&sum.to_le_bytes());
            match Header::decode(&frame) {
                Ok(decoded) => {
                    prop_assert_eq!(decoded.encode(), frame);
                    prop_assert!(decoded.length <= decoded.kind.max_payload());
                    let end = decoded.offset.checked_add(u64::from(decoded.length));
                    prop_assert!(decoded.kind != Kind::Data || end.is_some_and(|end| end <= decoded.total));
                }
                Err(error) => prop_assert!(!matches!(error, FrameError::Magic | FrameError::HeaderSum)),
            }
        }
    }
}
