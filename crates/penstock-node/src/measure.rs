//! Measures what one shard sums, beside its limit: a loop that only receives the same datagrams and sends as many.
//!
//! Workers push as fast as two bursts of blocks in flight allow, all from one thread that may live in another network
//! namespace. The two loops run in turn, several times. Rates per second of processor time of the loop's thread do not depend
//! on the machine's load.

use crate::admission::aggregator_job;
use crate::report::{Report, Which};
use crate::shard::{self, Command, Handle, Settings};
use penstock_aggregation::{Format, HEADER_BYTES, Header, Key, Kind, Limits, Serial, Shard};
use penstock_net::datagrams::{DatagramCounters, Datagrams};
use rustix::event::{PollFd, PollFlags, poll};
use serde::Serialize;
use serde_json::json;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

/// What to measure.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct Options {
    /// Workers that push, 1 to 64.
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 8))]
    pub workers: u32,
    /// Bytes of a block.
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 8896))]
    pub block_bytes: usize,
    /// Blocks of each worker in a burst; two bursts are in flight.
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 32))]
    pub burst: u32,
    /// Elements of the blocks: i32, i16 or f32.
    #[cfg_attr(feature = "cli", arg(long, default_value = "i32"))]
    pub format: String,
    /// With a key: every packet is checked and sealed.
    #[cfg_attr(feature = "cli", arg(long))]
    pub keyed: bool,
    /// An unauthenticated peer sends as many packets as all workers together, under the job's number, and all are refused.
    #[cfg_attr(feature = "cli", arg(long))]
    pub unauthenticated: bool,
    /// Without GSO and GRO.
    #[cfg_attr(feature = "cli", arg(long))]
    pub no_offloads: bool,
    /// How often each of the two is measured.
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 5))]
    pub rounds: u32,
    /// Seconds a round.
    #[cfg_attr(feature = "cli", arg(long, default_value_t = 1.0))]
    pub seconds: f64,
    /// Where the shard listens.
    #[cfg_attr(feature = "cli", arg(long, default_value = "127.0.0.1"))]
    pub listen: IpAddr,
    /// Where workers and parent are.
    #[cfg_attr(feature = "cli", arg(long, default_value = "127.0.0.1"))]
    pub peers: IpAddr,
    /// The network namespace where workers and parent are, such as /run/netns/peers.
    #[cfg_attr(feature = "cli", arg(long))]
    pub peers_netns: Option<PathBuf>,
    /// Print JSON.
    #[cfg_attr(feature = "cli", arg(long))]
    pub json: bool,
}

/// What one round came to.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Round {
    /// Wall time in seconds.
    pub seconds: f64,
    /// Processor time of the loop's thread in seconds.
    pub cpu_seconds: f64,
    /// Seconds in which the loop's thread could have run and had no processor.
    pub waited_seconds: f64,
    /// Seconds in which the thread of all workers and the parent could have run and had no processor.
    pub peers_waited_seconds: f64,
    /// Datagrams that came, including those of unauthenticated peers.
    pub datagrams: u64,
    /// Trains of packets that the shard received.
    pub trains: u64,
    /// Bytes of workers' blocks in the sums that came back.
    pub bytes: u64,
    /// Datagrams that the receive buffer had no room for.
    pub kernel_dropped: u64,
    /// Sums that came back from the shard.
    pub sums: u64,
    /// Sums that did not come back within 200 ms.
    pub lost: u64,
}

impl Round {
    /// Gbit/s of blocks that came, by wall time.
    #[must_use]
    pub fn gigabits(&self) -> f64 {
        self.bytes as f64 * 8e-9 / self.seconds
    }

    /// Gbit of blocks for each second of processor time of the loop's thread: what a whole core handles.
    #[must_use]
    pub fn gigabits_per_core(&self) -> f64 {
        self.bytes as f64 * 8e-9 / self.cpu_seconds
    }
}

/// The result of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// The rounds of an aggregator's shard.
    pub adding: Vec<Round>,
    /// The rounds of the loop that only receives and sends.
    pub passing: Vec<Round>,
    #[serde(skip)]
    as_json: bool,
}

