//! The sending end of a link: the packets that wait there, and the one that is being sent.

use super::{FlowId, Link};
use crate::agenda::Agenda;
use penstock_types::{SECOND, Time};

/// A packet under way.
#[derive(Clone, Debug)]
pub(super) struct Parcel<P> {
    pub(super) flow: FlowId,
    /// How many links of its flow's path it has passed.
    pub(super) hop: u32,
    /// The life of its flow in which it was sent: a reset ends a life.
    pub(super) life: u32,
    pub(super) bytes: u64,
    /// It is part of its flow's backlog. A duplicate is not.
    pub(super) is_counted: bool,
    pub(super) payload: P,
}

#[derive(Clone, Debug)]
pub(super) struct Port<P> {
    pub(super) link: Link,
    pub(super) is_up: bool,
    /// Nothing leaves before this time.
    pub(super) clogged_until: Time,
    /// By start tag, which is a virtual time, and then by arrival.
    waiting: Agenda<Parcel<P>>,
    /// Bytes of the packets that wait, without the one that is being sent.
    waiting_bytes: u64,
    /// The start tag of the packet that was sent last: the virtual time of start-time fair queueing.
    virtual_time: u64,
    sending: Option<Sending<P>>,
    /// Counts transmissions that began or were interrupted, so that the end of an interrupted one means nothing.
    turn: u64,
    /// What the link could have carried in the fraction of a nanosecond by which ends were rounded up.
    spare: u128,
    /// Tell when fewer bytes than this wait.
    pub(super) awaits_below: Option<u64>,
}

#[derive(Clone, Debug)]
struct Sending<P> {
    parcel: Parcel<P>,
    /// What is left of it at `since`. The unit is what a link of one byte a second carries in a nanosecond, so that
    /// no rate needs rounding.
    left: u128,
    since: Time,
}

/// What a port does next.
pub(super) enum Turn<P> {
    /// This packet has left.
    Left(Parcel<P>),
    /// This packet's flow was reset while it waited: it is not sent.
    Stale(Parcel<P>),
    /// The end of the current packet is at this time; hand back the number then.
    Ends(Time, u64),
    /// The port sends nothing until something changes.
    Rests,
}

impl<P> Port<P> {
    pub(super) fn new(link: Link) -> Port<P> {
        Port {
            link,
            is_up: true,
            clogged_until: Time(0),
            waiting: Agenda::default(),
            waiting_bytes: 0,
            virtual_time: 0,
            sending: None,
            turn: 0,
            spare: 0,
            awaits_below: None,
        }
    }

    /// Bytes that wait, with what is left of the packet that is being sent.
    pub(super) fn backlog(&self, now: Time) -> u64 {
        let left = self.sending.as_ref().map_or(0, |sending| self.left(sending, now));
        self.waiting_bytes + left.div_ceil(u128::from(SECOND)) as u64
    }

    pub(super) fn has_room_for(&self, bytes: u64, now: Time) -> bool {
        self.link.queue_bytes == 0 || self.backlog(now) + bytes <= self.link.queue_bytes
    }

    /// A packet waits to be sent. `finish` is the finish tag of its flow's last packet here, and is moved on.
    ///
    /// Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): packets leave by their start tags, which a flow's own bytes
    /// move on.
    pub(super) fn push(&mut self, parcel: Parcel<P>, finish: &mut u64) {
        let tag = if self.link.fair { self.virtual_time.max(*finish) } else { 0 };
        if self.link.fair {
            *finish = tag + parcel.bytes;
        }
        self.waiting_bytes += parcel.bytes;
        self.waiting.add(Time(tag), parcel);
    }

    /// The packet of this turn has been sent, unless it was interrupted.
    pub(super) fn end(&mut self, turn: u64, now: Time) -> Option<Parcel<P>> {
        if turn != self.turn {
            return None;
        }
        let Sending { parcel, left, since } = self.sending.take()?;
        self.spare += u128::from(self.link.rate) * u128::from(now.since(since)) - left;
        Some(parcel)
    }

    /// Begins with the next packet, if the port is free.
    pub(super) fn next(&mut self, now: Time, is_stale: impl Fn(&Parcel<P>) -> bool) -> Turn<P> {
        if self.sending.is_some() || now < self.clogged_until {
            return Turn::Rests;
        }
        let Some((tag, parcel)) = self.waiting.next_at().and_then(|tag| Some((tag, self.waiting.pop(tag)?))) else {
            self.spare = 0;
            return Turn::Rests;
        };
        self.waiting_bytes -= parcel.bytes;
        if is_stale(&parcel) {
            return Turn::Stale(parcel);
        }
        self.virtual_time = tag.0;
        if self.link.rate == 0 {
            return Turn::Left(parcel);
        }
        let work = u128::from(parcel.bytes) * u128::from(SECOND);
        let left = work.saturating_sub(self.spare);
        self.spare = self.spare.saturating_sub(work);
        self.sending = Some(Sending { parcel, left, since: now });
        self.resume(now)
    }

    /// The rate has changed, or the link is clogged or no longer: what is left of the current packet takes another time.
    pub(super) fn change(&mut self, now: Time, change: impl FnOnce(&mut Port<P>)) {
        if let Some(sending) = &self.sending {
            let left = self.left(sending, now);
            let sending = self.sending.as_mut().expect("looked at");
            (sending.left, sending.since) = (left, now);
        }
        self.spare = 0;
        change(self);
        // An end that was announced is no longer right.
        self.turn += 1;
    }

    /// Goes on with the current packet, if there is one, after a change.
    pub(super) fn resume(&mut self, now: Time) -> Turn<P> {
        let Some(sending) = self.sending.as_ref().filter(|_| now >= self.clogged_until) else { return Turn::Rests };
        if self.link.rate == 0 {
            self.turn += 1;
            return Turn::Left(self.sending.take().expect("looked at").parcel);
        }
        let nanos = u64::try_from(sending.left.div_ceil(u128::from(self.link.rate))).unwrap_or(u64::MAX);
        self.turn += 1;
        Turn::Ends(sending.since.plus(nanos), self.turn)
    }

    fn left(&self, sending: &Sending<P>, now: Time) -> u128 {
        if now <= sending.since {
            return sending.left;
        }
        // A clogged port has its packet's `since` at the beginning of the pause, and sends nothing in it.
        let from = sending.since.max(self.clogged_until);
        sending.left.saturating_sub(u128::from(self.link.rate) * u128::from(now.since(from)))
    }
}
