//! A hand-shake from its first byte to the stream that is up.

use super::neighbour::process_at;
use super::{Driver, FEATURE_READS_MEMORY};
use crate::close_reason::CloseReason;
use crate::handler::{Admission, Handler};
use crate::socket::{Progress, Socket, Stage};
use penstock_stream::handshake::{Accepted, HandshakeError, Hello, RefusalCode};
use penstock_stream::peer::Peer;
use penstock_types::{GroupId, MILLISECOND, Time};
use rustix::event::epoll;
use std::io::IoSliceMut;

impl Driver {
    /// Continues a hand-shake. An error ends the socket.
    pub(super) fn handshake<H: Handler>(
        &mut self,
        handler: &mut H,
        token: u64,
        socket: &mut Socket,
        now: Time,
    ) -> Result<(), CloseReason> {
        if let Stage::Connecting(_) = socket.stage {
            socket.wire.error().map_err(CloseReason::System)?;
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
                Ok(0) => return Err(CloseReason::ClosedInHandshake),
                Ok(count) => count,
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => break,
                Err(error) => return Err(CloseReason::System(error)),
            };
            let step = match &mut socket.stage {
                Stage::Connector(connector) => {
                    let result = connector.handle_input(&buffer[..count], &mut rest);
                    socket.greeting.extend(connector.poll_transmit());
                    if connector.is_challenged() {
                        let peer = socket.peer.expect("connectors know their peer");
                        self.connections[peer as usize].names.settle();
                    }
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
                Ok(None) if !descriptors.is_empty() => return Err(CloseReason::Descriptors),
                Ok(None) => {}
                Ok(Some(done)) => {
                    ended = Some(done);
                    break;
                }
                Err(error) => {
                    let _ = socket.write_greeting();
                    if error.is_temporary() {
                        return Err(CloseReason::NotYet);
                    }
                    if let (Some(peer), Some(reason)) = (socket.peer, error.lost())
                        && matches!(socket.stage, Stage::Connector(_))
                        && self.peers.look(peer).stream_count() == 0
                    {
                        self.lose(handler, peer, &format!("does not take this rank back: {reason}"), false, now);
                        return Err(CloseReason::Handshake(error));
                    }
                    // Once a stream has been up, a refusal of another one concerns that stream only.
                    if let Some(peer) = socket.peer
                        && let connections = &mut self.connections[peer as usize]
                        && !connections.was_up
                    {
                        let reason = format!("the hand-shake with {} failed: {error}", connections.contact.describe());
                        if matches!(socket.stage, Stage::Connector(_)) {
                            self.refuse(handler, peer, reason, now);
                        } else if connections.complaint.as_ref() != Some(&error) {
                            // The connector proves its identity last, so nothing that it claims before ends a join. All its
                            // streams claim the same, so it is logged once.
                            log::warn!("penstock: {reason}");
                            connections.complaint = Some(error.clone());
                        }
                    }
                    return Err(CloseReason::Handshake(error));
                }
            }
        }
        if let Progress::Closed(reason) = socket.write_greeting() {
            return Err(reason);
        }
        // The socket nearly always has room: the loop would not sleep until the other side answers.
        socket.watch_write(&self.system, token, !socket.greeting.is_empty());
        if let Some((hello, features)) = ended {
            let job = hello.as_ref().map(|hello| hello.job);
            if let Some(hello) = hello {
                if hello.from != self.connections[socket.peer.expect("decided") as usize].contact.node {
                    // The process has gone since, and its number is another's.
                    socket.peer = None;
                    return Err(CloseReason::PeerLost);
                }
                self.listeners.unauthenticated -= 1;
                socket.stream = u32::from(hello.stream);
                let peer = socket.peer.expect("decided");
                // A stream that comes back before its old connection is known to be gone replaces that one.
                let old = self.connections[peer as usize]
                    .sockets
                    .clone()
                    .into_iter()
                    .find(|token| self.sockets.get(token).is_some_and(|s| s.is_up() && s.stream == socket.stream));
                if let Some(old) = old
                    && let Some(socket) = self.sockets.remove(&old)
                {
                    self.closed(handler, old, socket, &CloseReason::Replaced, now);
                }
                self.connections[peer as usize].sockets.push(token);
            }
            socket.stage = Stage::Up;
            socket.reader.as_mut().expect("nobody reads yet").preload(&rest);
            self.up(handler, token, socket, features, job, now)?;
            for descriptor in descriptors {
                let peer = socket.peer.expect("decided");
                handler.passed(peer, descriptor)?;
            }
        }
        Ok(())
    }

    /// Answers a HELLO.
    pub(super) fn decide<H: Handler>(
        &self,
        handler: &H,
        socket: &mut Socket,
        hello: Hello,
    ) -> Result<(), HandshakeError> {
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
    pub(super) fn up<H: Handler>(
        &mut self,
        handler: &mut H,
        token: u64,
        socket: &mut Socket,
        features: u32,
        job: Option<GroupId>,
        now: Time,
    ) -> Result<(), CloseReason> {
        let peer = socket.peer.expect("hand-shaken");
        let connections = &mut self.connections[peer as usize];
        if connections.finished {
            return Err(CloseReason::PeerLost);
        }
        connections.down_since = None;
        connections.refusals = 0;
        if !connections.was_up {
            connections.was_up = true;
            let mut config = self.settings.peer.clone();
            config.references = socket.local && features & FEATURE_READS_MEMORY != 0;
            config.descriptors = socket.local;
            self.peers.machines[peer as usize] = Peer::new(config, now);
        }
        self.peers.machine(peer).stream_up(socket.stream, now);
        socket.watch_write(&self.system, token, false);
        self.deal(token, socket);
        let pid = socket.wire.descriptor().filter(|_| socket.local).and_then(process_at).unwrap_or(0);
        handler.connected(&mut self.peers, peer, socket.local, pid, job);
        self.schedule_timers(now.plus(100 * MILLISECOND));
        if socket.reader.as_ref().is_some_and(|reader| reader.has_buffered()) {
            self.threads.again[socket.thread].push(token);
            self.threads.wakes[socket.thread].wake();
        }
        Ok(())
    }

    /// Gives a socket to the thread that reads from the fewest.
    fn deal(&mut self, token: u64, socket: &mut Socket) {
        let mut counts = vec![0; self.threads.count()];
        for other in self.sockets.values().filter(|other| other.is_up()) {
            counts[other.thread] += 1;
        }
        let fewest = (0..counts.len()).min_by_key(|thread| counts[*thread]).expect("there is one");
        if fewest == 0 {
            return;
        }
        let moved = self
            .system
            .forget(0, &socket.wire)
            .and_then(|()| self.system.watch(fewest, &socket.wire, token, epoll::EventFlags::IN, true));
        match moved {
            Ok(()) => socket.thread = fewest,
            // It is watched by nobody, and closed as one that says nothing.
            Err(error) => log::error!("penstock: epoll_ctl failed: {error}"),
        }
    }
}
