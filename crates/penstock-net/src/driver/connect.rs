//! Connections that this process opens: the local socket of a peer on this host, or its TCP streams; and when to try again.

use super::accept::ACCEPT_AGAIN;
use super::listen::tune;
use super::names::Next;
use super::neighbour::read_memory_epoch;
use super::{Driver, FEATURE_READS_MEMORY, FEATURES, HANDSHAKE_WITHIN, random};
use crate::close_reason::CloseReason;
use crate::contact::Contact;
use crate::descriptors::is_shortage;
use crate::fds::Fd;
use crate::handler::Handler;
use crate::socket::{Socket, Stage};
use crate::system::{System, Wire};
use penstock_stream::frame::{VERSION_MAJOR, VERSION_MINOR};
use penstock_stream::handshake::{Connector, Hello};
use penstock_stream::peer::StreamId;
use penstock_types::{GroupId, MILLISECOND, PeerId, SECOND, Time};
use rustix::event::epoll;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

impl Driver {
    /// Connects to a peer in the name of a job. If that is under way in another name, this one is the next.
    pub(super) fn connect<H: Handler>(
        &mut self,
        handler: &mut H,
        peer: PeerId,
        job: GroupId,
        secret: Vec<u8>,
        now: Time,
    ) {
        let own = self.settings.node;
        let connections = &mut self.connections[peer as usize];
        // Only the process with the larger key connects, so that a pair connects once.
        connections.connects = own > connections.contact.node;
        if connections.connects
            && !connections.finished
            && connections.names.add(job, secret, |job| handler.awaits(job))
        {
            self.connect_from_the_start(handler, peer, 0, now);
        }
    }

    /// Chooses the medium to a peer, and connects.
    pub(super) fn connect_from_the_start<H: Handler>(
        &mut self,
        handler: &mut H,
        peer: PeerId,
        attempt: u32,
        now: Time,
    ) {
        if self.connections[peer as usize].finished {
            return;
        }
        if self.settings.shared_memory
            && self.connections[peer as usize].contact.memory_epoch != 0
            && self.connect_local(handler, peer, attempt, now)
        {
            return;
        }
        for stream in 0..u32::from(self.streams_to(&self.connections[peer as usize].contact)) {
            self.connect_stream(handler, peer, stream, attempt, now);
        }
    }

    /// How many TCP streams to open to a peer.
    pub(super) fn streams_to(&self, contact: &Contact) -> u16 {
        let own: Vec<IpAddr> = self.listeners.addresses().map(|address| address.ip()).collect();
        let is_here = are_of_this_host(&own, contact.tcp.iter().map(SocketAddr::ip));
        if is_here { self.settings.streams_within_host } else { self.settings.streams }
    }

