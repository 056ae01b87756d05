//! A running daemon: its threads, from start to end.

use crate::config::human_bytes;
use crate::control::Control;
use crate::shard::{self, Settings};
use crate::streams::Streamed;
use crate::work::{Sums, Work};
use crate::{Config, Role, http, proof};
use penstock_aggregation::{Key, Limits, Shard};
use penstock_net::datagrams::{Datagrams, SHORT_SEND_BUFFER};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io};

/// A running daemon. It ends when it is dropped, or after it was drained.
pub struct Daemon {
    here: SocketAddr,
    control: Arc<Control>,
    listener: Arc<TcpListener>,
    state: Arc<State>,
    threads: Vec<JoinHandle<()>>,
}

/// Why a daemon does not start.
#[derive(Debug)]
pub enum StartError {
    /// The configuration is invalid.
    Config(String),
    /// An address cannot be bound.
    Bind {
        /// The address on which the daemon was to listen.
        address: SocketAddr,
        /// The protocol of that address: TCP or UDP.
        protocol: &'static str,
        /// The error that the system returned.
        error: io::Error,
    },
    /// The machine has no threads or descriptors left.
    Machine(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Config(message) => write!(f, "{message}"),
            StartError::Bind { address, protocol, error } if error.kind() == io::ErrorKind::AddrInUse => {
                let ip = address.ip();
                write!(
                    f,
                    "{protocol} port {} of {ip} is taken: another aggregator or server? Look with `ss -lntup`, or give \
                     another port: --listen {}",
                    address.port(),
                    SocketAddr::new(ip, address.port().wrapping_add(100)),
                )
            }
            StartError::Bind { address, error, .. } if error.kind() == io::ErrorKind::AddrNotAvailable => write!(
                f,
                "{} is not an address of this machine: give one that `ip address` lists, which the workers reach",
                address.ip()
            ),
            StartError::Bind { address, protocol, error } => write!(f, "{protocol} {address} cannot be had: {error}"),
            StartError::Machine(error) => write!(f, "this machine cannot start it: {error}"),
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            StartError::Bind { error, .. } | StartError::Machine(error) => Some(error),
            StartError::Config(_) => None,
        }
    }
}

#[derive(Default)]
struct State {
    /// When the daemon was asked to end; whether it has ended.
    ends: Mutex<(Option<Instant>, bool)>,
    changed: Condvar,
}

impl Daemon {
    /// Binds all ports and starts all threads. When this returns, the daemon takes packets and requests. A server's results are sums.
    pub fn start(config: Config) -> Result<Daemon, StartError> {
        Daemon::start_with(config, Box::new(Sums))
    }

    /// The same, with what a server is to do with the buffers of jobs whose results come apart.
    pub fn start_with(config: Config, work: Box<dyn Work>) -> Result<Daemon, StartError> {
        config.check().map_err(StartError::Config)?;
        let name = proof::draw_name().map_err(StartError::Machine)?;
        let (sockets, listener) = bind(&config)?;
        let here = sockets[0].local_addr();
        announce(&config, here, &sockets);
        let Config { shards, limits, .. } = config;
        // Each shard gets an equal part of the limits.
        let share = |whole: usize| whole / shards as usize;
        let limits = Limits { jobs: limits.jobs, slots: share(limits.slots), memory_bytes: share(limits.memory_bytes) };
        // A client that has the secret is trusted with the addresses that it names.
        let receipts = match config.secret {
            Some(_) => None,
            None => Some(Key(proof::draw().map_err(StartError::Machine)?)),
        };
        let mut handles = Vec::new();
        let mut work = Some(work);
        for (index, socket) in (0..).zip(sockets) {
            let settings = Settings { shard: Shard { index, count: shards }, limits, drop: config.drop, receipts };
            let started = match config.role {
                Role::Aggregator => shard::start_adding(socket, &settings),
                Role::Server => shard::start_serving(socket, &settings, work.take().expect("a server has one shard")),
            };
            match started {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    handles.iter_mut().for_each(shard::Handle::join);
                    return Err(StartError::Machine(error));
                }
            }
        }
        let (forget_after, drain_timeout) = (config.forget_after, config.drain_timeout);
        let control = Arc::new(Control::new(config, here, name, handles));
        let mut daemon = Daemon {
            here,
            control: Arc::clone(&control),
            listener: Arc::new(listener),
            state: Arc::default(),
            threads: Vec::new(),
        };
        let (listener, state) = (Arc::clone(&daemon.listener), Arc::clone(&daemon.state));
        let answering = Arc::clone(&control);
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(body).map_err(StartError::Machine)
        };
        daemon.threads.push(spawn(
            "penstock-admit",
            Box::new(move || {
                let accept = || listener.accept().map(|(stream, _)| stream);
                http::serve(accept, move |request| answering.handle(request));
            }),
        )?);
        daemon
            .threads
            .push(spawn("penstock-keep", Box::new(move || keep(&control, &state, forget_after, drain_timeout)))?);
        Ok(daemon)
    }

    /// The address of TCP and of shard 0.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.here
    }

    /// Bytes of sums of all jobs together.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.control.limits().memory_bytes
    }

    /// Its jobs from this number on and their counters, the JSON of `GET /jobs?from=`. `None`: a shard does not answer.
    #[must_use]
    pub fn jobs(&self, from: u32) -> Option<String> {
        self.control.jobs(from)
    }

    /// Answers what would be a request over HTTP of this method, path and body, of somebody who has proved to know the secret. Returns
    /// the status, and JSON.
    #[must_use]
    pub fn answer(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let response = self.control.answer(method, path, body);
        (response.status, response.body)
    }

    /// A worker behind a stream pushes or pulls the buffer of this name (`docs/reference/aggregator.md`). Returns at once; the answer
    /// comes on the shard's thread, which it must not hold up.
    pub fn stream(&self, name: &str, call: Streamed) {
        self.control.stream(name, call);
    }

    /// Asks the daemon to end: it opens no new jobs, and ends when no sum is incomplete, or after the drain time-out. Returns
    /// at once.
    pub fn drain(&self) {
        self.control.drain();
        let mut ends = self.state.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.0.get_or_insert_with(Instant::now);
        self.state.changed.notify_all();
    }

    /// Waits until the daemon has drained, at most `timeout`. Returns whether it has.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> bool {
        let ends = self.state.ends.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.state.changed.wait_timeout_while(ends, timeout, |ends| !ends.1);
        waited.unwrap_or_else(PoisonError::into_inner).0.1
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.state.ends.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.state.changed.notify_all();
        // Wakes `accept`.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        self.control.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Closes silent jobs, and ends the daemon when it has drained.
