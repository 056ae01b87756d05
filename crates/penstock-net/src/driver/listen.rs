//! Sockets that listen, and the options of TCP sockets.

use super::{FIRST_LISTENER, LOCAL_LISTENER};
use crate::contact::Contact;
use crate::fds::Fd;
use crate::system::System;
use penstock_stream::handshake::NodeKey;
use penstock_types::Time;
use rustix::event::epoll;
use rustix::fd::OwnedFd;
use socket2::{Domain, Protocol, SockAddr, Type};
use std::io;
use std::net::{IpAddr, SocketAddr};

/// The sockets on which a process listens, and its incoming connections until they are authenticated.
#[derive(Default)]
pub(super) struct Listeners {
    tcp: Vec<(Fd, SocketAddr)>,
    /// The abstract UNIX socket for peers on this host.
    local: Option<Fd>,
    /// When to accept again, after a shortage of descriptors or memory.
    paused_until: Option<Time>,
    /// Incoming connections that are not authenticated yet. The process's own attempts do not count: they are as many as the
    /// job needs.
    pub(super) unauthenticated: usize,
}

impl Listeners {
    /// Listens on an address, on the first of the ports that is free.
    pub(super) fn open_tcp(
        &mut self,
        system: &System,
        address: IpAddr,
        ports: std::ops::RangeInclusive<u16>,
    ) -> Result<(), String> {
        let (socket, address) = bind_tcp(address, ports)?;
        let token = FIRST_LISTENER + self.tcp.len() as u64;
        system.add(0, &socket, token).map_err(|e| format!("cannot watch the listening socket on {address}: {e}"))?;
        self.tcp.push((Fd::new(socket.into()), address));
        Ok(())
    }

    /// Listens for peers on this host. Where the system has no such socket, this logs a warning and does nothing.
    pub(super) fn open_local(&mut self, system: &System, node: &NodeKey) -> Result<(), String> {
        match bind_local(node) {
            Ok(socket) => {
                system
                    .add(0, &socket, LOCAL_LISTENER)
                    .map_err(|e| format!("cannot watch the local listening socket: {e}"))?;
                self.local = Some(Fd::new(socket));
            }
            Err(error) => {
                log::warn!("penstock: no abstract UNIX socket ({error}): peers on this host are reached over TCP");
            }
        }
        Ok(())
    }

    /// The addresses of the TCP listeners.
    pub(super) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.tcp.iter().map(|(_, address)| *address)
    }

    /// Whether there is a socket for peers on this host.
    pub(super) fn has_local(&self) -> bool {
        self.local.is_some()
    }

    /// How many sockets listen.
    pub(super) fn len(&self) -> usize {
        self.tcp.len() + usize::from(self.has_local())
    }

    /// A TCP listener by its number, or the local one.
    pub(super) fn socket(&self, tcp: Option<usize>) -> Option<&Fd> {
        match tcp {
            Some(at) => Some(&self.tcp[at].0),
            None => self.local.as_ref(),
        }
    }

    /// Accepts nothing until then: the kernel would report a waiting connection at once, again and again.
    pub(super) fn pause(&mut self, system: &System, until: Time) {
        self.watch(system, epoll::EventFlags::empty());
        self.paused_until = Some(until);
    }

    /// Accepts again if the pause is over. Returns the end of a pause that is not over.
    pub(super) fn resume(&mut self, system: &System, now: Time) -> Option<Time> {
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
            self.watch(system, epoll::EventFlags::IN);
        }
        self.paused_until
    }

    fn watch(&self, system: &System, flags: epoll::EventFlags) {
        let tcp = (FIRST_LISTENER..).zip(self.tcp.iter().map(|(listener, _)| listener));
        for (token, listener) in tcp.chain(self.local.iter().map(|listener| (LOCAL_LISTENER, listener))) {
            if let Err(error) = system.modify(listener, token, flags) {
                log::error!("penstock: epoll_ctl failed: {error}");
            }
        }
    }
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

pub(super) fn tune(socket: &socket2::Socket, buffer_bytes: usize) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if buffer_bytes > 0 {
        socket.set_send_buffer_size(buffer_bytes)?;
        socket.set_recv_buffer_size(buffer_bytes)?;
    }
    Ok(())
}
