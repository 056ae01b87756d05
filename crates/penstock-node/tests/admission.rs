//! Jobs are opened, closed, counted and refused over real HTTP, and a daemon starts and ends as it should.

mod cluster;

use cluster::{ANY, Cluster, Job, answer, config, daemon, get, http, job_at, proof, put};
use penstock_aggregation::{Format, Header, Kind, Limits, Serial};
use penstock_net::datagrams::Datagrams;
use penstock_node::{Config, Daemon, PROOF_HEADER, Role, StartError, TIME_HEADER, prove};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

fn aggregator_job(epoch: u32) -> Value {
    json!({
        "epoch": epoch, "key": null, "window": 16, "block_bytes": 1000, "floats": false, "start": 0,
        "parent": { "address": "127.0.0.1:9", "shards": 1 },
        "children": [{ "address": "127.0.0.1:10", "workers": "0x1" }, { "address": "127.0.0.1:11", "workers": "0x2" }],
    })
}

fn server_job(epoch: u32) -> Value {
    json!({
        "epoch": epoch, "key": null, "window": 16, "block_bytes": 1000, "floats": false, "start": 0,
        "tree": [{ "worker": 0 }, { "worker": 1 }], "workers": ["127.0.0.1:10", "127.0.0.1:11"],
    })
}

type Body = fn(u32) -> Value;

fn both() -> [(Role, Body); 2] {
    [(Role::Aggregator, aggregator_job), (Role::Server, server_job)]
}

fn delete(to: SocketAddr, job: u32, epoch: u32) -> u16 {
    http(to, "DELETE", &format!("/jobs/{job}?epoch={epoch}"), &[], "").0
}

/// A job is opened once; the same request again changes nothing; other contents need the next epoch, and an older one never comes back.
#[test]
fn opening() {
    for (role, job) in both() {
        let node = daemon(config(role));
        let at = node.local_addr();
        let (status, reply) = put(at, 7, &job(5));
        assert_eq!(status, 201, "{reply}");
        let reply: Value = serde_json::from_str(&reply).unwrap();
        assert_eq!(reply, json!({ "shards": 1, "udp": at.to_string() }));
        assert_eq!(put(at, 7, &job(5)).0, 200, "the same once more");
        let mut other = job(5);
        other["window"] = json!(32);
        let (status, reply) = put(at, 7, &other);
        assert_eq!(status, 409);
        assert!(reply.contains("open with other contents"), "{reply}");
        let (status, reply) = put(at, 7, &job(4));
        assert_eq!(status, 409);
        assert!(reply.contains("epoch 5 of job 7 is newer than 4"), "{reply}");
        assert_eq!(put(at, 7, &job(6)).0, 201, "the next epoch");
        assert_eq!(job_at(at, 7)["epoch"], 6);
        assert_eq!(get(at, "/")["jobs"], json!([{ "job": 7, "epoch": 6 }]));
        assert_eq!(delete(at, 7, 5), 409, "that epoch is over");
        assert_eq!(delete(at, 7, 6), 200);
        assert_eq!(delete(at, 7, 6), 404);
        assert_eq!(job_at(at, 7), Value::Null);
        // An aggregator may forget and begin again; a server would have forgotten what it committed.
        let (status, reply) = put(at, 7, &job(6));
        assert_eq!(status, if role == Role::Server { 409 } else { 201 }, "{reply}");
        assert_eq!(put(at, 7, &job(7)).0, 201);
    }
}

