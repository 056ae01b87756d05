//! Workers over real sockets: what the tests of the daemons share.

#![allow(dead_code, reason = "each test program uses a part")]

use penstock_aggregation::{
    Endpoint, FLAG_LAST, Format, Header, Key, Kind, Outbound, Receipt, Received, Route, Serial, Timing, Worker,
    WorkerConfig,
};
use penstock_net::datagrams::Datagrams;
use penstock_node::{Config, Daemon, PROOF_HEADER, Role, TIME_HEADER, prove};
use penstock_types::{SECOND, Time};
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub(crate) const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// A configuration for tests: any port of an address of loopback that nothing else here has. One that starts anew at its port finds
/// it free: a socket of another test that binds any port of [`ANY`] does not get it meanwhile.
pub(crate) fn config(role: Role) -> Config {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let own = Ipv4Addr::new(127, 1 + (std::process::id() % 250) as u8, high, low);
    Config { buffer_bytes: 4 << 20, ..Config::new(role, SocketAddr::from((own, 0))) }
}

pub(crate) fn daemon(config: Config) -> Daemon {
    Daemon::start(config).expect("a daemon on loopback")
}

/// A request with whatever headers; its status and body.
pub(crate) fn http(to: SocketAddr, method: &str, path: &str, headers: &[(&str, String)], body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(to).expect("the daemon listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let length = body.len();
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {length}\r\n\r\n{body}").unwrap();
    answer(&mut stream)
}

/// Reads an answer to its end.
pub(crate) fn answer(stream: &mut TcpStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, body.to_string())
}

/// The headers of a request to the daemon at `to`.
pub(crate) fn proof(
    to: SocketAddr,
    secret: &[u8],
    method: &str,
    path: &str,
    body: &str,
) -> Vec<(&'static str, String)> {
    let about = get(to, "/");
    let daemon = about["daemon"].as_str().expect("a name");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().to_string();
    let proof = prove(secret, daemon, method, path, &now, body.as_bytes());
    vec![(TIME_HEADER, now), (PROOF_HEADER, proof)]
}

pub(crate) fn put(to: SocketAddr, job: u32, body: &Value) -> (u16, String) {
    http(to, "PUT", &format!("/jobs/{job}"), &[], &body.to_string())
}

