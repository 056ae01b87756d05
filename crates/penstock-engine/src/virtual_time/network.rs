//! A network of hosts that exists in this process only: connections with rates, delays, losses and partitions.
//!
//! It plays the operating system for the event loops ([`penstock_net::system`]). Nothing here knows the protocol: bytes go in
//! at one end of a connection and come out at the other, in pieces of any size, or are lost with the connection. Why it is not
//! the network of `penstock-sim`: `docs/design/random-programs.md`, "Virtual worlds".

use super::threads::Baton;
use fastrand::Rng;
use penstock_net::system::{Connection, Host, Trouble};
use penstock_types::Time;
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

/// What all streams of a program have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Paths {
    /// One way, on every stream; each piece is late by up to half of it besides.
    pub(super) delay_us: u64,
    /// Of every stream and direction.
    pub(super) bytes_per_us: u64,
    /// What a connection holds that was written and not read.
    pub(super) buffer_bytes: usize,
}

/// Where a host listens.
pub(super) fn address(host: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host as u8 + 1], 4000))
}

#[derive(Clone)]
pub(super) struct Network(Arc<Mutex<Net>>);

struct Net {
    now: Time,
    rng: Rng,
    paths: Paths,
    hosts: Vec<HostState>,
    connections: Vec<Wires>,
    /// Until when nothing passes between two hosts.
    parted: Vec<Vec<Time>>,
}

struct HostState {
    life: Life,
    /// It sleeps until then, unless something happens. `None`: it does not sleep.
    sleeps_until: Option<Time>,
    backlog: VecDeque<(Time, usize)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Life {
    Runs,
    /// The process has ended: its kernel refuses connections.
    Ended,
    /// Nothing answers.
    Dark,
}

/// A connection: end 0 has connected.
struct Wires {
    hosts: [usize; 2],
    ends: [End; 2],
}

#[derive(Default)]
struct End {
    token: Option<u64>,
    /// The thread that watches it.
    thread: usize,
    watches_write: bool,
    /// When the attempt to connect is over, and how.
    connected: Option<(Time, Option<Trouble>)>,
    /// What is on its way to this end.
    incoming: VecDeque<(Time, VecDeque<u8>)>,
    incoming_bytes: usize,
    /// When the last piece so far arrives, and with it the end of the other's writing.
    last: Time,
    end_at: Option<Time>,
    reset_at: Option<Time>,
    /// A call has returned the reset: the next read finds the end.
    has_told_reset: bool,
    busy_until: Time,
    has_finished: bool,
    is_closed: bool,
}

/// How a process ends, as the others see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Death {
    /// Its kernel closes the connections after what was written.
    Closes,
    /// Its kernel resets the connections.
    Resets,
    /// Its host goes dark.
    Silent,
}

impl Network {
    pub(super) fn new(seed: u64, hosts: usize, paths: Paths) -> Network {
        let state = || HostState { life: Life::Runs, sleeps_until: None, backlog: VecDeque::new() };
        Network(Arc::new(Mutex::new(Net {
            now: Time(0),
            rng: Rng::with_seed(seed),
            paths,
            hosts: (0..hosts).map(|_| state()).collect(),
            connections: Vec::new(),
            parted: vec![vec![Time(0); hosts]; hosts],
        })))
    }

    /// `threads`: those of the host's process.
    pub(super) fn host(&self, host: usize, threads: Arc<Baton>) -> Box<dyn Host> {
        Box::new(VirtualHost { network: self.clone(), host, threads })
    }

