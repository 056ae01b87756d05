//! The event loop.

mod accept;
mod connect;
mod ending;
mod gone;
mod greet;
mod listen;
mod names;
mod neighbour;
mod threads;
mod timers;
mod turn;
mod urgency;

pub use self::threads::{Loop, Run};

use self::connect::LocalPorts;
use self::listen::Listeners;
use self::names::Names;
use self::threads::Threads;
use crate::arbiter::Arbiter;
use crate::close_reason::CloseReason;
use crate::contact::Contact;
use crate::fds::Fd;
use crate::handler::{Handler, Peers};
use crate::ptrace::{Ptracer, Yama};
use crate::socket::Socket;
use crate::system::{Host, System};
use penstock_stream::handshake::{HandshakeError, NodeKey};
use penstock_stream::peer::{Event, PeerConfig, StreamId};
use penstock_types::{PeerId, SECOND, Time};
use rustix::event::EventfdFlags;
use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Settings of the event loop.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This process.
    pub node: NodeKey,
    /// Its rank in the job.
    pub rank: u32,
    /// Threads of the loop.
    pub io_threads: usize,
    /// TCP streams to a peer on another host.
    pub streams: u16,
    /// TCP streams to a peer at an address of this host, where nothing caps a flow, and every stream more costs processor time.
    pub streams_within_host: u16,
    /// Take the way through memory to peers on this host.
    pub shared_memory: bool,
    /// Who may read this process's memory where Yama asks.
    pub ptracer: Ptracer,
    /// How peers behave; `references` and `descriptors` are set from what the hand-shake finds.
    pub peer: PeerConfig,
    /// Bytes of `SO_SNDBUF` and `SO_RCVBUF`; 0 leaves them to the kernel.
    pub socket_buffer_bytes: u32,
}

/// Where to listen.
#[derive(Clone, Debug)]
pub struct Listen {
    /// An address an interface.
    pub addresses: Vec<IpAddr>,
    /// Ports to try, first to last; `0..=0` lets the kernel choose.
    pub ports: std::ops::RangeInclusive<u16>,
}

/// Ends the sleep of a thread of the loop from another thread.
#[derive(Debug)]
pub struct Wake {
    event: Fd,
    /// Set while the thread may sleep.
    sleeping: AtomicBool,
}

impl Wake {
    fn new() -> Result<Wake, String> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| format!("eventfd failed: {e}"))?;
        Ok(Wake { event: Fd::new(event), sleeping: AtomicBool::new(false) })
    }

    /// Makes the loop call [`Handler::woken`], if the handle is [`Driver::wake_handle`].
    pub fn wake(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // A full counter means that the loop has been woken.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

impl Connections {
    fn new(contact: Contact) -> Connections {
        Connections {
            contact,
            names: Names::default(),
            connects: false,
            sockets: Vec::new(),
            was_up: false,
            said_bye: false,
            finished: false,
            retries: Vec::new(),
            down_since: None,
            refusals: 0,
            round: 0,
            complaint: None,
            unread: 0,
            has_no_local: false,
            ports: LocalPorts::choose(),
            lost: Vec::new(),
        }
    }
}

/// What the threads of an event loop have in common: [`Loop`] runs it.
pub struct Driver {
    settings: Settings,
    system: Arc<System>,
    threads: Threads,
    listeners: Listeners,
    sockets: HashMap<u64, Socket>,
    next_token: u64,
    peers: Peers,
    connections: Vec<Connections>,
    /// Peers that are gone, until no thread has a claim on a stream to them.
    gone: Vec<Gone>,
    /// When a shortage was logged last.
    complained: Option<Time>,
    next_timers: Time,
    next_tick: Time,
    yama: Yama,
    arbiter: Arbiter,
    /// Peers on other hosts for which something urgent waits: their streams have no room.
    blocked: BTreeSet<PeerId>,
}

/// State of the connections to one peer.
struct Connections {
    contact: Contact,
    names: Names,
    /// This side connects, the other one accepts.
    connects: bool,
    sockets: Vec<u64>,
    /// A stream has been up.
    was_up: bool,
    said_bye: bool,
    finished: bool,
    /// For each stream to be connected again: the stream, the time of the next attempt, and how many have failed.
    retries: Vec<(StreamId, Time, u32)>,
    /// Since when no stream has been up.
    down_since: Option<Time>,
    /// How many of the last attempts to connect the peer's host has refused.
    refusals: u32,
    round: usize,
    /// Why hand-shakes with the peer fail, as logged last.
    complaint: Option<HandshakeError>,
    /// How often the peer's memory could not be read for a reason that may pass.
    unread: u32,
    /// Its local socket cannot be connected to, and that was logged.
    has_no_local: bool,
    ports: LocalPorts,
    /// Streams that were lost after they had been up.
    lost: Vec<StreamId>,
}

/// A peer that cannot be reached any more.
struct Gone {
    peer: PeerId,
    how: How,
    /// What to say of it.
    reason: String,
}

/// How a peer has gone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// It has said good-bye.
    Left,
    Lost {
        /// Its process is gone for certain.
        has_died: bool,
    },
    /// It was never connected: one of the two processes has refused the other.
    Refused,
}

