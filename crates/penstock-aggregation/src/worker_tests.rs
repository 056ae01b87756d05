use super::*;
use penstock_types::{MILLISECOND, SECOND};
use proptest::prelude::*;
use std::collections::BTreeSet;

const PARENT: Endpoint = Endpoint(1);
const SERVER: Endpoint = Endpoint(2);

fn worker(window: u32) -> Worker {
    let config = WorkerConfig {
        job: 5,
        epoch: 3,
        key: None,
        name: 0b10,
        window,
        start: Serial(u32::MAX - 1),
        parent: PARENT,
        server: SERVER,
        ask_parent: true,
        full_to_parent: false,
        apart: false,
        timing: Timing::default(),
    };
    Worker::new(Time(0), config)
}

/// SeqNums counted from the start.
fn seq(n: u32) -> Serial {
    Serial(u32::MAX - 1).plus(n)
}

fn down(kind: Kind, n: u32, ack: u32, credit: u32, workers: u64) -> Vec<u8> {
    let format = if kind == Kind::Result { Format::I32 } else { Format::None };
    let (ack, credit) = (seq(ack), seq(credit));
    let header = Header { kind, job: 5, epoch: 3, format, flags: 0, seq: seq(n), ack, credit, exponent: 0, workers };
    let block: &[u8] = if kind == Kind::Result { &[0, 0, 0, 1] } else { &[] };
    [&header.encode(block, None)[..], block].concat()
}

fn sent(worker: &mut Worker, now: Time) -> Vec<(Endpoint, Kind, Serial)> {
    std::iter::from_fn(|| worker.poll_transmit(now)).map(|out| (out.to, out.header.kind, out.header.seq)).collect()
}

/// Lets time pass until something is sent.
fn wait(worker: &mut Worker, until: Time) -> (Time, Vec<(Endpoint, Kind, Serial)>) {
    loop {
        let now = worker.poll_timeout();
        if now > until {
            return (until, Vec::new());
        }
        worker.handle_timeout(now);
        let packets: Vec<_> = sent(worker, now).into_iter().filter(|(_, kind, _)| *kind != Kind::HeartbeatUp).collect();
        if !packets.is_empty() {
            return (now, packets);
        }
    }
}

/// A window leaves at once, no more; results move the window when Credit says so; each is delivered once.
#[test]
fn window_and_credit() {
    let mut worker = worker(2);
    for n in 0..4 {
        assert_eq!(worker.post(Route::Tree), Some(seq(n)));
    }
    assert_eq!(worker.post(Route::Tree), None, "two windows are posted");
    let push = |n| (PARENT, Kind::Push, seq(n));
    assert_eq!(sent(&mut worker, Time(0)), [push(0), push(1)]);
    let now = Time(MILLISECOND);
    let second = down(Kind::Result, 1, 0, 1, 0);
    assert!(matches!(worker.handle_packet(now, PARENT, &second), Ok(Received::Result { .. })));
    assert_eq!(worker.handle_packet(now, PARENT, &second), Err(Refusal::Duplicate));
    assert_eq!(worker.received(), seq(0));
    assert!(matches!(worker.handle_packet(now, SERVER, &down(Kind::Result, 0, 2, 1, 0)), Ok(Received::Result { .. })));
    assert_eq!(worker.received(), seq(2));
    assert_eq!(worker.handle_packet(now, PARENT, &second), Err(Refusal::Stale));
    let pushes =
        |packets: Vec<(Endpoint, Kind, Serial)>| packets.into_iter().filter(|p| p.1 == Kind::Push).collect::<Vec<_>>();
    assert_eq!(pushes(sent(&mut worker, now)), [], "no Credit yet");
    assert_eq!(worker.handle_packet(now, PARENT, &down(Kind::HeartbeatDown, 0, 2, 2, 0)), Ok(Received::Control));
    assert_eq!(pushes(sent(&mut worker, now)), [push(2)]);
    assert_eq!(worker.handle_packet(now, PARENT, &down(Kind::HeartbeatDown, 0, 0, 1, 0)), Ok(Received::Control));
    assert_eq!(worker.handle_packet(now, PARENT, &down(Kind::Result, 3, 2, 2, 0)), Err(Refusal::Credit), "never sent");
    assert_eq!(worker.handle_packet(now, PARENT, &down(Kind::HeartbeatDown, 0, 4, 5, 0)), Err(Refusal::Ack));
    assert_eq!(worker.handle_packet(now, Endpoint(7), &second), Err(Refusal::Sender));
}