impl Measured {
    /// The median over rounds of adding's rate as a share of passing's, by processor time.
    #[must_use]
    pub fn share(&self) -> f64 {
        let pairs = self.adding.iter().zip(&self.passing);
        median(pairs.map(|(adding, passing)| adding.gigabits_per_core() / passing.gigabits_per_core()).collect())
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.as_json {
            return write!(f, "{}", json!({ "adding": self.adding, "passing": self.passing, "share": self.share() }));
        }
        for (name, rounds) in [("adds and sends", &self.adding), ("only receives and sends", &self.passing)] {
            let of = |value: &dyn Fn(&Round) -> f64| median(rounds.iter().map(value).collect());
            writeln!(
                f,
                "{name:<24} {:7.2} Gbit/s in, {:7.2} a core, {:9.0} packets/s ({:9.0} a core), {:4.1} a train, core {:3.0} % busy, \
                 {} dropped, {} sums lost; ready without a processor: {:.0} % of the time, its peers {:.0} %",
                of(&Round::gigabits),
                of(&Round::gigabits_per_core),
                of(&|round| round.datagrams as f64 / round.seconds),
                of(&|round| round.datagrams as f64 / round.cpu_seconds),
                of(&|round| round.datagrams as f64 / round.trains as f64),
                of(&|round| 100.0 * round.cpu_seconds / round.seconds),
                rounds.iter().map(|round| round.kernel_dropped).sum::<u64>(),
                rounds.iter().map(|round| round.lost).sum::<u64>(),
                of(&|round| 100.0 * round.waited_seconds / round.seconds),
                of(&|round| 100.0 * round.peers_waited_seconds / round.seconds),
            )?;
        }
        write!(f, "adding has {:.0} % of the rate of only receiving and sending", 100.0 * self.share())
    }
}

/// Runs the measurement, which takes `2 * rounds * seconds`. Every tenth sum is compared with the expected one.
pub fn run(options: &Options) -> Result<Measured, String> {
    let format = match options.format.as_str() {
        "i32" => Format::I32,
        "i16" => Format::I16,
        "f32" => Format::F32,
        other => return Err(format!("--format {other}: i32, i16 and f32 are possible")),
    };
    if !(1..=64).contains(&options.workers) || !options.burst.is_power_of_two() || options.rounds == 0 {
        return Err("--workers must be 1 to 64, --burst a power of two, --rounds at least 1".into());
    }
    let (mut adding, mut passing) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        adding.push(round(options, format, true)?);
        passing.push(round(options, format, false)?);
    }
    Ok(Measured { adding, passing, as_json: options.json })
}

fn round(options: &Options, format: Format, adds: bool) -> Result<Round, String> {
    let fails = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
    let socket = Datagrams::bind(SocketAddr::new(options.listen, 0), !options.no_offloads, BUFFER_BYTES)
        .map_err(fails("the shard's socket"))?;
    let to = socket.local_addr();
    std::thread::scope(|scope| {
        let (send_addresses, addresses) = sync_channel(1);
        let (send_go, go) = sync_channel(1);
        let peers = scope.spawn(move || {
            if let Some(path) = &options.peers_netns {
                let namespace = std::fs::File::open(path).map_err(fails("the namespace"))?;
                let network = Some(rustix::thread::LinkNameSpaceType::Network);
                rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), network)
                    .map_err(|error| format!("the namespace {}: {error}", path.display()))?;
            }
            let bind = || Datagrams::bind(SocketAddr::new(options.peers, 0), !options.no_offloads, BUFFER_BYTES);
            let count = options.workers + 1 + u32::from(options.unauthenticated);
            let sockets: Result<Vec<Datagrams>, _> = (0..count).map(|_| bind()).collect();
            let mut sockets = sockets.map_err(fails("the workers' sockets"))?;
            let unauthenticated = if options.unauthenticated { sockets.pop() } else { None };
            let all: Vec<SocketAddr> = sockets.iter().map(Datagrams::local_addr).collect();
            send_addresses.send(all).map_err(|_| "the shard is gone".to_string())?;
            go.recv().map_err(|_| "the shard is gone".to_string())?;
            let parent = sockets.pop().expect("one more than workers");
            Peers::new(options, format, adds, to, sockets, parent, unauthenticated).push()
        });
        // The thread's own error says more.
        let Ok(all) = addresses.recv() else {
            return peers.join().expect("the peers' thread panicked").map(|_| unreachable!("it had no addresses"));
        };
        let (children, parent) = all.split_at(options.workers as usize);
        let limits = Limits { jobs: 1, slots: 1 << 16, memory_bytes: usize::MAX };
        let settings = Settings { shard: Shard::WHOLE, limits, drop: None, receipts: None };
        let mut handle = if adds {
            let handle = shard::start_adding(socket, &settings).map_err(fails("the shard"))?;
            let body = json!({
                "epoch": 1, "key": options.keyed.then(|| "07".repeat(16)), "window": 4 * options.burst,
                "block_bytes": options.block_bytes, "floats": format.is_float(), "start": 0,
                "parent": { "address": parent[0].to_string() },
                "children": children.iter().enumerate().map(|(i, address)| json!({
                    "address": address.to_string(), "workers": format!("{:#x}", 1u64 << i),
                })).collect::<Vec<_>>(),
            });
            let job = aggregator_job(JOB, body.to_string().as_bytes(), to)?;
            let (answer, opened) = sync_channel(1);
            handle.send(Command::Open(Box::new(job), answer));
            opened.recv().map_err(|_| "the shard is gone")?.map_err(|refused| format!("{refused:?}"))?;
            handle
        } else {
            let last = *children.last().expect("one worker at least");
            shard::start_passing(socket, &settings, last, parent[0]).map_err(fails("the loop"))?
        };
        let (before, sched_before, start) = (report(&handle)?, of_shard(), Instant::now());
        let _ = send_go.send(());
        let pushed = peers.join().expect("the peers' thread panicked")?;
        let (seconds, after, sched_after) = (start.elapsed().as_secs_f64(), report(&handle)?, of_shard());
        handle.join();
        let count = |of: fn(&DatagramCounters) -> u64| of(&after.socket) - of(&before.socket);
        let datagrams = count(|socket| socket.received);
        Ok(Round {
            seconds,
            cpu_seconds: sched_after.ran - sched_before.ran,
            waited_seconds: sched_after.waited - sched_before.waited,
            peers_waited_seconds: pushed.waited_seconds,
            datagrams,
            trains: count(|socket| socket.received_trains),
            bytes: pushed.sums * u64::from(options.workers) * options.block_bytes as u64,
            kernel_dropped: after.kernel_dropped - before.kernel_dropped,
            sums: pushed.sums,
            lost: pushed.lost,
        })
    })
}