    /// Tries the abstract UNIX socket: a process that answers there is on this host.
    pub(super) fn connect_local<H: Handler>(&mut self, handler: &mut H, peer: PeerId, attempt: u32, now: Time) -> bool {
        let connections = &self.connections[peer as usize];
        if connections.has_no_local {
            return false;
        }
        let node = connections.contact.node;
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
                let connections = &mut self.connections[peer as usize];
                if !std::mem::replace(&mut connections.has_no_local, true) {
                    let who = connections.contact.describe();
                    log::warn!("penstock: cannot connect to the local socket of {who} ({error}): TCP instead");
                }
                return false;
            }
        };
        let fd: OwnedFd = socket.into();
        let connections = &mut self.connections[peer as usize];
        let reads = match read_memory_epoch(&fd, &connections.contact) {
            Err(error)
                if connections.unread < UNREAD_ATTEMPTS && self.yama.may_end(&error, &connections.contact.process) =>
            {
                connections.unread += 1;
                let at = now.plus(UNREAD_AGAIN);
                connections.retries.push((FROM_THE_START, at, attempt));
                self.schedule_timers(at);
                return true;
            }
            read => self.can_read(read, &self.connections[peer as usize].contact),
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
    pub(super) fn connect_stream<H: Handler>(
        &mut self,
        handler: &mut H,
        peer: PeerId,
        stream: StreamId,
        attempt: u32,
        now: Time,
    ) {
        if self.connections[peer as usize].finished {
            return;
        }
        let contact = &self.connections[peer as usize].contact;
        let Some(remote) = contact.tcp.get(stream as usize % contact.tcp.len().max(1)).copied() else {
            let reason = format!("{} publishes no address to connect to", contact.describe());
            self.refuse(handler, peer, reason, now);
            return;
        };
        // The stream's local address: the interfaces take turns, among those of the remote's family.
        let own: Vec<IpAddr> =
            self.listeners.addresses().map(|a| a.ip()).filter(|ip| ip.is_ipv4() == remote.is_ipv4()).collect();
        let from = (!own.is_empty()).then(|| own[stream as usize % own.len()]);
        let buffer_bytes = self.settings.socket_buffer_bytes as usize;
        let connections = &self.connections[peer as usize];
        // A stream that was lost may have been on a path that carries nothing any more: the kernel chooses its next one.
        let port = if connections.lost.contains(&stream) { 0 } else { connections.ports.of(stream, attempt) };
        let attempt_connect = |port: u16| -> io::Result<Wire> {
            if let System::Played(host) = &*self.system {
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
            // Connections that ended within the last minute, of the job before this one, keep their ports from all who do not
            // share them.
            socket.set_reuse_address(port != 0)?;
            if let Err(error) = socket.bind(&SocketAddr::new(from.unwrap_or(any), port).into()) {
                return Err(if port == 0 { error } else { io::ErrorKind::AddrInUse.into() }); // whatever is wrong with the port
            }
            match socket.connect(&remote.into()) {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
                Err(error) => return Err(error),
            }
            Ok(Wire::Kernel(Fd::new(socket.into())))
        };
        let is_taken =
            |error: &io::Error| matches!(error.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable);
        let connected = match attempt_connect(port) {
            // Another socket has the port: the kernel chooses one.
            Err(error) if port != 0 && is_taken(&error) => attempt_connect(0),
            connected => connected,
        };
        match connected {
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
            Err(error) => {
                let reason = CloseReason::System(Errno::from_io_error(&error).unwrap_or(Errno::IO));
                self.retry(handler, peer, (stream, attempt), &remote.to_string(), &reason, now);
            }
        }
    }

    /// Schedules another attempt for a stream for which this process has no file descriptor at present. The attempt is not
    /// counted: the join's time-out bounds the wait.
    pub(super) fn await_descriptors(&mut self, peer: PeerId, stream: StreamId, attempt: u32, reason: &str, now: Time) {
        self.complain(&format!("cannot connect to {reason}"), now);
        self.peers.troubles[peer as usize] = Some(reason.to_owned());
        let at = now.plus(ACCEPT_AGAIN);
        self.connections[peer as usize].retries.push((stream, at, attempt));
        self.schedule_timers(at);
    }

    /// Schedules another attempt for a stream to `remote`, or gives up.
    pub(super) fn retry<H: Handler>(
        &mut self,
        handler: &mut H,
        peer: PeerId,
        (stream, attempt): (StreamId, u32),
        remote: &str,
        why: &CloseReason,
        now: Time,
    ) {
        let connections = &mut self.connections[peer as usize];
        if connections.finished || !connections.connects {
            return;
        }
        let reason = format!("{remote}: {why}");
        self.peers.troubles[peer as usize] = Some(reason.clone());
        connections.refusals = if why.is_refused() { connections.refusals + 1 } else { 0 };
        // The peer's host answers, but nothing listens there. A process listens before it says where.
        let has_died = connections.refusals >= 2;
        let none_up = self.peers.look(peer).stream_count() == 0;
        if has_died && connections.was_up && none_up {
            let what = "closed all its connections and no longer listens: the process has died";
            return self.lose(handler, peer, what, true, now);
        }
        // A peer that answers is there. How long a join waits until the peer takes part in it, its time-out says; such answers
        // leave some attempts for what else may fail.
        let is_awaited = connections.names.are_awaited(|job| handler.awaits(job));
        let may_last = *why == CloseReason::NotYet && is_awaited;
        let next = match why {
            CloseReason::NotYet if none_up => connections.names.turn_away(),
            _ => Next::Same,
        };
        let attempt = match next {
            Next::Another => attempt,
            _ if may_last && attempt >= ATTEMPTS_OF_WAITING => SLOW_ATTEMPTS,
            _ => attempt + 1,
        };
        // A peer that was never up is given longer: something on the way to it may refuse, too.
        let is_gone = has_died && none_up && attempt > REFUSED_ATTEMPTS;
        if attempt > CONNECT_ATTEMPTS || is_gone {
            log::warn!("penstock: gave up stream {stream} to {}: {reason}", connections.contact.describe());
            if none_up {
                self.lose(handler, peer, &format!("cannot be reached ({reason})"), has_died, now);
            }
            return;
        }
        let pause = RETRY_FIRST << attempt.min(SLOW_ATTEMPTS);
        let (stream, pause) = match next {
            Next::Same => (stream, pause),
            Next::Another => (FROM_THE_START, 0),
            Next::AnotherLater => (FROM_THE_START, pause),
        };
        if next != Next::Same {
            // All streams begin anew, in the other name.
            connections.retries.clear();
            for token in std::mem::take(&mut connections.sockets) {
                self.sockets.remove(&token);
            }
        }
        connections.retries.push((stream, now.plus(pause), attempt));
        self.schedule_timers(now.plus(pause));
    }

    pub(super) fn connector(&self, peer: PeerId, stream: StreamId, features: u32) -> Connector {
        let connections = &self.connections[peer as usize];
        let (job, secret) = connections.names.current();
        let hello = Hello {
            version: (VERSION_MAJOR, VERSION_MINOR),
            features,
            job: *job,
            generation: self.settings.peer.generation,
            rank: self.settings.rank,
            from: self.settings.node,
            to: connections.contact.node,
            stream: stream as u16,
            nonce: random(),
        };
        Connector::new(hello, secret)
    }

    /// Takes a connecting socket into the table.
    pub(super) fn adopt<H: Handler>(&mut self, handler: &mut H, mut socket: Socket, now: Time) {
        let token = self.token();
        let peer = socket.peer.expect("connectors know their peer");
        socket.watches_write = true;
        match self.system.watch(0, &socket.wire, token, epoll::EventFlags::IN | epoll::EventFlags::OUT, true) {
            Ok(()) => {
                self.schedule_timers(now.plus(SECOND));
                self.connections[peer as usize].sockets.push(token);
                self.sockets.insert(token, socket);
            }
            Err(error) => {
                let reason = CloseReason::System(error);
                self.retry(handler, peer, (socket.stream, socket.attempt), &socket.remote, &reason, now);
            }
        }
    }
}

/// Whether all of a peer's addresses are of this host, as far as its own ones that are listened on say.
fn are_of_this_host(own: &[IpAddr], mut theirs: impl Iterator<Item = IpAddr>) -> bool {
    theirs.all(|one| one.is_loopback() || own.contains(&one))
}

/// The local ports of the streams to a peer. The streams take neighbouring ones: networks choose a flow's path (or queue) by a hash
/// of its ports that is nearly always linear (XOR, CRC, Toeplitz). So neighbouring ports spread evenly, where random ports collide
/// (8 flows on 16 paths use 6.5 of them).
pub(super) struct LocalPorts {
    /// The kernel's range for outgoing connections.
    range: std::ops::RangeInclusive<u16>,
    /// Of stream 0 at its first attempt, rounded down to an even number. Random.
    first: u16,
}

impl LocalPorts {
    pub(super) fn choose() -> LocalPorts {
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        let mut bounds = range.split_whitespace().filter_map(|bound| bound.parse::<u16>().ok());
        let (low, high) = (bounds.next().unwrap_or(32768), bounds.next().unwrap_or(60999));
        LocalPorts {
            range: low..=high,
            first: low.saturating_add(u16::from_le_bytes(random()) % Self::room(low, high)),
        }
    }

    /// The port of a stream. At each further attempt the streams move on together, since a port that was used for a connection may
    /// be unusable for a while. A peer that has not read yet who is in the job turns all streams away: they try again soon.
    fn of(&self, stream: StreamId, attempt: u32) -> u16 {
        let (low, high) = (*self.range.start(), *self.range.end());
        let moved = u64::from(self.first - low) + u64::from(attempt) * u64::from(Self::SPAN);
        let first = low + (moved % u64::from(Self::room(low, high))) as u16;
        (first & !1).saturating_add(Self::STEP * (stream as u16 % (Self::SPAN / Self::STEP)))
    }

    /// How many ports of a range may be the first one.
    fn room(low: u16, high: u16) -> u16 {
        high.saturating_sub(low).saturating_sub(Self::SPAN).max(1)
    }

    /// Linux gives `connect` the even ports and `bind` the odd ones, so neighbours are two apart.
    const STEP: u16 = 2;
    /// Of the ports of an attempt.
    const SPAN: u16 = 64 * Self::STEP;
}

/// In place of a stream in a scheduled attempt: chooses the medium to the peer again.
pub(super) const FROM_THE_START: StreamId = StreamId::MAX;
/// How often to retry until a rank that reads the same contacts has joined as well and named its readers: ranks that wait for
/// the store look at it every half second at least.
const UNREAD_ATTEMPTS: u32 = 40;
const UNREAD_AGAIN: u64 = 25 * MILLISECOND;
const RETRY_FIRST: u64 = 10 * MILLISECOND;
const CONNECT_ATTEMPTS: u32 = 40;
/// Attempts, of which the last ones were refused: 2 s. Others may wait for this rank in other groups.
const REFUSED_ATTEMPTS: u32 = 10;
/// So many of them may be answered with "not yet" before they count anew.
const ATTEMPTS_OF_WAITING: u32 = 30;
/// After so many, attempts are as far apart as they will be.
const SLOW_ATTEMPTS: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// A peer is on this host if all of its addresses are.
    #[test]
    fn addresses_of_this_host() {
        let all = |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|text| text.parse().expect("one")).collect() };
        let own = all(&["10.0.0.1", "fe80::1"]);
        for (theirs, is_here) in [
            (&["127.0.0.1"][..], true),
            (&["::1", "10.0.0.1"], true),
            (&["fe80::1"], true),
            (&["10.0.0.2"], false),
            (&["10.0.0.1", "10.0.0.2"], false),
        ] {
            assert_eq!(are_of_this_host(&own, all(theirs).into_iter()), is_here, "{theirs:?}");
        }
    }

    /// Streams have neighbouring ports at each attempt, of the kernel's range, and other ones than at the attempts before.
    #[test]
    fn local_ports_are_neighbours_at_each_attempt() {
        for (low, high) in [(32768, 60999), (1024, 65535), (50001, 51999)] {
            for first in [low, low + 77, high - 200] {
                let ports = LocalPorts { range: low..=high, first };
                let mut seen = HashSet::new();
                for attempt in 0..10 {
                    let of: Vec<u16> = (0..64).map(|stream| ports.of(stream, attempt)).collect();
                    assert!(of.windows(2).all(|pair| pair[1] == pair[0] + 2), "{of:?}");
                    assert!(of[0] >= low - 1 && of[63] <= high, "{low}..{high}, first {first}: {of:?}");
                    assert!(
                        of.iter().all(|port| seen.insert(*port)),
                        "{low}..{high}, first {first}, attempt {attempt}"
                    );
                }
            }
        }
    }

    /// A range that is too small for all streams gives ports all the same: the kernel refuses what is in use, and chooses.
    #[test]
    fn small_ranges_of_local_ports() {
        for (low, high) in [(60000, 60003), (65530, 65535), (1, 1)] {
            let ports = LocalPorts { range: low..=high, first: low };
            for stream in 0..64 {
                let _ = ports.of(stream, u32::MAX);
            }
        }
    }
}