fn keep(control: &Control, state: &State, forget_after: Duration, drain_timeout: Duration) {
    let mut look = Instant::now();
    let every = (forget_after / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
    let mut ends = state.ends.lock().unwrap_or_else(PoisonError::into_inner);
    while !ends.1 {
        let asked = ends.0;
        drop(ends);
        if look.elapsed() >= every {
            control.forget_silent();
            look = Instant::now();
        }
        let done = asked.is_some_and(|asked| {
            let idle = control.is_idle();
            let late = asked.elapsed() >= drain_timeout;
            if late && idle == Some(false) {
                log::warn!("penstock: ends although sums are half done: {:.1} s are over", drain_timeout.as_secs_f64());
            }
            late || idle == Some(true)
        });
        ends = state.ends.lock().unwrap_or_else(PoisonError::into_inner);
        if done {
            ends.1 = true;
            state.changed.notify_all();
        } else if !ends.1 {
            let pause = if asked.is_some() || ends.0.is_some() { DRAINING } else { every };
            ends = state.changed.wait_timeout(ends, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Binds all ports, or fails.
fn bind(config: &Config) -> Result<(Vec<Datagrams>, TcpListener), StartError> {
    let mut tries = 0;
    loop {
        match bind_at(config, config.listen) {
            // The kernel chose the first port; the next one, or TCP's, may be in use.
            Err(StartError::Bind { error, .. })
                if config.listen.port() == 0 && error.kind() == io::ErrorKind::AddrInUse && tries < TRIES =>
            {
                tries += 1;
            }
            outcome => return outcome,
        }
    }
}

fn bind_at(config: &Config, mut address: SocketAddr) -> Result<(Vec<Datagrams>, TcpListener), StartError> {
    let mut sockets = Vec::new();
    let failed = |address, protocol| move |error| StartError::Bind { address, protocol, error };
    for shard in 0..config.shards as u16 {
        let mut port = address;
        port.set_port(address.port().checked_add(shard).filter(|port| *port != 0 || shard == 0).unwrap_or(0));
        let socket = Datagrams::bind(port, config.offloads, config.buffer_bytes).map_err(failed(port, "UDP"))?;
        // What waits here is not dropped, as in a host's own full queue; and results that are requested again leave before those of
        // later blocks.
        socket.set_send_buffer(SHORT_SEND_BUFFER).map_err(failed(port, "UDP"))?;
        if shard == 0 {
            address = socket.local_addr();
        }
        sockets.push(socket);
    }
    let listener = TcpListener::bind(address).map_err(failed(address, "TCP"))?;
    Ok((sockets, listener))
}

fn announce(config: &Config, here: SocketAddr, sockets: &[Datagrams]) {
    let Config { role, shards, limits, secret, drop, offloads, buffer_bytes, .. } = config;
    let role = role.name();
    let ports = if *shards > 1 { format!("-{}", here.port() + *shards as u16 - 1) } else { String::new() };
    log::info!(
        "penstock: {role} on {here}{ports} ({shards} shard{}, {} slots, {}, offloads {})",
        if *shards > 1 { "s" } else { "" },
        limits.slots,
        human_bytes(limits.memory_bytes as u64),
        if *offloads { "on" } else { "off" },
    );
    if secret.is_none() {
        if here.ip().is_loopback() {
            log::info!("penstock: no secret: whoever reaches {here} may open jobs");
        } else {
            log::warn!(
                "penstock: no secret: whoever reaches {here} may open and close jobs; set PENSTOCK_SECRET_FILE here and \
                 for the ranks"
            );
        }
    }
    if here.ip().is_unspecified() {
        log::warn!(
            "penstock: listens on all addresses: packets leave from the one that their route picks, and children refuse others \
             than the one they were told; give one address where this machine has several"
        );
    }
    if let Some((rate, seed)) = drop {
        log::warn!(
            "penstock: THROWS AWAY {:.2} % OF RECEIVED PACKETS (--drop {rate} --seed {seed}): for tests only",
            rate * 100.0
        );
    }
    // Linux reports twice the requested size.
    if let Ok((received, _)) = sockets[0].buffer_bytes()
        && received < *buffer_bytes
    {
        log::warn!(
            "penstock: receive buffers have {} instead of {}: raise net.core.rmem_max, or packets are lost at full rate",
            human_bytes(received as u64),
            human_bytes(*buffer_bytes as u64)
        );
    }
}

/// How often a daemon that was asked to end checks whether it can.
const DRAINING: Duration = Duration::from_millis(20);
/// Attempts to find consecutive free ports; the first nearly always succeeds.
const TRIES: u32 = 64;