pub(crate) fn get(to: SocketAddr, path: &str) -> Value {
    let (status, body) = http(to, "GET", path, &[], "");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

/// What `GET /jobs` says of a job; null where it is not open.
pub(crate) fn job_at(to: SocketAddr, job: u32) -> Value {
    let all = get(to, "/jobs");
    all["jobs"].as_array().unwrap().iter().find(|one| one["job"] == job).cloned().unwrap_or(Value::Null)
}

/// Who sends to whom, for tests: an aggregator is a daemon of its own.
pub(crate) enum Branch {
    Worker(usize),
    Rack(usize, Vec<Branch>),
}

/// A job and what runs it.
pub(crate) struct Job {
    pub(crate) number: u32,
    pub(crate) epoch: u16,
    pub(crate) key: Option<Key>,
    pub(crate) workers: usize,
    pub(crate) window: u32,
    pub(crate) block_bytes: usize,
    pub(crate) blocks: u32,
    pub(crate) format: Format,
    pub(crate) start: u32,
    pub(crate) offloads: bool,
    /// Results come apart: the blocks of a buffer, and the bytes that the server may hold.
    pub(crate) buffers: Option<(u32, usize)>,
    /// Workers never take a slow aggregator for dead: where a test says what goes through it, on a loaded machine too.
    pub(crate) patient: bool,
    /// Bitmaps name workers, as for a switch, and not the children of a hop.
    pub(crate) names_workers: bool,
    /// Every seventh block is not finite, and travels as floats ([`Route::Full`]).
    pub(crate) infinite: bool,
    /// Of every block.
    pub(crate) exponent: i16,
    /// Workers behind streams, numbered after the others.
    pub(crate) streams: usize,
    pub(crate) tree: Vec<Branch>,
}

impl Job {
    /// All workers below aggregator 0.
    pub(crate) fn star(workers: usize, format: Format) -> Job {
        Job {
            number: 77,
            epoch: 3,
            key: None,
            workers,
            window: 16,
            block_bytes: 1024,
            blocks: 300,
            format,
            // SeqNums wrap around in the middle of the run.
            start: 0u32.wrapping_sub(100),
            offloads: true,
            buffers: None,
            patient: true,
            names_workers: false,
            infinite: false,
            exponent: -7,
            streams: 0,
            tree: vec![Branch::Rack(0, (0..workers).map(Branch::Worker).collect())],
        }
    }

    fn is_full(&self, block: u32) -> bool {
        self.infinite && block % 7 == 3
    }

    /// The format of a block.
    fn format_of(&self, block: u32) -> Format {
        if self.is_full(block) { Format::F32 } else { self.format }
    }

    /// The block of a worker, the last ones shorter. Values that show where a wrong byte came from, and for whose sum the order
    /// matters.
    pub(crate) fn block(&self, worker: usize, block: u32) -> Vec<u8> {
        let width = self.format_of(block).element_bytes();
        let length = if block % 7 == 6 { self.block_bytes / 2 / width * width } else { self.block_bytes };
        let mut state = (u64::from(self.number) << 40) ^ ((worker as u64) << 32) ^ u64::from(block);
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 32
        };
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let draw = next();
            match self.format_of(block) {
                // Infinities of one sign: what a NaN's bits are is the processor's affair.
                Format::F32 if self.is_full(block) && draw % 64 == 0 => bytes.extend(f32::INFINITY.to_be_bytes()),
                Format::F32 => {
                    let value = (draw as i32 as f32) * [1e-3, 1.0, 1e6][(draw % 3) as usize];
                    bytes.extend(value.to_be_bytes());
                }
                Format::I16 | Format::Exponents => bytes.extend((draw as i16).to_be_bytes()),
                _ => bytes.extend((draw as i32).to_be_bytes()),
            }
        }
        bytes
    }

    /// What all workers must get: the undisturbed sum, in the order of the tree.
    pub(crate) fn expected(&self, block: u32) -> Vec<u8> {
        self.sum(&self.tree, block)
    }

    fn sum(&self, branches: &[Branch], block: u32) -> Vec<u8> {
        let parts = branches.iter().map(|branch| match branch {
            Branch::Worker(worker) => self.block(*worker, block),
            Branch::Rack(_, below) => self.sum(below, block),
        });
        parts.reduce(|sum, part| self.add(self.format_of(block), &sum, &part)).expect("a child")
    }

    fn add(&self, format: Format, a: &[u8], b: &[u8]) -> Vec<u8> {
        let width = format.element_bytes();
        let both = a.chunks(width).zip(b.chunks(width));
        let add = |(a, b): (&[u8], &[u8])| -> Vec<u8> {
            match format {
                Format::F32 => {
                    let value = |bytes: &[u8]| f32::from_be_bytes(bytes.try_into().unwrap());
                    (value(a) + value(b)).to_be_bytes().into()
                }
                Format::I16 | Format::Exponents => {
                    let value = |bytes: &[u8]| i16::from_be_bytes(bytes.try_into().unwrap());
                    let max = format == Format::Exponents;
                    let (a, b) = (value(a), value(b));
                    if max { a.max(b) } else { a.wrapping_add(b) }.to_be_bytes().into()
                }
                _ => {
                    let value = |bytes: &[u8]| i32::from_be_bytes(bytes.try_into().unwrap());
                    value(a).wrapping_add(value(b)).to_be_bytes().into()
                }
            }
        };
        both.flat_map(add).collect()
    }

    /// Whether a block is the last one of its buffer.
    fn ends_buffer(&self, block: u32) -> bool {
        self.buffers.is_some_and(|(blocks, _)| block % blocks == blocks - 1 || block + 1 == self.blocks)
    }

    /// The blocks of the buffer that begins with this one.
    pub(crate) fn buffer_from(&self, first: u32) -> std::ops::Range<u32> {
        let blocks = self.buffers.expect("results come apart").0;
        first..self.blocks.min(first + blocks)
    }

    fn common(&self) -> Value {
        let key = self.key.map(|Key(bytes)| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        json!({
            "epoch": self.epoch, "key": key, "window": self.window, "block_bytes": self.block_bytes,
            "floats": self.format.is_float() || !self.names_workers, "start": self.start,
            "done": if self.buffers.is_some() { "buffer" } else { "block" },
        })
    }
}

