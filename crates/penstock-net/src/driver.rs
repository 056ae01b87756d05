//! The event loop.

mod accept;
mod connect;
mod ending;
mod gone;
mod greet;
mod listen;
mod neighbour;
mod timers;
mod urgency;

use self::connect::LocalPorts;
use self::listen::Listeners;
use crate::arbiter::Arbiter;
use crate::close_reason::CloseReason;
use crate::contact::Contact;
use crate::fds::Fd;
use crate::handler::{Handler, Peers};
use crate::ptrace::{Ptracer, Yama};
use crate::socket::{Progress, Socket};
use crate::system::{Host, System};
use penstock_stream::handshake::{HandshakeError, NodeKey};
use penstock_stream::peer::{Event, PeerConfig, StreamId, Urgency};
use penstock_types::{GroupId, MILLISECOND, PeerId, SECOND, Time};
use rustix::event::{EventfdFlags, epoll};
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Settings of the event loop.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This process.
    pub node: NodeKey,
    /// Its rank in the job.
    pub rank: u32,
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

/// Ends the loop's sleep from another thread.
#[derive(Debug)]
pub struct Wake {
    event: Fd,
    /// Set while the loop may sleep.
    sleeping: AtomicBool,
}

impl Wake {
    /// Makes the loop call [`Handler::woken`].
    pub fn wake(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // A full counter means that the loop has been woken.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

impl Link {
    fn new(contact: Contact) -> Link {
        Link {
            contact,
            job: None,
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
            ports: LocalPorts::choose(),
            lost: Vec::new(),
        }
    }
}

/// One thread's event loop.
pub struct Driver {
    settings: Settings,
    system: System,
    wake: Arc<Wake>,
    listeners: Listeners,
    sockets: HashMap<u64, Socket>,
    next_token: u64,
    peers: Peers,
    links: Vec<Link>,
    /// Sockets that may have more to read, although the kernel reports them only once.
    again: Vec<u64>,
    junk: Box<[u8]>,
    /// When a shortage was logged last.
    complained: Option<Time>,
    next_timers: Time,
    next_tick: Time,
    /// When the kernel was last asked what has arrived. All of that has been read since, or as much of it as one turn reads.
    looked: Time,
    yama: Yama,
    arbiter: Arbiter,
}

/// State of a loop from turn to turn, until it ends.
#[derive(Default)]
pub struct Run {
    events: Vec<epoll::Event>,
    /// When it began to stop.
    stopping_since: Option<Time>,
    /// When a good-bye was sent to each peer.
    farewells: HashMap<PeerId, Time>,
}

/// State of the connections to one peer.
struct Link {
    contact: Contact,
    job: Option<(GroupId, Vec<u8>)>,
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
    ports: LocalPorts,
    /// Streams that were lost after they had been up.
    lost: Vec<StreamId>,
}

impl Driver {
    /// Opens the listeners. The loop does not run yet.
    ///
    /// # Errors
    /// Which address or port could not be had, and which setting to change.
    pub fn new(settings: Settings, listen: &Listen) -> Result<Driver, String> {
        let mut driver = Driver::on(System::kernel()?, settings)?;
        driver.system.add(&driver.wake.event, WAKE).map_err(|e| format!("epoll_ctl failed: {e}"))?;
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

    /// A loop on a simulated host, for tests. [`Driver::turn`] runs it.
    ///
    /// # Errors
    /// The kernel has no descriptor left.
    pub fn played(host: Box<dyn Host>, settings: Settings) -> Result<Driver, String> {
        Driver::on(System::Played(host), Settings { shared_memory: false, ..settings })
    }

    /// A loop without listeners.
    fn on(system: System, settings: Settings) -> Result<Driver, String> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| format!("eventfd failed: {e}"))?;
        let wake = Arc::new(Wake { event: Fd::new(event), sleeping: AtomicBool::new(false) });
        Ok(Driver {
            system,
            wake,
            listeners: Listeners::default(),
            sockets: HashMap::new(),
            next_token: FIRST_SOCKET,
            peers: Peers {
                machines: Vec::new(),
                added: Vec::new(),
                dirty: Vec::new(),
                is_dirty: Vec::new(),
                urgency: Urgency::default(),
                troubles: Vec::new(),
                orders: VecDeque::new(),
                now: Time(0),
                buffer_bytes: 0,
            },
            links: Vec::new(),
            again: Vec::new(),
            junk: vec![0; 64 * 1024].into_boxed_slice(),
            complained: None,
            next_timers: Time(0),
            next_tick: Time(0),
            looked: Time(0),
            yama: Yama::new(settings.ptracer),
            arbiter: Arbiter::none(),
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

    /// A handle by which other threads wake the loop.
    #[must_use]
    pub fn wake_handle(&self) -> Arc<Wake> {
        self.wake.clone()
    }

    /// The state machines of all peers, while the loop does not run.
    pub fn peers(&mut self) -> &mut Peers {
        &mut self.peers
    }

    /// Runs until the handler says to stop and all peers have been told. If the handler panics, it may be run once more, which
    /// sends what is queued for the peers.
    pub fn run<H: Handler>(&mut self, handler: &mut H) {
        let mut run = Run::default();
        while self.turn(handler, &mut run) {}
        self.finish(handler);
    }

    /// One turn of [`Driver::run`]: sends, waits, and handles what came. Returns false when the loop ends; then call
    /// [`Driver::finish`].
    pub fn turn<H: Handler>(&mut self, handler: &mut H, run: &mut Run) -> bool {
        let now = self.now();
        self.peers.now = now;
        // Also before the end: other threads wait for these requests.
        self.follow_orders(handler, now);
        self.pump(handler, now);
        if handler.stopping() {
            let is_patient = now.since(*run.stopping_since.get_or_insert(now)) < self.patience(handler);
            self.say_bye(&mut run.farewells, is_patient, now);
            if !is_patient || self.has_taken_leave(&run.farewells, now) {
                return false;
            }
            self.pump(handler, now);
        }
        // Only if the sockets were read late enough: what has arrived is read before a peer counts as silent, also when this
        // process was stopped or busy for long.
        if self.looked >= self.next_timers {
            self.handle_timers(handler, now);
            self.follow_orders(handler, now);
            self.pump(handler, now);
        }
        if self.looked >= self.next_tick {
            self.next_tick = handler.tick(&mut self.peers, now);
            self.follow_orders(handler, now);
            self.pump(handler, now);
        }
        self.wait(handler, &mut run.events);
        self.peers.now = self.now();
        for event in run.events.drain(..) {
            let (data, flags) = (event.data, event.flags);
            self.handle_event(handler, data.u64(), flags);
        }
        for token in std::mem::take(&mut self.again) {
            self.handle_event(handler, token, epoll::EventFlags::IN);
        }
        if handler.has_work() {
            self.follow_orders(handler, now);
            self.pump(handler, now);
            handler.work(&mut self.peers);
        }
        true
    }

    /// The end of [`Driver::run`]: sends the last frames to the peers, and closes the connections.
    pub fn finish<H: Handler>(&mut self, handler: &mut H) {
        for peer in 0..self.links.len() {
            if self.links[peer].was_up && !self.links[peer].finished && !self.links[peer].said_bye {
                handler.undelivered(&mut self.peers, peer as PeerId);
            }
        }
        handler.ending(&mut self.peers);
        self.follow_orders(handler, self.peers.now);
        self.pump(handler, self.peers.now);
        self.half_close();
    }

    /// Sleeps until something happens, and stores it in `events`.
    fn wait<H: Handler>(&mut self, handler: &mut H, events: &mut Vec<epoll::Event>) {
        let now = self.now();
        let until = self.next_timers.min(self.next_tick);
        self.wake.sleeping.store(true, Ordering::SeqCst);
        // Commands that came before the flag was set did not write to the descriptor.
        handler.woken(&mut self.peers, now);
        let has_to_send = !self.peers.dirty.is_empty() || !self.peers.orders.is_empty();
        // But not forever: commands may come faster than they are carried out, and then nothing would be read.
        if has_to_send && now.since(self.looked) < LOOK_WITHIN {
            self.wake.sleeping.store(false, Ordering::SeqCst);
            return;
        }
        let nanos = match (!has_to_send && self.again.is_empty() && !handler.has_work(), handler.stopping()) {
            (false, _) => 0,
            (true, true) => MILLISECOND,
            (true, false) => until.since(now),
        };
        // Room for all that is ready, so that no socket waits while others are read again and again.
        let room = self.sockets.len() + self.listeners.len() + 1;
        if let Err(error) = self.system.wait(events, room, nanos, FIRST_LISTENER)
            && error != rustix::io::Errno::INTR
        {
            log::error!("penstock: epoll_wait failed: {error}");
        }
        self.looked = self.now();
        self.wake.sleeping.store(false, Ordering::SeqCst);
    }

    fn now(&self) -> Time {
        self.system.now()
    }

    /// Handles the timers at this time at the latest.
    fn schedule_timers(&mut self, at: Time) {
        self.next_timers = self.next_timers.min(at);
    }

    // ------------------------------------------------------------------ events

    fn handle_event<H: Handler>(&mut self, handler: &mut H, token: u64, flags: epoll::EventFlags) {
        let now = self.peers.now;
        // The event before may have been a wake-up that added the peer to which this hand-shake belongs.
        self.add_links();
        match token {
            WAKE => {
                let mut count = [0u8; 8];
                let _ = rustix::io::read(&self.wake.event, &mut count);
                handler.woken(&mut self.peers, now);
            }
            LOCAL_LISTENER => self.accept_local(handler, now),
            token if token < FIRST_SOCKET => self.accept_tcp(handler, (token - FIRST_LISTENER) as usize, now),
            token => {
                let Some(mut socket) = self.sockets.remove(&token) else { return };
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    if !socket.is_up() {
                        return self.handshake(handler, token, &mut socket, now);
                    }
                    if flags.contains(epoll::EventFlags::OUT)
                        && let Some(peer) = socket.peer
                    {
                        self.peers.machine(peer);
                        self.watch_write(token, &mut socket, false);
                    }
                    self.read(handler, token, &mut socket, now)
                }));
                match outcome {
                    Ok(Ok(())) => drop(self.sockets.insert(token, socket)),
                    Ok(Err(reason)) => self.closed(handler, token, socket, &reason, now),
                    Err(panic) => {
                        // The peer is told why, over this socket if it has no other.
                        self.sockets.insert(token, socket);
                        resume_unwind(panic);
                    }
                }
            }
        }
    }

    /// Reads from a stream that is up, and handles the frames.
    fn read<H: Handler>(
        &mut self,
        handler: &mut H,
        token: u64,
        socket: &mut Socket,
        now: Time,
    ) -> Result<(), CloseReason> {
        let peer = socket.peer.expect("up");
        let mut budget = READ_BUDGET;
        let (mut revoked, mut descriptors) = (Vec::new(), Vec::new());
        loop {
            // The buffer may hold frames from the hand-shake or the last round.
            loop {
                socket.reader.process(peer, socket.stream, &mut self.peers, handler, &mut revoked)?;
                self.handle_peer_events(handler, peer, now);
                self.follow_orders_with(handler, Some(socket), now);
                if self.links[peer as usize].finished {
                    return Err(CloseReason::PeerLost);
                }
                if revoked.is_empty() {
                    break;
                }
                for (stream, key, offset) in revoked.drain(..) {
                    for other in self.sockets.values_mut().filter(|s| s.peer == Some(peer) && s.stream == stream) {
                        other.reader.revoke(|header| header.key == key && header.offset == offset);
                    }
                }
            }
            if budget == 0 {
                self.again.push(token);
                return Ok(());
            }
            let filled = socket.reader.fill(&socket.wire, socket.local, &mut self.junk, &mut descriptors);
            for descriptor in descriptors.drain(..) {
                handler.passed(peer, descriptor)?;
            }
            match filled {
                Ok(0) if socket.was_reset => {
                    return Err(CloseReason::of_call(rustix::io::Errno::CONNRESET, socket.local));
                }
                Ok(0) => return Err(CloseReason::ClosedThere),
                Ok(count) => budget = budget.saturating_sub(count),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(CloseReason::of_call(error, socket.local)),
            }
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
                Event::Bye => self.links[peer as usize].said_bye = true,
                event => handler.event(&mut self.peers, peer, event),
            }
        }
    }

