//! Real daemons with workers behind streams beside those of datagrams, without the streams: what these carry is given to the server.

mod cluster;

use cluster::{Branch, Cluster, Job, config, daemon, http, job_at, put};
use penstock_aggregation::{Buffer, Format};
use penstock_node::{Config, Daemon, Done, Role, Streamed, Work};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const WAIT: Duration = Duration::from_secs(20);

/// Two workers in a rack, and one behind a stream beside the rack; buffers of 7 blocks, the last of which is shorter, as a stream's are.
fn job(format: Format) -> Job {
    let w = Branch::Worker;
    let tree = vec![Branch::Rack(0, vec![w(0), w(1)]), w(2)];
    Job { tree, buffers: Some((7, 21 * 1024)), exponent: 0, streams: 1, ..Job::star(2, format) }
}

/// Elements of four bytes in the other order.
fn turned(bytes: &[u8]) -> Vec<u8> {
    bytes.chunks(4).flat_map(|element| u32::from_be_bytes(element.try_into().unwrap()).to_ne_bytes()).collect()
}

fn push(daemon: &Daemon, name: &str, bytes: Vec<u8>) -> Receiver<Result<(), String>> {
    let (sender, answer) = channel();
    daemon.stream(name, Streamed::Push(Box::new(bytes), Box::new(move |outcome| drop(sender.send(outcome)))));
    answer
}

fn pull(daemon: &Daemon, name: &str) -> Receiver<Result<Arc<Vec<u8>>, String>> {
    let (sender, answer) = channel();
    daemon.stream(name, Streamed::Pull(Box::new(move |outcome| drop(sender.send(outcome)))));
    answer
}

/// Fails the fourth buffer, and keeps the first until the fifth is done.
#[derive(Default)]
struct Turned {
    count: u32,
    first: Option<(Buffer, Done)>,
}

impl Work for Turned {
    fn take(&mut self, buffer: Buffer, done: Done) {
        self.count += 1;
        match self.count {
            1 => self.first = Some((buffer, done)),
            4 => done.end(Err("the fourth met a full disk".into())),
            _ => done.end(Ok(buffer.bytes)),
        }
        if self.count == 5 {
            let (buffer, done) = self.first.take().expect("kept");
            done.end(Ok(buffer.bytes));
        }
    }
}

/// Pushes and pulls some buffers as worker 2: the pulls come first, and the last buffer before the first.
fn go_through(server: &Daemon, job: &Job, buffers: &[std::ops::Range<u32>], several: &[usize], format: &str) {
    let calls = several.iter().rev().map(|&number| {
        let bytes: Vec<u8> = buffers[number].clone().flat_map(|block| job.block(2, block)).collect();
        let pulled = pull(server, &format!("77/3/2/{number}/{}", several[0]));
        (number, push(server, &format!("77/3/2/{number}/{format}"), turned(&bytes)), pulled)
    });
    for (number, pushed, pulled) in calls.collect::<Vec<_>>() {
        assert_eq!(pushed.recv_timeout(WAIT), Ok(Ok(())));
        let found = pulled.recv_timeout(WAIT).expect("an answer");
        if number == 3 {
            assert_eq!(found, Err("the fourth met a full disk".into()));
        } else {
            let expected: Vec<u8> = buffers[number].clone().flat_map(|block| job.expected(block)).collect();
            assert_eq!(found.expect("results"), Arc::new(turned(&expected)), "buffer {number}");
        }
    }
}

/// Integers and floats, with packets that are lost: a worker behind a stream gets the sums that all get, with the same bits, in whatever
/// order buffers are done, and is told of the one that fails.
#[test]
fn beside_datagrams() {
    for (format, name, drop) in [(Format::I32, "i32", 0.0), (Format::F32, "f32", 0.05)] {
        // What is held back takes places meanwhile.
        let job = Job { patient: drop == 0.0, buffers: Some((7, 60 * 1024)), ..job(format) };
        let lossy = |role, seed| Config { drop: Some((drop, seed)), ..config(role) };
        let server = Daemon::start_with(lossy(Role::Server, 9), Box::new(Turned::default())).expect("a daemon");
        let mut cluster = Cluster::start_with(server, vec![lossy(Role::Aggregator, 1)], &job);
        cluster.open(&job);
        let server = cluster.server.take().expect("it lives");
        let at = server.local_addr();
        let buffers: Vec<_> = (0..job.blocks).step_by(7).map(|first| job.buffer_from(first)).collect();
        let numbers: Vec<_> = (0..buffers.len()).collect();
        std::thread::scope(|scope| {
            // As many at a time as the first is kept for. Pulls let go of those before.
            scope.spawn(|| numbers.chunks(5).for_each(|several| go_through(&server, &job, &buffers, several, name)));
            cluster.run_at(at, &job, |_, _| ());
        });
        assert_eq!(cluster.failures.len(), 2, "{:?}", cluster.failures);
    }
}

