//! The engine's interface for callers.

use crate::group::Group;
use crate::handle::Handle;
use crate::recorder::{Ended, Recorder};
use crate::runtime::{Command, GroupSpec, Runtime, Shared};
use crate::stats::Stats;
use crate::ticket::Ticket;
use penstock_net::clock::monotonic_ns;
use penstock_net::memory::{MemoryEpoch, Region};
use penstock_net::{Contact, Driver, Listen, Loop, Process, Ptracer, Settings, fds, log_writer};
use penstock_plan::Thresholds;
use penstock_stream::handshake::NodeKey;
use penstock_stream::peer::PeerConfig;
use penstock_types::{Failure, FailureKind, Generation};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// An engine's settings. The Python front's `config.py` says what each costs and when to change it.
#[derive(Clone, Debug)]
pub struct Config {
    /// This process's rank in the job, for error messages.
    pub rank: u32,
    /// Name of this host, for error messages.
    pub host: String,
    /// The job's generation.
    pub generation: Generation,
    /// Addresses to listen on, one an interface.
    pub addresses: Vec<IpAddr>,
    /// Ports to try, first to last.
    pub ports: std::ops::RangeInclusive<u16>,
    /// Threads that read, reduce and write, 1 to [`MAX_IO_THREADS`].
    pub io_threads: usize,
    /// TCP streams to a peer on another host.
    pub streams: u16,
    /// TCP streams to a peer at an address of this host.
    pub streams_within_host: u16,
    /// Reach peers on this host through memory instead of TCP.
    pub shared_memory: bool,
    /// Which processes may read this process's memory where Yama restricts that.
    pub ptracer: Ptracer,
    /// Cover frames with a CRC32C.
    pub checksum: bool,
    /// A peer from which nothing came for this long is lost.
    pub dead_after: Duration,
    /// Bytes of the sockets' buffers; 0 leaves them to the kernel.
    pub socket_buffer_bytes: u32,
    /// A folder for the flight record, which is written when a group fails for another reason than being closed.
    pub flight_recorder: Option<PathBuf>,
}

/// One process's engine: its threads, listeners and streams.
#[derive(Debug)]
pub struct Engine {
    handle: Arc<Handle>,
    contact: Contact,
    thread: Mutex<Option<JoinHandle<()>>>,
    is_stopping: AtomicBool,
    /// Peers may read it for as long as they have the contact.
    _memory_epoch: Arc<MemoryEpoch>,
    /// Bytes that were read from others'.
    memory_read: Arc<AtomicU64>,
    next_region: AtomicU64,
}

impl Engine {
    /// Opens the listeners and starts the thread.
    ///
    /// # Errors
    /// `Config`: an address or port that cannot be had.
    pub fn start(config: &Config) -> Result<Engine, Failure> {
        let mut node = [0; 16];
        getrandom::fill(&mut node)
            .map_err(|error| Failure::of_call(FailureKind::Bug, format!("no randomness from the kernel: {error}.")))?;
        let memory_epoch = Arc::new(MemoryEpoch::new(node));
        let settings = settings(config, node);
        let listen = Listen { addresses: config.addresses.clone(), ports: config.ports.clone() };
        let driver = Driver::new(settings, &listen)
            .map_err(|message| Failure::of_call(FailureKind::Config, format!("{message}.")))?;
        let contact = Contact {
            node,
            rank: config.rank,
            host: config.host.clone(),
            tcp: driver.addresses(),
            memory_epoch: if driver.listens_locally() { memory_epoch.address() } else { 0 },
            process: Process::own(),
        };
        let shared = Arc::new(Shared::default());
        let wake = driver.wake_handle();
        let (own, mark) = (shared.clone(), memory_epoch.clone());
        let recorder =
            Recorder::new(config.rank, config.generation.0, config.host.clone(), config.flight_recorder.clone());
        let records = recorder.clone();
        let runtime = Runtime::new(own.clone(), node, mark, Thresholds::default(), records);
        let memory_read = runtime.memory_read();
        let thread = start_threads(config.io_threads, Arc::new(Loop::new(driver, runtime)), own)?;
        Ok(Engine {
            handle: Arc::new(Handle::new(shared, wake, recorder)),
            contact,
            thread: Mutex::new(Some(thread)),
            is_stopping: AtomicBool::new(false),
            _memory_epoch: memory_epoch,
            memory_read,
            next_region: AtomicU64::new(1),
        })
    }

