//! The streams between nodes, over the virtual network of `penstock-sim`.
//!
//! Each direction of a stream is a flow. It passes a link that has the stream's rate, then the link that all streams of a pair
//! share fairly, and then a link that has the stream's delay. What waits at the first two is what a socket's send buffer holds.
//! Nothing here knows the machine under test.

use penstock_sim::network::{Event, FlowId, Link, LinkId, Network, Queue, SEGMENT_BYTES, Segment, Topology};
use penstock_types::Time;

/// What a test says about one stream; both directions are alike.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamSpec {
    pub(super) mbit_per_s: f64,
    pub(super) delay: u64,
    /// It takes another frame while fewer bytes than this wait.
    pub(super) buffer_bytes: u64,
}

/// One direction of a stream: what this side of a pair sends on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Direction {
    pub(super) pair: usize,
    pub(super) side: usize,
    pub(super) stream: usize,
}

#[derive(Debug)]
pub(super) enum News<P> {
    Arrived(Direction, P),
    /// A direction that had no room has room.
    Room(Direction),
}

/// The streams of all pairs.
pub(super) struct Streams<P> {
    network: Network<Segment<P>>,
    specs: Vec<StreamSpec>,
    /// By flow.
    directions: Vec<Direction>,
    /// By flow: the link that has the stream's rate.
    own: Vec<LinkId>,
}

impl<P: Clone> Streams<P> {
    /// `capacity_mbit_per_s` is what all streams of a pair together carry in each direction.
    pub(super) fn new(pairs: usize, specs: &[StreamSpec], capacity_mbit_per_s: f64) -> Streams<P> {
        let mut topology = Topology::default();
        let (mut directions, mut paths) = (Vec::new(), Vec::new());
        for (pair, side) in (0..pairs).flat_map(|pair| [(pair, 0), (pair, 1)]) {
            let [from, to] = [0; 2].map(|_| topology.add_host());
            let before = topology.add_switch();
            let is_limited = capacity_mbit_per_s.is_finite();
            let behind = if is_limited { topology.add_switch() } else { before };
            let shared = Link { rate: bytes_per_s(capacity_mbit_per_s), fair: true, ..Link::default() };
            let shared = is_limited.then(|| topology.add_link(before, behind, shared));
            for (stream, spec) in specs.iter().enumerate() {
                let own = Link { rate: bytes_per_s(spec.mbit_per_s), ..Link::default() };
                let own = topology.add_link(from, before, own);
                let delay = topology.add_link(behind, to, Link { delay: spec.delay, ..Link::default() });
                directions.push(Direction { pair, side, stream });
                paths.push([Some(own), shared, Some(delay)]);
            }
        }
        // Nothing is left to chance here: no link loses, delays or repeats anything.
        let mut network = Network::new(topology, 0);
        for path in &paths {
            network.flow_along(&path.iter().flatten().copied().collect::<Vec<_>>());
        }
        let own = paths.iter().flat_map(|path| path[0]).collect();
        Streams { network, specs: specs.to_vec(), directions, own }
    }

    /// Whether it takes another frame now. If not, [`News::Room`] will tell when it does.
    pub(super) fn has_room(&mut self, direction: Direction, now: Time) -> bool {
        self.network.has_room(now, Queue::Flow(self.flow(direction)), self.specs[direction.stream].buffer_bytes)
    }

    pub(super) fn push(&mut self, direction: Direction, bytes: u64, piece: P, now: Time) {
        let flow = self.flow(direction);
        self.network.send_in_segments(now, flow, bytes, SEGMENT_BYTES, piece);
    }

    /// What has not arrived is lost.
    pub(super) fn clear(&mut self, direction: Direction) {
        self.network.reset(self.flow(direction));
    }

    /// A direction has another rate; with a rate of 0 it is silent.
    pub(super) fn set_rate(&mut self, direction: Direction, mbit_per_s: f64, now: Time) {
        let own = self.own[self.flow(direction).0 as usize];
        let rate = bytes_per_s(mbit_per_s);
        if rate == 0 {
            return self.network.clog(now, own, Time(u64::MAX));
        }
        self.network.set_link(now, own, Link { rate, ..Link::default() });
        self.network.clog(now, own, now);
    }

    pub(super) fn delay(&self, stream: usize) -> u64 {
        self.specs[stream].delay
    }

    /// When something happens next.
    pub(super) fn next(&self) -> Time {
        self.network.poll_timeout().unwrap_or(Time(u64::MAX))
    }

    pub(super) fn advance(&mut self, now: Time) {
        self.network.handle_timeout(now);
    }

    pub(super) fn news(&mut self) -> Option<News<P>> {
        loop {
            match self.network.poll_event()? {
                Event::Arrived(packet) => {
                    if let Some(piece) = packet.payload {
                        return Some(News::Arrived(self.directions[packet.flow.0 as usize], *piece));
                    }
                }
                Event::Room(Queue::Flow(flow)) => return Some(News::Room(self.directions[flow.0 as usize])),
                Event::Room(_) | Event::Lost(..) => {}
            }
        }
    }

    fn flow(&self, Direction { pair, side, stream }: Direction) -> FlowId {
        FlowId(((2 * pair + side) * self.specs.len() + stream) as u32)
    }
}

fn bytes_per_s(mbit_per_s: f64) -> u64 {
    (mbit_per_s * 1e6 / 8.0) as u64
}
