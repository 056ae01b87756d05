//! A virtual network: packets of any kind over any topology, under virtual time, with seeded faults.
//!
//! [`Network::send`] gives it a packet, [`Network::poll_event`] hands out those that have arrived. Time is passed in:
//! [`Network::poll_timeout`] says when something happens next, and [`Network::handle_timeout`] makes it happen. The payload is
//! any type: a datagram's bytes, a frame's header, or a number that stands for a message.
//!
//! A packet passes the links of its *flow*'s path one after the other. Each link has a queue, a rate and a delay, and may lose,
//! duplicate, delay and reorder packets ([`Link`]). Faults come at any time: a link changes ([`Network::set_link`]), goes down
//! ([`Network::set_up`]) or is clogged ([`Network::clog`]); a host stops for a while ([`Network::stall`]), is gone
//! ([`Network::take_down`]), or is parted from others ([`Network::part`]); two nodes no longer reach each other
//! ([`Network::block`]); what a connection carries is lost ([`Network::reset`]).
//!
//! Every packet either arrives, or is counted with the reason why it did not ([`Counts`]). The same seed and the same calls
//! are the same run.
//!
//! Cost: two events a link and packet, each `log2` of the events that are waiting; one without a rate. Nothing looks at all
//! nodes, links or flows.

mod port;
mod segments;
mod topology;

pub use segments::{SEGMENT_BYTES, Segment};
pub use topology::{Link, LinkId, NodeId, Topology};

use crate::agenda::Agenda;
use crate::random::{Random, mix};
use penstock_types::Time;
use port::{Parcel, Port, Turn};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use topology::Routes;

/// A flow: packets that take the same path, and share a backlog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u32);

/// Where packets wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Queue {
    /// At the beginning of a link, as in a socket's or a switch port's buffer.
    Link(LinkId),
    /// At any link of a flow's path, as in a connection's send buffer.
    Flow(FlowId),
}

/// What has happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event<P> {
    /// A packet has arrived.
    Arrived(Packet<P>),
    /// A packet is lost. Only after [`Network::report_losses`].
    Lost(Packet<P>, Loss),
    /// A queue that had no room ([`Network::has_room`]) has room.
    Room(Queue),
}

/// A packet at its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Packet<P> {
    /// The node that sent it.
    pub from: NodeId,
    /// The node that it is for.
    pub to: NodeId,
    /// The flow that it belongs to.
    pub flow: FlowId,
    /// The length of the packet on links.
    pub bytes: u64,
    /// What the packet carries.
    pub payload: P,
}

/// Why a packet does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// A link lost it ([`Link::loss`]).
    Link(LinkId),
    /// A link's queue had no room ([`Link::queue_bytes`]).
    Queue(LinkId),
    /// A link of its path was down.
    LinkDown(LinkId),
    /// The node that sent it, or one that it reached, was down.
    NodeDown(NodeId),
    /// The nodes at its ends were parted, or its flow was blocked.
    Parted,
    /// Its flow was reset.
    Reset,
}

/// Packets that were given to a network, and what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets that were sent.
    pub sent: u64,
    /// Duplicates that links made.
    pub duplicated: u64,
    /// Packets and duplicates that arrived.
    pub arrived: u64,
    /// Packets and duplicates that links lost.
    pub lost: u64,
    /// Packets and duplicates that found no room in a queue.
    pub dropped: u64,
    /// Packets and duplicates that were lost because a link or a node was down.
    pub down: u64,
    /// Packets and duplicates that were lost because their ends were parted or their flow blocked.
    pub parted: u64,
    /// Packets and duplicates that were lost because their flow was reset.
    pub reset: u64,
}

impl Counts {
    /// Packets and duplicates that are still on their way.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.sent + self.duplicated - self.arrived - self.lost - self.dropped - self.down - self.parted - self.reset
    }
}

/// There is no path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoPath {
    /// The node at which the path was to begin.
    pub from: NodeId,
    /// The node at which the path was to end.
    pub to: NodeId,
}

impl fmt::Display for NoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let NoPath { from, to } = self;
        write!(f, "no path leads from node {} to node {}: join them by links over switches", from.0, to.0)
    }
}

impl std::error::Error for NoPath {}