/// While blocks are held none leaves for the first time, and those that are late do again.
#[test]
fn held() {
    let mut worker = worker(2);
    (0..2).for_each(|n| assert_eq!(worker.post(Route::Tree), Some(seq(n))));
    let until = Time(SECOND);
    worker.hold(until);
    assert_eq!(sent(&mut worker, Time(0)), []);
    worker.hold(Time(0));
    assert!(worker.poll_transmit(Time(0)).is_some());
    worker.hold(until);
    let (late, packets) = wait(&mut worker, Time(SECOND - 1));
    assert!(late < until && packets.iter().all(|(_, _, which)| *which == seq(0)) && !packets.is_empty(), "{packets:?}");
    assert!(sent(&mut worker, until).contains(&(PARENT, Kind::Push, seq(1))));
}

/// What is late is asked for after milliseconds, then sent again as well; what the server has is only asked for.
#[test]
fn time_outs() {
    let mut worker = worker(1);
    // The second waits for Credit, so there is more to come.
    (0..2).for_each(|n| assert_eq!(worker.post(Route::Tree), Some(seq(n))));
    sent(&mut worker, Time(0));
    let again = [(PARENT, Kind::Push, seq(0)), (PARENT, Kind::Request, seq(0))];
    let (first, packets) = wait(&mut worker, Time(SECOND));
    assert_eq!(packets, again[1..], "the aggregator may have it");
    assert!((100 * MILLISECOND..150 * MILLISECOND).contains(&first.0), "{first:?}");
    let (second, packets) = wait(&mut worker, Time(SECOND));
    assert_eq!(packets, again);
    assert!(second.since(first) >= 100 * MILLISECOND, "{second:?}");
    assert!(worker.handle_packet(second, PARENT, &down(Kind::HeartbeatDown, 0, 1, 0, 0)).is_ok());
    let (third, packets) = wait(&mut worker, Time(SECOND));
    assert_eq!(packets, [(PARENT, Kind::Request, seq(0))]);
    assert!(third.since(second) < 5 * MILLISECOND, "a result that is missed is asked for soon: {third:?}");
}

/// A result that three later ones overtake is asked for: at once if it exists, and else when the server has had a round
/// trip's time to name who is missing.
#[test]
fn overtaken() {
    let mut worker = worker(8);
    (0..10).for_each(|n| assert_eq!(worker.post(Route::Tree), Some(seq(n))));
    sent(&mut worker, Time(0));
    let now = Time(MILLISECOND);
    for n in 1..=3 {
        worker.handle_packet(now, PARENT, &down(Kind::Result, n, 0, 7, 0)).unwrap();
    }
    let (at, packets) = wait(&mut worker, Time(SECOND));
    assert_eq!(packets, [(PARENT, Kind::Request, seq(0))]);
    assert!((MILLISECOND..2 * MILLISECOND).contains(&at.since(now)), "{at:?}");
    let mut worker = self::worker(8);
    (0..10).for_each(|n| assert_eq!(worker.post(Route::Tree), Some(seq(n))));
    sent(&mut worker, Time(0));
    for n in 1..=3 {
        worker.handle_packet(now, PARENT, &down(Kind::Result, n, 1, 7, 0)).unwrap();
    }
    let (at, packets) = wait(&mut worker, Time(SECOND));
    assert_eq!((at, packets), (now, vec![(PARENT, Kind::Request, seq(0))]));
}

