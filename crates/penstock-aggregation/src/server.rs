//! The server: receives sums and single blocks, commits, and returns results to all workers.
//!
//! A slot keeps its parts (sums of whole aggregators, blocks of single workers) apart until every worker is in, and then adds
//! them in the order of the tree. The sets of workers that a tree can send are nested or disjoint, so a part is either new, or
//! contained in one that is here (dropped), or contains some (which it replaces). That is why a worker may bypass an
//! aggregator at any time without being counted twice, and why the result has the same bits either way.
//!
//! ```text
//!             Ack                      Credit = (slowest worker's Ack) + W - 1
//!   committed  │  committed or collecting │  refused
//!   ───────────┴──────────────────────────┴──────────
//!   kept from the slowest worker's Ack on: workers that request it get it again
//! ```

mod recovery;

use super::packet::{FLAG_FULL, FLAG_LOST, Format, HEADER_BYTES, Header, Kind, MAX_PAYLOAD_BYTES, Packet, decode};
use super::rules::{Refusal, Rule, Rules};
use super::tree::{Node, Parts, Tree};
use super::{Endpoint, Key, Serial, arithmetic, asks_again};
use penstock_types::{MILLISECOND, Time};
use std::collections::VecDeque;

/// A server's configuration for one job.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The number of the job.
    pub job: u32,
    /// Counts the lives of the job.
    pub epoch: u16,
    /// The job's key; `None` on a trusted network.
    pub key: Option<Key>,
    /// SeqNums in flight, a power of two; the same on all nodes of the job.
    pub window: u32,
    /// The length of the longest block in bytes.
    pub block_bytes: usize,
    /// The first SeqNum of the epoch.
    pub start: Serial,
    /// The job's tree: which node sends to which.
    pub tree: Tree,
    /// Each worker's own address, by number.
    pub workers: Vec<Endpoint>,
    /// How often Ack and Credit are sent while blocks are in flight. The loss of the last packets of a burst is noticed after
    /// this time.
    pub heartbeat_every: u64,
    /// How often Ack and Credit are sent while no blocks are in flight. Workers take an aggregator for dead when they hear
    /// nothing through it for [`super::Timing::path_dead_after`], a few times this.
    pub idle_every: u64,
}

impl ServerConfig {
    /// 2 ms: many round trips of a local network, few packets. 100 ms: path death is noticed within a third of a second.
    pub const HEARTBEAT_EVERY: u64 = 2 * MILLISECOND;
    /// See [`ServerConfig::HEARTBEAT_EVERY`].
    pub const IDLE_EVERY: u64 = 100 * MILLISECOND;
}

/// The end of a job's path, where sums are committed. Memory: `window * (workers + 1) * block_bytes`, reserved at once.
#[derive(Clone, Debug)]
pub struct Server {
    config: ServerConfig,
    all: u64,
    ack: Serial,
    /// All results below this were sent once. Workers get it as Ack, so that an Ack does not overtake results.
    announced: Serial,
    /// For each worker: the next result that it expects, and the highest that it can take.
    heard: Vec<(Serial, Serial)>,
    /// Workers that hear nothing from the aggregator above them.
    lost: u64,
    slots: Vec<Slot>,
    /// For each slot a place for a block of every worker; a sum lies at its lowest worker's place.
    parts: Vec<u8>,
    results: Vec<u8>,
    /// Slots with something to send, each once.
    queue: VecDeque<usize>,
    losses: Losses,
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
    /// When the next heartbeat is due.
    at: Time,
}

#[derive(Clone, Debug)]
struct Slot {
    tag: Option<Serial>,
    /// Disjoint sets of workers, in the order of arrival.
    parts: Vec<u64>,
    committed: bool,
    format: Format,
    flags: u8,
    exponent: i16,
    length: usize,
    /// Children or workers to which the result is still to be sent for the first time, last first.
    announce: Vec<Endpoint>,
    /// Workers that requested it and wait for it to be sent.
    wanted: u64,
    queued: bool,
}

