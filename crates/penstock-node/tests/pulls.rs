//! Real daemons, real sockets, and a server that is done later than it accepts: results come apart from the blocks.

mod cluster;

use cluster::{Branch, Cluster, Job, config, job_at, put};
use penstock_aggregation::{Buffer, Format, Key};
use penstock_node::{Config, Daemon, Done, Role, Work};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Racks of two below a row, and buffers of 20 blocks, of which the server holds three.
fn job(format: Format) -> Job {
    let w = Branch::Worker;
    let racks = vec![Branch::Rack(1, vec![w(0), w(1)]), Branch::Rack(2, vec![w(2), w(3)])];
    Job { tree: vec![Branch::Rack(0, racks)], buffers: Some((20, 60 * 1024)), ..Job::star(4, format) }
}

fn aggregators() -> Vec<Config> {
    [2, 1, 4].map(|shards| Config { shards, ..config(Role::Aggregator) }).into()
}

/// Buffers that a test's work holds back.
type Held = Vec<(Buffer, Done)>;

/// What a server does with a buffer, as a test wants it.
struct Doing<F>(F);

impl<F: FnMut(Buffer, Done) + Send> Work for Doing<F> {
    fn take(&mut self, buffer: Buffer, done: Done) {
        self.0(buffer, done);
    }
}

fn server(work: impl FnMut(Buffer, Done) + Send + 'static) -> Daemon {
    Daemon::start_with(config(Role::Server), Box::new(Doing(work))).expect("a daemon on loopback")
}

/// Integers and floats, with a key and without, with loss at every daemon: every worker gets every result once, with the bits of the
/// undisturbed sum, and in the end the server holds nothing.
#[test]
fn sums_that_come_apart() {
    for (format, keyed, drop) in [(Format::I32, false, 0.0), (Format::F32, true, 0.0), (Format::I32, true, 0.05)] {
        let job = Job { key: keyed.then_some(Key([3; 16])), patient: drop == 0.0, ..job(format) };
        let lossy = |config: Config, seed| Config { drop: Some((drop, seed)), ..config };
        let nodes = aggregators().into_iter().zip(1..).map(|(config, seed)| lossy(config, seed)).collect();
        let mut cluster = Cluster::start(lossy(config(Role::Server), 9), nodes, &job);
        cluster.open(&job);
        cluster.run(&job, |cluster, _| {
            let at = job_at(cluster.server_at(), job.number);
            assert!(at["held_bytes"].as_u64() <= at["pending_bytes"].as_u64(), "{at}");
        });
        let at = job_at(cluster.server_at(), job.number);
        assert_eq!(
            (&at["done"], &at["pending_bytes"], &at["committed"]),
            (&"buffer".into(), &(60 * 1024).into(), &300.into())
        );
        assert_eq!(at["unfinished"], 0, "{at}");
        assert!(cluster.failures.is_empty());
        if drop == 0.0 {
            let rack = job_at(cluster.places[1].0, job.number);
            assert!(
                rack["relayed"].as_u64() >= Some(600),
                "each block was accepted, and its result pulled, this way: {rack}"
            );
        }
    }
}

/// The work behind the first buffer ends when all others have; two end in turned order; one fails, one is given up, and one panics. Every
/// worker is told of these, where and why, and gets all other results meanwhile.
#[test]
fn late_turned_and_failing() {
    let kept: Arc<Mutex<Held>> = Arc::default();
    let (keeps, mut count) = (kept.clone(), 0);
    let server = server(move |buffer, done| {
        let number = count;
        count += 1;
        match number {
            0 | 1 => keeps.lock().unwrap().push((buffer, done)),
            2 => {
                let (before, late) = keeps.lock().unwrap().pop().expect("buffer 1");
                done.end(Ok(buffer.bytes));
                late.end(Ok(before.bytes));
            }
            4 => done.end(Err("buffer 4 met a full disk".into())),
            6 => drop(done),
            8 => panic!("buffer 8 is one too many"),
            _ => done.end(Ok(buffer.bytes)),
        }
    });
    let job = Job { buffers: Some((20, 80 * 1024)), ..job(Format::I32) };
    let mut cluster = Cluster::start_with(server, aggregators(), &job);
    cluster.open(&job);
    let all = 4 * 300;
    let mut seen = 0;
    cluster.run(&job, |_, results| {
        seen = results;
        if results == all - 4 * 20 {
            // Everything but the first buffer is here.
            let (buffer, done) = kept.lock().unwrap().pop().expect("buffer 0");
            done.end(Ok(buffer.bytes));
        }
    });
    assert_eq!((seen, kept.lock().unwrap().len()), (all, 0));
    for worker in 0..4 {
        let told = |first: u32, what: &str| {
            let of = cluster.failures.iter().filter(|(who, at, _)| (*who, *at) == (worker, first));
            assert_eq!(
                of.filter(|(_, _, why)| why.contains(what)).count(),
                1,
                "worker {worker}: {:?}",
                cluster.failures
            );
        };
        told(4 * 20, "a full disk");
        told(6 * 20, "given up without a result");
        told(8 * 20, "given up without a result");
    }
    assert_eq!(cluster.failures.len(), 3 * 4);
}

