//! What a client and a server say to each other.
//!
//! ```text
//!        0     1     2      4        8          16         24         32        36        40          48
//!        +-----+-----+------+--------+----------+----------+----------+---------+---------+-----------+
//!        | tag |code | name |  slot  |    id    |  length  |   room   |priority |  calls  |  in flight|
//!        |     |     | len. |        |          |          |          |         |         |           |
//!        +-----+-----+------+--------+----------+----------+----------+---------+---------+-----------+
//!   48   |                         name, up to 256 bytes of UTF-8, then zeros                         |
//!        +--------------------------------------------------------------------------------------------+ 304
//! ```
//! All numbers are little-endian. Every record has 304 bytes, so that the receiver of the next one knows its length. `code` is the
//! [`Kind`] of a call, with bit 7 set where its reply must fill the room exactly, or the [`Outcome`] of a reply. In a `Welcome`,
//! `length` is the largest request and `room` the largest push.

use super::Fault;
use penstock_types::Priority;

/// In which order a record is. Records of one class come in the order in which they were sent; those of urgent calls have a class of
/// their own, since a record that waits behind bulk would hold up all that come after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Welcome, closing, good-bye, and the records of most calls.
    Usual,
    /// Records of calls that are more urgent than usual, and good-bye.
    Urgent,
}

impl Class {
    /// Both.
    pub const ALL: [Class; 2] = [Class::Usual, Class::Urgent];

    /// The class of a call with this priority.
    #[must_use]
    pub fn of(priority: Priority) -> Class {
        if priority.is_urgent() { Class::Urgent } else { Class::Usual }
    }

    /// The class of the call with this number.
    #[must_use]
    pub fn of_call(id: u64) -> Class {
        Class::ALL[(id >> 63) as usize]
    }

    /// The number of its `count`-th call, from 0 on.
    #[must_use]
    pub fn call(self, count: u64) -> u64 {
        count | (self as u64) << 63
    }

    /// The tag of its records.
    #[must_use]
    pub fn tag(self) -> u32 {
        self as u32
    }

    /// How urgent its records are. A record is short, and bytes wait for it.
    #[must_use]
    pub fn priority(self) -> Priority {
        match self {
            Class::Usual => Priority::USUAL,
            Class::Urgent => Priority(i32::MIN),
        }
    }
}

/// What a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Bytes up, and an answer down.
    Request = 0,
    /// Bytes up.
    Push = 1,
    /// Bytes down.
    Pull = 2,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 3] = [Kind::Request, Kind::Push, Kind::Pull];

    /// The word of Python, logs and errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Request => "request",
            Kind::Push => "push",
            Kind::Pull => "pull",
        }
    }
}

/// How a call has ended on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Outcome {
    /// Well: the handler has taken the body, and the reply follows.
    Done = 0,
    /// The server does not serve this name, for this kind of call.
    Unknown = 1,
    /// The body is larger than the server takes.
    TooLarge = 2,
    /// The handler has failed; the reply is its text.
    Failed = 3,
    /// The client has withdrawn the call.
    Cancelled = 4,
    /// The server ends, and no handler has seen the call.
    Closing = 5,
    /// The reply does not fit the client's room.
    Misfit = 6,
}

impl Outcome {
    const ALL: [Outcome; 7] = [
        Outcome::Done,
        Outcome::Unknown,
        Outcome::TooLarge,
        Outcome::Failed,
        Outcome::Cancelled,
        Outcome::Closing,
        Outcome::Misfit,
    ];
}

/// What a server takes of each client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Calls that have not ended. Further calls wait at the client.
    pub calls: u32,
    /// Bytes of a request's body.
    pub request: u64,
    /// Bytes of a push's body.
    pub push: u64,
    /// Bytes of bodies that handlers have not done with and of replies that were not taken, all together. A body waits at the client
    /// until it fits; bodies that do not wait for `Go` come on top, up to `calls` times [`super::INLINE`].
    pub in_flight: u64,
}

/// A message under the tag of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// Of the server, first: what it takes.
    Welcome(Limits),
    /// Of the client: a call.
    Call {
        /// Counts the calls of its class ([`Class::call`]).
        id: u64,
        /// Under which tag its bytes travel.
        slot: u32,
        /// Whether bytes go up, down or both.
        kind: Kind,
        /// The name that the server serves.
        name: String,
        /// Bytes of its body.
        body: u64,
        /// The most bytes of reply that the client takes.
        room: u64,
        /// The reply must have exactly `room` bytes.
        exact: bool,
        /// The priority of the call.
        priority: Priority,
    },
    /// Of the client: it waits for this call no longer.
    Cancel {
        /// The number of the call.
        id: u64,
    },
    /// Of the server: the body of this call may come.
    Go {
        /// The number of the call.
        id: u64,
    },
    /// Of the server: it has read the `Cancel` of a call whose body it has said may come. Bytes of that length may come now, and go
    /// nowhere.
    Withdrawn {
        /// The number of the call.
        id: u64,
    },
    /// Of the server: the call has ended there, and so many bytes follow under its slot's tag, of reply or of text.
    Reply {
        /// The number of the call.
        id: u64,
        /// How it has ended.
        outcome: Outcome,
        /// Bytes.
        len: u64,
    },
    /// Of the server: it ends; no call that it has not begun is taken any more.
    Closing,
    /// Of the client: it has no calls and makes no more. Of the server: the answer to that. The last record of each, on each class.
    Bye,
}

impl Record {
    /// Bytes of a record.
    pub const BYTES: usize = 48 + Record::MAX_NAME;
    /// Bytes of the longest name.
    pub const MAX_NAME: usize = 256;