/// A result that the server has is asked for again after what an answer takes, doubled each time, not after what a push takes;
/// the aggregator a few times, then the server.
#[test]
fn a_question_has_its_own_clock() {
    let mut worker = worker(4);
    (0..6).for_each(|n| assert_eq!(worker.post(Route::Tree), Some(seq(n))));
    sent(&mut worker, Time(0));
    let at = |ms: u64| Time(ms * MILLISECOND);
    let ask = |to, n| vec![(to, Kind::Request, seq(n))];
    // A round trip takes 50 ms. Then the server has block 1, and its result does not come.
    for n in [0, 3] {
        worker.handle_packet(at(50), PARENT, &down(Kind::Result, n, 1, 3, 0)).unwrap();
    }
    worker.handle_packet(at(50), PARENT, &down(Kind::HeartbeatDown, 0, 2, 3, 0)).unwrap();
    let (asked, packets) = wait(&mut worker, at(1000));
    assert_eq!(packets, ask(PARENT, 1));
    // The answer takes 4 ms, its variation is half of that: 12 ms are enough from now on.
    worker.handle_packet(asked.plus(4 * MILLISECOND), PARENT, &down(Kind::Result, 1, 2, 3, 0)).unwrap();
    worker.handle_packet(asked.plus(4 * MILLISECOND), PARENT, &down(Kind::HeartbeatDown, 0, 4, 3, 0)).unwrap();
    let times: [Time; 4] = [PARENT, PARENT, PARENT, SERVER].map(|to| {
        let (now, packets) = wait(&mut worker, at(1000));
        assert_eq!(packets, ask(to, 2));
        now
    });
    assert_eq!(times[1].since(times[0]), 12 * MILLISECOND);
    assert_eq!(times[2].since(times[1]), 24 * MILLISECOND);
}

/// While nothing is left to push, nothing overtakes what is lost: after a silence the first results that have not come are asked for,
/// and again after twice that time. The next result, or the next block that leaves, ends the silence.
#[test]
fn silence() {
    let mut worker = worker(8);
    (0..6).for_each(|n| assert_eq!(worker.post(Route::Tree), Some(seq(n))));
    sent(&mut worker, Time(0));
    let ms = |at: u64| Time(at * MILLISECOND);
    let asks = |to, numbers: &[u32]| numbers.iter().map(|n| (to, Kind::Request, seq(*n))).collect::<Vec<_>>();
    assert_eq!(wait(&mut worker, Time(SECOND)), (ms(10), asks(PARENT, &[0, 1, 2, 3])));
    assert_eq!(wait(&mut worker, Time(SECOND)), (ms(30), asks(PARENT, &[0, 1, 2, 3])));
    worker.handle_packet(ms(35), PARENT, &down(Kind::Result, 1, 0, 7, 0)).unwrap();
    assert_eq!(wait(&mut worker, Time(SECOND)), (ms(45), asks(PARENT, &[0, 2, 3, 4])));
    let late = down(Kind::Result, 0, 0, 7, 0);
    worker.handle_packet(ms(50), PARENT, &late).unwrap();
    assert_eq!(worker.post(Route::Tree), Some(seq(6)));
    assert_eq!(sent(&mut worker, ms(55))[0], (PARENT, Kind::Push, seq(6)));
    let (at, _) = wait(&mut worker, Time(SECOND));
    assert_eq!(at, ms(65), "the silence begins with the last block");
    for n in 2..7 {
        worker.handle_packet(ms(66), PARENT, &down(Kind::Result, n, 0, 7, 0)).unwrap();
    }
    sent(&mut worker, ms(66));
    assert_eq!(wait(&mut worker, Time(SECOND)).1, [], "all is here");
}