    // ------------------------------------------------------------------ writing

    /// Lets every stream that has room pull frames and write them, of all peers the most urgent first.
    fn pump<H: Handler>(&mut self, handler: &mut H, now: Time) {
        while !self.peers.dirty.is_empty() {
            self.settle_urgency(handler.stopping());
            let mut turns = self.peers.take_dirty();
            while let Some(peer) = turns.pop() {
                if self.pump_peer(handler, peer, turns.last().copied(), now) {
                    let urgency = self.peers.look(peer).most_urgent();
                    let at = turns.partition_point(|other| self.peers.look(*other).most_urgent() > urgency);
                    turns.insert(at, peer);
                }
            }
        }
    }

    /// Lets the streams to a peer pull frames. Returns true if the peer has more to send, but `next` something more urgent.
    fn pump_peer<H: Handler>(&mut self, handler: &mut H, peer: PeerId, next: Option<PeerId>, now: Time) -> bool {
        let link = &mut self.links[peer as usize];
        link.round = link.round.wrapping_add(1);
        let (tokens, first) = (link.sockets.clone(), link.round);
        let mut open: Vec<u64> = (0..tokens.len()).map(|at| tokens[(at + first) % tokens.len()]).collect();
        if let Some(express) = self.peers.look(peer).express(now) {
            open.sort_by_key(|token| self.sockets.get(token).is_none_or(|socket| socket.stream != express));
        }
        let (mut lost_one, mut gives_way) = (false, false);
        // One batch a stream and round, so that streams take turns.
        while !open.is_empty() && !gives_way {
            open.retain(|token| {
                let Some(mut socket) = self.sockets.remove(token) else { return false };
                if !socket.is_up() || socket.watches_write {
                    self.sockets.insert(*token, socket);
                    return false;
                }
                let progress = socket.write_batch(&mut self.peers, handler, now);
                match progress {
                    Some(Progress::Gone) => {
                        // The peer's last frames may wait to be read, and the end of the stream after them. Nothing more is
                        // written.
                        socket.watches_write = true;
                    }
                    Some(Progress::Closed(ref reason)) => {
                        self.closed(handler, *token, socket, reason, now);
                        // A group may have failed because of it, and other streams may have written half a frame of that group.
                        self.follow_orders(handler, now);
                        lost_one = true;
                        return false;
                    }
                    Some(Progress::Blocked) => self.watch_write(*token, &mut socket, true),
                    _ => {}
                }
                self.sockets.insert(*token, socket);
                progress == Some(Progress::More)
            });
            let urgency = self.peers.look(peer).most_urgent();
            gives_way = next.is_some_and(|next| self.peers.look(next).most_urgent() < urgency);
        }
        // Polling frames has marked the peer as dirty, but nothing is left to write now, or its turn comes again.
        if self.peers.is_dirty[peer as usize] && !lost_one {
            self.peers.is_dirty[peer as usize] = false;
            self.peers.dirty.retain(|dirty| *dirty != peer);
        }
        gives_way && !open.is_empty()
    }

    fn watch_write(&self, token: u64, socket: &mut Socket, watch: bool) {
        if socket.watches_write == watch {
            return;
        }
        socket.watches_write = watch;
        let flags = if watch { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        if let Err(error) = self.system.watch(&socket.wire, token, flags, false) {
            log::error!("penstock: epoll_ctl failed: {error}");
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

/// Bytes read from one stream before the others have their turn: few, so that what has arrived on all of them is still in the
/// cache.
const READ_BUDGET: usize = 256 * 1024;
const HANDSHAKE_WITHIN: u64 = 5 * SECOND;
/// How often a thread that always has something to send looks at its sockets; a look costs a microsecond.
const LOOK_WITHIN: u64 = MILLISECOND;