    /// What other processes need to connect to this one; to be published to them.
    #[must_use]
    pub fn contact(&self) -> &Contact {
        &self.contact
    }

    /// Joins a group: connects to all its members. Returns at once; the ticket completes when all streams are up.
    #[must_use]
    pub fn join(&self, spec: GroupSpec) -> (Group, Ticket) {
        let ticket = Ticket::default();
        let group = Group::new(spec.id, &spec.name, self.handle.clone());
        self.handle.command(Command::Join(spec, ticket.promise()), &ticket);
        (group, ticket)
    }

    /// Shares memory with the ranks of this host, which then read messages from it without a system call. `file` is a memory
    /// file, sealed against shrinking: one page ([`penstock_net::memory::page_bytes`]) for the engine, then `len` bytes that
    /// the caller has mapped at `address` and keeps mapped until [`Engine::unshare`]. Returns a number for that call.
    ///
    /// # Errors
    /// `Config`: the file does not fit, or cannot be mapped. The memory is then read as any other, and no group is affected.
    pub fn share(&self, file: OwnedFd, address: u64, len: u64) -> Result<u64, Failure> {
        let region = Region::new(fds::Fd::new(file), address, len)
            .map_err(|error| Failure::of_call(FailureKind::Config, format!("cannot share memory: {error}.")))?;
        let number = self.next_region.fetch_add(1, Ordering::Relaxed);
        self.handle.command(Command::Share(number, region), &Ticket::default());
        Ok(number)
    }

    /// Ends what [`Engine::share`] began. No operation may use the memory any more.
    pub fn unshare(&self, number: u64) {
        self.handle.command(Command::Unshare(number), &Ticket::default());
    }

    /// Counters and rates; blocks for one turn of the engine's loop.
    ///
    /// # Errors
    /// `Closed`: the engine has stopped.
    pub fn stats(&self) -> Result<Stats, Failure> {
        self.handle.ask(Command::Stats)
    }

    /// Bytes read from the memory of ranks on this host so far, as [`Stats::memory_read_bytes`]; takes no lock, blocks for nothing,
    /// and is known after the end as well.
    #[must_use]
    pub fn memory_read_bytes(&self) -> u64 {
        self.memory_read.load(Ordering::Relaxed)
    }

    /// The flight record, as JSON: the last operations of this process, and what [`Engine::stats`] returns. Blocks for one
    /// turn of the engine's loop.
    ///
    /// # Errors
    /// `Closed`: the engine has stopped.
    pub fn record(&self) -> Result<String, Failure> {
        self.handle.ask(Command::Record)
    }

    /// The operations of this process that have ended well since the last call; how many are missing, since they failed, or since the
    /// flight recorder dropped them, which keeps 1024; and when the earliest of these was issued, in nanoseconds of the host's
    /// monotonic clock, or 0 if none is missing.
    /// Each is told once, to whoever asks first. Wakes no thread, and works after the end as well.
    #[must_use]
    pub fn take_ended(&self) -> (Vec<Ended>, u64, u64) {
        let (now, clock) = (Instant::now(), monotonic_ns());
        let nanoseconds = |time| clock.saturating_sub(now.saturating_duration_since(time).as_nanos() as u64);
        let (ended, untold) = self.handle.recorder().take_ended(nanoseconds);
        (ended, untold.count, untold.since.map_or(0, nanoseconds))
    }

    /// Writes the flight record to [`Config::flight_recorder`], if that is set, in the background.
    pub fn write_record(&self) {
        self.handle.command(Command::WriteRecord, &Ticket::default());
    }