/// What is here is told in short intervals until Credit says that all have it: an operation ends with that.
#[test]
fn until_all_have_all() {
    let mut worker = worker(2);
    worker.post(Route::Tree);
    sent(&mut worker, Time(0));
    worker.handle_packet(Time(0), PARENT, &down(Kind::Result, 0, 1, 1, 0)).unwrap();
    let beat = |worker: &mut Worker| {
        loop {
            let now = worker.poll_timeout();
            worker.handle_timeout(now);
            if sent(worker, now).iter().any(|(_, kind, _)| *kind == Kind::HeartbeatUp) {
                break now.0 / MILLISECOND;
            }
        }
    };
    sent(&mut worker, Time(0));
    assert_eq!([(); 5].map(|()| beat(&mut worker)), [2, 4, 8, 16, 32]);
    let now = worker.poll_timeout();
    worker.handle_packet(now, PARENT, &down(Kind::HeartbeatDown, 0, 1, 2, 0)).unwrap();
    let (before, after) = (beat(&mut worker), beat(&mut worker));
    assert_eq!(after - before, 100, "an idle interval");
}

/// A loss counts once in the congestion window, however many ask for the block, and the last blocks that have left may not be lost.
#[test]
fn a_loss_counts_once() {
    let mut worker = worker(64);
    (0..64).for_each(|n| assert_eq!(worker.post(Route::Tree), Some(seq(n))));
    sent(&mut worker, Time(0));
    let window = worker.congestion_window();
    let name = |worker: &mut Worker, n| {
        worker.handle_packet(Time(0), PARENT, &down(Kind::Missing, n, 0, 63, 0b10)).unwrap();
    };
    (0..8).for_each(|_| name(&mut worker, 0));
    assert_eq!(worker.congestion_window(), window, "one push of eight");
    (1..8).for_each(|n| name(&mut worker, n));
    assert_eq!(worker.congestion_window(), window, "five of eight, and three that may be on their way");
}

/// Results that do not come, though the server has their blocks, count as lost pushes do, once each: where a link is full of results,
/// they are lost in the queue before it, and no push is missed.
#[test]
fn lost_results_count() {
    let mut worker = worker(64);
    (0..64).for_each(|n| assert_eq!(worker.post(Route::Tree), Some(seq(n))));
    sent(&mut worker, Time(0));
    // The server has the blocks before `ack`; their results are requested, and do not come. The windows before and after.
    let miss = |worker: &mut Worker, ack, until| {
        worker.handle_packet(Time(0), PARENT, &down(Kind::HeartbeatDown, 0, ack, 63, 0)).unwrap();
        let before = worker.congestion_window();
        while worker.poll_timeout() < Time(until) {
            let now = worker.poll_timeout();
            worker.handle_timeout(now);
        }
        (before, worker.congestion_window())
    };
    let (before, after) = miss(&mut worker, 1, SECOND);
    assert_eq!(before, after, "one of eight");
    let (before, after) = miss(&mut worker, 8, 2 * SECOND);
    assert_eq!(before / 2, after, "all eight");
}

/// Whose block is missing sends it again at once; the others wait. Nobody is to send straight because of it.
#[test]
fn missing() {
    let mut worker = worker(2);
    (0..2).for_each(|n| assert_eq!(worker.post(Route::Tree), Some(seq(n))));
    sent(&mut worker, Time(0));
    let now = Time(MILLISECOND);
    let mut named = |n, workers| {
        worker.handle_packet(now, PARENT, &down(Kind::Missing, n, 0, 1, workers)).unwrap();
        assert!(!worker.is_direct());
        sent(&mut worker, now)
    };
    assert_eq!(named(1, 0b101), []);
    assert_eq!(named(1, 0b010), [(PARENT, Kind::Push, seq(1))]);
    assert_eq!(named(3, 0b010), [], "was never sent");
}