/// The daemons of a tree, and the workers' sockets.
pub(crate) struct Cluster {
    pub(crate) server: Option<Daemon>,
    pub(crate) aggregators: Vec<Option<Daemon>>,
    pub(crate) configs: Vec<Config>,
    /// Where aggregators listen, whether they live or not.
    pub(crate) places: Vec<(SocketAddr, u32)>,
    pub(crate) sockets: Vec<Datagrams>,
    /// Buffers whose work failed: by worker, the first block and why.
    pub(crate) failures: Vec<(usize, u32, String)>,
}

impl Cluster {
    pub(crate) fn start(server: Config, aggregators: Vec<Config>, job: &Job) -> Cluster {
        Cluster::start_with(daemon(server), aggregators, job)
    }

    /// The same with a server that runs.
    pub(crate) fn start_with(server: Daemon, aggregators: Vec<Config>, job: &Job) -> Cluster {
        let started: Vec<Daemon> = aggregators.iter().cloned().map(daemon).collect();
        let places: Vec<(SocketAddr, u32)> =
            started.iter().zip(&aggregators).map(|(daemon, config)| (daemon.local_addr(), config.shards)).collect();
        let configs =
            aggregators.into_iter().zip(&places).map(|(config, (address, _))| Config { listen: *address, ..config });
        Cluster {
            server: Some(server),
            configs: configs.collect(),
            aggregators: started.into_iter().map(Some).collect(),
            places,
            sockets: job_sockets(job),
            failures: Vec::new(),
        }
    }

    pub(crate) fn server_at(&self) -> SocketAddr {
        self.server.as_ref().expect("it lives").local_addr()
    }

    /// Opens the job at all nodes.
    pub(crate) fn open(&self, job: &Job) {
        let mut workers: Vec<String> = self.sockets.iter().map(|socket| socket.local_addr().to_string()).collect();
        workers.extend((0..job.streams).map(|_| "stream".into()));
        let mut body = job.common();
        body["tree"] = job.tree.iter().map(|branch| self.tree(branch)).collect();
        body["workers"] = json!(workers);
        if !job.names_workers {
            body["names"] = json!("children");
        }
        if let Some((_, pending_bytes)) = job.buffers {
            body["pending_bytes"] = json!(pending_bytes);
        }
        let (status, reply) = put(self.server_at(), job.number, &body);
        assert_eq!(status, 201, "{reply}");
        for number in 0..self.places.len() {
            if let Some(body) = self.aggregator_body(job, number) {
                let (status, reply) = put(self.places[number].0, job.number, &body);
                assert_eq!(status, 201, "{reply}");
            }
        }
    }

    fn tree(&self, branch: &Branch) -> Value {
        match branch {
            Branch::Worker(worker) => json!({ "worker": worker }),
            Branch::Rack(number, below) => json!({
                "aggregator": self.place(*number),
                "children": below.iter().map(|branch| self.tree(branch)).collect::<Vec<_>>(),
            }),
        }
    }

    fn place(&self, number: usize) -> Value {
        let (address, shards) = self.places[number];
        json!({ "address": address.to_string(), "shards": shards })
    }