/// Two workers with one number or one address, wrong shapes, and numbers that cannot be, are malformed; what is not there, not there.
#[test]
fn malformed() {
    let node = daemon(config(Role::Aggregator));
    let at = node.local_addr();
    let changed = |pointer: &str, value: Value| {
        let mut body = aggregator_job(1);
        *body.pointer_mut(pointer).unwrap() = value;
        put(at, 7, &body)
    };
    for (pointer, value, reason) in [
        ("/children/1/workers", json!("0x1"), "worker 0 is below two children"),
        ("/children/1/address", json!("127.0.0.1:10"), "also the address of node 1"),
        ("/children", json!([]), "children: 0 are given; 1 to 64 are possible"),
        ("/window", json!(17), "window is 17"),
        ("/block_bytes", json!(8897), "block_bytes is 8897"),
        ("/epoch", json!(65536), "not an aggregator's job"),
        ("/key", json!("00"), "key: 32 hex digits"),
        ("/parent/address", json!("nowhere"), "is not an address and a port"),
    ] {
        let (status, reply) = changed(pointer, value);
        assert_eq!(status, 400, "{pointer}: {reply}");
        assert!(reply.contains(reason), "{pointer}: {reply}");
    }
    let request = |method: &str, path: &str, body: &str| http(at, method, path, &[], body).0;
    assert_eq!(request("PUT", "/jobs/7", "{"), 400);
    assert_eq!(request("PUT", "/jobs/7", &server_job(1).to_string()), 400);
    assert_eq!(request("PUT", "/jobs/4294967296", &aggregator_job(1).to_string()), 400);
    assert_eq!(request("PUT", "/jobs/-1", &aggregator_job(1).to_string()), 400);
    assert_eq!(request("DELETE", "/jobs/7", ""), 400);
    assert_eq!(request("DELETE", "/jobs/7?epoch=x", ""), 400);
    assert_eq!(request("POST", "/jobs/7", ""), 405);
    assert_eq!(request("GET", "/jobs/7", ""), 404);
    assert_eq!(request("GET", "/jobs?from=-1", ""), 400);
    assert_eq!(request("GET", "/elsewhere", ""), 404);
    assert_eq!(request("PUT", "/jobs/7", ""), 411);
    assert_eq!(get(at, "/")["jobs"], json!([]), "nothing of this opened a job");

    let raw = |text: &str| {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        answer(&mut stream).0
    };
    assert_eq!(raw("PUT /jobs/7 HTTP/1.1\r\nContent-Length: 600000\r\n\r\n"), 413, "refused before a byte of it came");
    assert_eq!(raw("PUT /jobs/7 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"), 411);
    assert_eq!(raw("\0\0\0\0\r\n\r\n"), 400);
    assert_eq!(put(at, 7, &aggregator_job(1)).0, 201, "and the daemon goes on");
}

/// What is beyond the limits is refused with what is free, and room comes back when a job goes.
#[test]
fn quotas() {
    for (role, job) in both() {
        // 16 slots of 1000 bytes; a server keeps a block of each of two workers, and the sum, and some more.
        let memory = if role == Role::Server { 16 * 3 * 1000 } else { 16 * 1000 };
        let limits =
            |jobs, slots, memory_bytes| Config { limits: Limits { jobs, slots, memory_bytes }, ..config(role) };
        for (config, reason) in [
            (limits(1, 64, 1 << 20), "all 1 places for jobs are taken"),
            (limits(4, 31, 1 << 20), "16 slots are needed, 15 are free"),
            (limits(4, 64, 2 * memory - 1), "bytes are needed"),
        ] {
            let node = daemon(config);
            let at = node.local_addr();
            assert_eq!(put(at, 1, &job(1)).0, 201);
            let (status, reply) = put(at, 2, &job(1));
            assert_eq!(status, 409, "{reply}");
            assert!(reply.contains(reason), "{reply}");
            assert_eq!(put(at, 1, &job(2)).0, 201, "a job's next epoch takes its own room");
            assert_eq!(delete(at, 1, 2), 200);
            assert_eq!(put(at, 2, &job(1)).0, 201);
        }
    }
}

