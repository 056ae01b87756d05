//! An aggregator's shard.

use super::{Door, Known, Loss, Machine, Refused, Settings, UNAUTHENTICATED, job_of};
use crate::admission::{Admitted, RoleJob};
use crate::report::{JobReport, Report, Which, add, since};
use penstock_aggregation::{Action, Admission, Aggregator, Child, Endpoint, JobCounters, Receipt, Shard, Tenant};
use penstock_net::datagrams::{Datagrams, Outbox, Train};
use penstock_types::Time;
use std::collections::HashMap;
use std::net::SocketAddr;

pub(super) struct Adding {
    shard: Shard,
    aggregator: Aggregator,
    jobs: HashMap<u32, Open>,
    loss: Loss,
    door: Door,
    run: Option<Run>,
}

/// A job as this shard knows it.
struct Open {
    job: Admitted,
    nodes: Vec<Known>,
    /// How many children it has here: the nodes after the parent.
    children: usize,
    /// The server, where it is no child's and no parent's number.
    server: Option<Endpoint>,
    opened: Time,
    /// The child to which a receipt was sent last.
    asked: usize,
}

/// Consecutive packets of one job from one address. Their effect on the node's counters is added when the run is over, which
/// costs less than a look-up for every packet.
struct Run {
    job: u32,
    from: SocketAddr,
    endpoint: Endpoint,
    before: JobCounters,
    packets: u64,
    bytes: u64,
    /// At least one of the packets was authentic.
    heard: bool,
    /// The packets come from a node that is not known to receive packets.
    asks: bool,
}

impl Adding {
    pub(super) fn new(settings: &Settings) -> Adding {
        Adding {
            shard: settings.shard,
            aggregator: Aggregator::sharded(settings.limits, settings.shard),
            jobs: HashMap::new(),
            loss: Loss::new(settings.drop, settings.shard),
            door: Door(settings.receipts),
            run: None,
        }
    }

    /// Handles a receipt.
    fn receipt(&mut self, from: SocketAddr, datagram: &[u8], outbox: &mut Outbox<'_>) {
        let Some(open) = job_of(datagram).and_then(|job| self.jobs.get_mut(&job)) else { return };
        let Some(endpoint) = open.job.endpoints.get(&from) else { return };
        let node = &mut open.nodes[endpoint.0 as usize];
        if let Some(answer) = self.door.take(&open.job.common, from, node, datagram) {
            outbox.queue(from, &answer, &[]);
        }
    }

    /// The sender's number in the job that the datagram claims to belong to.
    fn endpoint(&mut self, now: Time, from: SocketAddr, datagram: &[u8]) -> Endpoint {
        let job = job_of(datagram);
        if let Some(run) = &mut self.run
            && Some(run.job) == job
            && run.from == from
        {
            run.packets += 1;
            run.bytes += datagram.len() as u64;
            return run.endpoint;
        }
        self.settle(now);
        let Some((job, open)) = job.and_then(|job| Some((job, self.jobs.get(&job)?))) else {
            return UNAUTHENTICATED;
        };
        let endpoint = open.job.endpoints.get(&from).copied().unwrap_or(UNAUTHENTICATED);
        let asks = open.nodes.get(endpoint.0 as usize).is_some_and(|node| !node.receives);
        let before = *self.aggregator.counters(job).expect("a job that is open here is open there");
        self.run =
            Some(Run { job, from, endpoint, before, packets: 1, bytes: datagram.len() as u64, heard: false, asks });
        endpoint
    }

    fn settle(&mut self, now: Time) {
        let Some(Run { job, endpoint, before, packets, bytes, heard, .. }) = self.run.take() else {
            return;
        };
        let (Some(open), Some(after)) = (self.jobs.get_mut(&job), self.aggregator.counters(job)) else {
            return;
        };
        // Packets from unknown addresses count for the job, not for a node.
        if let Some(node) = open.nodes.get_mut(endpoint.0 as usize) {
            node.packets += packets;
            node.bytes += bytes;
            add(&mut node.counters, &since(after, &before));
            if heard {
                node.heard = Some(now);
            }
        }
    }
}

