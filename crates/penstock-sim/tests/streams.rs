//! Two shipped peers of `penstock-stream` over the virtual network: what their own tests need of it, with the network as an
//! ordinary dependency.

use penstock_sim::agenda::Agenda;
use penstock_sim::network::{Event as Happened, FlowId, Link, LinkId, Network, Queue, Topology};
use penstock_sim::random::Random;
use penstock_stream::frame::Channel;
use penstock_stream::peer::{Body, Event, OpStatus, Outgoing, Payload, Peer, PeerConfig, StreamId, seal};
use penstock_stream::{Header, MessageKey, Reference, fingerprint::Fingerprint};
use penstock_types::{ChannelId, GroupId, MILLISECOND, OpSeq, Priority, SECOND, Time};
use std::collections::{BTreeSet, HashMap};

/// A frame as it travels: a type of this test's own, of which the network knows nothing.
#[derive(Clone)]
struct Frame {
    to: usize,
    stream: StreamId,
    head: [u8; Header::BYTES],
    body: Vec<u8>,
}

enum Timer {
    Lose(StreamId),
    Open(StreamId),
}

struct World {
    now: Time,
    network: Network<Frame>,
    timers: Agenda<Timer>,
    peers: [Peer; 2],
    /// By stream and sender.
    flows: Vec<[FlowId; 2]>,
    up: Vec<bool>,
    /// Bytes of each message.
    lengths: Vec<u64>,
    /// By message and offset: the length of what was applied.
    applied: HashMap<(u32, u64), u32>,
    sent: BTreeSet<u32>,
}

const STREAMS: usize = 4;
/// What all streams together carry; each alone carries half of it.
const RATE: u64 = 100_000_000;

impl World {
    fn new(seed: u64, lengths: Vec<u64>) -> World {
        let mut topology = Topology::default();
        let hosts = [0; 2].map(|_| topology.add_host());
        let mut paths: Vec<[Vec<LinkId>; 2]> = vec![[Vec::new(), Vec::new()]; STREAMS];
        for side in 0..2 {
            // The streams' own limits, and then the link that they share.
            let switch = topology.add_switch();
            let shared = Link { rate: RATE, delay: MILLISECOND, fair: true, ..Link::default() };
            let shared = topology.add_link(switch, hosts[1 - side], shared);
            for path in &mut paths {
                let own = topology.add_link(hosts[side], switch, Link { rate: RATE / 2, ..Link::default() });
                path[side] = vec![own, shared];
            }
        }
        let mut network = Network::new(topology, seed);
        let flows = paths.iter().map(|[a, b]| [network.flow_along(a), network.flow_along(b)]).collect();
        let mut peers = [0; 2].map(|_| Peer::new(PeerConfig::default(), Time(0)));
        for peer in &mut peers {
            (0..STREAMS).for_each(|stream| peer.stream_up(stream as StreamId, Time(0)));
        }
        let (applied, sent) = (HashMap::new(), BTreeSet::new());
        let (timers, up) = (Agenda::default(), vec![true; STREAMS]);
        World { now: Time(0), network, timers, peers, flows, up, lengths, applied, sent }
    }

    fn pump(&mut self) {
        for side in 0..2 {
            while let Some(event) = self.peers[side].poll_event() {
                match event {
                    Event::Sent(key) => assert!(self.sent.insert(key.message), "sent twice"),
                    Event::Granted(..) => {}
                    other => panic!("{other:?} at {:?}", self.now),
                }
            }
            for stream in (0..STREAMS).filter(|stream| self.up[*stream]) {
                let flow = self.flows[stream][side];
                while self.network.has_room(self.now, Queue::Flow(flow), 256 << 10)
                    && let Some(frame) = self.peers[side].poll_frame(stream as StreamId, self.now)
                {
                    let body = match frame.payload {
                        Payload::Owned(bytes, range) => bytes[range].to_vec(),
                        Payload::Memory => {
                            let Header { key, offset, length, .. } = frame.header;
                            (offset..offset + u64::from(length)).map(|at| content(key.message, at)).collect()
                        }
                    };
                    let head = seal(frame.header, &body);
                    let bytes = (head.len() + body.len()) as u64;
                    let parcel = Frame { to: 1 - side, stream: stream as StreamId, head, body };
                    self.network.send(self.now, flow, bytes, parcel);
                }
            }
        }
    }

