//! Real daemons with workers behind streams beside those of datagrams, without the streams: what these carry is given to the server.

mod cluster;

use cluster::{Branch, Cluster, Job, config, daemon, http};
use penstock_aggregation::{Buffer, Format};
use penstock_node::{Config, Daemon, Done, Role, Streamed, Work};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

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
        let server = cluster.server.as_ref().expect("it lives");
        let buffers: Vec<_> = (0..job.blocks).step_by(7).map(|first| job.buffer_from(first)).collect();
        let calls: Vec<_> = (0..buffers.len())
            .rev()
            .map(|number| {
                let bytes: Vec<u8> = buffers[number].clone().flat_map(|block| job.block(2, block)).collect();
                // The pull comes first, and the last buffer before the first.
                let pulled = pull(server, &format!("77/3/2/{number}"));
                (number, push(server, &format!("77/3/2/{number}/{name}"), turned(&bytes)), pulled)
            })
            .collect();
        cluster.run(&job, |_, _| ());
        for (number, pushed, pulled) in calls {
            assert_eq!(pushed.recv_timeout(WAIT), Ok(Ok(())));
            let found = pulled.recv_timeout(WAIT).expect("an answer");
            if number == 3 {
                assert_eq!(found, Err("the fourth met a full disk".into()));
            } else {
                let expected: Vec<u8> = buffers[number].clone().flat_map(|block| job.expected(block)).collect();
                assert_eq!(found.expect("results"), Arc::new(turned(&expected)), "buffer {number}");
            }
        }
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