/// A server that names a block every millisecond for two seconds gets it three times at once, and then at intervals that double, up
/// to the longest time-out.
#[test]
fn named_again_and_again() {
    let mut worker = worker(2);
    worker.post(Route::Tree);
    sent(&mut worker, Time(0));
    let mut pushed_ms: Vec<u64> = Vec::new();
    for ms in 1..2000 {
        let now = Time(ms * MILLISECOND);
        worker.handle_packet(now, SERVER, &down(Kind::Missing, 0, 0, 1, 0b10)).unwrap();
        pushed_ms.extend(sent(&mut worker, now).iter().map(|_| ms));
    }
    let gaps: Vec<u64> = pushed_ms.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(pushed_ms[0], 1, "at once");
    assert_eq!(gaps, [1, 1, 2, 3, 5, 10, 20, 40, 80, 160, 320, 500, 500]);
}

/// What an aggregator says by itself does not hide that the server is dead, and takes no number of other workers for the server's.
#[test]
fn an_aggregator_is_not_the_server() {
    let mut worker = worker(2);
    worker.post(Route::Tree);
    sent(&mut worker, Time(0));
    let at = |ms: u64| Time(ms * MILLISECOND);
    for ms in (0..5000).step_by(250) {
        assert_eq!(worker.server_is_lost(at(ms)), ms > 4000);
        // Ack and Credit of a worker that lies.
        worker.handle_packet(at(ms), PARENT, &down(Kind::Missing, 0, 1, 100, 0b1)).unwrap();
    }
    assert_eq!(worker.everywhere(), seq(0));
    assert_eq!(worker.handle_packet(at(5000), PARENT, &down(Kind::HeartbeatDown, 0, 0, 2, 0)), Err(Refusal::Credit));
    assert_eq!(worker.handle_packet(at(5000), PARENT, &down(Kind::HeartbeatDown, 0, 0, 1, 0)), Ok(Received::Control));
    assert!(!worker.server_is_lost(at(5100)));
    // Only the server itself sends a worker past the aggregator.
    worker.handle_packet(at(5100), PARENT, &down(Kind::Result, 0, 0, 1, crate::path::state(1, true))).unwrap();
    assert!(!worker.is_direct());
    worker.handle_packet(at(5100), SERVER, &down(Kind::HeartbeatDown, 0, 0, 1, crate::path::state(1, true))).unwrap();
    assert!(worker.is_direct());
}

/// An aggregator that falls silent is reported to the server, which decides; blocks then go straight, and back.
#[test]
fn a_lost_path() {
    let mut worker = worker(2);
    worker.post(Route::Tree);
    sent(&mut worker, Time(0));
    let mut now;
    let lost = loop {
        now = worker.poll_timeout();
        worker.handle_timeout(now);
        let out: Vec<Outbound> = std::iter::from_fn(|| worker.poll_transmit(now)).collect();
        assert!(out.iter().all(|out| out.header.kind != Kind::Push || out.to == PARENT), "the server has not said so");
        if let Some(beat) = out.iter().find(|out| out.header.kind == Kind::HeartbeatUp && out.to == SERVER) {
            break beat.header.flags;
        }
    };
    assert_eq!(lost, FLAG_LOST);
    assert!((350 * MILLISECOND..400 * MILLISECOND).contains(&now.0), "{now:?}");
    let state = crate::path::state;
    worker.handle_packet(now, SERVER, &down(Kind::HeartbeatDown, 0, 0, 1, state(1, true))).unwrap();
    assert!(worker.is_direct());
    let (_, packets) = wait(&mut worker, Time(SECOND));
    assert_eq!(packets, [(SERVER, Kind::Push, seq(0)), (SERVER, Kind::Request, seq(0))]);
    // The aggregator is back: it relays a heartbeat, and the server takes the worker's word for it.
    worker.handle_packet(now, PARENT, &down(Kind::HeartbeatDown, 0, 0, 1, state(1, false))).unwrap();
    assert!(worker.is_direct());
    now = worker.poll_timeout().plus(2 * MILLISECOND);
    worker.handle_timeout(now);
    let beat =
        std::iter::from_fn(|| worker.poll_transmit(now)).find(|out| out.header.kind == Kind::HeartbeatUp).unwrap();
    assert_eq!((beat.to, beat.header.flags), (SERVER, 0));
    worker.handle_packet(now, PARENT, &down(Kind::HeartbeatDown, 0, 0, 1, state(2, false))).unwrap();
    assert!(!worker.is_direct());
    assert!(!worker.server_is_lost(now));
    assert!(worker.server_is_lost(now.plus(5 * SECOND)));
}