    fn lock(&self) -> MutexGuard<'_, Net> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn set_now(&self, now: Time) {
        self.lock().now = now;
    }

    /// A command waits for the loop of this host.
    pub(super) fn wake(&self, host: usize) {
        self.lock().hosts[host].sleeps_until = None;
    }

    /// When a host has something to do, whose threads stand still until then.
    pub(super) fn next(&self, host: usize, rests_until: impl Fn(usize) -> Time) -> Time {
        let net = self.lock();
        let mut next = net.hosts[host].sleeps_until.unwrap_or(net.now);
        if let Some((at, _)) = net.hosts[host].backlog.front() {
            next = next.min(*at);
        }
        next = next.max(rests_until(0));
        for wires in &net.connections {
            for side in 0..2 {
                if wires.hosts[side] == host && wires.ends[side].token.is_some() {
                    next = next.min(net.ready(wires, side).1.max(rests_until(wires.ends[side].thread)));
                }
            }
        }
        next
    }

    /// A connection between two hosts is lost, if there is one that is up: one end learns it now, the other `skew` later.
    pub(super) fn lose(&self, hosts: [usize; 2], which: usize, skew: u64) {
        let mut net = self.lock();
        let open: Vec<usize> = net.between(hosts).collect();
        if open.is_empty() {
            return;
        }
        let at = open[which % open.len()];
        let net = &mut *net;
        let first = net.rng.usize(..2);
        for side in 0..2 {
            let end = &mut net.connections[at].ends[side];
            // Of what is on its way a part arrives.
            let kept = net.rng.usize(..=end.incoming.len());
            end.truncate(kept);
            let late = if side == first { 0 } else { skew };
            end.reset_at = Some(net.now.plus(late));
        }
    }

    /// Nothing passes on a connection for a while.
    pub(super) fn stall(&self, hosts: [usize; 2], which: usize, time: u64) {
        let mut net = self.lock();
        let open: Vec<usize> = net.between(hosts).collect();
        if open.is_empty() {
            return;
        }
        let until = net.now.plus(time);
        for end in &mut net.connections[open[which % open.len()]].ends {
            end.busy_until = end.busy_until.max(until);
            end.delay(until);
        }
    }

    /// Nothing passes between two hosts for a while.
    pub(super) fn part(&self, hosts: [usize; 2], time: u64) {
        let mut net = self.lock();
        let until = Time(net.now.0.saturating_add(time));
        net.parted[hosts[0]][hosts[1]] = until;
        net.parted[hosts[1]][hosts[0]] = until;
        let open: Vec<usize> = net.between(hosts).collect();
        for at in open {
            net.connections[at].ends.iter_mut().for_each(|end| end.delay(until));
        }
    }

    /// The process on a host is gone, with its ends of all connections.
    pub(super) fn die(&self, host: usize, death: Death) {
        let mut net = self.lock();
        net.hosts[host].life = if death == Death::Silent { Life::Dark } else { Life::Ended };
        let (now, delay) = (net.now, net.paths.delay_us * MICROSECOND);
        for wires in net.connections.iter_mut().filter(|wires| wires.hosts.contains(&host)) {
            let side = usize::from(wires.hosts[1] == host);
            wires.ends[side].is_closed = true;
            let other = &mut wires.ends[1 - side];
            match death {
                Death::Closes => other.end_at = other.end_at.or(Some(other.last.max(now.plus(delay)))),
                Death::Resets => {
                    other.truncate(0);
                    other.reset_at = other.reset_at.or(Some(now.plus(delay)));
                }
                Death::Silent => other.truncate(0),
            }
        }
    }
}

impl Net {
    /// The connections between two hosts that are up.
    fn between(&self, hosts: [usize; 2]) -> impl Iterator<Item = usize> {
        let is_meant = move |wires: &Wires| wires.hosts == hosts || wires.hosts == [hosts[1], hosts[0]];
        let up = |wires: &Wires| wires.ends.iter().all(|end| !end.is_closed && end.reset_at.is_none());
        self.connections.iter().enumerate().filter(move |(_, wires)| is_meant(wires) && up(wires)).map(|(at, _)| at)
    }

    /// Whether an end can be written to, and when it is ready, for whatever it watches.
    fn ready(&self, wires: &Wires, side: usize) -> (bool, Time) {
        let end = &wires.ends[side];
        let never = Time(u64::MAX);
        match end.connected {
            Some((at, Some(_))) => return (at <= self.now, at),
            Some((at, None)) if at > self.now => return (false, at),
            _ => {}
        }
        let mut at = end.incoming.front().map_or(never, |(at, _)| *at);
        at = at.min(end.end_at.unwrap_or(never)).min(end.reset_at.unwrap_or(never));
        let has_room = wires.ends[1 - side].incoming_bytes < self.paths.buffer_bytes;
        if end.watches_write && has_room {
            at = at.min(self.now);
        }
        (has_room, at)
    }

    /// When something that leaves a host now reaches another.
    fn arrival(&mut self, hosts: [usize; 2]) -> Time {
        let delay = self.paths.delay_us * MICROSECOND;
        let late = self.rng.u64(0..=delay / 2);
        let leaves = self.now.max(self.parted[hosts[0]][hosts[1]]);
        Time(leaves.0.saturating_add(delay + late))
    }
}