/// What the server did about the loss of a block or of its result.
#[derive(Clone, Copy, Debug)]
struct Recovery {
    seq: Serial,
    /// How often missing blocks were named because of a gap, and when last.
    tries: u32,
    named_at: Time,
    first_named_at: Time,
    /// Workers that requested the result, as a bitmap. A second request of a worker resets it.
    asked: u64,
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
        let (all, workers) = (config.tree.workers(), config.workers.len());
        assert!(workers <= 64 && 64 - all.leading_zeros() as usize <= workers, "an address for every worker");
        let window = config.window as usize;
        let slot = Slot {
            tag: None,
            parts: Vec::new(),
            committed: false,
            format: Format::None,
            flags: 0,
            exponent: 0,
            length: 0,
            announce: Vec::new(),
            wanted: 0,
            queued: false,
        };
        Server {
            all,
            ack: config.start,
            announced: config.start,
            heard: vec![(config.start, config.start.plus(config.window - 1)); workers],
            lost: 0,
            slots: vec![slot; window],
            parts: vec![0; window * workers * config.block_bytes],
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
        if !self.rules.hold(Rule::Window) {
            return self.ack.plus(self.config.window - 1);
        }
        self.slowest().1
    }

    /// The workers that bypass aggregators: all workers below a child of the server, if one of them has lost its path (R13).
    #[must_use]
    pub fn direct(&self) -> u64 {
        if !self.rules.hold(Rule::Bypass) {
            return self.lost;
        }
        let sets = self.config.tree.children.iter().map(Node::workers);
        sets.filter(|set| set & self.lost != 0).fold(0, |all, set| all | set)
    }