    fn arrive(&mut self, Frame { to, stream, head, body }: Frame) {
        let header = Header::decode(&head).expect("the network damages nothing");
        let peer = &mut self.peers[to];
        peer.handle_header(stream, &header, OpStatus::Active, self.now).expect("a frame that is allowed");
        let finish = peer.handle_frame(stream, &header, &body, OpStatus::Active).expect("a frame that is allowed");
        if finish.apply && header.length > 0 {
            let right = body.iter().zip(header.offset..).all(|(byte, at)| *byte == content(header.key.message, at));
            assert!(right, "{header:?}");
            let before = self.applied.insert((header.key.message, header.offset), header.length);
            assert_eq!(before, None, "applied twice: {header:?}");
        }
    }

    fn act(&mut self, timer: Timer) {
        match timer {
            Timer::Lose(stream) => {
                // Both ends see the connection close; what it had under way is gone.
                self.flows[stream as usize].iter().for_each(|flow| self.network.reset(*flow));
                self.peers.iter_mut().for_each(|peer| peer.stream_down(stream));
                self.up[stream as usize] = false;
                self.timers.add(self.now.plus(20 * MILLISECOND), Timer::Open(stream));
            }
            Timer::Open(stream) => {
                let now = self.now;
                self.peers.iter_mut().for_each(|peer| peer.stream_up(stream, now));
                self.up[stream as usize] = true;
            }
        }
    }

    fn run(&mut self) {
        self.pump();
        while self.sent.len() < self.lengths.len() {
            let deadlines = self.peers.iter_mut().map(|peer| peer.poll_timeout(self.now));
            let next = deadlines.chain(self.network.poll_timeout()).chain(self.timers.next_at()).min();
            self.now = next.expect("heartbeats never end").max(self.now);
            assert!(self.now < Time(10 * SECOND), "{} of {} messages", self.sent.len(), self.lengths.len());
            self.network.handle_timeout(self.now);
            while let Some(event) = self.network.poll_event() {
                if let Happened::Arrived(packet) = event {
                    self.arrive(packet.payload);
                }
            }
            while let Some(timer) = self.timers.pop(self.now) {
                self.act(timer);
            }
            for peer in &mut self.peers {
                if peer.poll_timeout(self.now) <= self.now {
                    peer.handle_timeout(self.now);
                }
            }
            self.pump();
        }
    }
}

/// The byte of a message at an offset.
fn content(message: u32, at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9) >> 8) as u8 ^ message as u8
}

/// Messages arrive whole and once over four streams, of which some are lost with all that they carried and come again later;
/// all streams together use what their common link carries, and never more.
#[test]
fn peers_lose_streams() {
    let mut lost = 0;
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let lengths: Vec<u64> = (0..12).map(|_| 100_000 + random.below(2_000_000)).collect();
        let total: u64 = lengths.iter().sum();
        let mut world = World::new(seed, lengths.clone());
        let key = |message: u32| MessageKey {
            group: GroupId(1),
            channel: Channel::Collective(ChannelId::MAIN),
            op: OpSeq(0),
            message,
        };
        for (message, len) in (0..).zip(&lengths) {
            let place = Reference { address: 0, epoch: 0, region: 0 };
            let body = Body::Memory { place, len: *len };
            let (priority, fingerprint) = (Priority(0), Fingerprint::default());
            world.peers[0].send(Outgoing { key: key(message), priority, fingerprint, coflow: 0, body });
        }
        world.peers[1].grant(key(0), lengths.len() as u32, Fingerprint::default());
        // Without losses too.
        for number in 0..seed % 4 {
            let stream = (seed + number) as usize % STREAMS;
            world
                .timers
                .add(Time(random.below(80 * MILLISECOND) + 25 * MILLISECOND * number), Timer::Lose(stream as u32));
        }
        world.run();
        for (message, len) in (0..).zip(&lengths) {
            let here = world.applied.iter().filter(|((of, _), _)| *of == message);
            assert_eq!(here.map(|(_, length)| u64::from(*length)).sum::<u64>(), *len, "seed {seed}, message {message}");
        }
        let least = total * 1000 / (RATE / 1000) / 1000;
        let took = world.now.0 / MILLISECOND;
        println!("seed {seed}: {total} bytes in {took} ms, {least} at least; {:?}", world.network.counts());
        assert!((least..2 * least + 40).contains(&took), "seed {seed}: {took} ms for {least}");
        lost += world.network.counts().reset;
    }
    assert!(lost > 50, "{lost} frames were under way on streams that were lost");
}
