//! Connections that others open, until they are authenticated; and what to do where descriptors or memory are short.

use super::listen::tune;
use super::{Driver, FEATURES, HANDSHAKE_WITHIN, random};
use crate::close_reason::CloseReason;
use crate::descriptors::{After, after_accept};
use crate::fds::Fd;
use crate::handler::Handler;
use crate::socket::{Socket, Stage};
use crate::system::{System, Wire};
use penstock_stream::handshake::Acceptor;
use penstock_types::{MILLISECOND, SECOND, Time};
use rustix::event::epoll;
use rustix::fd::OwnedFd;
use std::io;

impl Driver {
    pub(super) fn accept_tcp<H: Handler>(&mut self, handler: &mut H, listener: usize, now: Time) {
        while let System::Played(host) = &*self.system {
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

    pub(super) fn accept_local<H: Handler>(&mut self, handler: &mut H, now: Time) {
        while let Some(fd) = self.accept(handler, None, now) {
            self.accepted(handler, Wire::Kernel(Fd::new(fd)), true, "local socket".to_owned(), now);
        }
    }

    /// The next connection of a TCP listener, or of the local one.
    pub(super) fn accept<H: Handler>(
        &mut self,
        handler: &mut H,
        listener: Option<usize>,
        now: Time,
    ) -> Option<OwnedFd> {
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        loop {
            let listener = self.listeners.socket(listener)?;
            let error = match rustix::net::accept_with(listener, flags) {
                Ok(fd) => return Some(fd),
                Err(error) => io::Error::from(error),
            };
            match after_accept(&error) {
                After::Next => {}
                After::Nothing | After::End => return None,
                // A connection that has proved nothing gives its descriptor up for the new one.
                After::Later if self.evict_unauthenticated(handler, now) => {}
                After::Later => {
                    let at = now.plus(ACCEPT_AGAIN);
                    self.listeners.pause(&self.system, at);
                    self.schedule_timers(at);
                    self.complain(&format!("cannot accept connections ({error})"), now);
                    return None;
                }
            }
        }
    }

    /// Logs that the machine lacks something, at most every [`COMPLAIN_EVERY`].
    pub(super) fn complain(&mut self, what: &str, now: Time) {
        if self.complained.is_none_or(|at| now.since(at) > COMPLAIN_EVERY) {
            self.complained = Some(now);
            log::warn!(
                "penstock: {what}; trying again until it works. `ulimit -n` says how many open files are allowed, and \
                 `penstock doctor` how many a job needs"
            );
        }
    }

    pub(super) fn accepted<H: Handler>(&mut self, handler: &mut H, wire: Wire, local: bool, remote: String, now: Time) {
        if self.listeners.unauthenticated >= MAX_UNAUTHENTICATED && !self.evict_unauthenticated(handler, now) {
            log::warn!("penstock: {MAX_UNAUTHENTICATED} hand-shakes are going on; {remote} is turned away");
            return;
        }
        let acceptor = Acceptor::new(random(), FEATURES);
        let socket = Socket::new(wire, local, remote, Stage::Acceptor(acceptor), now.plus(HANDSHAKE_WITHIN));
        let token = self.token();
        match self.system.watch(0, &socket.wire, token, epoll::EventFlags::IN, true) {
            Ok(()) => {
                self.listeners.unauthenticated += 1;
                self.schedule_timers(now.plus(SECOND));
                self.sockets.insert(token, socket);
            }
            Err(error) => self.complain(&format!("cannot watch a connection from {} ({error})", socket.remote), now),
        }
    }

    /// Closes the oldest connection that has sent no HELLO, or else one that claims to be a member of a job and has not proved it
    /// for a second. Returns false if there is none: the others may be members.
    pub(super) fn evict_unauthenticated<H: Handler>(&mut self, handler: &mut H, now: Time) -> bool {
        let is_in_time = |socket: &Socket| now.plus(HANDSHAKE_WITHIN - SECOND) <= socket.deadline;
        let rank = |socket: &Socket| match socket.stage {
            Stage::Acceptor(_) if socket.peer.is_none() => Some(0),
            Stage::Acceptor(_) if !is_in_time(socket) => Some(1),
            _ => None,
        };
        let ranked = self.sockets.iter().filter_map(|(token, socket)| Some((rank(socket)?, *token)));
        let oldest = ranked.min().map(|(_, token)| token);
        let Some((token, socket)) = oldest.and_then(|token| Some((token, self.sockets.remove(&token)?))) else {
            return false;
        };
        self.closed(handler, token, socket, &CloseReason::MakesRoom, now);
        true
    }
}

/// How long accepting pauses when the machine lacks descriptors or memory.
pub(super) const ACCEPT_AGAIN: u64 = 100 * MILLISECOND;
/// How many incoming connections may be unauthenticated. Beyond, one makes room.
const MAX_UNAUTHENTICATED: usize = 256;
/// How often a lasting shortage is logged.
const COMPLAIN_EVERY: u64 = 10 * SECOND;