fn report(handle: &Handle) -> Result<Report, String> {
    let (answer, report) = sync_channel(1);
    handle.send(Command::Report(Which::All, answer));
    report.recv_timeout(Duration::from_secs(10)).map_err(|_| "the shard does not answer".into())
}

/// A thread's schedstat in seconds: how long it ran, and how long it could have run and had no processor.
#[derive(Clone, Copy, Default)]
struct Scheduled {
    ran: f64,
    waited: f64,
}

impl Scheduled {
    /// Of the thread with this folder in /proc; zeros if the kernel does not count.
    fn of(thread: &Path) -> Scheduled {
        let text = std::fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
        let mut numbers = text.split(' ').map(|number| number.parse::<f64>().unwrap_or_default() * 1e-9);
        let mut next = || numbers.next().unwrap_or_default();
        Scheduled { ran: next(), waited: next() }
    }
}

/// Of the shard's thread; there is one at a time.
fn of_shard() -> Scheduled {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut mine = threads.filter(|thread| {
        std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.starts_with("penstock-shard"))
    });
    mine.next().map(|thread| Scheduled::of(&thread.path())).unwrap_or_default()
}

/// All workers and the parent, in one thread.
struct Peers<'a> {
    options: &'a Options,
    format: Format,
    key: Option<Key>,
    to: SocketAddr,
    workers: Vec<Datagrams>,
    parent: Datagrams,
    unauthenticated: Option<Datagrams>,
    blocks: Vec<Vec<u8>>,
    sum: Vec<u8>,
}

struct Pushed {
    sums: u64,
    lost: u64,
    waited_seconds: f64,
}

