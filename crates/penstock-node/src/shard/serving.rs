//! A server's shard.

use super::{
    Command, Door, ENDED, Known, Loss, Machine, Mailbox, Refused, Settings, UNAUTHENTICATED, epoch_is_over, job_of,
};
use crate::admission::{Admitted, Kind, Listed, PENDING_BYTES, RoleJob};
use crate::report::{HeldReport, JobReport, Report, ServerReport, Which};
use crate::streams::{Name, Stream, Streamed};
use crate::work::{Done, Ended, Life};
use penstock_aggregation::{
    Buffer, Endpoint, FLAG_LAST, Format, HEADER_BYTES, Kind as PacketKind, Limits, Naming, Node, Packet, Receipt,
    Refusal, Serial, Server, ServerConfig, Transmit, decode,
};
use penstock_net::datagrams::{Datagrams, Outbox, Train};
use penstock_types::Time;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;

pub(super) struct Serving {
    limits: Limits,
    /// Who works on buffers, and where the outcome is to go.
    worker: Sender<(Buffer, Done)>,
    mailbox: Mailbox,
    jobs: HashMap<u32, Open>,
    /// Epochs that were opened.
    lives: u64,
    /// Bytes of buffers that are worked on for epochs that are over: memory that no new job can have.
    stray_bytes: usize,
    unauthenticated: [u64; Refusal::COUNT],
    loss: Loss,
    door: Door,
}

struct Open {
    job: Admitted,
    life: Life,
    /// Bytes of buffers that are worked on.
    lent_bytes: usize,
    server: Server,
    /// Workers behind streams.
    streams: Vec<Stream>,
    nodes: Vec<Known>,
    opened: Time,
    committed: u64,
    memory_bytes: usize,
    /// There may be something to send.
    stirred: bool,
    /// It has had its turn, and has more to send than that.
    has_more: bool,
    /// Packets were not sent to some nodes, which are not known to receive any and were not asked since.
    owes: bool,
    /// The node that was asked last.
    asked: usize,
}

impl Serving {
    pub(super) fn new(settings: &Settings, worker: Sender<(Buffer, Done)>, mailbox: Mailbox) -> Serving {
        Serving {
            limits: settings.limits,
            worker,
            mailbox,
            jobs: HashMap::new(),
            lives: 0,
            stray_bytes: 0,
            unauthenticated: [0; Refusal::COUNT],
            loss: Loss::new(settings.drop, settings.shard),
            door: Door(settings.receipts),
        }
    }

    /// Handles a datagram; returns the job if the sender is a node of it, and it or another one is to be asked for a receipt.
    fn datagram(&mut self, now: Time, from: SocketAddr, datagram: &[u8]) -> Option<u32> {
        let Some(open) = job_of(datagram).and_then(|job| self.jobs.get_mut(&job)) else {
            let refusal = decode(datagram).map_or_else(Refusal::from, |_| Refusal::Job);
            self.unauthenticated[refusal.index()] += 1;
            return None;
        };
        let endpoint = open.job.endpoints.get(&from).copied().unwrap_or(UNAUTHENTICATED);
        let outcome = open.server.handle_packet(now, endpoint, datagram);
        open.stirred = true;
        open.committed += u64::from(matches!(outcome, Ok(Some(_))));
        let node = open.nodes.get_mut(endpoint.0 as usize)?;
        node.packets += 1;
        node.bytes += datagram.len() as u64;
        match outcome {
            Ok(_) => node.heard = Some(now),
            Err(refusal) => {
                node.counters.refused[refusal.index()] += 1;
                if refusal.is_from_sender() {
                    node.heard = Some(now);
                }
            }
        }
        node.counters.added += u64::from(outcome.is_ok() && datagram.len() > HEADER_BYTES);
        let is_heard = !matches!(&outcome, Err(refusal) if !refusal.is_from_sender());
        (is_heard && (!node.receives || open.owes)).then_some(open.job.common.job)
    }

    /// The receipt that a packet of a node leads to, and where it goes: to that node, or, if that is known to receive packets, to the
    /// next one of those to which a packet was not sent. An aggregator that has sent nothing yet waits for a packet from here, and the
    /// workers that bypass it wait for packets through it.
    fn ask(&mut self, job: u32, from: SocketAddr) -> Option<(SocketAddr, [u8; HEADER_BYTES])> {
        let open = self.jobs.get_mut(&job)?;
        let sender = open.job.endpoints.get(&from)?.0 as usize;
        let to = if !open.nodes[sender].receives {
            from
        } else {
            let next = Known::next_to_ask(&open.nodes, open.asked, |node| open.nodes[node].is_owed);
            if let Some(next) = next {
                (open.asked, open.nodes[next].is_owed) = (next, false);
            }
            open.owes = open.nodes.iter().any(|node| node.is_owed && !node.receives);
            open.nodes[next?].at(0)
        };
        self.door.ask(&open.job.common, to).map(|ask| (to, ask))
    }

