//! The aggregator: a slot table and a heart table for every job.
//!
//! ```text
//!   slot of SeqNum mod W            push of SeqNum s, from a child whose workers are w
//!   tag    have       sum           s newer than tag   have := w, sum := block      (R1)
//!   ┌─────┬──────────┬───────┐      s older            dropped                      (R2)
//!   │ s-W │ 1111     │ kept  │      s = tag, w in have dropped; if all are in, the sum goes up again  (R3, R4)
//!   └─────┴──────────┴───────┘      s = tag, else      have |= w, sum += block; if all are in, the sum goes up
//! ```
//! With s = tag, a block of another format, exponent or length than the slot's is refused first.
//!
//! A result, on its way down, replaces the sum in the slot: a child that loses the result gets it from here.
//!
//! What goes up names this node alone, by the name that its parent has for it: bitmaps are those of one hop. While the parent is
//! bypassed, the server itself takes what goes up ([`Tenant::server`]).
//!
//! One packet in, at most one packet out (to one address, or the same bytes to all children); no clock and no queue, so that a
//! switch can do the same. An aggregator may lose its whole state at any time: workers send again until the *server* has
//! committed.

mod counters;
mod pulls;
mod results;
mod shard;
mod slot;
mod tenant;

pub use counters::JobCounters;
pub use shard::Shard;
pub(crate) use slot::Decision;
pub use tenant::{Admission, Child, Limits, Tenant};

use super::packet::{FLAG_FULL, FLAG_LAST, FLAG_LOST, Format, HEADER_BYTES, Header, Kind, Packet, decode};
use super::path::Path;
use super::rules::{Refusal, Rule, Rules};
use super::{Endpoint, Serial, arithmetic};
use pulls::Pulls;
use slot::{EMPTY, Slot};
use std::collections::BTreeMap;
use std::slice;

/// What the driver does after a packet.
#[derive(Debug)]
pub enum Action<'a> {
    /// Send nothing.
    Nothing,
    /// Send this header and this block.
    Send {
        /// The receivers: the parent, a child, or all children.
        to: &'a [Endpoint],
        /// The header of the packet.
        header: [u8; HEADER_BYTES],
        /// The block; valid until the next call.
        payload: &'a [u8],
    },
    /// Send the packet that was just handled, which came from above, byte for byte to all of these.
    Relay {
        /// The endpoints of all children.
        to: &'a [Endpoint],
    },
}

/// A node that adds what its children push. One serves all jobs; no job affects another.
#[derive(Clone, Debug)]
pub struct Aggregator {
    limits: Limits,
    shard: Shard,
    jobs: BTreeMap<u32, Table>,
    /// Packets that belong to no job here, by [`Refusal::index`].
    unauthenticated: [u64; Refusal::COUNT],
    rules: Rules,
}

/// A job's slots and heart table.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    tenant: Tenant,
    shard: Shard,
    all: u64,
    children: Vec<Endpoint>,
    slots: Vec<Slot>,
    /// For each slot the sum or the result; with floats, then a block of every child.
    memory: Vec<u8>,
    /// For each slot the header of the result, if the slot holds one.
    results: Vec<[u8; HEADER_BYTES]>,
    /// Results, where they come apart.
    pulls: Option<Pulls>,
    /// For each child the newest Ack and Credit.
    heart: Vec<Option<(Serial, Serial)>>,
    path: Path,
    /// Nothing came from the parent itself since it is bypassed.
    parent_is_lost: bool,
    counters: JobCounters,
}

/// With blocks of 8,896 bytes, half a gigabyte in flight. A guess: more than anyone needs.
const MAX_WINDOW: u32 = 1 << 16;
/// As in QUIC: if three later packets have arrived, an earlier one was lost, not reordered.
const REORDERED: u32 = 3;

impl Aggregator {
    /// An aggregator without jobs.
    #[must_use]
    pub fn new(limits: Limits) -> Aggregator {
        Aggregator::sharded(limits, Shard::WHOLE)
    }