    /// Workers whose block of this SeqNum is missing; empty where the SeqNum is committed or outside the window.
    #[must_use]
    pub fn missing(&self, seq: Serial) -> u64 {
        let slot = &self.slots[self.index(seq)];
        let in_window = !self.ack.is_newer_than(seq) && !seq.is_newer_than(self.credit());
        match slot.tag {
            _ if !in_window => 0,
            Some(tag) if tag == seq && slot.committed => 0,
            Some(tag) if tag == seq => self.all & !slot.parts.iter().fold(0, |have, part| have | part),
            _ => self.all,
        }
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
        }
        if now < self.beats.at {
            return;
        }
        self.heartbeat();
        let is_repeated = self.beats.last.1 < BEATS;
        let busy = is_repeated
            || self.slowest().0 != self.ack
            || self.slots.iter().any(|slot| slot.tag.is_some() && !slot.committed);
        self.beats.at = now.plus(if busy { self.config.heartbeat_every } else { self.config.idle_every });
    }

    /// The next packet to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        self.beats.sent_credit = self.credit();
        if let Some(to) = self.beats.to.pop() {
            let header = self.downward(Kind::HeartbeatDown, Serial(0)).encode(&[], self.config.key.as_ref());
            return Some(Transmit { to, header, payload: &[] });
        }
        while let Some((to, seq)) = self.losses.names.pop_front() {
            let missing = self.missing(seq);
            let workers = if missing & self.behind(to) == 0 { missing } else { missing & self.behind(to) };
            if workers != 0 {
                let header = Header { workers, ..self.downward(Kind::Missing, seq) };
                return Some(Transmit { to, header: header.encode(&[], self.config.key.as_ref()), payload: &[] });
            }
        }
        loop {
            let index = *self.queue.front()?;
            let slot = &mut self.slots[index];
            let to = if let Some(endpoint) = slot.announce.pop() {
                endpoint
            } else if slot.wanted != 0 {
                let worker = slot.wanted.trailing_zeros();
                slot.wanted &= slot.wanted - 1;
                self.config.workers[worker as usize]
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
            let header = Header { format, flags, exponent, ..self.downward(Kind::Result, seq) };
            let payload = &self.results[index * self.config.block_bytes..][..length];
            return Some(Transmit { to, header: header.encode(payload, self.config.key.as_ref()), payload });
        }
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
        let single = self.sender(from, header)?;
        self.hear(header)?;
        // Workers that wait for Credit send nothing that would bring it.
        if self.queue.is_empty()
            && self.credit().ahead_of(self.beats.sent_credit) >= (self.config.window / 4).max(4) as i32
        {
            self.heartbeat();
        }
        if let Some(worker) = single {
            self.note_path(now, worker, header.flags & FLAG_LOST != 0);
        }
        match header.kind {
            Kind::Push => {
                // Something has changed: the next heartbeat is due soon.
                self.beats.at = self.beats.at.min(now.plus(self.config.heartbeat_every));
                self.push(now, packet)
            }
            Kind::Request => {
                let child = single.is_none().then_some(from);
                self.request(now, header.seq, header.workers.trailing_zeros(), child)?;
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// Checks that these workers live behind `from`. Returns the number of the worker if `from` is its own address.
    fn sender(&self, from: Endpoint, header: &Header) -> Result<Option<u32>, Refusal> {
        let workers = header.workers;
        if workers.is_power_of_two() && workers & self.all != 0 {
            let worker = workers.trailing_zeros();
            if self.config.workers[worker as usize] == from {
                return Ok(Some(worker));
            }
        }
        let behind = |node: &Node| match node {
            // An aggregator passes a request on as the worker made it.
            Node::Aggregator { endpoint, .. } if header.kind == Kind::Request => {
                *endpoint == from && workers.is_power_of_two() && workers & !node.workers() == 0
            }
            Node::Aggregator { endpoint, .. } => *endpoint == from && node.workers() == workers,
            Node::Worker(_) => false,
        };
        if self.config.tree.children.iter().any(behind) { Ok(None) } else { Err(Refusal::Sender) }
    }

    /// Records which results workers have. Numbers only grow, since heartbeats overtake each other.
    fn hear(&mut self, header: &Header) -> Result<(), Refusal> {
        if self.is_newer(header.ack, self.ack) {
            return Err(Refusal::Ack);
        }
        let most = header.ack.plus(self.config.window - 1);
        for worker in bits(header.workers) {
            let (ack, credit) = self.heard[worker];
            let newest = |a, b| if self.is_newer(b, a) { b } else { a };
            // No more than a window, whatever the packet says.
            let credible = if self.is_newer(header.credit, most) { most } else { header.credit };
            self.heard[worker] = (newest(ack, header.ack), newest(credit, credible));
        }
        Ok(())
    }

    fn note_path(&mut self, now: Time, worker: u32, lost: bool) {
        let before = self.direct();
        self.lost = self.lost & !(1 << worker) | u64::from(lost) << worker;
        // A worker directly below the server has no path to lose.
        self.lost &= !self.config.tree.children.iter().fold(0, |own, node| match node {
            Node::Worker(worker) => own | 1 << worker,
            Node::Aggregator { .. } => own,
        });
        if self.direct() != before {
            self.heartbeat();
            self.beats.at = now.plus(self.config.heartbeat_every);
        }
    }

    fn push(&mut self, now: Time, packet: &Packet<'_>) -> Result<Option<Serial>, Refusal> {
        let Packet { header, payload, .. } = packet;
        let (seq, set) = (header.seq, header.workers);
        let index = self.index(seq);
        if self.rules.hold(Rule::Once) {
            if self.is_newer(self.ack, seq) {
                return Err(Refusal::Stale);
            }
            if self.is_newer(seq, self.credit()) {
                return Err(Refusal::Credit);
            }
            if self.slots[index].tag == Some(seq) && self.slots[index].committed {
                return Err(Refusal::Stale);
            }
        }
        if payload.len() > self.config.block_bytes {
            return Err(Refusal::Length);
        }
        let (overlap, whole) = (self.rules.hold(Rule::Overlap), self.rules.hold(Rule::Whole));
        let slot = &mut self.slots[index];
        if slot.tag != Some(seq) || slot.committed {
            // All workers have the result that was here: Credit shows it.
            slot.tag = Some(seq);
            slot.parts.clear();
            slot.announce.clear();
            (slot.committed, slot.wanted) = (false, 0);
            (slot.format, slot.flags) = (header.format, header.flags & FLAG_FULL);
            (slot.exponent, slot.length) = (header.exponent, payload.len());
        }
        if (slot.format, slot.flags, slot.exponent) != (header.format, header.flags & FLAG_FULL, header.exponent) {
            return Err(Refusal::Format);
        }
        if slot.length != payload.len() {
            return Err(Refusal::Length);
        }
        if overlap {
            if slot.parts.iter().any(|part| set & !part == 0) {
                return Err(Refusal::Duplicate);
            }
            slot.parts.retain(|part| part & !set != 0);
        }
        slot.parts.push(set);
        let workers = self.config.workers.len();
        let place = (index * workers + set.trailing_zeros() as usize) * self.config.block_bytes;
        let have = slot.parts.iter().fold(0, |have, part| have | part);
        if !overlap && slot.parts.len() > 1 && slot.parts[..slot.parts.len() - 1].iter().any(|part| part & set != 0) {
            // Without this rule the server adds every block.
            let sum = &mut self.parts[place..place + payload.len()];
            arithmetic::finish(header.format, sum);
            arithmetic::add(header.format, sum, payload);
            arithmetic::finish(header.format, sum);
        } else {
            self.parts[place..place + payload.len()].copy_from_slice(payload);
        }
        if whole && have != self.all {
            return Ok(None);
        }
        self.commit(index);
        let recovery = self.losses.slots[index];
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
        let (block, workers) = (self.config.block_bytes, self.config.workers.len());
        let slot = &mut self.slots[index];
        let sum = &mut self.results[index * block..][..slot.length];
        let parts = Parts {
            sets: &slot.parts,
            blocks: &mut self.parts[index * workers * block..][..workers * block],
            block_bytes: block,
        };
        if self.rules.hold(Rule::Order) {
            self.overflowed += u64::from(self.config.tree.sum(slot.format, parts, sum));
        } else {
            // Parts are added in the order of arrival.
            self.overflowed += u64::from(parts.sum(slot.format, sum));
        }
        slot.committed = true;
        let seq = slot.tag.expect("a slot with parts has a tag");
        let direct = self.direct();
        let slot = &mut self.slots[index];
        for node in self.config.tree.children.iter().rev() {
            match node {
                Node::Aggregator { endpoint, .. } if node.workers() & direct != node.workers() => {
                    slot.announce.push(*endpoint)
                }
                _ => {}
            }
            let single = if matches!(node, Node::Worker(_)) { node.workers() } else { node.workers() & direct };
            slot.announce.extend(bits(single).map(|worker| self.config.workers[worker]));
        }
        self.send(seq);
        while self.slots[self.index(self.ack)].is_committed(self.ack) {
            self.ack = self.ack.plus(1);
        }
    }

    /// A worker requests a result that it misses. A second request means that the answer to the first was lost. `child`: the
    /// aggregator that passed the request on because it does not have the result.
    fn request(&mut self, now: Time, seq: Serial, worker: u32, child: Option<Endpoint>) -> Result<(), Refusal> {
        let index = self.index(seq);
        let (bit, committed) = (1u64 << worker, self.slots[index].is_committed(seq));
        if (!committed && self.missing(seq) == 0) || !self.rules.hold(Rule::Answer) {
            return Err(Refusal::Stale);
        }
        let recovery = self.recovery(seq, now);
        let again = asks_again(&mut recovery.asked, bit);
        let Recovery { asked, tries, .. } = *recovery;
        if !committed {
            // Naming for a gap is the better reason, and the clock repeats it. A worker that requests may only have a short
            // time-out.
            if tries == 0 && (again || asked == bit) {
                self.name(seq);
            }
            // A worker whose own block is here learns that others' are missing.
            let to = child.unwrap_or(self.config.workers[worker as usize]);
            if self.missing(seq) & self.behind(to) == 0 {
                self.tell(to, seq);
            }
            return Ok(());
        }
        if let Some(child) = child {
            if asked & self.behind(child) == bit {
                self.repeat(seq, child);
            }
            return Ok(());
        }
        // When a second worker below a child requests the result, it was probably lost above them all: it goes to all of them.
        let above = self.config.tree.children.iter().find_map(|node| match node {
            Node::Aggregator { endpoint, .. } if node.workers() & bit & !self.direct() != 0 => {
                Some((*endpoint, node.workers()))
            }
            _ => None,
        });
        match above.map(|(endpoint, set)| (endpoint, (asked & set).count_ones())) {
            None | Some((_, 1)) => {
                self.slots[index].wanted |= bit;
                self.send(seq);
            }
            Some((endpoint, 2)) => self.repeat(seq, endpoint),
            Some(_) => {}
        }
        Ok(())
    }

    fn send(&mut self, seq: Serial) {
        let index = self.index(seq);
        if !std::mem::replace(&mut self.slots[index].queued, true) {
            self.queue.push_back(index);
        }
    }

    /// Sends Ack and Credit to all workers: through every child, and directly to those that bypass it.
    fn heartbeat(&mut self) {
        let (direct, credit) = (self.direct(), self.credit());
        self.beats.last = (credit, if self.beats.last.0 == credit { self.beats.last.1.saturating_add(1) } else { 1 });
        self.beats.to.clear();
        for node in &self.config.tree.children {
            match node {
                Node::Aggregator { endpoint, .. } => self.beats.to.push(*endpoint),
                Node::Worker(worker) => self.beats.to.push(self.config.workers[usize::from(*worker)]),
            }
        }
        self.beats.to.extend(bits(direct).map(|worker| self.config.workers[worker]));
    }

    /// The workers at an endpoint or below it.
    fn behind(&self, endpoint: Endpoint) -> u64 {
        let below = self.config.tree.children.iter().find_map(|node| match node {
            Node::Aggregator { endpoint: at, .. } if *at == endpoint => Some(node.workers()),
            _ => None,
        });
        below.unwrap_or_else(|| {
            self.config.workers.iter().position(|at| *at == endpoint).map_or(0, |worker| 1 << worker)
        })
    }

    fn downward(&self, kind: Kind, seq: Serial) -> Header {
        Header {
            kind,
            job: self.config.job,
            epoch: self.config.epoch,
            format: Format::None,
            flags: 0,
            seq,
            ack: self.announced,
            credit: self.credit(),
            exponent: 0,
            workers: self.direct(),
        }
    }

    /// The lowest Ack and the lowest Credit of all workers.
    fn slowest(&self) -> (Serial, Serial) {
        let oldest = |a, b| if self.is_newer(b, a) { a } else { b };
        let each = bits(self.all).map(|worker| self.heard[worker]);
        each.reduce(|a, b| (oldest(a.0, b.0), oldest(a.1, b.1))).expect("a tree has workers")
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
}

impl Recovery {
    fn of(seq: Serial, now: Time) -> Recovery {
        Recovery { seq, tries: 0, named_at: now, first_named_at: now, asked: 0 }
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
        (self.config.epoch, self.ack, &self.heard, self.lost).hash(state);
        self.losses.slots.iter().for_each(|each| (each.seq, each.tries > 0, each.asked).hash(state));
        let block = self.config.block_bytes;
        for (index, slot) in self.slots.iter().enumerate() {
            (slot.tag, slot.committed, &slot.parts).hash(state);
            if slot.committed {
                self.results[index * block..][..slot.length].hash(state);
            } else {
                for part in &slot.parts {
                    let place = (index * self.config.workers.len() + part.trailing_zeros() as usize) * block;
                    self.parts[place..][..slot.length].hash(state);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