    /// Handles a receipt; returns the answer.
    fn receipt(&mut self, from: SocketAddr, datagram: &[u8]) -> Option<[u8; HEADER_BYTES]> {
        let open = self.jobs.get_mut(&job_of(datagram)?)?;
        let endpoint = open.job.endpoints.get(&from)?;
        self.door.take(&open.job.common, from, &mut open.nodes[endpoint.0 as usize], datagram)
    }
}

impl Open {
    fn timeouts(&self) -> impl Iterator<Item = Time> {
        let soon = self.has_more.then_some(Time(0));
        soon.into_iter().chain([self.server.poll_timeout()]).chain(self.streams.iter().map(Stream::poll_timeout))
    }

    /// Gives what workers behind streams say to the server. Returns whether there may be something to send.
    fn pumped(&mut self, now: Time, left: &mut u32) -> bool {
        let mut misfits = Vec::new();
        for stream in &mut self.streams {
            // One each: the server's packets have their turn in between.
            if let Some(packet) = stream.poll_transmit(now) {
                *left = left.saturating_sub(1);
                let outcome = self.server.handle_packet(now, stream.endpoint, &packet);
                let node = &mut self.nodes[stream.endpoint.0 as usize];
                node.packets += 1;
                node.bytes += packet.len() as u64;
                match outcome {
                    Ok(committed) => {
                        node.counters.added += u64::from(packet.len() > HEADER_BYTES);
                        self.committed += u64::from(committed.is_some());
                    }
                    Err(refusal) => {
                        node.counters.refused[refusal.index()] += 1;
                        if matches!(refusal, Refusal::Length | Refusal::Format) {
                            misfits.extend(misfit(stream, &self.server, &packet));
                        }
                    }
                }
                self.stirred = true;
            }
        }
        // The worker says the block again and again, so those hear of it, too, who push theirs later.
        for (seq, why) in misfits {
            self.streams.iter_mut().for_each(|stream| stream.misfit(seq, &why));
        }
        self.stirred
    }
}

/// A block that does not fit those of other workers: its SeqNum, and what to tell.
fn misfit(stream: &mut Stream, server: &Server, packet: &[u8]) -> Option<(Serial, String)> {
    let Packet { header, payload, .. } = decode(packet).ok().filter(|packet| packet.header.kind == PacketKind::Push)?;
    let (block, buffer) = stream.number_of(header.seq)?;
    let (format, flags, length) = server.shape(header.seq)?;
    let shape = |format: Format, flags, length| {
        let last = if flags & FLAG_LAST != 0 { " and ends the buffer" } else { "" };
        format!("has {length} bytes of {}{last}", format!("{format:?}").to_lowercase())
    };
    let (mine, theirs) = (shape(header.format, header.flags, payload.len()), shape(format, flags, length));
    let worker = stream.endpoint.0;
    let why = format!(
        "block {block} of buffer {buffer} of worker {worker} {mine}, where another worker's {theirs}: all workers must push a buffer \
         alike; open the next epoch"
    );
    Some((header.seq, why))
}

/// Packets of a job with workers behind streams, from these and to all, before others have their turn, and datagrams are received: such a
/// worker has a whole buffer to say.
pub(super) const TURN: u32 = 256;

/// The workers behind streams, and their names at the server.
fn streams_of(config: &ServerConfig, nodes: &[Listed]) -> Vec<(Endpoint, u64)> {
    let below = config.tree.children.iter().enumerate().filter_map(|(place, child)| match child {
        Node::Worker(worker) if nodes[usize::from(*worker)].kind == Kind::Stream => {
            let bit = if config.naming == Naming::Children { place } else { usize::from(*worker) };
            Some((Endpoint(u32::from(*worker)), 1 << bit))
        }
        _ => None,
    });
    below.collect()
}

