use super::*;
use penstock_types::{MILLISECOND, SECOND};

const MICROSECOND: u64 = 1000;

/// Runs until nothing is left to happen, or until `end`. Returns what has happened, with its time.
fn run_until<P: Clone>(network: &mut Network<P>, end: Time) -> Vec<(Time, Event<P>)> {
    let mut events = Vec::new();
    loop {
        while let Some(event) = network.poll_event() {
            events.push((network.now(), event));
        }
        let Some(at) = network.poll_timeout().filter(|at| *at <= end) else { return events };
        network.handle_timeout(at);
    }
}

fn run<P: Clone>(network: &mut Network<P>) -> Vec<(Time, Event<P>)> {
    run_until(network, Time(u64::MAX))
}

/// The payloads that arrive, with their times.
fn arrivals<P: Clone>(network: &mut Network<P>) -> Vec<(u64, P)> {
    let arrived = |(at, event): (Time, Event<P>)| match event {
        Event::Arrived(packet) => Some((at.0, packet.payload)),
        _ => None,
    };
    run(network).into_iter().filter_map(arrived).collect()
}

/// Two hosts and a link from the first to the second.
fn wire<P: Clone>(link: Link) -> (Network<P>, LinkId, FlowId) {
    let mut topology = Topology::default();
    let [a, b] = [0; 2].map(|_| topology.add_host());
    let id = topology.add_link(a, b, link);
    let mut network = Network::new(topology, 1);
    let flow = network.flow(a, b).unwrap();
    (network, id, flow)
}

/// A link of any kind.
fn any_link(random: &mut Random) -> Link {
    Link {
        rate: random.pick(&[0, 12_345, 1_000_000, 125_000_000, 50_000_000_000]),
        delay: random.pick(&[0, 1, 20 * MICROSECOND]),
        jitter: random.pick(&[0, 0, 50 * MICROSECOND]),
        in_order: random.chance(0.3),
        queue_bytes: random.pick(&[0, 0, 3000, 20_000]),
        fair: random.chance(0.3),
        loss: random.pick(&[0.0, 0.0, 0.1]),
        duplicate: random.pick(&[0.0, 0.0, 0.1]),
        late: random.pick(&[0.0, 0.0, 0.1]),
        late_by: MILLISECOND,
    }
}

/// Something that a test does to a network.
fn disturb(network: &mut Network<u64>, now: Time, random: &mut Random) {
    let link = LinkId(random.below(network.ports.len() as u64) as u32);
    let node = NodeId(random.below(network.nodes.len() as u64) as u32);
    let flow = FlowId(random.below(network.flows.len() as u64) as u32);
    let until = now.plus(random.below(5 * MILLISECOND));
    match random.below(9) {
        0 => network.set_link(now, link, any_link(random)),
        1 => network.set_up(link, random.chance(0.7)),
        2 => network.clog(now, link, until),
        3 => network.stall(node, until),
        4 => network.take_down(node, until),
        5 => network.part(node, random.below(2) as u32),
        6 => network.block(flow, random.chance(0.5)),
        7 => network.reset(flow),
        _ => drop(network.has_room(now, Queue::Flow(flow), 1 + random.below(5000))),
    }
}

/// A topology, traffic and faults of a seed. Returns all that has happened.
fn any_run(seed: u64) -> (Vec<(Time, Event<u64>)>, Network<u64>) {
    let mut random = Random::new(seed);
    let (racks, hosts) = (1 + random.below(3) as usize, 1 + random.below(4) as usize);
    let (topology, hosts) = Topology::racks(racks, hosts, any_link(&mut random), any_link(&mut random));
    let mut network = Network::new(topology, seed);
    network.report_losses(true);
    let mut events = Vec::new();
    let mut now = Time(0);
    for number in 0..200 {
        let flow = network.flow(random.pick(&hosts), random.pick(&hosts)).unwrap();
        network.send(now, flow, 1 + random.below(3000), number);
        if random.below(10) == 0 {
            disturb(&mut network, now, &mut random);
        }
        if random.chance(0.5) {
            now = now.plus(random.below(MILLISECOND));
            events.extend(run_until(&mut network, now));
            network.handle_timeout(now);
        }
    }
    events.extend(run(&mut network));
    (events, network)
}