/// With a secret only who has it opens and closes jobs; without a proof, or with a wrong, stale or borrowed one, nothing happens.
#[test]
fn secrets() {
    let node = daemon(Config { secret: Some(b"hush".to_vec()), ..config(Role::Aggregator) });
    let at = node.local_addr();
    let body = aggregator_job(1).to_string();
    let send = |method: &str, path: &str, headers: &[(&str, String)], body: &str| {
        let (status, reply) = http(at, method, path, headers, body);
        assert!(!reply.contains("hush"), "{reply}");
        (status, reply)
    };
    let put = |headers: &[(&str, String)]| send("PUT", "/jobs/7", headers, &body);
    let (status, reply) = put(&[]);
    assert_eq!(status, 401);
    assert!(reply.contains("this node has a secret"), "{reply}");
    assert_eq!(put(&proof(at, b"other", "PUT", "/jobs/7", &body)).0, 401);
    assert_eq!(put(&proof(at, b"hush", "PUT", "/jobs/8", &body)).0, 401, "another job's");
    assert_eq!(put(&proof(at, b"hush", "DELETE", "/jobs/7", &body)).0, 401, "another request's");
    assert_eq!(put(&proof(at, b"hush", "PUT", "/jobs/7", "{}")).0, 401, "another body's");
    let about = get(at, "/");
    let daemon = about["daemon"].as_str().unwrap();
    let old = [
        (TIME_HEADER, "1000".to_string()),
        (PROOF_HEADER, prove(b"hush", daemon, "PUT", "/jobs/7", "1000", body.as_bytes())),
    ];
    let (status, reply) = put(&old);
    assert_eq!(status, 401);
    assert!(reply.contains("are the clocks right"), "{reply}");
    assert_eq!(get(at, "/")["jobs"], json!([]));
    assert_eq!(put(&proof(at, b"hush", "PUT", "/jobs/7", &body)).0, 201);
    let path = "/jobs/7?epoch=1";
    assert_eq!(send("DELETE", path, &[], "").0, 401);
    assert_eq!(
        send("DELETE", path, &proof(at, b"hush", "DELETE", "/jobs/7", ""), "").0,
        401,
        "the query is proved too"
    );
    assert_eq!(send("DELETE", path, &proof(at, b"hush", "DELETE", path, ""), "").0, 200);
}

/// What somebody has overheard opens and closes nothing at another daemon with the same secret, nor at the same one once it has
/// started anew.
#[test]
fn proofs_are_for_one_daemon() {
    let start = || daemon(Config { secret: Some(b"hush".to_vec()), ..config(Role::Aggregator) });
    let (one, other) = (start(), start());
    let (open, close) = (aggregator_job(1).to_string(), "/jobs/7?epoch=1");
    for (heard, replayed) in [(&one, &other), (&other, &one)] {
        let opening = proof(heard.local_addr(), b"hush", "PUT", "/jobs/7", &open);
        let closing = proof(heard.local_addr(), b"hush", "DELETE", close, "");
        let send = |to: &Daemon, opens: bool| match opens {
            true => http(to.local_addr(), "PUT", "/jobs/7", &opening, &open),
            false => http(to.local_addr(), "DELETE", close, &closing, ""),
        };
        let (status, reply) = send(replayed, true);
        assert!(status == 401 && reply.contains("for this daemon"), "{reply}");
        assert_eq!(send(heard, true).0, 201);
        assert_eq!(put_with(replayed, &open).0, 201);
        assert_eq!(send(replayed, false).0, 401);
        assert_eq!(send(heard, false).0, 200);
        assert_eq!(close_with(replayed, close).0, 200);
    }
    let opening = proof(one.local_addr(), b"hush", "PUT", "/jobs/8", &open);
    drop(one);
    assert_eq!(http(start().local_addr(), "PUT", "/jobs/8", &opening, &open).0, 401);
}

fn put_with(node: &Daemon, body: &str) -> (u16, String) {
    let at = node.local_addr();
    http(at, "PUT", "/jobs/7", &proof(at, b"hush", "PUT", "/jobs/7", body), body)
}

fn close_with(node: &Daemon, path: &str) -> (u16, String) {
    let at = node.local_addr();
    http(at, "DELETE", path, &proof(at, b"hush", "DELETE", path, ""), "")
}

/// Unauthenticated peers that hold connections open, or send single bytes, keep nobody else from being answered.
#[test]
fn slow_unauthenticated_peers() {
    let node = daemon(config(Role::Aggregator));
    let at = node.local_addr();
    let held: Vec<TcpStream> = (0..40)
        .map(|i| {
            let mut stream = TcpStream::connect(at).unwrap();
            stream.write_all(&b"PUT /jobs/1 HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"[..i]).unwrap();
            stream
        })
        .collect();
    let start = Instant::now();
    assert_eq!(put(at, 7, &aggregator_job(1)).0, 201);
    assert!(start.elapsed() < Duration::from_secs(4), "they are cut off only after 5 s");
    drop(held);
}