impl Peers<'_> {
    fn new(
        options: &Options,
        format: Format,
        adds: bool,
        to: SocketAddr,
        workers: Vec<Datagrams>,
        parent: Datagrams,
        unauthenticated: Option<Datagrams>,
    ) -> Peers<'_> {
        let width = format.element_bytes();
        let length = options.block_bytes / width * width;
        // Small whole numbers, so that every format has the same sum.
        let block = |value: u32| -> Vec<u8> {
            let element = match format {
                Format::I16 => (value as i16).to_be_bytes().to_vec(),
                Format::F32 => (value as f32).to_be_bytes().to_vec(),
                _ => value.to_be_bytes().to_vec(),
            };
            element.repeat(length / width)
        };
        // The loop that only passes on sends the last worker's block.
        let sum = block(if adds { (1..=options.workers).sum() } else { options.workers });
        let blocks = (1..=options.workers).map(block).collect();
        let key = options.keyed.then_some(Key([7; 16]));
        Peers { options, format, key, to, workers, parent, unauthenticated, blocks, sum }
    }

    fn push(&mut self) -> Result<Pushed, String> {
        let end = Instant::now() + Duration::from_secs_f64(self.options.seconds);
        let mut pushed = Pushed { sums: 0, lost: 0, waited_seconds: 0.0 };
        let own = Path::new("/proc/thread-self");
        let before = Scheduled::of(own);
        let (mut next, mut outstanding) = (0u32, 0u64);
        while Instant::now() < end {
            while outstanding < 2 * u64::from(self.options.burst) {
                self.burst(next)?;
                next = next.wrapping_add(self.options.burst);
                outstanding += u64::from(self.options.burst);
            }
            let came = self.sums(&mut pushed)?;
            if came == 0 {
                // They were lost on the way, and are not sent again.
                pushed.lost += outstanding;
            }
            outstanding = if came == 0 { 0 } else { outstanding.saturating_sub(came) };
        }
        pushed.waited_seconds = Scheduled::of(own).waited - before.waited;
        Ok(pushed)
    }

    fn burst(&mut self, first: u32) -> Result<(), String> {
        let (format, exponent, to) = (self.format, 0, self.to);
        for (worker, socket) in self.workers.iter_mut().enumerate() {
            let block = &self.blocks[worker];
            if let Some(unauthenticated) = &mut self.unauthenticated {
                for _ in 0..self.options.burst {
                    let kind = Kind::Push;
                    let (seq, ack, credit) = (Serial(first), Serial(first), Serial(first));
                    let (flags, workers) = (0, 1 << worker);
                    let header =
                        Header { kind, job: JOB, epoch: 1, format, flags, seq, ack, credit, exponent, workers };
                    unauthenticated.queue(to, &header.encode(block, None), block);
                }
                send_all(unauthenticated).map_err(|error| format!("an unauthenticated peer's packet: {error}"))?;
            }
            for seq in (0..self.options.burst).map(|i| first.wrapping_add(i)) {
                let header = Header {
                    kind: Kind::Push,
                    job: JOB,
                    epoch: 1,
                    format,
                    flags: 0,
                    seq: Serial(seq),
                    ack: Serial(first),
                    credit: Serial(first.wrapping_add(4 * self.options.burst - 1)),
                    exponent,
                    workers: 1 << worker,
                };
                socket.queue(to, &header.encode(block, self.key.as_ref()), block);
            }
            send_all(socket).map_err(|error| format!("a push: {error}"))?;
        }
        Ok(())
    }

    /// Waits for sums, at most 200 ms. Returns how many came.
    fn sums(&mut self, pushed: &mut Pushed) -> Result<u64, String> {
        let limit = rustix::time::Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
        let _ = poll(&mut [PollFd::new(&self.parent, PollFlags::IN)], Some(&limit));
        let (mut wrong, mut count) = (false, 0u64);
        let before = pushed.sums;
        let sum = &self.sum;
        self.parent
            .receive(|_, datagram| {
                count += 1;
                if (before + count).is_multiple_of(10) {
                    let payload = &datagram[HEADER_BYTES.min(datagram.len())..];
                    wrong |= payload != sum;
                }
            })
            .map_err(|error| format!("a sum: {error}"))?;
        pushed.sums += count;
        if wrong { Err("a sum is wrong".into()) } else { Ok(count) }
    }
}

/// Blocks until the kernel has taken everything.
fn send_all(socket: &mut Datagrams) -> std::io::Result<()> {
    loop {
        socket.flush()?;
        if !socket.is_blocked() {
            return Ok(());
        }
        let _ = poll(&mut [PollFd::new(socket, PollFlags::OUT)], None);
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

const JOB: u32 = 1;
/// Two bursts of all workers with the kernel's bookkeeping.
const BUFFER_BYTES: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    /// A short measurement over loopback ends, with right sums, in every format and with a key.
    #[test]
    fn it_measures() {
        for (format, keyed, no_offloads) in [("i32", false, false), ("i16", true, true), ("f32", false, true)] {
            let options = Options {
                workers: 3,
                block_bytes: 1000,
                burst: 8,
                format: format.into(),
                keyed,
                unauthenticated: keyed,
                no_offloads,
                rounds: 1,
                seconds: 0.05,
                listen: IpAddr::from([127, 0, 0, 1]),
                peers: IpAddr::from([127, 0, 0, 1]),
                peers_netns: None,
                json: true,
            };
            let measured = run(&options).unwrap();
            for round in measured.adding.iter().chain(&measured.passing) {
                assert!(round.sums > 0 && round.bytes > 0, "{format}: {round:?}");
                assert!(round.cpu_seconds > 0.0 && round.waited_seconds >= 0.0, "{format}: {round:?}");
            }
            let json: serde_json::Value = serde_json::from_str(&measured.to_string()).unwrap();
            assert!(json["share"].as_f64().unwrap() > 0.0);
        }
    }
}