    /// Begins to end the thread: sends good-byes, and lets the peers take what was sent to them. With `wait` that takes as
    /// long as the peers need, until they leave or are lost, or until the longest time-out of an operation so far, 1.5 times
    /// [`Config::dead_after`] at the least; messages that were not delivered are logged. Without, 0.1 s. A later call may change
    /// `wait`.
    pub fn begin_stop(&self, wait: bool) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.handle.command(Command::Stop { wait }, &Ticket::default());
    }

    /// Whether the thread has ended.
    pub fn has_stopped(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        fds::forked() || thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// [`Engine::begin_stop`] with `wait`, unless it was called before; blocks until the thread has ended, and for up to 5 s
    /// more while a flight record is being written.
    pub fn stop(&self) {
        let thread = self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let Some(thread) = thread else { return };
        if fds::forked() {
            // The thread exists only in the parent.
            std::mem::forget(thread);
            return;
        }
        if !self.is_stopping.load(Ordering::Relaxed) {
            self.begin_stop(true);
        }
        // It catches its panics.
        let _ = thread.join();
        self.handle.recorder().flush(RECORD_WITHIN);
        // The process may be about to end without its handlers of `exit`, as forked workers do.
        log_writer::flush();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The event loop's settings for an engine.
pub(crate) fn settings(config: &Config, node: NodeKey) -> Settings {
    let dead_after = config.dead_after.as_nanos() as u64;
    Settings {
        node,
        rank: config.rank,
        io_threads: config.io_threads.clamp(1, MAX_IO_THREADS),
        streams: config.streams.max(1),
        streams_within_host: config.streams_within_host.max(1),
        shared_memory: config.shared_memory,
        ptracer: config.ptracer,
        peer: PeerConfig {
            generation: config.generation,
            checksum: config.checksum,
            dead_after,
            heartbeat_every: dead_after / 8,
            eager_bytes: Thresholds::default().eager_limit_bytes,
            ..PeerConfig::default()
        },
        socket_buffer_bytes: config.socket_buffer_bytes,
    }
}

/// Starts the engine's threads. Returns the first, which ends after the others.
fn start_threads(count: usize, the_loop: Arc<Loop<Runtime>>, shared: Arc<Shared>) -> Result<JoinHandle<()>, Failure> {
    let count = count.clamp(1, MAX_IO_THREADS);
    let weak = Arc::downgrade(&the_loop);
    let refused = |thread: usize, error: &std::io::Error| {
        if let Some(helped) = weak.upgrade() {
            helped.end();
        }
        Failure::of_call(
            FailureKind::Config,
            format!(
                "cannot start I/O thread {} of {count}: {error}. Raise the limit on threads (ulimit -u, TasksMax= of systemd, the pids \
                 limit of a container), or lower PENSTOCK_IO_THREADS.",
                thread + 1
            ),
        )
    };
    let mut helpers = Vec::new();
    for thread in 1..count {
        let helped = the_loop.clone();
        let builder = std::thread::Builder::new().name(format!("penstock-{thread}"));
        helpers.push(builder.spawn(move || helped.help(thread)).map_err(|error| refused(thread, &error))?);
    }
    let first = std::thread::Builder::new().name("penstock".into()).spawn(move || run(the_loop, helpers, &shared));
    first.map_err(|error| refused(0, &error))
}

/// Runs the engine's first thread. When it ends, for whatever reason, all waits on it end, and later calls fail at once.
fn run(the_loop: Arc<Loop<Runtime>>, helpers: Vec<JoinHandle<()>>, shared: &Shared) {
    let mut failure = Failure::fatal(
        FailureKind::Closed,
        "the engine has stopped: the last process group was destroyed, or the interpreter is about to end.",
    );
    // After a panic the loop is used once more, to tell the peers. Whatever that cannot end is dropped below.
    if let Err(panic) = the_loop.run(helpers) {
        failure = Failure::fatal(
            FailureKind::Bug,
            format!(
                "the engine's thread has panicked: {panic}. This is a defect of Penstock: please report it, with what that process \
                 has printed on standard error. The process must be started again.",
            ),
        );
        log::error!("penstock: {}", failure.message);
        shared.close(&failure);
        let told = catch_unwind(AssertUnwindSafe(|| {
            the_loop.with(|driver, runtime| runtime.crash(driver.peers(), &failure));
            the_loop.run(Vec::new())
        }));
        if !matches!(told, Ok(Ok(()))) {
            log::error!("penstock: the engine's thread has panicked again: the other ranks see only that it is gone");
        }
    }
    shared.close(&failure);
    let (driver, runtime) = Arc::into_inner(the_loop).expect("the other threads have ended").into_parts();
    drop(driver);
    runtime.end(&failure);
}

/// More threads than this wait for each other most of the time.
pub const MAX_IO_THREADS: usize = 16;
/// How long the end of an engine waits until the flight record is written.
const RECORD_WITHIN: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Call, Gradient, Reducer, ReducerSpec};
    use penstock_plan::Collective;
    use penstock_stream::fingerprint::{Fingerprint, Name};
    use penstock_types::{DType, GroupId, Priority, ReduceOp};

    /// A panic of one of the engine's threads, on its own or while it handles a frame, is an error of kind bug for everything that is
    /// open and for everything that comes later, at once; the other rank is told the reason. Both ways to the other rank.
    #[test]
    fn a_panic_fails_everything() {
        for (shared_memory, io_threads) in [(false, 1), (true, 1), (false, 3), (true, 3)] {
            for at_next_frame in [false, true] {
                let (engines, groups) = some(2, shared_memory, io_threads);
                let mut buffers = [[0u32; 4]; 2];
                let open: Vec<Ticket> =
                    (0..2).map(|rank| receive(&groups[rank], 1 - rank as u32, 7, &mut buffers[rank])).collect();
                let watch = Ticket::default();
                groups[0].watch(watch.clone());
                engines
                    .iter()
                    .for_each(|engine| drop(engine.stats().expect("it runs, and has begun what was started")));
                engines[0].handle.command(Command::Panic(at_next_frame), &Ticket::default());
                if at_next_frame {
                    let call = call(Collective::Send { to: 0 }, 8, &mut buffers[1]);
                    // SAFETY: the buffer outlives the waits below.
                    drop(unsafe { groups[1].start(call) });
                }
                for ticket in [&open[0], &watch] {
                    is_bug(&wait(ticket), "has panicked: a test wants it");
                }
                let told = wait(&open[1]);
                assert!(told.message.contains("failed: rank 0 ("), "{told}");
                is_bug(&told, "on test) reports: the engine's thread has panicked: a test wants it");
                is_bug(&wait(&receive(&groups[0], 1, 9, &mut [0; 4])), "has panicked");
                is_bug(&engines[0].stats().expect_err("nobody answers"), "has panicked");
                is_bug(&groups[0].hosts().expect_err("nobody answers"), "has panicked");
                let (_, joined) = engines[0].join(spec(&engines, 0, 3));
                is_bug(&wait(&joined), "has panicked");
                engines[0].stop();
            }
        }
    }

    /// An engine that has stopped refuses what comes later, and a gradient that is submitted then fails its pass: no backward
    /// pass waits for an engine that is not there.
    #[test]
    fn nothing_waits_for_an_engine_that_has_stopped() {
        let (engines, groups) = pair(false);
        let reducer = Reducer::new(ReducerSpec {
            rounds: groups[0].clone(),
            buckets: groups[0].clone(),
            rank: 0,
            world: 2,
            gradients: vec![Gradient { name: "w".into(), elements: 4, dtype: DType::F32, order: 0 }],
            op: ReduceOp::Avg,
            bucket_bytes: 1 << 20,
            wire: None,
            error_feedback: false,
            last_first: false,
            tapers: false,
            check_finite: false,
            priority: Priority(0),
            timeout: u64::MAX,
        })
        .expect("a reducer");
        let open = receive(&groups[0], 1, 7, &mut [0; 4]);
        engines[0].stop();
        let stopped = |failure: &Failure| {
            assert!(failure.kind == FailureKind::Closed && failure.message.contains("stopped"), "{failure}");
        };
        stopped(&wait(&open));
        stopped(&wait(&receive(&groups[0], 1, 8, &mut [0; 4])));
        stopped(&engines[0].stats().expect_err("nobody answers"));
        let mut gradient = [1f32; 4];
        // SAFETY: the gradient outlives the flush.
        drop(unsafe { reducer.submit(0, gradient.as_mut_ptr().cast(), 16, false, None) });
        stopped(&wait(&reducer.flush()));
    }

    /// A ticket whose promise is dropped before it was kept gets a failure.
    #[test]
    fn a_promise_that_is_lost_is_a_failure() {
        let ticket = Ticket::default();
        let promise = ticket.promise();
        drop(promise.clone());
        assert!(ticket.result().is_none(), "one is still there");
        drop(promise);
        is_bug(&wait(&ticket), "dropped this operation");
    }

    /// Sends without bytes that nobody receives are not lost without a word when their receiver can keep no more of them: the
    /// group ends, on both ranks, for that reason, also where a message of another group was the one too many. The other group
    /// goes on.
    #[test]
    fn too_many_messages_that_nobody_receives() {
        for in_other_group in [false, true] {
            let (engines, groups) = pair(false);
            let others = joined(&engines, 2);
            let watches = [0, 1].map(|rank: usize| {
                let watch = Ticket::default();
                groups[rank].watch(watch.clone());
                watch
            });
            let send = |group: &Group| {
                let call = call(Collective::Send { to: 1 }, 7, &mut []);
                // SAFETY: it has no buffer.
                unsafe { group.start(call) }
            };
            let mut tickets: Vec<Ticket> = (0..1 << 14).map(|_| send(&groups[0])).collect();
            while engines[1].stats().expect("it runs").held.early_messages < 1 << 14 {
                assert!(watches[1].result().is_none(), "too soon");
            }
            // Not afterwards: the receiver drops what has come for a group that has failed, and its sender gets credit.
            let ended = tickets.iter().filter(|ticket| ticket.result().is_some()).count();
            assert!((8000..=8192).contains(&ended), "{ended} sends did not wait for a receiver");
            let one_too_many = send(if in_other_group { &others[0] } else { &groups[0] });
            tickets.extend((!in_other_group).then(|| one_too_many.clone()));
            for failure in watches.each_ref().map(wait) {
                assert!(failure.kind == FailureKind::Mismatch, "{failure}");
                assert!(failure.message.contains("16384 messages of rank 0"), "{failure}");
            }
            for ticket in &tickets {
                ticket.wait(Some(Duration::from_secs(10))).expect("an end within 10 s").ok();
            }
            if in_other_group {
                let received = receive(&others[1], 0, 7, &mut []);
                for ticket in [&received, &one_too_many] {
                    ticket.wait(Some(Duration::from_secs(10))).expect("an end within 10 s").expect("it goes on");
                }
            }
        }
    }

    /// Where a rank can keep no more messages, the rank that has sent most of them loses a group for it, although another one has
    /// sent more in a single group.
    #[test]
    fn a_flood_ends_a_group_of_its_sender() {
        let (engines, mut groups) = some(3, false, 1);
        for id in 2..=4 {
            groups.extend(joined(&engines, id));
        }
        let group = |id: usize, rank: usize| &groups[3 * (id - 1) + rank];
        // SAFETY: it has no buffer.
        let send = |id, rank| unsafe { group(id, rank).start(call(Collective::Send { to: 2 }, 7, &mut [])) };
        for _ in 0..4000 {
            (1..=3).for_each(|id| drop(send(id, 0)));
        }
        let tickets: Vec<Ticket> = (12_000..1 << 14).map(|_| send(4, 1)).collect();
        while engines[2].stats().expect("it runs").held.early_messages < 1 << 14 {
            assert!(tickets.iter().all(|ticket| ticket.result().is_none_or(|end| end.is_ok())), "too soon");
        }
        let watch = Ticket::default();
        group(3, 2).watch(watch.clone());
        let one_more = send(4, 1);
        let failure = wait(&watch);
        assert!(
            failure.kind == FailureKind::Mismatch && failure.message.contains("4000 messages of rank 0"),
            "{failure}"
        );
        let received: Vec<Ticket> = (12_000..=1 << 14).map(|_| receive(group(4, 2), 1, 7, &mut [])).collect();
        for ticket in tickets.iter().chain([&one_more]).chain(&received) {
            ticket.wait(Some(Duration::from_secs(10))).expect("an end within 10 s").expect("its group goes on");
        }
    }

    fn is_bug(failure: &Failure, expected: &str) {
        assert!(failure.kind == FailureKind::Bug && failure.message.contains(expected), "{failure}");
    }

    /// What a ticket fails with, soon.
    fn wait(ticket: &Ticket) -> Failure {
        ticket.wait(Some(Duration::from_secs(10))).expect("an end within 10 s").expect_err("a failure")
    }

    fn receive(group: &Group, from: u32, tag: u32, buffer: &mut [u32]) -> Ticket {
        // SAFETY: nothing is ever sent here, so the buffer is not written.
        unsafe { group.start(call(Collective::Recv { from }, tag, buffer)) }
    }

    fn call(collective: Collective, tag: u32, buffer: &mut [u32]) -> Call {
        Call {
            collective,
            fingerprint: Fingerprint::new(Name::PointToPoint, None, DType::I32, None, buffer.len() as u64),
            dtype: DType::I32,
            op: ReduceOp::Sum,
            bytes: size_of_val(buffer) as u64,
            splits: None,
            input: buffer.as_ptr().cast(),
            output: buffer.as_mut_ptr().cast(),
            tag,
            coflow: 0,
            priority: Priority(0),
            hold: false,
            timeout: u64::MAX,
            keep: None,
        }
    }

    fn pair(shared_memory: bool) -> (Vec<Engine>, Vec<Group>) {
        some(2, shared_memory, 1)
    }

    /// So many engines, and a group of them all.
    fn some(count: u32, shared_memory: bool, io_threads: usize) -> (Vec<Engine>, Vec<Group>) {
        let config = |rank| Config {
            rank,
            io_threads,
            host: "test".into(),
            generation: Generation(0),
            addresses: vec!["127.0.0.1".parse().expect("an address")],
            ports: 0..=0,
            streams: 2,
            streams_within_host: 2,
            shared_memory,
            ptracer: Ptracer::default(),
            checksum: false,
            dead_after: Duration::from_secs(4),
            socket_buffer_bytes: 0,
            flight_recorder: None,
        };
        let engines: Vec<Engine> = (0..count).map(|rank| Engine::start(&config(rank)).expect("starts")).collect();
        let groups = joined(&engines, 1);
        (engines, groups)
    }

    /// The group of this id, as each of its ranks has it.
    fn joined(engines: &[Engine], id: u64) -> Vec<Group> {
        let (groups, tickets): (Vec<_>, Vec<_>) =
            (0..).zip(engines).map(|(rank, engine)| engine.join(spec(engines, rank, id))).unzip();
        for ticket in tickets {
            ticket.wait(Some(Duration::from_secs(10))).expect("an end").expect("joined");
        }
        groups
    }

    fn spec(engines: &[Engine], rank: u32, id: u64) -> GroupSpec {
        GroupSpec {
            id: GroupId(id),
            generation: Generation(0),
            rank,
            members: engines.iter().map(|engine| engine.contact().clone()).collect(),
            secret: b"secret".to_vec(),
            algorithm: None,
            name: "test".into(),
        }
    }
}