/// What `GET /metrics` says is Prometheus' text: every series has a type, no series comes twice, counters end in _total, and the
/// numbers are those of `GET /jobs`.
#[test]
fn metrics() {
    let job = Job { blocks: 40, ..Job::star(3, Format::I32) };
    let mut cluster =
        Cluster::start(config(Role::Server), vec![Config { shards: 2, ..config(Role::Aggregator) }], &job);
    cluster.open(&job);
    cluster.run(&job, |_, _| ());
    let at = [cluster.places[0].0, cluster.server_at()];
    for (address, role) in at.iter().zip(["aggregator", "server"]) {
        let (status, text) = http(*address, "GET", "/metrics", &[], "");
        assert_eq!(status, 200);
        let series = prometheus(&text);
        let info = series.keys().find(|key| key.starts_with("penstock_info{")).unwrap();
        assert!(info.contains(&format!("role=\"{role}\"")), "{info}");
        assert_eq!(series["penstock_jobs"], 1.0);
        assert_eq!(series["penstock_job_slots{job=\"77\",epoch=\"3\"}"], 16.0);
        assert_eq!(series["penstock_job_refused_total{job=\"77\",epoch=\"3\",reason=\"key\"}"], 0.0);
        let completed = series["penstock_job_completed_total{job=\"77\",epoch=\"3\"}"];
        assert_eq!(completed, 40.0);
        assert_eq!(job_at(*address, 77)["completed"], completed as u64);
        if role == "server" {
            assert_eq!(series["penstock_job_committed_total{job=\"77\",epoch=\"3\"}"], 40.0);
        } else {
            let worker = cluster.sockets[2].local_addr();
            let labels = format!("job=\"77\",epoch=\"3\",node=\"worker\",address=\"{worker}\",workers=\"2\"");
            assert_eq!(series[&format!("penstock_node_added_total{{{labels}}}")], 40.0);
            assert_eq!(series["penstock_shards"], 2.0);
        }
    }
}

/// Reads the text format by its grammar: `# HELP`, `# TYPE`, then the series of that name.
fn prometheus(text: &str) -> HashMap<String, f64> {
    let mut series = HashMap::new();
    let mut family: Option<(String, String)> = None;
    let mut seen = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a name and a type");
            assert!(["counter", "gauge"].contains(&kind), "{line}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            assert!(!seen.contains(&name.to_string()), "{line}: twice");
            seen.push(name.to_string());
            family = Some((name.to_string(), kind.to_string()));
        } else if !line.starts_with("# HELP ") {
            let (key, value) = line.rsplit_once(' ').expect("a series and a value");
            let name = key.split('{').next().unwrap();
            assert_eq!(Some(name), family.as_ref().map(|(name, _)| name.as_str()), "{line}");
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{line}");
            if let Some((_, labels)) = key.split_once('{') {
                for label in labels.strip_suffix('}').expect("a closing brace").split("\",") {
                    let (name, value) = label.split_once("=\"").unwrap_or_else(|| panic!("{line}"));
                    assert!(name.chars().all(|c| c.is_ascii_lowercase()), "{line}");
                    assert!(!value.trim_end_matches('"').contains(['"', '\\', '\n']), "{line}");
                }
            }
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
            assert!(series.insert(key.to_string(), value).is_none(), "{line}: twice");
        }
    }
    assert!(text.ends_with('\n'));
    series
}

