//! A receiver's link is shared by all that send to it: while one of them brings what is urgent, the others are asked to send nothing less
//! urgent for a moment. Switches do so among classes of traffic (priority-based flow control, IEEE 802.1Qbb).
//!
//! A pause ends by itself, so nothing hangs on a frame that is lost or a receiver that has died, and a sender obeys only some of the time
//! ([`Urgency::ignores_pauses`](super::Urgency::ignores_pauses)).

use super::outgoing::Copied;
use super::{MessageKey, NO_MESSAGE, Peer};
use crate::frame::{Header, Kind};
use penstock_types::{MILLISECOND, Priority, Time};

/// Pauses in both directions between two nodes.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    /// The most urgent long message that the peer sends us now, and until when that is believed.
    urgent: Option<(Priority, Time)>,
    /// Which one it is, until it is whole.
    message: Option<MessageKey>,
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
    /// A header of data has come; `is_news`: it is no copy of what was here.
    pub(super) fn received(&mut self, header: &Header, is_news: bool, now: Time) {
        let priority = header.priority;
        self.latest = Some((priority, now.plus(LATELY)));
        let is_topped = self.urgent.is_some_and(|(known, until)| now < until && known < priority);
        if is_news && priority.is_urgent() && header.total >= LONG && !is_topped {
            self.urgent = Some((priority, now.plus(UNDER_WAY)));
            self.message = Some(header.key);
        }
    }

    /// A message is whole.
    pub(super) fn completed(&mut self, key: &MessageKey, now: Time) {
        if self.message == Some(*key) {
            self.urgent = self.urgent.map(|(priority, _)| (priority, now.plus(FOLLOWS)));
            self.message = None;
        }
    }

    /// The peer asks for a pause.
    pub(super) fn obey(&mut self, header: &Header, now: Time) {
        self.obeyed = Some((header.priority, now.plus(header.offset.min(PAUSE_MOST))));
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

    /// Whether the peer sends us, or did lately, what is less urgent than this.
    #[must_use]
    pub fn has_sent_less_urgent(&self, priority: Priority, now: Time) -> bool {
        believed(self.pauses.latest, now).is_some_and(|latest| latest > priority)
    }

    /// Whether it was not just asked to pause.
    #[must_use]
    pub fn may_ask_again(&self, now: Time) -> bool {
        self.pauses.asked.is_none_or(|asked| now.since(asked) >= AGAIN)
    }

    /// How long the others are to pause for what this peer brings: until one may ask again and a little more, or no longer than the next
    /// step of a collective takes to follow.
    #[must_use]
    pub fn pause_lasts(&self) -> u64 {
        if self.pauses.message.is_some() { PAUSE_MOST } else { FOLLOWS }
    }

    /// Asks the peer to send nothing for so long that is less urgent than this. It holds instead of what was asked before.
    pub fn pause(&mut self, priority: Priority, lasts: u64, now: Time) {
        self.pauses.asked = Some(now);
        self.pauses.owed = Some(Header { priority, offset: lasts, ..Header::new(Kind::Pause, NO_MESSAGE) });
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

/// How long a pause lasts, unless it is asked for again or ended, and how often it is.
pub const PAUSE_MOST: u64 = 5 * MILLISECOND;
const AGAIN: u64 = MILLISECOND / 2;
/// Shorter messages find their way between the frames of others; a pause for them would cost more than they take.
const LONG: u64 = 256 * 1024;
/// A long message is under way for this long after each of its frames, if it is not whole before: frames are milliseconds apart on slow
/// links.
const UNDER_WAY: u64 = 50 * MILLISECOND;
/// The next step of a collective follows within this time.
const FOLLOWS: u64 = MILLISECOND;
/// Who has sent something lately may go on: longer than a pause and what a sender may make of it.
const LATELY: u64 = 100 * MILLISECOND;