impl Machine for Adding {
    fn train(&mut self, now: Time, train: Train<'_>, outbox: &mut Outbox<'_>) {
        // Packets to all children are relayed in runs, straight from the received train.
        let mut relay: Option<(u32, usize, usize)> = None;
        let mut start = 0;
        let mut asks = None;
        let mut relayed = None;
        for datagram in train.datagrams() {
            let end = start + datagram.len();
            if self.loss.strikes() {
                start = end;
                continue;
            }
            if Receipt::is(datagram) {
                // What follows belongs to another run, whose sender may be known to receive packets.
                self.settle(now);
                self.receipt(train.from, datagram, outbox);
                start = end;
                continue;
            }
            let endpoint = self.endpoint(now, train.from, datagram);
            let mut relays = None;
            let outcome = self.aggregator.handle_packet(endpoint, datagram);
            let heard = !matches!(&outcome, Err(refusal) if !refusal.is_from_sender());
            // An authentic sender is at an address of the job. It gets one short packet for all of these.
            let is_asked = match &self.run {
                Some(run) if heard && run.asks => self.jobs.get(&run.job),
                _ => None,
            };
            if let Some(open) = is_asked {
                asks = self.door.ask(&open.job.common, train.from);
            }
            match outcome {
                Ok(Action::Send { to, header, payload }) => {
                    let job = job_of(&header).expect("a header is long enough");
                    let seq = u32::from_be_bytes(header[12..16].try_into().expect("4 bytes"));
                    let open = &self.jobs[&job];
                    for to in to {
                        let node = &open.nodes[to.0 as usize];
                        let at = node.at(seq);
                        if node.receives {
                            outbox.queue(at, &header, payload);
                        } else if (*to == Endpoint(0) || Some(*to) == open.server) && is_asked.is_none() {
                            // One node of the tree has to begin.
                            if let Some(ask) = self.door.ask(&open.job.common, at) {
                                outbox.queue(at, &ask, &[]);
                            }
                        }
                    }
                }
                Ok(Action::Relay { .. }) => {
                    relays = job_of(datagram);
                    relayed = relays;
                }
                Ok(Action::Nothing) | Err(_) => {}
            }
            if let Some(run) = &mut self.run {
                run.heard |= heard;
            }
            relay = match (relay, relays) {
                (Some((job, from, to)), Some(now)) if job == now && to == start => Some((job, from, end)),
                (before, now) => {
                    if let Some((job, from, to)) = before {
                        self.jobs[&job].relay(self.shard, &train.bytes[from..to], train.stride, outbox);
                    }
                    now.map(|job| (job, start, end))
                }
            };
            start = end;
        }
        if let Some((job, from, to)) = relay {
            self.jobs[&job].relay(self.shard, &train.bytes[from..to], train.stride, outbox);
        }
        if let Some(ask) = asks {
            outbox.queue(train.from, &ask, &[]);
        } else if let Some(open) = relayed.and_then(|job| self.jobs.get_mut(&job)) {
            // After a restart of this aggregator, children that bypass it wait for packets from it.
            if let Some(next) = Known::next_to_ask(&open.nodes, open.asked, |node| node != PARENT) {
                open.asked = next;
                let at = open.nodes[next].at(self.shard.index);
                if let Some(ask) = self.door.ask(&open.job.common, at) {
                    outbox.queue(at, &ask, &[]);
                }
            }
        }
    }

    fn timeout(&self) -> Option<Time> {
        None
    }

    fn send(&mut self, now: Time, _socket: &mut Datagrams) {
        self.settle(now);
    }

    fn open(&mut self, now: Time, job: Admitted) -> Result<(), Refused> {
        self.settle(now);
        let common = &job.common;
        let RoleJob::Aggregator { name, children, server } = &job.role else { panic!("an aggregator's job") };
        let (children, server) = (children.clone(), *server);
        let tenant = Tenant {
            job: common.job,
            epoch: common.epoch,
            key: common.key,
            window: common.window,
            block_bytes: common.block_bytes,
            floats: common.floats,
            results: true,
            apart: common.apart,
            parent: Endpoint(0),
            server,
            name: *name,
            children: (1..).zip(&children).map(|(i, name)| Child { endpoint: Endpoint(i), workers: *name }).collect(),
        };
        self.aggregator.open(tenant).map_err(|reason| match reason {
            Admission::Window(_) | Admission::Block(_) | Admission::Children => Refused::Malformed(reason.to_string()),
            Admission::Epoch(_) | Admission::Jobs(_) | Admission::Slots { .. } | Admission::Memory { .. } => {
                let of = if self.shard.count > 1 {
                    format!(" in each of {} shards", self.shard.count)
                } else {
                    String::new()
                };
                Refused::Conflict(format!("{reason}{of}"))
            }
        })?;
        let (nodes, children) = (Known::all(&job, self.door.is_open()), children.len());
        self.jobs.insert(common.job, Open { nodes, children, server, opened: now, asked: 0, job });
        Ok(())
    }

    fn close(&mut self, job: u32, _why: &str) {
        self.run = None;
        self.aggregator.close(job);
        self.jobs.remove(&job);
    }

    fn report(&self, now: Time, which: &Which) -> Report {
        let jobs = self.jobs.values().filter(|open| which.has(open.job.common.job)).map(|open| {
            let common = &open.job.common;
            let slots = (common.window / self.shard.count).max(1) as usize;
            let blocks = usize::from(common.apart) + if common.floats { open.children + 1 } else { 1 };
            JobReport {
                job: common.job,
                epoch: common.epoch,
                keyed: common.key.is_some(),
                window: common.window,
                block_bytes: common.block_bytes,
                slots,
                waiting_slots: self.aggregator.waiting_slots(common.job),
                memory_bytes: slots * blocks * common.block_bytes,
                counters: self.aggregator.counters(common.job).copied().unwrap_or_default(),
                server: None,
                nodes: open.nodes.iter().map(|node| node.report(now)).collect(),
                age_ns: now.since(open.opened),
            }
        });
        Report {
            dropped_on_purpose: self.loss.lost,
            unauthenticated: *self.aggregator.unauthenticated(),
            jobs: jobs.collect(),
            ..Report::default()
        }
    }
}

impl Open {
    /// Sends datagrams from above to all children that are known to receive packets.
    fn relay(&self, shard: Shard, bytes: &[u8], stride: usize, outbox: &mut Outbox<'_>) {
        for child in self.nodes[1..=self.children].iter().filter(|child| child.receives) {
            if child.listed.address.shards <= shard.count {
                // A packet that comes here belongs to this shard, and hence to one shard of the child.
                outbox.relay(child.at(shard.index), bytes, stride);
            } else {
                for datagram in bytes.chunks(stride) {
                    let seq = u32::from_be_bytes(datagram[12..16].try_into().expect("it was read as a packet"));
                    outbox.queue(child.at(seq), datagram, &[]);
                }
            }
        }
    }
}

/// The number of the parent among a job's nodes; its children follow.
const PARENT: usize = 0;
