//! Aggregators that are bypassed, and the tables with which the server stands in for them.
//!
//! A node that hears nothing from the aggregator above it says LOST to the server. The server then takes what *all* children of that
//! aggregator push (R13): it tells them so, straight, in every result and heartbeat ([`Path`](crate::path::Path)). Its table adds
//! their blocks by the same rules as the aggregator would, so the aggregator might as well have restarted at another address. The
//! sum goes up as the aggregator's own: to the node above it, or to the table with which the server stands in for that one.
//!
//! ```text
//!             server                     R is dead, M lives: R's workers push to the server, which adds for R and pushes R's sum
//!            /      ^ \                  to M.
//!           M       |  ...               M is dead, R lives: R and M's other children push to the server.
//!         / | \     |                    Both are dead: R's workers push to the server, whose sum for R goes to its table for M.
//!        R  ...     |
//!       / \         |
//!      w   w ───────┘
//! ```
//! Who is dead? A worker only notices that nothing comes through the aggregator above it. So the server bypasses that one, and an
//! aggregator above only when every child of it is lost. If that was wrong, because the one in the middle is dead and those below
//! live, these hear from the server now, their workers hear from them, and return to them.

use super::{ROOT, Server, ServerConfig, Transmit};
use crate::aggregator::{Child, Decision, Shard, Table, Tenant};
use crate::hops::Hops;
use crate::packet::{FLAG_FULL, Header, Kind, Packet};
use crate::rules::{Refusal, Rule};
use crate::{Endpoint, Serial};
use penstock_types::Time;
use std::collections::VecDeque;

/// The paths of a job.
#[derive(Clone, Debug)]
pub(super) struct Paths {
    /// Counts the states: each time that an aggregator is bypassed, or is not any more.
    pub(super) number: u32,
    /// How many SeqNums Ack has passed.
    pub(super) passed: u64,
    /// By hop, without the server's own.
    hops: Vec<Standing>,
    /// Sums (and, without a SeqNum, heartbeats) of tables whose parents live, to be sent to these.
    detours: VecDeque<(usize, Option<Serial>)>,
    /// Sums of tables that go up again, to the server itself or to its table for the node above.
    again: Vec<(usize, Serial)>,
}

/// What the server does for an aggregator.
#[derive(Clone, Debug)]
struct Standing {
    table: Table,
    /// When each child was heard last, and when a block came for each slot: how many SeqNums Ack had passed.
    heard: Vec<u64>,
    pushed: Vec<u64>,
    /// Children that hear nothing from the aggregator, a bit for each.
    lost: u64,
    /// Those that have said so lately ([`SAID_AGAIN`]), and when each did last.
    said: u64,
    said_at: Vec<Time>,
    is_bypassed: bool,
}

impl Paths {
    pub(super) fn new(config: &ServerConfig, hops: &Hops) -> Paths {
        let standing = |number: usize| {
            let hop = &hops.list[number];
            let tenant = Tenant {
                job: config.job,
                epoch: config.epoch,
                key: config.key,
                window: config.window,
                block_bytes: config.block_bytes,
                floats: true,
                results: false,
                apart: config.held_blocks.is_some(),
                parent: hop.endpoint,
                server: None,
                name: hops.kid(hop.parent).name,
                children: hop.kids.iter().map(|kid| Child { endpoint: kid.endpoint, workers: kid.name }).collect(),
            };
            Standing {
                heard: vec![0; hop.kids.len()],
                pushed: Vec::new(),
                table: Table::new(tenant, Shard::WHOLE),
                lost: 0,
                said: 0,
                said_at: vec![Time(0); hop.kids.len()],
                is_bypassed: false,
            }
        };
        Paths {
            number: 0,
            passed: 0,
            hops: (1..hops.list.len()).map(standing).collect(),
            detours: VecDeque::new(),
            again: Vec::new(),
        }
    }

    fn of(&self, hop: usize) -> &Standing {
        &self.hops[hop - 1]
    }

    fn of_mut(&mut self, hop: usize) -> &mut Standing {
        &mut self.hops[hop - 1]
    }

    /// What all tables have reserved.
    #[cfg(test)]
    pub(super) fn reserved_bytes(&self) -> usize {
        self.hops.iter().map(|standing| standing.table.reserved_bytes()).sum()
    }

