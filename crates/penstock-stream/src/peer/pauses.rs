//! A receiver's link is shared by all that send to it: while one of them brings what is urgent, the others are asked to send nothing less
//! urgent for a moment. Switches do so among classes of traffic (priority-based flow control, IEEE 802.1Qbb).
//!
//! A pause ends by itself, so nothing hangs on a frame that is lost or a receiver that has died, and a sender obeys only some of the time
//! ([`Urgency::ignores_pauses`](super::Urgency::ignores_pauses)).

use super::outgoing::Copied;
use super::{NO_MESSAGE, Peer};
use crate::frame::{Header, Kind};
use penstock_types::{MILLISECOND, Priority, Time};

/// Pauses in both directions between two nodes.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    /// The most urgent long message that the peer sends us now, and until when that is believed.
    urgent: Option<(Priority, Time)>,
    /// The last message that it sent a part of, and until when that is believed.
    latest: Option<(Priority, Time)>,
    /// The frame by which we ask for the next one.
    pub(super) owed: Option<Header>,
    /// When we last asked.
    asked: Option<Time>,
    /// What the peer asks of us: how urgent a message has to be, and until when.
    obeyed: Option<(Priority, Time)>,
}

impl Pauses {
    /// A header of data has come.
    pub(super) fn received(&mut self, header: &Header, now: Time) {
        let priority = header.priority;
        self.latest = Some((priority, now.plus(LATELY)));
        let is_topped = self.urgent.is_some_and(|(known, until)| now < until && known < priority);
        if priority.is_urgent() && header.total >= LONG && !is_topped {
            self.urgent = Some((priority, now.plus(BELIEVED)));
        }
    }

    /// The peer asks for a pause.
    pub(super) fn obey(&mut self, header: &Header, now: Time) {
        self.obeyed = Some((header.priority, now.plus(header.offset.min(LASTS))));
    }

    /// When [`Peer::handle_timeout`] is due for it.
    pub(super) fn end(&self) -> Option<Time> {
        self.obeyed.map(|(_, until)| until)
    }

    pub(super) fn handle_timeout(&mut self, now: Time) {
        self.obeyed = self.obeyed.filter(|(_, until)| now < *until);
    }

    /// How urgent a message has to be that leaves now, if the peer has asked for a pause.
    pub(super) fn least_urgent(&self, now: Time) -> Option<Priority> {
        believed(self.obeyed, now)
    }
}

impl<C: Copied> Peer<C> {
    /// How urgent the long messages are that the peer sends us now; `None`: none is more urgent than usual.
    #[must_use]
    pub fn brings_urgent(&self, now: Time) -> Option<Priority> {
        believed(self.pauses.urgent, now)
    }

    /// Whether the peer sends us, or did lately, what is less urgent than this, and has not just been asked to pause.
    #[must_use]
    pub fn should_pause(&self, priority: Priority, now: Time) -> bool {
        let is_asked = self.pauses.asked.is_some_and(|asked| now.since(asked) < AGAIN);
        !is_asked && believed(self.pauses.latest, now).is_some_and(|latest| latest > priority)
    }

    /// Asks the peer to send nothing for a moment that is less urgent than this.
    pub fn pause(&mut self, priority: Priority, now: Time) {
        self.pauses.asked = Some(now);
        self.pauses.owed = Some(Header { priority, offset: LASTS, ..Header::new(Kind::Pause, NO_MESSAGE) });
    }

    /// Until when the peer wants us to pause.
    #[must_use]
    pub fn paused_until(&self) -> Option<Time> {
        self.pauses.end()
    }
}

fn believed(what: Option<(Priority, Time)>, now: Time) -> Option<Priority> {
    what.filter(|(_, until)| now < *until).map(|(priority, _)| priority)
}

/// How long a pause lasts, unless it is asked for again, and how often it is.
const LASTS: u64 = 2 * MILLISECOND;
const AGAIN: u64 = MILLISECOND / 2;
/// Shorter messages find their way between the frames of others; a pause for them would cost more than they take.
const LONG: u64 = 256 * 1024;
/// A long message is under way for this long after each of its frames. The steps of a collective follow each other within it.
const BELIEVED: u64 = MILLISECOND;
/// Who has sent something lately may go on: longer than a pause and what a sender may make of it.
const LATELY: u64 = 100 * MILLISECOND;