/// A daemon without work ends as soon as it is asked; one with a sum half done waits, refuses new jobs meanwhile, and ends when the sum
/// is complete, or after its time.
#[test]
fn draining() {
    for (role, _) in both() {
        let node = daemon(config(role));
        assert!(!node.wait(Duration::ZERO));
        node.drain();
        assert!(node.wait(Duration::from_secs(10)), "an idle {role:?} ends at once");
    }
    // A sum half done: one of two workers has pushed.
    let half_done = |drain_timeout| {
        let node = daemon(Config { drain_timeout, ..config(Role::Aggregator) });
        let sockets: Vec<Datagrams> = (0..3).map(|_| Datagrams::bind(ANY, true, 1 << 16).unwrap()).collect();
        let mut job = aggregator_job(1);
        for (i, pointer) in ["/children/0/address", "/children/1/address", "/parent/address"].iter().enumerate() {
            *job.pointer_mut(pointer).unwrap() = json!(sockets[i].local_addr().to_string());
        }
        assert_eq!(put(node.local_addr(), 7, &job).0, 201);
        let mut sockets = sockets;
        push(&mut sockets[0], node.local_addr(), 1);
        until(|| job_at(node.local_addr(), 7)["waiting_slots"] == 1);
        (node, sockets)
    };
    let (node, mut sockets) = half_done(Duration::from_secs(100));
    let at = node.local_addr();
    node.drain();
    assert_eq!(get(at, "/")["draining"], true);
    let (status, reply) = put(at, 8, &aggregator_job(1));
    assert_eq!(status, 503, "{reply}");
    assert!(!node.wait(Duration::from_millis(200)), "it waits for the other worker");
    push(&mut sockets[1], at, 2);
    assert!(node.wait(Duration::from_secs(10)), "the sum is complete");
    let (node, _sockets) = half_done(Duration::from_millis(100));
    node.drain();
    assert!(node.wait(Duration::from_secs(10)), "its time is over");
}

fn push(from: &mut Datagrams, to: SocketAddr, workers: u64) {
    let header = Header {
        kind: Kind::Push,
        job: 7,
        epoch: 1,
        format: Format::I32,
        flags: 0,
        seq: Serial(0),
        ack: Serial(0),
        credit: Serial(15),
        exponent: 0,
        workers,
    };
    from.queue(to, &header.encode(&[1; 8], None), &[1; 8]);
    from.flush().unwrap();
}

/// Waits for a condition, with a deadline.
fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "it did not happen within 20 s");
        std::thread::yield_now();
    }
}

/// A job of which nothing is heard is closed, counted, and its room is free; one that speaks is not.
#[test]
fn silent_jobs_are_forgotten() {
    let node = daemon(Config { forget_after: Duration::from_millis(300), ..config(Role::Aggregator) });
    let at = node.local_addr();
    let mut worker = Datagrams::bind(ANY, true, 1 << 16).unwrap();
    let mut job = aggregator_job(1);
    job["children"][0]["address"] = json!(worker.local_addr().to_string());
    assert_eq!(put(at, 7, &job).0, 201);
    assert_eq!(put(at, 8, &aggregator_job(1)).0, 201);
    until(|| {
        push(&mut worker, at, 1);
        job_at(at, 8) == Value::Null
    });
    assert_eq!(job_at(at, 7)["epoch"], 1, "this one was heard");
    until(|| job_at(at, 7) == Value::Null);
    let (_, text) = http(at, "GET", "/metrics", &[], "");
    assert!(text.contains("\npenstock_jobs_forgotten_total 2\n"), "{text}");
}

/// What cannot be had is told with what to do, and nothing is left behind.
#[test]
fn starts_that_fail() {
    let failed = |config: Config| -> (String, StartError) {
        let error = Daemon::start(config).err().expect("it cannot start");
        (error.to_string(), error)
    };
    let node = daemon(config(Role::Aggregator));
    let (text, error) = failed(Config { listen: node.local_addr(), ..config(Role::Server) });
    assert!(matches!(error, StartError::Bind { protocol: "UDP", .. }));
    let (ip, port) = (node.local_addr().ip(), node.local_addr().port());
    assert!(text.contains(&format!("UDP port {port} of {ip} is taken")), "{text}");
    let taken = TcpListener::bind(config(Role::Server).listen).unwrap();
    let (text, _) = failed(Config { listen: taken.local_addr().unwrap(), ..config(Role::Server) });
    assert!(text.contains("TCP port") && text.contains("--listen"), "{text}");
    let (text, _) = failed(Config { listen: "192.0.2.1:7471".parse().unwrap(), ..config(Role::Server) });
    assert!(text.contains("192.0.2.1 is not an address of this machine"), "{text}");
    let limits = Limits { jobs: 1, slots: 1, memory_bytes: 1 << 60 };
    let (text, _) = failed(Config { limits, ..config(Role::Server) });
    assert!(text.contains("more than this machine has"), "{text}");
    // The ports of a start that failed, and of a daemon that ended, are free again.
    let at = node.local_addr();
    drop(node);
    drop(daemon(Config { listen: at, shards: 1, ..config(Role::Server) }));
}
