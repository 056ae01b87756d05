//! The server: receives its children's sums and blocks, commits, and returns results to all workers.
//!
//! A slot keeps the children's blocks apart until every child's is in, and then adds them from left to right. A child that is an
//! aggregator may be bypassed: then the server *stands in* for it with a table of the same rules, to which the aggregator's own
//! children push ([`bypass`]). The sum of that table counts as the aggregator's, and each child counts once, whichever way its
//! sum came. So workers may bypass an aggregator at any time, and the result has the same bits either way.
//!
//! ```text
//!             Ack                      Credit = (slowest child's Ack) + W - 1
//!   committed  │  committed or collecting │  refused
//!   ───────────┴──────────────────────────┴──────────
//!   kept from the slowest child's Ack on: nodes that request it get it again
//! ```
//! Where results come apart from the blocks, Credit moves on from Ack, and what was accepted lies in [`held`].

mod bypass;
mod config;
mod held;
mod recovery;

pub use config::ServerConfig;
pub use held::{Block, Buffer};

use super::hops::{Hops, ROOT};
use super::packet::{
    FLAG_FULL, FLAG_LAST, FLAG_LOST, Format, HEADER_BYTES, Header, Kind, MAX_PAYLOAD_BYTES, Packet, decode,
};
use super::path;
use super::rules::{Refusal, Rule, Rules};
use super::tree::MAX_CHILDREN;
use super::{Endpoint, Serial, arithmetic};
use bypass::Paths;
use held::Held;
use penstock_types::Time;
use std::collections::VecDeque;

/// The end of a job's path, where sums are committed. Memory: `window * (children + 1) * block_bytes`, reserved at once, and what
/// [`ServerConfig::stand_ins`] says: together [`ServerConfig::memory_bytes`].
#[derive(Clone, Debug)]
pub struct Server {
    config: ServerConfig,
    hops: Hops,
    ack: Serial,
    /// All results below this were sent once. Workers get it as Ack, so that an Ack does not overtake results. (Where these come apart,
    /// workers get `ack` itself: it says all that an Accepted says, and Credit counts from it.)
    announced: Serial,
    /// For each child: the next result that it expects, and the highest that it can take.
    heard: Vec<(Serial, Serial)>,
    paths: Paths,
    slots: Vec<Slot>,
    /// For each slot a place for a block of every child.
    parts: Vec<u8>,
    results: Vec<u8>,
    /// Slots with something to send, each once.
    queue: VecDeque<usize>,
    losses: Losses,
    /// Where results come apart.
    held: Option<Held>,
    beats: Beats,
    /// Packets that were refused, by [`Refusal::index`] of the reason.
    refused: [u64; Refusal::COUNT],
    overflowed: u64,
    rules: Rules,
}

/// What was lost, and what was done about it.
#[derive(Clone, Debug)]
struct Losses {
    /// What is known of the missing blocks of each slot.
    slots: Vec<Recovery>,
    /// Below this, missing blocks were named.
    checked: Serial,
    /// Nodes to which the missing blocks of a SeqNum are still to be named.
    names: VecDeque<(Endpoint, Serial)>,
    /// When blocks that were named and did not come are named again.
    rename_at: Option<Time>,
    /// Smoothed time from naming to commit, and its variation (RFC 6298); None before the first.
    round_trip: Option<(u64, u64)>,
    /// Commits in a row of SeqNums that were named more than once.
    doubtful: u32,
}

/// Heartbeats, which carry Ack and Credit.
#[derive(Clone, Debug)]
struct Beats {
    /// The Credit that was sent last, in any packet.
    sent_credit: Serial,
    /// The Credit of the last heartbeats, and how many of them carried it.
    last: (Serial, u32),
    /// Nodes to which the current one is still to be sent.
    to: Vec<Endpoint>,
    /// How many fell due: their SeqNum, so that the shards of an aggregator get them in turn.
    count: u32,
    /// When the next heartbeat is due.
    at: Time,
}

#[derive(Clone, Debug)]
struct Slot {
    tag: Option<Serial>,
    /// The children whose blocks are here, in the order of arrival.
    parts: Vec<u8>,
    committed: bool,
    format: Format,
    flags: u8,
    exponent: i16,
    length: usize,
    /// Nodes to which the result is still to be sent for the first time, last first.
    announce: Vec<Endpoint>,
    /// Nodes that requested it and wait for it to be sent.
    wanted: Vec<Endpoint>,
    queued: bool,
}

