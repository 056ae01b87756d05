//! Which way goes up: through the parent, or past it to the server.

/// A node's path, as packets from above describe it.
///
/// The server numbers the states of a job's paths. Each result and heartbeat carries the number, doubled, and one more in a packet
/// that goes straight to a node because its parent is bypassed. A packet that came through the parent with a larger number than any
/// before says that the server does not send straight any more. (The server sends the straight packets of a new state first.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Path {
    newest: u64,
    /// What goes up goes to the server.
    pub(crate) is_direct: bool,
}

impl Path {
    /// Takes `state` from a packet that came from the server itself (`is_straight`) or through the parent.
    pub(crate) fn follow(&mut self, state: u64, is_straight: bool) {
        let (number, is_bypass) = (state / 2, state % 2 == 1);
        if number < self.newest {
            return;
        }
        if is_straight {
            self.is_direct = is_bypass;
        } else if number > self.newest {
            self.is_direct = false;
        }
        self.newest = number;
    }
}

/// What packets carry in state `number`.
pub(crate) fn state(number: u64, is_bypass: bool) -> u64 {
    2 * number + u64::from(is_bypass)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets overtake each other: old ones change nothing, and packets of one state may come by both ways in any order.
    #[test]
    fn states_in_any_order() {
        let mut path = Path::default();
        let mut step = |number, is_bypass, is_straight| {
            path.follow(state(number, is_bypass), is_straight);
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
}