/// Every packet, and every duplicate, arrives or is reported lost with its reason, and the counters say the same, whatever the
/// topology, the links, the traffic and the faults.
#[test]
fn nothing_vanishes() {
    let mut all = Counts::default();
    for seed in 0..2000 {
        let (events, network) = any_run(seed);
        let counts = network.counts();
        assert_eq!(counts.in_flight(), 0, "seed {seed}: {counts:?}");
        let mut ends = vec![0u64; 200];
        let mut seen = Counts { sent: 200, duplicated: counts.duplicated, ..Counts::default() };
        for (_, event) in &events {
            let (packet, count) = match event {
                Event::Room(_) => continue,
                Event::Arrived(packet) => (packet, &mut seen.arrived),
                Event::Lost(packet, Loss::Link(_)) => (packet, &mut seen.lost),
                Event::Lost(packet, Loss::Queue(_)) => (packet, &mut seen.dropped),
                Event::Lost(packet, Loss::LinkDown(_) | Loss::NodeDown(_)) => (packet, &mut seen.down),
                Event::Lost(packet, Loss::Parted) => (packet, &mut seen.parted),
                Event::Lost(packet, Loss::Reset) => (packet, &mut seen.reset),
            };
            *count += 1;
            ends[packet.payload as usize] += 1;
        }
        assert_eq!(seen, counts, "seed {seed}");
        assert!(ends.iter().all(|ends| *ends >= 1), "seed {seed}: a packet has no end");
        assert_eq!(ends.iter().sum::<u64>(), 200 + counts.duplicated, "seed {seed}");
        // What no longer waits is in nobody's backlog.
        let waits: u64 = (0..network.flows.len()).map(|flow| network.backlog(Queue::Flow(FlowId(flow as u32)))).sum();
        let queued: u64 = (0..network.ports.len()).map(|link| network.backlog(Queue::Link(LinkId(link as u32)))).sum();
        assert_eq!((waits, queued), (0, 0), "seed {seed}");
        for (sum, more) in [
            (&mut all.duplicated, counts.duplicated),
            (&mut all.arrived, counts.arrived),
            (&mut all.lost, counts.lost),
            (&mut all.dropped, counts.dropped),
            (&mut all.down, counts.down),
            (&mut all.parted, counts.parted),
            (&mut all.reset, counts.reset),
        ] {
            *sum += more;
        }
    }
    println!("{all:?}");
    let Counts { duplicated, arrived, lost, dropped, down, parted, reset, .. } = all;
    assert!([duplicated, arrived, lost, dropped, down, parted, reset].iter().all(|count| *count > 100), "{all:?}");
}

/// The same seed and calls are the same run, event by event; another seed is another one.
#[test]
fn a_seed_repeats() {
    let mut runs = Vec::new();
    for seed in 0..50 {
        let (one, two) = (any_run(seed).0, any_run(seed).0);
        assert_eq!(one, two, "seed {seed}");
        runs.push(one);
    }
    assert!(runs.windows(2).all(|pair| pair[0] != pair[1]));
}

/// A link without jitter keeps the order, and so does one that is told to, with any jitter. Jitter alone does not.
#[test]
fn order() {
    let sent = |link: Link| {
        let (mut network, _, flow) = wire(link);
        (0..500).for_each(|number| network.send(Time(0), flow, 100, number));
        arrivals(&mut network).into_iter().map(|(_, number)| number).collect::<Vec<i32>>()
    };
    for rate in [0, 1_000_000, 77_000_000_000] {
        let steady = Link { rate, delay: 50, ..Link::default() };
        let jitter = Link { jitter: MILLISECOND, ..steady };
        let in_order: Vec<i32> = (0..500).collect();
        assert_eq!(sent(steady), in_order);
        assert_eq!(sent(Link { in_order: true, ..jitter }), in_order);
        let mut overtaken = sent(jitter);
        assert_ne!(overtaken, in_order);
        overtaken.sort_unstable();
        assert_eq!(overtaken, in_order);
        let late = sent(Link { late: 0.1, late_by: SECOND, ..steady });
        assert!(late != in_order && late.len() == 500);
    }
}