    /// One shard of an aggregator, without jobs; the limits are the shard's own.
    ///
    /// # Panics
    /// When the number of shards is not a power of two, or the index not below it.
    #[must_use]
    pub fn sharded(limits: Limits, shard: Shard) -> Aggregator {
        assert!(shard.count.is_power_of_two() && shard.index < shard.count, "{shard:?}");
        Aggregator {
            limits,
            shard,
            jobs: BTreeMap::new(),
            unauthenticated: [0; Refusal::COUNT],
            rules: Rules::default(),
        }
    }

    /// Admits a job, or the next epoch of one, which replaces the epoch before. Reserves all memory that the job will use.
    pub fn open(&mut self, tenant: Tenant) -> Result<(), Admission> {
        tenant.check()?;
        let before = self.jobs.get(&tenant.job);
        if let Some(table) = before {
            if (tenant.epoch.wrapping_sub(table.tenant.epoch) as i16) < 0 {
                return Err(Admission::Epoch(table.tenant.epoch));
            }
        } else if self.jobs.len() >= self.limits.jobs {
            return Err(Admission::Jobs(self.limits.jobs));
        }
        let others = || self.jobs.values().filter(|table| table.tenant.job != tenant.job);
        let free = self.limits.slots - others().map(|table| table.slots.len()).sum::<usize>();
        let slots = self.shard.slots(tenant.window);
        if slots > free {
            let needed = slots;
            return Err(Admission::Slots { needed, free });
        }
        let free = self.limits.memory_bytes - others().map(Table::memory_bytes).sum::<usize>();
        let needed = tenant.memory_bytes(slots);
        if needed > free {
            return Err(Admission::Memory { needed, free });
        }
        // The epoch before is removed first, so that both never need memory together.
        self.jobs.remove(&tenant.job);
        let mut table = Table::new(tenant, self.shard);
        table.reserve();
        self.jobs.insert(table.tenant.job, table);
        Ok(())
    }

    /// Removes a job; its slots become free.
    pub fn close(&mut self, job: u32) {
        self.jobs.remove(&job);
    }

    /// The counters of a job since its epoch was opened.
    #[must_use]
    pub fn counters(&self, job: u32) -> Option<&JobCounters> {
        self.jobs.get(&job).map(|table| &table.counters)
    }

    /// Packets that belong to no job here, by [`Refusal::index`].
    #[must_use]
    pub fn unauthenticated(&self) -> &[u64; Refusal::COUNT] {
        &self.unauthenticated
    }

    /// Slots of a job that hold an incomplete sum.
    #[must_use]
    pub fn waiting_slots(&self, job: u32) -> usize {
        self.jobs
            .get(&job)
            .map_or(0, |table| table.slots.iter().filter(|slot| slot.have != 0 && slot.have != table.all).count())
    }

    /// Handles a datagram from `from`. At worst, a wrong one has no effect and is counted.
    pub fn handle_packet(&mut self, from: Endpoint, bytes: &[u8]) -> Result<Action<'_>, Refusal> {
        let mut unauthenticated = |refusal: Refusal| {
            self.unauthenticated[refusal.index()] += 1;
            refusal
        };
        let packet = decode(bytes).map_err(|error| unauthenticated(error.into()))?;
        let Some(table) = self.jobs.get_mut(&packet.header.job) else {
            return Err(unauthenticated(Refusal::Job));
        };
        table.handle(from, &packet, bytes, self.rules)
    }
}

impl Table {
    /// A table without slots and without memory for blocks: all of its SeqNums are missing.
    pub(crate) fn new(tenant: Tenant, shard: Shard) -> Table {
        Table {
            all: tenant.children.iter().fold(0, |all, child| all | child.workers),
            children: tenant.children.iter().map(|child| child.endpoint).collect(),
            slots: Vec::new(),
            memory: Vec::new(),
            results: Vec::new(),
            pulls: None,
            heart: vec![None; tenant.children.len()],
            path: Path::default(),
            parent_is_lost: false,
            counters: JobCounters::default(),
            shard,
            tenant,
        }
    }