impl Machine for Serving {
    fn train(&mut self, now: Time, train: Train<'_>, outbox: &mut Outbox<'_>) {
        let mut asks = None;
        for datagram in train.datagrams() {
            if self.loss.strikes() {
                continue;
            }
            if !Receipt::is(datagram) {
                asks = self.datagram(now, train.from, datagram).or(asks);
            } else if let Some(answer) = self.receipt(train.from, datagram) {
                outbox.queue(train.from, &answer, &[]);
            }
        }
        if let Some((to, ask)) = asks.and_then(|job| self.ask(job, train.from)) {
            outbox.queue(to, &ask, &[]);
        }
    }

    fn timeout(&self) -> Option<Time> {
        self.jobs.values().flat_map(Open::timeouts).min()
    }

    fn send(&mut self, now: Time, socket: &mut Datagrams) {
        for open in self.jobs.values_mut() {
            if open.server.poll_timeout() <= now {
                open.server.handle_timeout(now);
                open.stirred = true;
            }
            while let Some(buffer) = open.server.poll_work() {
                let mailbox = self.mailbox.clone();
                // A daemon that has ended needs no outcome.
                let back = move |ended| {
                    mailbox.send(Command::Done(ended));
                };
                let done = Done::new(open.life, &buffer, back);
                open.lent_bytes += buffer.bytes.len();
                // If its thread has ended, `done` is dropped, and says so.
                let _ = self.worker.send((buffer, done));
            }
            let mut left = if open.streams.is_empty() { u32::MAX } else { TURN };
            while left > 0 && open.pumped(now, &mut left) && !socket.is_blocked() {
                left = left.saturating_sub(1);
                match open.server.poll_transmit() {
                    Some(Transmit { to, header, payload }) => {
                        if let Some(stream) = open.streams.iter_mut().find(|stream| stream.endpoint == to) {
                            stream.handle_packet(now, &[&header[..], payload].concat());
                            continue;
                        }
                        let node = &mut open.nodes[to.0 as usize];
                        if node.receives {
                            let seq = u32::from_be_bytes(header[12..16].try_into().expect("4 bytes"));
                            socket.queue(node.at(seq), &header, payload);
                        } else {
                            (node.is_owed, open.owes) = (true, true);
                        }
                    }
                    None => open.stirred = false,
                }
            }
            open.has_more = left == 0;
        }
    }

    fn open(&mut self, now: Time, job: Admitted) -> Result<(), Refused> {
        let common = &job.common;
        let RoleJob::Server { tree, naming, workers, held_blocks } = &job.role else { panic!("a server's job") };
        let (tree, naming, workers, held_blocks) = (tree.clone(), *naming, *workers, *held_blocks);
        let slots = common.window as usize;
        let config = ServerConfig {
            job: common.job,
            epoch: common.epoch,
            key: common.key,
            window: common.window,
            block_bytes: common.block_bytes,
            start: Serial(common.start),
            tree,
            naming,
            stand_ins: ServerConfig::STAND_INS,
            held_blocks,
            workers: (0..workers as u32).map(Endpoint).collect(),
            heartbeat_every: ServerConfig::HEARTBEAT_EVERY,
            idle_every: ServerConfig::IDLE_EVERY,
            returns_after: ServerConfig::RETURNS_AFTER,
        };
        // What workers behind streams have pushed and not pulled: a buffer's blocks until they are accepted, and its results.
        let kept = held_blocks.map_or(PENDING_BYTES as usize, |blocks| blocks as usize * common.block_bytes);
        let names = streams_of(&config, &job.nodes);
        let memory_bytes = config.memory_bytes().saturating_add(names.len().saturating_mul(2 * kept));
        let others = || self.jobs.values().filter(|open| open.job.common.job != common.job);
        let conflict = |message: String| Err(Refused::Conflict(message));
        if others().count() >= self.limits.jobs {
            return conflict(format!("all {} places for jobs are taken", self.limits.jobs));
        }
        let free = self.limits.slots.saturating_sub(others().map(|open| open.job.common.window as usize).sum());
        if slots > free {
            return conflict(format!("{slots} slots are needed, {free} are free: use a smaller window"));
        }
        // Those of this job's epoch before will be strays, too.
        let lent = self.jobs.get(&common.job).map_or(0, |before| before.lent_bytes);
        let strays = self.stray_bytes + lent;
        let used = others().map(|open| open.memory_bytes).sum::<usize>().saturating_add(strays);
        let free = self.limits.memory_bytes.saturating_sub(used);
        if memory_bytes > free {
            let worked_on = match strays {
                0 => String::new(),
                bytes => format!(" ({bytes} are still worked on for epochs that are over)"),
            };
            return conflict(format!(
                "{memory_bytes} bytes are needed, {free} are free{worked_on}: use a smaller window, smaller blocks or smaller \
                 pending_bytes, or give the server more --memory"
            ));
        }
        // The epoch before is removed first, so that both never need memory together.
        if let Some(before) = self.jobs.get(&job.common.job) {
            let why = epoch_is_over(job.common.job, before.life.epoch);
            self.close(job.common.job, &why);
        }
        let common = &job.common;
        let life = Life { job: common.job, epoch: common.epoch, number: self.lives };
        self.lives += 1;
        let open = Open {
            life,
            lent_bytes: 0,
            server: Server::new(now, config),
            streams: names.iter().map(|(at, name)| Stream::new(now, common, *at, *name, kept)).collect(),
            nodes: Known::all(&job, self.door.is_open()),
            opened: now,
            committed: 0,
            memory_bytes,
            stirred: true,
            has_more: false,
            owes: false,
            asked: 0,
            job,
        };
        self.jobs.insert(open.job.common.job, open);
        Ok(())
    }