/// What the server did about the loss of a block or of its result.
#[derive(Clone, Debug)]
struct Recovery {
    seq: Serial,
    /// How often missing blocks were named because of a gap, and when last.
    tries: u32,
    named_at: Time,
    first_named_at: Time,
    /// Nodes that requested the result. A second request of a node resets the list.
    asked: Vec<Endpoint>,
}

/// A packet to send: this header, and this block behind it.
#[derive(Debug)]
pub struct Transmit<'a> {
    /// The endpoint that receives the packet.
    pub to: Endpoint,
    /// The header of the packet.
    pub header: [u8; HEADER_BYTES],
    /// The block; valid until the next call.
    pub payload: &'a [u8],
}

impl Server {
    /// A server for one epoch of a job.
    ///
    /// # Panics
    /// When the configuration is invalid: a bad tree, a window that is not a power of two, addresses that do not match the
    /// tree.
    #[must_use]
    pub fn new(now: Time, config: ServerConfig) -> Server {
        config.tree.check().expect("a tree");
        assert!(config.window.is_power_of_two(), "a window of {}", config.window);
        assert!((1..=MAX_PAYLOAD_BYTES).contains(&config.block_bytes), "blocks of {} bytes", config.block_bytes);
        let hops = Hops::new(&config.tree, &config.workers, config.naming);
        let (window, children) = (config.window as usize, config.tree.children.len());
        let slot = Slot {
            tag: None,
            parts: Vec::new(),
            committed: false,
            format: Format::None,
            flags: 0,
            exponent: 0,
            length: 0,
            announce: Vec::new(),
            wanted: Vec::new(),
            queued: false,
        };
        Server {
            paths: Paths::new(&config, &hops),
            hops,
            held: config.held_blocks.map(|limit| Held::new(config.start, limit)),
            ack: config.start,
            announced: config.start,
            heard: vec![(config.start, config.start.plus(config.window - 1)); children],
            slots: vec![slot; window],
            parts: vec![0; window * children * config.block_bytes],
            results: vec![0; window * config.block_bytes],
            queue: VecDeque::new(),
            losses: Losses {
                slots: vec![Recovery::of(config.start, now); window],
                checked: config.start,
                names: VecDeque::new(),
                rename_at: None,
                round_trip: None,
                doubtful: 0,
            },
            beats: Beats {
                sent_credit: config.start.plus(config.window - 1),
                last: (config.start.plus(config.window - 1), BEATS),
                to: Vec::new(),
                count: 0,
                at: now.plus(config.idle_every),
            },
            refused: [0; Refusal::COUNT],
            overflowed: 0,
            rules: Rules::default(),
            config,
        }
    }

    /// The lowest SeqNum that is not committed.
    #[must_use]
    pub fn ack(&self) -> Serial {
        self.ack
    }

    /// The highest SeqNum that may be pushed.
    #[must_use]
    pub fn credit(&self) -> Serial {
        let window = self.config.window;
        match &self.held {
            Some(held) if self.rules.hold(Rule::Limit) => self.ack.plus(held.room().min(window)).plus(u32::MAX),
            None if self.rules.hold(Rule::Window) => self.slowest().1,
            _ => self.ack.plus(window - 1),
        }
    }

    /// Whether any block of this SeqNum is here, and not all of them.
    #[must_use]
    pub fn is_waiting(&self, seq: Serial) -> bool {
        ![0, self.all()].contains(&self.missing(seq))
    }

    /// The children whose block of this SeqNum is missing, a bit for each; none where it is committed or outside the window.
    #[must_use]
    pub fn missing(&self, seq: Serial) -> u64 {
        let slot = &self.slots[self.index(seq)];
        let in_window = !self.ack.is_newer_than(seq) && !seq.is_newer_than(self.credit());
        match slot.tag {
            _ if !in_window => 0,
            Some(tag) if tag == seq && slot.committed => 0,
            Some(tag) if tag == seq => self.all() & !slot.have(),
            _ => self.all(),
        }
    }

    /// The format, the flags and the length of the blocks of this SeqNum that are here: others must be like them.
    #[must_use]
    pub fn shape(&self, seq: Serial) -> Option<(Format, u8, usize)> {
        let slot = &self.slots[self.index(seq)];
        (slot.tag == Some(seq)).then_some((slot.format, slot.flags, slot.length))
    }