/// When an epoch ends, whoever waits hears it; what is no worker behind a stream is refused with the reason.
#[test]
fn ends_and_refusals() {
    let job = job(Format::I32);
    let mut cluster = Cluster::start(config(Role::Server), vec![config(Role::Aggregator)], &job);
    cluster.open(&job);
    let at = cluster.server_at();
    let server = cluster.server.as_ref().expect("it lives");
    let (pushed, pulled) = (push(server, "77/3/2/0/i32", vec![1; 64]), pull(server, "77/3/2/0"));
    let refused =
        |outcome: Receiver<Result<Arc<Vec<u8>>, String>>| outcome.recv_timeout(WAIT).expect("an answer").unwrap_err();
    assert!(refused(pull(server, "77/3/1/0")).contains("worker 1 of job 77 does not push over a stream"));
    assert!(refused(pull(server, "77/4/2/0")).contains("epoch 4 of job 77 is not open here"));
    assert!(refused(pull(server, "78/3/2/0")).contains("job 78 is not open here"));
    assert!(refused(pull(cluster.aggregators[0].as_ref().unwrap(), "77/3/2/0")).contains("this is no server"));
    // The oldest of many that wait for the same goes.
    let many: Vec<_> = (0..64).map(|_| pull(server, "77/3/2/0")).collect();
    assert!(refused(pulled).contains("others have asked"));
    assert_eq!(http(at, "DELETE", "/jobs/77?epoch=3", &[], "").0, 200);
    assert!(pushed.recv_timeout(WAIT).unwrap().unwrap_err().contains("epoch 3 of job 77 is over"));
    assert!(many.into_iter().all(|one| refused(one).contains("is over")));
    // Below a rack nobody could give its blocks to the rack's aggregator.
    let w = Branch::Worker;
    let tree = vec![Branch::Rack(0, vec![w(0), w(2)]), w(1)];
    let wrong = Job { tree, epoch: 4, ..self::job(Format::I32) };
    let opened = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cluster.open(&wrong)));
    let why = *opened.unwrap_err().downcast::<String>().expect("a text");
    assert!(why.contains("worker 2 pushes over a stream, so it stands right below the server"), "{why}");
    cluster.server = Some(daemon(config(Role::Server)));
}

/// Opens a job for workers behind streams alone, where the server keeps 16 KiB for each.
fn open(daemon: &Daemon, workers: usize, changes: &[(&str, Value)]) -> (u16, String) {
    let mut body = json!({
        "epoch": 1, "key": null, "window": 16, "block_bytes": 1024, "floats": true, "start": 0, "names": "children", "done": "buffer",
        "pending_bytes": 16384, "workers": vec!["stream"; workers],
        "tree": (0..workers).map(|worker| json!({ "worker": worker })).collect::<Vec<_>>(),
    });
    changes.iter().for_each(|(name, value)| body[*name] = value.clone());
    put(daemon.local_addr(), 7, &body)
}

fn why<T: std::fmt::Debug>(answer: &Receiver<Result<T, String>>) -> String {
    answer.recv_timeout(WAIT).expect("an answer").unwrap_err()
}

fn done<T: std::fmt::Debug>(answer: &Receiver<Result<T, String>>) -> T {
    answer.recv_timeout(WAIT).expect("an answer").expect("no error")
}

/// A later buffer that takes the room of the one before makes room for that one, and comes again: so buffers in any order end.
#[test]
fn out_of_turn() {
    let server = daemon(config(Role::Server));
    assert_eq!(open(&server, 1, &[]).0, 201);
    let part = |value| vec![value; 10 * 1024];
    let (first, later) = (push(&server, "7/1/0/2/i32", part(2)), push(&server, "7/1/0/1/i32", part(1)));
    assert!(why(&first).contains("buffer 2 has made room for buffer 1"));
    let pulled = pull(&server, "7/1/0/1");
    done(&push(&server, "7/1/0/0/i32", part(0)));
    assert!(why(&later).contains("buffer 1 has made room for buffer 0"));
    assert_eq!(*done(&pull(&server, "7/1/0/0")), part(0));
    assert!(why(&push(&server, "7/1/0/1/i32", part(1))).contains("of at most 16384: pull those that are done"));
    // The pull of buffer 1 has waited through all that.
    let again = pull(&server, "7/1/0/1/1");
    done(&push(&server, "7/1/0/1/i32", part(1)));
    assert_eq!((&*done(&pulled), &*done(&again)), (&part(1), &part(1)));
}