    #[cfg(test)]
    pub(super) fn digest(&self, state: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        self.number.hash(state);
        for Standing { table, lost, is_bypassed, .. } in &self.hops {
            (lost, is_bypassed).hash(state);
            table.digest(state);
        }
    }
}

impl Standing {
    /// A child's packet is about to come to the table, which may have rested for half of the circle of SeqNums and longer: what it holds from
    /// before that would look like news. So what it has heard long ago is replaced by what the slowest worker has, and a block of long
    /// ago is forgotten.
    fn drop_stale(&mut self, (passed, window): (u64, u32), child: usize, header: &Header, slowest: Serial) {
        let long_ago = |at: u64| passed - at > LONG_AGO * u64::from(window);
        for (child, _) in self.heard.iter().enumerate().filter(|(_, at)| long_ago(**at)) {
            self.table.raise(child, slowest);
        }
        self.heard[child] = passed;
        if header.kind == Kind::Push {
            self.pushed.resize(window as usize, passed);
            let at = &mut self.pushed[(header.seq.0 & (window - 1)) as usize];
            if long_ago(std::mem::replace(at, passed)) {
                self.table.forget(header.seq);
            }
        }
    }
}

impl Server {
    /// The aggregators that are bypassed.
    pub fn bypassed(&self) -> impl Iterator<Item = Endpoint> {
        (1..self.hops.list.len()).filter(|hop| self.is_bypassed(*hop)).map(|hop| self.hops.list[hop].endpoint)
    }

    pub(super) fn is_bypassed(&self, hop: usize) -> bool {
        hop != ROOT && self.paths.of(hop).is_bypassed
    }

    /// Whether a node pushes straight to the server because the aggregator above it is bypassed.
    pub(super) fn is_direct(&self, (hop, child): (usize, usize)) -> bool {
        self.is_bypassed(hop) && (self.rules.hold(Rule::Bypass) || self.paths.of(hop).lost >> child & 1 == 1)
    }

    pub(super) fn table(&self, hop: usize) -> &Table {
        &self.paths.of(hop).table
    }

    /// The nodes to which the server sends what is for all workers, last first: its own children, and those of bypassed
    /// aggregators; bypassed ones only if they are `asked` whether they are back.
    pub(super) fn receivers(&self, asked: bool) -> Vec<Endpoint> {
        let mut to = Vec::new();
        for (number, hop) in self.hops.list.iter().enumerate() {
            for (child, kid) in hop.kids.iter().enumerate().rev() {
                let is_alive = kid.hop.is_none_or(|below| !self.is_bypassed(below));
                if (number == ROOT || self.is_direct((number, child))) && (asked || is_alive) {
                    to.push(kid.endpoint);
                }
            }
        }
        to
    }

    /// A node has said whether it hears the aggregator above it.
    pub(super) fn note_path(&mut self, now: Time, (hop, child): (usize, usize), is_lost: bool) {
        if hop == ROOT {
            return;
        }
        let standing = self.paths.of_mut(hop);
        let (before, bit) = (standing.lost, 1 << child);
        if is_lost {
            (standing.said, standing.lost) = (standing.said | bit, before | bit);
            standing.said_at[child] = now;
        } else if now.since(standing.said_at[child]) >= self.config.returns_after {
            standing.lost &= !bit;
        }
        if standing.lost != before {
            self.settle_paths(now);
        }
    }

    /// Bypasses those that are to be bypassed, and no others.
    fn settle_paths(&mut self, now: Time) {
        let bypassed = self.judge_paths();
        if (1..bypassed.len()).all(|hop| self.is_bypassed(hop) == bypassed[hop]) {
            return;
        }
        for (standing, is_bypassed) in self.paths.hops.iter_mut().zip(&bypassed[1..]) {
            if standing.is_bypassed && !is_bypassed {
                standing.table.release();
                standing.pushed = Vec::new();
            }
            standing.is_bypassed = *is_bypassed;
        }
        self.paths.number += 1;
        self.heartbeat();
        self.beats.at = now.plus(self.config.heartbeat_every);
    }