impl Driver {
    /// Opens the listeners. The loop does not run yet.
    ///
    /// # Errors
    /// Which address or port could not be had, and which setting to change.
    pub fn new(settings: Settings, listen: &Listen) -> Result<Driver, String> {
        let mut driver = Driver::on(System::kernel(settings.io_threads)?, settings)?;
        for (thread, wake) in driver.threads.wakes.iter().enumerate() {
            driver.system.add(thread, &wake.event, WAKE).map_err(|e| format!("epoll_ctl failed: {e}"))?;
        }
        for address in &listen.addresses {
            driver.listeners.open_tcp(&driver.system, *address, listen.ports.clone())?;
        }
        if driver.settings.shared_memory {
            driver.listeners.open_local(&driver.system, &driver.settings.node)?;
            driver.settings.shared_memory = driver.listens_locally();
            driver.arbiter = Arbiter::of_this_host();
        }
        Ok(driver)
    }

    /// A loop on a simulated host, for tests. [`Loop::turn`] runs it.
    ///
    /// # Errors
    /// The kernel has no descriptor left.
    pub fn played(host: Box<dyn Host>, settings: Settings) -> Result<Driver, String> {
        Driver::on(System::Played(host), Settings { shared_memory: false, ..settings })
    }

    /// A loop without listeners.
    fn on(system: System, settings: Settings) -> Result<Driver, String> {
        let threads = settings.io_threads;
        Ok(Driver {
            system: Arc::new(system),
            threads: Threads::new(threads)?,
            listeners: Listeners::default(),
            sockets: HashMap::new(),
            next_token: FIRST_SOCKET,
            peers: Peers::new(threads),
            connections: Vec::new(),
            gone: Vec::new(),
            complained: None,
            next_timers: Time(0),
            next_tick: Time(0),
            yama: Yama::new(settings.ptracer),
            arbiter: Arbiter::none(),
            blocked: BTreeSet::new(),
            settings,
        })
    }

    /// The addresses on which it listens.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.addresses().collect()
    }

    /// Whether peers on this host can reach it without TCP.
    #[must_use]
    pub fn listens_locally(&self) -> bool {
        self.listeners.has_local()
    }

    /// A handle by which others wake the loop.
    #[must_use]
    pub fn wake_handle(&self) -> Arc<Wake> {
        self.threads.wakes[0].clone()
    }

    /// The state machines of all peers, while the loop does not run.
    pub fn peers(&mut self) -> &mut Peers {
        &mut self.peers
    }

    fn now(&self) -> Time {
        self.system.now()
    }

    /// Handles the timers at this time at the latest.
    fn schedule_timers(&mut self, at: Time) {
        self.next_timers = self.next_timers.min(at);
        if at < self.threads.sleeps_until {
            self.threads.wakes[0].wake();
        }
    }

    fn handle_peer_events<H: Handler>(&mut self, handler: &mut H, peer: PeerId, now: Time) {
        while let Some(event) = self.peers.machines[peer as usize].poll_event() {
            match event {
                Event::Silent => {
                    let silent_s = self.settings.peer.dead_after as f64 / 1e9;
                    let what = format!("has been silent for {silent_s:.1} s ({HOW_TO_STAY})");
                    self.give_up(handler, peer, &what, now);
                    self.lose(handler, peer, &what, false, now);
                }
                Event::Stalled(stream) => {
                    let token = self.sockets.iter().find(|(_, s)| s.peer == Some(peer) && s.stream == stream);
                    if let Some((&token, _)) = token
                        && let Some(socket) = self.sockets.remove(&token)
                    {
                        self.closed(handler, token, socket, &CloseReason::Stalled, now);
                    }
                }
                Event::Bye => self.connections[peer as usize].said_bye = true,
                event => handler.event(&mut self.peers, peer, event),
            }
        }
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel has randomness");
    bytes
}

const WAKE: u64 = 0;
const LOCAL_LISTENER: u64 = 1;
const FIRST_LISTENER: u64 = 2;
const FIRST_SOCKET: u64 = 1 << 16;
/// Advice where a rank was given up and went on later.
const HOW_TO_STAY: &str = "if it was only stopped, or its network was down, a longer PENSTOCK_PEER_TIMEOUT helps";

/// Features of every stream; none yet.
const FEATURES: u32 = 0;
/// The sender can read the receiver's memory: a property of the pair, found by the hand-shake.
const FEATURE_READS_MEMORY: u32 = 1;

const HANDSHAKE_WITHIN: u64 = 5 * SECOND;