/// While nothing is done, the server accepts what fits into pending_bytes, and no more; then everything goes on.
#[test]
fn credit_stops_at_the_limit() {
    let kept: Arc<Mutex<Option<Held>>> = Arc::new(Mutex::new(Some(Held::new())));
    let keeps = kept.clone();
    let server = server(move |buffer, done| match &mut *keeps.lock().unwrap() {
        Some(kept) => kept.push((buffer, done)),
        None => done.end(Ok(buffer.bytes)),
    });
    let job = job(Format::I32);
    let mut cluster = Cluster::start_with(server, aggregators(), &job);
    cluster.open(&job);
    let at = cluster.server_at();
    let watcher = std::thread::spawn(move || {
        let began = Instant::now();
        let state = loop {
            let state = job_at(at, 77);
            assert!(began.elapsed() < Duration::from_secs(60), "{state}");
            if state["held_bytes"] == state["pending_bytes"] && state["unfinished"] == 3 {
                break state;
            }
        };
        assert_eq!((&state["committed"], &state["held_bytes"]), (&60.into(), &(60 * 1024).into()), "{state}");
        let one_less_than = |a: &serde_json::Value| (a.as_u64().unwrap() as u32).wrapping_sub(1);
        assert_eq!(
            state["credit"].as_u64().unwrap() as u32,
            one_less_than(&state["ack"]),
            "no block may be sent: {state}"
        );
        for (buffer, done) in kept.lock().unwrap().take().expect("it kept them") {
            done.end(Ok(buffer.bytes));
        }
    });
    cluster.run(&job, |_, _| ());
    watcher.join().expect("it has said why");
}

/// A buffer that is longer than the limit fails on all workers, in words that say what to change; those after it do not.
#[test]
fn longer_than_the_limit() {
    let job = Job { buffers: Some((70, 69 * 1024)), ..job(Format::I32) };
    let mut cluster = Cluster::start(config(Role::Server), aggregators(), &job);
    cluster.open(&job);
    cluster.run(&job, |_, _| ());
    // The last buffer has 20 blocks.
    let mut failed: Vec<(usize, u32)> = cluster.failures.iter().map(|(worker, first, _)| (*worker, *first)).collect();
    failed.sort_unstable();
    let expected: Vec<(usize, u32)> =
        (0..4).flat_map(|worker| (0..4).map(move |buffer| (worker, 70 * buffer))).collect();
    assert_eq!(failed, expected);
    let wanted = "more than 69 blocks, and the job was opened with pending_bytes of 70656";
    assert!(cluster.failures.iter().all(|(.., why)| why.contains(wanted)), "{:?}", cluster.failures);
}

/// A rack's aggregator dies between acceptance and pull, and the row's restarts: both are passed by, and every result comes.
#[test]
fn aggregators_die_before_the_pull() {
    let job = Job { patient: false, ..job(Format::F32) };
    let kept: Arc<Mutex<Held>> = Arc::default();
    let keeps = kept.clone();
    // Each buffer is done when the one after it is whole.
    let server = server(move |buffer, done| {
        let before = std::mem::replace(&mut *keeps.lock().unwrap(), vec![(buffer, done)]);
        before.into_iter().for_each(|(buffer, done)| done.end(Ok(buffer.bytes)));
        let mut now = keeps.lock().unwrap();
        if now[0].0.blocks.len() == 20 && now[0].0.first.0 == 0u32.wrapping_sub(100).wrapping_add(280) {
            now.drain(..).for_each(|(buffer, done)| done.end(Ok(buffer.bytes)));
        }
    });
    let mut cluster = Cluster::start_with(server, aggregators(), &job);
    cluster.open(&job);
    let mut deaths = 0;
    cluster.run(&job, |cluster, results| {
        if deaths == 0 && results > 200 {
            deaths = 1;
            cluster.kill(1);
        } else if deaths == 1 && results > 600 {
            deaths = 2;
            cluster.restart(&job, 0);
        }
    });
    assert_eq!(deaths, 2);
}

/// What is no job is refused with the reason, and the default is stated.
#[test]
fn limits_that_cannot_be() {
    let job = job(Format::I32);
    let cluster = Cluster::start(config(Role::Server), aggregators(), &job);
    let body = |done: &str, pending: serde_json::Value| {
        let mut body = serde_json::json!({
            "epoch": 3, "key": null, "window": 16, "block_bytes": 1024, "start": 0, "done": done,
            "tree": [{"worker": 0}], "workers": ["127.0.0.1:9"],
        });
        if !pending.is_null() {
            body["pending_bytes"] = pending;
        }
        body
    };
    for (done, pending, reason) in [
        ("block", 4096.into(), "every block is done when it is accepted"),
        ("buffer", 1023.into(), "room for 0 blocks of 1024"),
        ("buffer", (1u64 << 40).into(), "1 to 16777216 are possible"),
        ("buffer", (1u64 << 34).into(), "smaller pending_bytes"),
        ("never", serde_json::Value::Null, "unknown variant `never`"),
    ] {
        let (status, reply) = put(cluster.server_at(), 5, &body(done, pending));
        assert!((status == 400 || status == 409) && reply.contains(reason), "{status} {reply}");
    }
    let (status, reply) = put(cluster.server_at(), 5, &body("buffer", serde_json::Value::Null));
    assert_eq!(status, 201, "{reply}");
    assert_eq!(job_at(cluster.server_at(), 5)["pending_bytes"], 64 << 20);
}