    /// All children of the server, a bit for each.
    fn all(&self) -> u64 {
        u64::MAX >> (64 - self.heard.len())
    }

    /// Refused packets, by [`Refusal::index`].
    #[must_use]
    pub fn refused(&self) -> &[u64; Refusal::COUNT] {
        &self.refused
    }

    /// Results in which an integer overflowed: some worker sent more than its share. They are delivered, wrapped.
    #[must_use]
    pub fn overflowed(&self) -> u64 {
        self.overflowed
    }

    /// Takes a datagram that came from `from`. Returns the SeqNum that it committed, if it did.
    pub fn handle_packet(&mut self, now: Time, from: Endpoint, bytes: &[u8]) -> Result<Option<Serial>, Refusal> {
        let outcome = decode(bytes).map_err(Refusal::from).and_then(|packet| self.handle(now, from, &packet));
        let risen = self.rise_those(now);
        let outcome = outcome.map(|committed| committed.or(risen));
        if let Err(refusal) = outcome {
            self.refused[refusal.index()] += 1;
        }
        outcome
    }

    /// When [`Server::handle_timeout`] is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Time {
        self.losses.rename_at.map_or(self.beats.at, |rename| rename.min(self.beats.at))
    }

    /// Names missing blocks again, and sends Ack and Credit to all, when it is time.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.losses.rename_at.is_some_and(|at| at <= now) {
            self.name_again(now);
            self.rise_those(now);
        }
        if now < self.beats.at {
            return;
        }
        self.beats.count = self.beats.count.wrapping_add(1);
        self.forget_lost(now);
        self.heartbeat();
        let is_repeated = self.beats.last.1 < BEATS;
        let busy = is_repeated
            || self.slowest().0 != self.results_end()
            || self.slots.iter().any(|slot| slot.tag.is_some() && !slot.committed);
        self.beats.at = now.plus(if busy { self.config.heartbeat_every } else { self.config.idle_every });
    }

    /// The next packet to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        self.beats.sent_credit = self.credit();
        if let Some(to) = self.beats.to.pop() {
            // Each goes to another shard of an aggregator.
            let header = self.downward(Kind::HeartbeatDown, Serial(self.beats.count), to);
            let header = header.encode(&[], self.config.key.as_ref());
            return Some(Transmit { to, header, payload: &[] });
        }
        while let Some((to, seq)) = self.losses.names.pop_front() {
            if let Some(workers) = self.names_for(to, seq) {
                let header = Header { workers, ..self.downward(Kind::Missing, seq, to) };
                return Some(Transmit { to, header: header.encode(&[], self.config.key.as_ref()), payload: &[] });
            }
        }
        if let Some((hop, seq)) = self.next_detour() {
            return self.detour(hop, seq);
        }
        while let Some(index) = self.queue.front().copied() {
            let slot = &mut self.slots[index];
            let to = if let Some(endpoint) = slot.announce.pop() {
                endpoint
            } else if let Some(endpoint) = slot.wanted.pop() {
                endpoint
            } else {
                slot.queued = false;
                self.queue.pop_front();
                continue;
            };
            let Slot { format, flags, exponent, length, .. } = *slot;
            while self.announced != self.ack && self.slots[self.index(self.announced)].announce.is_empty() {
                self.announced = self.announced.plus(1);
            }
            let slot = &self.slots[index];
            let seq = slot.tag.expect("a slot with something to send has a tag");
            let (header, payload) = if self.held.is_some() {
                (self.downward(Kind::Accepted, seq, to), &[][..])
            } else {
                let header =
                    Header { format, flags: flags & FLAG_FULL, exponent, ..self.downward(Kind::Result, seq, to) };
                (header, &self.results[index * self.config.block_bytes..][..length])
            };
            return Some(Transmit { to, header: header.encode(payload, self.config.key.as_ref()), payload });
        }
        // Now that Ack has passed all blocks in the packets that have left.
        self.transmit_pulled()
    }

    fn handle(&mut self, now: Time, from: Endpoint, packet: &Packet<'_>) -> Result<Option<Serial>, Refusal> {
        let header = &packet.header;
        if header.job != self.config.job {
            return Err(Refusal::Job);
        }
        packet.verify(self.config.key.as_ref())?;
        if self.rules.hold(Rule::Epoch) && header.epoch != self.config.epoch {
            return Err(Refusal::Epoch);
        }
        if !header.kind.is_upward() {
            return Err(Refusal::Kind);
        }
        let place = *self.hops.places.get(&from).ok_or(Refusal::Sender)?;
        if self.hops.kid(place).name != header.workers {
            return Err(Refusal::Sender);
        }
        if self.is_newer(header.ack, self.held.as_ref().map_or(self.ack, Held::most_ack)) {
            return Err(Refusal::Ack);
        }
        if place.0 == ROOT {
            self.hear(place.1, header);
        }
        // Workers that wait for Credit send nothing that would bring it.
        let gained = self.credit().ahead_of(self.beats.sent_credit);
        let has_none = self.held.is_some() && self.is_newer(self.ack, self.beats.sent_credit);
        let least = if has_none { 1 } else { (self.config.window / 4).max(4) };
        if self.queue.is_empty() && gained >= least as i32 {
            self.heartbeat();
        }
        self.note_path(now, place, header.flags & FLAG_LOST != 0);
        match header.kind {
            Kind::Push => {
                // Something has changed: the next heartbeat is due soon.
                self.beats.at = self.beats.at.min(now.plus(self.config.heartbeat_every));
                self.check_window(header.seq)?;
                if place.0 == ROOT { self.push(now, place.1, packet) } else { self.stand_in(now, place, packet) }
            }
            Kind::Request => {
                self.request(now, header.seq, place)?;
                Ok(None)
            }
            Kind::Pull => {
                self.request_pulled(header.seq, from)?;
                Ok(None)
            }
            _ if place.0 == ROOT => Ok(None),
            _ => self.stand_in(now, place, packet),
        }
    }

    /// Records which results a child has. Numbers only grow, since heartbeats overtake each other.
    fn hear(&mut self, child: usize, header: &Header) {
        let most = header.ack.plus(self.config.window - 1);
        let (ack, credit) = self.heard[child];
        let newest = |a, b| if self.is_newer(b, a) { b } else { a };
        // No more than a window, whatever the packet says.
        let credible = if self.is_newer(header.credit, most) { most } else { header.credit };
        self.heard[child] = (newest(ack, header.ack), newest(credit, credible));
        self.release_held();
    }

    /// Refuses blocks that are committed or beyond Credit.
    fn check_window(&self, seq: Serial) -> Result<(), Refusal> {
        if !self.rules.hold(Rule::Once) {
            return Ok(());
        }
        if self.is_newer(self.ack, seq) || self.slots[self.index(seq)].is_committed(seq) {
            return Err(Refusal::Stale);
        }
        if self.is_newer(seq, self.credit()) { Err(Refusal::Credit) } else { Ok(()) }
    }

    /// A child's block, or the sum of all that is below the child.
    fn push(&mut self, now: Time, child: usize, packet: &Packet<'_>) -> Result<Option<Serial>, Refusal> {
        let Packet { header, payload, .. } = packet;
        let seq = header.seq;
        let index = self.index(seq);
        if payload.len() > self.config.block_bytes {
            return Err(Refusal::Length);
        }
        let shape = header.flags & (FLAG_FULL | FLAG_LAST);
        let (overlap, whole) = (self.rules.hold(Rule::Overlap), self.rules.hold(Rule::Whole));
        let all = self.all();
        let slot = &mut self.slots[index];
        if slot.tag != Some(seq) || slot.committed {
            // All workers have the result that was here: Credit shows it.
            slot.tag = Some(seq);
            slot.parts.clear();
            slot.announce.clear();
            slot.wanted.clear();
            slot.committed = false;
            (slot.format, slot.flags) = (header.format, shape);
            (slot.exponent, slot.length) = (header.exponent, payload.len());
        }
        if (slot.format, slot.flags, slot.exponent) != (header.format, shape, header.exponent) {
            return Err(Refusal::Format);
        }
        if slot.length != payload.len() {
            return Err(Refusal::Length);
        }
        let place = (index * self.heard.len() + child) * self.config.block_bytes;
        if slot.have() >> child & 1 == 0 {
            slot.parts.push(child as u8);
            self.parts[place..place + payload.len()].copy_from_slice(payload);
        } else if overlap {
            return Err(Refusal::Duplicate);
        } else {
            // Without this rule the server adds every block.
            let sum = &mut self.parts[place..place + payload.len()];
            arithmetic::finish(header.format, sum);
            arithmetic::add(header.format, sum, payload);
            arithmetic::finish(header.format, sum);
        }
        if whole && self.slots[index].have() != all {
            return Ok(None);
        }
        self.commit(index);
        let recovery = &self.losses.slots[index];
        if recovery.seq == seq && recovery.tries > 0 {
            self.measure(now.since(recovery.first_named_at), recovery.tries);
        }
        // A block that bypassed the aggregators comes early.
        if header.flags & FLAG_FULL == 0 {
            self.look_for_gaps(now, seq);
        }
        Ok(Some(seq))
    }

    fn commit(&mut self, index: usize) {
        let (block, children) = (self.config.block_bytes, self.heard.len());
        let slot = &mut self.slots[index];
        let mut order = slot.parts.clone();
        if self.rules.hold(Rule::Order) {
            order.sort_unstable();
        }
        let sum = &mut self.results[index * block..][..slot.length];
        let places = &self.parts[index * children * block..][..children * block];
        let mut blocks: [&[u8]; MAX_CHILDREN] = [&[]; MAX_CHILDREN];
        blocks.iter_mut().zip(&order).for_each(|(to, child)| {
            *to = &places[usize::from(*child) * block..][..slot.length];
        });
        let blocks = &blocks[..order.len()];
        let mut overflow = false;
        if slot.format.is_float() {
            arithmetic::sum_floats(slot.format, sum, blocks);
        } else {
            arithmetic::begin(slot.format, sum, blocks[0]);
            for block in &blocks[1..] {
                overflow |= arithmetic::add(slot.format, sum, block);
            }
            arithmetic::finish(slot.format, sum);
        }
        self.overflowed += u64::from(overflow);
        slot.committed = true;
        let seq = slot.tag.expect("a slot with parts has a tag");
        self.slots[index].announce = self.receivers(false);
        self.send(seq);
        while self.slots[self.index(self.ack)].is_committed(self.ack) {
            self.absorb(self.ack);
            self.ack = self.ack.plus(1);
            self.paths.passed += 1;
        }
    }

    /// A node requests a result that it misses. A second request means that the answer to the first was lost.
    fn request(&mut self, now: Time, seq: Serial, place: (usize, usize)) -> Result<(), Refusal> {
        let index = self.index(seq);
        let committed = self.slots[index].is_committed(seq);
        if self.held.is_some() && !committed && self.is_newer(self.ack, seq) {
            // Its slot is another block's. Ack says that it was accepted.
            let to = self.hops.kid(place).endpoint;
            if !self.beats.to.contains(&to) {
                self.beats.to.push(to);
            }
            return Ok(());
        }
        if (!committed && self.missing(seq) == 0) || !self.rules.hold(Rule::Answer) {
            return Err(Refusal::Stale);
        }
        let kid = *self.hops.kid(place);
        let recovery = self.recovery(seq, now);
        let again = recovery.asked.contains(&kid.endpoint);
        if again {
            recovery.asked.clear();
        }
        recovery.asked.push(kid.endpoint);
        if !committed {
            // Naming for a gap is the better reason, and the clock repeats it. A node that requests may only have a short
            // time-out.
            if recovery.tries == 0 && (again || recovery.asked.len() == 1) {
                self.name(seq);
            }
            // A node whose own block is here learns that others' are missing.
            if !self.lacks(place, seq) {
                self.tell(kid.endpoint, seq);
            }
            return Ok(());
        }
        // When a second worker below an aggregator requests the result, it was probably lost above them all: it goes to all of
        // them.
        let beside = |other: &&Endpoint| self.hops.places[other].0 == place.0;
        let askers = self.losses.slots[index].asked.iter().filter(beside).count();
        match askers {
            _ if kid.hop.is_some() || place.0 == ROOT || self.is_bypassed(place.0) => {
                self.want(seq, kid.endpoint);
            }
            1 => self.want(seq, kid.endpoint),
            2 => self.want(seq, self.hops.list[place.0].endpoint),
            _ => {}
        }
        Ok(())
    }

    /// Sends a result to a node again: once, however often it is requested before it has left.
    fn want(&mut self, seq: Serial, to: Endpoint) {
        let index = self.index(seq);
        let slot = &mut self.slots[index];
        if !slot.wanted.contains(&to) && !slot.announce.contains(&to) {
            slot.wanted.push(to);
        }
        self.send(seq);
    }

    fn send(&mut self, seq: Serial) {
        let index = self.index(seq);
        if !std::mem::replace(&mut self.slots[index].queued, true) {
            self.queue.push_back(index);
        }
    }

    /// Sends Ack and Credit to all workers: through every child, and straight to the children of aggregators that are bypassed.
    fn heartbeat(&mut self) {
        let credit = self.credit();
        self.beats.last = (credit, if self.beats.last.0 == credit { self.beats.last.1.saturating_add(1) } else { 1 });
        self.beats.to = self.receivers(true);
    }

    fn downward(&self, kind: Kind, seq: Serial, to: Endpoint) -> Header {
        let (mut aside, mut lacking) = (0, 0);
        if let Some(held) = &self.held {
            let slowest = self.slowest().0.oldest(held.sent());
            // Of a window of 2^16 there may be one more.
            lacking = (held.sent().ahead_of(slowest) as u32).min(u32::from(u16::MAX));
            aside = u64::from(slowest.plus(lacking).0) << 32;
        }
        Header {
            kind,
            job: self.config.job,
            epoch: self.config.epoch,
            format: Format::None,
            flags: 0,
            seq,
            ack: if self.held.is_some() { self.ack } else { self.announced },
            credit: self.credit(),
            exponent: if kind == Kind::HeartbeatDown { lacking as u16 as i16 } else { 0 },
            workers: aside | path::state(self.paths.number, self.is_direct(self.hops.places[&to])),
        }
    }

    /// The number after the last result: the Ack of a worker that has them all.
    fn results_end(&self) -> Serial {
        self.held.as_ref().map_or(self.ack, Held::next)
    }

    /// The lowest Ack and the lowest Credit of all children.
    fn slowest(&self) -> (Serial, Serial) {
        let oldest = |a, b| if self.is_newer(b, a) { a } else { b };
        let each = self.heard.iter().copied();
        each.reduce(|a, b| (oldest(a.0, b.0), oldest(a.1, b.1))).expect("a tree has children")
    }

    fn index(&self, seq: Serial) -> usize {
        (seq.0 & (self.config.window - 1)) as usize
    }

    fn is_newer(&self, a: Serial, b: Serial) -> bool {
        if self.rules.hold(Rule::Serial) { a.is_newer_than(b) } else { a.0 > b.0 }
    }
}