/// Workers whose pushes do not fit together hear that, and what does not fit, in this buffer and those after it; earlier results stay.
#[test]
fn pushes_that_do_not_fit() {
    let server = daemon(config(Role::Server));
    for (epoch, format, bytes, what) in [
        (1, "i32", 64, "has 128 bytes of i32 and ends the buffer"),
        (2, "f32", 128, "has 128 bytes of f32 and ends the buffer"),
        (3, "i32", 2048, "has 1024 bytes of i32, "),
    ] {
        assert_eq!(open(&server, 3, &[("epoch", json!(epoch))]).0, 201);
        let name = |worker, number| format!("7/{epoch}/{worker}/{number}");
        let both = |number, format: &str, bytes| {
            let one = push(&server, &format!("{}/i32", name(0, number)), vec![1; 128]);
            (one, push(&server, &format!("{}/{format}", name(1, number)), vec![1; bytes]))
        };
        let third = |number| push(&server, &format!("{}/i32", name(2, number)), vec![1; 128]);
        let (one, other) = both(0, "i32", 128);
        done(&third(0));
        [one, other].iter().for_each(done);
        let pulls = [pull(&server, &name(0, 1)), pull(&server, &name(1, 2))];
        let (one, other) = both(1, format, bytes);
        let told = [why(&one), why(&other), why(&pulls[0]), why(&pulls[1])];
        // It pushes when the others were told long ago.
        let told = told.into_iter().chain([why(&third(1))]);
        let (one, other) = both(2, "i32", 128);
        for told in told.chain([why(&one), why(&other), why(&pull(&server, &name(0, 1)))]) {
            assert!(
                told.contains("block 0 of buffer 1") && told.contains("all workers must push a buffer alike"),
                "{told}"
            );
            assert!(told.contains(what) || told.contains("has 128 bytes of i32"), "{told}");
        }
        assert_eq!(done(&pull(&server, &name(0, 0))).len(), 128);
    }
}

/// A server that is to end waits until workers behind streams have what they have pushed for.
#[test]
fn ends_after_the_last_pull() {
    let server = daemon(config(Role::Server));
    assert_eq!(open(&server, 2, &[]).0, 201);
    let pushes = [push(&server, "7/1/0/0/i32", vec![1; 64]), push(&server, "7/1/1/0/i32", vec![1; 64])];
    pushes.iter().for_each(done);
    assert_eq!(done(&pull(&server, "7/1/0/0")).len(), 64);
    let held = || job_at(server.local_addr(), 7)["held_bytes"].as_u64();
    let start = Instant::now();
    while held() != Some(0) {
        assert!(start.elapsed() < WAIT, "it holds results that its own part of both workers has");
    }
    server.drain();
    assert!(!server.wait(Duration::from_millis(300)), "worker 1 has not pulled");
    assert_eq!(done(&pull(&server, "7/1/1/0")).len(), 64);
    assert!(server.wait(Duration::from_secs(5)), "all have all");
}

/// A push that is repeated with other contents is refused, before and after its buffer is done; with the same it has ended.
#[test]
fn repeated_with_other_contents() {
    let server = daemon(config(Role::Server));
    assert_eq!(open(&server, 2, &[]).0, 201);
    let first = push(&server, "7/1/0/0/i32", vec![1; 64]);
    assert!(why(&push(&server, "7/1/0/0/i32", vec![2; 64])).contains("with other contents"));
    done(&push(&server, "7/1/1/0/i32", vec![2; 64]));
    done(&first);
    assert_eq!(*done(&pull(&server, "7/1/0/0")), vec![3; 64]);
    assert!(why(&push(&server, "7/1/0/0/i32", vec![2; 64])).contains("open a new epoch to push other gradients"));
    done(&push(&server, "7/1/0/0/i32", vec![1; 64]));
}

/// Smaller pending_bytes make room for many workers behind streams.
#[test]
fn room_for_many() {
    let server = daemon(config(Role::Server));
    let (status, why) = open(&server, 32, &[("pending_bytes", json!(64 << 20))]);
    assert!(status == 409 && why.contains("smaller pending_bytes"), "{why}");
    assert_eq!(open(&server, 32, &[("pending_bytes", json!(1 << 20))]).0, 201);
}

/// A job whose workers all wait is not silent, but for ten times as long; then they hear what to do.
#[test]
fn silent_but_waiting() {
    let forget_after = Duration::from_millis(300);
    let server = daemon(Config { forget_after, ..config(Role::Server) });
    assert_eq!(open(&server, 2, &[]).0, 201);
    let start = Instant::now();
    let told = why(&pull(&server, "7/1/0/0"));
    assert!(told.contains("nothing was asked for") && told.contains("raise --forget-after"), "{told}");
    assert!(start.elapsed() >= 5 * forget_after, "{:?}", start.elapsed());
}

/// Whoever waits when the server ends hears that.
#[test]
fn the_server_ends() {
    let server = daemon(config(Role::Server));
    assert_eq!(open(&server, 2, &[]).0, 201);
    let answers = [pull(&server, "7/1/0/0"), pull(&server, "7/1/1/3")];
    let pushed = push(&server, "7/1/0/0/i32", vec![1; 64]);
    drop(server);
    for told in [why(&pushed), why(&answers[0]), why(&answers[1])] {
        assert!(told.contains("the server has ended: connect to the next one"), "{told}");
    }
}