    /// Reserves slots and the memory for blocks, if it has none. What is never written, such as places for floats in a job of
    /// integers, stays the kernel's.
    pub(crate) fn reserve(&mut self) {
        if self.slots.is_empty() {
            let slots = self.shard.slots(self.tenant.window);
            self.slots = vec![EMPTY; slots];
            self.memory = vec![0; self.tenant.slot_bytes(slots)];
            self.pulls = self.tenant.keeps_pulls().then(|| Pulls::new(slots, self.tenant.block_bytes));
            self.results = vec![[0; HEADER_BYTES]; if self.tenant.results { slots } else { 0 }];
        }
    }

    fn memory_bytes(&self) -> usize {
        self.memory.len() + self.pulls.as_ref().map_or(0, Pulls::bytes)
    }

    /// Forgets all blocks and frees slots and memory. What children have said of Ack and Credit stays.
    pub(crate) fn release(&mut self) {
        (self.slots, self.memory, self.results) = (Vec::new(), Vec::new(), Vec::new());
    }

    /// What [`Table::reserve`] takes for a server's table of so many children.
    pub(crate) fn server_bytes(window: u32, block_bytes: usize, children: usize) -> usize {
        (window as usize)
            .saturating_mul((children + 1).saturating_mul(block_bytes) + size_of::<Slot>() + size_of::<u64>())
    }

    /// A child that was heard before has these results at least.
    pub(crate) fn raise(&mut self, child: usize, ack: Serial) {
        if let Some(heard) = &mut self.heart[child] {
            *heard = (ack, ack.plus(self.tenant.window - 1));
        }
    }

    /// Forgets the block of a SeqNum, or whatever else is in its slot.
    pub(crate) fn forget(&mut self, seq: Serial) {
        if let Ok(index) = self.slot_of(seq) {
            self.slots[index] = EMPTY;
        }
    }

    /// The children whose block of this SeqNum is not in its slot, as a bitmap.
    pub(crate) fn missing(&self, seq: Serial) -> u64 {
        match self.slot_of(seq).map(|index| self.slots.get(index)) {
            Ok(Some(slot)) if slot.tag == Some(seq) => self.all & !slot.have,
            _ => self.all,
        }
    }

    /// The packet that takes a slot's sum up, if the slot has the whole sum of this SeqNum.
    pub(crate) fn sum_of(&self, seq: Serial, rules: Rules) -> Option<(Header, &[u8])> {
        let index = self.slot_of(seq).ok()?;
        let slot = self.slots.get(index)?;
        (slot.tag == Some(seq) && slot.have == self.all && !slot.is_result)
            .then(|| (self.sum_header(index, seq, rules), self.block(index)))
    }

    /// The heartbeat that says what all children have; `None` while one was not heard.
    pub(crate) fn heartbeat(&self, rules: Rules) -> Option<Header> {
        self.heard(rules)?;
        Some(self.upward(Kind::HeartbeatUp, Serial(0), Format::None, 0, rules))
    }

    fn sum_header(&self, index: usize, seq: Serial, rules: Rules) -> Header {
        let Slot { format, exponent, flags, .. } = self.slots[index];
        let header = self.upward(Kind::Push, seq, format, exponent, rules);
        Header { flags: header.flags | flags, ..header }
    }

    /// Where packets go that go up.
    fn above(&self) -> &Endpoint {
        self.tenant.server.as_ref().filter(|_| self.path.is_direct).unwrap_or(&self.tenant.parent)
    }