/// No link ever sends more than its rate allows, in any period that begins with a packet, while packets come, rates change and
/// the link is clogged; and a link that always has something to send uses all of its rate.
#[test]
fn rate() {
    for seed in 0..500 {
        let mut random = Random::new(seed);
        let rates = [7, 999_983, 125_000_000, 50_000_000_000];
        let rate = random.pick(&rates);
        let (mut network, link, flow) = wire(Link { rate, ..Link::default() });
        let mut total = 0;
        for number in 0..300 {
            let bytes = 1 + random.below(2000);
            network.send(Time(0), flow, bytes, bytes);
            total += u128::from(bytes);
            assert_eq!(network.backlog(Queue::Link(link)) as u128, total, "{number}");
        }
        let events = arrivals(&mut network);
        let mut sent = 0;
        for (at, bytes) in &events {
            sent += u128::from(*bytes);
            let could = u128::from(rate) * u128::from(*at);
            assert!(sent * 1_000_000_000 <= could, "seed {seed}: {sent} bytes at {at} ns");
            assert!(sent * 1_000_000_000 + u128::from(rate) > could, "seed {seed}: {sent} bytes only at {at} ns");
        }
        assert_eq!((sent, u128::from(network.carried_bytes(link))), (total, total));
    }
}

/// A packet that is being sent when the rate changes, or when the link is clogged, takes as long as what is left of it says.
#[test]
fn changes_within_a_packet() {
    let link = Link { rate: 1000, ..Link::default() };
    let (mut network, id, flow) = wire(link);
    network.send(Time(0), flow, 1000, 'a');
    network.send(Time(0), flow, 1000, 'b');
    // 400 bytes are gone; the other 600 and the next 1000 go twice as fast.
    network.set_link(Time(SECOND / 10 * 4), id, Link { rate: 2000, ..link });
    // In the middle of the second one nothing moves for a second.
    let middle = Time(SECOND / 10 * 7 + SECOND / 4);
    let mut events = run_until(&mut network, middle);
    network.clog(middle, id, middle.plus(SECOND));
    assert_eq!(network.backlog(Queue::Link(id)), 500);
    events.extend(run(&mut network));
    let events: Vec<(u64, char)> = events
        .into_iter()
        .map(|(at, event)| match event {
            Event::Arrived(packet) => (at.0 / MILLISECOND, packet.payload),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(events, [(700, 'a'), (2200, 'b')]);
    // Without a limit what waits leaves at once.
    network.send(Time(3 * SECOND), flow, 1_000_000, 'c');
    network.set_link(Time(4 * SECOND), id, Link::default());
    assert_eq!(arrivals(&mut network), [(4 * SECOND, 'c')]);
}

/// A queue holds what it may, with what is left of the packet that is being sent, and drops the next one; the reason names
/// the link.
#[test]
fn a_full_queue_drops() {
    let (mut network, link, flow) = wire(Link { rate: 1000, queue_bytes: 2500, ..Link::default() });
    network.report_losses(true);
    (0..3).for_each(|number| network.send(Time(0), flow, 1000, number));
    // Half of the first one has left, so there is room for another.
    network.send(Time(SECOND / 2), flow, 1000, 3);
    let events = run(&mut network);
    let lost: Vec<(i32, Loss)> = events
        .iter()
        .filter_map(|(_, event)| match event {
            Event::Lost(packet, loss) => Some((packet.payload, *loss)),
            _ => None,
        })
        .collect();
    assert_eq!(lost, [(2, Loss::Queue(link))]);
    assert_eq!((network.counts().arrived, network.counts().dropped), (3, 1));
}

/// Flows on a fair link have equal shares of what slower flows leave: 10 + 100 + 100 bytes a second over 110. Without `fair` the
/// flow that sends more gets more.
#[test]
fn fair_shares() {
    let run = |fair: bool| {
        let mut topology = Topology::default();
        let [a, b] = [0; 2].map(|_| topology.add_host());
        let switch = topology.add_switch();
        let shared = topology.add_link(switch, b, Link { rate: 110, fair, ..Link::default() });
        // A link of its own for each flow is the flow's own limit.
        let own = [10, 100, 100].map(|rate| topology.add_link(a, switch, Link { rate, ..Link::default() }));
        let mut network = Network::new(topology, 0);
        let flows = own.map(|own| network.flow_along(&[own, shared]));
        for (flow, number) in flows.into_iter().zip(0..) {
            (0..100).for_each(|_| network.send(Time(0), flow, 1, number));
        }
        let mut last = [0; 3];
        arrivals(&mut network).into_iter().for_each(|(at, flow)| last[flow] = at);
        last
    };
    let [slow, one, two] = run(true).map(|at| at as f64 / 1e9);
    assert!((one - 2.0).abs() < 0.05 && (two - 2.0).abs() < 0.05 && (slow - 10.0).abs() < 0.05, "{slow} {one} {two}");

    // Two flows that wait at the link itself: the one with ten times the packets does not delay the other.
    let ends = |fair: bool| {
        let link = Link { rate: 1000, fair, ..Link::default() };
        let (mut network, id, many) = wire(link);
        let few = network.flow_along(&[id]);
        (0..100).for_each(|_| network.send(Time(0), many, 100, "many"));
        (0..10).for_each(|_| network.send(Time(0), few, 100, "few"));
        let last = arrivals(&mut network).into_iter().filter(|(_, name)| *name == "few").map(|(at, _)| at).max();
        last.unwrap() / MILLISECOND
    };
    // All packets but the first go by turns, so ten of the one leave among 20.
    assert!((1900..=2100).contains(&ends(true)), "{}", ends(true));
    assert_eq!(ends(false), 11_000);
}

/// A sender that found no room is told once when there is room: at its socket, or anywhere on its connection's path.
#[test]
fn room() {
    let mut topology = Topology::default();
    let [a, b] = [0; 2].map(|_| topology.add_host());
    let switch = topology.add_switch();
    let own = topology.add_link(a, switch, Link { rate: 1000, ..Link::default() });
    let shared = topology.add_link(switch, b, Link { rate: 500, ..Link::default() });
    let mut network = Network::new(topology, 0);
    let flow = network.flow_along(&[own, shared]);
    assert!(network.has_room(Time(0), Queue::Link(own), 1) && network.has_room(Time(0), Queue::Flow(flow), 1));
    (0..4).for_each(|number| network.send(Time(0), flow, 1000, number));
    assert!(!network.has_room(Time(0), Queue::Link(own), 2001));
    assert!(!network.has_room(Time(0), Queue::Flow(flow), 2001));
    let events: Vec<(u64, Queue)> = run(&mut network)
        .into_iter()
        .filter_map(|(at, event)| match event {
            Event::Room(queue) => Some((at.0 / SECOND, queue)),
            _ => None,
        })
        .collect();
    // The first link has sent two of four after 2 s; the second has after 5 s.
    assert_eq!(events, [(2, Queue::Link(own)), (5, Queue::Flow(flow))]);
    assert_eq!(network.backlog(Queue::Flow(flow)), 0);
}

/// A clogged link lets its queue grow and loses nothing; a stalled host has everything afterwards, in order, with what comes
/// at that very moment last.
#[test]
fn clogs_and_stalls() {
    let (mut network, link, flow) = wire(Link { delay: 10, ..Link::default() });
    network.clog(Time(0), link, Time(100));
    (0..3).for_each(|number| network.send(Time(0), flow, 5, number));
    assert_eq!(network.backlog(Queue::Link(link)), 15);
    // Clogged again before it is over.
    network.clog(Time(50), link, Time(200));
    assert_eq!(arrivals(&mut network), [(210, 0), (210, 1), (210, 2)]);

    let to = network.topology().ends(link)[1];
    network.stall(to, Time(500));
    for (at, number) in [(300, 3), (400, 4), (490, 5)] {
        network.handle_timeout(Time(at));
        network.send(Time(at), flow, 5, number);
    }
    assert_eq!(arrivals(&mut network), [(500, 3), (500, 4), (500, 5)]);
}

/// Parts of a network do not reach each other until they are joined again; a node that is down loses what reaches it; a link
/// that is down what it would send; a blocked flow everything, while others between the same hosts go on.
#[test]
fn what_is_unreachable() {
    let (topology, hosts) = Topology::star(3, Link { delay: 10, ..Link::default() });
    let mut network = Network::new(topology, 0);
    network.report_losses(true);
    let [a, b, c] = [hosts[0], hosts[1], hosts[2]];
    let flow = |network: &mut Network<u8>, from, to| network.flow(from, to).unwrap();
    let (to_b, to_c) = (flow(&mut network, a, b), flow(&mut network, a, c));
    let lost = |network: &mut Network<u8>| -> Vec<Loss> {
        run(network)
            .into_iter()
            .filter_map(|(_, event)| match event {
                Event::Lost(_, loss) => Some(loss),
                _ => None,
            })
            .collect()
    };
    // On its way when the parts lose each other, and after that.
    network.send(Time(0), to_b, 1, 0);
    network.part(b, 1);
    network.send(Time(0), to_b, 1, 0);
    network.send(Time(0), to_c, 1, 0);
    assert_eq!(lost(&mut network), [Loss::Parted; 2]);
    network.part(b, 0);
    network.take_down(b, Time(200));
    network.send(Time(100), to_b, 1, 0);
    assert_eq!(lost(&mut network), [Loss::NodeDown(b)]);
    let from_b = flow(&mut network, b, a);
    network.send(Time(199), from_b, 1, 0);
    network.send(Time(200), from_b, 1, 0);
    assert_eq!(lost(&mut network), [Loss::NodeDown(b)]);
    let [first, second] = network.topology().path(a, b, 0).unwrap()[..] else { panic!("two links") };
    network.set_up(second, false);
    network.send(Time(300), to_b, 1, 0);
    assert_eq!(lost(&mut network), [Loss::LinkDown(second)]);
    network.set_up(second, true);
    network.block(to_b, true);
    network.send(Time(400), to_b, 1, 0);
    let other = network.flow_along(&[first, second]);
    network.send(Time(400), other, 1, 0);
    assert_eq!(lost(&mut network), [Loss::Parted]);
    assert_eq!(network.counts(), Counts { sent: 9, arrived: 3, down: 3, parted: 3, ..Counts::default() });
}

/// A reset loses what a connection has under way, wherever it is, and nothing of what is sent afterwards.
#[test]
fn a_reset() {
    let (mut network, link, flow) = wire(Link { rate: 1000, delay: 5 * SECOND, ..Link::default() });
    // In the air, on the wire, and waiting.
    (0..3).for_each(|number| network.send(Time(0), flow, 1000, number));
    let events = run_until(&mut network, Time(3 * SECOND / 2));
    assert!(events.is_empty());
    network.handle_timeout(Time(3 * SECOND / 2));
    network.reset(flow);
    assert_eq!(network.backlog(Queue::Flow(flow)), 0);
    network.send(Time(3 * SECOND / 2), flow, 1000, 3);
    // What was on the wire takes its time all the same, what waited does not.
    assert_eq!(arrivals(&mut network), [(8 * SECOND, 3)]);
    assert_eq!((network.counts().reset, network.carried_bytes(link)), (3, 3000));
}

/// A host reaches itself, and where there is no path the error names both ends.
#[test]
fn ends() {
    let (mut network, _, flow) = wire(Link::default());
    let Flow { from, to, .. } = network.flows[flow.0 as usize];
    let own = network.flow(from, from).unwrap();
    network.send(Time(3), own, 1, 'x');
    assert_eq!(arrivals(&mut network), [(3, 'x')]);
    let refused = network.flow(to, from).unwrap_err();
    assert_eq!(refused, NoPath { from: to, to: from });
    assert!(refused.to_string().contains("from node 1 to node 0"), "{refused}");
}

/// 4,096 hosts in 64 racks send at once, a hundred packets each, over four links: two million arrivals at links in seconds, and
/// no host waits for another's rack.
#[test]
fn thousands_of_hosts() {
    let access = Link { rate: 125_000_000, delay: 10 * MICROSECOND, ..Link::default() };
    let (topology, hosts) = Topology::racks(64, 64, access, Link { rate: 64 * 125_000_000, ..access });
    let mut network = Network::new(topology, 0);
    for (at, host) in hosts.iter().enumerate() {
        // The host of the same place in the next rack.
        let flow = network.flow(*host, hosts[(at + 64) % hosts.len()]).unwrap();
        (0..100).for_each(|number| network.send(Time(0), flow, 1250, number));
    }
    let mut last = 0;
    let mut arrived = 0;
    while let Some(at) = network.poll_timeout() {
        network.handle_timeout(at);
        while let Some(event) = network.poll_event() {
            assert!(matches!(event, Event::Arrived(_)));
            (last, arrived) = (at.0, arrived + 1);
        }
    }
    assert_eq!((arrived, network.counts().arrived), (409_600, 409_600));
    // 100 packets of 10 us, four delays, and each packet once more at every switch on its way.
    assert!((1_040_000..1_070_000).contains(&last), "{last} ns");
}