    /// By hop: whether the aggregator is to be bypassed, as far as its children have said what they hear, and there are places.
    fn judge_paths(&mut self) -> Vec<bool> {
        let count = self.hops.list.len();
        let (mut dead, mut gone, mut unheard) = (vec![false; count], vec![false; count], vec![false; count]);
        // Those below come first: each has a larger number.
        for number in (1..count).rev() {
            let hop = &self.hops.list[number];
            let (mut nodes, mut below) = (0u64, 0u64);
            for (child, kid) in hop.kids.iter().enumerate() {
                nodes |= u64::from(kid.hop.is_some()) << child;
                below |= u64::from(kid.hop.is_some_and(|hop| gone[hop])) << child;
            }
            let all = u64::MAX >> (64 - hop.kids.len());
            let Standing { lost, is_bypassed, .. } = *self.paths.of(number);
            // No child is left that could hear it. Later each says by itself whether it does.
            unheard[number] = !is_bypassed && nodes != 0 && (lost | below) == all;
            // Whether a child that is bypassed itself hears it is not known, unless no child does.
            dead[number] = unheard[number] || lost == all || lost & !below != 0;
            gone[number] = dead[number] || (!hop.is_full && below != 0);
        }
        let mut bypassed = self.places_for(&dead);
        // An aggregator that takes nothing from the server is bypassed with any child, and does not follow its parent's bypass.
        for number in (1..count).rev() {
            let hop = &self.hops.list[number];
            bypassed[number] |= !hop.is_full && hop.kids.iter().any(|kid| kid.hop.is_some_and(|below| bypassed[below]));
        }
        for number in 1..count {
            let hop = &self.hops.list[number];
            bypassed[number] |= !hop.is_full && bypassed[hop.parent.0];
        }
        for number in 1..count {
            let hop = &self.hops.list[number];
            let standing = self.paths.of_mut(number);
            if bypassed[number] && !standing.is_bypassed && unheard[number] {
                standing.lost = u64::MAX >> (64 - hop.kids.len());
            } else if !bypassed[number] && standing.is_bypassed && !dead[number] {
                standing.lost = 0;
            }
        }
        bypassed
    }

    /// Those of the dead aggregators for which the server has places. The upper ones come first: when a row's aggregator dies, all
    /// racks below it seem dead, and come back as soon as they hear the server. One without a place is not bypassed: its children
    /// still push to it, since it may live, and each that is lost says so with every heartbeat.
    fn places_for(&self, dead: &[bool]) -> Vec<bool> {
        let hops = &self.hops.list;
        let mut depths = vec![0; hops.len()];
        (1..hops.len()).for_each(|hop| depths[hop] = 1 + depths[hops[hop].parent.0]);
        let mut wanted: Vec<usize> = (1..hops.len()).filter(|hop| dead[*hop]).collect();
        wanted.sort_by_key(|hop| depths[*hop]);
        let mut places = self.config.stand_ins;
        let mut bypassed = vec![false; hops.len()];
        for hop in wanted {
            let is_counted = hops[hop].is_full;
            bypassed[hop] = !is_counted || places > 0;
            places -= usize::from(is_counted && places > 0);
        }
        bypassed
    }

    /// Forgets that nodes below aggregators without a place were lost, if they have not said so again: one that hears its aggregator
    /// again tells nobody else.
    pub(super) fn forget_lost(&mut self, now: Time) {
        if !self.beats.count.is_multiple_of(SAID_AGAIN) {
            return;
        }
        let mut is_changed = false;
        for (standing, hop) in self.paths.hops.iter_mut().zip(&self.hops.list[1..]) {
            let said = std::mem::take(&mut standing.said);
            if hop.is_full && !standing.is_bypassed {
                is_changed |= standing.lost & !said != 0;
                standing.lost &= said;
            }
        }
        if is_changed {
            self.settle_paths(now);
        }
    }

    /// Handles a child's packet as the aggregator above it would. Returns the SeqNum that it committed, if it did.
    pub(super) fn stand_in(
        &mut self,
        now: Time,
        (hop, child): (usize, usize),
        packet: &Packet<'_>,
    ) -> Result<Option<Serial>, Refusal> {
        let header = &packet.header;
        if header.kind == Kind::Push {
            let is_past = header.flags & FLAG_FULL != 0 && !self.hops.list[hop].is_full;
            if !self.is_bypassed(hop) && !is_past {
                return Err(Refusal::Bypass);
            }
            self.paths.of_mut(hop).table.reserve();
        }
        let (rules, slowest, window) = (self.rules, self.slowest().0, self.config.window);
        let passed = self.paths.passed;
        self.paths.of_mut(hop).drop_stale((passed, window), child, header, slowest);
        match self.paths.of_mut(hop).table.take(child, packet, rules)? {
            Decision::Sum { seq, .. } => self.rise(now, hop, Some(seq)),
            Decision::Heartbeat => self.rise(now, hop, None),
            _ => Ok(None),
        }
    }