/// Nothing moves, whichever way blocks go, and packets come down both ways. A path that is back is blamed again only after it has had
/// its time: a second, after one and two seconds without trust.
#[test]
fn a_path_that_is_back() {
    let mut worker = worker(2);
    worker.post(Route::Tree);
    let (mut blamed, mut number) = (Vec::new(), 0);
    for now in (0..8 * SECOND).step_by(10 * MILLISECOND as usize).map(Time) {
        // The server follows what the worker says.
        number += u32::from(worker.lost != worker.is_direct());
        let beat = |is_bypass| down(Kind::HeartbeatDown, 0, 0, 1, crate::path::state(number, is_bypass));
        if worker.lost {
            worker.handle_packet(now, SERVER, &beat(true)).unwrap();
        }
        worker.handle_packet(now, PARENT, &beat(false)).unwrap();
        assert_eq!(worker.is_direct(), worker.lost);
        let before = worker.stalls();
        worker.handle_timeout(now);
        sent(&mut worker, now);
        if worker.stalls() != before {
            blamed.push(now.0 / MILLISECOND);
        }
    }
    let [first, second, third] = blamed[..] else { panic!("{blamed:?}") };
    assert!((1000..1100).contains(&first) && (2000..2200).contains(&(second - first)), "{blamed:?}");
    assert!((3000..3200).contains(&(third - second)), "{blamed:?}");
}

/// An aggregator loses one of this worker's blocks whenever it comes, while another worker's block is missing, too, and is waited for:
/// the path is blamed, though this worker hears all the time that it is to wait.
#[test]
fn a_block_that_never_arrives_while_another_worker_is_waited_for() {
    let mut worker = worker(4);
    let posted = [Route::Tree; 3].map(|route| worker.post(route));
    assert_eq!((posted[2], sent(&mut worker, Time(0)).len()), (Some(seq(2)), 3));
    let (mut now, mut pushes) = (Time(0), 0);
    while worker.stalls() == 0 && now < Time(20 * SECOND) {
        now = now.plus(50 * MILLISECOND);
        // A heartbeat of the server has come through.
        let alive = down(Kind::HeartbeatDown, 0, 0, 3, 0);
        assert_eq!(worker.handle_packet(now, PARENT, &alive), Ok(Received::Control));
        for (n, workers) in [(1, 2), (2, 1)] {
            let missing = down(Kind::Missing, n, 0, 3, workers);
            assert_eq!(worker.handle_packet(now, SERVER, &missing), Ok(Received::Control));
        }
        worker.handle_timeout(now);
        pushes += sent(&mut worker, now).iter().filter(|packet| **packet == (PARENT, Kind::Push, seq(1))).count();
    }
    assert!((1..3).contains(&(now.0 / SECOND)), "{now:?}, {pushes} pushes");
    assert!(pushes >= 8, "{pushes}");
    assert!(worker.lost, "the server is told");
}