    /// Its bytes.
    ///
    /// # Panics
    /// With a longer name than [`Record::MAX_NAME`].
    #[must_use]
    pub fn encode(&self) -> [u8; Record::BYTES] {
        let mut out = [0; Record::BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        match self {
            Record::Welcome(limits) => {
                put(0, &[WELCOME]);
                put(16, &limits.request.to_le_bytes());
                put(24, &limits.push.to_le_bytes());
                put(36, &limits.calls.to_le_bytes());
                put(40, &limits.in_flight.to_le_bytes());
            }
            Record::Call { id, slot, kind, name, body, room, exact, priority } => {
                put(0, &[CALL, *kind as u8 | if *exact { EXACT } else { 0 }]);
                put(2, &(name.len() as u16).to_le_bytes());
                put(4, &slot.to_le_bytes());
                put(8, &id.to_le_bytes());
                put(16, &body.to_le_bytes());
                put(24, &room.to_le_bytes());
                put(32, &priority.0.to_le_bytes());
                put(48, name.as_bytes());
            }
            Record::Cancel { id } => {
                put(0, &[CANCEL]);
                put(8, &id.to_le_bytes());
            }
            Record::Go { id } => {
                put(0, &[GO]);
                put(8, &id.to_le_bytes());
            }
            Record::Withdrawn { id } => {
                put(0, &[WITHDRAWN]);
                put(8, &id.to_le_bytes());
            }
            Record::Reply { id, outcome, len } => {
                put(0, &[REPLY, *outcome as u8]);
                put(8, &id.to_le_bytes());
                put(16, &len.to_le_bytes());
            }
            Record::Closing => put(0, &[CLOSING]),
            Record::Bye => put(0, &[BYE]),
        }
        out
    }

    /// Reads what [`Record::encode`] wrote.
    ///
    /// # Errors
    /// What no version of this protocol says.
    pub fn decode(bytes: &[u8; Record::BYTES]) -> Result<Record, Fault> {
        let u16_at = |at: usize| u16::from_le_bytes(bytes[at..at + 2].try_into().expect("2 bytes"));
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let id = u64_at(8);
        Ok(match bytes[0] {
            WELCOME => Record::Welcome(Limits {
                calls: u32_at(36),
                request: u64_at(16),
                push: u64_at(24),
                in_flight: u64_at(40),
            }),
            CALL => {
                let kind = bytes[1] & !EXACT;
                let kind = Kind::ALL.into_iter().find(|known| *known as u8 == kind).ok_or(Fault("an unknown call"))?;
                let name = bytes[48..].get(..u16_at(2) as usize).ok_or(Fault("a name beyond its record"))?;
                let name = std::str::from_utf8(name).map_err(|_| Fault("a name that is not UTF-8"))?.to_owned();
                Record::Call {
                    id,
                    slot: u32_at(4),
                    kind,
                    name,
                    body: u64_at(16),
                    room: u64_at(24),
                    exact: bytes[1] & EXACT != 0,
                    priority: Priority(u32_at(32) as i32),
                }
            }
            CANCEL => Record::Cancel { id },
            GO => Record::Go { id },
            WITHDRAWN => Record::Withdrawn { id },
            REPLY => {
                let outcome = Outcome::ALL.into_iter().find(|known| *known as u8 == bytes[1]);
                Record::Reply { id, outcome: outcome.ok_or(Fault("an unknown outcome"))?, len: u64_at(16) }
            }
            CLOSING => Record::Closing,
            BYE => Record::Bye,
            _ => return Err(Fault("an unknown record")),
        })
    }
}

const WELCOME: u8 = 1;
const CALL: u8 = 2;
const CANCEL: u8 = 3;
const GO: u8 = 4;
const REPLY: u8 = 5;
const CLOSING: u8 = 6;
const BYE: u8 = 7;
const WITHDRAWN: u8 = 8;
const EXACT: u8 = 0x80;

#[cfg(test)]
mod tests {
    use super::*;

    fn examples() -> Vec<Record> {
        let call = |name: &str, exact| Record::Call {
            id: 7,
            slot: 3,
            kind: Kind::Push,
            name: name.to_owned(),
            body: u64::MAX,
            room: 1 << 40,
            exact,
            priority: Priority(-128),
        };
        let limits = Limits { calls: 64, request: 1, push: u64::MAX, in_flight: 3 };
        let mut all = vec![
            Record::Welcome(limits),
            call("", false),
            call(&"n".repeat(Record::MAX_NAME), true),
            call("größe", true),
            Record::Cancel { id: 1 },
            Record::Go { id: u64::MAX },
            Record::Withdrawn { id: 1 << 63 },
            Record::Closing,
            Record::Bye,
        ];
        all.extend(Outcome::ALL.map(|outcome| Record::Reply { id: 2, outcome, len: 9 }));
        all
    }

    /// Every record survives encoding.
    #[test]
    fn round_trip() {
        for record in examples() {
            assert_eq!(Record::decode(&record.encode()), Ok(record));
        }
    }

    /// Records with any two bytes changed are read as another record, or are a fault: nothing panics, and no name leaves its record.
    #[test]
    fn changed_bytes_are_a_record_or_a_fault() {
        let seed = std::env::var("PENSTOCK_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(7);
        println!("PENSTOCK_SEED={seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut faults = 0;
        for _ in 0..20_000 {
            let examples = examples();
            let mut bytes = examples[random.usize(..examples.len())].encode();
            for _ in 0..2 {
                // Mostly in the part that has a structure.
                let at = if random.bool() { random.usize(..8) } else { random.usize(..bytes.len()) };
                bytes[at] = random.u8(..);
            }
            match Record::decode(&bytes) {
                Ok(record) => assert_eq!(Record::decode(&record.encode()), Ok(record)),
                Err(_) => faults += 1,
            }
        }
        assert!(faults > 1000, "{faults}");
    }
}