/// See the module's documentation.
#[derive(Debug)]
pub struct Network<P> {
    topology: Topology,
    routes: Routes,
    random: Random,
    now: Time,
    ports: Vec<Port<P>>,
    /// By link: when the last packet arrives, for links that keep the order; and the bytes that it has sent.
    last: Vec<Time>,
    carried: Vec<u64>,
    nodes: Vec<Node<P>>,
    flows: Vec<Flow>,
    between: HashMap<(NodeId, NodeId), FlowId>,
    agenda: Agenda<Step<P>>,
    events: VecDeque<Event<P>>,
    counts: Counts,
    reports_losses: bool,
}

#[derive(Clone, Debug)]
struct Node<P> {
    down_until: Time,
    stalled_until: Time,
    /// What has arrived while it was stalled.
    held: VecDeque<Parcel<P>>,
    part: u32,
}

#[derive(Clone, Debug)]
struct Flow {
    from: NodeId,
    to: NodeId,
    path: Vec<LinkId>,
    /// By link of the path: the finish tag of its last packet there.
    finish: Vec<u64>,
    /// Bytes that wait at links of the path.
    backlog: u64,
    life: u32,
    is_blocked: bool,
    awaits_below: Option<u64>,
}

#[derive(Debug)]
enum Step<P> {
    /// A link has sent the packet of this turn.
    Sent(LinkId, u64),
    /// A packet is at the end of a link.
    Reaches(Parcel<P>),
    Unclog(LinkId),
    Wakes(NodeId),
}

impl<P: Clone> Network<P> {
    /// A network in which nothing is under way. `seed` decides what is left to chance.
    #[must_use]
    pub fn new(topology: Topology, seed: u64) -> Network<P> {
        let node = Node { down_until: Time(0), stalled_until: Time(0), held: VecDeque::new(), part: 0 };
        Network {
            routes: Routes::default(),
            random: Random::new(mix(seed)),
            now: Time(0),
            ports: topology.links.iter().map(|(.., link)| Port::new(*link)).collect(),
            last: vec![Time(0); topology.links.len()],
            carried: vec![0; topology.links.len()],
            nodes: vec![node; topology.node_count()],
            flows: Vec::new(),
            between: HashMap::new(),
            agenda: Agenda::default(),
            events: VecDeque::new(),
            counts: Counts::default(),
            reports_losses: false,
            topology,
        }
    }

    // ------------------------------------------------------------------------------------------ packets

    /// The flow from one node to another on a shortest path; the same one each time.
    ///
    /// # Errors
    /// If there is no path.
    pub fn flow(&mut self, from: NodeId, to: NodeId) -> Result<FlowId, NoPath> {
        if let Some(flow) = self.between.get(&(from, to)) {
            return Ok(*flow);
        }
        let choice = u64::from(from.0) << 32 | u64::from(to.0);
        let path = self.routes.path(&self.topology, from, to, choice).ok_or(NoPath { from, to })?;
        let flow = self.add_flow(from, to, path);
        self.between.insert((from, to), flow);
        Ok(flow)
    }

    /// A new flow along these links, such as one connection of several between two nodes.
    ///
    /// # Panics
    /// If a link does not begin where the one before it ends, or if there is none.
    pub fn flow_along(&mut self, path: &[LinkId]) -> FlowId {
        let ends: Vec<[NodeId; 2]> = path.iter().map(|link| self.topology.ends(*link)).collect();
        assert!(
            ends.windows(2).all(|pair| pair[0][1] == pair[1][0]),
            "the links of a path follow each other: {ends:?}"
        );
        let (from, to) = (ends.first().expect("a path has links")[0], ends[ends.len() - 1][1]);
        self.add_flow(from, to, path.to_vec())
    }

    /// The links of a flow's path, in order.
    #[must_use]
    pub fn path(&self, flow: FlowId) -> &[LinkId] {
        &self.flows[flow.0 as usize].path
    }

    fn add_flow(&mut self, from: NodeId, to: NodeId, path: Vec<LinkId>) -> FlowId {
        let finish = vec![0; path.len()];
        self.flows.push(Flow { from, to, path, finish, backlog: 0, life: 0, is_blocked: false, awaits_below: None });
        FlowId(self.flows.len() as u32 - 1)
    }