    /// Passes the sum of a table, or what its children have, to the node above the aggregator.
    fn rise(&mut self, now: Time, hop: usize, seq: Option<Serial>) -> Result<Option<Serial>, Refusal> {
        let table = self.table(hop);
        let (header, payload) = match seq {
            Some(seq) => table.sum_of(seq, self.rules).map(|(header, block)| (header, block.to_vec())),
            None => table.heartbeat(self.rules).map(|header| (header, Vec::new())),
        }
        .expect("it was decided that there is one");
        let packet = Packet::own(header, &payload);
        let place = self.hops.list[hop].parent;
        if place.0 == ROOT {
            self.hear(place.1, &header);
            return if seq.is_some() { self.push(now, place.1, &packet) } else { Ok(None) };
        }
        let is_past = header.flags & FLAG_FULL != 0 && !self.hops.list[place.0].is_full;
        if seq.is_none() || self.is_bypassed(place.0) || is_past {
            if seq.is_none() && self.is_bypassed(hop) && !self.is_bypassed(place.0) {
                self.add_detour(hop, None);
            }
            return self.stand_in(now, place, &packet);
        }
        self.add_detour(hop, seq);
        Ok(None)
    }

    /// The sum of a table did not reach the server, so it goes up once more: the node above may have lost it, or have died with it.
    pub(super) fn rise_again(&mut self, hop: usize, seq: Serial) {
        let (parent, _) = self.hops.list[hop].parent;
        if parent != ROOT && !self.is_bypassed(parent) {
            self.add_detour(hop, Some(seq));
        } else if !self.paths.again.contains(&(hop, seq)) {
            self.paths.again.push((hop, seq));
        }
    }

    /// Passes on the sums that are to go up again. Returns the SeqNum that this committed, if it did.
    pub(super) fn rise_those(&mut self, now: Time) -> Option<Serial> {
        let mut committed = None;
        for (hop, seq) in std::mem::take(&mut self.paths.again) {
            // It may have been committed since.
            if self.check_window(seq).is_ok() && self.table(hop).sum_of(seq, self.rules).is_some() {
                // A refusal means that it is there already.
                committed = self.rise(now, hop, Some(seq)).ok().flatten().or(committed);
            }
        }
        committed
    }

    fn add_detour(&mut self, hop: usize, seq: Option<Serial>) {
        if !self.paths.detours.contains(&(hop, seq)) {
            self.paths.detours.push_back((hop, seq));
        }
    }

    /// The next sum or heartbeat to send to a node above a bypassed aggregator.
    pub(super) fn next_detour(&mut self) -> Option<(usize, Option<Serial>)> {
        while let Some((hop, seq)) = self.paths.detours.pop_front() {
            let is_here = match seq {
                Some(seq) => self.table(hop).sum_of(seq, self.rules).is_some(),
                None => self.table(hop).heartbeat(self.rules).is_some(),
            };
            if is_here {
                return Some((hop, seq));
            }
        }
        None
    }

    pub(super) fn detour(&self, hop: usize, seq: Option<Serial>) -> Option<Transmit<'_>> {
        let to = self.hops.list[self.hops.list[hop].parent.0].endpoint;
        let (header, payload) = match seq {
            Some(seq) => self.table(hop).sum_of(seq, self.rules)?,
            None => (self.table(hop).heartbeat(self.rules)?, &[][..]),
        };
        Some(Transmit { to, header: header.encode(payload, self.config.key.as_ref()), payload })
    }
}

/// In windows: blocks and Acks of so long ago are of no use, and far from half of the circle.
const LONG_AGO: u64 = 4;
/// In so many heartbeats of the server a lost node says again that it is lost.
const SAID_AGAIN: u32 = 16;