    fn close(&mut self, job: u32, why: &str) {
        let Some(open) = self.jobs.remove(&job) else { return };
        self.stray_bytes += open.lent_bytes;
        open.streams.into_iter().for_each(|stream| stream.close(why));
    }

    fn end(&mut self) {
        self.jobs.drain().flat_map(|(_, open)| open.streams).for_each(|stream| stream.close(ENDED));
    }

    fn stream(&mut self, now: Time, text: &str, call: Streamed) {
        let name = match Name::parse(text, matches!(call, Streamed::Push(..))) {
            Ok(name) => name,
            Err(why) => return call.refuse(why),
        };
        let Some(open) = self.jobs.get_mut(&name.job).filter(|open| open.life.epoch == name.epoch) else {
            return call.refuse(format!("epoch {} of job {} is not open here", name.epoch, name.job));
        };
        let endpoint = Endpoint(u32::from(name.worker));
        match open.streams.iter_mut().find(|stream| stream.endpoint == endpoint) {
            None => call.refuse(format!("worker {} of job {} does not push over a stream", name.worker, name.job)),
            Some(stream) => {
                stream.ask(name, call);
                open.nodes[usize::from(name.worker)].heard = Some(now);
            }
        }
    }

    fn done(&mut self, now: Time, Ended { life, first, bytes, outcome }: Ended) {
        match self.jobs.get_mut(&life.job).filter(|open| open.life == life) {
            Some(open) => {
                open.lent_bytes -= bytes;
                open.stirred |= open.server.done(now, first, outcome);
            }
            // The job is closed, or in a later epoch.
            None => self.stray_bytes -= bytes,
        }
    }

    fn report(&self, now: Time, which: &Which) -> Report {
        let jobs = self.jobs.values().filter(|open| which.has(open.job.common.job)).map(|open| {
            let common = &open.job.common;
            let (ack, credit) = (open.server.ack(), open.server.credit());
            let in_window = (0..common.window).map(|i| ack.plus(i)).take_while(|seq| !seq.is_newer_than(credit));
            let waiting = in_window.filter(|seq| open.server.is_waiting(*seq)).count();
            let mut counters = penstock_aggregation::JobCounters::default();
            counters.refused = *open.server.refused();
            counters.completed = open.committed;
            counters.overflowed = open.server.overflowed();
            counters.added = open.nodes.iter().map(|node| node.counters.added).sum();
            JobReport {
                job: common.job,
                epoch: common.epoch,
                keyed: common.key.is_some(),
                window: common.window,
                block_bytes: common.block_bytes,
                slots: common.window as usize,
                waiting_slots: waiting,
                memory_bytes: open.memory_bytes,
                counters,
                server: Some(ServerReport {
                    committed: open.committed,
                    ack: ack.0,
                    credit: credit.0,
                    held: open.server.held().map(|(held, limit)| HeldReport {
                        bytes: held as usize * common.block_bytes,
                        pending_bytes: limit as usize * common.block_bytes,
                        unfinished: open.server.unfinished(),
                    }),
                    waiting: open.streams.iter().map(Stream::waiting).sum(),
                    untold: open.streams.iter().map(Stream::untold).sum(),
                    bypassed: open.server.bypassed().map(|at| open.nodes[at.0 as usize].at(0)).collect(),
                }),
                nodes: open.nodes.iter().map(|node| node.report(now)).collect(),
                age_ns: now.since(open.opened),
            }
        });
        Report {
            dropped_on_purpose: self.loss.lost,
            unauthenticated: self.unauthenticated,
            jobs: jobs.collect(),
            ..Report::default()
        }
    }
}