    /// Sends a packet that takes `bytes` on each link.
    pub fn send(&mut self, now: Time, flow: FlowId, bytes: u64, payload: P) {
        self.set_now(now);
        self.counts.sent += 1;
        let Flow { from, life, is_blocked, .. } = self.flows[flow.0 as usize];
        let mut parcel = Parcel { flow, hop: 0, life, bytes, is_counted: false, payload };
        if self.nodes[from.0 as usize].down_until > now {
            return self.lose(parcel, Loss::NodeDown(from));
        }
        if is_blocked || self.is_parted(flow) {
            return self.lose(parcel, Loss::Parted);
        }
        parcel.is_counted = true;
        self.flows[flow.0 as usize].backlog += bytes;
        self.pass_on(parcel);
    }

    /// When something happens next. It may be the current time: what is sent over a link without rate and delay arrives at once.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.agenda.next_at()
    }

    /// Makes happen what happens until `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(at) = self.agenda.next_at().filter(|at| *at <= now) {
            self.set_now(at.max(self.now));
            let step = self.agenda.pop(at).expect("its time has come");
            self.step(step);
        }
        self.set_now(now);
    }

    /// What has happened.
    pub fn poll_event(&mut self) -> Option<Event<P>> {
        self.events.pop_front()
    }

    /// Whether fewer bytes than `below` wait in a queue. If not, [`Event::Room`] tells once when it is so.
    pub fn has_room(&mut self, now: Time, queue: Queue, below: u64) -> bool {
        self.set_now(now);
        let waits = self.backlog(queue);
        let awaits_below = (waits >= below).then_some(below);
        match queue {
            Queue::Link(link) => self.ports[link.0 as usize].awaits_below = awaits_below,
            Queue::Flow(flow) => self.flows[flow.0 as usize].awaits_below = awaits_below,
        }
        awaits_below.is_none()
    }

    /// Bytes that wait in a queue. Of a packet that is being sent, a link counts what is left, and a flow the whole.
    #[must_use]
    pub fn backlog(&self, queue: Queue) -> u64 {
        match queue {
            Queue::Link(link) => self.ports[link.0 as usize].backlog(self.now),
            Queue::Flow(flow) => self.flows[flow.0 as usize].backlog,
        }
    }

    // ------------------------------------------------------------------------------------------- faults

    /// From now on a link behaves like this. What is under way on it is not changed.
    pub fn set_link(&mut self, now: Time, link: LinkId, to: Link) {
        self.set_now(now);
        self.ports[link.0 as usize].change(now, |port| port.link = to);
        self.go_on(link);
    }

    /// A link goes down, or is up again. A link that is down loses what it would send.
    pub fn set_up(&mut self, link: LinkId, is_up: bool) {
        self.ports[link.0 as usize].is_up = is_up;
    }

    /// Nothing leaves a link before `until`. What is on its way arrives.
    pub fn clog(&mut self, now: Time, link: LinkId, until: Time) {
        self.set_now(now);
        self.ports[link.0 as usize].change(now, |port| port.clogged_until = until);
        self.agenda.add(until, Step::Unclog(link));
    }

    /// A host takes nothing before `until`, as a process that is stopped. It has what arrived meanwhile afterwards, in order.
    pub fn stall(&mut self, node: NodeId, until: Time) {
        self.nodes[node.0 as usize].stalled_until = until;
        self.agenda.add(until, Step::Wakes(node));
    }

    /// A node is down until then: it loses what reaches it, and what it would send.
    pub fn take_down(&mut self, node: NodeId, until: Time) {
        self.nodes[node.0 as usize].down_until = until;
    }

    /// Puts a node into a part of the network, which is 0 at first. Packets between parts are lost.
    pub fn part(&mut self, node: NodeId, part: u32) {
        self.nodes[node.0 as usize].part = part;
    }

    /// Loses all packets of a flow from now on, or no longer.
    pub fn block(&mut self, flow: FlowId, is_blocked: bool) {
        self.flows[flow.0 as usize].is_blocked = is_blocked;
    }

    /// What a flow has under way is lost, as when a connection closes. The flow may be used again.
    pub fn reset(&mut self, flow: FlowId) {
        let flow = &mut self.flows[flow.0 as usize];
        flow.life += 1;
        flow.backlog = 0;
        flow.awaits_below = None;
    }

    /// Whether [`Event::Lost`] tells of packets that are lost.
    pub fn report_losses(&mut self, reports: bool) {
        self.reports_losses = reports;
    }

    // ------------------------------------------------------------------------------------------ figures

    /// The latest time that was passed in.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// What became of all packets.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes that a link has sent.
    #[must_use]
    pub fn carried_bytes(&self, link: LinkId) -> u64 {
        self.carried[link.0 as usize]
    }

    /// The topology that it was made of.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    // ------------------------------------------------------------------------------------------- within

    fn set_now(&mut self, now: Time) {
        debug_assert!(now >= self.now, "time runs forward: {now:?} after {:?}", self.now);
        self.now = now;
    }

    fn is_parted(&self, flow: FlowId) -> bool {
        let Flow { from, to, .. } = self.flows[flow.0 as usize];
        self.nodes[from.0 as usize].part != self.nodes[to.0 as usize].part
    }

    fn step(&mut self, step: Step<P>) {
        match step {
            Step::Sent(link, turn) => {
                let Some(parcel) = self.ports[link.0 as usize].end(turn, self.now) else { return };
                self.leaves(link, parcel);
                self.drain(link);
            }
            Step::Reaches(mut parcel) => {
                parcel.hop += 1;
                self.pass_on(parcel);
            }
            Step::Unclog(link) => {
                if self.ports[link.0 as usize].clogged_until <= self.now {
                    self.ports[link.0 as usize].change(self.now, |_| ());
                    self.go_on(link);
                }
            }
            Step::Wakes(node) => {
                while self.nodes[node.0 as usize].stalled_until <= self.now
                    && let Some(parcel) = self.nodes[node.0 as usize].held.pop_front()
                {
                    self.arrives(parcel);
                }
            }
        }
    }

    /// A packet is at the beginning of a link of its path, or at the end of the path.
    fn pass_on(&mut self, parcel: Parcel<P>) {
        let flow = &self.flows[parcel.flow.0 as usize];
        let is_stale = parcel.life != flow.life;
        match flow.path.get(parcel.hop as usize).copied() {
            _ if is_stale => self.lose(parcel, Loss::Reset),
            None => {
                let node = &mut self.nodes[flow.to.0 as usize];
                if parcel.hop == 0 {
                    // From a node to itself: not within the call that sends.
                    self.agenda.add(self.now, Step::Reaches(parcel));
                } else if node.stalled_until > self.now || !node.held.is_empty() {
                    node.held.push_back(parcel);
                } else {
                    self.arrives(parcel);
                }
            }
            Some(link) => {
                let [at, _] = self.topology.ends(link);
                let port = &mut self.ports[link.0 as usize];
                if self.nodes[at.0 as usize].down_until > self.now {
                    return self.lose(parcel, Loss::NodeDown(at));
                }
                if !port.is_up {
                    return self.lose(parcel, Loss::LinkDown(link));
                }
                if !port.has_room_for(parcel.bytes, self.now) {
                    return self.lose(parcel, Loss::Queue(link));
                }
                let finish = &mut self.flows[parcel.flow.0 as usize].finish[parcel.hop as usize];
                port.push(parcel, finish);
                self.drain(link);
            }
        }
    }

    fn arrives(&mut self, mut parcel: Parcel<P>) {
        self.settle(&mut parcel);
        let Flow { to, life, is_blocked, .. } = self.flows[parcel.flow.0 as usize];
        if parcel.life != life {
            return self.lose(parcel, Loss::Reset);
        }
        if self.nodes[to.0 as usize].down_until > self.now {
            return self.lose(parcel, Loss::NodeDown(to));
        }
        if is_blocked || self.is_parted(parcel.flow) {
            return self.lose(parcel, Loss::Parted);
        }
        self.counts.arrived += 1;
        let packet = self.packet(parcel);
        self.events.push_back(Event::Arrived(packet));
    }

    /// Sends what a port can send now.
    fn drain(&mut self, link: LinkId) {
        loop {
            let flows = &self.flows;
            let is_stale = |parcel: &Parcel<P>| parcel.life != flows[parcel.flow.0 as usize].life;
            match self.ports[link.0 as usize].next(self.now, is_stale) {
                Turn::Left(parcel) => self.leaves(link, parcel),
                Turn::Stale(parcel) => self.lose(parcel, Loss::Reset),
                Turn::Ends(at, turn) => {
                    self.agenda.add(at, Step::Sent(link, turn));
                    break;
                }
                Turn::Rests => break,
            }
        }
        let port = &mut self.ports[link.0 as usize];
        if let Some(below) = port.awaits_below
            && port.backlog(self.now) < below
        {
            port.awaits_below = None;
            self.events.push_back(Event::Room(Queue::Link(link)));
        }
    }

    /// Goes on after a change of a link.
    fn go_on(&mut self, link: LinkId) {
        match self.ports[link.0 as usize].resume(self.now) {
            Turn::Left(parcel) | Turn::Stale(parcel) => self.leaves(link, parcel),
            Turn::Ends(at, turn) => self.agenda.add(at, Step::Sent(link, turn)),
            Turn::Rests => {}
        }
        self.drain(link);
    }

    /// A packet has left a link's queue, and is on its way.
    fn leaves(&mut self, link: LinkId, mut parcel: Parcel<P>) {
        let Port { link: Link { delay, jitter, in_order, loss, duplicate, late, late_by, .. }, is_up, .. } =
            self.ports[link.0 as usize];
        self.carried[link.0 as usize] += parcel.bytes;
        if !is_up {
            return self.lose(parcel, Loss::LinkDown(link));
        }
        // Only what may happen is drawn, so that an option that is not used leaves a run as it was.
        if loss > 0.0 && self.random.chance(loss) {
            return self.lose(parcel, Loss::Link(link));
        }
        if parcel.hop as usize + 1 == self.flows[parcel.flow.0 as usize].path.len() {
            self.settle(&mut parcel);
        }
        if duplicate > 0.0 && self.random.chance(duplicate) {
            self.counts.duplicated += 1;
            let copy = Parcel { is_counted: false, ..parcel.clone() };
            self.fly(link, copy, delay, jitter, in_order);
        }
        let held_back = late > 0.0 && self.random.chance(late);
        self.fly(link, parcel, delay + if held_back { late_by } else { 0 }, jitter, in_order && !held_back);
    }

    fn fly(&mut self, link: LinkId, parcel: Parcel<P>, delay: u64, jitter: u64, in_order: bool) {
        let added = if jitter > 0 { self.random.below(jitter + 1) } else { 0 };
        let mut at = self.now.plus(delay + added);
        if in_order {
            let last = &mut self.last[link.0 as usize];
            *last = at.max(*last);
            at = *last;
        }
        self.agenda.add(at, Step::Reaches(parcel));
    }

    /// A packet no longer belongs to its flow's backlog.
    fn settle(&mut self, parcel: &mut Parcel<P>) {
        let flow = &mut self.flows[parcel.flow.0 as usize];
        if !std::mem::take(&mut parcel.is_counted) || parcel.life != flow.life {
            return;
        }
        flow.backlog -= parcel.bytes;
        if let Some(below) = flow.awaits_below
            && flow.backlog < below
        {
            flow.awaits_below = None;
            self.events.push_back(Event::Room(Queue::Flow(parcel.flow)));
        }
    }

    fn lose(&mut self, mut parcel: Parcel<P>, why: Loss) {
        self.settle(&mut parcel);
        let count = match why {
            Loss::Link(_) => &mut self.counts.lost,
            Loss::Queue(_) => &mut self.counts.dropped,
            Loss::LinkDown(_) | Loss::NodeDown(_) => &mut self.counts.down,
            Loss::Parted => &mut self.counts.parted,
            Loss::Reset => &mut self.counts.reset,
        };
        *count += 1;
        if self.reports_losses {
            let packet = self.packet(parcel);
            self.events.push_back(Event::Lost(packet, why));
        }
    }

    fn packet(&self, parcel: Parcel<P>) -> Packet<P> {
        let Flow { from, to, .. } = self.flows[parcel.flow.0 as usize];
        Packet { from, to, flow: parcel.flow, bytes: parcel.bytes, payload: parcel.payload }
    }
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
