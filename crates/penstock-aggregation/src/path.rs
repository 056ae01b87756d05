//! Which way goes up: through the parent, or past it to the server.

use crate::packet::Kind;
use std::hash::{Hash, Hasher};

/// A node's path, as packets from above describe it.
///
/// The server numbers the states of a job's paths. Each result and heartbeat carries the number, doubled, in 32 bits, and one more in a packet
/// that goes straight to a node because its parent is bypassed. A packet that came through the parent with a larger number than any
/// before says that the server does not send straight any more. (The server sends the straight packets of a new state first.)
///
/// Without a key anybody can forge a large number. So after some heartbeats in a row with lower ones, these are believed: nobody keeps
/// heartbeats, and so old ones do not come for long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Path {
    newest: u32,
    /// Heartbeats in a row with a lower number.
    lower: u8,
    /// What goes up goes to the server.
    pub(crate) is_direct: bool,
}

impl Path {
    /// Takes the state from the field `workers` of a packet of this kind that came from the server itself (`is_straight`) or through the parent.
    /// Returns whether states between this and the newest one were missed.
    pub(crate) fn follow(&mut self, workers: u64, is_straight: bool, kind: Kind) -> bool {
        let state = workers as u32;
        let (number, is_bypass) = (state / 2, state % 2 == 1);
        if number < self.newest {
            self.lower += u8::from(kind == Kind::HeartbeatDown);
            if self.lower < MOST_LOWER {
                return false;
            }
        }
        if is_straight {
            self.is_direct = is_bypass;
        } else if number != self.newest {
            self.is_direct = false;
        }
        let has_missed = number > self.newest.saturating_add(1);
        (self.newest, self.lower) = (number, 0);
        has_missed
    }
}

/// Some 30 ms while blocks are in flight. Old ones that are believed by mistake do no harm: the next new one is believed again.
const MOST_LOWER: u8 = 16;

/// Without the count, which no exhaustive test brings to an effect.
impl Hash for Path {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.newest, self.is_direct).hash(state);
    }
}

/// What packets carry in state `number`, in the lower half of `workers`.
pub(crate) fn state(number: u32, is_bypass: bool) -> u64 {
    u64::from(2 * number + u32::from(is_bypass))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets overtake each other: old ones change nothing, and packets of one state may come by both ways in any order.
    #[test]
    fn states_in_any_order() {
        let mut path = Path::default();
        let mut step = |number, is_bypass, is_straight| {
            path.follow(state(number, is_bypass), is_straight, Kind::Result);
            path.is_direct
        };
        assert!(!step(0, false, false));
        assert!(!step(0, false, true), "an answer to a request bypasses nothing");
        assert!(step(1, true, true));
        assert!(step(1, false, false), "the parent is back, and still bypassed");
        assert!(step(0, false, true), "old");
        assert!(step(2, true, true));
        assert!(step(1, false, true), "old");
        assert!(!step(3, false, false));
        assert!(!step(2, true, true), "old");
        assert!(!step(4, true, false), "it was sent straight to the parent");
        assert!(step(4, true, true));
        assert!(!step(4, false, true));
    }

    /// Who hears of state 4 after state 1 has missed something; old packets tell nothing.
    #[test]
    fn missed_states() {
        let mut path = Path::default();
        let missed: Vec<bool> =
            [1, 2, 4, 3, 5].into_iter().map(|number| path.follow(state(number, true), true, Kind::Result)).collect();
        assert_eq!(missed, [false, false, true, false, false]);
    }

    /// A forged number is forgotten: the server's heartbeats win again, from whichever side they come, and old results do not.
    #[test]
    fn a_forged_number() {
        for is_straight in [true, false] {
            for is_bypass in [true, false] {
                let mut path = Path::default();
                path.follow(state(7, is_bypass), true, Kind::HeartbeatDown);
                path.follow(u64::MAX - u64::from(is_bypass), true, Kind::HeartbeatDown);
                assert_ne!(path.is_direct, is_bypass);
                for _ in 0..100 {
                    path.follow(state(6, is_bypass), is_straight, Kind::Result);
                }
                assert_ne!(path.is_direct, is_bypass);
                for _ in 0..MOST_LOWER {
                    path.follow(state(7, is_straight && is_bypass), is_straight, Kind::HeartbeatDown);
                }
                assert_eq!((path.newest, path.is_direct), (7, is_straight && is_bypass));
                path.follow(state(7, is_bypass), true, Kind::HeartbeatDown);
                assert_eq!(path.is_direct, is_bypass);
            }
        }
    }
}