    fn handle(
        &mut self,
        from: Endpoint,
        packet: &Packet<'_>,
        bytes: &[u8],
        rules: Rules,
    ) -> Result<Action<'_>, Refusal> {
        // The key is checked before anything reads or writes the table.
        match self.decide(from, packet, bytes, rules) {
            Ok(Decision::Nothing) => Ok(Action::Nothing),
            Ok(Decision::Relay) => {
                self.counters.relayed += 1;
                Ok(Action::Relay { to: &self.children })
            }
            Ok(Decision::Heartbeat) => {
                let header = self.upward(Kind::HeartbeatUp, Serial(0), Format::None, 0, rules);
                let header = header.encode(&[], self.tenant.key.as_ref());
                Ok(Action::Send { to: slice::from_ref(self.above()), header, payload: &[] })
            }
            Ok(Decision::Missing { header, child }) => {
                self.counters.named += 1;
                let header = header.encode(&[], self.tenant.key.as_ref());
                let to = child.map_or(&self.children[..], |child| slice::from_ref(&self.children[child]));
                Ok(Action::Send { to, header, payload: &[] })
            }
            Ok(Decision::Ask { kind, seq }) => {
                let Some(header) = self.asking(kind, seq, rules) else { return Ok(Action::Nothing) };
                let header = header.encode(&[], self.tenant.key.as_ref());
                Ok(Action::Send { to: slice::from_ref(self.above()), header, payload: &[] })
            }
            Ok(Decision::Sum { index, seq }) => {
                let header = self.sum_header(index, seq, rules);
                let payload = self.block(index);
                let header = header.encode(payload, self.tenant.key.as_ref());
                Ok(Action::Send { to: slice::from_ref(self.above()), header, payload })
            }
            Ok(Decision::Result { index, child }) => {
                self.counters.answered += 1;
                let (to, header) = (slice::from_ref(&self.children[child]), self.results[index]);
                Ok(Action::Send { to, header, payload: self.block(index) })
            }
            Ok(Decision::Pulled { index, child }) => {
                self.counters.answered += 1;
                let (header, payload) = self.pulls.as_ref().expect("it has the result").get(index);
                Ok(Action::Send { to: slice::from_ref(&self.children[child]), header: *header, payload })
            }
            Err(refusal) => {
                self.counters.refused[refusal.index()] += 1;
                Err(refusal)
            }
        }
    }

    fn decide(&mut self, from: Endpoint, packet: &Packet<'_>, bytes: &[u8], rules: Rules) -> Result<Decision, Refusal> {
        let header = &packet.header;
        packet.verify(self.tenant.key.as_ref())?;
        if rules.hold(Rule::Epoch) && header.epoch != self.tenant.epoch {
            return Err(Refusal::Epoch);
        }
        let is_above = from == self.tenant.parent || self.is_server(from);
        match header.kind {
            Kind::Result | Kind::Pulled | Kind::HeartbeatDown | Kind::Accepted if is_above => {
                self.steer(from, header);
                match (header.kind, &mut self.pulls) {
                    (Kind::Pulled, Some(pulls)) => {
                        if let Ok(index) = self.shard.slot_of(header.seq, self.tenant.window) {
                            pulls.keep(index, packet, bytes);
                        }
                    }
                    (Kind::Result | Kind::Accepted, _) => self.keep(packet, bytes, rules),
                    _ => {}
                }
                Ok(Decision::Relay)
            }
            Kind::Missing if is_above => self.name(header, rules),
            Kind::Result | Kind::Pulled | Kind::HeartbeatDown | Kind::Accepted | Kind::Missing => Err(Refusal::Sender),
            Kind::Request | Kind::Pull if !self.tenant.results => Err(Refusal::Kind),
            _ => {
                let child = self.child(from, header.workers)?;
                self.take(child, packet, rules)
            }
        }
    }

    /// Follows what packets from above say of the path ([`Path`]).
    fn steer(&mut self, from: Endpoint, header: &Header) {
        let parent = self.tenant.parent;
        if self.tenant.server.is_none_or(|server| server == parent) {
            return;
        }
        let was_direct = self.path.is_direct;
        let has_missed = self.path.follow(header.workers, self.is_server(from), header.kind);
        // States that were missed may be those in which the parent was trusted again, and said nothing: it has died since it was heard.
        self.parent_is_lost = self.path.is_direct && (self.parent_is_lost || !was_direct || has_missed);
        // Results may be repeated by nodes that have them; a heartbeat comes from the server, through all nodes above.
        if from == parent && header.kind == Kind::HeartbeatDown {
            self.parent_is_lost = false;
        }
    }

    /// A packet of a child.
    pub(crate) fn take(&mut self, child: usize, packet: &Packet<'_>, rules: Rules) -> Result<Decision, Refusal> {
        let header = &packet.header;
        match header.kind {
            Kind::Request => self.request(child, header, rules),
            Kind::Pull => self.pull(child, header),
            Kind::Push => {
                self.hear(child, header, rules);
                self.push(child, packet, rules)
            }
            _ => {
                let before = self.heard(rules);
                self.hear(child, header, rules);
                let now = self.heard(rules);
                // A change goes up at once. The first child's heartbeat always goes up, to make up for a loss.
                Ok(if now.is_some() && (now != before || child == 0) { Decision::Heartbeat } else { Decision::Nothing })
            }
        }
    }

    /// The offset of a slot in `memory`.
    fn start_of(&self, index: usize) -> usize {
        index * self.tenant.blocks_a_slot() * self.tenant.block_bytes
    }

    /// The sum or the result of a slot.
    fn block(&self, index: usize) -> &[u8] {
        let start = self.start_of(index);
        &self.memory[start..start + usize::from(self.slots[index].length)]
    }

    /// Something is missing above: a complete sum was lost, or blocks of some children are missing here, too.
    fn name(&mut self, header: &Header, rules: Rules) -> Result<Decision, Refusal> {
        let asked = match header.workers & self.tenant.name {
            0 => 0,
            // Names of workers mean the same at every hop.
            named if self.is_flat() => named,
            _ => self.all,
        };
        let index = self.slot_of(header.seq)?;
        let slot = &self.slots[index];
        let ahead = slot.ahead(header.seq, rules);
        if ahead < 0 {
            return Err(Refusal::Stale);
        }
        if ahead == 0 && slot.is_result {
            return Err(Refusal::Stale);
        }
        let have = if ahead == 0 { slot.have } else { 0 };
        Ok(if asked != 0 && have == self.all && rules.hold(Rule::Keep) {
            self.counters.repeated += 1;
            Decision::Sum { index, seq: header.seq }
        } else if asked & !have != 0 {
            Decision::Missing { header: Header { workers: asked & !have, ..*header }, child: None }
        } else if asked == 0 && self.tenant.results {
            // The missing blocks are other nodes': these children learn that their path works.
            let workers = if self.is_flat() { header.workers } else { 0 };
            Decision::Missing { header: Header { workers, ..*header }, child: None }
        } else {
            Decision::Nothing
        })
    }

    /// The rules of the slot.
    fn push(&mut self, child: usize, packet: &Packet<'_>, rules: Rules) -> Result<Decision, Refusal> {
        let Packet { header, payload, .. } = packet;
        let flags = header.flags & (FLAG_FULL | FLAG_LAST);
        let is_full = flags & FLAG_FULL != 0;
        if if header.format.is_float() { !self.tenant.floats } else { is_full } {
            return Err(Refusal::Format);
        }
        if payload.len() > self.tenant.block_bytes {
            return Err(Refusal::Length);
        }
        let index = self.slot_of(header.seq)?;
        let slot = &mut self.slots[index];
        let ahead = slot.ahead(header.seq, rules);
        if ahead < 0 && rules.hold(Rule::Stale) {
            return Err(Refusal::Stale);
        }
        if ahead > 0 && (rules.hold(Rule::Reset) || slot.tag.is_none()) {
            if slot.have != 0 && slot.have != self.all {
                self.counters.abandoned += 1;
            }
            *slot = Slot {
                tag: Some(header.seq),
                have: 0,
                format: header.format,
                exponent: header.exponent,
                length: payload.len() as u16,
                flags,
                ..EMPTY
            };
        }
        if slot.is_result && self.tenant.apart {
            // The sender has not heard that the server has it.
            self.counters.refused[Refusal::Duplicate.index()] += 1;
            return Ok(Decision::Result { index, child });
        }
        // Checked before anything is sent: a few bytes of a confused worker must not cause a whole block to be sent again.
        if (slot.format, slot.exponent, slot.flags) != (header.format, header.exponent, flags) {
            return Err(Refusal::Format);
        }
        if usize::from(slot.length) != payload.len() {
            return Err(Refusal::Length);
        }
        if slot.is_result && slot.tag == Some(header.seq) {
            self.counters.refused[Refusal::Duplicate.index()] += 1;
            return Ok(Decision::Result { index, child });
        }
        if slot.have & header.workers != 0 && rules.hold(Rule::Duplicate) {
            self.counters.refused[Refusal::Duplicate.index()] += 1;
            if slot.have == self.all && rules.hold(Rule::Keep) {
                self.counters.repeated += 1;
                return Ok(Decision::Sum { index, seq: header.seq });
            }
            return Ok(Decision::Nothing);
        }
        let block_bytes = self.tenant.block_bytes;
        let blocks_a_slot = self.tenant.blocks_a_slot();
        let start = index * blocks_a_slot * block_bytes;
        let memory = &mut self.memory[start..start + blocks_a_slot * block_bytes];
        let (sum, blocks) = memory.split_at_mut(block_bytes);
        let sum = &mut sum[..payload.len()];
        let first = slot.have == 0;
        slot.have |= header.workers;
        let complete = slot.have == self.all;
        self.counters.added += 1;
        if header.format.is_float() {
            blocks[child * block_bytes..][..payload.len()].copy_from_slice(payload);
            if complete {
                // One place for each of the 64 bits of a bitmap.
                let mut all: [&[u8]; 64] = [&[]; 64];
                let blocks = blocks.chunks_exact(block_bytes).map(|block| &block[..payload.len()]);
                let count = blocks.len();
                all.iter_mut().zip(blocks).for_each(|(place, block)| *place = block);
                arithmetic::sum_floats(header.format, sum, &all[..count]);
            }
        } else {
            if first {
                // Overwriting clears the sum of an earlier SeqNum.
                arithmetic::begin(header.format, sum, payload);
            } else if arithmetic::add(header.format, sum, payload) {
                self.counters.overflowed += 1;
            }
            if complete {
                arithmetic::finish(header.format, sum);
            }
        }
        if !complete {
            return Ok(self.gap(child, header, rules).unwrap_or(Decision::Nothing));
        }
        self.counters.completed += 1;
        Ok(Decision::Sum { index, seq: header.seq })
    }

    /// A child's block that lies well before its newest one and is not here was lost, by as many SeqNums as QUIC waits (RFC 9002,
    /// section 6.1.1): the child hears so at once, and once more half a window later. With hundreds of workers no sum gets past a
    /// server's children without a loss, so the server cannot see gaps between sums.
    fn gap(&self, child: usize, header: &Header, rules: Rules) -> Option<Decision> {
        // A switch looks at one slot for a packet.
        self.tenant.server?;
        let name = self.tenant.children[child].workers;
        let is_lost = |seq: &Serial| {
            let slot = self.slot_of(*seq).map(|index| &self.slots[index]);
            slot.is_ok_and(|slot| slot.ahead(*seq, rules) == 0 && !slot.is_result && slot.have & name == 0)
        };
        // This shard has only every so many SeqNums.
        let before = [REORDERED, self.tenant.window / 2].map(|distance| distance.next_multiple_of(self.shard.count));
        let before = before.into_iter().filter(|distance| (REORDERED..self.tenant.window).contains(distance));
        let seq = before.map(|distance| header.seq.plus(distance.wrapping_neg())).find(is_lost)?;
        let (kind, format) = (Kind::Missing, Format::None);
        let header = Header { kind, format, seq, flags: 0, exponent: 0, workers: name, ..*header };
        Some(Decision::Missing { header, child: Some(child) })
    }

    /// The slot of a SeqNum, if it belongs to this shard.
    fn slot_of(&self, seq: Serial) -> Result<usize, Refusal> {
        self.shard.slot_of(seq, self.tenant.window)
    }

    /// The index of the child at `from`, whose name must be exactly `workers`. The server speaks for a child that is bypassed.
    fn child(&self, from: Endpoint, workers: u64) -> Result<usize, Refusal> {
        let speaks = |child: &Child| child.workers == workers && (child.endpoint == from || self.is_server(from));
        self.tenant.children.iter().position(speaks).ok_or(Refusal::Sender)
    }

    fn is_server(&self, from: Endpoint) -> bool {
        self.tenant.server == Some(from)
    }

    /// Whether bitmaps name workers, and this node by all workers below it.
    fn is_flat(&self) -> bool {
        self.tenant.name == self.all
    }

    /// Keeps the newest Ack and Credit of a child: heartbeats overtake each other.
    fn hear(&mut self, child: usize, header: &Header, rules: Rules) {
        let newest = |before: Serial, now: Serial| {
            if rules.hold(Rule::Serial) { before.newest(now) } else { Serial(before.0.max(now.0)) }
        };
        let entry = &mut self.heart[child];
        *entry = Some(match *entry {
            None => (header.ack, header.credit),
            Some((ack, credit)) => (newest(ack, header.ack), newest(credit, header.credit)),
        });
    }

    /// The minimum over all children; `None` while a child has not been heard since this table was opened.
    fn heard(&self, rules: Rules) -> Option<(Serial, Serial)> {
        if rules.hold(Rule::Heart) && self.heart.iter().any(Option::is_none) {
            return None;
        }
        let oldest = |a: Serial, b: Serial| if rules.hold(Rule::Serial) { a.oldest(b) } else { Serial(a.0.min(b.0)) };
        self.heart.iter().flatten().copied().reduce(|a, b| (oldest(a.0, b.0), oldest(a.1, b.1)))
    }

    fn upward(&self, kind: Kind, seq: Serial, format: Format, exponent: i16, rules: Rules) -> Header {
        // A complete sum has a push of every child behind it, each with Ack and Credit.
        let (ack, credit) = self.heard(rules).expect("all children were heard");
        let Tenant { job, epoch, name: workers, .. } = self.tenant;
        let flags = if self.parent_is_lost { FLAG_LOST } else { 0 };
        Header { kind, job, epoch, format, flags, seq, ack, credit, exponent, workers }
    }

    /// Requests a result from above.
    fn asking(&self, kind: Kind, seq: Serial, rules: Rules) -> Option<Header> {
        if kind == Kind::Request && self.tenant.apart {
            // Nothing is known of results: the block's SeqNum is another flow's.
            self.heard(rules)?;
        }
        // While a child was not heard, a number that every child has passed: nothing beyond Credit is pushed or requested, so all
        // have the results from two windows before.
        let before = seq.plus(0u32.wrapping_sub(2 * self.tenant.window));
        let (ack, credit) = self.heard(rules).unwrap_or((before, before));
        let Tenant { job, epoch, name: workers, .. } = self.tenant;
        let flags = if self.parent_is_lost { FLAG_LOST } else { 0 };
        Some(Header { kind, job, epoch, format: Format::None, flags, seq, ack, credit, exponent: 0, workers })
    }
}

