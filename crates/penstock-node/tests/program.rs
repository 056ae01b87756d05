//! The program itself: it says where it listens, serves, and ends on signals.

mod cluster;

use cluster::{get, put};
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_penstock-node"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in ["PENSTOCK_SECRET", "PENSTOCK_SECRET_FILE", "PENSTOCK_LOG"] {
        command.env_remove(name);
    }
    command
}

/// Starts it on a free port, and reads from its log which.
fn start(arguments: &[&str]) -> (Child, SocketAddr, BufReader<std::process::ChildStderr>) {
    let mut child = program(arguments).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains(" on 127.0.0.1:") {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0, "it ended: {:?}", child.wait());
    }
    let port: String = line.split("127.0.0.1:").nth(1).unwrap().chars().take_while(char::is_ascii_digit).collect();
    (child, SocketAddr::from(([127, 0, 0, 1], port.parse().unwrap())), log)
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).unwrap();
}

fn failed(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = program(arguments).output().unwrap();
    assert!(!status.success(), "{arguments:?}");
    String::from_utf8(stderr).unwrap()
}

/// SIGTERM and SIGINT end a daemon without work at once, with success.
#[test]
fn signals_end_it() {
    for (verb, with) in [("aggregator", rustix::process::Signal::TERM), ("server", rustix::process::Signal::INT)] {
        let (mut child, at, _log) = start(&[verb, "--listen", "127.0.0.1:0"]);
        assert_eq!(get(at, "/")["role"], verb);
        let asked = Instant::now();
        signal(&child, with);
        assert!(child.wait().unwrap().success());
        assert!(asked.elapsed() < Duration::from_secs(8), "long before --drain-timeout");
    }
}

/// A second signal ends it although a sum is half done.
#[test]
fn a_second_signal_is_at_once() {
    let (mut child, at, mut log) = start(&["server", "--listen", "127.0.0.1:0", "--drain-timeout", "1000"]);
    let mut worker = penstock_net::datagrams::Datagrams::bind(cluster::ANY, true, 1 << 16).unwrap();
    let body = json!({
        "epoch": 1, "key": null, "window": 2, "block_bytes": 8, "start": 0, "tree": [{ "worker": 0 }, { "worker": 1 }],
        "workers": [worker.local_addr().to_string(), "127.0.0.1:9"],
    });
    assert_eq!(put(at, 7, &body).0, 201);
    use penstock_aggregation::{Format, Header, Kind, Serial};
    let (seq, ack, credit, workers) = (Serial(0), Serial(0), Serial(1), 1);
    let header = Header {
        kind: Kind::Push,
        job: 7,
        epoch: 1,
        format: Format::I32,
        flags: 0,
        seq,
        ack,
        credit,
        exponent: 0,
        workers,
    };
    worker.queue(at, &header.encode(&[0; 8], None), &[0; 8]);
    worker.flush().unwrap();
    let start = Instant::now();
    while cluster::job_at(at, 7)["waiting_slots"] != 1 {
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    signal(&child, rustix::process::Signal::TERM);
    let mut line = String::new();
    while !line.contains("a second signal ends it at once") {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0);
    }
    assert!(child.try_wait().unwrap().is_none(), "it waits");
    signal(&child, rustix::process::Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(1));
}

/// Options that cannot be are refused by their name, before anything starts.
#[test]
fn options() {
    assert!(failed(&["aggregator"]).contains("--listen"));
    assert!(failed(&["aggregator", "--listen", "127.0.0.1:0", "--shards", "3"]).contains("--shards 3"));
    assert!(
        failed(&["aggregator", "--listen", "127.0.0.1:0", "--memory", "9999T"]).contains("more than this machine has")
    );
    assert!(failed(&["aggregator", "--listen", "127.0.0.1:0", "--memory", "lots"]).contains("not a number of bytes"));
    assert!(failed(&["server", "--listen", "127.0.0.1:0", "--shards", "2"]).contains("--shards"));
    assert!(failed(&["server", "--listen", "192.0.2.1"]).contains("not an address of this machine"));
    assert!(failed(&["server", "--listen", "no such host:1"]).contains("is not an address"));
    assert!(
        failed(&["server", "--listen", "127.0.0.1:0", "--secret-file", "/no/such/file"]).contains("cannot be read")
    );
    let help = program(&["aggregator", "--help"]).output().unwrap();
    assert!(help.status.success());
    let help = String::from_utf8(help.stdout).unwrap();
    for option in
        ["--listen", "--slots", "--memory", "--shards", "--secret-file", "--no-offloads", "--drain-timeout", "--drop"]
    {
        assert!(help.contains(option), "{option}");
    }
}

/// Packets that are thrown away on purpose are announced loudly.
#[test]
fn drop_is_announced() {
    let (mut child, at, mut log) = start(&["aggregator", "--listen", "127.0.0.1:0", "--drop", "0.05", "--seed", "4"]);
    let mut line = String::new();
    while !line.contains("THROWS AWAY 5.00 % OF RECEIVED PACKETS (--drop 0.05 --seed 4)") {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0);
    }
    assert_eq!(get(at, "/")["drop"], json!({ "rate": 0.05, "seed": 4 }));
    signal(&child, rustix::process::Signal::KILL);
    child.wait().unwrap();
}

/// A tree of hundreds of aggregators, in a few kilobytes of text, takes no more memory than is charged for it, and one of thousands
/// is refused.
#[test]
fn a_tree_takes_what_is_charged() {
    let (mut child, at, _log) = start(&["server", "--listen", "127.0.0.1:0"]);
    let resident = || -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        1024 * line.split_whitespace().next().unwrap().parse::<usize>().unwrap()
    };
    let job = |chains: usize, length: usize| {
        let chain = |worker: usize| {
            (0..length).fold(json!({"worker": worker}), |below, level| {
                let address = format!("10.{worker}.{level}.1:1");
                json!({"aggregator": {"address": address}, "children": [below]})
            })
        };
        let workers: Vec<String> = (0..chains).map(|worker| format!("127.0.1.{worker}:9")).collect();
        json!({"epoch": 1, "key": null, "window": 65536, "block_bytes": 1, "start": 0, "names": "children",
            "tree": (0..chains).map(chain).collect::<Vec<_>>(), "workers": workers})
    };
    let before = resident();
    let (status, reply) = put(at, 1, &job(20, 30));
    assert_eq!(status, 201, "{reply}");
    let grown = resident() - before;
    let charged = get(at, "/jobs")["jobs"][0]["memory_bytes"].as_u64().unwrap() as usize;
    assert!(grown > 1 << 20 && grown <= charged && charged < 200 << 20, "{grown} bytes more, {charged} are charged");
    let (status, reply) = put(at, 2, &job(20, 33));
    assert!(status == 400 && reply.contains("more than 32 aggregators above each other"), "{reply}");
    signal(&child, rustix::process::Signal::KILL);
    child.wait().unwrap();
}