impl End {
    /// Of the pieces on their way, only so many arrive.
    fn truncate(&mut self, kept: usize) {
        self.incoming.truncate(kept);
        self.incoming_bytes = self.incoming.iter().map(|(_, piece)| piece.len()).sum();
    }

    /// What is on its way comes not before `until`.
    fn delay(&mut self, until: Time) {
        for (at, _) in &mut self.incoming {
            *at = until.max(*at);
        }
        self.last = self.last.max(until);
        for at in [&mut self.end_at, &mut self.reset_at].into_iter().flatten() {
            *at = until.max(*at);
        }
        if let Some((at, _)) = &mut self.connected {
            *at = until.max(*at);
        }
    }
}

struct VirtualHost {
    network: Network,
    host: usize,
    threads: Arc<Baton>,
}

impl Host for VirtualHost {
    fn now(&self) -> Time {
        self.network.lock().now
    }

    fn wait(&self, thread: usize, timeout: u64) -> Vec<(u64, bool)> {
        let mut net = self.network.lock();
        let now = net.now;
        let (mut ready, mut waits_for_another) = (Vec::new(), false);
        if thread == 0 && net.hosts[self.host].backlog.front().is_some_and(|(at, _)| *at <= now) {
            ready.push((0, false));
        }
        for wires in &net.connections {
            for side in 0..2 {
                if let Some(token) = wires.ends[side].token
                    && wires.hosts[side] == self.host
                {
                    let (can_write, at) = net.ready(wires, side);
                    if at <= now && wires.ends[side].thread == thread {
                        ready.push((token, can_write));
                    }
                    let other = wires.ends[side].thread;
                    waits_for_another |= at <= now && other != thread && self.threads.rests_until(other) <= now;
                }
            }
        }
        // The kernel promises no order.
        net.rng.shuffle(&mut ready);
        // The last thread to have its turn is thread 0, which says how long all sleep.
        let sleeps = ready.is_empty() && !waits_for_another && timeout > 0 && thread == 0;
        net.hosts[self.host].sleeps_until = sleeps.then(|| now.plus(timeout));
        ready
    }

    fn interleave(&self, must: bool) {
        self.threads.interleave(must);
    }

    fn connect(&self, to: SocketAddr) -> Box<dyn Connection> {
        let mut net = self.network.lock();
        let other = (0..net.hosts.len()).find(|host| address(*host) == to).expect("contacts name hosts");
        let (there, back) = (net.arrival([self.host, other]), net.arrival([other, self.host]));
        let answered = Time(there.0.saturating_add(back.since(net.now)));
        let life = net.hosts[other].life;
        let connected = match life {
            Life::Runs => (answered, None),
            Life::Ended => (answered, Some(Trouble::Refused)),
            Life::Dark => (Time(u64::MAX), None),
        };
        let connection = net.connections.len();
        let mut ends = [End::default(), End::default()];
        ends[0].connected = Some(connected);
        net.connections.push(Wires { hosts: [self.host, other], ends });
        if life == Life::Runs {
            net.hosts[other].backlog.push_back((there, connection));
        }
        Box::new(VirtualConnection { network: self.network.clone(), connection, side: 0 })
    }

    fn accept(&self) -> Option<(Box<dyn Connection>, SocketAddr)> {
        let mut net = self.network.lock();
        let now = net.now;
        let backlog = &mut net.hosts[self.host].backlog;
        let connection = backlog.front().filter(|(at, _)| *at <= now)?.1;
        backlog.pop_front();
        let from = address(net.connections[connection].hosts[0]);
        Some((Box::new(VirtualConnection { network: self.network.clone(), connection, side: 1 }), from))
    }
}

struct VirtualConnection {
    network: Network,
    connection: usize,
    side: usize,
}

impl Connection for VirtualConnection {
    fn watch(&self, thread: usize, token: u64, write: bool) {
        let mut net = self.network.lock();
        let end = &mut net.connections[self.connection].ends[self.side];
        (end.token, end.thread) = (Some(token), thread);
        end.watches_write = write;
    }

    fn error(&self) -> Option<Trouble> {
        let net = self.network.lock();
        net.connections[self.connection].ends[self.side].connected.and_then(|(_, trouble)| trouble)
    }