/// All results are here, and what goes up through the aggregator is lost, while packets come down: the server hears this worker's Ack
/// past the aggregator within a second and a little. The worker does not say that its path is lost; it does so until Credit says that
/// all workers have all results.
#[test]
fn a_path_on_which_only_acks_are_lost() {
    let mut worker = worker(4);
    worker.post(Route::Tree);
    sent(&mut worker, Time(0));
    worker.handle_packet(Time(0), PARENT, &down(Kind::Result, 0, 1, 3, 0)).unwrap();
    let mut beats = Vec::new();
    let mut last = (0, 3);
    for credit in [3, 4] {
        let until = Time(last.0).plus(3 * SECOND);
        while let now = worker.poll_timeout()
            && now < until
        {
            worker.handle_packet(now, PARENT, &down(Kind::HeartbeatDown, 0, 1, credit, 0)).unwrap();
            worker.handle_timeout(now);
            for out in std::iter::from_fn(|| worker.poll_transmit(now)) {
                assert_eq!((out.header.kind, out.header.flags, out.header.ack), (Kind::HeartbeatUp, 0, seq(1)));
                beats.push((credit, now, out.to));
            }
        }
        last = (until.0, credit);
    }
    let past: Vec<_> = beats.iter().filter(|(_, _, to)| *to == SERVER).collect();
    assert!((SECOND..SECOND + 300 * MILLISECOND).contains(&past[0].1.0), "{past:?}");
    assert!(past.len() > 5 && past.iter().all(|(credit, ..)| *credit == 3), "{past:?}");
    let not_past = beats.iter().filter(|(_, at, to)| *to == PARENT && *at > past[0].1 && at.0 < 3 * SECOND);
    assert!(not_past.count() > 5, "every second one goes through the aggregator, which may work");
}

/// Blocks that are not finite say so, and go past an aggregator that does not add floats.
#[test]
fn full_blocks() {
    for (full_to_parent, to) in [(false, SERVER), (true, PARENT)] {
        let mut worker = worker(2);
        worker.config.full_to_parent = full_to_parent;
        worker.post(Route::Full);
        let out = worker.poll_transmit(Time(0)).unwrap();
        assert_eq!((out.to, out.header.flags), (to, FLAG_FULL));
    }
}

proptest! {
    /// Whatever comes from server and aggregator, and whenever: no panic, at most two windows are pushed beyond what came back,
    /// and each result is taken once and only of what was pushed.
    #[test]
    fn sequences(steps in proptest::collection::vec(
        (0u32..4, 0usize..8, 0u32..9, 0u32..9, 0u32..12, any::<(u64, u8, u8)>(), 0u64..200), 0..120,
    )) {
        const KINDS: [Kind; 6] =
            [Kind::Push, Kind::Result, Kind::HeartbeatUp, Kind::HeartbeatDown, Kind::Request, Kind::Missing];
        let mut worker = worker(4);
        let (mut pushed, mut taken) = (BTreeSet::new(), BTreeSet::new());
        let mut now = Time(0);
        for (from, kind, n, ack, credit, (workers, at, flip), later) in steps {
            worker.post(Route::Tree);
            let out = std::iter::from_fn(|| worker.poll_transmit(now)).take(1000);
            let mut count = 0;
            for out in out.inspect(|_| count += 1) {
                if out.header.kind == Kind::Push {
                    pushed.insert(out.header.seq.0);
                }
            }
            prop_assert!(count < 1000, "it never stops sending");
            prop_assert!(pushed.len() - taken.len() <= 2 * 4, "{} pushed, {} taken", pushed.len(), taken.len());
            // The last two kinds are of no use to a packet: noise in a result.
            let mut bytes = down(KINDS[if kind < 6 { kind } else { 1 }], n, ack, credit, workers);
            if kind >= 6 {
                let at = usize::from(at) % bytes.len();
                bytes[at] ^= flip;
            }
            let from = [PARENT, SERVER, PARENT, Endpoint(7)][from as usize];
            if let Ok(Received::Result { seq, .. }) = worker.handle_packet(now, from, &bytes) {
                prop_assert!(pushed.contains(&seq.0), "{seq:?} was never pushed");
                prop_assert!(taken.insert(seq.0), "{seq:?} comes twice");
            }
            now = now.plus(later * MILLISECOND);
            worker.handle_timeout(now);
        }
    }
}