impl Slot {
    fn is_committed(&self, seq: Serial) -> bool {
        self.tag == Some(seq) && self.committed
    }

    /// The children whose blocks are here, a bit for each.
    fn have(&self) -> u64 {
        self.parts.iter().fold(0, |have, child| have | 1 << child)
    }
}

impl Recovery {
    fn of(seq: Serial, now: Time) -> Recovery {
        Recovery { seq, tries: 0, named_at: now, first_named_at: now, asked: Vec::new() }
    }
}

/// How many heartbeats in the short interval carry a new Credit: one may be lost, and a worker that waits for it would wait
/// for an idle interval.
const BEATS: u32 = 3;

/// The numbers of the set bits.
fn bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = (set != 0).then(|| set.trailing_zeros() as usize);
        set &= set.wrapping_sub(1);
        lowest
    })
}

#[cfg(test)]
impl Server {
    pub(crate) fn with_rules(now: Time, config: ServerConfig, rules: Rules) -> Server {
        Server { rules, ..Server::new(now, config) }
    }

    pub(crate) fn heartbeat_now(&mut self) {
        self.heartbeat();
    }

    /// Hashes all state that decides what the server does, except time and packets that wait to be sent.
    pub(crate) fn digest(&self, state: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        (self.config.epoch, self.ack, &self.heard).hash(state);
        self.paths.digest(state);
        self.held.iter().for_each(|held| held.digest(state));
        self.losses.slots.iter().for_each(|each| {
            let asked: std::collections::BTreeSet<&Endpoint> = each.asked.iter().collect();
            (each.seq, each.tries > 0, asked).hash(state);
        });
        let block = self.config.block_bytes;
        for (index, slot) in self.slots.iter().enumerate() {
            (slot.tag, slot.committed, &slot.parts).hash(state);
            if slot.committed {
                self.results[index * block..][..slot.length].hash(state);
            } else {
                for part in &slot.parts {
                    let place = (index * self.heard.len() + usize::from(*part)) * block;
                    self.parts[place..][..slot.length].hash(state);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