#[cfg(test)]
impl Aggregator {
    pub(crate) fn with_rules(limits: Limits, rules: Rules) -> Aggregator {
        Aggregator { rules, ..Aggregator::new(limits) }
    }

    /// Hashes all state that decides what the aggregator does.
    pub(crate) fn digest(&self, state: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        for (job, table) in &self.jobs {
            (job, table.tenant.epoch).hash(state);
            table.digest(state);
        }
    }
}

#[cfg(test)]
impl Table {
    pub(crate) fn reserved_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>() + self.memory_bytes() + self.results.capacity() * HEADER_BYTES
    }

    pub(crate) fn digest(&self, state: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        (&self.slots, &self.heart, self.path, self.parent_is_lost).hash(state);
        self.pulls.iter().for_each(|pulls| pulls.digest(state));
        let kept = self.results.iter().zip(&self.slots).filter(|(_, slot)| slot.is_result);
        kept.for_each(|(header, _)| header.hash(state));
        // The content of slots that were never written does not matter.
        let blocks = self.memory.chunks_exact(self.tenant.blocks_a_slot() * self.tenant.block_bytes);
        blocks.zip(&self.slots).filter(|(_, slot)| slot.have != 0).for_each(|(memory, _)| memory.hash(state));
    }
}

#[cfg(test)]
#[path = "aggregator_tests.rs"]
mod tests;