    /// What an aggregator is told; None where it has no part in the job.
    pub(crate) fn aggregator_body(&self, job: &Job, number: usize) -> Option<Value> {
        type Found<'a> = (Option<usize>, usize, &'a [Branch]);
        fn find(branches: &[Branch], number: usize, above: Option<usize>) -> Option<Found<'_>> {
            branches.iter().enumerate().find_map(|(place, branch)| match branch {
                Branch::Worker(_) => None,
                Branch::Rack(one, below) if *one == number => Some((above, place, &below[..])),
                Branch::Rack(one, below) => find(below, number, Some(*one)),
            })
        }
        let (above, place, below) = find(&job.tree, number, None)?;
        let mut body = job.common();
        if !job.names_workers {
            body["place"] = json!(place);
            body["server"] = json!(self.server_at().to_string());
        }
        body["parent"] = match above {
            Some(above) => self.place(above),
            None => json!({ "address": self.server_at().to_string(), "shards": 1 }),
        };
        let child = |branch: &Branch| {
            let mut child = match branch {
                Branch::Worker(worker) => {
                    json!({ "address": self.sockets[*worker].local_addr().to_string(), "shards": 1 })
                }
                Branch::Rack(number, _) => self.place(*number),
            };
            child["workers"] = if job.names_workers {
                json!(format!("{:#x}", workers_of(branch).iter().fold(0u64, |all, worker| all | 1 << worker)))
            } else {
                let text = workers_of(branch).iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
                json!(text[..text.len().min(64)])
            };
            child
        };
        body["children"] = below.iter().map(child).collect();
        Some(body)
    }

    /// An aggregator dies.
    pub(crate) fn kill(&mut self, number: usize) {
        self.aggregators[number] = None;
    }

    /// It starts anew at its address, with nothing in mind, and the job is opened there again.
    pub(crate) fn restart(&mut self, job: &Job, number: usize) {
        self.kill(number);
        self.aggregators[number] = Some(daemon(self.configs[number].clone()));
        let body = self.aggregator_body(job, number).expect("it has a part in the job");
        let (status, reply) = put(self.places[number].0, job.number, &body);
        assert_eq!(status, 201, "{reply}");
    }

    /// Runs the job: every result of every worker equals the undisturbed sum, bit for bit. `at` is called with the number of
    /// results so far whenever there are more.
    pub(crate) fn run(&mut self, job: &Job, at: impl FnMut(&mut Cluster, u32)) {
        self.run_at(self.server_at(), job, at);
    }

    /// The same with another's server.
    pub(crate) fn run_at(&mut self, server: SocketAddr, job: &Job, mut at: impl FnMut(&mut Cluster, u32)) {
        let origin = Instant::now();
        let now = || Time(origin.elapsed().as_nanos() as u64);
        fn above(branches: &[Branch], worker: usize, parent: Option<usize>) -> Option<(Option<usize>, usize)> {
            branches.iter().enumerate().find_map(|(place, branch)| match branch {
                Branch::Worker(one) => (*one == worker).then_some((parent, place)),
                Branch::Rack(number, below) => above(below, worker, Some(*number)),
            })
        }
        // A worker's number for the server is 0, for the aggregator above it 1.
        let (parents, places): (Vec<Option<usize>>, Vec<usize>) =
            (0..job.workers).map(|worker| above(&job.tree, worker, None).expect("every worker has a place")).unzip();
        let timing = Timing::default();
        let mut workers: Vec<Worker> = (0..job.workers)
            .map(|worker| {
                let config = WorkerConfig {
                    job: job.number,
                    epoch: job.epoch,
                    key: job.key,
                    name: 1 << if job.names_workers { worker } else { places[worker] },
                    window: job.window,
                    start: Serial(job.start),
                    parent: Endpoint(u32::from(parents[worker].is_some())),
                    server: Endpoint(0),
                    ask_parent: true,
                    full_to_parent: !job.names_workers && parents[worker].is_some(),
                    apart: job.buffers.is_some(),
                    timing: if job.patient {
                        Timing {
                            path_dead_after: 100 * SECOND,
                            stall_after: 100 * SECOND,
                            server_dead_after: 100 * SECOND,
                            ..timing
                        }
                    } else {
                        timing
                    },
                };
                Worker::new(now(), config)
            })
            .collect();
        let mut posted = vec![0; job.workers];
        let blocks: Vec<Vec<Vec<u8>>> =
            (0..job.workers).map(|worker| (0..job.blocks).map(|block| job.block(worker, block)).collect()).collect();
        let expected: Vec<Vec<u8>> = (0..job.blocks).map(|block| job.expected(block)).collect();
        let mut got = vec![vec![false; job.blocks as usize]; job.workers];
        let (mut results, mut reported) = (0, 0);
        let end = Serial(job.start).plus(job.blocks);
        while workers.iter().any(|worker| worker.received() != end) || got.iter().flatten().any(|got| !got) {
            assert!(origin.elapsed() < Duration::from_secs(100), "{results} results after 100 s");
            let mut soonest = u64::MAX;
            for (number, worker) in workers.iter_mut().enumerate() {
                let parent = parents[number].map(|parent| self.places[parent]);
                let socket = &mut self.sockets[number];
                let mut answers = Vec::new();
                socket
                    .receive(|from, datagram| {
                        if let Some(answer) = Receipt::decode(datagram).and_then(|receipt| receipt.answer()) {
                            return answers.push((from, answer.encode()));
                        }
                        let of_parent = |(address, shards): (SocketAddr, u32)| {
                            from.ip() == address.ip()
                                && (address.port()..address.port() + shards as u16).contains(&from.port())
                        };
                        let endpoint = match parent {
                            _ if from == server => Endpoint(0),
                            Some(parent) if of_parent(parent) => Endpoint(1),
                            _ => Endpoint(u32::MAX),
                        };
                        if let Ok(Received::Result { seq, format, exponent, payload, .. }) =
                            worker.handle_packet(now(), endpoint, datagram)
                        {
                            let block = seq.ahead_of(Serial(job.start)) as u32;
                            if format == Format::Text {
                                let why = String::from_utf8(payload.to_vec()).expect("UTF-8");
                                self.failures.push((number, block, why));
                                for block in job.buffer_from(block) {
                                    got[number][block as usize] = true;
                                    results += 1;
                                }
                                return;
                            }
                            assert_eq!(
                                (format, exponent),
                                (job.format_of(block), job.exponent),
                                "block {block} of worker {number}"
                            );
                            assert_eq!(payload, expected[block as usize], "block {block} of worker {number}");
                            assert!(
                                !std::mem::replace(&mut got[number][block as usize], true),
                                "block {block} came twice"
                            );
                            results += 1;
                        }
                    })
                    .unwrap();
                for (to, answer) in answers {
                    socket.queue(to, &answer, &[]);
                }
                let route = |block| if job.is_full(block) { Route::Full } else { Route::Tree };
                while posted[number] < job.blocks && worker.post(route(posted[number])).is_some() {
                    posted[number] += 1;
                }
                if worker.poll_timeout() <= now() {
                    worker.handle_timeout(now());
                }
                while let Some(Outbound { to, header }) = worker.poll_transmit(now()) {
                    let (format, exponent, block) = if header.kind == Kind::Push {
                        let block = header.seq.ahead_of(Serial(job.start)) as u32;
                        (job.format_of(block), job.exponent, &blocks[number][block as usize][..])
                    } else {
                        (Format::None, 0, &[][..])
                    };
                    let to = match parent {
                        Some((mut address, shards)) if to == Endpoint(1) => {
                            address.set_port(address.port() + (header.seq.0 & (shards - 1)) as u16);
                            address
                        }
                        _ => server,
                    };
                    let is_last =
                        header.kind == Kind::Push && job.ends_buffer(header.seq.ahead_of(Serial(job.start)) as u32);
                    let flags = header.flags | if is_last { FLAG_LAST } else { 0 };
                    let header = Header { flags, ..header };
                    socket.queue(to, &worker.seal(&header, format, exponent, block), block);
                }
                socket.flush().unwrap();
                soonest = soonest.min(worker.poll_timeout().since(now()));
            }
            if results > reported {
                reported = results;
                at(self, results);
            }
            let limit = rustix::time::Timespec { tv_sec: 0, tv_nsec: soonest.min(100_000_000) as _ };
            let mut fds: Vec<PollFd<'_>> =
                self.sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
            let _ = poll(&mut fds, Some(&limit));
        }
        assert_eq!(results, job.blocks * job.workers as u32);
    }
}

fn workers_of(branch: &Branch) -> Vec<usize> {
    match branch {
        Branch::Worker(worker) => vec![*worker],
        Branch::Rack(_, below) => below.iter().flat_map(workers_of).collect(),
    }
}

fn job_sockets(job: &Job) -> Vec<Datagrams> {
    (0..job.workers).map(|_| Datagrams::bind(ANY, job.offloads, 4 << 20).unwrap()).collect()
}