    fn read(&self, slices: &mut [IoSliceMut<'_>]) -> Result<usize, Trouble> {
        let mut net = self.network.lock();
        let now = net.now;
        let end = &mut net.connections[self.connection].ends[self.side];
        let mut count = 0;
        for slice in slices {
            let mut slice = &mut slice[..];
            while !slice.is_empty()
                && let Some((at, piece)) = end.incoming.front_mut()
                && *at <= now
            {
                let here = piece.as_slices().0;
                let take = here.len().min(slice.len());
                slice[..take].copy_from_slice(&here[..take]);
                piece.drain(..take);
                slice = &mut slice[take..];
                count += take;
                if piece.is_empty() {
                    end.incoming.pop_front();
                }
            }
        }
        end.incoming_bytes -= count;
        match count {
            0 if end.reset_at.is_some_and(|at| at <= now) => match std::mem::replace(&mut end.has_told_reset, true) {
                true => Ok(0),
                false => Err(Trouble::Reset),
            },
            0 if end.end_at.is_some_and(|at| at <= now) => Ok(0),
            0 => Err(Trouble::Blocked),
            count => Ok(count),
        }
    }

    fn write(&self, slices: &[IoSlice<'_>]) -> Result<usize, Trouble> {
        let mut net = self.network.lock();
        let net = &mut *net;
        let Wires { hosts, ends } = &net.connections[self.connection];
        let hosts = [hosts[self.side], hosts[1 - self.side]];
        let (own, other) = (&ends[self.side], &ends[1 - self.side]);
        if own.reset_at.is_some_and(|at| at <= net.now) {
            net.connections[self.connection].ends[self.side].has_told_reset = true;
            return Err(Trouble::Reset);
        }
        let room = net.paths.buffer_bytes.saturating_sub(other.incoming_bytes);
        let is_lost = other.is_closed || other.reset_at.is_some();
        let is_told = other.is_closed && own.reset_at.is_none() && !other.has_finished;
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        let mut take = total.min(room);
        if take == 0 {
            return if total == 0 { Ok(0) } else { Err(Trouble::Blocked) };
        }
        // The kernel may take a part, and what it takes may arrive in several.
        if net.rng.u8(..4) == 0 {
            take = net.rng.usize(1..=take);
        }
        let arrives = net.arrival(hosts);
        if is_lost {
            // Whoever writes to an end that is closed is told so, unless nothing answers there or it learns otherwise.
            if is_told && net.hosts[hosts[1]].life != Life::Dark {
                let own = &mut net.connections[self.connection].ends[self.side];
                own.reset_at = Some(arrives.plus(net.paths.delay_us * MICROSECOND));
            }
            return Ok(take);
        }
        let mut bytes = Vec::with_capacity(take);
        for slice in slices {
            bytes.extend_from_slice(&slice[..slice.len().min(take - bytes.len())]);
        }
        let other = &mut net.connections[self.connection].ends[1 - self.side];
        while !bytes.is_empty() {
            let piece = if net.rng.bool() { bytes.len() } else { net.rng.usize(1..=bytes.len()) };
            let rest = bytes.split_off(piece);
            let begins = arrives.max(other.busy_until);
            let whole = Time(begins.0.saturating_add(piece as u64 * MICROSECOND / net.paths.bytes_per_us));
            other.busy_until = whole;
            other.last = other.last.max(whole);
            other.incoming.push_back((other.last, std::mem::replace(&mut bytes, rest).into()));
        }
        other.incoming_bytes += take;
        Ok(take)
    }

    fn finish(&self) {
        let mut net = self.network.lock();
        net.connections[self.connection].ends[self.side].has_finished = true;
    }
}

impl Drop for VirtualConnection {
    fn drop(&mut self) {
        let mut net = self.network.lock();
        let net = &mut *net;
        let hosts = net.connections[self.connection].hosts;
        let arrives = net.arrival([hosts[self.side], hosts[1 - self.side]]);
        let [own, other] =
            net.connections[self.connection].ends.get_disjoint_mut([self.side, 1 - self.side]).expect("two");
        let has_unread = own.incoming_bytes > 0 && !own.has_finished;
        // An end that was reset says nothing when it is closed; nor does anything pass once the connection is lost.
        let is_lost = own.reset_at.is_some() || other.reset_at.is_some();
        if !own.is_closed && !is_lost {
            match has_unread {
                true => other.reset_at = Some(arrives),
                false => other.end_at = other.end_at.or(Some(arrives.max(other.last))),
            }
        }
        own.is_closed = true;
        own.token = None;
        own.truncate(0);
    }
}

const MICROSECOND: u64 = 1000;
