//! The event loop.

use crate::contact::Contact;
use crate::descriptors::{After, after_accept, is_shortage, make_room};
use crate::fds::Fd;
use crate::handler::{Admission, Handler, Order, Peers};
use crate::memory::MemoryEpoch;
use crate::ptrace::{Ptracer, Yama};
use crate::socket::{GONE, Progress, Socket, Stage, why};
use crate::system::{Host, System, Wire};
use penstock_stream::frame::{VERSION_MAJOR, VERSION_MINOR};
use penstock_stream::handshake::{Accepted, Acceptor, Connector, HandshakeError, Hello, NodeKey, RefusalCode};
use penstock_stream::peer::{Event, Peer, PeerConfig, StreamId};
use penstock_types::{GroupId, MILLISECOND, PeerId, SECOND, Time};
use rustix::event::{EventfdFlags, epoll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use socket2::{Domain, Protocol, SockAddr, Type};
use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
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
    /// TCP streams a peer.
    pub streams: u16,
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
            complaint: String::new(),
            unread: 0,
            first_port: first_port(),
        }
    }
}

/// One thread's event loop.
pub struct Driver {
    settings: Settings,
    system: System,
    wake: Arc<Wake>,
    tcp: Vec<(Fd, SocketAddr)>,
    local: Option<Fd>,
    sockets: HashMap<u64, Socket>,
    next_token: u64,
    peers: Peers,
    links: Vec<Link>,
    /// Sockets that may have more to read, although the kernel reports them only once.
    again: Vec<u64>,
    junk: Box<[u8]>,
    /// Incoming connections that are not authenticated yet. The process's own attempts do not count: they are as many as the
    /// job needs.
    unauthenticated: usize,
    /// When to accept again, after a shortage of descriptors or memory.
    accept_at: Option<Time>,
    /// When a shortage was logged last.
    complained: Option<Time>,
    next_timers: Time,
    next_tick: Time,
    /// When the kernel was last asked what has arrived. All of that has been read since, or as much of it as one turn reads.
    looked: Time,
    yama: Yama,
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
    /// How often the peer's host refused to connect while no stream was up.
    refusals: u32,
    round: usize,
    /// Why hand-shakes with the peer fail, as logged last.
    complaint: String,
    /// How often the peer's memory could not be read for a reason that may pass.
    unread: u32,
    /// Local port of stream 0. The streams take neighbouring ports: networks choose a flow's path (or queue) by a hash of its
    /// ports that is nearly always linear (XOR, CRC, Toeplitz). So neighbouring ports spread evenly, where random ports
    /// collide (8 flows on 16 paths use 6.5 of them).
    first_port: u16,
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
            let (socket, address) = bind_tcp(*address, listen.ports.clone())?;
            let token = FIRST_LISTENER + driver.tcp.len() as u64;
            driver
                .system
                .add(&socket, token)
                .map_err(|e| format!("cannot watch the listening socket on {address}: {e}"))?;
            driver.tcp.push((Fd::new(socket.into()), address));
        }
        if driver.settings.shared_memory {
            match bind_local(&driver.settings.node) {
                Ok(socket) => {
                    driver
                        .system
                        .add(&socket, LOCAL_LISTENER)
                        .map_err(|e| format!("cannot watch the local listening socket: {e}"))?;
                    driver.local = Some(Fd::new(socket));
                }
                Err(error) => {
                    log::warn!("penstock: no abstract UNIX socket ({error}): peers on this host are reached over TCP");
                    driver.settings.shared_memory = false;
                }
            }
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
            tcp: Vec::new(),
            local: None,
            sockets: HashMap::new(),
            next_token: FIRST_SOCKET,
            peers: Peers {
                machines: Vec::new(),
                added: Vec::new(),
                dirty: Vec::new(),
                is_dirty: Vec::new(),
                troubles: Vec::new(),
                orders: VecDeque::new(),
                now: Time(0),
                buffer_bytes: 0,
            },
            links: Vec::new(),
            again: Vec::new(),
            junk: vec![0; 64 * 1024].into_boxed_slice(),
            unauthenticated: 0,
            accept_at: None,
            complained: None,
            next_timers: Time(0),
            next_tick: Time(0),
            looked: Time(0),
            yama: Yama::new(settings.ptracer),
            settings,
        })
    }

    /// The addresses on which it listens.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.tcp.iter().map(|(_, address)| *address).collect()
    }

    /// Whether peers on this host can reach it without TCP.
    #[must_use]
    pub fn listens_locally(&self) -> bool {
        self.local.is_some()
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
            let is_patient = now.since(*run.stopping_since.get_or_insert(now)) < handler.patience();
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
        let room = self.sockets.len() + self.tcp.len() + 2;
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
    fn read<H: Handler>(&mut self, handler: &mut H, token: u64, socket: &mut Socket, now: Time) -> Result<(), String> {
        let peer = socket.peer.expect("up");
        let mut budget = READ_BUDGET;
        let (mut revoked, mut descriptors) = (Vec::new(), Vec::new());
        loop {
            // The buffer may hold frames from the hand-shake or the last round.
            loop {
                socket
                    .reader
                    .process(peer, socket.stream, &mut self.peers, handler, now, &mut revoked)
                    .map_err(|error| format!("it sent {error}"))?;
                self.handle_peer_events(handler, peer, now);
                self.follow_orders_with(handler, Some(socket), now);
                if self.links[peer as usize].finished {
                    return Err("the peer is lost".into());
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
                handler.passed(peer, descriptor).map_err(|error| format!("it sent {error}"))?;
            }
            match filled {
                Ok(0) => return Err(GONE.into()),
                Ok(count) => budget = budget.saturating_sub(count),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(why(error, socket.local)),
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
                    self.lose(handler, peer, &what, now);
                }
                Event::Stalled(stream) => {
                    let token = self.sockets.iter().find(|(_, s)| s.peer == Some(peer) && s.stream == stream);
                    if let Some((&token, _)) = token
                        && let Some(socket) = self.sockets.remove(&token)
                    {
                        self.closed(handler, token, socket, "the stream is silent while the peer is not", now);
                    }
                }
                Event::Bye => self.links[peer as usize].said_bye = true,
                event => handler.event(&mut self.peers, peer, event),
            }
        }
    }

    // ------------------------------------------------------------------ writing

    /// Lets every stream that has room pull frames and write them.
    fn pump<H: Handler>(&mut self, handler: &mut H, now: Time) {
        while let Some(peer) = self.peers.dirty.pop() {
            self.peers.is_dirty[peer as usize] = false;
            let link = &mut self.links[peer as usize];
            link.round = link.round.wrapping_add(1);
            let (tokens, first) = (link.sockets.clone(), link.round);
            let mut open: Vec<u64> = (0..tokens.len()).map(|at| tokens[(at + first) % tokens.len()]).collect();
            let mut lost_one = false;
            // One batch a stream and round, so that streams take turns.
            while !open.is_empty() {
                open.retain(|token| {
                    let Some(mut socket) = self.sockets.remove(token) else { return false };
                    if !socket.is_up() || socket.watches_write {
                        self.sockets.insert(*token, socket);
                        return false;
                    }
                    let progress = socket.write_batch(&mut self.peers, handler, now);
                    match progress {
                        Some(Progress::Gone) => {
                            // The peer's last frames may wait to be read, and the end of the stream after them. Nothing more
                            // is written.
                            socket.watches_write = true;
                        }
                        Some(Progress::Closed(ref reason)) => {
                            self.closed(handler, *token, socket, reason, now);
                            // A group may have failed because of it, and other streams may have written half a frame of that
                            // group.
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
            }
            // Polling frames has marked the peer as dirty, but nothing is left to write now.
            if self.peers.is_dirty[peer as usize] && !lost_one {
                self.peers.is_dirty[peer as usize] = false;
                self.peers.dirty.retain(|dirty| *dirty != peer);
            }
        }
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

    // ------------------------------------------------------------------ timers and orders

    fn handle_timers<H: Handler>(&mut self, handler: &mut H, now: Time) {
        let mut next = now.plus(SECOND);
        self.peers.buffer_bytes =
            self.sockets.values().map(|s| s.reader.memory_bytes()).sum::<usize>() + self.junk.len();
        for peer in 0..self.links.len() as PeerId {
            if self.links[peer as usize].finished {
                continue;
            }
            if self.links[peer as usize].was_up {
                self.peers.machine(peer).handle_timeout(now);
                self.handle_peer_events(handler, peer, now);
                next = Time(next.0.min(self.peers.look(peer).poll_timeout(now).0));
            }
            let due: Vec<(StreamId, u32)> = {
                let link = &mut self.links[peer as usize];
                let due = link.retries.iter().filter(|(_, at, _)| *at <= now).map(|(s, _, n)| (*s, *n)).collect();
                link.retries.retain(|(_, at, _)| *at > now);
                due
            };
            for (stream, attempt) in due {
                if stream == FROM_THE_START {
                    if let Some((job, secret)) = self.links[peer as usize].job.take() {
                        self.connect(handler, peer, job, secret, attempt, now);
                    }
                    continue;
                }
                self.connect_stream(handler, peer, stream, attempt, now);
            }
            let link = &self.links[peer as usize];
            for (_, at, _) in &link.retries {
                next = Time(next.0.min(at.0));
            }
            if let Some(since) = link.down_since
                && now.since(since) > RECONNECT_WITHIN
            {
                self.lose(handler, peer, "closed all its connections: the process has probably died", now);
            }
        }
        if self.accept_at.is_some_and(|at| at <= now) {
            self.accept_at = None;
            self.watch_listeners(epoll::EventFlags::IN);
        }
        next = self.accept_at.map_or(next, |at| next.min(at));
        let late: Vec<u64> =
            self.sockets.iter().filter(|(_, s)| !s.is_up() && now > s.deadline).map(|(token, _)| *token).collect();
        for token in late {
            let socket = self.sockets.remove(&token).expect("listed above");
            self.closed(handler, token, socket, "no answer to the hand-shake", now);
        }
        if self.sockets.values().any(|socket| !socket.is_up()) {
            next = Time(next.0.min(now.plus(100 * MILLISECOND).0));
        }
        // Deliberately coarse: nothing here needs better than a few milliseconds.
        self.next_timers = Time(next.0.max(now.plus(MILLISECOND).0));
    }

    /// Makes links for peers that the engine has added.
    fn add_links(&mut self) {
        if self.peers.added.is_empty() {
            return;
        }
        if self.settings.shared_memory {
            self.yama.meet(self.peers.added.iter().filter(|one| one.memory_epoch != 0).map(|one| one.process));
        }
        self.links.extend(self.peers.added.drain(..).map(Link::new));
        let streams = usize::from(self.settings.streams);
        let to_come = self.links.iter().filter(|link| !link.was_up && !link.finished).count() * streams;
        if let Err(trouble) = make_room(to_come) {
            let peers = self.links.len();
            log::warn!(
                "penstock: {trouble}: {peers} peers with {streams} streams each. Some ranks may not reach each other. Raise the \
                 hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile of a container), or lower PENSTOCK_STREAMS"
            );
        }
    }

    fn follow_orders<H: Handler>(&mut self, handler: &mut H, now: Time) {
        self.follow_orders_with(handler, None, now);
    }

    /// `current`: a socket that is being read and is not in the table.
    fn follow_orders_with<H: Handler>(&mut self, handler: &mut H, mut current: Option<&mut Socket>, now: Time) {
        self.add_links();
        while let Some(order) = self.peers.orders.pop_front() {
            match order {
                Order::Connect(peer, job, secret) => self.connect(handler, peer, job, secret, 0, now),
                Order::DropGroup(group, source) => {
                    for socket in self.sockets.values_mut().chain(current.as_deref_mut()) {
                        socket.drop_group(group, &source);
                    }
                }
                Order::Then(act) => act(),
            }
        }
    }

    // ------------------------------------------------------------------ connections

    fn connect<H: Handler>(
        &mut self,
        handler: &mut H,
        peer: PeerId,
        job: GroupId,
        secret: Vec<u8>,
        attempt: u32,
        now: Time,
    ) {
        let own = self.settings.node;
        let streams = self.settings.streams;
        let link = &mut self.links[peer as usize];
        if link.job.is_some() {
            return;
        }
        link.job = Some((job, secret));
        // Only the process with the larger key connects, so that a pair connects once.
        link.connects = own > link.contact.node;
        if !link.connects {
            return;
        }
        if self.settings.shared_memory
            && link.contact.memory_epoch != 0
            && self.connect_local(handler, peer, attempt, now)
        {
            return;
        }
        for stream in 0..u32::from(streams) {
            self.connect_stream(handler, peer, stream, attempt, now);
        }
    }

    /// Tries the abstract UNIX socket: a process that answers there is on this host.
    fn connect_local<H: Handler>(&mut self, handler: &mut H, peer: PeerId, attempt: u32, now: Time) -> bool {
        let node = self.links[peer as usize].contact.node;
        let open = || -> io::Result<socket2::Socket> {
            let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM.nonblocking().cloexec(), None)?;
            socket.connect(&SockAddr::unix(Contact::local_name(&node))?)?;
            Ok(socket)
        };
        let socket = match open() {
            Ok(socket) => socket,
            // No process listens under that name here: the peer is on another host, or in another network namespace.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => return false,
            // TCP would need even more of what is short.
            Err(error) if is_shortage(&error) => {
                self.await_descriptors(peer, FROM_THE_START, attempt, &format!("its local socket: {error}"), now);
                return true;
            }
            Err(error) => {
                let who = self.links[peer as usize].contact.describe();
                log::warn!("penstock: cannot connect to the local socket of {who} ({error}): TCP instead");
                return false;
            }
        };
        let fd: OwnedFd = socket.into();
        let link = &mut self.links[peer as usize];
        let reads = match read_memory_epoch(&fd, &link.contact) {
            Err(error) if link.unread < UNREAD_ATTEMPTS && self.yama.may_end(&error, &link.contact.process) => {
                link.unread += 1;
                let at = now.plus(UNREAD_AGAIN);
                link.retries.push((FROM_THE_START, at, attempt));
                self.next_timers = self.next_timers.min(at);
                return true;
            }
            read => self.can_read(read, &self.links[peer as usize].contact),
        };
        let connector = self.connector(peer, 0, if reads { FEATURES | FEATURE_READS_MEMORY } else { FEATURES });
        let mut socket = Socket::new(
            Wire::Kernel(Fd::new(fd)),
            true,
            "local socket".to_owned(),
            Stage::Connecting(connector),
            now.plus(HANDSHAKE_WITHIN),
        );
        socket.peer = Some(peer);
        socket.attempt = attempt;
        self.adopt(handler, socket, now);
        true
    }

    /// Starts one TCP stream.
    fn connect_stream<H: Handler>(&mut self, handler: &mut H, peer: PeerId, stream: StreamId, attempt: u32, now: Time) {
        let contact = &self.links[peer as usize].contact;
        let Some(remote) = contact.tcp.get(stream as usize % contact.tcp.len().max(1)).copied() else {
            let reason = format!("{} publishes no address to connect to", contact.describe());
            handler.refused(&mut self.peers, peer, &reason);
            return;
        };
        // The stream's local address: the interfaces take turns, among those of the remote's family.
        let own: Vec<IpAddr> =
            self.tcp.iter().map(|(_, a)| a.ip()).filter(|ip| ip.is_ipv4() == remote.is_ipv4()).collect();
        let from = (!own.is_empty()).then(|| own[stream as usize % own.len()]);
        let buffer_bytes = self.settings.socket_buffer_bytes as usize;
        let port = match attempt {
            0 => self.links[peer as usize].first_port + PORT_STEP * stream as u16,
            _ => 0,
        };
        let attempt_connect = || -> io::Result<Wire> {
            if let System::Played(host) = &self.system {
                return Ok(Wire::Played(host.connect(remote)));
            }
            let domain = Domain::for_address(remote);
            let socket = socket2::Socket::new(domain, Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
            tune(&socket, buffer_bytes)?;
            // A wildcard or loopback listener says nothing about the path to other hosts.
            let from = from.filter(|ip| !ip.is_unspecified() && ip.is_loopback() == remote.ip().is_loopback());
            let any = match remote {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            let from = from.unwrap_or(any);
            // If another socket has the port, the kernel chooses one.
            if port == 0 || socket.bind(&SocketAddr::new(from, port).into()).is_err() {
                socket.bind(&SocketAddr::new(from, 0).into())?;
            }
            match socket.connect(&remote.into()) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
                Err(error) => return Err(error),
            }
            Ok(Wire::Kernel(Fd::new(socket.into())))
        };
        match attempt_connect() {
            Ok(wire) => {
                let connector = self.connector(peer, stream, FEATURES);
                let mut socket = Socket::new(
                    wire,
                    false,
                    remote.to_string(),
                    Stage::Connecting(connector),
                    now.plus(HANDSHAKE_WITHIN),
                );
                socket.peer = Some(peer);
                socket.stream = stream;
                socket.attempt = attempt;
                self.adopt(handler, socket, now);
            }
            Err(error) if is_shortage(&error) => {
                self.await_descriptors(peer, stream, attempt, &format!("{remote}: {error}"), now);
            }
            Err(error) => self.retry(handler, peer, stream, attempt, &format!("{remote}: {error}"), now),
        }
    }

    /// Schedules another attempt for a stream for which this process has no file descriptor at present. The attempt is not
    /// counted: the join's time-out bounds the wait.
    fn await_descriptors(&mut self, peer: PeerId, stream: StreamId, attempt: u32, reason: &str, now: Time) {
        self.complain(&format!("cannot connect to {reason}"), now);
        self.peers.troubles[peer as usize] = Some(reason.to_owned());
        let at = now.plus(ACCEPT_AGAIN);
        self.links[peer as usize].retries.push((stream, at, attempt));
        self.next_timers = self.next_timers.min(at);
    }

    /// Schedules another attempt for a stream, or gives up.
    fn retry<H: Handler>(
        &mut self,
        handler: &mut H,
        peer: PeerId,
        stream: StreamId,
        attempt: u32,
        reason: &str,
        now: Time,
    ) {
        let link = &mut self.links[peer as usize];
        if link.finished || !link.connects {
            return;
        }
        self.peers.troubles[peer as usize] = Some(reason.to_owned());
        let attempt = attempt + 1;
        if attempt > CONNECT_ATTEMPTS {
            log::warn!("penstock: gave up stream {stream} to {}: {reason}", link.contact.describe());
            if self.peers.look(peer).stream_count() == 0 {
                self.lose(handler, peer, &format!("cannot be reached ({reason})"), now);
            }
            return;
        }
        let delay = (RETRY_FIRST << attempt.min(5)).min(SECOND);
        link.retries.push((stream, now.plus(delay), attempt));
        self.next_timers = Time(self.next_timers.0.min(now.plus(delay).0));
    }

    fn connector(&self, peer: PeerId, stream: StreamId, features: u32) -> Connector {
        let link = &self.links[peer as usize];
        let (job, secret) = link.job.as_ref().expect("connecting for a job");
        let hello = Hello {
            version: (VERSION_MAJOR, VERSION_MINOR),
            features,
            job: *job,
            generation: self.settings.peer.generation,
            rank: self.settings.rank,
            from: self.settings.node,
            to: link.contact.node,
            stream: stream as u16,
            nonce: random(),
        };
        Connector::new(hello, secret)
    }

    /// Whether the result of [`read_memory_epoch`] means that this process may read the peer's memory; warns if not.
    fn can_read(&self, found: io::Result<Option<bool>>, contact: &Contact) -> bool {
        let why = match found {
            Ok(Some(same)) => return same,
            Ok(None) => "it is in another PID namespace".to_owned(),
            Err(error) => {
                self.yama.warn(&error, &contact.describe());
                error.to_string()
            }
        };
        let who = contact.describe();
        log::info!("penstock: cannot read the memory of {who} ({why}): bytes go through the socket instead");
        false
    }

    fn accept_tcp<H: Handler>(&mut self, handler: &mut H, listener: usize, now: Time) {
        while let System::Played(host) = &self.system {
            let Some((connection, from)) = host.accept() else { return };
            self.accepted(handler, Wire::Played(connection), false, from.to_string(), now);
        }
        while let Some(fd) = self.accept(handler, Some(listener), now) {
            let remote = socket2::SockRef::from(&fd).peer_addr().ok().and_then(|a| a.as_socket());
            let remote = remote.map_or_else(|| "unknown address".to_owned(), |address| address.to_string());
            if let Err(error) = tune(&socket2::SockRef::from(&fd), self.settings.socket_buffer_bytes as usize) {
                log::warn!("penstock: cannot set options on a stream from {remote}: {error}");
            }
            self.accepted(handler, Wire::Kernel(Fd::new(fd)), false, remote, now);
        }
    }

    fn accept_local<H: Handler>(&mut self, handler: &mut H, now: Time) {
        while let Some(fd) = self.accept(handler, None, now) {
            self.accepted(handler, Wire::Kernel(Fd::new(fd)), true, "local socket".to_owned(), now);
        }
    }

    /// The next connection of a TCP listener, or of the local one.
    fn accept<H: Handler>(&mut self, handler: &mut H, listener: Option<usize>, now: Time) -> Option<OwnedFd> {
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        loop {
            let listener = listener.map(|at| &self.tcp[at].0).or(self.local.as_ref())?;
            let error = match rustix::net::accept_with(listener, flags) {
                Ok(fd) => return Some(fd),
                Err(error) => io::Error::from(error),
            };
            match after_accept(&error) {
                After::Next => {}
                After::Nothing | After::End => return None,
                // A silent connection gives its descriptor up for the new one.
                After::Later if self.evict_unauthenticated(handler, now) => {}
                After::Later => {
                    // The kernel would report the waiting connection at once, again and again.
                    self.watch_listeners(epoll::EventFlags::empty());
                    let at = now.plus(ACCEPT_AGAIN);
                    self.accept_at = Some(at);
                    self.next_timers = self.next_timers.min(at);
                    self.complain(&format!("cannot accept connections ({error})"), now);
                    return None;
                }
            }
        }
    }

    fn watch_listeners(&self, flags: epoll::EventFlags) {
        let tcp = (FIRST_LISTENER..).zip(self.tcp.iter().map(|(listener, _)| listener));
        for (token, listener) in tcp.chain(self.local.iter().map(|listener| (LOCAL_LISTENER, listener))) {
            if let Err(error) = self.system.modify(listener, token, flags) {
                log::error!("penstock: epoll_ctl failed: {error}");
            }
        }
    }

    /// Logs that the machine lacks something, at most every [`COMPLAIN_EVERY`].
    fn complain(&mut self, what: &str, now: Time) {
        if self.complained.is_none_or(|at| now.since(at) > COMPLAIN_EVERY) {
            self.complained = Some(now);
            log::warn!(
                "penstock: {what}; trying again until it works. `ulimit -n` says how many open files are allowed, and \
                 `penstock doctor` how many a job needs"
            );
        }
    }

    fn accepted<H: Handler>(&mut self, handler: &mut H, wire: Wire, local: bool, remote: String, now: Time) {
        if self.unauthenticated >= MAX_UNAUTHENTICATED && !self.evict_unauthenticated(handler, now) {
            log::warn!("penstock: {MAX_UNAUTHENTICATED} hand-shakes are going on; {remote} is turned away");
            return;
        }
        let acceptor = Acceptor::new(random(), FEATURES);
        let socket = Socket::new(wire, local, remote, Stage::Acceptor(acceptor), now.plus(HANDSHAKE_WITHIN));
        let token = self.token();
        match self.system.watch(&socket.wire, token, epoll::EventFlags::IN, true) {
            Ok(()) => {
                self.unauthenticated += 1;
                self.next_timers = self.next_timers.min(now.plus(SECOND));
                self.sockets.insert(token, socket);
            }
            Err(error) => self.complain(&format!("cannot watch a connection from {} ({error})", socket.remote), now),
        }
    }

    /// Closes the oldest connection that has sent no HELLO. Returns false if there is none: the others claim to be members of
    /// a job, and may be.
    fn evict_unauthenticated<H: Handler>(&mut self, handler: &mut H, now: Time) -> bool {
        let is_silent = |socket: &Socket| matches!(socket.stage, Stage::Acceptor(_)) && socket.peer.is_none();
        let oldest = self.sockets.iter().filter(|(_, socket)| is_silent(socket)).map(|(token, _)| *token).min();
        let Some((token, socket)) = oldest.and_then(|token| Some((token, self.sockets.remove(&token)?))) else {
            return false;
        };
        self.closed(handler, token, socket, MAKES_ROOM, now);
        true
    }

    /// Takes a connecting socket into the table.
    fn adopt<H: Handler>(&mut self, handler: &mut H, mut socket: Socket, now: Time) {
        let token = self.token();
        let peer = socket.peer.expect("connectors know their peer");
        socket.watches_write = true;
        match self.system.watch(&socket.wire, token, epoll::EventFlags::IN | epoll::EventFlags::OUT, true) {
            Ok(()) => {
                self.next_timers = self.next_timers.min(now.plus(SECOND));
                self.links[peer as usize].sockets.push(token);
                self.sockets.insert(token, socket);
            }
            Err(error) => {
                let (stream, attempt) = (socket.stream, socket.attempt);
                self.retry(handler, peer, stream, attempt, &error.to_string(), now);
            }
        }
    }

    /// Continues a hand-shake. An error ends the socket.
    fn handshake<H: Handler>(
        &mut self,
        handler: &mut H,
        token: u64,
        socket: &mut Socket,
        now: Time,
    ) -> Result<(), String> {
        if let Stage::Connecting(_) = socket.stage {
            socket.wire.error().map_err(|error| error.to_string())?;
            let Stage::Connecting(mut connector) = std::mem::replace(&mut socket.stage, Stage::Up) else {
                unreachable!("looked at above")
            };
            socket.greeting = connector.poll_transmit();
            socket.stage = Stage::Connector(connector);
        }
        let mut buffer = [0u8; 1024];
        let (mut rest, mut descriptors) = (Vec::new(), Vec::new());
        let mut ended = None;
        loop {
            if let Progress::Closed(reason) = socket.write_greeting() {
                return Err(reason);
            }
            // The last message may come together with the first frames and their descriptors.
            let room = &mut [IoSliceMut::new(&mut buffer)];
            let count = match socket.wire.read(room, socket.local, &mut descriptors) {
                Ok(0) => return Err("it closed the connection during the hand-shake".into()),
                Ok(count) => count,
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => break,
                Err(error) => return Err(error.to_string()),
            };
            let step = match &mut socket.stage {
                Stage::Connector(connector) => {
                    let result = connector.handle_input(&buffer[..count], &mut rest);
                    socket.greeting.extend(connector.poll_transmit());
                    result.map(|features| features.map(|features| (None, features)))
                }
                Stage::Acceptor(acceptor) => {
                    let mut result = acceptor.handle_input(&buffer[..count], &mut rest);
                    if let Ok(Accepted::Decide(hello)) = &result {
                        let hello = hello.clone();
                        result = self.decide(handler, socket, hello).map(|()| Accepted::Pending);
                    }
                    let Stage::Acceptor(acceptor) = &mut socket.stage else { unreachable!("stays an acceptor") };
                    socket.greeting.extend(acceptor.poll_transmit());
                    result.map(|accepted| match accepted {
                        Accepted::Welcome { hello, features } => Some((Some(hello), features)),
                        _ => None,
                    })
                }
                Stage::Connecting(_) | Stage::Up => unreachable!("a hand-shake is going on"),
            };
            match step {
                // They would pile up as long as an unauthenticated peer sends.
                Ok(None) if !descriptors.is_empty() => return Err("it passes descriptors in a hand-shake".into()),
                Ok(None) => {}
                Ok(Some(done)) => {
                    ended = Some(done);
                    break;
                }
                Err(error) => {
                    let _ = socket.write_greeting();
                    if error.is_temporary() {
                        return Err(NOT_YET.to_owned());
                    }
                    if let (Some(peer), Some(reason)) = (socket.peer, error.lost())
                        && matches!(socket.stage, Stage::Connector(_))
                        && self.peers.look(peer).stream_count() == 0
                    {
                        self.lose(handler, peer, &format!("does not take this rank back: {reason}"), now);
                        return Err(error.to_string());
                    }
                    // Once a stream has been up, a refusal of another one concerns that stream only.
                    if let Some(peer) = socket.peer
                        && let link = &mut self.links[peer as usize]
                        && !link.was_up
                    {
                        let reason = format!("the hand-shake with {} failed: {error}", link.contact.describe());
                        if matches!(socket.stage, Stage::Connector(_)) {
                            link.finished = true;
                            handler.refused(&mut self.peers, peer, &reason);
                        } else if reason != link.complaint {
                            // The connector proves its identity last, so nothing that it claims before ends a join. All its
                            // streams claim the same, so it is logged once.
                            log::warn!("penstock: {reason}");
                            link.complaint = reason;
                        }
                    }
                    return Err(error.to_string());
                }
            }
        }
        if let Progress::Closed(reason) = socket.write_greeting() {
            return Err(reason);
        }
        // The socket nearly always has room: the loop would not sleep until the other side answers.
        self.watch_write(token, socket, !socket.greeting.is_empty());
        if let Some((hello, features)) = ended {
            let job = hello.as_ref().map(|hello| hello.job);
            if let Some(hello) = hello {
                self.unauthenticated -= 1;
                socket.stream = u32::from(hello.stream);
                let peer = socket.peer.expect("decided");
                // A stream that comes back before its old connection is known to be gone replaces that one.
                let old = self.links[peer as usize]
                    .sockets
                    .clone()
                    .into_iter()
                    .find(|token| self.sockets.get(token).is_some_and(|s| s.is_up() && s.stream == socket.stream));
                if let Some(old) = old
                    && let Some(socket) = self.sockets.remove(&old)
                {
                    self.closed(handler, old, socket, "it was replaced by a new connection", now);
                }
                self.links[peer as usize].sockets.push(token);
            }
            socket.stage = Stage::Up;
            socket.reader.preload(&rest);
            self.up(handler, token, socket, features, job, now)?;
            for descriptor in descriptors {
                let peer = socket.peer.expect("decided");
                handler.passed(peer, descriptor).map_err(|error| format!("it sent {error}"))?;
            }
        }
        Ok(())
    }

    /// Answers a HELLO.
    fn decide<H: Handler>(&self, handler: &H, socket: &mut Socket, hello: Hello) -> Result<(), HandshakeError> {
        let admission = if hello.to == self.settings.node { handler.admit(&hello) } else { Admission::Unauthenticated };
        let reads =
            matches!(&admission, Admission::Admit(_, peer) if socket.local && self.can_read_back(socket, *peer));
        let Stage::Acceptor(acceptor) = &mut socket.stage else { unreachable!("called for acceptors") };
        let refusal = match admission {
            Admission::Admit(secret, peer) => {
                if reads {
                    acceptor.add_features(FEATURE_READS_MEMORY);
                }
                acceptor.admit(&secret);
                socket.peer = Some(peer);
                return Ok(());
            }
            Admission::Unauthenticated => (RefusalCode::Unauthenticated, "no such job or process here".to_owned()),
            Admission::Generation(ours) => (
                RefusalCode::Generation,
                format!("generation {} of the job runs here, not {}", ours.0, hello.generation.0),
            ),
            Admission::NotYet => (RefusalCode::NotYet, "the job is not set up here yet".to_owned()),
            Admission::Lost(reason) => (RefusalCode::Lost, reason),
        };
        acceptor.refuse(refusal.0, &refusal.1);
        Err(HandshakeError::Refused { code: refusal.0 as u8, reason: refusal.1 })
    }

    /// A stream has passed its hand-shake.
    fn up<H: Handler>(
        &mut self,
        handler: &mut H,
        token: u64,
        socket: &mut Socket,
        features: u32,
        job: Option<GroupId>,
        now: Time,
    ) -> Result<(), String> {
        let peer = socket.peer.expect("hand-shaken");
        let link = &mut self.links[peer as usize];
        if link.finished {
            return Err("the peer was given up".into());
        }
        link.down_since = None;
        link.refusals = 0;
        if !link.was_up {
            link.was_up = true;
            let mut config = self.settings.peer.clone();
            config.references = socket.local && features & FEATURE_READS_MEMORY != 0;
            config.descriptors = socket.local;
            self.peers.machines[peer as usize] = Peer::new(config, now);
        }
        self.peers.machine(peer).stream_up(socket.stream, now);
        self.watch_write(token, socket, false);
        let pid = socket.wire.descriptor().filter(|_| socket.local).and_then(process_at).unwrap_or(0);
        handler.linked(&mut self.peers, peer, socket.local, pid, job);
        self.next_timers = Time(self.next_timers.0.min(now.plus(100 * MILLISECOND).0));
        if socket.reader.has_buffered() {
            self.again.push(token);
        }
        Ok(())
    }

    fn can_read_back(&self, socket: &Socket, peer: PeerId) -> bool {
        let Some(Ok(fd)) = socket.wire.descriptor().map(|fd| fd.as_fd().try_clone_to_owned()) else { return false };
        let contact = &self.links[peer as usize].contact;
        contact.memory_epoch != 0 && self.can_read(read_memory_epoch(&fd, contact), contact)
    }

    /// Handles the end of a socket.
    fn closed<H: Handler>(&mut self, handler: &mut H, token: u64, mut socket: Socket, reason: &str, now: Time) {
        if matches!(socket.stage, Stage::Acceptor(_)) {
            self.unauthenticated -= 1;
        }
        let Some(peer) = socket.peer else {
            // A member that connects before this process has read who is in its job is told to try again. That needs no line
            // for each.
            let level = if [NOT_YET, MAKES_ROOM].contains(&reason) { log::Level::Debug } else { log::Level::Warn };
            log::log!(level, "penstock: refused a connection from {}: {reason}", socket.remote);
            return;
        };
        if socket.is_up() && socket.local && reason != GONE {
            self.say_why(handler, peer, &mut socket, reason, now);
        }
        let (was_up, stream, local, attempt) = (socket.is_up(), socket.stream, socket.local, socket.attempt);
        let remote = socket.remote.clone();
        drop(socket);
        self.links[peer as usize].sockets.retain(|known| *known != token);
        if was_up {
            self.peers.machine(peer).stream_down(stream);
        }
        let link = &mut self.links[peer as usize];
        // Also while stopping: messages that the peer has not taken need a connection. A peer that was never connected is not
        // waited for.
        if link.finished || (handler.stopping() && !link.was_up) {
            return;
        }
        let none_up = self.peers.look(peer).stream_count() == 0;
        if link.said_bye {
            if none_up {
                link.finished = true;
                let reason = format!("{} has left the job", self.links[peer as usize].contact.describe());
                handler.left(&mut self.peers, peer, &reason);
            }
            return;
        }
        if local && was_up {
            // A local socket ends only with the peer's process, or because this side closes it for a reason.
            let what = match reason {
                GONE => "closed its connection: the process has died",
                reason => &format!("was cut off: {reason}"),
            };
            self.lose(handler, peer, what, now);
            return;
        }
        log::debug!("penstock: stream {stream} to {remote} closed: {reason}");
        let link = &mut self.links[peer as usize];
        if none_up && link.was_up && link.down_since.is_none() {
            link.down_since = Some(now);
            self.next_timers = Time(self.next_timers.0.min(now.plus(RECONNECT_WITHIN).0));
        }
        if !was_up && link.connects && link.was_up && none_up && reason.contains("refused") {
            // The peer's host answers, but nothing listens there any more: the process is gone.
            link.refusals += 1;
            if link.refusals >= 2 {
                self.lose(handler, peer, "closed all its connections and no longer listens: the process has died", now);
                return;
            }
        }
        let attempt = if was_up { 0 } else { attempt };
        // A local connection that was told to wait chooses its medium again at the next attempt.
        let stream = if local { FROM_THE_START } else { stream };
        self.retry(handler, peer, stream, attempt, &format!("{remote}: {reason}"), now);
    }

    /// Tells a peer why its only connection is about to be closed. Otherwise it would take this process for dead.
    fn say_why<H: Handler>(&mut self, handler: &mut H, peer: PeerId, socket: &mut Socket, reason: &str, now: Time) {
        let link = &self.links[peer as usize];
        if link.finished || link.said_bye || handler.stopping() {
            return;
        }
        // A half written frame of a group that has just failed is copied before the rest of it is written.
        self.follow_orders_with(handler, Some(socket), now);
        handler.cut_off(&mut self.peers, peer, reason);
        while socket.write_batch(&mut self.peers, handler, now) == Some(Progress::More) {}
    }

    /// Tells a peer that is given up for its silence that it was, as far as its sockets take it at once. A peer that was
    /// stopped reads this when it goes on.
    fn give_up<H: Handler>(&mut self, handler: &mut H, peer: PeerId, what: &str, now: Time) {
        let link = &self.links[peer as usize];
        if link.finished || link.said_bye {
            return;
        }
        let tokens = link.sockets.clone();
        // As in `say_why`: a peer that was given up earlier in this turn has ended its groups.
        self.follow_orders(handler, now);
        handler.cut_off(&mut self.peers, peer, &format!("it {what}"));
        for token in tokens {
            let Some(mut socket) = self.sockets.remove(&token) else { continue };
            while socket.is_up() && socket.write_batch(&mut self.peers, handler, now) == Some(Progress::More) {}
            self.sockets.insert(token, socket);
        }
    }

    /// Ends everything with a peer that cannot be reached any more.
    fn lose<H: Handler>(&mut self, handler: &mut H, peer: PeerId, what: &str, now: Time) {
        let link = &mut self.links[peer as usize];
        if std::mem::replace(&mut link.finished, true) {
            return;
        }
        let reason = format!("{} {what}", link.contact.describe());
        link.retries.clear();
        for token in std::mem::take(&mut link.sockets) {
            if let Some(socket) = self.sockets.remove(&token) {
                self.closed(handler, token, socket, "the peer is lost", now);
            }
        }
        handler.lost(&mut self.peers, peer, &reason);
    }

    // ------------------------------------------------------------------ the end

    /// Sends a good-bye to every peer that has taken all messages, or to all peers. A peer that received one accepts no new
    /// stream, so frames that the good-bye overtakes are lost with the streams. `farewells`: when each peer got it.
    fn say_bye(&mut self, farewells: &mut HashMap<PeerId, Time>, waits_for_messages: bool, now: Time) {
        for peer in 0..self.links.len() as PeerId {
            let link = &self.links[peer as usize];
            let is_due = !waits_for_messages || self.peers.look(peer).may_say_bye();
            if link.was_up && !link.finished && is_due && !farewells.contains_key(&peer) {
                self.peers.machine(peer).bye();
                farewells.insert(peer, now);
            }
        }
    }

    /// Whether every peer has left, is lost, or has acknowledged the good-bye, and has been sent all acknowledgements: a peer
    /// whose last frames are not acknowledged would take them for lost. A peer that does not acknowledge is not waited for
    /// long.
    fn has_taken_leave(&self, farewells: &HashMap<PeerId, Time>, now: Time) -> bool {
        (0..self.links.len() as PeerId).all(|peer| {
            let (link, machine) = (&self.links[peer as usize], self.peers.look(peer));
            let has_taken_it = || machine.is_quiet() && !machine.owes_acks() && self.is_flushed(link);
            let is_over = || farewells.get(&peer).is_some_and(|said| now.since(*said) >= LINGER);
            !link.was_up || link.finished || has_taken_it() || is_over()
        })
    }

    /// Whether every frame that was begun is written.
    fn is_flushed(&self, link: &Link) -> bool {
        let sockets = link.sockets.iter().filter_map(|token| self.sockets.get(token));
        sockets.filter(|socket| socket.is_up()).all(Socket::is_flushed)
    }

    /// Closes the sockets so that peers can still read what was sent: a socket that is closed with unread bytes resets the
    /// connection.
    fn half_close(&mut self) {
        let end = self.now().plus(LINGER / 4);
        for socket in self.sockets.values() {
            socket.wire.finish();
        }
        let System::Kernel { epoll, .. } = &self.system else { return self.sockets.clear() };
        while !self.sockets.is_empty() && self.now() < end {
            self.sockets.retain(|_, socket| {
                loop {
                    match socket.wire.read(&mut [IoSliceMut::new(&mut self.junk)], false, &mut Vec::new()) {
                        Ok(0) => return false,
                        Ok(_) => {}
                        Err(rustix::io::Errno::AGAIN) => return true,
                        Err(_) => return false,
                    }
                }
            });
            let timeout = rustix::time::Timespec { tv_sec: 0, tv_nsec: 2 * MILLISECOND as i64 };
            let mut buffer =
                [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
            let _ = epoll::wait(epoll, &mut buffer[..], Some(&timeout));
        }
        self.sockets.clear();
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }
}

/// Whether the process at the other end of a local socket has its memory epoch where its contact says; `None`: that process is
/// in another PID namespace.
fn read_memory_epoch(fd: &OwnedFd, contact: &Contact) -> io::Result<Option<bool>> {
    process_at(fd).map(|pid| MemoryEpoch::is_of(pid, contact.memory_epoch, &contact.node)).transpose()
}

/// The process at the other end of a local socket, as our PID namespace numbers it.
fn process_at(fd: impl AsFd) -> Option<u32> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of_val(&credentials) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
    // SAFETY: the kernel writes `length` bytes at most.
    let rc = unsafe {
        libc::getsockopt(fd.as_fd().as_raw_fd(), level, name, (&raw mut credentials).cast(), &raw mut length)
    };
    if rc == 0 { visible_process(&credentials) } else { None }
}

/// The kernel reports 0 for a process that is not visible in our PID namespace (rustix assumes that this is impossible).
fn visible_process(credentials: &libc::ucred) -> Option<u32> {
    u32::try_from(credentials.pid).ok().filter(|pid| *pid != 0)
}

/// A random even port in the kernel's range for outgoing connections, with enough ports after it for all streams.
fn first_port() -> u16 {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let mut bounds = range.split_whitespace().filter_map(|bound| bound.parse::<u16>().ok());
    let (low, high) = (bounds.next().unwrap_or(32768), bounds.next().unwrap_or(60999));
    let room = high.saturating_sub(low).saturating_sub(64 * PORT_STEP).max(1);
    (low + u16::from_le_bytes(random()) % room) & !1
}

fn tune(socket: &socket2::Socket, buffer_bytes: usize) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if buffer_bytes > 0 {
        socket.set_send_buffer_size(buffer_bytes)?;
        socket.set_recv_buffer_size(buffer_bytes)?;
    }
    Ok(())
}

fn bind_tcp(address: IpAddr, ports: std::ops::RangeInclusive<u16>) -> Result<(socket2::Socket, SocketAddr), String> {
    let mut last = None;
    for port in ports.clone() {
        let attempt = || -> io::Result<socket2::Socket> {
            let address = SocketAddr::new(address, port);
            let socket = socket2::Socket::new(
                Domain::for_address(address),
                Type::STREAM.nonblocking().cloexec(),
                Some(Protocol::TCP),
            )?;
            // A fixed port may still be in TIME_WAIT from the job before.
            socket.set_reuse_address(true)?;
            socket.bind(&address.into())?;
            socket.listen(1024)?;
            Ok(socket)
        };
        match attempt() {
            Ok(socket) => {
                let bound = socket.local_addr().ok().and_then(|a| a.as_socket());
                return Ok((socket, bound.ok_or("the kernel does not say which port it gave")?));
            }
            Err(error) => last = Some(error),
        }
    }
    let error = last.map_or_else(|| "the range is empty".to_owned(), |error| error.to_string());
    Err(format!(
        "cannot listen on {address}, ports {}-{}: {error}. Free one, or set PENSTOCK_PORT_RANGE to others",
        ports.start(),
        ports.end()
    ))
}

fn bind_local(node: &NodeKey) -> io::Result<OwnedFd> {
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM.nonblocking().cloexec(), None)?;
    socket.bind(&SockAddr::unix(Contact::local_name(node))?)?;
    socket.listen(1024)?;
    Ok(socket.into())
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
/// Linux gives `connect` the even ports and `bind` the odd ones, so neighbours are two apart.
const PORT_STEP: u16 = 2;
/// The reason of a hand-shake that is to be tried again.
const NOT_YET: &str = "the job is not set up there yet";
/// The reason why a silent connection was closed.
const MAKES_ROOM: &str = "it has said nothing, and others came";
/// Advice where a rank was given up and went on later.
const HOW_TO_STAY: &str = "if it was only stopped, or its network was down, a longer PENSTOCK_PEER_TIMEOUT helps";
/// In place of a stream in a scheduled attempt: chooses the medium to the peer again.
const FROM_THE_START: StreamId = StreamId::MAX;
/// How often to retry until a rank that reads the same contacts has joined as well and named its readers: ranks that wait for
/// the store look at it every half second at least.
const UNREAD_ATTEMPTS: u32 = 40;
const UNREAD_AGAIN: u64 = 25 * MILLISECOND;

/// Features of every stream; none yet.
const FEATURES: u32 = 0;
/// The sender can read the receiver's memory: a property of the pair, found by the hand-shake.
const FEATURE_READS_MEMORY: u32 = 1;

/// Bytes read from one stream before the others have their turn: few, so that what has arrived on all of them is still in the
/// cache.
const READ_BUDGET: usize = 256 * 1024;
/// How many incoming connections may be unauthenticated. Beyond, the oldest silent one is closed.
const MAX_UNAUTHENTICATED: usize = 256;
/// How long accepting pauses when the machine lacks descriptors or memory.
const ACCEPT_AGAIN: u64 = 100 * MILLISECOND;
/// How often a lasting shortage is logged.
const COMPLAIN_EVERY: u64 = 10 * SECOND;
const HANDSHAKE_WITHIN: u64 = 5 * SECOND;
/// A peer without a stream must be back within this time. Together with the time to notice, this is below 5 s.
const RECONNECT_WITHIN: u64 = 1500 * MILLISECOND;
const RETRY_FIRST: u64 = 10 * MILLISECOND;
const CONNECT_ATTEMPTS: u32 = 40;
/// How often a thread that always has something to send looks at its sockets; a look costs a microsecond.
const LOOK_WITHIN: u64 = MILLISECOND;
/// How long the end waits for a peer to acknowledge the good-bye.
const LINGER: u64 = 2 * SECOND;

#[cfg(test)]
mod tests {
    use super::*;

    /// The process behind a socket is known, unless it is in a PID namespace that ours does not see.
    #[test]
    fn the_process_behind_a_socket() {
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
        assert_eq!(process_at(&ours), Some(std::process::id()));
        assert_eq!(process_at(std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket")), None);
        for (pid, expected) in [(0, None), (-1, None), (7, Some(7))] {
            assert_eq!(visible_process(&libc::ucred { pid, uid: 0, gid: 0 }), expected);
        }
    }
}
